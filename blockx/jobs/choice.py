"""Which calls of a list run now: the flags of the command line as one question.

Pure. The law: a call that has finished is not run again, unless a flag says so. ``--retry-failed`` adds the
failed ones, ``--only-failed`` leaves it at those, ``--where`` narrows it down; an expression that names
``status`` decides about finished calls by itself. ``--limit`` counts what is left.

An expression compares ``index`` with whole numbers, ``function`` with names and ``status`` with ``ok``,
``failed`` or ``new`` (not finished yet), joined by ``and``, ``or``, ``not`` and brackets. It is parsed with
Python's grammar and walked here; nothing of it is ever evaluated as Python.
"""

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from blockx.errors import UsageError

EXPRESSION_CHARS_MAX: Final = 2_000
"""Longer: refused."""

_Facts = tuple[int, str, str]
"""Index, function id, status."""
_Value = Callable[[_Facts], Any]

_STATUS: Final = {None: "new", True: "ok", False: "failed"}
_NAMES: Final[dict[str, type]] = {"index": int, "function": str, "status": str}
_POSITIONS: Final = {name: position for position, name in enumerate(_NAMES)}
_COMPARISONS: Final[dict[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Where:
    """A parsed expression."""

    def __init__(self, text: str) -> None:
        """Raises UsageError: it is not understood; the text says which part."""
        self.text = text
        self._names: set[str] = set()
        if len(text) > EXPRESSION_CHARS_MAX:
            raise UsageError(f"--where: longer than {EXPRESSION_CHARS_MAX:,} characters")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            self._test = self._condition(tree)
        except (SyntaxError, ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else error
            raise UsageError(
                f"--where {text!r}: {reason}; expected something like 'index<100' or"
                " 'status==failed and function==\"a/b\"'"
            ) from None

    @property
    def names_status(self) -> bool:
        """Whether it decides about finished calls by itself."""
        return "status" in self._names

    def holds(self, index: int, function_id: str, ok: bool | None) -> bool:
        """Whether it is true of a call; ``ok`` None: it has not finished."""
        return bool(self._test((index, function_id, _STATUS[ok])))

    def _condition(self, node: ast.expr) -> _Value:
        if isinstance(node, ast.BoolOp):
            parts = [self._condition(part) for part in node.values]
            join = all if isinstance(node.op, ast.And) else any
            return lambda facts: join(part(facts) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._condition(node.operand)
            return lambda facts: not inner(facts)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        raise ValueError(f"{ast.unparse(node)} is no comparison")

    def _comparison(self, node: ast.Compare) -> _Value:
        """A chain such as ``10 <= index < 20``."""
        sides = [node.left, *node.comparators]
        values, kinds = zip(*(self._value(side) for side in sides), strict=True)
        tests = []
        for number, op in enumerate(node.ops):
            compare = _COMPARISONS.get(type(op))
            if compare is None:
                raise ValueError(f"{ast.unparse(node)}: compare with == != < <= > >=")
            if kinds[number] is not kinds[number + 1]:
                raise ValueError(f"{ast.unparse(node)} compares a number with a text")
            tests.append((compare, values[number], values[number + 1]))
        return lambda facts: all(
            compare(left(facts), right(facts)) for compare, left, right in tests
        )

    def _value(self, node: ast.expr) -> tuple[_Value, type]:
        """What one side of a comparison is, and its type."""
        if isinstance(node, ast.Name) and node.id in _NAMES:
            self._names.add(node.id)
            return operator.itemgetter(_POSITIONS[node.id]), _NAMES[node.id]
        value: object
        if isinstance(node, ast.Name):
            value = node.id  # status==failed, without quotes
        elif isinstance(node, ast.Constant) and type(node.value) in (int, str):
            value = node.value
        else:
            raise ValueError(
                f"{ast.unparse(node)} is no whole number and no text; put names in quotes"
            )
        return lambda _facts: value, type(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the command line asks of a run of a job."""

    fresh: bool = False
    """Begin anew, whatever an earlier run left."""
    resume_anyway: bool = False
    """Keep what is finished although a function or the list has changed."""
    retry_failed: bool = False
    """Failed calls run again, beside those that have not finished."""
    only_failed: bool = False
    """Failed calls run again, nothing else does."""
    where: Where | None = None
    """Only calls of which it holds."""
    limit: int = 0
    """At most so many calls run. 0: no limit."""
    dry_run: bool = False
    """Run a few calls, keep nothing, and tell what a run would do."""

    @property
    def runs_finished(self) -> bool:
        """Whether calls that have finished may run again."""
        return (
            self.retry_failed
            or self.only_failed
            or (self.where is not None and self.where.names_status)
        )

    @property
    def narrows(self) -> bool:
        """Whether calls that have not finished may be left out."""
        return self.only_failed or self.where is not None or self.limit > 0

    def wants(self, index: int, function_id: str, ok: bool | None) -> bool:
        """Whether a call runs now, ``limit`` aside; ``ok`` None: it has not finished."""
        where = self.where
        if where is not None and not where.holds(index, function_id, ok):
            return False
        if ok is None:
            return not self.only_failed
        if where is not None and where.names_status:
            return not self.only_failed or not ok
        return not ok and (self.retry_failed or self.only_failed)
