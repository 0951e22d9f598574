"""The table store in PostgreSQL: its catalogue, its SQL, and what its errors mean.

Coroutines of whoever owns the connection; nothing here waits for a connection or repeats anything. The schema is
as open as the SQLite file (``table_store``): a table of the store is a table of the schema, named alike.

- kind ``table``: ``key, row``; kind ``block``: ``key, block, state``; kind ``time``: ``key, at, row``.
- ``key`` is the text form of ``keys`` in byte order (collation "C"), so a scan finds the same rows in the same
  order as in SQLite.
- rows and states are ``json``: kept as the text that was written, digit for digit, and open to SQL:
  ``SELECT (row->>'balance')::numeric FROM blockx.balances`` is exact. ``jsonb`` would change the text.
- ``block`` is a bigint. ``at`` is text in UTC as in SQLite, or ``numeric``, where a float has a decimal point
  and an int has none: 5 and 5.0 are one moment, and come back as what was written.

The catalogue is the table ``blockx_tables``; its comment says the format. Key columns never change once they are
in it, so what was read of a table stays true.
"""

import ssl
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import asyncpg

from blockx.backends.postgres_place import PostgresPlace
from blockx.backends.replies import ReadFailedError
from blockx.backends.table_requests import RESULT_BYTES_MAX, AsOf, History, Prefix
from blockx.backends.table_rows import Kind, Moment, TableInfo, Version
from blockx.errors import ErrorKind

FORMAT = "blockx table store, format 1"
"""Comment of the catalogue in schemas that this code writes."""
NAME_CHARS_MAX = 59
"""Of a table: PostgreSQL cuts names after 63 bytes, and `NAME key` is the name of its index."""

Database = Any
"""An ``asyncpg.Connection``, or what a pool lends in its place."""

_COLUMNS = {
    Kind.TABLE: 'key text COLLATE "C", row json NOT NULL, {index} PRIMARY KEY(key)',
    Kind.BLOCK: 'key text COLLATE "C", block bigint, state json NOT NULL, {index} PRIMARY KEY(key, block)',
    Kind.TIME: 'key text COLLATE "C", at {at}, row json NOT NULL, {index} PRIMARY KEY(key, at)',
}


# ---- connections ---------------------------------------------------------------------------------


def connection_options(place: PostgresPlace, statement_s: float) -> dict[str, Any]:
    """What a connection is opened with. ``statement_s``: time of one statement; 0: no limit."""
    return {
        "dsn": place.url,
        "timeout": place.timeout_s,
        # The server's own limit comes first; this one is for a server that no longer answers at all.
        "command_timeout": statement_s + 1 if statement_s else None,
        "server_settings": {
            "application_name": "blockx",
            "search_path": place.schema,
            "statement_timeout": str(round(statement_s * 1_000)),
            # Acknowledged is committed is on disk, whatever the database's default is.
            "synchronous_commit": "on",
            # Compiling a statement costs more than any of these lookups.
            "jit": "off",
        },
    }


ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""What a statement or a connection can fail with (a time-out is an OSError)."""


URL_NOT_UNDERSTOOD = "backends.blockdb.url is not understood; check its parameters"
"""Instead of the error's own text, which may quote the url."""


def explain(error: Exception, place: PostgresPlace) -> ReadFailedError:
    """What an error of the database or of the way to it means to the user."""
    kind, why = _meaning(error, place)
    return ReadFailedError(kind, f"table store {place.shown}: {why}")


