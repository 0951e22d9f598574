"""``TableFiles`` over PostgreSQL: load, dump and query of whole tables.

Synchronous, on the thread that calls, which must not run an event loop: each method has a connection and a loop
of its own. The statements of a verb may take as long as they need.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import asyncpg

from blockx.backends import postgres_store
from blockx.backends.postgres_place import PostgresPlace
from blockx.backends.postgres_store import Database
from blockx.backends.replies import ReadFailedError
from blockx.backends.table_files import Load, load_of, no_table, numbered, version_line
from blockx.backends.table_rows import Kind, TableInfo, Version
from blockx.errors import UsageError

CONNECT_WAIT_S = 10.0
"""How long a verb waits for a database that does not answer."""
CONNECT_PAUSE_S = 0.2
"""Between two tries."""
CLOSE_WAIT_S = 1.0
"""For the server to say goodbye."""
ROWS_A_STATEMENT = 1_000
"""Rows written or fetched at once …"""
BYTES_A_STATEMENT = 8 * 1024 * 1024
"""… and bytes written, unless a single row is larger."""

T = TypeVar("T")


class PostgresFiles:
    """``TableFiles`` of one schema."""

    def __init__(self, place: PostgresPlace) -> None:
        self._place = place
        self.shown = place.shown

    def load(
        self, name: str, rows_file: Path, kind: str = "table", key: Sequence[str] | None = None
    ) -> int:
        """See ``TableFiles``; makes the schema too."""
        try:
            with rows_file.open("rb") as file, _Session(self._place) as session:
                lines = numbered(file, rows_file)
                try:
                    return session.run(self._load(session.db, name, lines, Kind(kind), key))
                except ReadFailedError as failure:
                    raise UsageError(str(failure)) from None
        except OSError as error:
            raise UsageError(f"{error.filename or rows_file}: {error.strerror or error}") from None

    async def _load(
        self,
        db: Database,
        name: str,
        lines: Iterator[tuple[str, bytes]],
        kind: Kind,
        key: Sequence[str] | None,
    ) -> int:
        place, count = self._place, 0
        async with db.transaction():
            await postgres_store.lock_catalogue(db, place)
            catalogue = await postgres_store.read_catalogue(db, place)
            load = load_of(catalogue, name, lines, kind, key)
            if load is None:
                return 0
            if load.is_new:
                postgres_store.check_length(load.info)
                await postgres_store.make_table(db, place, load.info)
            for some in _portions(load):
                await postgres_store.upsert(db, place, load.info, some)
                count += len(some)
        return count

    def dump(self, name: str) -> Iterator[bytes]:
        """See ``TableFiles``."""
        with _Session(self._place) as session:
            catalogue = session.run(_catalogue(session.db, self._place))
            info = catalogue.get(name)
            if info is None:
                raise no_table(self.shown, name, catalogue)
            _, rows = session.query(postgres_store.whole_table(self._place, info))
            for row in rows:
                if info.kind is Kind.TABLE:
                    yield row[0].encode()
                else:
                    key, at, content = row
                    yield version_line(info, key, postgres_store.moment(info, at), content)

    def query(self, sql: str) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
        """See ``TableFiles``. What JSON has no exact form for (fractions of a ``numeric``, dates) becomes text."""
        session = _Session(self._place).__enter__()
        try:
            columns, rows = session.query(sql)
        except UsageError:
            session.close()
            raise
        return columns, _plain_rows(session, rows)

    def find(self, name: str) -> TableInfo | None:
        """See ``TableFiles``."""
        with _Session(self._place) as session:
            return session.run(_catalogue(session.db, self._place)).get(name)


def _portions(load: Load) -> Iterator[list[Version]]:
    some: list[Version] = []
    size = 0
    for version in load.versions:
        some.append(version)
        size += len(version.row)
        if len(some) >= ROWS_A_STATEMENT or size >= BYTES_A_STATEMENT:
            yield some
            some, size = [], 0
    if some:
        yield some


async def _catalogue(db: Database, place: PostgresPlace) -> dict[str, TableInfo]:
    try:
        return await postgres_store.read_catalogue(db, place)
    except ReadFailedError as failure:
        raise UsageError(str(failure)) from None


def _plain_rows(session: "_Session", rows: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
    with session:
        for row in rows:
            yield tuple(_plain(value) for value in row)


def _plain(value: Any) -> Any:
    """A value that the exact JSON of the output can hold."""
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if isinstance(value, float) and value - value == 0:  # neither infinite nor NaN
        return value
    if isinstance(value, Decimal) and value.is_finite() and value == value.to_integral_value():
        return int(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


class _Session:
    """One connection, for the time of a ``with``; what fails is a UsageError."""

    def __init__(self, place: PostgresPlace) -> None:
        self._place = place
        self._runner = asyncio.Runner()
        self.db: Database = None

    def __enter__(self) -> "_Session":
        """Connect, unless that is done."""
        if self.db is None:
            try:
                self.db = self.run(self._connected())
            except BaseException:
                self._runner.close()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection; what is not committed is taken back."""
        try:
            self._runner.run(self._closed())
        finally:
            self._runner.close()

    async def _closed(self) -> None:
        try:
            await self.db.close(timeout=CLOSE_WAIT_S)
        except postgres_store.ERRORS:
            self.db.terminate()
            await asyncio.sleep(0)  # the loop closes its socket in its next turn

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine. Raises UsageError for an error of the database."""
        try:
            return self._runner.run(work)
        except postgres_store.ERRORS as error:
            raise UsageError(str(postgres_store.explain(error, self._place))) from None

    def query(self, sql: str) -> tuple[list[str], Iterator[Any]]:
        """Columns and rows of one statement that only reads; the rows come a portion at a time, all of one
        moment."""
        columns, cursor, first = self.run(self._query(sql))
        return columns, self._rows(cursor, first)

    async def _query(self, sql: str) -> tuple[list[str], Any, list[Any]]:
        await self.db.transaction(isolation="repeatable_read", readonly=True).start()
        statement = await self.db.prepare(sql)
        cursor = await statement.cursor()
        # It only runs now; a statement that is refused is told before the first row is asked for.
        first = await cursor.fetch(ROWS_A_STATEMENT)
        return [column.name for column in statement.get_attributes()], cursor, first

    def _rows(self, cursor: Any, portion: list[Any]) -> Iterator[Any]:
        while portion:
            yield from portion
            portion = self.run(cursor.fetch(ROWS_A_STATEMENT))

    async def _connected(self) -> Database:
        options = postgres_store.connection_options(self._place, 0)
        give_up = time.monotonic() + CONNECT_WAIT_S
        while True:
            try:
                return await asyncpg.connect(**options)
            except postgres_store.ERRORS as error:
                failure = postgres_store.explain(error, self._place)
                waits = failure.error.kind in postgres_store.WAITED_FOR
                if not waits or time.monotonic() > give_up:
                    raise
                await asyncio.sleep(CONNECT_PAUSE_S)
            except ValueError:
                raise UsageError(postgres_store.URL_NOT_UNDERSTOOD) from None
