"""The SQLite file of the table store: its catalogue, its SQL, and what its errors mean.

Synchronous, no thread of its own: each function works on the connection it is given. One SQL table a table of
the store, named alike, so that any SQLite tool can read it:

- kind ``table``: ``key, row``; kind ``block``: ``key, block, state``; kind ``time``: ``key, at, row``.
- ``key`` is the text form of ``keys``; rows and states are exact JSON text (a uint256 keeps its digits; SQL's
  own JSON functions would turn it into a float).
- ``at`` is a number, or RFC 3339 text brought to UTC with six decimals, so that text order is time order; a
  table holds one of the two.

The catalogue is the table ``blockx_tables``. Key columns never change once they are in it.
"""

import enum
import math
import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from blockx.backends.keys import check_key_names, key_text
from blockx.backends.replies import ReadFailedError
from blockx.errors import ErrorKind
from blockx.ipc import exact_json

FORMAT = 1
"""``PRAGMA user_version`` of files that this code writes."""
BLOCK_MAX = 2**63 - 1
KEYS_A_QUERY = 64
"""Keys of one SELECT of ``get_many``."""
FEW_KEYS = 8
"""Up to so many keys, a statement of their own number."""
CACHE_KIB = 64 * 1024
"""Page cache of one connection."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_CATALOGUE = """
CREATE TABLE IF NOT EXISTS blockx_tables(
    name TEXT PRIMARY KEY COLLATE NOCASE,
    kind TEXT NOT NULL,
    key_columns TEXT NOT NULL,
    clock TEXT NOT NULL
) WITHOUT ROWID
"""


class Kind(enum.StrEnum):
    """What a table holds."""

    TABLE = "table"
    BLOCK = "block"
    TIME = "time"


_COLUMNS = {
    Kind.TABLE: "key TEXT PRIMARY KEY, row TEXT NOT NULL",
    Kind.BLOCK: "key TEXT, block INTEGER, state TEXT NOT NULL, PRIMARY KEY(key, block)",
    Kind.TIME: "key TEXT, at, row TEXT NOT NULL, PRIMARY KEY(key, at)",
}
SDK_CLASS = {Kind.TABLE: "Table", Kind.BLOCK: "BlockTable", Kind.TIME: "TimeTable"}


class TableInfo(NamedTuple):
    """One line of the catalogue."""

    name: str
    kind: Kind
    key: tuple[str, ...]
    clock: str
    """``number`` or ``text`` for a time table, else empty."""

    @property
    def sql_name(self) -> str:
        """Quoted; the characters of a name are checked when it is made."""
        return f'"{self.name}"'


class Version(NamedTuple):
    """One row to write: ``at`` is None, a block or a moment, by the table's kind."""

    key: bytes
    at: int | float | str | None
    row: bytes


# ---- connections ---------------------------------------------------------------------------------


