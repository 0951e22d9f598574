"""The disk cache: answers of reads at final blocks, kept between runs in one SQLite file.

An entry is found by chain (chain id and hash of the genesis block), method and canonical parameters; the key is
the SHA-256 of these. Callers put only what can never change: non-null results of reads at blocks that the node
called final, never errors. A chain whose final block changed its hash (a development chain that was made anew)
loses all its entries.

A thread of its own, ``read-cache``, does all the work, in groups: SQLite never holds up the io thread. The
methods of ``ReadCache`` may be called on the io thread alone and never block, except ``close``. Answers come
back on the io thread's loop, in groups.

A cache can only help: whatever goes wrong with the file (locked, full disk, corrupt) is logged once, lookups
find nothing from then on, nothing fails. A file that is no database, or a broken one, is replaced by an empty one.
The write-ahead log keeps the file whole when a process is killed; the entries of the last moments may be missing.

Limits: ``max_bytes`` of keys and results; full: the entries that no run has used for longest go, a tenth at
once. ``PENDING_BYTES_MAX`` waiting to be written; full: what comes is not kept.
"""

import asyncio
import contextlib
import hashlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

from blockx.errors import UsageError
from blockx.ipc import exact_json
from blockx.observability import logger

PENDING_BYTES_MAX: Final = 64 * 1024 * 1024
ENTRY_BYTES: Final = 100
"""What an entry costs beside its result."""
KEYS_A_QUERY: Final = 200
BUSY_MS: Final = 2_000
"""How long another process may hold the file before the cache is given up for this run."""
WRITE_AFTER_S: Final = 0.2
"""New entries are written after this long, or with the next lookup group if that comes later."""
JOIN_S: Final = 10.0

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS chains (
    chain INTEGER PRIMARY KEY,
    chain_id TEXT NOT NULL,
    genesis TEXT NOT NULL,
    final_height INTEGER NOT NULL DEFAULT -1,
    final_hash TEXT NOT NULL DEFAULT '',
    UNIQUE (chain_id, genesis)
);
CREATE TABLE IF NOT EXISTS reads (
    key BLOB PRIMARY KEY,
    chain INTEGER NOT NULL,
    used INTEGER NOT NULL,
    result BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS reads_by_use ON reads (used);
CREATE TABLE IF NOT EXISTS numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT OR IGNORE INTO numbers VALUES ('bytes', 0), ('run', 0);
PRAGMA user_version = 1;
"""
_VERSION: Final = 1


class ChainIdentity(NamedTuple):
    """What a chain is, whatever its name in the configuration."""

    chain_id: str
    genesis: str
    """Hash of block 0."""
    final_height: int
    """The final block that the node named, and its hash."""
    final_hash: str


class CacheNumbers(NamedTuple):
    """What ``blockx cache stats`` shows."""

    entries: int
    bytes: int
    file_bytes: int
    chains: Sequence[tuple[str, str, int, int]]
    """Chain id, hash of the genesis block, entries, bytes of results."""


Found = Callable[[bytes | None], None]
"""Takes the result, or None: not there."""


def read_key(identity: ChainIdentity, method: str, params: bytes) -> bytes:
    """The key of a read. Raises InvalidJsonError: the parameters are no JSON."""
    parts = (
        identity.chain_id.encode(),
        identity.genesis.encode(),
        method.encode(),
        exact_json.canonical(params),
    )
    return hashlib.sha256(b"\0".join(parts)).digest()


class ReadCache:
    """The cache of one io service. See the module's law."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._work: queue.SimpleQueue[Callable[[_File], None] | None] = queue.SimpleQueue()
        self._lookups: list[tuple[bytes, Found]] = []
        self._puts: list[tuple[bytes, int, bytes]] = []
        self._pending_bytes = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._file = _File(path, max_bytes)
        self._thread: threading.Thread | None = None

    # ---- io thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; opening the file is its first work."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="read-cache", daemon=True)
        self._thread.start()

    def identify(self, identity: ChainIdentity, then: Callable[[int], None]) -> None:
        """The number of a chain in the file, for ``put``; 0: the cache is out of order."""

        def work(file: "_File") -> None:
            number = file.chain_number(identity)
            self._back(lambda: then(number))

        self._work.put(work)

    def get(self, key: bytes, found: Found) -> None:
        """Look a read up; ``found`` is called later, on the loop."""
        if not self._lookups:
            assert self._loop is not None, "started first"
            self._loop.call_soon(self._send_lookups)
        self._lookups.append((key, found))

    def put(self, key: bytes, chain: int, result: bytes) -> None:
        """Keep a result; written soon."""
        size = len(result) + ENTRY_BYTES
        if self._pending_bytes + size > PENDING_BYTES_MAX:
            return
        self._pending_bytes += size
        self._puts.append((key, chain, result))
        if self._timer is None:
            assert self._loop is not None, "started first"
            self._timer = self._loop.call_later(WRITE_AFTER_S, self._send_puts)

    def close(self) -> None:
        """Write what is pending and end the thread."""
        if self._thread is None:
            return
        self._send_puts()
        self._work.put(None)
        self._thread.join(JOIN_S)

    def _send_lookups(self) -> None:
        lookups, self._lookups = self._lookups, []

        def work(file: "_File") -> None:
            results = file.get([key for key, _ in lookups])
            self._back(lambda: _hand_out(lookups, results))

        self._work.put(work)

    def _send_puts(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        puts, self._puts = self._puts, []
        if not puts:
            return
        size = sum(len(result) + ENTRY_BYTES for _, _, result in puts)

        def work(file: "_File") -> None:
            file.put(puts)
            self._back(lambda: self._written(size))

        self._work.put(work)

    def _written(self, size: int) -> None:
        self._pending_bytes -= size

    # ---- the cache's own thread --------------------------------------------------------------------

    def _run(self) -> None:
        file = self._file
        file.open()
        while (work := self._work.get()) is not None:
            work(file)
        file.close()

    def _back(self, action: Callable[[], None]) -> None:
        assert self._loop is not None, "started first"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(action)


def _hand_out(lookups: list[tuple[bytes, Found]], results: dict[bytes, bytes]) -> None:
    for key, found in lookups:
        found(results.get(key))


class _File:
    """The SQLite file. One thread; no method raises."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._db: sqlite3.Connection | None = None
        self._run = 0
        """Number of this run: entries that it used are the last to go."""
        self._touched: set[bytes] = set()

    def open(self) -> None:
        """Open or make the file; a broken one is replaced."""
        try:
            try:
                self._db = _opened(self._path)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise  # locked, no folder, full: the file itself may be fine
                logger.warning("the read cache is broken: begun anew", file=str(self._path))
                remove(self._path)
                self._db = _opened(self._path)
            with self._db as db:
                row = db.execute(
                    "UPDATE numbers SET value = value + 1 WHERE name = 'run' RETURNING value"
                ).fetchone()
                self._run = row[0]
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)

    def close(self) -> None:
        """Note what was used and close."""
        if self._db is None:
            return
        try:
            with self._db as db:
                self._write_touched(db)
        except sqlite3.Error as error:
            self._give_up(error)
            return
        self._db.close()

    def chain_number(self, identity: ChainIdentity) -> int:
        """See ``ReadCache.identify``."""
        if self._db is None:
            return 0
        try:
            with self._db as db:
                return _chain_number(db, identity)
        except sqlite3.Error as error:
            self._give_up(error)
            return 0

    def get(self, keys: list[bytes]) -> dict[bytes, bytes]:
        """What is there of these."""
        found: dict[bytes, bytes] = {}
        if self._db is None:
            return found
        try:
            for start in range(0, len(keys), KEYS_A_QUERY):
                some = keys[start : start + KEYS_A_QUERY]
                marks = ",".join("?" * len(some))
                rows = self._db.execute(
                    f"SELECT key, result, used FROM reads WHERE key IN ({marks})", some
                )
                for key, result, used in rows:
                    found[key] = result
                    if used != self._run:
                        self._touched.add(key)
        except sqlite3.Error as error:
            self._give_up(error)
        return found

    def put(self, entries: list[tuple[bytes, int, bytes]]) -> None:
        """Write entries; what is there already stays. Then make room if it is needed."""
        if self._db is None:
            return
        try:
            with self._db as db:
                added = 0
                for key, chain, result in entries:
                    cursor = db.execute(
                        "INSERT OR IGNORE INTO reads VALUES (?, ?, ?, ?)",
                        (key, chain, self._run, result),
                    )
                    added += (len(result) + ENTRY_BYTES) * cursor.rowcount
                self._write_touched(db)
                self._make_room(db, added)
        except sqlite3.Error as error:
            self._give_up(error)

    def _write_touched(self, db: sqlite3.Connection) -> None:
        touched, self._touched = self._touched, set()
        db.executemany(
            "UPDATE reads SET used = ? WHERE key = ?", [(self._run, key) for key in touched]
        )

    def _make_room(self, db: sqlite3.Connection, added: int) -> None:
        (total,) = db.execute(
            "UPDATE numbers SET value = value + ? WHERE name = 'bytes' RETURNING value", (added,)
        ).fetchone()
        if total <= self._max_bytes:
            return
        freed, least = 0, total - self._max_bytes * 9 // 10
        doomed = []
        for key, size in db.execute("SELECT key, length(result) FROM reads ORDER BY used"):
            doomed.append((key,))
            freed += size + ENTRY_BYTES
            if freed >= least:
                break
        db.executemany("DELETE FROM reads WHERE key = ?", doomed)
        db.execute("UPDATE numbers SET value = value - ? WHERE name = 'bytes'", (freed,))

    def _give_up(self, error: Exception) -> None:
        logger.warning(
            "the read cache is out of order: reads go to the nodes",
            file=str(self._path),
            error=str(error),
        )
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
        self._db = None
        if type(error) is sqlite3.DatabaseError:  # broken inside: the next run begins anew
            with contextlib.suppress(OSError):
                remove(self._path)


def _opened(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=BUSY_MS / 1_000, check_same_thread=False)
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"a file of version {version}")
        db.execute("PRAGMA journal_mode = WAL")
        # Not synced at each commit: after a power cut entries may be missing, which a cache can bear.
        db.execute("PRAGMA synchronous = NORMAL")
        if not version:
            # In one transaction, so that a process killed here leaves no half of a schema.
            db.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")
    except BaseException:
        db.close()
        raise
    return db


def _chain_number(db: sqlite3.Connection, identity: ChainIdentity) -> int:
    db.execute(
        "INSERT OR IGNORE INTO chains (chain_id, genesis) VALUES (?, ?)",
        (identity.chain_id, identity.genesis),
    )
    number, height, hash_ = db.execute(
        "SELECT chain, final_height, final_hash FROM chains WHERE chain_id = ? AND genesis = ?",
        (identity.chain_id, identity.genesis),
    ).fetchone()
    if height == identity.final_height and hash_ != identity.final_hash:
        logger.warning(
            "a final block has another hash than before: this chain was made anew, its cached reads are dropped",
            chain_id=identity.chain_id,
            height=height,
        )
        _drop(db, number)
    if height <= identity.final_height:
        db.execute(
            "UPDATE chains SET final_height = ?, final_hash = ? WHERE chain = ?",
            (identity.final_height, identity.final_hash, number),
        )
    return int(number)


def _drop(db: sqlite3.Connection, chain: int) -> None:
    db.execute(
        "UPDATE numbers SET value = value - (SELECT coalesce(sum(length(result) + ?), 0) FROM reads"
        " WHERE chain = ?) WHERE name = 'bytes'",
        (ENTRY_BYTES, chain),
    )
    db.execute("DELETE FROM reads WHERE chain = ?", (chain,))


# ---- for the command line ----------------------------------------------------------------------------


def numbers(path: Path) -> CacheNumbers:
    """What the file holds; zeros if there is none. Any thread; blocks.

    Raises:
        UsageError: it cannot be read.
    """
    if not path.exists():
        return CacheNumbers(0, 0, 0, [])
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_MS / 1_000)) as db:
            rows: Iterable[Any] = db.execute(
                "SELECT chain_id, genesis, count(key), coalesce(sum(length(result)), 0) FROM chains"
                " LEFT JOIN reads USING (chain) GROUP BY chain ORDER BY chain"
            )
            chains = [(row[0], row[1], row[2], row[3]) for row in rows]
            (size,) = db.execute("SELECT value FROM numbers WHERE name = 'bytes'").fetchone()
    except sqlite3.Error as error:
        raise UsageError(f"{path}: the read cache cannot be read: {error}") from None
    file_bytes = sum(file.stat().st_size for file in _files(path) if file.exists())
    return CacheNumbers(sum(chain[2] for chain in chains), size, file_bytes, chains)


def remove(path: Path) -> None:
    """Delete the file with what SQLite keeps beside it. Raises OSError."""
    for file in _files(path):
        file.unlink(missing_ok=True)


def _files(path: Path) -> list[Path]:
    return [
        path,
        *(path.with_name(f"{path.name}-{suffix}") for suffix in ("wal", "shm", "journal")),
    ]
