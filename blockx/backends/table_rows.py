"""What a table of the store is: its kind, key and rows, and what is refused. The same for every store.

Pure; any thread. A row is kept as the bytes of its JSON, so no number changes.
"""

import enum
import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from blockx.backends.keys import check_key_names, key_text
from blockx.backends.replies import ReadFailedError
from blockx.errors import ErrorKind
from blockx.ipc import exact_json

Moment = int | float | str
"""A block, or a moment of a time table as it is stored."""

BLOCK_MAX = 2**63 - 1
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")


class Kind(enum.StrEnum):
    """What a table holds."""

    TABLE = "table"
    BLOCK = "block"
    TIME = "time"


SDK_CLASS = {Kind.TABLE: "Table", Kind.BLOCK: "BlockTable", Kind.TIME: "TimeTable"}


class TableInfo(NamedTuple):
    """One line of the catalogue."""

    name: str
    kind: Kind
    key: tuple[str, ...]
    clock: str
    """``number`` or ``text`` for a time table, else empty."""

    @staticmethod
    def of(name: str, kind: str, key_columns: str, clock: str) -> "TableInfo":
        """From its line in the catalogue, as a store keeps it."""
        columns = exact_json.decode(key_columns)
        assert isinstance(columns, list), "the text is key_columns of an earlier run"
        return TableInfo(name, Kind(kind), tuple(map(str, columns)), clock)

    @property
    def key_columns(self) -> str:
        """The key as the catalogue keeps it: a JSON array."""
        return exact_json.encode(list(self.key)).decode()

    @property
    def sql_name(self) -> str:
        """Quoted; the characters of a name are checked when it is made."""
        return f'"{self.name}"'

    @property
    def version_columns(self) -> tuple[str, str]:
        """What a version of a block or time table is found by, and what it holds."""
        return ("block", "state") if self.kind is Kind.BLOCK else ("at", "row")


class Version(NamedTuple):
    """One row to write: ``at`` is None, a block or a moment, by the table's kind."""

    key: bytes
    at: Moment | None
    row: bytes


def check_name(name: object) -> str:
    """A table's name. Raises ReadFailedError for one that SQLite or its tools would stumble over."""
    reserved = ("sqlite_", "blockx_")
    if isinstance(name, str) and _NAME.fullmatch(name) and not name.lower().startswith(reserved):
        return name
    raise ReadFailedError(
        ErrorKind.IO_ERROR,
        f"{str(name)[:140]!r} cannot be a table's name: letters, digits, `_`, `.` and `-` (128 at most), a letter "
        "or `_` first, and not beginning with sqlite_ or blockx_",
    )


def check_new_name(catalogue: Iterable[str], name: str) -> None:
    """Raises ReadFailedError for a name that cannot be, or that differs from another only in case."""
    check_name(name)
    for other in catalogue:
        if other.lower() == name.lower():
            text = f"tables {name} and {other} differ only in upper and lower case; rename one"
            raise ReadFailedError(ErrorKind.IO_ERROR, text)


def check_kind(info: TableInfo, kind: Kind) -> None:
    """Raises ReadFailedError if the table is read or written as another kind than it is."""
    if info.kind is not kind:
        text = f"table {info.name} is a {SDK_CLASS[info.kind]}, not a {SDK_CLASS[kind]}"
        raise ReadFailedError(ErrorKind.IO_ERROR, text)


def check_declared(info: TableInfo, declared: Iterable[str] | None) -> None:
    """Raises ReadFailedError if somebody declares other key columns than the table has."""
    if declared is not None and sorted(declared) != sorted(info.key):
        raise ReadFailedError(
            ErrorKind.IO_ERROR,
            f"table {info.name} has the key {', '.join(info.key)} in the store, but "
            f"{', '.join(declared)} is declared for it",
        )