def open_for_writing(path: Path, busy_ms: int) -> sqlite3.Connection:
    """Open or make the store; makes its folder too. Durable: a commit is on disk when it returns.

    Raises:
        sqlite3.Error, OSError: see ``explain``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.execute(f"PRAGMA busy_timeout={busy_ms}")
        _check_format(db)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        db.execute("BEGIN IMMEDIATE")
        db.execute(_CATALOGUE)
        db.execute(f"PRAGMA user_version={FORMAT}")
        db.execute("COMMIT")
    except BaseException:
        db.close()
        raise
    return db


def open_for_reading(path: Path, busy_ms: int) -> sqlite3.Connection:
    """Open an existing store; the connection can change nothing. Raises as ``open_for_writing``.

    What a killed process left half done is taken back first; a read-only connection could not do that.
    """
    try:
        return _open_for_reading(path, busy_ms)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
    with closing(sqlite3.connect(path)) as db:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return _open_for_reading(path, busy_ms)


def _open_for_reading(path: Path, busy_ms: int) -> sqlite3.Connection:
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        db.execute(f"PRAGMA busy_timeout={busy_ms}")
        db.execute("PRAGMA query_only=ON")
        db.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        _check_format(db)
    except BaseException:
        db.close()
        raise
    return db


def _check_format(db: sqlite3.Connection) -> None:
    found = db.execute("PRAGMA user_version").fetchone()[0]
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if found > FORMAT or (found == 0 and tables):
        raise sqlite3.DatabaseError(
            "it is a SQLite file, but not a table store of this version of blockx"
        )


def explain(error: sqlite3.Error | OSError, path: Path) -> ReadFailedError:
    """What an error of SQLite or of the file system means to the user."""
    if isinstance(error, OSError):
        text = f"table store {path}: {error.strerror or error}"
        return ReadFailedError(ErrorKind.IO_ERROR, text)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    kind, why = _MEANINGS.get(code, (ErrorKind.IO_ERROR, str(error)))
    return ReadFailedError(kind, f"table store {path}: {why}")


_MEANINGS = {
    sqlite3.SQLITE_BUSY: (ErrorKind.UNAVAILABLE, "it is locked by another process"),
    sqlite3.SQLITE_LOCKED: (ErrorKind.UNAVAILABLE, "it is locked by another process"),
    sqlite3.SQLITE_FULL: (
        ErrorKind.IO_ERROR,
        "the disk is full; nothing of this request was written",
    ),
    sqlite3.SQLITE_READONLY: (
        ErrorKind.IO_ERROR,
        "the file or its folder is read-only for this user; nothing was written",
    ),
    sqlite3.SQLITE_CORRUPT: (
        ErrorKind.IO_ERROR,
        "the file is damaged; restore a copy, or save what can be read with `sqlite3 FILE .recover`",
    ),
    sqlite3.SQLITE_NOTADB: (ErrorKind.IO_ERROR, "the file is no SQLite database"),
    sqlite3.SQLITE_CANTOPEN: (
        ErrorKind.IO_ERROR,
        "the file cannot be opened; check that its folder exists and may be written",
    ),
}


# ---- the catalogue -------------------------------------------------------------------------------


def read_catalogue(db: sqlite3.Connection) -> dict[str, TableInfo]:
    """All tables of the store by name; empty for a file that was just made."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name='blockx_tables'").fetchone():
        return {}
    rows = db.execute("SELECT name, kind, key_columns, clock FROM blockx_tables")
    return {
        name: TableInfo(name, Kind(kind), _names(columns), clock)
        for name, kind, columns, clock in rows
    }


def _names(columns: str) -> tuple[str, ...]:
    names = exact_json.decode(columns)
    assert isinstance(names, list), "written by make_table"
    return tuple(map(str, names))


def make_table(
    db: sqlite3.Connection, name: str, kind: Kind, key: Iterable[str], clock: str = ""
) -> TableInfo:
    """Add a table, within the caller's transaction. Raises ReadFailedError for a name that cannot be."""
    check_name(name)
    for other in read_catalogue(db):
        if other.lower() == name.lower():
            text = f"tables {name} and {other} differ only in upper and lower case; rename one"
            raise ReadFailedError(ErrorKind.IO_ERROR, text)
    info = TableInfo(name, kind, tuple(key), clock)
    db.execute(f"CREATE TABLE {info.sql_name}({_COLUMNS[kind]}) WITHOUT ROWID")
    columns = exact_json.encode(list(info.key)).decode()
    db.execute("INSERT INTO blockx_tables VALUES(?, ?, ?, ?)", (name, kind, columns, clock))
    return info


def check_name(name: object) -> str:
    """A table's name. Raises ReadFailedError for one that SQLite or its tools would stumble over."""
    reserved = ("sqlite_", "blockx_")
    if isinstance(name, str) and _NAME.fullmatch(name) and not name.lower().startswith(reserved):
        return name
    raise ReadFailedError(
        ErrorKind.IO_ERROR,
        f"{str(name)[:140]!r} cannot be a table's name: letters, digits, `_`, `.` and `-` (128 at most), a letter "
        "or `_` first, and not beginning with sqlite_ or blockx_",
    )


def check_kind(info: TableInfo, kind: Kind) -> None:
    """Raises ReadFailedError if the table is read or written as another kind than it is."""
    if info.kind is not kind:
        text = f"table {info.name} is a {SDK_CLASS[info.kind]}, not a {SDK_CLASS[kind]}"
        raise ReadFailedError(ErrorKind.IO_ERROR, text)


def check_declared(info: TableInfo, declared: Iterable[str] | None) -> None:
    """Raises ReadFailedError if somebody declares other key columns than the table has."""
    if declared is not None and sorted(declared) != sorted(info.key):
        raise ReadFailedError(
            ErrorKind.IO_ERROR,
            f"table {info.name} has the key {', '.join(info.key)} in the store, but "
            f"{', '.join(declared)} is declared for it",
        )


