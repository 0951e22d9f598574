"""The slot machine: when an executor process is started, replaced, left alone or given up.

Pure: no clock, no process, no thread, no log. ``Slot.handle(event)`` takes a fact and returns
orders; the pool performs them on the main thread. The only module that writes ``Slot.state``.

    STOPPED --StartRequested--> WAITING --ProcessStarted--> RUNNING
    RUNNING --ProcessExited---> WAITING (restart delay, or at once) or BACKOFF (too many) or STOPPED
    WAITING --StartFailed-----> WAITING or BACKOFF;    BACKOFF --TimerDue--> WAITING

Invariants: a slot has a pid if and only if it is RUNNING; it waits for at most one timer; while it
is WAITING either a start is ordered or a timer runs; told to stop, it never starts again.

What counts against ``max_restarts``: a process that was lost, one that we killed, and a start that
failed. A kill counts since it is the fault of code that runs here and a function that wedges one
executor after the other must be slowed down too; it is followed by a new process at once since the
silence that led to the kill was pause enough. A recycle does not count: it is our own housekeeping,
of a process that did its work.

Source: the specification, "Executor Pool and connections". After a back-off the window is empty.
"""

import enum
import signal
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from blockx.errors import InvalidTransitionError

ATTACH_TIMEOUT_MS = 30_000
"""From the start of a process to its attach. Over: it is killed, and counts as a failed start."""

BOOT_FAILURES_MAX = 3
"""Lives in a row that ended before their attach. Reached by every slot: the pool gives up."""

START_RETRY_MS_MIN = 100
"""Least pause after a start that failed, also with a restart delay of 0: the pool starts processes
while it performs our orders, so that an immediate repetition would be an endless loop."""

_STORY_MAX = 32


class SlotState(enum.Enum):
    """Where a slot is; the words of the specification."""

    WAITING = "waiting"
    """No process; a start is ordered, or the restart delay runs."""
    RUNNING = "running"
    """A process lives (or its end was not reported yet)."""
    BACKOFF = "backoff"
    """No process; it ended too often, and a longer pause runs."""
    STOPPED = "stopped"
    """No process, and none will come unless the slot is new."""


class ExitCause(enum.Enum):
    """Why a process ended, from the pool's point of view."""

    LOST = "lost"
    """By itself: a crash, an exit of user code, a signal of somebody else."""
    KILLED = "killed"
    """We killed it: wedged, silent, a cancel that did not help, or no attach in time."""
    RECYCLED = "recycled"
    """We replaced it when it was drained."""
    STOPPED = "stopped"
    """The pool stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLimits:
    """The restart throttle; all times in milliseconds."""

    restart_delay_ms: int
    """Pause after a loss. 0: at once."""
    max_restarts: int
    """Counted restarts within the window; the next one becomes a back-off."""
    restart_window_ms: int
    backoff_ms: int
    attach_timeout_ms: int = ATTACH_TIMEOUT_MS


# Events: facts, past tense.


@dataclass(slots=True)
class StartRequested:
    """The pool starts. Legal once, for a new slot."""


@dataclass(slots=True)
class ProcessStarted:
    """``StartProcess`` was performed."""

    pid: int


@dataclass(slots=True)
class StartFailed:
    """``StartProcess`` could not be performed."""

    reason: str
    now_ms: int


@dataclass(slots=True)
class ExecutorAttached:
    """The process connected and sent its first heartbeat. Of an older pid: dropped."""

    pid: int


@dataclass(slots=True)
class ProcessExited:
    """The process is dead and reaped. Of an older pid: dropped."""

    pid: int
    code: int | None
    """Exit code; negative: the signal that ended it; None: unknown."""
    now_ms: int


@dataclass(slots=True)
class KillRequested:
    """Somebody wants this process dead at once. Of an older pid: dropped."""

    pid: int
    reason: str


@dataclass(slots=True)
class RecycleRequested:
    """The process is drained and shall be replaced. Of an older pid: dropped."""

    pid: int | None
    """None: whichever runs now."""
    reason: str
    grace_ms: int
    """From SIGTERM to SIGKILL."""


@dataclass(slots=True)
class StopRequested:
    """No process shall run here any more. Again with a grace of 0: kill at once."""

    grace_ms: int
    """From SIGTERM to SIGKILL. 0: SIGKILL at once."""


@dataclass(slots=True)
class TimerDue:
    """The timer of an ``ArmTimer`` ran out. An older number: dropped."""

    timer_seq: int


SlotEvent = (
    StartRequested
    | ProcessStarted
    | StartFailed
    | ExecutorAttached
    | ProcessExited
    | KillRequested
    | RecycleRequested
    | StopRequested
    | TimerDue
)


# Commands: orders, imperative.


@dataclass(slots=True)
class StartProcess:
    """Start a process, then report ``ProcessStarted`` or ``StartFailed``."""


@dataclass(slots=True)
class ArmTimer:
    """Report ``TimerDue(timer_seq)`` after ``delay_ms``; replaces the slot's earlier timer."""

    timer_seq: int
    delay_ms: int