def _meaning(error: Exception, place: PostgresPlace) -> tuple[ErrorKind, str]:
    if isinstance(error, asyncpg.PostgresError):
        code = str(error.sqlstate)
        for length in (5, 2):
            if code[:length] in _MEANINGS:
                kind, why = _MEANINGS[code[:length]]
                return kind, why.format(error=error, timeout_ms=round(place.timeout_s * 1_000))
        return ErrorKind.IO_ERROR, str(error)
    if isinstance(error, TimeoutError):
        return ErrorKind.UNAVAILABLE, f"no answer within {place.timeout_s:g} s"
    if isinstance(error, asyncpg.ClientConfigurationError):
        return ErrorKind.IO_ERROR, URL_NOT_UNDERSTOOD
    if isinstance(error, asyncpg.DataError):
        return ErrorKind.IO_ERROR, str(error)
    if isinstance(error, ssl.SSLError):
        return ErrorKind.IO_ERROR, f"no secure connection: {error.reason or error}"
    if isinstance(error, OSError | asyncpg.InterfaceError):
        return ErrorKind.UNAVAILABLE, str(error) or "the connection was lost"
    return ErrorKind.IO_ERROR, str(error)


_MEANINGS = {
    "08": (ErrorKind.UNAVAILABLE, "the connection was lost"),
    "57014": (ErrorKind.UNAVAILABLE, "a statement took more than {timeout_ms} ms"),
    "57P": (ErrorKind.UNAVAILABLE, "{error}"),
    "57P01": (ErrorKind.UNAVAILABLE, "the server is stopping"),
    "57P02": (ErrorKind.UNAVAILABLE, "the server has crashed and is starting again"),
    "57P03": (ErrorKind.UNAVAILABLE, "the server is starting or stopping"),
    "57P05": (ErrorKind.UNAVAILABLE, "the server has closed the idle connection"),
    "40001": (ErrorKind.UNAVAILABLE, "another transaction was in the way"),
    "40P01": (ErrorKind.UNAVAILABLE, "another transaction was in the way"),
    "55P03": (ErrorKind.UNAVAILABLE, "a lock is held by another session"),
    "53300": (ErrorKind.THROTTLED, "the server has no connection left (max_connections)"),
    "53100": (ErrorKind.IO_ERROR, "the disk is full; nothing of this request was written"),
    "25006": (ErrorKind.IO_ERROR, "only reading is possible: {error}"),
    "28": (ErrorKind.IO_ERROR, "user or password is refused: {error}"),
    "42501": (ErrorKind.IO_ERROR, "the user may not do that: {error}"),
}
"""SQLSTATE or its class -> kind and reason."""

WAITED_FOR = (ErrorKind.UNAVAILABLE, ErrorKind.THROTTLED)
"""Kinds of failures that pass: the same statement is sent again later."""


# ---- the catalogue -------------------------------------------------------------------------------


async def read_catalogue(db: Database, place: PostgresPlace) -> dict[str, TableInfo]:
    """All tables of the store by name; empty if the schema or the catalogue is not there.

    Raises:
        ReadFailedError: the schema has another ``blockx_tables``.
    """
    name = f'"{place.schema}".blockx_tables'
    sql = "SELECT obj_description(o, 'pg_class') FROM to_regclass($1) AS t(o) WHERE o IS NOT NULL"
    comments = await db.fetch(sql, name)
    if not comments:
        return {}
    if comments[0][0] != FORMAT:
        text = f"table store {place.shown}: {name} is not the catalogue of this version of blockx"
        raise ReadFailedError(ErrorKind.IO_ERROR, text)
    rows = await db.fetch(f"SELECT name, kind, key_columns, clock FROM {name}")
    return {row[0]: TableInfo.of(*row) for row in rows}


async def lock_catalogue(db: Database, place: PostgresPlace) -> None:
    """Until the end of the transaction nobody else makes a table; makes the schema and the catalogue."""
    key = f"blockx {place.schema}"
    await db.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", key)
    schema = f'"{place.schema}"'
    # IF NOT EXISTS would ask for the right to make one even where it is there.
    if not await db.fetchval("SELECT to_regnamespace($1) IS NOT NULL", schema):
        await db.execute(f"CREATE SCHEMA {schema}")
    if not await db.fetchval("SELECT to_regclass($1) IS NOT NULL", f"{schema}.blockx_tables"):
        await db.execute(
            f"CREATE TABLE {schema}.blockx_tables("
            "name text PRIMARY KEY, kind text NOT NULL, key_columns text NOT NULL, clock text NOT NULL)"
        )
        await db.execute(f"COMMENT ON TABLE {schema}.blockx_tables IS '{FORMAT}'")


