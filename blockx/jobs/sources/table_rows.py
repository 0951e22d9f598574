"""Calls out of the table store: ``calls: {table: NAME}``, one for each row, in key order.

The fields of a row are the columns for ``args``; a field that a row lacks is null. Without ``args`` a call gets
the row as one dict. What calls of the same job write to the table may or may not be seen.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from blockx.errors import UsageError
from blockx.ipc import exact_json
from blockx.jobs.sources.base import Line, Place, check_keys
from blockx.jobs.sources.template import Template, template


class TableSource:
    """The rows of one table."""

    def __init__(self, table: str, rows: Iterator[bytes], line_of: Template) -> None:
        self.name = f"table {table}"
        self._rows = rows
        self._line_of = line_of

    def place(self, number: int) -> str:
        """``table balances, row 12``, from 1."""
        return f"{self.name}, row {number}"

    def close(self) -> None:
        """Let go of the store, if it was opened."""
        close = getattr(self._rows, "close", None)
        if close is not None:
            close()

    def lines(self) -> Iterator[Line]:
        """One for each row."""
        for number, row in enumerate(self._rows, 1):
            yield number, self._line_of(exact_json.raw_members(row)), ""


def open_table(spec: Mapping[str, Any], place: Place) -> TableSource:
    """Raises UsageError: a key is wrong, or there is no such table."""
    check_keys(spec, place, {"table": str}, {"args": list})
    if place.tables is None:
        raise UsageError(
            f"{place.where('table')}: there is no table store; add backends.blockdb.path or .url to the configuration"
        )
    rows = place.tables.rows(spec["table"])
    return TableSource(spec["table"], rows, template(spec.get("args"), None, place))
