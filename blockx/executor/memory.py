"""Giving memory back: when this process is over its mark, and caches of libraries that only grow.

Main thread only, between steps. Main watches the size of each executor (and reads it itself); an executor
over its mark gets no more calls for a moment, collects here, and is replaced if that did not help.
"""

import ctypes
import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from blockx.errors import UsageError
from blockx.executor.vitals import resident_bytes

COLLECT_PAUSE_NS: Final = 5_000_000_000
"""Least time between two collections: a large heap takes most of a second."""
GC_OBJECTS: Final = 5_000
"""New objects after which Python looks for cycles among them; with its default of 700 that was 3 % of a read,
since what a suspended call holds is looked at and kept."""
ABI_CACHE_VARIABLE: Final = "BLOCKX_EXECUTOR_ABI_CACHE_TRIM_THRESHOLD"
ABI_CACHE_ENTRIES: Final = 4_096
"""Entries of one cache of ``eth_abi`` above which it is emptied (the specification). 0: never."""
ABI_LOOK_NS: Final = 1_000_000_000
"""How often these caches are looked at."""
_ABI_CACHES: Final = (
    ("eth_abi.grammar", "NodeVisitor", "parse"),
    ("eth_abi.registry", "ABIRegistry", "get_encoder"),
    ("eth_abi.registry", "ABIRegistry", "get_decoder"),
)
"""Module, class and method of each ``lru_cache`` of eth_abi that has no limit of its own."""

_modules = sys.modules
_collect = gc.collect


class Garbage:
    """Decides when to collect, and does."""

    __slots__ = ("_due_ns", "_mark_bytes", "_trim")

    def __init__(self, mark_bytes: int) -> None:
        """``mark_bytes``: resident memory above which garbage is collected. 0: never."""
        self._mark_bytes = mark_bytes
        self._due_ns = 0
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        """glibc's; other libraries of C give memory back by themselves."""

    def is_due(self, memory_bytes: int, now_ns: int) -> bool:
        """Whether the process is over its mark, and was not collected just now."""
        if not 0 < self._mark_bytes <= memory_bytes or now_ns < self._due_ns:
            return False
        self._due_ns = now_ns + COLLECT_PAUSE_NS
        return True

    def collect(self) -> int:
        """Free what nobody refers to and give free memory back; resident bytes afterwards."""
        _collect()
        if self._trim is not None:
            self._trim(0)
        return resident_bytes()


class AbiCaches:
    """Empties caches of ``eth_abi``, if a function has imported it, that have grown too large."""

    __slots__ = ("_due_ns", "_entries_max")

    def __init__(self, entries_max: int = ABI_CACHE_ENTRIES) -> None:
        self._entries_max = entries_max
        self._due_ns = 0

    def trim_if_due(self, now_ns: int) -> None:
        """Look at them once a second."""
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + ABI_LOOK_NS
            if self._entries_max and "eth_abi" in _modules:
                self._trim()

    def _trim(self) -> None:
        for module_name, class_name, method in _ABI_CACHES:
            owner: Any = getattr(_modules.get(module_name), class_name, None)
            cache: Any = getattr(owner, method, None)
            if hasattr(cache, "cache_info") and cache.cache_info().currsize > self._entries_max:
                cache.cache_clear()


def abi_cache_entries(environ: Mapping[str, str]) -> int:
    """The threshold from the environment. Raises UsageError for anything but a count."""
    text = environ.get(ABI_CACHE_VARIABLE, str(ABI_CACHE_ENTRIES))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(
            f"{ABI_CACHE_VARIABLE}={text[:50]!r}: must be a count of entries; 0: never trimmed"
        )
    return int(text)