def check_length(info: TableInfo) -> None:
    """Raises ReadFailedError for a name that PostgreSQL would cut."""
    if len(info.name) > NAME_CHARS_MAX:
        text = f"table {info.name}: in PostgreSQL a table's name has at most {NAME_CHARS_MAX} characters"
        raise ReadFailedError(ErrorKind.IO_ERROR, text)


async def make_table(db: Database, place: PostgresPlace, info: TableInfo) -> None:
    """Add a table whose name was checked, in the caller's transaction, after ``lock_catalogue``."""
    at = "numeric" if info.clock == "number" else 'text COLLATE "C"'
    # A space is in no table's name, so the index of one is never in the way of another.
    columns = _COLUMNS[info.kind].format(index=f'CONSTRAINT "{info.name} key"', at=at)
    await db.execute(f"CREATE TABLE {_name(place, info)}({columns})")
    sql = f'INSERT INTO "{place.schema}".blockx_tables VALUES($1, $2, $3, $4)'
    await db.execute(sql, info.name, info.kind, info.key_columns, info.clock)


def _name(place: PostgresPlace, info: TableInfo) -> str:
    """With its schema, so that no table of PostgreSQL itself is meant. Both parts were checked."""
    return f'"{place.schema}".{info.sql_name}'


# ---- rows ----------------------------------------------------------------------------------------


def _at_type(info: TableInfo) -> str:
    """The SQL type of what a version is found by; it travels as text but for blocks."""
    if info.kind is Kind.BLOCK:
        return "bigint"
    return "numeric" if info.clock == "number" else "text"


def _at_value(info: TableInfo, at: Moment | None) -> int | str | None:
    if info.kind is Kind.BLOCK or at is None or isinstance(at, str):
        assert not isinstance(at, float), "a block is an int"
        return at
    if isinstance(at, int):
        return str(at)
    digits = format(Decimal(repr(at)), "f")
    return digits if "." in digits else f"{digits}.0"


def moment(info: TableInfo, at: int | str) -> Moment:
    """What a version is found by, as it was written; ``at`` as it came (numbers as text)."""
    if info.clock != "number":
        return at
    text = str(at)
    return float(text) if "." in text else int(text)


async def upsert(
    db: Database, place: PostgresPlace, info: TableInfo, versions: Iterable[Version]
) -> None:
    """Write versions in one statement; the last of equal keys stays."""
    # One statement may not meet a row twice; in order of the keys, so that two writers cannot lock each other out.
    last = {(version.key, version.at): version for version in versions}
    if not last:
        return
    ordered = sorted(last.values(), key=lambda version: version.key)
    keys = [version.key.decode() for version in ordered]
    rows = [version.row.decode() for version in ordered]
    name = _name(place, info)
    if info.kind is Kind.TABLE:
        await db.execute(
            f"INSERT INTO {name}(key, row) SELECT k, r::json FROM unnest($1::text[], $2::text[]) u(k, r) "
            "ON CONFLICT (key) DO UPDATE SET row = excluded.row",
            keys,
            rows,
        )
        return
    at, value = info.version_columns
    sent = "bigint" if info.kind is Kind.BLOCK else "text"
    await db.execute(
        f"INSERT INTO {name}(key, {at}, {value}) SELECT k, a::{_at_type(info)}, r::json "
        f"FROM unnest($1::text[], $2::{sent}[], $3::text[]) u(k, a, r) "
        f"ON CONFLICT (key, {at}) DO UPDATE SET {at} = excluded.{at}, {value} = excluded.{value}",
        keys,
        [_at_value(info, version.at) for version in ordered],
        rows,
    )


async def delete(db: Database, place: PostgresPlace, info: TableInfo, keys: Sequence[str]) -> None:
    """Delete rows of kind ``table``."""
    if keys:
        await db.execute(f"DELETE FROM {_name(place, info)} WHERE key = ANY($1::text[])", keys)


