"""Rows as Parquet: ``output: rows.parquet``; needs DuckDB (``pip install 'blockx[parquet]'``).

Column types: BIGINT (``int64``), DOUBLE, BOOLEAN, VARCHAR for all others; a uint256 is decimal text, since
Parquet's readers make a double of what has more digits than they know. Rows gather in a file of JSON lines
beside the place; DuckDB makes Parquet of it at the end, in bounded memory and without the interpreter lock,
in list order. Of a job without rows and schema the file has one column ``no_rows`` and no row.
"""

import os
from pathlib import Path
from typing import Any

from blockx.ipc import exact_json
from blockx.jobs.output_file import (
    JobFailedError,
    OutputFile,
    partial_of,
    sync_folder,
    write_failed,
)
from blockx.jobs.sinks.base import Row, SinkPlace
from blockx.jobs.sinks.schema import schema_of

MEMORY_MAX = "256MB"
"""For DuckDB while it writes; what does not fit goes to a temporary folder beside the file."""
ROW_BYTES_MAX = 64 * 1024 * 1024
"""Longest row that DuckDB reads; a result is smaller."""
_TYPES = {"int64": "BIGINT", "double": "DOUBLE", "bool": "BOOLEAN"}


class ParquetSink:
    """One file."""

    def __init__(self, place: SinkPlace) -> None:
        """Raises JobFailedError: DuckDB is not installed, or the file cannot be made."""
        try:
            import duckdb  # the extra `parquet`
        except ImportError:
            raise JobFailedError(
                f"{place.target}: Parquet needs DuckDB, which is not installed: pip install 'blockx[parquet]'"
            ) from None
        self._duckdb: Any = duckdb
        self._schema = schema_of(place.declared, place.sample)
        self._names = [exact_json.encode(name) for name in self._schema.kinds]
        self._path = Path(os.path.realpath(place.path))
        self._partial = partial_of(self._path)
        self._rows = OutputFile(self._path.with_name(self._path.name + ".rows"))

    def add(self, row: Row) -> None:
        """One line of the gathering file."""
        values = map(exact_json.encode, self._schema.values(row))
        members = [name + b":" + value for name, value in zip(self._names, values, strict=True)]
        self._rows.write(b"{" + b",".join(members) + b"}\n")

    def flush_to_disk(self) -> None:
        """Make Parquet of what has gathered, and bring it to the disk."""
        self._rows.flush_to_disk()
        try:
            self._convert(partial_of(self._rows.path))
            with self._partial.open("rb+") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise write_failed(self._path, error) from None
        except self._duckdb.Error as error:
            reason = str(error).splitlines()[0]
            raise JobFailedError(f"{self._path}: cannot be written: {reason}") from None
        self._rows.discard()

    def rename(self) -> None:
        """Give it its name."""
        try:
            self._partial.replace(self._path)
            sync_folder(self._path.parent)
        except OSError as error:
            raise write_failed(self._path, error) from None

    def discard(self) -> None:
        """Remove both files."""
        self._rows.discard()
        self._partial.unlink(missing_ok=True)

    def _convert(self, rows: Path) -> None:
        kinds = self._schema.kinds
        to = f"TO {_literal(str(self._partial))} (FORMAT parquet, COMPRESSION zstd)"
        with self._duckdb.connect(":memory:") as db:
            db.execute(f"SET memory_limit='{MEMORY_MAX}'")
            db.execute(f"SET temp_directory={_literal(str(self._path) + '.duckdb')}")
            db.execute("SET threads=1")
            if not kinds:
                db.execute(f"COPY (SELECT NULL::VARCHAR AS no_rows LIMIT 0) {to}")
                return
            columns = ", ".join(
                f"{_literal(name)}: {_literal(_TYPES.get(kind, 'VARCHAR'))}"
                for name, kind in kinds.items()
            )
            db.execute(
                f"COPY (SELECT * FROM read_json({_literal(str(rows))}, format='newline_delimited',"
                f" columns={{{columns}}}, maximum_object_size={ROW_BYTES_MAX})) {to}"
            )


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
