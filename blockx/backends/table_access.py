"""Whole tables for sources and sinks of jobs: all rows out, many rows in.

Synchronous, on the thread of the job that asks; each method opens the store for itself, so the io thread's
connections are not touched. A table held in memory is read from its file and cannot be written.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from blockx.backends.postgres_place import place_of
from blockx.backends.table_files import SqliteFiles, TableFiles
from blockx.config import LoadedConfig, is_table_server
from blockx.errors import UsageError


def files_of(loaded: LoadedConfig) -> TableFiles | None:
    """The store of a configuration; None: it names none. Opens nothing.

    Raises:
        UsageError: it is in PostgreSQL, and the package for that is not installed.
    """
    config = loaded.config.backends.blockdb
    if is_table_server(config.url):
        return None  # it hands out and takes no whole tables
    if config.url:
        place = place_of(config)
        from blockx.backends.postgres_files import PostgresFiles  # its package is an extra

        return PostgresFiles(place)
    return SqliteFiles(loaded.resolve(config.path)) if config.path else None


class TableAccess:
    """The tables of one configuration."""

    def __init__(self, loaded: LoadedConfig) -> None:
        config = loaded.config.backends.blockdb
        self._store = files_of(loaded)
        self._memory: Mapping[str, Path] = {
            name: loaded.resolve(file) for name, file in config.memory.items()
        }
        self._declared = {name: table.key for name, table in config.tables.items()}

    def rows(self, table: str) -> Iterator[bytes]:
        """The rows of a table, in key order (in memory: as they stand). Raises UsageError."""
        file = self._memory.get(table)
        if file is not None:
            return _lines_of(file)
        if self._store is None:
            raise UsageError(
                f"there is no table {table!r}; neither backends.blockdb.path nor .url names a store"
            )
        # One step, so that a missing table is told before anything runs.
        lines = self._store.dump(table)
        return _chained(next(lines, None), lines)

    def key_of(self, table: str) -> Sequence[str] | None:
        """Key columns of a table that can be written; None: not known."""
        if self._store is None or table in self._memory:
            return None
        info = self._store.find(table)
        if info is not None:
            return info.key
        return self._declared.get(table)

    def load(self, table: str, rows_file: Path, key: Sequence[str]) -> None:
        """Upsert the lines of a file, all or nothing, durable on return. Raises UsageError."""
        assert self._store is not None, "key_of knows of no table without a store"
        self._store.load(table, rows_file, "table", key)


def _lines_of(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as lines:
            for line in lines:
                if row := line.strip():
                    yield row
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None


def _chained(first: bytes | None, rest: Iterator[bytes]) -> Iterator[bytes]:
    if first is not None:
        yield first
        yield from rest
