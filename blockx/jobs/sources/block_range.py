"""Calls for a range of blocks: ``calls: {range: {from: 0, to: 100, step: 10}}``.

One call for each step, both ends included: 0, 10, …, 100. Columns for ``args``: ``block``, where the step
begins, and ``to_block``, its last block (never beyond ``to``). Without ``args`` a call gets ``block`` alone.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from blockx.errors import UsageError
from blockx.jobs.sources.base import Line, Place, check_keys
from blockx.jobs.sources.template import Template, template

COLUMNS = ("block", "to_block")


class RangeSource:
    """The numbers of one range."""

    name = "range"

    def __init__(self, first: int, last: int, step: int, line_of: Template) -> None:
        self._numbers = range(first, last + 1, step)
        self._last = last
        self._line_of = line_of

    def place(self, number: int) -> str:
        """``range, block 120``."""
        return f"{self.name}, block {self._numbers[number]}"

    def close(self) -> None:
        """Nothing is open."""

    def lines(self) -> Iterator[Line]:
        """One for each step."""
        step = self._numbers.step
        for number, block in enumerate(self._numbers):
            to_block = min(block + step - 1, self._last)
            row = {"block": b"%d" % block, "to_block": b"%d" % to_block}
            yield number, self._line_of(row), ""


def open_range(spec: Mapping[str, Any], place: Place) -> RangeSource:
    """Raises UsageError: a key is wrong, or the range is empty."""
    check_keys(spec, place, {"range": dict}, {"args": list})
    inner = Place(f"{place.job_name}: range", place.resolve, place.tables)
    limits = spec["range"]
    check_keys(limits, inner, {"from": int, "to": int}, {"step": int})
    first, last, step = limits["from"], limits["to"], limits.get("step", 1)
    if step < 1 or first < 0 or last < first:
        raise UsageError(
            f"{place.where('range')}: expected 0 <= from <= to and a step of 1 or more, got from {first},"
            f" to {last}, step {step}"
        )
    return RangeSource(first, last, step, template(spec.get("args", ["block"]), COLUMNS, place))
