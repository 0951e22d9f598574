"""The backend ``blockdb`` over PostgreSQL.

io thread. Reads of one table that ask alike and gather in a loop turn, or while all connections are busy, become
one statement; each statement has a connection of the pool to itself, at most ``connections_max`` at once. Writes
run one group at a time, in one transaction. Invariants, as in the embedded store (``tables``):

- A write is atomic a request and acknowledged after its commit. A request of a group that is wrong fails alone; if
  the group's transaction fails, each of its requests is tried alone. A group whose connection was lost is written
  again: all writes may be repeated.
- A read sees every write that was acknowledged before it was submitted: its statement begins later.
- A write of a call whose attempt has ended is not started.

A database that does not answer, restarts or has no connection left is waited for inside the read, at most
``io_wait_max_ms``; that time is ``queue_us``. A statement is given up after ``timeout_ms`` and then sent again; a
read's budget counts the time that its statements are on their way.

What is known of a table is read once: tables do not change. One that is not known is looked for at each read.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg

from blockx.backends import postgres_store
from blockx.backends.postgres_place import PostgresPlace
from blockx.backends.postgres_store import Database
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
    Write,
    as_wire_error,
)
from blockx.backends.table_rows import TableInfo
from blockx.errors import ErrorKind, UsageError
from blockx.ipc.messages import WireError
from blockx.observability import logger

READS_A_STATEMENT = 1_000
"""Point reads in one statement; further ones in the next."""
WRITES_A_GROUP = 1_024
"""Write requests in one transaction …"""
WRITE_BYTES_A_GROUP = 8 * 1024 * 1024
"""… and bytes of their parameters, unless a single one is larger."""
PAUSE_S = 0.05
"""Before a failed statement is sent again; doubles while the database does not answer, up to …"""
PAUSE_MAX_S = 1.0
START_WAIT_S = 5.0
"""How long the start waits for a first answer; after that the reads wait."""
CLOSE_WAIT_S = 8.0
"""How long the end waits for accepted writes."""

_Shape = tuple[str, str]
"""Operation and table: reads of one shape fit into one statement."""


class PostgresTables(KeepsNothing):
    """The backend; one schema of one database."""

    def __init__(
        self,
        place: PostgresPlace,
        declared: Mapping[str, list[str]],
        io_wait_max_ms: int,
        *,
        coalesce: bool = True,
    ) -> None:
        """``declared``: table name -> key columns, from the configuration."""
        self._place = place
        self._io_wait_max_s = io_wait_max_ms / 1_000
        self._reads_a_statement = READS_A_STATEMENT if coalesce else 1
        self._requests = TableRequests(declared, self._now)
        self._reads: dict[_Shape, deque[Pending]] = {}
        """Waiting reads, the shape that waits for longest first."""
        self._read_soon = False
        self._statements = 0
        """Of reads, on their way."""
        self._pause_s = 0.0
        """0: the database answered the last time."""
        self._paused_until = 0.0
        self._writes: deque[Pending] = deque()
        self._writing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pool: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- the contract of a backend ---------------------------------------------------------------

    async def start(self) -> None:
        """Look at the database, if it answers. Raises UsageError: it refuses us, or is no store of ours."""
        self._loop = asyncio.get_running_loop()
        place = self._place
        try:
            self._pool = await asyncpg.create_pool(
                **postgres_store.connection_options(place, place.timeout_s),
                min_size=0,
                max_size=place.connections_max,
                max_queries=2**31 - 1,
                # Without this, each statement would be followed by one that resets the session.
                reset=_nothing_to_reset,
            )
            async with asyncio.timeout(START_WAIT_S), self._connection() as db:
                self._requests.catalogue = await postgres_store.read_catalogue(db, place)
        except (*postgres_store.ERRORS, ReadFailedError) as error:
            failure = self._explained(error)
            if failure.error.kind not in postgres_store.WAITED_FOR:
                raise UsageError(f"backends.blockdb.url: {failure}") from None
            logger.warning("the table store does not answer; reads wait", reason=str(failure))
        except ValueError:  # its text may quote the url
            raise UsageError(postgres_store.URL_NOT_UNDERSTOOD) from None
        self._requests.check_declared(place.shown)

    def submit(self, request: IoRequest, reply: Reply) -> None:
        """Take a request; wrong ones are answered at once."""
        pending = self._requests.take(request, reply)
        if pending is None:
            return
        if pending.is_read:
            shape = (request.operation, pending.table)
            self._reads.setdefault(shape, deque()).append(pending)
            self._read_later()
        else:
            self._writes.append(pending)
            self._write_more()

    def cancel(self, call_id: str) -> None:
        """End the call's request; a write that is not in a transaction yet is not started."""
        self._requests.cancel(call_id)

    async def close(self) -> None:
        """Commit the accepted writes, close the connections."""
        self._closing.set()
        if self._pool is None:
            return
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("the table store does not answer; its last writes were given up")
        self._pool.terminate()
        await asyncio.sleep(0)  # the loop closes the sockets in its next turn

    # ---- reads -----------------------------------------------------------------------------------

    def _read_later(self) -> None:
        if not self._read_soon:
            self._read_soon = True
            pause_s = self._paused_until - self._now()
            if pause_s > 0:
                self._running_loop.call_later(pause_s, self._read_more)
            else:
                self._running_loop.call_soon(self._read_more)

    def _read_more(self) -> None:
        """Send statements while there are reads and connections for them."""
        self._read_soon = False
        # After a failure a single statement tries whether the database is back.
        statements_max = 1 if self._pause_s else self._place.connections_max
        while self._reads and self._statements < statements_max and not self._closing.is_set():
            reads = self._take()
            if reads:
                self._statements += 1
                self._begin(self._read(reads))

    def _take(self) -> list[Pending]:
        """Reads for one statement, out of the shape that waits for longest."""
        shape = next(iter(self._reads))
        waiting = self._reads.pop(shape)
        # The answer to one of these can be as large as a frame.
        alone = shape[0] in ("scan", "get_history", "get_history_at")
        count = min(len(waiting), 1 if alone else self._reads_a_statement)
        taken = [waiting.popleft() for _ in range(count)]
        if waiting:
            self._reads[shape] = waiting  # behind the other shapes
        return [pending for pending in taken if not pending.ended]

    async def _read(self, reads: list[Pending]) -> None:
        """One statement; what cannot be answered now waits again."""
        again: list[Pending] = []
        try:
            async with self._connection() as db:
                await self._read_on(db, reads)
            self._answered()
        except (*postgres_store.ERRORS, ReadFailedError) as error:
            again = self._failed(reads, error)
        except Exception as error:
            self._blame_us(reads, error)
            raise
        finally:
            self._statements -= 1
            if self._reads:
                self._read_later()
        self._end(reads, again)
        if again:
            shape = (again[0].request.operation, again[0].table)
            waiting = self._reads.pop(shape, deque())
            waiting.extendleft(reversed(again))
            self._reads = {shape: waiting, **self._reads}
            self._read_later()

    async def _read_on(self, db: Database, reads: list[Pending]) -> None:
        requests = self._requests
        if reads[0].table not in requests.catalogue:
            requests.catalogue = await postgres_store.read_catalogue(db, self._place)
        asked: list[tuple[Pending, Asked]] = []
        info = None
        for pending in reads:
            try:
                found = requests.asked(pending)
            except (ReadFailedError, ValueError) as error:
                pending.error = as_wire_error(pending.request, error)
                continue
            if found is not None:
                info = found[0]
                asked.append((pending, found[1]))
        if info is None:
            return
        watch = _BudgetWatch(self._running_loop, requests, [pending for pending, _ in asked])
        try:
            await self._answer(db, info, asked)
        finally:
            watch.stop()

    async def _answer(
        self, db: Database, info: TableInfo, asked: list[tuple[Pending, Asked]]
    ) -> None:
        """Results of reads of one shape."""
        place = self._place
        match asked[0][1]:
            case Points():
                points = [(pending, one) for pending, one in asked if isinstance(one, Points)]
                keys = list({key for _, one in points for key in one.keys})
                rows = await postgres_store.get_many(db, place, info, keys)
                for pending, one in points:
                    pending.result = one.answer(rows)
            case AsOf():
                moments = [(pending, one) for pending, one in asked if isinstance(one, AsOf)]
                wanted = [one for _, one in moments]
                found = await postgres_store.get_versions(db, place, info, wanted)
                for (pending, moment), row in zip(moments, found, strict=True):
                    pending.result = moment.answer(row)
            case History() as history:
                versions = await postgres_store.history(db, place, info, history)
                asked[0][0].result = history.answer(info, versions)
            case Prefix() as prefix:
                texts = await postgres_store.scan(db, place, info, prefix)
                asked[0][0].result = prefix.answer(texts)

    # ---- writes ----------------------------------------------------------------------------------

    def _write_more(self) -> None:
        if not self._writing:
            self._writing = True
            self._idle.clear()
            self._begin(self._write_all())

    async def _write_all(self) -> None:
        """Group after group, until nothing is left."""
        try:
            while self._writes:
                await self._write(self._next_group())
        finally:
            self._writing = False
            self._idle.set()

    def _next_group(self) -> list[Pending]:
        group: list[Pending] = []
        bytes_left = WRITE_BYTES_A_GROUP
        while self._writes and len(group) < WRITES_A_GROUP and bytes_left > 0:
            pending = self._writes.popleft()
            if not pending.ended:
                self._requests.declare_as_read(pending)
                group.append(pending)
                bytes_left -= len(pending.request.params)
        return group

    async def _write(self, group: list[Pending]) -> None:
        """One transaction for all; if the database refuses it, one for each."""
        while group:
            again: list[Pending] = []
            try:
                async with self._connection() as db:
                    await self._transaction(db, group)
                self._answered()
            except (*postgres_store.ERRORS, ReadFailedError) as error:
                kind = self._explained(error).error.kind
                if len(group) > 1 and kind not in postgres_store.WAITED_FOR:
                    for pending in group:
                        await self._write([pending])
                    return
                again = self._failed(group, error)
            except Exception as error:
                self._blame_us(group, error)
                raise
            self._end(group, again)
            if again:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._paused_until):
                        await self._closing.wait()
            group = [pending for pending in again if not pending.ended]

    async def _transaction(self, db: Database, group: list[Pending]) -> None:
        """Returns when it is committed; requests that were wrong in themselves have their error."""
        place, requests = self._place, self._requests
        begun = self._now()
        async with db.transaction():
            catalogue = dict(requests.catalogue)
            if any(pending.table not in catalogue for pending in group):
                await postgres_store.lock_catalogue(db, place)
                catalogue = await postgres_store.read_catalogue(db, place)
            good, writes = self._planned(group, catalogue)
            for write in _merged(writes):
                if write.is_new:
                    await postgres_store.make_table(db, place, write.info)
                await postgres_store.upsert(db, place, write.info, write.versions)
                await postgres_store.delete(db, place, write.info, write.deleted)
        requests.catalogue.update(catalogue)
        took_s = self._now() - begun
        for pending in good:
            pending.result = b"null"
            pending.io_s += took_s

    def _planned(
        self, group: list[Pending], catalogue: dict[str, TableInfo]
    ) -> tuple[list[Pending], list[Write]]:
        """The requests that are right and what they do; adds new tables to the catalogue."""
        good, writes = [], []
        for pending in group:
            if pending.ended:
                continue
            pending.error = None  # of a transaction that was taken back
            try:
                write = self._requests.write_of(pending, catalogue)
                if write is not None:
                    postgres_store.check_length(write.info)
            except (ReadFailedError, ValueError) as error:
                pending.error = as_wire_error(pending.request, error)
                continue
            good.append(pending)
            if write is not None:
                catalogue[write.info.name] = write.info
                writes.append(write)
        return good, writes

    # ---- common ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Database]:
        """A connection of the pool; opened if there is none."""
        db = await self._pool.acquire()
        try:
            yield db
        except TimeoutError:
            db.terminate()  # it is still at work for somebody who does not wait any more
            raise
        finally:
            await self._pool.release(db, timeout=self._place.timeout_s)

    def _explained(self, error: Exception) -> ReadFailedError:
        return (
            error
            if isinstance(error, ReadFailedError)
            else postgres_store.explain(error, self._place)
        )

    def _answered(self) -> None:
        self._pause_s = self._paused_until = 0.0

    def _failed(self, pendings: list[Pending], error: Exception) -> list[Pending]:
        """Those that wait for the database from now on; the others have their error."""
        failure, now = self._explained(error), self._now()
        if isinstance(error, asyncpg.UndefinedTableError):
            self._requests.catalogue = {}  # somebody has dropped a table
        waits = failure.error.kind in postgres_store.WAITED_FOR and not self._closing.is_set()
        if waits:
            self._pause_s = min(PAUSE_MAX_S, max(PAUSE_S, 2 * self._pause_s))
            self._paused_until = now + self._pause_s
        again: list[Pending] = []
        for pending in pendings:
            if pending.ended or pending.error is not None or pending.result is not None:
                continue
            if waits and now - pending.arrived_at < self._io_wait_max_s:
                again.append(pending)
            else:
                pending.error = failure.error
        return again

    def _end(self, pendings: list[Pending], again: list[Pending]) -> None:
        """Answer all but those that wait again."""
        waiting = set(again)
        for pending in pendings:
            if pending not in waiting:
                self._requests.end(pending)

    def _blame_us(self, pendings: list[Pending], error: Exception) -> None:
        """A bug of ours: the calls must not wait for ever because of it."""
        text = f"table store {self._place.shown}: {type(error).__name__}: {error}"
        for pending in pendings:
            pending.error = WireError(kind=ErrorKind.IO_ERROR, message=text)
            self._requests.end(pending)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._running_loop.create_task(work)
        self._tasks.add(task)  # the loop itself keeps no hold of it
        task.add_done_callback(self._tasks.discard)

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "start() comes first"
        return self._loop

    def _now(self) -> float:
        return self._running_loop.time()


