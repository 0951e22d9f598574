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

import msgspec

from blockx.backends import table_store
from blockx.backends.keys import check_key_names, key_text, prefix_text
from blockx.backends.replies import ReadFailedError, named
from blockx.backends.scope import IoReply, IoRequest, Reply
from blockx.backends.table_store import Kind, TableInfo
from blockx.errors import ErrorKind, UsageError
from blockx.ipc import exact_json
from blockx.ipc.messages import WireError

READS_A_TURN = 256
"""Reads answered in one loop turn; further ones in the next, so that the node's answers are not held up."""
WRITES_A_GROUP = 1_024
"""Write requests in one transaction."""
SCAN_ROWS_MAX = 10_000
"""Rows of one scan or history; a caller that wants more asks on from the last one."""
RESULT_BYTES_MAX = 15 * 1024 * 1024
"""Bytes of one answer: it has to fit into a frame of 16 MiB. Full: that read fails."""
READER_BUSY_PAUSE_S = 0.05
"""Between two looks of the reader at a locked file (it never blocks the loop)."""
WRITER_BUSY_MS = 500
"""One wait of the writer thread for a locked file; it looks whether to stop between two."""

_Params = dict[str, bytes]
"""Members of the parameters, each as raw JSON."""


class _Pending(msgspec.Struct, eq=False):
    """One request on its way."""

    request: IoRequest
    reply: Reply
    table: str
    params: _Params
    arrived_at: float
    declared: tuple[str, ...] | None = None
    """Key columns known for the table outside the catalogue."""
    ended: bool = False
    result: bytes | None = None
    error: WireError | None = None
    io_s: float = 0.0
    point: str = ""
    """The key's text, for a ``get_row`` that is answered together with the others of its table."""


