"""``blockdb``: tables of rows, of states by block, and of rows by time.

Objects hold a name and nothing else; making one asks nobody. Keys are dicts of key column -> value,
rows dicts of JSON values; integers of any size are exact. Writes return when they are durable. A
write may be repeated when its call is, so it must be the same row each time (an upsert by key is).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, cast

from blockx.sdk import wire
from blockx.sdk.provider import get_provider

__all__ = ["Block", "BlockTable", "Row", "Table", "TimeTable"]

Row = dict[str, Any]
_NONE_DECLARED: Final[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """A block as a value: by height, by hash, or both. Accepted wherever a block is asked for."""

    height: int
    hash: str | None = None
    """0x and 64 hex digits. When known, node reads go by it."""
    timestamp: int | None = None
    """Seconds since 1970."""


class _Named:
    """Common to the three kinds: a checked table name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{type(self).__name__}: the table's name must be text, not {name!r}")
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def _read(self, operation: str, **params: Any) -> Any:
        return get_provider().read_req(wire.BLOCKDB, operation, {"table": self.name, **params})

    def _write(self, operation: str, **params: Any) -> None:
        get_provider().write_req(wire.BLOCKDB, operation, {"table": self.name, **params})

    def _checked_key(self, key: Any) -> Row:
        if not isinstance(key, Mapping):
            raise TypeError(
                f"{self!r}: a key is a dict of column -> value, not {type(key).__name__}"
            )
        if not key:
            raise ValueError(f"{self!r}: a key needs at least one column")
        return self._with_text_names(key)

    def _checked_rows(self, rows: Any, what: str) -> list[Row]:
        if isinstance(rows, Mapping) or not isinstance(rows, Sequence) or isinstance(rows, str):
            raise TypeError(f"{self!r}: pass a list of {what}, not {type(rows).__name__}")
        for row in rows:
            if not isinstance(row, Mapping):
                raise TypeError(
                    f"{self!r}: each of the {what} must be a dict, not {type(row).__name__}"
                )
        return [self._with_text_names(row) for row in rows]

    def _with_text_names(self, row: Mapping[Any, Any]) -> Row:
        for name in row:
            if not isinstance(name, str):
                raise TypeError(f"{self!r}: column names are text, not {name!r}")
        return dict(row)


class Table(_Named):
    """Rows by key, the newest of each.

    ``key``: its key columns, to declare them from code; a table declared in the configuration or by
    a first ``get_row`` needs none.
    """

    __slots__ = ("_declared",)

    def __init__(self, name: str, key: Sequence[str] | None = None) -> None:
        super().__init__(name)
        if isinstance(key, str) or (key is not None and not all(isinstance(c, str) for c in key)):
            raise TypeError(f"{self!r}: key must be a list of column names, not {key!r}")
        self._declared = _NONE_DECLARED if key is None else tuple(key)
        if key is not None and not self._declared:
            raise ValueError(f"{self!r}: key needs at least one column")

    def get_row(self, key: Mapping[str, Any]) -> Row | None:
        """The newest row with this key; None: there is none. Raises ReadError."""
        return cast(
            Row | None,
            self._read(wire.GET_ROW, key=self._checked_key(key), **self._declaring("declared_key")),
        )

    def get_rows(self, keys: Sequence[Mapping[str, Any]]) -> list[Row | None]:
        """The rows of many keys in their order, None where there is none. Raises ReadError."""
        if not self._checked_rows(keys, "keys"):
            return []
        checked = [self._checked_key(key) for key in keys]
        return cast(
            list[Row | None],
            self._read(wire.GET_ROWS, keys=checked, **self._declaring("declared_key")),
        )

    def scan(self, prefix: Mapping[str, Any] | None = None, limit: int | None = None) -> list[Row]:
        """Rows whose key begins with these values, in the order of the text of their keys.

        ``prefix``: values of the first key columns, as the table's key names them in order; None: all
        rows. ``limit``: rows at most; None: 10,000, which is also the most. Raises ReadError.
        """
        begin = {} if not prefix else self._checked_key(prefix)
        more = {} if limit is None else {"limit": _limit(self, limit)}
        return cast(list[Row], self._read(wire.SCAN, prefix=begin, **more))

    def upsert_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows, or replace those with the same key; all or none. Raises ReadError."""
        checked = self._checked_rows(rows, "rows")
        if checked:
            self._write(wire.UPSERT_ROWS, rows=checked, **self._declaring("key"))

    def delete_rows(self, keys: Sequence[Mapping[str, Any]]) -> None:
        """Delete the rows with these keys; one that is not there is fine. Raises ReadError."""
        if self._checked_rows(keys, "keys"):
            self._write(wire.DELETE_ROWS, keys=[self._checked_key(key) for key in keys])

    def _declaring(self, field: str) -> dict[str, list[str]]:
        return {field: list(self._declared)} if self._declared else {}


class BlockTable(_Named):
    """State by key, versioned by block."""

    __slots__ = ()

    def get_state(self, key: Mapping[str, Any], block: int | Block) -> Row | None:
        """The newest version at or below a block; None: none yet. Raises ReadError."""
        return cast(
            Row | None,
            self._read(wire.GET_STATE, key=self._checked_key(key), block=self._height(block)),
        )

    def history(
        self,
        key: Mapping[str, Any],
        from_block: int | Block | None = None,
        to_block: int | Block | None = None,
        limit: int | None = None,
    ) -> list[Row]:
        """Versions of a key, oldest first, each ``{"block": …, "state": …}``; both ends included.

        ``limit``: versions at most; None: 10,000, which is also the most. Raises ReadError.
        """
        more: dict[str, Any] = {} if limit is None else {"limit": _limit(self, limit)}
        if from_block is not None:
            more["from"] = self._height(from_block)
        if to_block is not None:
            more["to"] = self._height(to_block)
        return cast(list[Row], self._read(wire.GET_HISTORY, key=self._checked_key(key), **more))

    def upsert_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Insert or replace versions, each ``{"key": …, "block": …, "state": …}``; all or none.

        Raises ReadError.
        """
        checked = [self._checked_state(state) for state in self._checked_rows(states, "states")]
        if checked:
            self._write(wire.UPSERT_STATES, rows=checked)

    def _checked_state(self, state: Row) -> Row:
        if state.keys() != {"key", "block", "state"}:
            fields = ", ".join(sorted(state))
            raise ValueError(f"{self!r}: a state has the fields key, block, state; not {fields}")
        if not isinstance(state["state"], Mapping):
            found = type(state["state"]).__name__
            raise TypeError(f"{self!r}: the state itself must be a dict, not {found}")
        return {
            "key": self._checked_key(state["key"]),
            "block": self._height(state["block"]),
            "state": dict(state["state"]),
        }

    def _height(self, block: Any) -> int:
        height = block.height if isinstance(block, Block) else block
        if not isinstance(height, int) or isinstance(height, bool) or height < 0:
            raise ValueError(f"{self!r}: a block is a height from 0 on, not {block!r}")
        return int(height)


