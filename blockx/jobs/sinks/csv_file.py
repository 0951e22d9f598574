"""Rows as CSV: ``output: rows.csv``. UTF-8, quoted as in RFC 4180, lines end with ``\\n``, a heading first.

Null is an empty field, and so is the empty text quoted (``""``), so that a reader can tell them apart; true and
false are words; a list or dict is its exact JSON. Of a job without rows and schema the file is empty.
"""

from typing import Any

from blockx.jobs.output_file import OutputFile
from blockx.jobs.sinks.base import Row, SinkPlace
from blockx.jobs.sinks.schema import schema_of

_MUST_QUOTE = frozenset('",\n\r')


class CsvSink:
    """One file."""

    def __init__(self, place: SinkPlace) -> None:
        """Raises JobFailedError."""
        self._schema = schema_of(place.declared, place.sample)
        self._file = OutputFile(place.path)
        if self._schema.kinds:
            self._write([_field(name) for name in self._schema.kinds])

    def add(self, row: Row) -> None:
        """One line."""
        self._write([_field(value) for value in self._schema.values(row)])

    def flush_to_disk(self) -> None:
        """Bring it to the disk."""
        self._file.flush_to_disk()

    def rename(self) -> None:
        """Give it its name."""
        self._file.rename()

    def discard(self) -> None:
        """Remove it."""
        self._file.discard()

    def _write(self, fields: list[str]) -> None:
        self._file.write((",".join(fields) + "\n").encode())


def _field(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = value if isinstance(value, str) else repr(value)
    if not text or not _MUST_QUOTE.isdisjoint(text) or text != text.strip():
        return '"' + text.replace('"', '""') + '"'
    return text