class SqliteTables:
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
        self._declared = {name: tuple(columns) for name, columns in declared.items()}
        self._io_wait_max_s = io_wait_max_ms / 1_000
        self._reads_a_turn = READS_A_TURN if coalesce else 1
        self._reader: sqlite3.Connection | None = None
        self._catalogue: dict[str, TableInfo] = {}
        self._catalogue_version = -1
        self._first_read: dict[str, tuple[str, ...]] = {}
        self._reads: deque[_Pending] = deque()
        self._read_soon = False
        self._writes: deque[_Pending] = deque()
        self._pending: dict[str, _Pending] = {}
        self._writer: _Writer | None = None
        self._writing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read_operations: dict[str, Callable[[_Pending], bytes]] = {
            "get_row": self._get_row,
            "get_rows": self._get_rows,
            "get_state": self._get_state,
            "get_row_at": self._get_row_at,
            "get_history": self._get_history,
            "get_history_at": self._get_history_at,
            "scan": self._scan,
        }

    # ---- the contract of a backend ---------------------------------------------------------------

    async def start(self) -> None:
        """Look at the file if there is one. Raises UsageError if it is no store of ours."""
        self._loop = asyncio.get_running_loop()
        self._writer = _Writer(self._path, self._io_wait_max_s)
        if not self._path.exists():
            return
        try:
            self._refresh()
        except (sqlite3.Error, OSError) as error:
            failure = table_store.explain(error, self._path)
            if failure.error.kind != ErrorKind.UNAVAILABLE:  # a lock may be gone at the first read
                raise UsageError(f"backends.blockdb.path: {failure}") from None
        for name, columns in self._declared.items():
            info = self._catalogue.get(name)
            if info is not None and sorted(info.key) != sorted(columns):
                raise UsageError(
                    f"backends.blockdb.tables.{name}: its key in {self._path} is "
                    f"{', '.join(info.key)}, not {', '.join(columns)}"
                )

    def submit(self, request: IoRequest, reply: Reply) -> None:
        """Take a request; wrong ones are answered at once."""
        now = self._now()
        try:
            params = _read_params(request)
            table = exact_json.decode(params.get("table", b"null"))
            if not isinstance(table, str) or table not in self._catalogue:
                table = table_store.check_name(table)
            pending = _Pending(request, reply, table, params, now)
            if request.operation in self._read_operations:
                pending.declared = self._declared_for(table, params.get("declared_key"))
                self._reads.append(pending)
                self._read_later()
            elif request.operation in _WRITES:
                pending.declared = self._declared_for(table, params.get("key"))
                self._writes.append(pending)
                self._write_more()
            else:
                there = named([*self._read_operations, *_WRITES], "none")
                text = f"blockdb has no operation {request.operation!r}; there are: {there}"
                raise ReadFailedError(ErrorKind.IO_ERROR, text)
        except (ReadFailedError, ValueError) as error:
            reply(IoReply(request, error=_as_wire_error(request, error)))
            return
        self._pending[request.call_id] = pending

    def cancel(self, call_id: str) -> None:
        """End the call's request; a write that is not in a transaction yet is not started."""
        pending = self._pending.get(call_id)
        if pending is not None:
            text = f"{pending.request.operation}: the call's attempt has ended"
            pending.error = WireError(kind=ErrorKind.CANCELLED, message=text)
            self._end(pending)

    def task_ended(self, task_id: str) -> None:
        """Nothing is kept for a task."""

    def statistics(self, task_id: str) -> dict[str, dict[str, int]]:
        """None."""
        return {}

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
            self._end(pending)

    def _read_group(self, reads: list[_Pending]) -> None:
        """Answer into the records, in one read transaction if there is a file."""
        self._refresh()
        reader = self._reader
        if reader is not None:
            reader.execute("BEGIN")
        points: dict[str, list[tuple[str, _Pending]]] = {}
        try:
            for pending in reads:
                try:
                    pending.result = self._read_operations[pending.request.operation](pending)
                    if not pending.result:
                        points.setdefault(pending.table, []).append((pending.point, pending))
                except (ReadFailedError, ValueError) as error:
                    pending.error = _as_wire_error(pending.request, error)
            for table, asked in points.items():
                keys = [key for key, _ in asked]
                rows = table_store.get_many(self._connection, self._catalogue[table], keys)
                for key, pending in asked:
                    pending.result = rows[key].encode() if key in rows else b"null"
            for pending in reads:
                if pending.result is not None and len(pending.result) > RESULT_BYTES_MAX:
                    pending.error = _too_long(pending)
        finally:
            if reader is not None:
                reader.execute("COMMIT")

    def _read_failed(self, reads: list[_Pending], failure: ReadFailedError) -> None:
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
                self._end(pending)
        if again:
            self._running_loop.call_later(READER_BUSY_PAUSE_S, self._read_again, again)

    def _read_again(self, reads: list[_Pending]) -> None:
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
            self._catalogue = table_store.read_catalogue(self._reader)
            self._catalogue_version = version

    def _get_row(self, pending: _Pending) -> bytes:
        """Empty: the row is read with the others of its table."""
        key = exact_json.decode(pending.params.get("key", b"null"))
        info = self._info(pending, Kind.TABLE, key)
        text = key_text(info.name, info.key, key)
        if info.name not in self._catalogue:
            return b"null"
        pending.point = text.decode()
        return b""

    def _get_rows(self, pending: _Pending) -> bytes:
        keys = exact_json.decode(pending.params.get("keys", b"null"))
        if not isinstance(keys, list):
            raise ReadFailedError(ErrorKind.MALFORMED, "get_rows: `keys` is no array")
        return b"[" + b",".join([self._row(pending, key) for key in keys]) + b"]"

    def _row(self, pending: _Pending, key: object) -> bytes:
        info = self._info(pending, Kind.TABLE, key)
        text = key_text(info.name, info.key, key)
        if info.name not in self._catalogue:
            return b"null"
        return table_store.get(self._connection, info, text) or b"null"

    def _scan(self, pending: _Pending) -> bytes:
        prefix = exact_json.decode(pending.params.get("prefix", b"null"))
        info = self._catalogue.get(pending.table)
        if info is None:
            return b"[]"
        table_store.check_kind(info, Kind.TABLE)
        text = prefix_text(info.name, info.key, prefix)
        rows = table_store.scan(self._connection, info, text, _limit(pending))
        return b"[" + b",".join(rows) + b"]"

    def _get_history(self, pending: _Pending) -> bytes:
        return self._history(pending, Kind.BLOCK, table_store.check_block)

    def _get_history_at(self, pending: _Pending) -> bytes:
        return self._history(pending, Kind.TIME, table_store.moment)

    def _history(
        self, pending: _Pending, kind: Kind, check: Callable[[str, object], int | float | str]
    ) -> bytes:
        key = exact_json.decode(pending.params.get("key", b"null"))
        info = self._info(pending, kind, key)
        text = key_text(info.name, info.key, key)
        bounds = [
            check(info.name, exact_json.decode(pending.params[name]))
            if pending.params.get(name, b"null") != b"null"
            else None
            for name in ("from", "to")
        ]
        if info.name not in self._catalogue:
            return b"[]"
        for bound in bounds:
            if kind is Kind.TIME and bound is not None:
                table_store.check_clock(info, bound)
        first, last = bounds
        found = table_store.history(self._connection, info, text, first, last, _limit(pending))
        at_name, value_name = ("block", "state") if kind is Kind.BLOCK else ("at", "row")
        return b"[%b]" % b",".join(
            b'{"%b":%b,"%b":%b}'
            % (at_name.encode(), exact_json.encode(at), value_name.encode(), row)
            for at, row in found
        )

    def _get_state(self, pending: _Pending) -> bytes:
        block = exact_json.decode(pending.params.get("block", b"null"))
        return self._version(pending, Kind.BLOCK, table_store.check_block(pending.table, block))

    def _get_row_at(self, pending: _Pending) -> bytes:
        at = exact_json.decode(pending.params.get("at", b"null"))
        return self._version(pending, Kind.TIME, table_store.moment(pending.table, at))

    def _version(self, pending: _Pending, kind: Kind, at: int | float | str) -> bytes:
        key = exact_json.decode(pending.params.get("key", b"null"))
        info = self._info(pending, kind, key)
        text = key_text(info.name, info.key, key)
        if info.name not in self._catalogue:
            return b"null"
        if kind is Kind.TIME:
            table_store.check_clock(info, at)
        return table_store.get_version(self._connection, info, text, at) or b"null"

    def _info(self, pending: _Pending, kind: Kind, key: object) -> TableInfo:
        """The table, or what it will be: the first read of an unknown one declares its key."""
        info = self._catalogue.get(pending.table)
        if info is not None:
            table_store.check_kind(info, kind)
            table_store.check_declared(info, pending.declared)
            return info
        columns = pending.declared or self._first_read.get(pending.table)
        if columns is None:
            columns = check_key_names(pending.table, key)
            self._first_read[pending.table] = columns
        return TableInfo(pending.table, kind, columns, "")

    @property
    def _connection(self) -> sqlite3.Connection:
        assert self._reader is not None, "a table of the catalogue was read from the file"
        return self._reader

    # ---- writes ----------------------------------------------------------------------------------

    def _declared_for(self, table: str, raw: bytes | None) -> tuple[str, ...] | None:
        """Key columns that the request or the configuration names; both must agree."""
        configured = self._declared.get(table)
        if raw is None:
            return configured
        names = exact_json.decode(raw)
        if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
            text = f"table {table}: a key is declared as a list of field names"
            raise ReadFailedError(ErrorKind.IO_ERROR, text)
        if configured is not None and sorted(configured) != sorted(names):
            raise ReadFailedError(
                ErrorKind.IO_ERROR,
                f"table {table}: the function declares the key {', '.join(names)}, config.yaml "
                f"(backends.blockdb.tables.{table}.key) {', '.join(configured)}",
            )
        return tuple(names)

    def _write_more(self) -> None:
        """Give the writer thread the next group, unless it is busy."""
        if self._writing:
            return
        group: list[_Pending] = []
        while self._writes and len(group) < WRITES_A_GROUP:
            pending = self._writes.popleft()
            if not pending.ended:
                pending.declared = pending.declared or self._first_read.get(pending.table)
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

    def _written(self, group: list[_Pending]) -> None:
        self._writing = False
        for pending in group:
            self._end(pending)
        self._write_more()

    # ---- common ----------------------------------------------------------------------------------

    def _end(self, pending: _Pending) -> None:
        if pending.ended:
            return
        pending.ended = True
        call_id = pending.request.call_id
        if self._pending.get(call_id) is pending:
            del self._pending[call_id]
        failed = pending.error is not None
        waited_s = self._now() - pending.arrived_at - pending.io_s
        pending.reply(
            IoReply(
                pending.request,
                result=None if failed else pending.result,
                error=pending.error,
                io_us=round(pending.io_s * 1e6),
                queue_us=max(0, round(waited_s * 1e6)),
            )
        )

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "start() comes first"
        return self._loop

    def _now(self) -> float:
        return self._running_loop.time()


