"""The backend ``blockdb`` over the embedded table store (SQLite).

Reads run inline on the io thread's loop: all reads of one loop turn together, in one read transaction, at most
``READS_A_TURN`` of them (one takes some 7 us). Writes run on one writer thread, since a durable commit waits for
the disk: what gathers while a commit is on its way leaves as the next group. Invariants:

- A write is atomic a request and acknowledged after its commit, which is on disk then. A request of a group that
  is wrong fails alone; if the group's commit fails, each of its requests is tried alone.
- A read sees every write that was acknowledged before it was submitted: it begins its transaction later.
- Nothing is cached here but the catalogue, and that only until the file changes.
- A write of a call whose attempt has ended is not started.

A file that does not exist is made by the first write; until then every table is empty. A locked file is waited
for, at most ``io_wait_max_ms``; that time is ``queue_us``.
"""

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from blockx.backends import table_store
from blockx.backends.replies import ReadFailedError
from blockx.backends.scope import IoRequest, KeepsNothing, Reply
from blockx.backends.table_requests import (
    Asked,
    AsOf,
    History,
    Pending,
    Points,
    Prefix,
    TableRequests,
    as_wire_error,
)
from blockx.backends.table_rows import TableInfo
from blockx.errors import ErrorKind, UsageError
from blockx.ipc.messages import WireError

READS_A_TURN = 256
"""Reads answered in one loop turn; further ones in the next, so that the node's answers are not held up."""
WRITES_A_GROUP = 1_024
"""Write requests in one transaction."""
READER_BUSY_PAUSE_S = 0.05
"""Between two looks of the reader at a locked file (it never blocks the loop)."""
WRITER_BUSY_MS = 500
"""One wait of the writer thread for a locked file; it looks whether to stop between two."""


