"""A call list becomes calls, line by line; bad lines harm nobody but themselves."""

import hashlib
import json

import pytest

from blockx.config import StreamBuildConfig
from blockx.dispatcher.model import CallSpec
from blockx.errors import UsageError
from blockx.jobs import call_list
from blockx.jobs.call_list import CallListSource, RejectedCall
from blockx.jobs.sources import jsonl, registry
from blockx.jobs.sources.base import Place

SOURCE = "def _(*args):\n    return {}\n"
DIGEST = hashlib.sha256(SOURCE.encode()).hexdigest().encode()


def read(folder, content=None, *, calls=None, function="f", rows_max=100, args_bytes_max=10_000):
    """All calls of a list, each as (index, function, args) or (index, function, args, kind, message)."""
    name = "calls.jsonl" if content is not None else calls
    if content is not None:
        folder.write("calls.jsonl", content)
    limits = StreamBuildConfig(batch_max_rows=rows_max, batch_max_args_bytes=args_bytes_max)
    source = open_list(folder, name, function, limits)
    batches = []
    while (batch := source.next_batch()) is not None:
        everything = sorted([*batch.calls, *batch.rejected], key=lambda call: call.index)
        assert [call.index for call in everything] == list(
            range(batch.first_index, batch.first_index + batch.count)
        )
        batches.append([plain(call) for call in everything])
    source.close()
    return batches


def open_list(folder, calls, function="f", limits=None):
    loaded = folder.loaded({"name": "j", "function": function, "calls": calls})
    job = loaded.config.jobs[0]
    source = registry.open_source(job, Place("j", loaded.resolve))
    return CallListSource(source, job.function, folder.view(), limits or StreamBuildConfig())


def plain(call: CallSpec | RejectedCall):
    if isinstance(call, CallSpec):
        return call.index, call.function.function_id, call.args
    return call.index, call.function_id, call.args, str(call.error.kind), call.error.message


BIG = b"115792089237316195423570985008687907853269984665640564039457584007913129639935"


@pytest.mark.parametrize(
    ("line", "args"),
    [
        (b'{"function": "f", "args": [1, 2]}', b"[1, 2]"),
        (b'{"args": 7, "call_id": "old/3", "error": {"kind": "x"}}', b"[7]"),
        (b'{"args": null}', b"[null]"),
        (b'{"args": {"a": 1}}', b'[{"a": 1}]'),
        (b'{"a": 1}', b'[{"a": 1}]'),
        (b'{"function": "f"}', b'[{"function": "f"}]'),
        (b"[1, [2]]", b"[1, [2]]"),
        (b" 5 ", b"[5]"),
        (b'"text"', b'["text"]'),
        (b"[" + BIG + b", 1.50, 1e3]", b"[" + BIG + b", 1.50, 1e3]"),
        (b'{"args": [1,\r2]}\r', b"[1, 2]"),
        ('["a\u2028b"]'.encode(), '["a\u2028b"]'.encode()),
    ],
)
def test_arguments_are_the_bytes_of_the_line(folder, line, args):
    assert read(folder, line + b"\n") == [[(0, "f", args)]]


def test_equal_arguments_have_equal_keys_and_other_types_have_not(folder):
    folder.write("c", '{"args":[{"a":1,"b":2}]}\n[{"b": 2, "a": 1}]\n[1]\n[1.0]\n[true]\n')
    source = open_list(folder, "c")
    batch = source.next_batch()
    source.close()
    keys = [call.key for call in batch.calls]
    assert keys[0] == keys[1] == DIGEST + b'[{"a":1,"b":2}]'
    assert len(set(keys)) == 4


def test_a_digest_tells_function_and_arguments_and_stands_in_list_order(folder):
    """The journal keeps it: it is the same in every version that reads the same journals."""
    folder.write("c", '[1]\n{"function": "gone", "args": [2]}\n{"args":\n[1]\n[2]\n')
    source = open_list(folder, "c")
    digests = call_list.digests_of(source.next_batch())
    source.close()
    expected = [b"f\0[1]", b"gone\0[2]", b"f\0", b"f\0[1]", b"f\0[2]"]
    assert digests == b"".join(
        hashlib.blake2b(content, digest_size=call_list.DIGEST_BYTES).digest()
        for content in expected
    )


def test_blank_lines_and_a_byte_order_mark_are_no_calls(folder):
    content = b"\xef\xbb\xbf1\n\n  \t \n\r\n2"
    assert read(folder, content) == [[(0, "f", b"[1]"), (1, "f", b"[2]")]]


