"""Settings of the whole process that a call may change and the next call must not find changed.

Main thread. Checked before each call's first step, 0.2 us together; what other calls find that are
suspended meanwhile cannot be helped, as in any process. Output streams are ``capture``'s, the alarm and
``time.sleep`` are ``interrupts``'. Left alone: environment, folder, locale and patched modules, which
last as long as the process.
"""

import gc
import sys

_get_recursion_limit = sys.getrecursionlimit
_get_digits = sys.get_int_max_str_digits
_get_trace = sys.gettrace
_get_profile = sys.getprofile
_is_gc_enabled = gc.isenabled


class Ambient:
    """Remembers the settings at its construction; ``restore`` puts them back."""

    __slots__ = ("_digits", "_profile", "_recursion_limit", "_trace")

    def __init__(self) -> None:
        self._recursion_limit = _get_recursion_limit()
        self._digits = _get_digits()
        self._trace = _get_trace()
        self._profile = _get_profile()

    def restore(self) -> None:
        """Put back what differs: recursion limit, digits of int texts, tracing, garbage collection."""
        if _get_recursion_limit() != self._recursion_limit:
            sys.setrecursionlimit(self._recursion_limit)
        if _get_digits() != self._digits:
            sys.set_int_max_str_digits(self._digits)
        if _get_trace() is not self._trace:
            sys.settrace(self._trace)
        if _get_profile() is not self._profile:
            sys.setprofile(self._profile)
        if not _is_gc_enabled():
            gc.enable()
