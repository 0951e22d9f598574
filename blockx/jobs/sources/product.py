"""Calls for every combination: ``calls: {product: {token: [0xa…, 0xb…], block: [1, 2]}}``.

The last column turns fastest. Without ``args`` a call gets one dict, such as ``{"token": "0xa…", "block": 1}``.
A list may also be ``{from: 0, to: 100, step: 10}``, both ends included. Columns are held, combinations are not.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blockx.errors import UsageError
from blockx.ipc import exact_json
from blockx.jobs.sources.base import Line, Place, check_keys
from blockx.jobs.sources.template import Template, template


class ProductSource:
    """The combinations of the values of some columns."""

    name = "product"

    def __init__(self, columns: Mapping[str, Sequence[bytes]], line_of: Template) -> None:
        self._columns = columns
        self._line_of = line_of

    def place(self, number: int) -> str:
        """``product[17]``, from 0."""
        return f"{self.name}[{number}]"

    def close(self) -> None:
        """Nothing is open."""

    def lines(self) -> Iterator[Line]:
        """One for each combination."""
        names = list(self._columns)
        for number, values in enumerate(_combinations(list(self._columns.values()))):
            yield number, self._line_of(dict(zip(names, values, strict=True))), ""


def open_product(spec: Mapping[str, Any], place: Place) -> ProductSource:
    """Raises UsageError: a key is wrong, or a column has no list."""
    check_keys(spec, place, {"product": dict}, {"args": list})
    columns = {
        name: [exact_json.encode(value) for value in _values(name, values, place)]
        for name, values in spec["product"].items()
    }
    if not columns:
        raise UsageError(f"{place.where('product')}: expected at least one column with its values")
    return ProductSource(columns, template(spec.get("args"), list(columns), place))


def _combinations(columns: list[Sequence[bytes]]) -> Iterator[tuple[bytes, ...]]:
    return itertools.product(*columns)


def _values(name: str, values: object, place: Place) -> Sequence[Any]:
    if isinstance(values, list):
        return values
    where = f"product.{name}"
    if isinstance(values, dict):
        inner = Place(f"{place.job_name}: {where}", place.resolve, place.tables)
        check_keys(values, inner, {"from": int, "to": int}, {"step": int})
        step = values.get("step", 1)
        if step >= 1:
            return range(values["from"], values["to"] + 1, step)
    raise UsageError(
        f"{place.where(where)}: expected a list, or from and to with a step of 1 or more"
    )
