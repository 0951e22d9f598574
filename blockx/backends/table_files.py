"""``blockx table load | dump | query``: a table of the store from and to JSONL, and SQL over the store.

Synchronous, on the thread that calls; the verbs of the command line are thin over these functions. A load is
one transaction: all lines or none. Lines are kept as they are in the file, so no number changes.
A line is a row; for kind ``block`` ``{"key": {…}, "block": n, "state": {…}}``, for ``time``
``{"key": {…}, "at": moment, "row": {…}}``. ``dump`` writes what ``load`` takes.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from blockx.backends import table_store
from blockx.backends.replies import ReadFailedError, named
from blockx.backends.table_store import Kind, TableInfo, Version
from blockx.errors import UsageError
from blockx.ipc import exact_json

BUSY_MS = 10_000
"""How long a verb waits for a store that another process has locked."""
LINE_BYTES_MAX = 16 * 1024 * 1024
"""Longest line of a file to load."""

_VERSIONS: dict[Kind, Callable[[str, tuple[str, ...], bytes], Version]] = {
    Kind.TABLE: table_store.row_version,
    Kind.BLOCK: table_store.state_version,
    Kind.TIME: table_store.time_version,
}


def load(
    path: Path, name: str, rows_file: Path, kind: str = "table", key: Sequence[str] | None = None
) -> int:
    """Upsert the lines of a file into a table, which is made if it is new; returns how many lines.

    ``key``: its key columns; needed for a new table of kind ``table``, otherwise the fields of the first line's
    ``key``.

    Raises:
        UsageError: a line is wrong (``file:line``; nothing was written), the table is of another kind or
            key, or the store cannot be written.
    """
    try:
        with (
            closing(table_store.open_for_writing(path, BUSY_MS)) as db,
            rows_file.open("rb") as lines,
        ):
            db.execute("BEGIN IMMEDIATE")
            count = _load(db, name, _numbered(lines, rows_file), Kind(kind), key)
            db.execute("COMMIT")
            return count
    except sqlite3.Error as error:
        raise UsageError(str(table_store.explain(error, path))) from None
    except OSError as error:
        raise UsageError(f"{error.filename or rows_file}: {error.strerror or error}") from None
    except ReadFailedError as failure:
        raise UsageError(str(failure)) from None


def _numbered(lines: Iterable[bytes], file: Path) -> Iterator[tuple[str, bytes]]:
    """Lines that hold something, each with its place for messages."""
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_BYTES_MAX:
            raise UsageError(f"{file}:{number}: a line of more than {LINE_BYTES_MAX} bytes")
        stripped = line.strip()
        if stripped:
            yield f"{file}:{number}", stripped


def _load(
    db: sqlite3.Connection,
    name: str,
    lines: Iterator[tuple[str, bytes]],
    kind: Kind,
    key: Sequence[str] | None,
) -> int:
    info = table_store.read_catalogue(db).get(table_store.check_name(name))
    if info is not None:
        table_store.check_kind(info, kind)
        table_store.check_declared(info, key)
    count = 0

    def versions() -> Iterator[Version]:
        nonlocal info, count
        for where, line in lines:
            try:
                if info is None:
                    info = _new_table(db, name, kind, key, line)
                version = _VERSIONS[kind](name, info.key, line)
                if kind is Kind.TIME:
                    table_store.check_clock(info, version.at)
            except (ReadFailedError, ValueError) as error:
                raise UsageError(f"{where}: {error}; nothing was loaded") from None
            count += 1
            yield version

    produced = versions()
    first = next(produced, None)
    if first is None:
        return 0
    assert info is not None, "the first line made the table"
    table_store.upsert(db, info, _with(first, produced))
    return count


def _with(first: Version, rest: Iterator[Version]) -> Iterator[Version]:
    yield first
    yield from rest


def _new_table(
    db: sqlite3.Connection, name: str, kind: Kind, key: Sequence[str] | None, line: bytes
) -> TableInfo:
    """Made by its first line."""
    if key is None and kind is Kind.TABLE:
        raise UsageError(f"table {name} is new: name its key columns with --key a,b")
    columns = tuple(key) if key is not None else table_store.key_fields(name, line)
    clock = ""
    if kind is Kind.TIME:
        clock = table_store.clock_of(table_store.time_version(name, columns, line).at)
    return table_store.make_table(db, name, kind, columns, clock)


def dump(path: Path, name: str) -> Iterator[bytes]:
    """The lines of a table without their line ends, in key order, as ``load`` takes them.

    Raises:
        UsageError: there is no such store or table.
    """
    with closing(_open(path)) as db:
        catalogue = table_store.read_catalogue(db)
        info = catalogue.get(name)
        if info is None:
            there = named(sorted(catalogue), "none")
            raise UsageError(f"{path} has no table {name!r}; there are: {there}")
        if info.kind is Kind.TABLE:
            for (row,) in db.execute(f"SELECT row FROM {info.sql_name} ORDER BY key"):
                yield row.encode()
            return
        value, at = ("state", "block") if info.kind is Kind.BLOCK else ("row", "at")
        rows = db.execute(f"SELECT key, {at}, {value} FROM {info.sql_name} ORDER BY key, {at}")
        for key, moment, content in rows:
            yield b'{"key":%s,"%s":%s,"%s":%s}' % (
                _key_object(info, key),
                at.encode(),
                exact_json.encode(moment),
                value.encode(),
                content.encode(),
            )


def _key_object(info: TableInfo, text: str) -> bytes:
    values = exact_json.decode(text)
    assert isinstance(values, list), "a key's text is an array"
    return exact_json.encode(dict(zip(info.key, values, strict=True)))


def query(path: Path, sql: str) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Column names and rows of one read-only SQL statement.

    Raises:
        UsageError: there is no such store, or SQLite refuses the statement (its text says why).
    """
    db = _open(path)
    try:
        cursor = db.execute(sql)
    except (sqlite3.Error, sqlite3.Warning) as error:
        db.close()
        raise UsageError(f"{path}: {error}") from None
    return [column[0] for column in cursor.description or ()], _closing_rows(db, cursor)


def _closing_rows(db: sqlite3.Connection, cursor: sqlite3.Cursor) -> Iterator[tuple[Any, ...]]:
    with closing(db):
        yield from cursor


def _open(path: Path) -> sqlite3.Connection:
    if not path.exists():
        raise UsageError(f"{path}: there is no table store; `table load` makes one")
    try:
        return table_store.open_for_reading(path, BUSY_MS)
    except sqlite3.Error as error:
        raise UsageError(str(table_store.explain(error, path))) from None