class SqliteTables(KeepsNothing):
    """The backend; one store file."""

    def __init__(
        self,
        path: Path,
        declared: Mapping[str, list[str]],
        io_wait_max_ms: int,
        *,
        coalesce: bool = True,
    ) -> None:
        """``declared``: table name -> key columns, from the configuration."""
        self._path = path
        self._io_wait_max_s = io_wait_max_ms / 1_000
        self._reads_a_turn = READS_A_TURN if coalesce else 1
        self._requests = TableRequests(declared, self._now)
        self._reader: sqlite3.Connection | None = None
        self._catalogue_version = -1
        self._reads: deque[Pending] = deque()
        self._read_soon = False
        self._writes: deque[Pending] = deque()
        self._writer: _Writer | None = None
        self._writing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- the contract of a backend ---------------------------------------------------------------

    async def start(self) -> None:
        """Look at the file if there is one. Raises UsageError if it is no store of ours."""
        self._loop = asyncio.get_running_loop()
        self._writer = _Writer(self._path, self._io_wait_max_s, self._requests)
        if not self._path.exists():
            return
        try:
            self._refresh()
        except (sqlite3.Error, OSError) as error:
            failure = table_store.explain(error, self._path)
            if failure.error.kind != ErrorKind.UNAVAILABLE:  # a lock may be gone at the first read
                raise UsageError(f"backends.blockdb.path: {failure}") from None
        self._requests.check_declared(str(self._path))

    def submit(self, request: IoRequest, reply: Reply) -> None:
        """Take a request; wrong ones are answered at once."""
        pending = self._requests.take(request, reply)
        if pending is None:
            return
        if pending.is_read:
            self._reads.append(pending)
            self._read_later()
        else:
            self._writes.append(pending)
            self._write_more()

    def cancel(self, call_id: str) -> None:
        """End the call's request; a write that is not in a transaction yet is not started."""
        self._requests.cancel(call_id)

    async def close(self) -> None:
        """Commit the accepted writes, close the file."""
        if self._writer is not None:
            self._writer.hurry()
        await self._idle.wait()
        if self._reader is not None:
            self._reader.close()
        if self._writer is not None:
            self._writer.stop()

    # ---- reads -----------------------------------------------------------------------------------

    def _read_later(self) -> None:
        if not self._read_soon:
            self._read_soon = True
            self._running_loop.call_soon(self._read_turn)

    def _read_turn(self) -> None:
        self._read_soon = False
        reads = [self._reads.popleft() for _ in range(min(len(self._reads), self._reads_a_turn))]
        reads = [pending for pending in reads if not pending.ended]
        if self._reads:
            self._read_later()
        begun = self._now()
        try:
            self._read_group(reads)
        except sqlite3.Error as error:
            self._read_failed(reads, table_store.explain(error, self._path))
            return
        took = (self._now() - begun) / max(1, len(reads))
        for pending in reads:
            pending.io_s = took
            self._requests.end(pending)

    def _read_group(self, reads: list[Pending]) -> None:
        """Answer into the records, in one read transaction if there is a file."""
        self._refresh()
        reader = self._reader
        if reader is not None:
            reader.execute("BEGIN")
        points: dict[str, list[tuple[Points, Pending]]] = {}
        try:
            for pending in reads:
                try:
                    found = self._requests.asked(pending)
                except (ReadFailedError, ValueError) as error:
                    pending.error = as_wire_error(pending.request, error)
                    continue
                if found is not None:
                    info, asked = found
                    if isinstance(asked, Points) and asked.single:
                        points.setdefault(info.name, []).append((asked, pending))
                    else:
                        pending.result = self._answer(info, asked)
            for table, some in points.items():
                keys = [asked.keys[0] for asked, _ in some]
                info = self._requests.catalogue[table]
                rows = table_store.get_many(self._connection, info, keys)
                for asked, pending in some:
                    pending.result = asked.answer(rows)
        finally:
            if reader is not None:
                reader.execute("COMMIT")

    def _answer(self, info: TableInfo, asked: Asked) -> bytes:
        """One read that is not answered together with others."""
        db = self._connection
        match asked:
            case Points(keys):
                return asked.answer(table_store.get_many(db, info, keys))
            case AsOf(key, at):
                return asked.answer(table_store.get_version(db, info, key, at))
            case History(key, first, last, limit):
                found = table_store.history(db, info, key, first, last, limit)
                return asked.answer(info, found)
            case Prefix(text, limit):
                return asked.answer(table_store.scan(db, info, text, limit))

    def _read_failed(self, reads: list[Pending], failure: ReadFailedError) -> None:
        now = self._now()
        again = [
            pending
            for pending in reads
            if failure.error.kind == ErrorKind.UNAVAILABLE
            and now - pending.arrived_at < self._io_wait_max_s
        ]
        for pending in reads:
            if pending not in again:
                pending.error = failure.error
                self._requests.end(pending)
        if again:
            self._running_loop.call_later(READER_BUSY_PAUSE_S, self._read_again, again)

    def _read_again(self, reads: list[Pending]) -> None:
        self._reads.extendleft(reversed(reads))
        self._read_later()

    def _refresh(self) -> None:
        """Open the file once it is there; read the catalogue when the file has changed."""
        if self._reader is None:
            if not self._path.exists():
                return
            self._reader = table_store.open_for_reading(self._path, busy_ms=0)
        version = self._reader.execute("PRAGMA data_version").fetchone()[0]
        if version != self._catalogue_version:
            self._requests.catalogue = table_store.read_catalogue(self._reader)
            self._catalogue_version = version

    @property
    def _connection(self) -> sqlite3.Connection:
        assert self._reader is not None, "a table of the catalogue was read from the file"
        return self._reader

    # ---- writes ----------------------------------------------------------------------------------

    def _write_more(self) -> None:
        """Give the writer thread the next group, unless it is busy."""
        if self._writing:
            return
        group: list[Pending] = []
        while self._writes and len(group) < WRITES_A_GROUP:
            pending = self._writes.popleft()
            if not pending.ended:
                self._requests.declare_as_read(pending)
                group.append(pending)
        if not group:
            self._idle.set()
            return
        assert self._writer is not None, "start() makes the writer"
        self._writing = True
        self._idle.clear()
        loop = self._running_loop

        def done() -> None:
            loop.call_soon_threadsafe(self._written, group)

        self._writer.run(group, done)

    def _written(self, group: list[Pending]) -> None:
        self._writing = False
        for pending in group:
            self._requests.end(pending)
        self._write_more()

    # ---- common ----------------------------------------------------------------------------------

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "start() comes first"
        return self._loop

    def _now(self) -> float:
        return self._running_loop.time()