class TimeTable(_Named):
    """Rows by key, versioned by time."""

    __slots__ = ()

    def get_row(self, key: Mapping[str, Any], at: datetime | int | str) -> Row | None:
        """The row as of a moment: the newest at or before it; None: none yet.

        ``at``: a datetime (without a zone: UTC), or whatever the table's ``at`` values are: seconds
        since 1970 as a number, or RFC 3339 text. Raises ReadError.
        """
        moment = self._moment(at)
        return cast(Row | None, self._read(wire.GET_ROW_AT, key=self._checked_key(key), at=moment))

    def history(
        self,
        key: Mapping[str, Any],
        from_: datetime | int | str | None = None,
        to: datetime | int | str | None = None,
        limit: int | None = None,
    ) -> list[Row]:
        """Rows of a key, oldest first, each ``{"at": …, "row": …}``; both ends included.

        ``limit``: rows at most; None: 10,000, which is also the most. Raises ReadError.
        """
        more: dict[str, Any] = {} if limit is None else {"limit": _limit(self, limit)}
        if from_ is not None:
            more["from"] = self._moment(from_)
        if to is not None:
            more["to"] = self._moment(to)
        return cast(list[Row], self._read(wire.GET_HISTORY_AT, key=self._checked_key(key), **more))

    def upsert_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert or replace rows, each ``{"key": …, "at": …, "row": …}``; all or none.

        All moments of a table are numbers, or all are texts (a datetime becomes one). Raises ReadError.
        """
        checked = [self._checked_version(row) for row in self._checked_rows(rows, "rows")]
        if checked:
            self._write(wire.UPSERT_ROWS_AT, rows=checked)

    def _checked_version(self, version: Row) -> Row:
        if version.keys() != {"key", "at", "row"}:
            fields = ", ".join(sorted(version))
            raise ValueError(f"{self!r}: a row has the fields key, at, row; not {fields}")
        if not isinstance(version["row"], Mapping):
            found = type(version["row"]).__name__
            raise TypeError(f"{self!r}: the row itself must be a dict, not {found}")
        return {
            "key": self._checked_key(version["key"]),
            "at": self._moment(version["at"]),
            "row": dict(version["row"]),
        }

    def _moment(self, at: Any) -> Any:
        if isinstance(at, datetime):
            return _utc_text(at)
        if isinstance(at, int | float | str) and not isinstance(at, bool):
            return at
        raise TypeError(f"{self!r}: `at` is a datetime, a number or text, not {type(at).__name__}")


def _limit(table: _Named, limit: Any) -> int:
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ValueError(f"{table!r}: a limit is a whole number from 1 on, not {limit!r}")
    return limit


def _utc_text(moment: datetime) -> str:
    """RFC 3339 in UTC with a Z, so that equal moments are equal text."""
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat().replace("+00:00", "Z")
