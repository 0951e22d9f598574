"""Rows in a SQLite file of their own: ``output: rows.sqlite``, one table ``rows`` in list order.

Column types: INTEGER (``int64``), REAL, BOOLEAN (0 and 1), TEXT for all others; a uint256 is decimal text, since
SQLite's integers have 64 bits. Written beside its place without a rollback journal (a file that is not whole
is thrown away anyway), brought to the disk, renamed. Of a job without rows and schema it has no table.
"""

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any

from blockx.jobs.output_file import JobFailedError, partial_of, sync_folder, write_failed
from blockx.jobs.sinks.base import Row, SinkPlace
from blockx.jobs.sinks.schema import schema_of

ROWS_A_STATEMENT = 1_000
_TYPES = {"int64": "INTEGER", "double": "REAL", "bool": "BOOLEAN"}


class SqliteSink:
    """One file."""

    def __init__(self, place: SinkPlace) -> None:
        """Raises JobFailedError."""
        self._schema = schema_of(place.declared, place.sample)
        self._path = Path(os.path.realpath(place.path))
        self._partial = partial_of(self._path)
        self._waiting: list[tuple[Any, ...]] = []
        self._db: sqlite3.Connection | None = None
        kinds = self._schema.kinds
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._partial.unlink(missing_ok=True)
            self._db = sqlite3.connect(self._partial, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=OFF")
            self._db.execute("PRAGMA synchronous=OFF")
            self._db.execute("BEGIN")
            if kinds:
                columns = [
                    f"{_quoted(name)} {_TYPES.get(kind, 'TEXT')}" for name, kind in kinds.items()
                ]
                self._db.execute(f"CREATE TABLE rows({', '.join(columns)})")
        except OSError as error:
            raise write_failed(self._path, error) from None
        except sqlite3.Error as error:
            raise self._failed(error) from None
        self._insert = f"INSERT INTO rows VALUES({', '.join('?' * len(kinds))})"

    def add(self, row: Row) -> None:
        """One row of the table."""
        self._waiting.append(self._schema.values(row))
        if len(self._waiting) >= ROWS_A_STATEMENT:
            self._write()

    def flush_to_disk(self) -> None:
        """Commit, close, bring it to the disk."""
        self._write()
        assert self._db is not None
        try:
            self._db.execute("COMMIT")
            self._db.close()
            with self._partial.open("rb+") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise write_failed(self._path, error) from None
        except sqlite3.Error as error:
            raise self._failed(error) from None

    def rename(self) -> None:
        """Give it its name."""
        try:
            self._partial.replace(self._path)
            sync_folder(self._path.parent)
        except OSError as error:
            raise write_failed(self._path, error) from None

    def discard(self) -> None:
        """Remove it."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
        self._partial.unlink(missing_ok=True)

    def _write(self) -> None:
        if not self._waiting:
            return
        assert self._db is not None
        try:
            self._db.executemany(self._insert, self._waiting)
        except sqlite3.Error as error:
            raise self._failed(error) from None
        self._waiting.clear()

    def _failed(self, error: sqlite3.Error) -> JobFailedError:
        return JobFailedError(
            f"{self._path}: cannot be written: {error}; free the disk or name another file, then run again"
        )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
