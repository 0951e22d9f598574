"""Calls out of a CSV file: ``calls: holders.csv``, or with types and arguments
``calls: {csv: holders.csv, types: {block: int}, args: [holder, block]}``.

The first line names the columns. A field is text, whatever it looks like (an address, a number with leading
zeros and a uint256 stay what they are), unless ``types`` says otherwise: ``int`` (any number of digits),
``float``, ``bool`` (true or false), ``json``, ``text``. An empty field of another type than text is null. The
file is UTF-8, quoted as in RFC 4180; ``delimiter`` is a comma unless given. A bad row is a rejected call.
"""

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from blockx.errors import UsageError
from blockx.ipc import exact_json
from blockx.jobs.sources.base import Line, Place, check_keys
from blockx.jobs.sources.jsonl import LINE_BYTES_MAX
from blockx.jobs.sources.template import Template, template

_INT = re.compile(r"-?[0-9]+")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


class CsvSource:
    """One file."""

    def __init__(
        self,
        file: Path,
        types: Mapping[str, str],
        args: list[Any] | None,
        place: Place,
        delimiter: str,
    ) -> None:
        """Raises UsageError: it cannot be opened, or a column is missing."""
        self.name = file.name
        try:
            self._opened = file.open(encoding="utf-8-sig", newline="", errors="surrogateescape")
        except OSError as error:
            raise UsageError(f"{file}: the call list cannot be opened: {error.strerror}") from None
        try:
            # A limit of the whole process; nothing else of ours reads CSV.
            csv.field_size_limit(LINE_BYTES_MAX)
            self._rows = csv.reader(self._opened, delimiter=delimiter, strict=True)
            self._columns = self._heading(file)
            unknown = [column for column in types if column not in self._columns]
            if unknown:
                raise UsageError(
                    f"{place.where('types')}: {file.name} has no column {unknown[0]!r}; its columns:"
                    f" {', '.join(self._columns)}"
                )
            self._readers = [_READERS[types.get(column, "text")] for column in self._columns]
            self._line_of: Template = template(args, self._columns, place)
        except BaseException:
            self._opened.close()
            raise

    def _heading(self, file: Path) -> list[str]:
        try:
            columns = next(self._rows, [])
        except (OSError, csv.Error) as error:
            raise UsageError(f"{file}: the first line names no columns: {error}") from None
        twice = {column for column in columns if columns.count(column) > 1}
        if not columns or twice:
            what = (
                f"two columns {min(twice)!r}"
                if twice
                else "no columns; name them in the first line"
            )
            raise UsageError(f"{file}: {what}")
        return columns

    def place(self, number: int) -> str:
        """``holders.csv:12``, from 1."""
        return f"{self.name}:{number}"

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def lines(self) -> Iterator[Line]:
        """One for each row below the first line."""
        while True:
            try:
                row = next(self._rows, None)
            except csv.Error as error:
                yield self._rows.line_num, b"", f"no CSV: {error}"
                continue
            if row is None:
                return
            if row:
                yield self._line(row)

    def _line(self, row: list[str]) -> Line:
        number = self._rows.line_num
        if len(row) != len(self._columns):
            return number, b"", f"{len(row)} fields, but the first line names {len(self._columns)}"
        values = {}
        for column, text, read in zip(self._columns, row, self._readers, strict=True):
            try:
                values[column] = read(text)
            except ValueError as error:
                return number, b"", f"column {column}: {error}"
        return number, self._line_of(values), ""


def open_csv(spec: Mapping[str, Any], place: Place) -> CsvSource:
    """Raises UsageError: a key or the file is wrong."""
    check_keys(spec, place, {"csv": str}, {"args": list, "types": dict, "delimiter": str})
    types, delimiter = spec.get("types", {}), spec.get("delimiter", ",")
    for column, kind in types.items():
        if kind not in _READERS:
            raise UsageError(
                f"{place.where(f'types.{column}')}: expected {', '.join(_READERS)}, got {str(kind)[:60]!r}"
            )
    if len(delimiter) != 1:
        raise UsageError(f"{place.where('delimiter')}: expected one character, got {delimiter!r}")
    return CsvSource(place.resolve(spec["csv"]), types, spec.get("args"), place, delimiter)


# ---- fields ----------------------------------------------------------------------------------------


def _text(field: str) -> bytes:
    return exact_json.encode(field)  # half a surrogate pair, a byte that is no UTF-8, is refused


def _int(field: str) -> bytes:
    text = field.strip()
    if not text:
        return b"null"
    if not _INT.fullmatch(text):
        raise ValueError(f"{field[:60]!r} is no whole number")
    return exact_json.encode(int(text))


def _float(field: str) -> bytes:
    text = field.strip()
    if not text:
        return b"null"
    if not _FLOAT.fullmatch(text) or not math.isfinite(float(text)):
        raise ValueError(f"{field[:60]!r} is no number")
    return exact_json.encode(float(text))


def _bool(field: str) -> bytes:
    text = field.strip().lower()
    if text not in ("", "true", "false"):
        raise ValueError(f"{field[:60]!r} is not true or false")
    return text.encode() or b"null"


def _json(field: str) -> bytes:
    if not field.strip():
        return b"null"
    return exact_json.encode(exact_json.decode(field))


_READERS: dict[str, Callable[[str], bytes]] = {
    "text": _text,
    "int": _int,
    "float": _float,
    "bool": _bool,
    "json": _json,
}
