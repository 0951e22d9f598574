"""The embedded table store: faults of its file."""

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


def test_a_file_that_does_not_exist_is_made_by_the_first_write_alone(store: Io, path: Path) -> None:
    assert ask(store, "get_row", "t", key={"id": 1}) is None
    assert not path.exists()
    ask(store, "upsert_rows", "t", rows=[{"id": 1}])
    assert path.exists()


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
