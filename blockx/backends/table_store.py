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

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from blockx.backends.replies import ReadFailedError
from blockx.backends.table_rows import Kind, Moment, TableInfo, Version
from blockx.errors import ErrorKind

FORMAT = 1
"""``PRAGMA user_version`` of files that this code writes."""
KEYS_A_QUERY = 64
"""Keys of one SELECT of ``get_many``."""
FEW_KEYS = 8
"""Up to so many keys, a statement of their own number."""
CACHE_KIB = 64 * 1024
"""Page cache of one connection."""

_CATALOGUE = """
CREATE TABLE IF NOT EXISTS blockx_tables(
    name TEXT PRIMARY KEY COLLATE NOCASE,
    kind TEXT NOT NULL,
    key_columns TEXT NOT NULL,
    clock TEXT NOT NULL
) WITHOUT ROWID
"""


_COLUMNS = {
    Kind.TABLE: "key TEXT PRIMARY KEY, row TEXT NOT NULL",
    Kind.BLOCK: "key TEXT, block INTEGER, state TEXT NOT NULL, PRIMARY KEY(key, block)",
    Kind.TIME: "key TEXT, at, row TEXT NOT NULL, PRIMARY KEY(key, at)",
}


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
    return {row[0]: TableInfo.of(*row) for row in rows}


def make_table(db: sqlite3.Connection, info: TableInfo) -> None:
    """Add a table whose name was checked (``check_new_name``), within the caller's transaction."""
    db.execute(f"CREATE TABLE {info.sql_name}({_COLUMNS[info.kind]}) WITHOUT ROWID")
    row = (info.name, info.kind, info.key_columns, info.clock)
    db.execute("INSERT INTO blockx_tables VALUES(?, ?, ?, ?)", row)


# ---- rows ----------------------------------------------------------------------------------------


_INSERT = {
    Kind.TABLE: "INSERT OR REPLACE INTO {} VALUES(?, ?)",
    Kind.BLOCK: "INSERT OR REPLACE INTO {} VALUES(?, ?, ?)",
    Kind.TIME: "INSERT OR REPLACE INTO {} VALUES(?, ?, ?)",
}


def upsert(db: sqlite3.Connection, info: TableInfo, versions: Iterable[Version]) -> int:
    """Write versions, within the caller's transaction; the last of equal keys stays. Returns how many."""
    sql = _INSERT[info.kind].format(info.sql_name)
    if info.kind is Kind.TABLE:
        return db.executemany(sql, ((v.key.decode(), v.row.decode()) for v in versions)).rowcount
    given = ((v.key.decode(), v.at, v.row.decode()) for v in versions)
    return db.executemany(sql, given).rowcount


def delete(db: sqlite3.Connection, info: TableInfo, keys: Iterable[str]) -> None:
    """Delete rows of kind ``table``, within the caller's transaction."""
    db.executemany(f"DELETE FROM {info.sql_name} WHERE key=?", ((key,) for key in keys))


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
    key: str,
    first: Moment | None,
    last: Moment | None,
    limit: int,
) -> list[tuple[Moment, str]]:
    """The versions of a key from ``first`` to ``last`` (None: no bound), oldest first, ``limit`` at most."""
    column, value = info.version_columns
    sql = f"SELECT {column}, {value} FROM {info.sql_name} WHERE key=?"
    bounds: list[Moment] = []
    for bound, sign in ((first, ">="), (last, "<=")):
        if bound is not None:
            sql += f" AND {column}{sign}?"
            bounds.append(bound)
    rows = db.execute(f"{sql} ORDER BY {column} LIMIT ?", [key, *bounds, limit])
    return list(rows)


def scan(db: sqlite3.Connection, info: TableInfo, prefix: str, limit: int) -> list[str]:
    """Rows whose key begins so, in the order of the keys' text, ``limit`` at most.

    ``prefix``: the text of a whole key, or of its first values as an array.
    """
    name, begin = info.sql_name, prefix[:-1]
    # `["a"` begins `["a"]` and `["a",1]`, but also `["a"…` of no other value: a text ends with its quote, and a
    # number could only go on with digits, which neither `,` nor `]` is.
    sql = (
        f"SELECT row FROM {name} WHERE key=? OR (key>=? AND key<?) ORDER BY key LIMIT ?"
        if begin != "["
        else f"SELECT row FROM {name} ORDER BY key LIMIT ?"
    )
    given = (f"{begin}]", f"{begin},", f"{begin}-", limit) if begin != "[" else (limit,)
    return [text for (text,) in db.execute(sql, given)]


def get_version(db: sqlite3.Connection, info: TableInfo, key: str, at: Moment) -> str | None:
    """The newest state or row at or before a block or moment."""
    column, value = info.version_columns
    sql = (
        f"SELECT {value} FROM {info.sql_name} WHERE key=? AND {column}<=? "
        f"ORDER BY {column} DESC LIMIT 1"
    )
    found = db.execute(sql, (key, at)).fetchone()
    return None if found is None else str(found[0])