# ---- rows ----------------------------------------------------------------------------------------


def row_version(table: str, columns: tuple[str, ...], raw: bytes) -> Version:
    """A row of kind ``table``. Raises ReadFailedError if it is no object or lacks a key column."""
    exact_json.check_spliced(raw)
    row = exact_json.decode(raw)
    if not isinstance(row, dict):
        raise ReadFailedError(ErrorKind.IO_ERROR, f"table {table}: a row must be an object")
    missing = [column for column in columns if column not in row]
    if missing:
        text = f"table {table}: a row lacks {missing[0]}, which belongs to its key {', '.join(columns)}"
        raise ReadFailedError(ErrorKind.IO_ERROR, text)
    return Version(key_text(table, columns, {c: row[c] for c in columns}), None, raw)


def key_fields(table: str, raw: bytes) -> tuple[str, ...]:
    """The names of the key of a versioned row (``{"key": {…}, …}``)."""
    return check_key_names(table, exact_json.decode(_member(table, raw, "key")))


def state_version(table: str, columns: tuple[str, ...], raw: bytes) -> Version:
    """A line ``{"key", "block", "state"}``. Raises ReadFailedError for any other."""
    exact_json.check_spliced(raw)
    key = key_text(table, columns, exact_json.decode(_member(table, raw, "key")))
    block = check_block(table, exact_json.decode(_member(table, raw, "block")))
    return Version(key, block, _object(table, _member(table, raw, "state"), "state"))


def time_version(table: str, columns: tuple[str, ...], raw: bytes) -> Version:
    """A line ``{"key", "at", "row"}``. Raises ReadFailedError for any other."""
    exact_json.check_spliced(raw)
    key = key_text(table, columns, exact_json.decode(_member(table, raw, "key")))
    at = moment(table, exact_json.decode(_member(table, raw, "at")))
    return Version(key, at, _object(table, _member(table, raw, "row"), "row"))


def _member(table: str, raw: bytes, name: str) -> bytes:
    try:
        return exact_json.raw_members(raw)[name]
    except KeyError:
        text = f"table {table}: a line lacks {name!r}"
        raise ReadFailedError(ErrorKind.IO_ERROR, text) from None
    except ValueError as error:
        text = f"table {table}: a line must be an object: {error}"
        raise ReadFailedError(ErrorKind.IO_ERROR, text) from None


def _object(table: str, raw: bytes, name: str) -> bytes:
    if not isinstance(exact_json.decode(raw), dict):
        text = f"table {table}: {name!r} must be an object"
        raise ReadFailedError(ErrorKind.IO_ERROR, text)
    return raw


def check_block(table: str, block: object) -> int:
    """A height. Raises ReadFailedError."""
    if isinstance(block, int) and not isinstance(block, bool) and 0 <= block <= BLOCK_MAX:
        return block
    text = f"table {table}: a block is a whole number from 0 to 2^63 - 1, not {str(block)[:80]}"
    raise ReadFailedError(ErrorKind.IO_ERROR, text)


def moment(table: str, at: object) -> int | float | str:
    """A moment as it is stored: a number as it is, RFC 3339 text in UTC. Raises ReadFailedError."""
    if isinstance(at, str):
        try:
            when = datetime.fromisoformat(at)
        except ValueError:
            pass
        else:
            when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
            return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    elif isinstance(at, float):
        if math.isfinite(at):
            return at
    elif isinstance(at, int) and not isinstance(at, bool) and abs(at) <= BLOCK_MAX:
        return at
    text = f"table {table}: `at` is a number or RFC 3339 text, not {str(at)[:80]}"
    raise ReadFailedError(ErrorKind.IO_ERROR, text)


def clock_of(at: int | float | str | None) -> str:
    """Which of the two kinds of moment it is."""
    return "text" if isinstance(at, str) else "number"


def check_clock(info: TableInfo, at: int | float | str | None) -> None:
    """Raises ReadFailedError for a number in a table of texts, and the other way round."""
    if clock_of(at) != info.clock:
        words = {"text": "RFC 3339 texts", "number": "numbers"}
        text = f"table {info.name} has {words[info.clock]} as `at`, not {words[clock_of(at)]}"
        raise ReadFailedError(ErrorKind.IO_ERROR, text)