async def get_many(
    db: Database, place: PostgresPlace, info: TableInfo, keys: Sequence[str]
) -> dict[str, str]:
    """The rows of many keys, as texts; what is not there is left out."""
    if not keys:
        return {}  # no key says of which kind the table is
    sql = f"SELECT key, row FROM {_name(place, info)} WHERE key = ANY($1::text[])"
    return {row[0]: row[1] for row in await db.fetch(sql, keys)}


async def get_versions(
    db: Database, place: PostgresPlace, info: TableInfo, asked: Sequence[AsOf]
) -> list[str | None]:
    """The newest state or row of each key at or before its block or moment, in their order."""
    at, value = info.version_columns
    sent = "bigint" if info.kind is Kind.BLOCK else "text"
    sql = (
        f"SELECT n, v.{value} FROM unnest($1::text[], $2::{sent}[]) WITH ORDINALITY AS u(k, a, n), "
        f"LATERAL (SELECT {value} FROM {_name(place, info)} t WHERE t.key = k "
        f"AND t.{at} <= a::{_at_type(info)} ORDER BY t.{at} DESC LIMIT 1) v"
    )
    ats = [_at_value(info, one.at) for one in asked]
    found: list[str | None] = [None] * len(asked)
    for row in await db.fetch(sql, [one.key for one in asked], ats):
        found[row[0] - 1] = row[1]
    return found


async def history(
    db: Database, place: PostgresPlace, info: TableInfo, asked: History
) -> list[tuple[Moment, str]]:
    """The versions of a key between two bounds, oldest first."""
    at, value = info.version_columns
    where = "key = $1"
    given: list[int | str | None] = [asked.key, asked.limit]
    sent = "bigint" if info.kind is Kind.BLOCK else "text"
    for bound, sign in ((asked.first, ">="), (asked.last, "<=")):
        if bound is not None:
            given.append(_at_value(info, bound))
            where += f" AND {at} {sign} ${len(given)}::{sent}::{_at_type(info)}"
    found = f"SELECT {at} AS o, {value} AS r FROM {_name(place, info)} WHERE {where} ORDER BY o LIMIT $2"
    shown = "o" if info.kind is Kind.BLOCK else "o::text"
    rows = await db.fetch(_bounded(found, f"{shown}, r"), *given)
    return [(moment(info, row[0]), row[1]) for row in rows]


async def scan(db: Database, place: PostgresPlace, info: TableInfo, asked: Prefix) -> list[str]:
    """Rows whose key begins so, in the order of the keys' text."""
    begin = asked.text[:-1]
    # See ``table_store.scan`` for what may follow the beginning of a key.
    where = ""
    given: list[int | str] = [asked.limit]
    if begin != "[":
        where = "WHERE key = $2 OR (key >= $3 AND key < $4)"
        given += [f"{begin}]", f"{begin},", f"{begin}-"]
    found = f"SELECT key AS o, row AS r FROM {_name(place, info)} {where} ORDER BY o LIMIT $1"
    return [row[0] for row in await db.fetch(_bounded(found, "r"), *given)]


def _bounded(found: str, columns: str) -> str:
    """Of rows ``o, r`` those that fit into one answer and one more, so that no memory is spent on others."""
    size = "octet_length(r::text)"
    summed = f"SELECT o, r, sum({size}) OVER (ORDER BY o) - {size} AS before FROM ({found}) f"
    return f"SELECT {columns} FROM ({summed}) s WHERE before <= {RESULT_BYTES_MAX} ORDER BY s.o"


def whole_table(place: PostgresPlace, info: TableInfo) -> str:
    """SQL of all rows (``row``) or versions (``key``, what it is found by, content), in key order."""
    if info.kind is Kind.TABLE:
        return f"SELECT row FROM {_name(place, info)} ORDER BY key"
    at, value = info.version_columns
    shown = at if info.kind is Kind.BLOCK else f"{at}::text"
    return f"SELECT key, {shown}, {value} FROM {_name(place, info)} ORDER BY key, {_name(place, info)}.{at}"