class _Writer:
    """The writer thread: one group at a time, each in one transaction."""

    def __init__(self, path: Path, io_wait_max_s: float) -> None:
        self._path = path
        self._io_wait_max_s = io_wait_max_s
        self._db: sqlite3.Connection | None = None
        self._group: list[_Pending] | None = None
        self._done: Callable[[], None] = lambda: None
        self._wake = threading.Condition()
        self._hurry = False
        self.lock_waits = 0
        """Times the file was found locked by another process."""
        self._stopping = False
        self._thread: threading.Thread | None = None

    # ---- the io thread's side --------------------------------------------------------------------

    def run(self, group: list[_Pending], done: Callable[[], None]) -> None:
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

    def _write(self, group: list[_Pending]) -> None:
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

    def _transaction(self, group: list[_Pending]) -> ReadFailedError | None:
        """None: committed; requests that were wrong in themselves have their error and changed nothing."""
        db = None
        try:
            db = self._begin()
            begun = time.monotonic()
            for pending in group:
                pending.error = _apply_alone(db, pending)
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


# ---- what the writes do (writer thread) ----------------------------------------------------------


def _apply_alone(db: sqlite3.Connection, pending: _Pending) -> WireError | None:
    """One request within the group's transaction; a wrong one is taken back alone."""
    db.execute("SAVEPOINT request")
    try:
        _WRITES[pending.request.operation](db, pending)
    except (ReadFailedError, ValueError) as error:
        db.execute("ROLLBACK TO request")
        db.execute("RELEASE request")
        return _as_wire_error(pending.request, error)
    db.execute("RELEASE request")
    return None


