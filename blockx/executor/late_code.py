"""Code of calls that runs when nobody called it: ``__del__``, callbacks of ``weakref``, ``finally`` of generators.

Main thread. Python runs it when an object goes: at once when the last reference does, and for cycles in some later
collection, perhaps in the middle of another call. Hence:

- A collection is known from its beginning to its end (``is_collecting``). Nobody reads, writes or sleeps in one: it
  would be charged to a stranger, and to switch greenlets there would leave the collector's lists on a stack that
  others write to.
- Where the executor itself lets go (a task's modules are released, a collection between two calls) that code has
  ``LATE_MS`` and is then cut by the alarm, like a call. One that cannot be cut is left to main's wedge time: the row
  names a call that nobody has, so nobody is charged. The collector's own work does not count: a large heap takes it
  most of a second.
"""

import gc
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Final, Literal

from blockx.executor.context import NS_PER_MS, ExecContext, ExecState
from blockx.functions.entry import is_user_file
from blockx.ipc.heartbeat import (
    LAST_ACTIVE_NS,
    RUNNING_ATTEMPT_SEQ,
    RUNNING_CALL_SEQ,
    RUNNING_SINCE_NS,
    HeartbeatRow,
)
from blockx.ipc.messages import ExecuteCall, ExecuteCallPayload, Raw

if TYPE_CHECKING:
    from blockx.executor.interrupts import Alarm
    from blockx.executor.runtime import ExecutorRuntime

LATE_MS: Final = 250
"""For one release or collection between calls, from where the alarm first finds user code running."""
NOBODYS_CALL_SEQ: Final = 1 << 61
"""In the heartbeat row while such code runs: the number of no call."""

_monotonic_ns = time.monotonic_ns
_get_ident = threading.get_ident


class LateCode:
    """One a process. See the module's law."""

    __slots__ = (
        "_alarm", "_context", "_host", "_is_between_calls", "_main_thread", "_row", "_user_since_ns",
        "is_collecting",
    )  # fmt: skip

    def __init__(self, host: "ExecutorRuntime", alarm: "Alarm", row: HeartbeatRow | None) -> None:
        self.is_collecting = False
        """The main thread is in a collection of garbage."""
        self._host = host
        self._alarm = alarm
        self._row = row
        self._main_thread = _get_ident()
        self._is_between_calls = False
        """The collection runs in nobody's time."""
        self._context = _late_context()
        self._user_since_ns = 0
        """When the alarm first found user code; 0: it has not."""

    def install(self) -> None:
        """From now on every collection is known."""
        gc.callbacks.append(self._on_collection)

    def run(self, work: Callable[[], None]) -> None:
        """Do what lets objects of calls go, between two calls."""
        self._enter()
        try:
            work()
        finally:
            self._leave()

    def tick(self, context: ExecContext, now_ns: int, frame: FrameType | None) -> None:
        """The alarm, while user code may run in the name of ``context``: ours is over after ``LATE_MS``."""
        if context is not self._context or not _is_in_user_code(frame):
            return
        self._user_since_ns = self._user_since_ns or now_ns
        if now_ns - self._user_since_ns >= LATE_MS * NS_PER_MS:
            context.budget_ns = 1

    def close(self) -> None:
        """Forget the collector (tests)."""
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        if _get_ident() != self._main_thread:
            return
        if phase == "start":
            self.is_collecting = True
            self._is_between_calls = self._host.running is None
            if self._is_between_calls:
                self._enter()
            return
        self.is_collecting = False
        if self._is_between_calls:
            self._leave()

    def _enter(self) -> None:
        now_ns = _monotonic_ns()
        context = self._context
        context.step_started_ns = now_ns
        context.raises = context.refused_since_ns = context.budget_ns = self._user_since_ns = 0
        self._host.running = context
        self._write_row(NOBODYS_CALL_SEQ, now_ns)
        self._alarm.enter(context.left_ns(now_ns))
        context.in_user = True

    def _leave(self) -> None:
        self._context.in_user = False
        self._host.running = None
        self._write_row(0, _monotonic_ns())

    def _write_row(self, call_seq: int, now_ns: int) -> None:
        row = self._row
        if row is not None and not self._host.is_forked:
            row.scheduler[LAST_ACTIVE_NS] = now_ns
            row.scheduler[RUNNING_CALL_SEQ] = call_seq
            row.scheduler[RUNNING_SINCE_NS] = now_ns
            row.scheduler[RUNNING_ATTEMPT_SEQ] = 0
            row.write_scheduler()


def _is_in_user_code(frame: FrameType | None) -> bool:
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _late_context() -> ExecContext:
    """In whose name it runs between calls."""
    payload = ExecuteCallPayload(
        task_id="",
        function_id="(late code)",
        function_code_digest="",
        entry_selector="",
        args=Raw(b"[]"),
        attempt_seq=0,
        call_seq=NOBODYS_CALL_SEQ,
    )
    return ExecContext(ExecuteCall(call_id="", payload=payload), [0] * len(ExecState), 0)