class _Writer:
    """The writer thread: one group at a time, each in one transaction."""

    def __init__(self, path: Path, io_wait_max_s: float, requests: TableRequests) -> None:
        self._path = path
        self._requests = requests
        self._io_wait_max_s = io_wait_max_s
        self._db: sqlite3.Connection | None = None
        self._group: list[Pending] | None = None
        self._done: Callable[[], None] = lambda: None
        self._wake = threading.Condition()
        self._hurry = False
        self.lock_waits = 0
        """Times the file was found locked by another process."""
        self._stopping = False
        self._thread: threading.Thread | None = None

    # ---- the io thread's side --------------------------------------------------------------------

    def run(self, group: list[Pending], done: Callable[[], None]) -> None:
        """Write a group (the one before is finished); ``done`` is called on the writer thread."""
        with self._wake:
            self._group, self._done = group, done
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="tables", daemon=True)
                self._thread.start()
            self._wake.notify()

    def hurry(self) -> None:
        """From now on a locked file is not waited for: the program is ending."""
        self._hurry = True

    def stop(self) -> None:
        """End the thread after the group it is at, and close the file. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        if self._db is not None:
            self._db.close()
            self._db = None

    # ---- the writer thread -----------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._group is not None or self._stopping)
                group, done, self._group = self._group, self._done, None
            if group is None:
                return
            try:
                self._write(group)
            except Exception as error:
                # Our bug; the calls must not wait for ever because of it.
                text = f"table store {self._path}: {type(error).__name__}: {error}"
                for pending in group:
                    pending.error = WireError(kind=ErrorKind.IO_ERROR, message=text)
                raise
            finally:
                done()

    def _write(self, group: list[Pending]) -> None:
        """One transaction for all; if that fails, one for each."""
        failure = self._transaction(group)
        if failure is None:
            return
        if len(group) > 1 and failure.error.kind != ErrorKind.UNAVAILABLE:
            for pending in group:
                self._write([pending])
            return
        for pending in group:
            pending.error = failure.error

    def _transaction(self, group: list[Pending]) -> ReadFailedError | None:
        """None: committed; requests that were wrong in themselves have their error and changed nothing."""
        db = None
        try:
            db = self._begin()
            begun = time.monotonic()
            for pending in group:
                pending.error = self._apply_alone(db, pending)
            db.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            if db is not None and db.in_transaction:
                db.execute("ROLLBACK")
            return table_store.explain(error, self._path)
        took = time.monotonic() - begun
        for pending in group:
            pending.io_s = took
        return None

    def _begin(self) -> sqlite3.Connection:
        """Open the file if need be and take its write lock; waits for other processes."""
        give_up = time.monotonic() + self._io_wait_max_s
        while True:
            try:
                if self._db is None:
                    self._db = table_store.open_for_writing(self._path, WRITER_BUSY_MS)
                self._db.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                locked = error.sqlite_errorcode & 0xFF in (
                    sqlite3.SQLITE_BUSY,
                    sqlite3.SQLITE_LOCKED,
                )
                self.lock_waits += locked
                if not locked or self._hurry or time.monotonic() > give_up:
                    raise
            else:
                return self._db

    def _apply_alone(self, db: sqlite3.Connection, pending: Pending) -> WireError | None:
        """One request within the group's transaction; a wrong one changes nothing."""
        try:
            write = self._requests.write_of(pending, table_store.read_catalogue(db))
        except (ReadFailedError, ValueError) as error:
            return as_wire_error(pending.request, error)
        if write is not None:
            if write.is_new:
                table_store.make_table(db, write.info)
            table_store.upsert(db, write.info, write.versions)
            table_store.delete(db, write.info, write.deleted)
        pending.result = b"null"
        return None