class _BudgetWatch:
    """Reads whose statement is on its way: charges its time, and ends a read whose budget it uses up."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, requests: TableRequests, reads: list[Pending]
    ) -> None:
        self._loop = loop
        self._requests = requests
        self._reads = reads
        self._begun = loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._arm()

    def stop(self) -> None:
        """The statement has ended."""
        if self._timer is not None:
            self._timer.cancel()
        took_s = self._loop.time() - self._begun
        for pending in self._reads:
            pending.io_s += took_s

    def _arm(self) -> None:
        ends = [
            self._begun + pending.request.budget_left_ms / 1_000 - pending.io_s
            for pending in self._reads
            if pending.request.budget_left_ms > 0 and not pending.ended
        ]
        self._timer = self._loop.call_at(min(ends), self._end_overdue) if ends else None

    def _end_overdue(self) -> None:
        took_s = self._loop.time() - self._begun
        for pending in self._reads:
            budget_ms = pending.request.budget_left_ms
            if 0 < budget_ms <= (pending.io_s + took_s) * 1_000 + 1e-3 and not pending.ended:
                text = (
                    f"{pending.request.operation} of table {pending.table}: no answer within the {budget_ms:.0f} ms "
                    "that were left of the call's budget"
                )
                pending.error = WireError(kind=ErrorKind.DEADLINE_EXCEEDED, message=text)
                pending.io_s += took_s
                self._requests.end(pending)
        self._arm()


async def _nothing_to_reset(db: Database) -> None:
    """No statement of ours leaves anything in the session."""


def _merged(writes: list[Write]) -> list[Write]:
    """The same changes in fewer steps: what follows each other on one table and is of one sort is one step."""
    steps: list[Write] = []
    last: dict[str, Write] = {}
    for write in writes:
        before = last.get(write.info.name)
        if before is not None and bool(before.deleted) == bool(write.deleted):
            before.versions.extend(write.versions)
            before.deleted.extend(write.deleted)
        else:
            steps.append(write)
            last[write.info.name] = write
    return steps