def _elements(pending: _Pending, name: str) -> list[bytes]:
    return exact_json.raw_elements(pending.params.get(name, b"null"))


def _upsert_rows(db: sqlite3.Connection, pending: _Pending) -> None:
    info = _table_of(db, pending, Kind.TABLE, pending.declared)
    versions = [table_store.row_version(info.name, info.key, r) for r in _elements(pending, "rows")]
    table_store.upsert(db, info, versions)
    pending.result = b"null"


def _upsert_states(db: sqlite3.Connection, pending: _Pending) -> None:
    rows = _elements(pending, "rows")
    fields = table_store.key_fields(pending.table, rows[0]) if rows else None
    info = _table_of(db, pending, Kind.BLOCK, pending.declared or fields)
    versions = [table_store.state_version(info.name, info.key, row) for row in rows]
    table_store.upsert(db, info, versions)
    pending.result = b"null"


def _upsert_rows_at(db: sqlite3.Connection, pending: _Pending) -> None:
    rows = _elements(pending, "rows")
    if not rows:
        pending.result = b"null"
        return
    columns = pending.declared or table_store.key_fields(pending.table, rows[0])
    first = table_store.time_version(pending.table, columns, rows[0])
    info = _table_of(db, pending, Kind.TIME, columns, table_store.clock_of(first.at))
    versions = [table_store.time_version(info.name, info.key, row) for row in rows]
    for version in versions:
        table_store.check_clock(info, version.at)
    table_store.upsert(db, info, versions)
    pending.result = b"null"


def _delete_rows(db: sqlite3.Connection, pending: _Pending) -> None:
    keys = [exact_json.decode(raw) for raw in _elements(pending, "keys")]
    info = table_store.read_catalogue(db).get(pending.table)
    if info is not None:
        table_store.check_kind(info, Kind.TABLE)
        table_store.delete(db, info, [key_text(info.name, info.key, key) for key in keys])
    pending.result = b"null"


def _table_of(
    db: sqlite3.Connection,
    pending: _Pending,
    kind: Kind,
    columns: tuple[str, ...] | None,
    clock: str = "",
) -> TableInfo:
    """The table in the catalogue; made if its key is known."""
    info = table_store.read_catalogue(db).get(pending.table)
    if info is not None:
        table_store.check_kind(info, kind)
        table_store.check_declared(info, pending.declared)
        return info
    if columns is None:
        name = pending.table
        raise ReadFailedError(
            ErrorKind.IO_ERROR,
            f"table {name} is new and its key is not known: write Table({name!r}, key=[…]), or "
            f"backends.blockdb.tables.{name}.key in config.yaml, or load it with --key",
        )
    return table_store.make_table(db, pending.table, kind, columns, clock)


_WRITES: dict[str, Callable[[sqlite3.Connection, _Pending], None]] = {
    "upsert_rows": _upsert_rows,
    "upsert_states": _upsert_states,
    "upsert_rows_at": _upsert_rows_at,
    "delete_rows": _delete_rows,
}


# ---- small things --------------------------------------------------------------------------------


def _read_params(request: IoRequest) -> _Params:
    try:
        return exact_json.raw_members(request.params)
    except ValueError as error:
        text = f"{request.operation}: its parameters are not understood: {error}"
        raise ReadFailedError(ErrorKind.MALFORMED, text) from None


def _limit(pending: _Pending) -> int:
    limit = exact_json.decode(pending.params.get("limit", b"null"))
    if limit is None:
        return SCAN_ROWS_MAX
    if isinstance(limit, int) and not isinstance(limit, bool) and 1 <= limit <= SCAN_ROWS_MAX:
        return limit
    text = (
        f"{pending.request.operation} of table {pending.table}: the limit is a whole number from 1 to "
        f"{SCAN_ROWS_MAX}, not {str(limit)[:40]}"
    )
    raise ReadFailedError(ErrorKind.IO_ERROR, text)


def _as_wire_error(request: IoRequest, error: ReadFailedError | ValueError) -> WireError:
    if isinstance(error, ReadFailedError):
        return error.error
    text = f"{request.operation}: its parameters are not understood: {error}"
    return WireError(kind=ErrorKind.MALFORMED, message=text)


def _too_long(pending: _Pending) -> WireError:
    text = (
        f"{pending.request.operation} of table {pending.table}: an answer of more than "
        f"{RESULT_BYTES_MAX} bytes; ask for fewer rows at once"
    )
    return WireError(kind=ErrorKind.IO_ERROR, message=text)
