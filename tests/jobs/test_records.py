"""Files get their names when they are whole; user text of any kind ends as exact JSON."""

import json

import pytest

from blockx.dispatcher.model import CallError, CallResult, Costs, Via
from blockx.errors import ErrorKind, UsageError
from blockx.jobs.output_file import JobFailedError, OutputFile, check_writable
from blockx.jobs.records import JobSinks

JOB = {"name": 'j"ü', "calls": [], "results": "r.jsonl", "output": "o.jsonl", "failures": "f.jsonl"}


def failed(error, **fields):
    base = {"index": 7, "call_id": "j/7", "function_id": "f", "output": None, "error": error}
    rest = {"via": Via.RAN, "attempts": 3, "moves": 1, "costs": Costs(), "output_tail": ""}
    return CallResult(**{**base, **rest, **fields})


def encode(folder, result, args=b"[1]"):
    loaded = folder.loaded(JOB)
    sinks = JobSinks(loaded.config.jobs[0], loaded)
    record = sinks.encode(result, args)
    sinks.discard()
    return record


def test_texts_of_a_failure_may_be_anything(folder):
    error = CallError(
        ErrorKind.USER_ERROR, 'a "quote"\n\ud800', stack="ü\u2028", local_vars={"\ud800": "\x00"}
    )
    line, rows, failure = encode(
        folder, failed(error, output_tail="printed"), b'["' + b"x" * 9_000 + b'"]'
    )
    assert (rows, line.count(b"\n"), failure.count(b"\n")) == (b"", 1, 1)
    record = json.loads(line)
    assert record["call_id"] == 'j"ü/7'
    assert record["error"] == {
        "kind": "user_error",
        "message": 'a "quote"\n?',
        "stack": "ü\u2028",
        "locals": {"?": "\x00"},
        "args": '["' + "x" * 495 + "...",
        "output_tail": "printed",
    }
    again = json.loads(failure)
    assert again["args"] == ["x" * 9_000]
    assert again["error"] == record["error"]


def test_cached_says_that_the_task_had_the_answer(folder):
    for via, cached in ((Via.CACHED, True), (Via.SINGLEFLIGHT, False), (Via.RAN, False)):
        line, _, _ = encode(folder, failed(None, output=b"1", via=via))
        assert json.loads(line)["cached"] is cached


def test_an_output_that_is_not_wanted_costs_nothing(folder):
    loaded = folder.loaded({"name": "j", "calls": []})
    sinks = JobSinks(loaded.config.jobs[0], loaded)
    assert sinks.encode(failed(None, output=b"{}"), None) == (b"", b"", b"")
    assert sinks.encode(failed(CallError(ErrorKind.USER_ERROR, "")), b"[]") == (b"", b"", b"")
    sinks.publish()
    assert folder.files() == []


def test_a_link_stays_a_link_and_its_target_gets_the_content(tmp_path):
    target = tmp_path / "disk" / "out.jsonl"
    target.parent.mkdir()
    (tmp_path / "out.jsonl").symlink_to(target)
    file = OutputFile(tmp_path / "out.jsonl")
    file.write(b"1\n")
    assert [entry.name for entry in target.parent.iterdir()] == ["out.jsonl.partial"]
    file.flush_to_disk()
    file.rename()
    assert (tmp_path / "out.jsonl").is_symlink()
    assert target.read_bytes() == b"1\n"
    assert [entry.name for entry in target.parent.iterdir()] == ["out.jsonl"]


def test_what_an_earlier_run_left_stays_until_the_new_file_is_whole(tmp_path):
    (tmp_path / "out.jsonl").write_text("old")
    (tmp_path / "out.jsonl.partial").write_text("of a killed run")
    file = OutputFile(tmp_path / "out.jsonl")
    file.write(b"new")
    assert (tmp_path / "out.jsonl").read_text() == "old"
    file.discard()
    file.discard()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]
    assert (tmp_path / "out.jsonl").read_text() == "old"


def test_all_or_nothing_is_opened(folder):
    folder.write("plain", "")
    loaded = folder.loaded({**JOB, "failures": "plain/f.jsonl"})
    with pytest.raises(JobFailedError, match=r"plain/f\.jsonl: cannot be written"):
        JobSinks(loaded.config.jobs[0], loaded)
    assert folder.files() == ["plain"]


def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text("old")
    (tmp_path / "a.jsonl.partial").write_text("kept")
    check_writable(tmp_path / "a.jsonl")
    check_writable(tmp_path / "new" / "b.jsonl")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a.jsonl", "a.jsonl.partial", "new"]
    assert (tmp_path / "a.jsonl.partial").read_text() == "kept"
    with pytest.raises(
        UsageError, match="new: cannot be written: it is a folder; name a file in it"
    ):
        check_writable(tmp_path / "new")