_INSERT = {
    Kind.TABLE: "INSERT OR REPLACE INTO {} VALUES(?, ?)",
    Kind.BLOCK: "INSERT OR REPLACE INTO {} VALUES(?, ?, ?)",
    Kind.TIME: "INSERT OR REPLACE INTO {} VALUES(?, ?, ?)",
}


def upsert(db: sqlite3.Connection, info: TableInfo, versions: Iterable[Version]) -> None:
    """Write versions, within the caller's transaction; the last of equal keys stays."""
    sql = _INSERT[info.kind].format(info.sql_name)
    if info.kind is Kind.TABLE:
        db.executemany(sql, ((v.key.decode(), v.row.decode()) for v in versions))
    else:
        db.executemany(sql, ((v.key.decode(), v.at, v.row.decode()) for v in versions))


def delete(db: sqlite3.Connection, info: TableInfo, keys: Iterable[bytes]) -> None:
    """Delete rows of kind ``table``, within the caller's transaction."""
    db.executemany(f"DELETE FROM {info.sql_name} WHERE key=?", ((key.decode(),) for key in keys))


def get(db: sqlite3.Connection, info: TableInfo, key: bytes) -> bytes | None:
    """The row with a key."""
    found = db.execute(f"SELECT row FROM {info.sql_name} WHERE key=?", (key.decode(),)).fetchone()
    return None if found is None else found[0].encode()


def get_many(db: sqlite3.Connection, info: TableInfo, keys: list[str]) -> dict[str, str]:
    """The rows of many keys, as texts; what is not there is left out. Half the time of one at a time."""
    found: dict[str, str] = {}
    for start in range(0, len(keys), KEYS_A_QUERY):
        some = keys[start : start + KEYS_A_QUERY]
        # Always the same number of marks, so that the statement is prepared once.
        some += [some[0]] * (KEYS_A_QUERY - len(some)) if len(some) > FEW_KEYS else []
        marks = ",".join("?" * len(some))
        found.update(
            db.execute(f"SELECT key, row FROM {info.sql_name} WHERE key IN ({marks})", some)
        )
    return found


def history(
    db: sqlite3.Connection,
    info: TableInfo,
    key: bytes,
    first: int | float | str | None,
    last: int | float | str | None,
    limit: int,
) -> list[tuple[int | float | str, bytes]]:
    """The versions of a key from ``first`` to ``last`` (None: no bound), oldest first, ``limit`` at most."""
    value, column = ("state", "block") if info.kind is Kind.BLOCK else ("row", "at")
    sql, given = f"SELECT {column}, {value} FROM {info.sql_name} WHERE key=?", [key.decode()]
    bounds: list[int | float | str] = []
    for bound, sign in ((first, ">="), (last, "<=")):
        if bound is not None:
            sql += f" AND {column}{sign}?"
            bounds.append(bound)
    rows = db.execute(f"{sql} ORDER BY {column} LIMIT ?", [*given, *bounds, limit])
    return [(at, text.encode()) for at, text in rows]


def scan(db: sqlite3.Connection, info: TableInfo, prefix: bytes, limit: int) -> list[bytes]:
    """Rows whose key begins so, in the order of the keys' text, ``limit`` at most.

    ``prefix``: the text of a whole key, or of its first values as an array.
    """
    name, begin = info.sql_name, prefix.decode()[:-1]
    # `["a"` begins `["a"]` and `["a",1]`, but also `["a"…` of no other value: a text ends with its quote, and a
    # number could only go on with digits, which neither `,` nor `]` is.
    sql = (
        f"SELECT row FROM {name} WHERE key=? OR (key>=? AND key<?) ORDER BY key LIMIT ?"
        if begin != "["
        else f"SELECT row FROM {name} ORDER BY key LIMIT ?"
    )
    given = (f"{begin}]", f"{begin},", f"{begin}-", limit) if begin != "[" else (limit,)
    return [text.encode() for (text,) in db.execute(sql, given)]


def get_version(
    db: sqlite3.Connection, info: TableInfo, key: bytes, at: int | float | str
) -> bytes | None:
    """The newest state or row at or before a block or moment."""
    value, column = ("state", "block") if info.kind is Kind.BLOCK else ("row", "at")
    sql = (
        f"SELECT {value} FROM {info.sql_name} WHERE key=? AND {column}<=? "
        f"ORDER BY {column} DESC LIMIT 1"
    )
    found = db.execute(sql, (key.decode(), at)).fetchone()
    return None if found is None else found[0].encode()
