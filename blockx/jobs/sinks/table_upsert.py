"""Rows into a table of the store: ``output: table:NAME``.

Rows gather in a file without a name and are upserted at the end of the job in one transaction, all or nothing;
the last of equal keys stays. So a stopped job has changed nothing, and a job that is run again changes
nothing. The key columns must be known: from the store, or ``backends.blockdb.tables.NAME.key``.
"""

import tempfile
from pathlib import Path

from blockx.errors import UsageError
from blockx.ipc import exact_json
from blockx.jobs.output_file import JobFailedError
from blockx.jobs.sinks.base import Row, RowRefusedError, SinkPlace

_SCALARS = (str, int, float, bool, type(None))


class TableSink:
    """One table."""

    def __init__(self, place: SinkPlace) -> None:
        """Raises JobFailedError: there is no store, or the table's key is not known."""
        self._table = place.target
        if place.tables is None:
            raise JobFailedError(
                f"output table:{self._table}: there is no table store to write to; add backends.blockdb.path or .url"
            )
        key = place.tables.key_of(self._table)
        if key is None:
            raise JobFailedError(
                f"output table:{self._table}: its key is not known; declare it in"
                f" backends.blockdb.tables.{self._table}.key"
            )
        self._tables, self._key = place.tables, key
        self._count = 0
        self._file = tempfile.NamedTemporaryFile(prefix="blockx-rows-", suffix=".jsonl")  # noqa: SIM115

    def add(self, row: Row) -> None:
        """One upsert, later."""
        for column in self._key:
            if column not in row:
                raise RowRefusedError(
                    column, f"it belongs to the key of table {self._table}, and is missing"
                )
            if not isinstance(row[column], _SCALARS):
                raise RowRefusedError(
                    column, f"it belongs to the key of table {self._table}: no list, no dict"
                )
        try:
            self._file.write(exact_json.encode(dict(row)) + b"\n")
        except OSError as error:
            raise self._failed(error.strerror or str(error)) from None
        self._count += 1

    def flush_to_disk(self) -> None:
        """Everything has gathered."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._failed(error.strerror or str(error)) from None

    def rename(self) -> None:
        """Upsert all rows."""
        if not self._count:
            return
        try:
            self._tables.load(self._table, Path(self._file.name), self._key)
        except UsageError as error:
            raise self._failed(str(error)) from None
        self.discard()

    def discard(self) -> None:
        """Drop what has gathered."""
        self._file.close()

    def _failed(self, why: str) -> JobFailedError:
        return JobFailedError(
            f"output table:{self._table}: cannot be written: {why}; run again to go on"
        )