@dataclass(slots=True)
class TerminateProcess:
    """Ask the process to end (SIGTERM)."""

    pid: int


@dataclass(slots=True)
class KillProcess:
    """End the process and its group (SIGKILL)."""

    pid: int


@dataclass(slots=True)
class ReportExit:
    """Tell the listener; performed before the ``StartProcess`` that may follow it."""

    pid: int
    code: int | None
    cause: ExitCause
    reason: str
    """Why we ended it; empty for LOST."""
    attached: bool
    """It had attached before it ended."""


SlotCommand = StartProcess | ArmTimer | TerminateProcess | KillProcess | ReportExit


@dataclass(slots=True)
class Slot:
    """One place for an executor in the pool. Main thread only."""

    executor_id: str
    limits: SlotLimits
    state: SlotState = SlotState.STOPPED
    pid: int | None = None
    attached: bool = False
    """The living process has attached."""
    stopping: bool = False
    """A stop was requested; never cleared."""
    boot_failures: int = 0
    """Lives (and starts) in a row without an attach."""
    last_failure: str = ""
    """What ended the last life without an attach, for the message of a pool that gives up."""
    stale_events: int = 0
    """Events of an older process or timer, dropped."""
    story: deque[tuple[str, SlotState, SlotState]] = field(
        default_factory=lambda: deque(maxlen=_STORY_MAX)
    )
    """The last moves: cause, from, to."""

    _start_ordered: bool = False
    _ending: tuple[ExitCause, str] | None = None
    """What we did to end the living process: cause and reason."""
    _timer_seq: int = 0
    _timer_armed: bool = False
    _restarts_ms: deque[int] = field(default_factory=deque)
    """Moments of the counted restarts within the window; at most ``max_restarts``."""

    def handle(self, event: SlotEvent) -> list[SlotCommand]:
        """Apply one event; the orders it leads to, to be performed in this order.

        Raises:
            InvalidTransitionError: the pool reported a start that was not ordered (our bug).
        """
        return _HANDLERS[type(event)](self, event)

    def _on_start_requested(self, event: StartRequested) -> list[SlotCommand]:
        if self.state is not SlotState.STOPPED or self.stopping:
            raise self._illegal(event)
        self._move(SlotState.WAITING, "start requested")
        return self._order_start()

    def _on_process_started(self, event: ProcessStarted) -> list[SlotCommand]:
        if not self._start_ordered:
            raise self._illegal(event)
        self._start_ordered = False
        self.pid = event.pid
        self.attached = False
        self._ending = None
        self._move(SlotState.RUNNING, "process started")
        if self.stopping:
            return [KillProcess(event.pid)]
        return [self._arm(self.limits.attach_timeout_ms)]

    def _on_start_failed(self, event: StartFailed) -> list[SlotCommand]:
        if not self._start_ordered:
            raise self._illegal(event)
        self._start_ordered = False
        self.boot_failures += 1
        self.last_failure = event.reason
        if self.stopping:
            self._move(SlotState.STOPPED, "start failed")
            return []
        delay_ms = max(self.limits.restart_delay_ms, START_RETRY_MS_MIN)
        return self._restart_counted(delay_ms, event.now_ms, "start failed")

    def _on_attached(self, event: ExecutorAttached) -> list[SlotCommand]:
        if event.pid != self.pid:
            return self._drop_stale()
        self.attached = True
        self.boot_failures = 0
        if self._ending is None and not self.stopping:
            self._timer_armed = False  # it was the attach timer
        return []

    def _on_process_exited(self, event: ProcessExited) -> list[SlotCommand]:
        if event.pid != self.pid:
            return self._drop_stale()
        cause, reason = self._cause_of_exit(event.code)
        report = ReportExit(event.pid, event.code, cause, reason, self.attached)
        if not self.attached and cause in (ExitCause.LOST, ExitCause.KILLED):
            self.boot_failures += 1
            self.last_failure = reason or describe_exit(event.code)
        self.pid = None
        self.attached = False
        self._timer_armed = False
        if cause is ExitCause.STOPPED:
            self._move(SlotState.STOPPED, "process exited")
            return [report]
        if cause is ExitCause.RECYCLED:
            self._move(SlotState.WAITING, "recycled")
            return [report, *self._order_start()]
        delay_ms = 0 if cause is ExitCause.KILLED else self.limits.restart_delay_ms
        return [report, *self._restart_counted(delay_ms, event.now_ms, "process exited")]

    def _on_kill_requested(self, event: KillRequested) -> list[SlotCommand]:
        if event.pid != self.pid or self._is_killed():
            return self._drop_stale()
        if self._ending is not None:
            # Drained and about to be replaced: only faster. It had no call, so nobody killed it.
            self._timer_armed = False
            return [KillProcess(event.pid)]
        return self._kill(event.pid, event.reason)

    def _on_recycle_requested(self, event: RecycleRequested) -> list[SlotCommand]:
        pid = self.pid
        if pid is None or event.pid not in (None, pid) or self._ending or self.stopping:
            return self._drop_stale()
        self._ending = (ExitCause.RECYCLED, event.reason)
        return [TerminateProcess(pid), self._arm(event.grace_ms)]

    def _on_stop_requested(self, event: StopRequested) -> list[SlotCommand]:
        self.stopping = True
        if self.pid is None:
            if not self._start_ordered:
                self._timer_armed = False
                self._move(SlotState.STOPPED, "stop requested")
            return []
        if self._is_killed():
            return []
        if event.grace_ms == 0:
            return self._kill(self.pid, "the pool stops")
        return [TerminateProcess(self.pid), self._arm(event.grace_ms)]

    def _on_timer_due(self, event: TimerDue) -> list[SlotCommand]:
        if not self._timer_armed or event.timer_seq != self._timer_seq:
            return self._drop_stale()
        self._timer_armed = False
        if self.pid is None:
            self._move(SlotState.WAITING, "pause over")
            return self._order_start()
        if self._ending is None and not self.stopping:
            timeout_ms = self.limits.attach_timeout_ms
            return self._kill(self.pid, f"did not connect within {timeout_ms} ms")
        # The grace after SIGTERM is over. The cause stays what it was: a recycle, or the stop.
        return [KillProcess(self.pid)]

    def _kill(self, pid: int, reason: str) -> list[SlotCommand]:
        self._ending = (ExitCause.KILLED, reason)
        self._timer_armed = False
        return [KillProcess(pid)]

    def _is_killed(self) -> bool:
        return self._ending is not None and self._ending[0] is ExitCause.KILLED

    def _cause_of_exit(self, code: int | None) -> tuple[ExitCause, str]:
        if self.stopping:
            return ExitCause.STOPPED, "the pool stops"
        if self._ending is None:
            return ExitCause.LOST, ""
        if self._is_killed() and code not in (None, -signal.SIGKILL):
            return ExitCause.LOST, ""  # it ended by itself before our signal reached it
        return self._ending

    def _restart_counted(self, delay_ms: int, now_ms: int, cause: str) -> list[SlotCommand]:
        """Start after ``delay_ms``, or back off when the window holds ``max_restarts`` already."""
        restarts = self._restarts_ms
        while restarts and now_ms - restarts[0] >= self.limits.restart_window_ms:
            restarts.popleft()
        if len(restarts) >= self.limits.max_restarts:
            restarts.clear()
            self._move(SlotState.BACKOFF, cause)
            return [self._arm(self.limits.backoff_ms)]
        restarts.append(now_ms)
        self._move(SlotState.WAITING, cause)
        return self._order_start() if delay_ms == 0 else [self._arm(delay_ms)]

    def _order_start(self) -> list[SlotCommand]:
        self._start_ordered = True
        return [StartProcess()]

    def _arm(self, delay_ms: int) -> ArmTimer:
        self._timer_seq += 1
        self._timer_armed = True
        return ArmTimer(self._timer_seq, delay_ms)

    def _drop_stale(self) -> list[SlotCommand]:
        self.stale_events += 1
        return []

    def _move(self, to: SlotState, cause: str) -> None:
        self.story.append((cause, self.state, to))
        self.state = to

    def _illegal(self, event: SlotEvent) -> InvalidTransitionError:
        story = list(self.story)
        return InvalidTransitionError(f"{self.executor_id}: {event} while {self.state}: {story}")


_HANDLERS: dict[type[Any], Callable[[Slot, Any], list[SlotCommand]]] = {
    StartRequested: Slot._on_start_requested,
    ProcessStarted: Slot._on_process_started,
    StartFailed: Slot._on_start_failed,
    ExecutorAttached: Slot._on_attached,
    ProcessExited: Slot._on_process_exited,
    KillRequested: Slot._on_kill_requested,
    RecycleRequested: Slot._on_recycle_requested,
    StopRequested: Slot._on_stop_requested,
    TimerDue: Slot._on_timer_due,
}


def describe_exit(code: int | None) -> str:
    """An exit code in words: ``exit code 3``, ``signal SIGSEGV``."""
    if code is None:
        return "exit code unknown"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def is_hopeless(slots: Iterable[Slot]) -> bool:
    """No executor can start: all failed ``BOOT_FAILURES_MAX`` times in a row before they attached.

    One slot that works is enough to go on: the others are throttled, and its calls are served.
    False once the pool stops.
    """
    return all(slot.boot_failures >= BOOT_FAILURES_MAX and not slot.stopping for slot in slots)
