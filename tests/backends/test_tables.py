"""The table stores as backends, each test with each of them: key rules, versions, durability."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockx.backends import table_requests
from blockx.errors import UsageError
from tests.backends.conftest import StorePlace
from tests.backends.harness import Io, outcome

StartIo = Callable[..., Io]


def ask(store: Io, operation: str, table: str, **params: Any) -> Any:
    return outcome(store.one(store.table(operation, table, **params)))


# ---- tables of rows ------------------------------------------------------------------------------


def test_a_row_comes_back_as_it_was_written_digit_for_digit(store: Io, place: StorePlace) -> None:
    row = {"id": "a", "big": 2**256 - 1, "float": 1.0, "int": 1, "text": "ü\n", "none": None}
    assert ask(store, "upsert_rows", "t", rows=[row], key=["id"]) is None
    assert ask(store, "get_row", "t", key={"id": "a"}) == row
    assert ask(store, "get_row", "t", key={"id": "b"}) is None
    columns, rows = place.files.query("SELECT key, row FROM t")
    assert (columns, list(rows)) == (["key", "row"], [('["a"]', json.dumps(row))])


def test_texts_that_databases_stumble_over_are_kept(store: Io) -> None:
    rows = [{"id": text, "v": text} for text in ("\0", "'", '"', "\\", "\u2028", "😀", "", "{}")]
    rows.append({"id": "deep", "v": json.loads("[" * 200 + "]" * 200)})
    ask(store, "upsert_rows", "t", rows=rows, key=["id"])
    assert ask(store, "get_rows", "t", keys=[{"id": row["id"]} for row in rows]) == rows


def test_an_upsert_replaces_the_row_of_the_same_key_and_the_last_of_equal_keys_stays(
    store: Io,
) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 1, "v": 1}, {"id": 1, "v": 2}], key=["id"])
    ask(store, "upsert_rows", "t", rows=[{"id": 2, "v": 3}])
    assert ask(store, "get_rows", "t", keys=[{"id": 2}, {"id": 3}, {"id": 1}]) == [
        {"id": 2, "v": 3},
        None,
        {"id": 1, "v": 2},
    ]


def test_1_and_1_0_and_true_and_text_are_four_keys(store: Io) -> None:
    values = [1, 1.0, True, "1", None]
    ask(
        store,
        "upsert_rows",
        "t",
        rows=[{"id": v, "n": n} for n, v in enumerate(values)],
        key=["id"],
    )
    rows = ask(store, "get_rows", "t", keys=[{"id": v} for v in values])
    assert [row["n"] for row in rows] == [0, 1, 2, 3, 4]


def test_the_order_of_key_fields_does_not_matter(store: Io) -> None:
    ask(store, "upsert_rows", "t", rows=[{"b": 2, "a": 1}], key=["b", "a"])
    assert ask(store, "get_row", "t", key={"a": 1, "b": 2}) == {"b": 2, "a": 1}
    assert ask(store, "upsert_rows", "t", rows=[{"a": 3, "b": 4}], key=["a", "b"]) is None


def test_deleted_rows_are_gone_and_missing_ones_are_fine(store: Io) -> None:
    assert ask(store, "delete_rows", "t", keys=[{"id": 1}]) is None
    ask(store, "upsert_rows", "t", rows=[{"id": 1}, {"id": 2}], key=["id"])
    assert ask(store, "delete_rows", "t", keys=[{"id": 1}, {"id": 3}]) is None
    assert ask(store, "get_rows", "t", keys=[{"id": 1}, {"id": 2}]) == [None, {"id": 2}]


# ---- who declares the key ------------------------------------------------------------------------


def test_an_upsert_before_the_key_is_known_says_how_to_declare_it(store: Io) -> None:
    assert ask(store, "upsert_rows", "t", rows=[{"id": 1}]) == (
        "io_error",
        "table t is new and its key is not known: write Table('t', key=[…]), or "
        "backends.blockdb.tables.t.key in config.yaml, or load it with --key",
    )


def test_the_fields_of_the_first_get_row_declare_the_key(store: Io) -> None:
    assert ask(store, "get_row", "t", key={"id": 1}) is None
    assert ask(store, "upsert_rows", "t", rows=[{"id": 1, "v": 2}]) is None
    assert ask(store, "get_row", "t", key={"id": 1}) == {"id": 1, "v": 2}


def test_tables_that_were_only_ever_read_are_forgotten_at_some_point(
    store: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_requests, "FIRST_READS_MAX", 2)
    for name in ("t1", "t2", "t3"):
        assert ask(store, "get_row", name, key={"id": 1}) is None
    outcomes = [ask(store, "upsert_rows", name, rows=[{"id": 1}]) for name in ("t1", "t2", "t3")]
    assert [outcome is None for outcome in outcomes] == [False, True, True]


def test_the_configuration_declares_the_key(io: StartIo, place: StorePlace) -> None:
    store = io(blockdb={**place.blockdb, "tables": {"t": {"key": ["id"]}}})
    assert ask(store, "upsert_rows", "t", rows=[{"id": 1, "v": 2}]) is None
    assert ask(store, "get_row", "t", key={"v": 2}) == (
        "io_error",
        "table t has the key id; the key given has v",
    )


def test_another_key_than_the_stores_is_refused_wherever_it_is_declared(
    io: StartIo, store: Io, place: StorePlace
) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    message = "table t has the key id in the store, but v is declared for it"
    assert ask(store, "upsert_rows", "t", rows=[{"v": 1}], key=["v"]) == ("io_error", message)
    assert ask(store, "get_row", "t", key={"v": 1}, declared_key=["v"]) == ("io_error", message)
    store.stop()
    with pytest.raises(
        UsageError, match=r"backends\.blockdb\.tables\.t: its key in .* is id, not v"
    ):
        io(blockdb={**place.blockdb, "tables": {"t": {"key": ["v"]}}})


def test_the_key_is_kept_in_the_store(io: StartIo, store: Io, place: StorePlace) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 1, "v": 2}], key=["id"])
    store.stop()
    again = io(blockdb=place.blockdb)
    assert ask(again, "upsert_rows", "t", rows=[{"id": 2, "v": 3}]) is None
    assert ask(again, "get_row", "t", key={"v": 2}) == (
        "io_error",
        "table t has the key id; the key given has v",
    )


# ---- versions ------------------------------------------------------------------------------------


def test_a_state_is_the_newest_version_at_or_below_a_block(store: Io) -> None:
    states = [{"key": {"p": "x"}, "block": b, "state": {"v": b}} for b in (4, 160, 100)]
    assert ask(store, "upsert_states", "s", rows=states) is None
    replies = store.ask(
        *[store.table("get_state", "s", key={"p": "x"}, block=b) for b in (3, 4, 99, 100, 10**9)]
    )
    found = [outcome(reply) for reply in replies]
    assert found == [None, {"v": 4}, {"v": 4}, {"v": 100}, {"v": 160}]
    assert ask(store, "get_state", "s", key={"p": "y"}, block=5) is None


def test_a_table_is_used_as_the_kind_that_it_is(store: Io) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    ask(store, "upsert_states", "s", rows=[{"key": {"id": 1}, "block": 1, "state": {}}])
    assert ask(store, "get_state", "t", key={"id": 1}, block=1) == (
        "io_error",
        "table t is a Table, not a BlockTable",
    )
    assert ask(store, "upsert_rows", "s", rows=[{"id": 1}], key=["id"]) == (
        "io_error",
        "table s is a BlockTable, not a Table",
    )


# ---- wrong requests ------------------------------------------------------------------------------


NAME_RULE = (
    " cannot be a table's name: letters, digits, `_`, `.` and `-` (128 at most), a letter or `_` "
    "first, and not beginning with sqlite_ or blockx_"
)


@pytest.mark.parametrize(
    ("operation", "table", "params", "message"),
    [
        (
            "get_row",
            "t",
            {"key": 5},
            "table t: a key is an object with at least one field, not a number",
        ),
        (
            "get_state",
            "t",
            {"key": {"a": 1}, "block": -1},
            "table t: a block is a whole number from 0 to 2^63 - 1, not -1",
        ),
        (
            "get_row_at",
            "t",
            {"key": {"a": 1}, "at": "soon"},
            "table t: `at` is a number or RFC 3339 text, not soon",
        ),
        (
            "upsert_rows",
            "t",
            {"rows": [{"b": 1}], "key": ["a"]},
            "table t: a row lacks a, which belongs to its key a",
        ),
        (
            "upsert_rows",
            "t",
            {"rows": [{"a": [1]}], "key": ["a"]},
            "table t: a key value is text, a number, true, false or null, not an array",
        ),
        (
            "drop",
            "t",
            {},
            "blockdb has no operation 'drop'; there are: get_row, get_rows, get_state, get_row_at, "
            "get_history, get_history_at, scan, upsert_rows, upsert_states, upsert_rows_at, delete_rows",
        ),
        ("get_row", "sqlite_x", {"key": {"a": 1}}, f"'sqlite_x'{NAME_RULE}"),
        ("get_row", 'x"; DROP', {"key": {"a": 1}}, f"""'x"; DROP'{NAME_RULE}"""),
    ],
)
def test_a_wrong_request_is_refused(
    store: Io, operation: str, table: str, params: dict[str, Any], message: str
) -> None:
    assert ask(store, operation, table, **params) == ("io_error", message)


def test_names_that_differ_only_in_case_are_refused(store: Io) -> None:
    ask(store, "upsert_rows", "Pools", rows=[{"id": 1}], key=["id"])
    assert ask(store, "upsert_rows", "pools", rows=[{"id": 1}], key=["id"]) == (
        "io_error",
        "tables pools and Pools differ only in upper and lower case; rename one",
    )


# ---- groups --------------------------------------------------------------------------------------


def test_a_wrong_request_of_a_group_fails_alone_and_changes_nothing(store: Io) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 0}], key=["id"])
    replies = store.ask(
        store.table("upsert_rows", "t", rows=[{"id": 1}]),
        store.table("upsert_rows", "t", rows=[{"id": 2}, {"no": 3}]),
        store.table("upsert_rows", "t", rows=[{"id": 4}]),
    )
    assert [reply.error is None for reply in replies] == [True, False, True]
    rows = ask(store, "get_rows", "t", keys=[{"id": n} for n in range(5)])
    assert rows == [{"id": 0}, {"id": 1}, None, None, {"id": 4}]


def test_a_request_that_made_a_table_and_then_failed_leaves_no_table(store: Io) -> None:
    ask(store, "upsert_rows", "t", rows=[{"no": 1}], key=["id"])
    kind, message = ask(store, "upsert_rows", "t", rows=[{"id": 1}])
    assert kind == "io_error"
    assert message.startswith("table t is new and its key is not known")


def test_a_row_that_would_break_a_line_is_refused(store: Io) -> None:
    params = b'{"table":"t","key":["id"],"rows":[{"id":1,\n"v":2}]}'
    reply = store.one(store.request("blockdb", "upsert_rows", params))
    assert outcome(reply)[0] == "malformed"


def test_an_answer_too_long_for_a_frame_fails_that_read(
    store: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_requests, "RESULT_BYTES_MAX", 50)
    ask(store, "upsert_rows", "t", rows=[{"id": 1}, {"id": 2, "text": "x" * 99}], key=["id"])
    replies = store.ask(*[store.table("get_row", "t", key={"id": n}) for n in (1, 2)])
    assert [outcome(reply) for reply in replies] == [
        {"id": 1},
        (
            "io_error",
            "get_row of table t: an answer of more than 50 bytes; ask for fewer rows at once",
        ),
    ]


@pytest.mark.parametrize("coalesce", [True, False])
def test_many_reads_and_writes_at_once_are_all_answered(
    io: StartIo, place: StorePlace, coalesce: bool
) -> None:
    store = io(blockdb={**place.blockdb, "coalesce": coalesce})
    ask(store, "upsert_rows", "t", rows=[{"id": -1}], key=["id"])
    store.ask(*[store.table("upsert_rows", "t", rows=[{"id": n, "v": n}]) for n in range(300)])
    replies = store.ask(*[store.table("get_row", "t", key={"id": n}) for n in range(300)])
    assert [outcome(reply)["v"] for reply in replies] == list(range(300))


def test_a_write_of_a_cancelled_call_is_not_started(store: Io) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 0}], key=["id"])
    first = store.table("upsert_rows", "t", rows=[{"id": 1}])
    second = store.table("upsert_rows", "t", rows=[{"id": 2}])
    # One action of the inbox, so that the second write is queued behind the first when it is cancelled.
    backend = store.service._backends_now["blockdb"]

    def submit_and_cancel() -> None:
        store.service._accept([first, second])
        backend.cancel(second.call_id)

    store.service._post(submit_and_cancel)
    replies = store.replies_to(first, second)
    assert [reply.error and reply.error.kind for reply in replies] == [None, "cancelled"]
    ask(store, "upsert_rows", "t", rows=[{"id": 3}])
    assert ask(store, "get_rows", "t", keys=[{"id": 1}, {"id": 2}]) == [{"id": 1}, None]


# ---- other processes ----------------------------------------------------------------------------


def test_what_another_process_writes_is_seen(store: Io, place: StorePlace, tmp_path: Path) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    assert ask(store, "get_row", "u", key={"id": 7}) is None
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": 7, "v": 8}\n')
    place.files.load("u", rows, "table", ["id"])
    assert ask(store, "get_row", "u", key={"id": 7}) == {"id": 7, "v": 8}


WRITER = """
import json
import sys
import threading
import time
from pathlib import Path
from tests.backends.harness import Io
store = Io(Path(), {"blockdb": json.loads(sys.argv[1])})
store.one(store.table("upsert_rows", "t", rows=[{"id": -1}], key=["id"]))
for n in range(10**9):
    writes = [store.table("upsert_rows", "t", rows=[{"id": 8 * n + i}, {"id": -(8 * n + i) - 2}]) for i in range(8)]
    for reply in store.ask(*writes):
        assert reply.error is None
    print(8 * n + 7, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 20, 50])
def test_nothing_acknowledged_is_lost_or_half_there_when_the_process_is_killed(
    io: StartIo, place: StorePlace, lines: int
) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, json.dumps(place.blockdb)],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        for _ in range(lines):
            acknowledged = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        acknowledged = max([acknowledged, *map(int, process.stdout.read().split())])
    store = io(blockdb=place.blockdb)
    ids = range(acknowledged + 100)
    there = ask(store, "get_rows", "t", keys=[{"id": n} for n in ids])
    partners = ask(store, "get_rows", "t", keys=[{"id": -n - 2} for n in ids])
    assert None not in there[: acknowledged + 1]
    assert [row is None for row in there] == [row is None for row in partners]
