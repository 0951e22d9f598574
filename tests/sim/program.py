"""What the functions of a world do, and the plain model of what calls of them return.

A function is its level, its one argument a small number; both decide its steps, drawn once from the
seed: reads, sub-calls, then a result or a failure. ``outcome`` runs a call and everything below it one
after the other, with nobody else about: what the whole machinery, whatever happens, must come to as well.

With cycles, or with less depth allowed than there are levels, an outcome depends on who called whom
(``is_exact`` is False): then only outputs of calls that succeed are compared.
"""

import random
from dataclasses import dataclass, field

from blockx.dispatcher.model import CallSpec, FunctionRef
from blockx.errors import ErrorKind
from blockx.functions.view import PinnedFunction

LEVELS = 5
FAILURES = (
    ErrorKind.USER_ERROR,
    ErrorKind.OUTPUT_TOO_LARGE,
    ErrorKind.DEADLINE_EXCEEDED,
)
"""How functions fail by themselves: kinds that followers share, and one that they do not."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a function waits for: a read (``level`` -1) or a sub-call."""

    level: int
    arg: int


@dataclass(slots=True)
class Program:
    """All functions of one world."""

    seed: int
    args: int
    has_cycles: bool
    fail_rate: float
    max_depth: int
    _steps: dict[tuple[int, int], list[Step]] = field(default_factory=dict)
    _outcomes: dict[tuple[int, int], bytes | ErrorKind] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        return not self.has_cycles and self.max_depth >= LEVELS - 1

    def steps(self, level: int, arg: int) -> list[Step]:
        known = self._steps.get((level, arg))
        if known is None:
            known = self._steps[level, arg] = self._draw(level, arg)
        return known

    def _draw(self, level: int, arg: int) -> list[Step]:
        rng = random.Random(f"{self.seed}/{level}/{arg}")
        steps = []
        for _ in range(rng.randrange(3)):
            if rng.random() < 0.4:
                steps.append(Step(-1, rng.randrange(self.args * 4)))
            elif self.has_cycles:
                steps.append(Step(rng.randrange(LEVELS), rng.randrange(self.args)))
            elif level + 1 < LEVELS:
                steps.append(Step(level + 1, rng.randrange(self.args)))
        return steps

    def read_fails(self, arg: int) -> bool:
        return random.Random(f"{self.seed}/read/{arg}").random() < self.fail_rate / 2

    def failure(self, level: int, arg: int) -> ErrorKind | None:
        rng = random.Random(f"{self.seed}/{level}/{arg}/fails")
        return rng.choice(FAILURES) if rng.random() < self.fail_rate else None

    def output(self, level: int, arg: int) -> bytes:
        return b"%d" % (level * 1_000 + arg)

    def outcome(self, level: int, arg: int) -> bytes | ErrorKind:
        """The plain model: one call alone, everything in order."""
        known = self._outcomes.get((level, arg))
        if known is None:
            known = self._outcomes[level, arg] = self._run(level, arg)
        return known

    def _run(self, level: int, arg: int) -> bytes | ErrorKind:
        for step in self.steps(level, arg):
            if step.level < 0:
                if self.read_fails(step.arg):
                    return ErrorKind.IO_ERROR
            elif isinstance(self.outcome(step.level, step.arg), ErrorKind):
                return ErrorKind.SUBCALL_FAILED
        return self.failure(level, arg) or self.output(level, arg)

    def spec(self, index: int, level: int, arg: int) -> CallSpec:
        args = b"[%d]" % arg
        return CallSpec(index, function_of(level), args, digest_of(level).encode() + args)


def digest_of(level: int) -> str:
    return f"digest-of-{level}"


def function_of(level: int) -> FunctionRef:
    return FunctionRef(f"f{level}", digest_of(level), "_")


def level_of(function_id: str) -> int:
    return int(function_id[1:])


class View:
    """The functions as a task pinned them; stands for ``functions.view.FunctionView``."""

    def get(self, function_id: str) -> PinnedFunction | None:
        level = level_of(function_id)
        return PinnedFunction(function_id, digest_of(level), f"# {level}", "_", None)

    def source(self, digest: str) -> str | None:
        return f"# source of {digest}"

    def suggest(self, _function_id: str) -> list[str]:
        return []