def row_version(table: str, columns: tuple[str, ...], raw: bytes) -> Version:
    """A row of kind ``table``. Raises ReadFailedError if it is no object or lacks a key column."""
    exact_json.check_spliced(raw)
    row = exact_json.decode(raw)
    if not isinstance(row, dict):
        raise ReadFailedError(ErrorKind.IO_ERROR, f"table {table}: a row must be an object")
    missing = [column for column in columns if column not in row]
    if missing:
        text = f"table {table}: a row lacks {missing[0]}, which belongs to its key {', '.join(columns)}"
        raise ReadFailedError(ErrorKind.IO_ERROR, text)
    return Version(key_text(table, columns, {c: row[c] for c in columns}), None, raw)


def key_fields(table: str, raw: bytes) -> tuple[str, ...]:
    """The names of the key of a versioned row (``{"key": {…}, …}``)."""
    return check_key_names(table, exact_json.decode(_member(table, raw, "key")))


def state_version(table: str, columns: tuple[str, ...], raw: bytes) -> Version:
    """A line ``{"key", "block", "state"}``. Raises ReadFailedError for any other."""
    exact_json.check_spliced(raw)
    key = key_text(table, columns, exact_json.decode(_member(table, raw, "key")))
    block = check_block(table, exact_json.decode(_member(table, raw, "block")))
    return Version(key, block, _object(table, _member(table, raw, "state"), "state"))


def time_version(table: str, columns: tuple[str, ...], raw: bytes) -> Version:
    """A line ``{"key", "at", "row"}``. Raises ReadFailedError for any other."""
    exact_json.check_spliced(raw)
    key = key_text(table, columns, exact_json.decode(_member(table, raw, "key")))
    at = moment(table, exact_json.decode(_member(table, raw, "at")))
    return Version(key, at, _object(table, _member(table, raw, "row"), "row"))


def _member(table: str, raw: bytes, name: str) -> bytes:
    try:
        return exact_json.raw_members(raw)[name]
    except KeyError:
        text = f"table {table}: a line lacks {name!r}"
        raise ReadFailedError(ErrorKind.IO_ERROR, text) from None
    except ValueError as error:
        text = f"table {table}: a line must be an object: {error}"
        raise ReadFailedError(ErrorKind.IO_ERROR, text) from None


def _object(table: str, raw: bytes, name: str) -> bytes:
    if not isinstance(exact_json.decode(raw), dict):
        text = f"table {table}: {name!r} must be an object"
        raise ReadFailedError(ErrorKind.IO_ERROR, text)
    return raw


def check_block(table: str, block: object) -> int:
    """A height. Raises ReadFailedError."""
    if isinstance(block, int) and not isinstance(block, bool) and 0 <= block <= BLOCK_MAX:
        return block
    text = f"table {table}: a block is a whole number from 0 to 2^63 - 1, not {str(block)[:80]}"
    raise ReadFailedError(ErrorKind.IO_ERROR, text)


def moment(table: str, at: object) -> Moment:
    """A moment as it is stored: a number as it is, RFC 3339 text in UTC. Raises ReadFailedError."""
    if isinstance(at, str):
        try:
            when = datetime.fromisoformat(at)
        except ValueError:
            pass
        else:
            when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
            return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    elif isinstance(at, float):
        if math.isfinite(at):
            return at
    elif isinstance(at, int) and not isinstance(at, bool) and abs(at) <= BLOCK_MAX:
        return at
    text = f"table {table}: `at` is a number or RFC 3339 text, not {str(at)[:80]}"
    raise ReadFailedError(ErrorKind.IO_ERROR, text)


def clock_of(at: Moment | None) -> str:
    """Which of the two kinds of moment it is."""
    return "text" if isinstance(at, str) else "number"


def check_clock(info: TableInfo, at: Moment | None) -> None:
    """Raises ReadFailedError for a number in a table of texts, and the other way round."""
    if clock_of(at) != info.clock:
        words = {"text": "RFC 3339 texts", "number": "numbers"}
        text = f"table {info.name} has {words[info.clock]} as `at`, not {words[clock_of(at)]}"
        raise ReadFailedError(ErrorKind.IO_ERROR, text)