@pytest.mark.parametrize("content", [b"", b"\n", b"\xef\xbb\xbf", b" \n \n"])
def test_an_empty_list_has_no_calls(folder, content):
    assert read(folder, content) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"args": [1,]}', "calls.jsonl:2: JSON is malformed: trailing comma in array (byte 12)"),
        (b"[1", "calls.jsonl:2: Input data was truncated"),
        (b'["\xff"]', "calls.jsonl:2: not UTF-8 at byte 3: invalid start byte"),
        (
            b'{"function": 3, "args": 1}',
            "calls.jsonl:2: expected the name of a function as text, got 3",
        ),
        (
            b'{"function": "", "args": 1}',
            'calls.jsonl:2: expected the name of a function as text, got ""',
        ),
    ],
)
def test_a_malformed_line_is_one_failed_call_with_its_place(folder, line, message):
    [[before, bad, after]] = read(folder, b"1\n" + line + b"\n2\n")
    assert (before, after) == ((0, "f", b"[1]"), (2, "f", b"[2]"))
    assert bad[0] == 1
    assert bad[2:] == (None, "invalid_call", message)


@pytest.mark.parametrize(
    "line", [b'["a\rb"]', b"[1e400]", b"[" + b"9" * 5_000 + b"]", b"nul", b"1 2"]
)
def test_what_is_no_exact_json_is_refused_and_its_neighbours_are_not(folder, line):
    [[before, bad, after]] = read(folder, b"1\n" + line + b"\n2\n")
    assert (before, after) == ((0, "f", b"[1]"), (2, "f", b"[2]"))
    assert bad[2:4] == (None, "invalid_call")


def test_an_overlong_line_is_skipped_without_being_held(folder, monkeypatch):
    monkeypatch.setattr(jsonl, "LINE_BYTES_MAX", 20)
    content = b"1\n" + b"[" + b" " * 3_000_000 + b"]\n2\n" + b"3" * 20 + b"\n" + b"4" * 21
    [[one, bad, two, exact, end]] = read(folder, content)
    assert bad == (1, "f", None, "invalid_call", "calls.jsonl:2: a line of more than 20 bytes")
    assert (one, two, exact) == (
        (0, "f", b"[1]"),
        (2, "f", b"[2]"),
        (3, "f", b"[" + b"3" * 20 + b"]"),
    )
    assert end[4] == "calls.jsonl:5: a line of more than 20 bytes"


def test_arguments_that_fit_no_frame_fail_their_call(folder, monkeypatch):
    monkeypatch.setattr(call_list, "ARGS_BYTES_MAX", 10)
    [[good, bad]] = read(folder, b"[12345678]\n[123456789]\n")
    assert good == (0, "f", b"[12345678]")
    message = "calls.jsonl:2: arguments of 11 bytes, at most 10 can be passed"
    assert bad == (1, "f", b"[123456789]", "invalid_call", message)


def test_a_missing_function_and_one_that_does_not_compile_fail_their_calls(folder):
    folder.add_function("holder_balance", SOURCE)
    folder.add_function("broken", "def _(:\n")
    lines = [{"function": n, "args": 1} for n in ("holder_balanc", "broken", "broken", "f")]
    [[missing, broken, again, good]] = read(folder, "".join(json.dumps(n) + "\n" for n in lines))
    message = "no function 'holder_balanc'; did you mean holder_balance?"
    assert missing == (0, "holder_balanc", b"[1]", "function_not_found", message)
    assert broken[:4] == (1, "broken", b"[1]", "load_error")
    assert "line 1" in broken[4]
    assert again[1:] == broken[1:]
    assert good == (3, "f", b"[1]")


def test_without_a_default_function_a_line_must_name_one(folder):
    [[bare, none, good]] = read(
        folder, b'[1]\n{"args": 1}\n{"function": "f", "args": 1}\n', function=""
    )
    assert bare[2:] == (
        None,
        "invalid_call",
        'calls.jsonl:1: expected {"function": "...", "args": ...}, got [1];'
        " a bare argument needs the job's key function",
    )
    assert none[3:] == (
        "invalid_call",
        "calls.jsonl:2: expected the name of a function as text, got none",
    )
    assert good == (2, "f", b"[1]")


def test_inline_calls_follow_the_same_law(folder):
    [[big, named, text]] = read(
        folder, calls=[[2**256 - 1], {"function": "f", "args": {"a": 1}}, "0x12"]
    )
    assert big == (0, "f", b"[" + BIG + b"]")
    assert named == (1, "f", b'[{"a":1}]')
    assert text == (2, "f", b'["0x12"]')


def test_stream_batches_are_bounded_by_rows_and_by_bytes(folder):
    sizes = [len(batch) for batch in read(folder, b"1\n" * 7, rows_max=3)]
    assert sizes == [3, 3, 1]
    content = b"".join(b'"%b"\n' % (b"x" * 96) for _ in range(5))
    assert [len(batch) for batch in read(folder, content, args_bytes_max=200)] == [2, 2, 1]
    assert [len(batch) for batch in read(folder, b"[\n" * 5, args_bytes_max=3)] == [3, 2]


def test_the_first_batch_is_short_so_that_executors_begin_while_the_next_is_read(folder):
    sizes = [len(batch) for batch in read(folder, b"1\n" * 2_000, rows_max=1_000)]
    assert sizes == [512, 1_000, 488]


def test_a_list_that_cannot_be_opened_is_the_users_mistake(folder):
    with pytest.raises(
        UsageError, match=r"none\.jsonl: the call list cannot be opened: No such file"
    ):
        open_list(folder, "none.jsonl")
