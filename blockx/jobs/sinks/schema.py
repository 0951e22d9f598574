"""Columns of a typed output: their kinds, declared or inferred, and what fits into them.

Pure. Kinds: ``int64``, ``uint256``, ``int256`` (both as decimal text: no file format here holds 256 bits),
``double``, ``bool``, ``text``, ``json`` (any value, as exact JSON text). Null fits everywhere.

Inferred over the first rows, by what all values of a column are: whole numbers within 64 bits are ``int64``,
beyond that ``uint256`` or ``int256``; floats are ``double``, also beside whole numbers up to 2^53; lists and
dicts are ``json``; a column of nothing but null is ``text``; every other mixture is ``json``. A later value that
does not fit is refused by name, never rounded and never made text without a word.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from blockx.ipc import exact_json
from blockx.jobs.sinks.base import Row, RowRefusedError

COLUMNS_MAX: Final = 1_000
"""Columns that are inferred. Full: further fields are refused by name."""
DOUBLE_EXACT: Final = 2**53
_SHOWN_CHARS: Final = 60


class Schema:
    """Column -> kind, in the order of the columns."""

    def __init__(self, kinds: Mapping[str, str], *, declared: bool) -> None:
        self.kinds = dict(kinds)
        self._fits = [(name, kind, _FITS[kind]) for name, kind in self.kinds.items()]
        self._declared = declared

    def values(self, row: Row) -> tuple[Any, ...]:
        """The values of a row by column: int, float, bool, text or None.

        Raises:
            RowRefusedError: a value is of another kind, or there is no such column.
        """
        values = []
        for name, kind, fit in self._fits:
            value = row.get(name)
            if value is not None:
                fitting = fit(value)
                if fitting is None:
                    raise RowRefusedError(name, self._why(kind, value))
                value = fitting
            values.append(value)
        if len(row) > len(self._fits) or not self.kinds.keys() >= row.keys():
            extra = next(name for name in row if name not in self.kinds)
            raise RowRefusedError(extra, self._unknown())
        return tuple(values)

    def _why(self, kind: str, value: object) -> str:
        shown = exact_json.encode(value)[: 4 * _SHOWN_CHARS].decode("utf-8", "replace")
        shown = shown if len(shown) <= _SHOWN_CHARS else shown[: _SHOWN_CHARS - 3] + "..."
        hint = (
            ""
            if self._declared
            else ", inferred from the first rows; declare another in the job's schema"
        )
        return f"{shown} does not fit into the column's kind {kind}{hint}"

    def _unknown(self) -> str:
        if self._declared:
            return "it is not in the job's schema"
        return "the first rows did not have it; declare the columns in the job's schema"


def schema_of(declared: Mapping[str, str], sample: Sequence[Row]) -> Schema:
    """The declared columns, or else those of the first rows in the order they appear."""
    return Schema(declared, declared=True) if declared else Schema(_infer(sample), declared=False)


def _infer(sample: Sequence[Row]) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for row in sample:
        for name, value in row.items():
            if name not in found:
                if len(found) >= COLUMNS_MAX:
                    continue
                found[name] = set()
            if value is not None:
                found[name].add(_kind_of(value))
    return {name: _joined(kinds) for name, kinds in found.items()}


def _kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if -DOUBLE_EXACT <= value <= DOUBLE_EXACT:
            return "small"
        if _int64(value) is not None:
            return "int64"
        return "uint256" if value > 0 else "int256"
    if isinstance(value, float):
        return "double"
    return "text" if isinstance(value, str) else "json"


def _joined(kinds: set[str]) -> str:
    """The narrowest kind that all values of a column fit into without a loss."""
    if len(kinds) == 1:
        kind = next(iter(kinds))
        return "int64" if kind == "small" else kind
    if not kinds:
        return "text"
    if kinds == {"small", "double"}:
        return "double"
    if kinds <= {"small", "int64"}:
        return "int64"
    if kinds <= {"small", "int64", "uint256", "int256"}:
        # Small numbers may be negative, so only the wider kind is sure to hold all of them.
        return "int256" if "int256" in kinds else "uint256"
    return "json"


# ---- what fits: the value to be written, or None ---------------------------------------------------


def _int64(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        return value
    return None


def _uint256(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**256:
        return str(value)
    return None


def _int256(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and -(2**255) <= value < 2**256:
        return str(value)
    return None


def _double(value: object) -> object:
    if isinstance(value, float):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= DOUBLE_EXACT:
        return float(value)
    return None


def _bool(value: object) -> object:
    return value if isinstance(value, bool) else None


def _text(value: object) -> object:
    return value if isinstance(value, str) else None


def _json(value: object) -> object:
    return exact_json.encode(value).decode()


_FITS: Final[dict[str, Callable[[object], object]]] = {
    "int64": _int64,
    "uint256": _uint256,
    "int256": _int256,
    "double": _double,
    "bool": _bool,
    "text": _text,
    "json": _json,
}
KINDS: Final = tuple(_FITS)
