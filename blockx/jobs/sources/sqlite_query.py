"""Calls out of a SQLite file: ``calls: {sqlite: data.sqlite, query: "SELECT holder, block FROM … ORDER BY …"}``.

The columns of the query are the columns for ``args``. Integers, floats and texts stay what they are, NULL is
null, a blob becomes 0x-hex. The file is opened read-only. A query without ORDER BY may give its rows in another
order next time: a stopped job would then be refused rather than resumed wrongly.
"""

import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockx.errors import UsageError
from blockx.ipc import exact_json
from blockx.jobs.sources.base import Line, Place, check_keys
from blockx.jobs.sources.template import Template, template


class SqliteSource:
    """The rows of one query."""

    def __init__(self, file: Path, query: str, args: list[Any] | None, place: Place) -> None:
        """Raises UsageError: the file or the query is wrong."""
        self.name = file.name
        try:
            self._db = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
        except sqlite3.Error as error:
            raise UsageError(f"{file}: the call list cannot be opened: {error}") from None
        try:
            self._cursor = self._db.execute(query)
            columns = [column[0] for column in self._cursor.description or ()]
            twice = [column for column in columns if columns.count(column) > 1]
            if not columns or twice:
                what = (
                    f"has two columns {twice[0]!r}; name one AS something"
                    if twice
                    else "gives no rows"
                )
                raise UsageError(f"{place.where('query')}: it {what}")
            self._columns: Sequence[str] = columns
            self._line_of: Template = template(args, columns, place)
        except (sqlite3.Error, sqlite3.Warning) as error:
            self._db.close()
            raise UsageError(f"{place.where('query')}: {file.name}: {error}") from None
        except BaseException:
            self._db.close()
            raise

    def place(self, number: int) -> str:
        """``data.sqlite, row 12``, from 1."""
        return f"{self.name}, row {number}"

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def lines(self) -> Iterator[Line]:
        """One for each row."""
        for number, row in enumerate(self._cursor, 1):
            try:
                values = {
                    column: _json_of(value)
                    for column, value in zip(self._columns, row, strict=True)
                }
            except ValueError as error:
                yield number, b"", str(error)
            else:
                yield number, self._line_of(values), ""


def open_sqlite(spec: Mapping[str, Any], place: Place) -> SqliteSource:
    """Raises UsageError: a key, the file or the query is wrong."""
    check_keys(spec, place, {"sqlite": str, "query": str}, {"args": list})
    return SqliteSource(place.resolve(spec["sqlite"]), spec["query"], spec.get("args"), place)


def _json_of(value: object) -> bytes:
    if isinstance(value, bytes):
        return b'"0x%b"' % value.hex().encode()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no JSON number")
    return exact_json.encode(value)
