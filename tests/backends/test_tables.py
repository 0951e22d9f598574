"""The table store as a backend: key rules, versions, durability, faults of the file."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockx.backends import tables
from blockx.errors import UsageError
from tests.backends.harness import Io, outcome

StartIo = Callable[..., Io]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "store.sqlite"


@pytest.fixture
def store(io: StartIo, path: Path) -> Io:
    return io(blockdb={"path": str(path)})


def ask(store: Io, operation: str, table: str, **params: Any) -> Any:
    return outcome(store.one(store.table(operation, table, **params)))


# ---- tables of rows ------------------------------------------------------------------------------


def test_a_row_comes_back_as_it_was_written_digit_for_digit(store: Io, path: Path) -> None:
    row = {"id": "a", "big": 2**256 - 1, "float": 1.0, "int": 1, "text": "ü\n", "none": None}
    assert ask(store, "upsert_rows", "t", rows=[row], key=["id"]) is None
    assert ask(store, "get_row", "t", key={"id": "a"}) == row
    assert ask(store, "get_row", "t", key={"id": "b"}) is None
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT key, row FROM t").fetchall() == [('["a"]', json.dumps(row))]
    db.close()


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


def test_an_upsert_before_the_key_is_known_says_how_to_declare_it(store: Io, path: Path) -> None:
    assert ask(store, "upsert_rows", "t", rows=[{"id": 1}]) == (
        "io_error",
        "table t is new and its key is not known: write Table('t', key=[…]), or "
        "backends.blockdb.tables.t.key in config.yaml, or load it with --key",
    )


def test_the_fields_of_the_first_get_row_declare_the_key(store: Io) -> None:
    assert ask(store, "get_row", "t", key={"id": 1}) is None
    assert ask(store, "upsert_rows", "t", rows=[{"id": 1, "v": 2}]) is None
    assert ask(store, "get_row", "t", key={"id": 1}) == {"id": 1, "v": 2}


def test_the_configuration_declares_the_key(io: StartIo, path: Path) -> None:
    store = io(blockdb={"path": str(path), "tables": {"t": {"key": ["id"]}}})
    assert ask(store, "upsert_rows", "t", rows=[{"id": 1, "v": 2}]) is None
    assert ask(store, "get_row", "t", key={"v": 2}) == (
        "io_error",
        "table t has the key id; the key given has v",
    )


def test_another_key_than_the_stores_is_refused_wherever_it_is_declared(
    io: StartIo, store: Io, path: Path
) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    message = "table t has the key id in the store, but v is declared for it"
    assert ask(store, "upsert_rows", "t", rows=[{"v": 1}], key=["v"]) == ("io_error", message)
    assert ask(store, "get_row", "t", key={"v": 1}, declared_key=["v"]) == ("io_error", message)
    store.stop()
    with pytest.raises(
        UsageError, match=r"backends\.blockdb\.tables\.t: its key in .* is id, not v"
    ):
        io(blockdb={"path": str(path), "tables": {"t": {"key": ["v"]}}})


def test_the_key_is_kept_in_the_file(io: StartIo, store: Io, path: Path) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 1, "v": 2}], key=["id"])
    store.stop()
    again = io(blockdb={"path": str(path)})
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
    monkeypatch.setattr(tables, "RESULT_BYTES_MAX", 50)
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
    io: StartIo, path: Path, coalesce: bool
) -> None:
    store = io(blockdb={"path": str(path), "coalesce": coalesce})
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


# ---- the file ------------------------------------------------------------------------------------


def test_a_file_that_does_not_exist_is_made_by_the_first_write_alone(store: Io, path: Path) -> None:
    assert ask(store, "get_row", "t", key={"id": 1}) is None
    assert not path.exists()
    ask(store, "upsert_rows", "t", rows=[{"id": 1}])
    assert path.exists()


def test_what_another_process_writes_is_seen(store: Io, path: Path, tmp_path: Path) -> None:
    from blockx.backends import table_files

    ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    assert ask(store, "get_row", "u", key={"id": 7}) is None
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": 7, "v": 8}\n')
    table_files.load(path, "u", rows, "table", ["id"])
    assert ask(store, "get_row", "u", key={"id": 7}) == {"id": 7, "v": 8}


def test_a_file_that_is_no_database_stops_the_start(io: StartIo, tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_bytes(b"no database " * 100)
    with pytest.raises(UsageError) as caught:
        io(blockdb={"path": "x.sqlite"})
    assert str(caught.value) == (
        f"backends.blockdb.path: table store {tmp_path}/x.sqlite: the file is no SQLite database"
    )


def test_a_database_of_somebody_else_is_left_alone(io: StartIo, tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "x.sqlite")
    db.execute("CREATE TABLE mine(a)")
    db.close()
    with pytest.raises(UsageError, match="but not a table store of this version of blockx"):
        io(blockdb={"path": "x.sqlite"})


def test_a_damaged_file_fails_the_read_clearly(io: StartIo, store: Io, path: Path) -> None:
    rows = [{"id": n, "text": "x" * 500} for n in range(200)]
    ask(store, "upsert_rows", "t", rows=rows, key=["id"])
    store.stop()
    body = bytearray(path.read_bytes())
    body[3 * 4096 :] = b"\xff" * (len(body) - 3 * 4096)
    path.write_bytes(body)
    damaged = io(blockdb={"path": str(path)})
    assert ask(damaged, "get_row", "t", key={"id": 100}) == (
        "io_error",
        f"table store {path}: the file is damaged; restore a copy, or save what can be read with "
        "`sqlite3 FILE .recover`",
    )


@pytest.mark.slow
def test_a_locked_file_is_waited_for_and_then_unavailable(
    io: StartIo, store: Io, path: Path
) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    store.stop()
    hasty = io(blockdb={"path": str(path)}, run={"io_wait_max_ms": 1})
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert ask(hasty, "upsert_rows", "t", rows=[{"id": 2}]) == (
        "unavailable",
        f"table store {path}: it is locked by another process",
    )
    assert ask(hasty, "get_row", "t", key={"id": 1}) == {"id": 1}, "a writer does not stop readers"
    other.execute("COMMIT")
    other.close()
    assert ask(hasty, "upsert_rows", "t", rows=[{"id": 2}]) is None


def test_a_write_goes_on_when_the_lock_is_gone(
    store: Io, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "WRITER_BUSY_MS", 1)
    ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    write = store.table("upsert_rows", "t", rows=[{"id": 2}])
    store.service.submit([write])
    writer, give_up = store.service._backends_now["blockdb"]._writer, time.monotonic() + 10
    while writer.lock_waits < 2:
        assert time.monotonic() < give_up
    other.execute("COMMIT")
    other.close()
    [reply] = store.replies_to(write)
    assert outcome(reply) is None


def test_a_locked_file_does_not_hold_up_the_end(
    store: Io, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "WRITER_BUSY_MS", 1)
    ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store.service.submit([store.table("upsert_rows", "t", rows=[{"id": 2}])])
    store.stop()
    other.close()
    assert {"io", "tables"}.isdisjoint(thread.name for thread in threading.enumerate())


def test_commits_are_on_disk_before_they_are_acknowledged(store: Io) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    db = store.service._backends_now["blockdb"]._writer._db
    pragmas = [db.execute(f"PRAGMA {name}").fetchone() for name in ("journal_mode", "synchronous")]
    assert pragmas == [("wal",), (2,)]


def test_a_folder_that_cannot_be_made_fails_the_upsert_clearly(io: StartIo, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = io(blockdb={"path": "file/store.sqlite"})
    kind, message = ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    assert kind == "io_error"
    assert message.startswith(f"table store {tmp_path}/file/store.sqlite: ")


def test_a_full_disk_fails_the_upserts_that_do_not_fit_and_keeps_the_acknowledged(
    io: StartIo, store: Io, path: Path
) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 0}], key=["id"])
    store.service._backends_now["blockdb"]._writer._db.execute("PRAGMA max_page_count=20")
    replies = store.ask(
        store.table("upsert_rows", "t", rows=[{"id": 1, "text": "small"}]),
        store.table("upsert_rows", "t", rows=[{"id": n, "text": "x" * 3000} for n in range(2, 99)]),
        store.table("upsert_rows", "t", rows=[{"id": 99}]),
    )
    assert [outcome(reply) for reply in replies] == [
        None,
        (
            "io_error",
            f"table store {path}: the disk is full; nothing of this request was written",
        ),
        None,
    ]
    store.stop()
    again = io(blockdb={"path": str(path)})
    rows = ask(again, "get_rows", "t", keys=[{"id": n} for n in (0, 1, 2, 98, 99)])
    assert rows == [{"id": 0}, {"id": 1, "text": "small"}, None, None, {"id": 99}]


WRITER = """
import sys
import threading
import time
from pathlib import Path
from tests.backends.harness import Io
store = Io(Path(sys.argv[1]).parent, {"blockdb": {"path": sys.argv[1]}})
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
    io: StartIo, path: Path, lines: int
) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        for _ in range(lines):
            acknowledged = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        acknowledged = max([acknowledged, *map(int, process.stdout.read().split())])
    store = io(blockdb={"path": str(path)})
    ids = range(acknowledged + 100)
    there = ask(store, "get_rows", "t", keys=[{"id": n} for n in ids])
    partners = ask(store, "get_rows", "t", keys=[{"id": -n - 2} for n in ids])
    assert None not in there[: acknowledged + 1]
    assert [row is None for row in there] == [row is None for row in partners]


HALF_WRITTEN = """
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA journal_mode=DELETE")
db.execute("PRAGMA cache_size=1")
db.execute("BEGIN")
db.execute("CREATE TABLE half(x)")
db.executemany("INSERT INTO half VALUES(?)", [("x" * 1000,) for _ in range(1000)])
os._exit(0)
"""


def test_what_a_killed_process_left_half_done_is_taken_back(io: StartIo, path: Path) -> None:
    """Killed while it made the file: only a connection that may write can roll that back."""
    path.parent.mkdir()
    subprocess.run([sys.executable, "-c", HALF_WRITTEN, str(path)], check=True)
    assert path.with_name(path.name + "-journal").exists()
    store = io(blockdb={"path": str(path)})
    assert ask(store, "get_row", "t", key={"id": 1}) is None
