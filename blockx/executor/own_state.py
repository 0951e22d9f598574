"""State of libraries that each call has of its own: the numbers of ``random``, and the context of ``decimal``.

Main thread. ``decimal`` keeps its context in a context variable, so that each call has one already; but it copies a
new one from ``decimal.DefaultContext``, which is everybody's. So what user code finds under that name is another
object, and the real one stays as it is. ``random``'s functions share one generator, whose numbers one call could make
predictable for all others by ``random.seed``; here they draw from a generator of the call, made at its first use.
"""

import decimal
import random
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final

_TEMPLATES: Final = ("DefaultContext", "BasicContext", "ExtendedContext")
_generator: ContextVar[random.Random | None] = ContextVar("blockx_random", default=None)
_Random: Final = random.Random
"""Bound before user code can replace it."""
_shared = vars(random)["_inst"]
"""The generator that the module's functions are methods of."""


def _own_generator() -> random.Random:
    generator = _generator.get()
    if generator is None:
        generator = _Random()
        _generator.set(generator)
    return generator


def _drawing(name: str) -> Callable[..., Any]:
    """The module's function of that name, drawing from the call's own generator."""
    method = getattr(_Random, name)

    @wraps(method)
    def draw(*arguments: Any, **named: Any) -> Any:
        return method(_own_generator(), *arguments, **named)

    return draw


class OwnState:
    """Installed in a process at its construction; ``close`` gives the modules back (tests)."""

    __slots__ = ("_before",)

    def __init__(self) -> None:
        names = vars(random)
        shared = [name for name in names if getattr(names[name], "__self__", None) is _shared]
        self._before = [(random, name, names[name]) for name in shared]
        self._before += [(decimal, name, getattr(decimal, name)) for name in _TEMPLATES]
        for name in shared:
            names[name] = _drawing(name)
        for name in _TEMPLATES:
            setattr(decimal, name, getattr(decimal, name).copy())

    def close(self) -> None:
        """Put back what was there."""
        for module, name, value in self._before:
            setattr(module, name, value)
