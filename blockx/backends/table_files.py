"""``blockx table load | dump | query``: a table of the store from and to JSONL, and SQL over the store.

Synchronous, on the thread that calls; the verbs of the command line, sources and sinks are thin over it. A load
is one transaction: all lines or none. Lines are kept as they are in the file, so no number changes.
A line is a row; for kind ``block`` ``{"key": {…}, "block": n, "state": {…}}``, for ``time``
``{"key": {…}, "at": moment, "row": {…}}``. ``dump`` writes what ``load`` takes.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from blockx.backends import table_rows, table_store
from blockx.backends.replies import ReadFailedError, named
from blockx.backends.table_rows import Kind, Moment, TableInfo, Version
from blockx.errors import UsageError
from blockx.ipc import exact_json

BUSY_MS = 10_000
"""How long a verb waits for a store that another process has locked."""
LINE_BYTES_MAX = 16 * 1024 * 1024
"""Longest line of a file to load."""

_VERSIONS: dict[Kind, Callable[[str, tuple[str, ...], bytes], Version]] = {
    Kind.TABLE: table_rows.row_version,
    Kind.BLOCK: table_rows.state_version,
    Kind.TIME: table_rows.time_version,
}


class TableFiles(Protocol):
    """What the verbs need of a store, whichever it is."""

    shown: str
    """The store in messages."""

    def load(
        self, name: str, rows_file: Path, kind: str = "table", key: Sequence[str] | None = None
    ) -> int:
        """Upsert the lines of a file into a table, which is made if it is new; returns how many lines.

        ``key``: its key columns; needed for a new table of kind ``table``, otherwise the fields of the first
        line's ``key``.

        Raises:
            UsageError: a line is wrong (``file:line``; nothing was written), the table is of another kind or
                key, or the store cannot be written.
        """

    def dump(self, name: str) -> Iterator[bytes]:
        """The lines of a table without their line ends, in key order, as ``load`` takes them.

        Raises:
            UsageError: there is no such store or table.
        """

    def query(self, sql: str) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
        """Column names and rows of one read-only SQL statement.

        Raises:
            UsageError: there is no such store, or it refuses the statement (its text says why).
        """

    def find(self, name: str) -> TableInfo | None:
        """A table of the store; None too if there is no store yet. Raises UsageError: it cannot be read."""


# ---- the same for every store --------------------------------------------------------------------


class Load(NamedTuple):
    """What a file does to the store."""

    info: TableInfo
    is_new: bool
    """The table is to be made first."""
    versions: Iterator[Version]
    """Checked as they are taken. Raises UsageError naming the line."""


def load_of(
    catalogue: Mapping[str, TableInfo],
    name: str,
    lines: Iterator[tuple[str, bytes]],
    kind: Kind,
    key: Sequence[str] | None,
) -> Load | None:
    """What the lines do to a store with these tables; None: there is no line.

    Raises:
        UsageError, ReadFailedError: the first line, the name, the kind or the key is wrong.
    """
    info = catalogue.get(table_rows.check_name(name))
    if info is not None:
        table_rows.check_kind(info, kind)
        table_rows.check_declared(info, key)
    first = next(lines, None)
    if first is None:
        return None
    if info is None:
        where, line = first
        table_rows.check_new_name(catalogue, name)
        try:
            info = _new_table(name, kind, key, line)
        except (ReadFailedError, ValueError) as error:
            raise _wrong_line(where, error) from None
    return Load(info, name not in catalogue, _checked(info, first, lines))


def numbered(lines: Iterable[bytes], file: Path) -> Iterator[tuple[str, bytes]]:
    """Lines that hold something, each with its place for messages."""
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_BYTES_MAX:
            raise UsageError(f"{file}:{number}: a line of more than {LINE_BYTES_MAX} bytes")
        stripped = line.strip()
        if stripped:
            yield f"{file}:{number}", stripped


def _new_table(name: str, kind: Kind, key: Sequence[str] | None, line: bytes) -> TableInfo:
    """As its first line has it."""
    if key is None and kind is Kind.TABLE:
        raise UsageError(f"table {name} is new: name its key columns with --key a,b")
    columns = tuple(key) if key is not None else table_rows.key_fields(name, line)
    clock = ""
    if kind is Kind.TIME:
        clock = table_rows.clock_of(table_rows.time_version(name, columns, line).at)
    return TableInfo(name, kind, columns, clock)


def _checked(
    info: TableInfo, first: tuple[str, bytes], rest: Iterator[tuple[str, bytes]]
) -> Iterator[Version]:
    line: tuple[str, bytes] | None = first
    while line is not None:
        where, raw = line
        try:
            version = _VERSIONS[info.kind](info.name, info.key, raw)
            if info.kind is Kind.TIME:
                table_rows.check_clock(info, version.at)
        except (ReadFailedError, ValueError) as error:
            raise _wrong_line(where, error) from None
        yield version
        line = next(rest, None)


def _wrong_line(where: str, error: ReadFailedError | ValueError) -> UsageError:
    return UsageError(f"{where}: {error}; nothing was loaded")


def no_table(shown: str, name: str, catalogue: Iterable[str]) -> UsageError:
    """A table that is to be dumped is not there."""
    there = named(sorted(catalogue), "none")
    return UsageError(f"{shown} has no table {name!r}; there are: {there}")


def version_line(info: TableInfo, key: str, at: Moment, content: str) -> bytes:
    """One version of a block or time table, as ``load`` takes it."""
    values = exact_json.decode(key)
    assert isinstance(values, list), "a key's text is an array"
    at_name, value_name = (name.encode() for name in info.version_columns)
    return b'{"key":%s,"%s":%s,"%s":%s}' % (
        exact_json.encode(dict(zip(info.key, values, strict=True))),
        at_name,
        exact_json.encode(at),
        value_name,
        content.encode(),
    )


# ---- the embedded store --------------------------------------------------------------------------


class SqliteFiles:
    """``TableFiles`` of a SQLite file; each method opens it for itself."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.shown = str(path)

    def load(
        self, name: str, rows_file: Path, kind: str = "table", key: Sequence[str] | None = None
    ) -> int:
        """See ``TableFiles``; makes the file too."""
        try:
            with (
                closing(table_store.open_for_writing(self._path, BUSY_MS)) as db,
                rows_file.open("rb") as lines,
            ):
                db.execute("BEGIN IMMEDIATE")
                catalogue = table_store.read_catalogue(db)
                load = load_of(catalogue, name, numbered(lines, rows_file), Kind(kind), key)
                if load is None:
                    return 0
                if load.is_new:
                    table_store.make_table(db, load.info)
                count = table_store.upsert(db, load.info, load.versions)
                db.execute("COMMIT")
                return count
        except sqlite3.Error as error:
            raise UsageError(str(table_store.explain(error, self._path))) from None
        except OSError as error:
            raise UsageError(f"{error.filename or rows_file}: {error.strerror or error}") from None
        except ReadFailedError as failure:
            raise UsageError(str(failure)) from None

    def dump(self, name: str) -> Iterator[bytes]:
        """See ``TableFiles``."""
        with closing(self._open()) as db:
            catalogue = table_store.read_catalogue(db)
            info = catalogue.get(name)
            if info is None:
                raise no_table(self.shown, name, catalogue)
            if info.kind is Kind.TABLE:
                for (row,) in db.execute(f"SELECT row FROM {info.sql_name} ORDER BY key"):
                    yield row.encode()
                return
            at, value = info.version_columns
            columns = f"key, {at}, {value}"
            rows = db.execute(f"SELECT {columns} FROM {info.sql_name} ORDER BY key, {at}")
            for key, moment, content in rows:
                yield version_line(info, key, moment, content)

    def query(self, sql: str) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
        """See ``TableFiles``."""
        db = self._open()
        db.set_authorizer(_deny_other_files)
        try:
            cursor = db.execute(sql)
        except (sqlite3.Error, sqlite3.Warning) as error:
            db.close()
            raise UsageError(f"{self.shown}: {error}") from None
        return [column[0] for column in cursor.description or ()], _closing_rows(db, cursor)

    def find(self, name: str) -> TableInfo | None:
        """See ``TableFiles``."""
        if not self._path.exists():
            return None
        with closing(self._open()) as db:
            try:
                return table_store.read_catalogue(db).get(name)
            except sqlite3.Error as error:
                raise UsageError(str(table_store.explain(error, self._path))) from None

    def _open(self) -> sqlite3.Connection:
        if not self._path.exists():
            raise UsageError(f"{self.shown}: there is no table store; `table load` makes one")
        try:
            return table_store.open_for_reading(self._path, BUSY_MS)
        except sqlite3.Error as error:
            raise UsageError(str(table_store.explain(error, self._path))) from None


def _deny_other_files(action: int, *_: str | None) -> int:
    """A read-only connection would still make the file that ATTACH names."""
    return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_ATTACH else sqlite3.SQLITE_OK


def _closing_rows(db: sqlite3.Connection, cursor: sqlite3.Cursor) -> Iterator[tuple[Any, ...]]:
    with closing(db):
        yield from cursor
