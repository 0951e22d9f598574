"""Finds steps that hold the executor without computing: a library that blocks, seen by function and line.

Main thread; ``tick`` in the alarm's handler. A call that blocks (``requests``, ``psycopg``, a lock) stops all
other calls of its executor, so its author is told once for each place. A step counts as blocked if it took
``BLOCKED_NS`` and little CPU, and gave the CPU away by itself: on a busy machine a computing step may take
as long, but it, or the thread whose lock it waits for, is put off the CPU, which the kernel counts separately.
"""

import os
import resource
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

from blockx.executor.context import NS_PER_MS, ExecContext
from blockx.functions.entry import is_user_file

BLOCKED_NS: Final = 200_000_000
CPU_PART: Final = 4
"""Less than a quarter of the time on the CPU is "little"."""
SLEEPS_MIN: Final = 3
"""Times that the step must have given the CPU away: each tick of the alarm wakes it once."""
PLACES_MAX: Final = 1_024
"""Places told. Full: further ones are not."""

_process_time_ns = time.process_time_ns
_usage, _THREAD = resource.getrusage, resource.RUSAGE_THREAD

Report = Callable[[ExecContext, str, int, int], None]
"""(call, "function, line n", wall ms, CPU ms)."""


class BlockWatch:
    """Looks at one step at a time."""

    __slots__ = ("_busy_ns", "_places", "_report", "_sleeps", "_started_ns", "_told")

    def __init__(self, report: Report) -> None:
        self._report = report
        self._told: set[str] = set()
        self._started_ns = 0
        """Which step the two below belong to."""
        self._sleeps = self._busy_ns = 0
        """The thread's voluntary switches and ``_process_busy_ns`` at the first tick."""
        self._places: list[str] = []

    def tick(self, context: ExecContext, now_ns: int, frame: FrameType | None) -> None:
        """The alarm interrupted the running call at ``frame``."""
        late = now_ns - context.step_started_ns >= BLOCKED_NS
        if self._started_ns != context.step_started_ns:
            self._started_ns = context.step_started_ns
            # A first tick that is late was held back by a C call that blocked all the time.
            self._sleeps = -SLEEPS_MIN if late else _usage(_THREAD).ru_nvcsw
            self._busy_ns = _process_busy_ns()
            self._places = []
        if late and not self._places:
            self._places.append(_place(frame))

    def step_ended(self, context: ExecContext, started_ns: int, wall_ns: int, cpu_ns: int) -> None:
        """A step that took at least ``BLOCKED_NS`` is over."""
        if self._started_ns != started_ns or not self._places or cpu_ns * CPU_PART >= wall_ns:
            return
        if (_process_busy_ns() - self._busy_ns) * CPU_PART >= wall_ns:
            return  # it waited for another thread of its own process
        sleeps = SLEEPS_MIN if self._sleeps < 0 else _usage(_THREAD).ru_nvcsw - self._sleeps
        place = self._places[0]
        if sleeps < SLEEPS_MIN or place in self._told or len(self._told) >= PLACES_MAX:
            return
        self._told.add(place)
        self._report(context, place, wall_ns // NS_PER_MS, cpu_ns // NS_PER_MS)


def _process_busy_ns() -> int:
    """CPU time of the process, and the time that its threads could have run and were not let. 20 us."""
    waited_ns = 0
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
                waited_ns += int(file.read().split()[1])
    except (OSError, IndexError):  # a thread has ended, there is no /proc, or it does not say
        pass
    return _process_time_ns() + waited_ns


def _place(frame: FrameType | None) -> str:
    """The innermost line of user source."""
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"
