"""One attempt of one call as the executor sees it: its state, its budget account, its signals.

Owned by the executor's main thread; no I/O; times are handed in, nanoseconds of the monotonic clock (only
a limit of CPU time asks the thread's own clock). The only module that writes ``ExecContext.state``.
Invariants: at most one pending request; ``in_user`` is true only while statements of the user's call (or
the encoding and the failure report of its outcome) run; a latched signal never goes away, so that an
outcome reached by swallowing it is refused.
"""

import enum
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from msgspec import Raw, Struct

from blockx.errors import (
    CallCancelledError,
    CallDeadlineExceededError,
    CallSignal,
    ErrorKind,
    InvalidTransitionError,
)
from blockx.ipc.messages import NULL, ExecuteCall, ExecuteCallPayload, WireError

if TYPE_CHECKING:
    from greenlet import greenlet

    from blockx.executor.tracing import SpanDraft

_thread_time_ns = time.thread_time_ns
NS_PER_MS: Final = 1_000_000
NS_PER_US: Final = 1_000

NEVER_NS: Final = 1 << 62
"""Time left of a call without any limit."""

CALL_TIMEOUT: Final = "call_timeout"
"""Reason of a cancel that counts as a deadline (the specification, "Cancellation")."""


class ExecState(enum.IntEnum):
    """Where an attempt stands; the number is its place in the counts of the heartbeat row."""

    RUNNABLE = 0
    RUNNING = 1
    WAITING_IO = 2
    WAITING_SUBCALL = 3
    WAITING_FUNCTION_CODE = 4
    WAITING_SLEEP = 5
    DONE = 6


# Under their own names: before Python 3.12 a member looked up in its class costs 0.1 us, 15 times a read.
RUNNABLE: Final = ExecState.RUNNABLE
RUNNING: Final = ExecState.RUNNING
WAITING_IO: Final = ExecState.WAITING_IO
WAITING_SUBCALL: Final = ExecState.WAITING_SUBCALL
WAITING_FUNCTION_CODE: Final = ExecState.WAITING_FUNCTION_CODE
WAITING_SLEEP: Final = ExecState.WAITING_SLEEP
DONE: Final = ExecState.DONE

_WAITING: Final = frozenset({WAITING_IO, WAITING_SUBCALL, WAITING_FUNCTION_CODE, WAITING_SLEEP})
_LEGAL: Final[dict[ExecState, frozenset[ExecState]]] = {
    RUNNABLE: frozenset({RUNNING, DONE}),
    RUNNING: _WAITING | {DONE},
    **dict.fromkeys(_WAITING, frozenset({RUNNING, DONE})),
    DONE: frozenset(),
}
_LEGAL_BITS: Final = [sum(1 << to for to in _LEGAL[state]) for state in ExecState]
"""The same by index and bit: an enum member is hashed by a Python function, 0.3 us a move."""

_CANCEL_KINDS: Final = {
    CALL_TIMEOUT: ErrorKind.DEADLINE_EXCEEDED,
    ErrorKind.TASK_CANCELLED.value: ErrorKind.TASK_CANCELLED,
}


class PartLimits(NamedTuple):
    """Limits of the parts of a budget, nanoseconds; NEVER_NS: none."""

    cpu_ns: int
    io_ns: int
    subcall_ns: int
    sleep_ns: int


_NO_LIMITS_MS: Final = (0, 0, 0, 0)


def _part_limits(payload: ExecuteCallPayload) -> PartLimits | None:
    limits_ms = (
        payload.cpu_limit_ms,
        payload.io_limit_ms,
        payload.subcall_limit_ms,
        payload.sleep_limit_ms,
    )
    if limits_ms == _NO_LIMITS_MS:
        return None
    return PartLimits(*(ms * NS_PER_MS if ms else NEVER_NS for ms in limits_ms))


class Counts(Protocol):
    """Numbers of attempts by state: a list, or a part of the heartbeat row's draft."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


class Wake(Struct, eq=False, gc=False):
    """What wakes a parked call: an answer of main, a source from a neighbour, or nothing but time."""

    result: Raw = NULL
    sidecar: bytes | None = None
    error: WireError | None = None
    io_ns: int = 0
    """Charged as IO, at most the whole wait."""
    budget_used_ns: int = 0
    """Charged as sub-call, at most the whole wait."""
    lead: bool = False
    """The leader of a shared source fetch is gone: ask for it yourself."""


class ExecContext:
    """One attempt of one call."""

    __slots__ = (
        "args", "arrived_ns", "attempt_seq", "audit", "body_started", "budget_ns", "call_id", "call_seq",
        "cancel_reason", "counts", "cpu_mark_ns", "cpu_ns", "deadline_ns", "debug", "digest", "entry", "expires_ns",
        "function_id", "greenlet", "held_ns", "in_user", "io_ns", "is_over", "last_operation", "limits", "output",
        "parent_call_id", "queued", "raises", "refused_since_ns", "remote_error", "remote_kind", "request_id",
        "signal_kind", "sleep_ns",
        "sleep_seq", "span", "stale", "state", "step_started_ns", "subcall_ns", "task_id", "wake",
    )  # fmt: skip

    def __init__(self, message: ExecuteCall, counts: Counts, now_ns: int) -> None:
        payload = message.payload
        self.call_id = message.call_id
        self.task_id = payload.task_id
        self.function_id = payload.function_id
        self.digest = payload.function_code_digest
        self.entry, self.audit = payload.entry_selector, payload.audit
        self.args = payload.args
        self.attempt_seq = payload.attempt_seq
        self.call_seq = payload.call_seq
        self.parent_call_id = payload.parent_call_id
        self.debug = payload.debug
        self.budget_ns = payload.call_budget_ms * NS_PER_MS
        """CPU + IO + sub-calls + sleep. 0: no limit."""
        self.limits = _part_limits(payload)
        self.deadline_ns = (
            now_ns + payload.call_deadline_ms * NS_PER_MS if payload.call_deadline_ms else 0
        )
        """Moment at which the task's wall time ends. 0: none."""
        self.arrived_ns = now_ns
        self.counts = counts
        """Contexts by state, shared with the runtime."""
        self.state = RUNNABLE
        counts[0] += 1
        self.queued = False
        """In a run queue, or about to be switched in."""
        self.stale = self.in_user = self.body_started = self.is_over = False
        """``stale``: replaced by a newer attempt, unwinds without a terminal message. ``is_over``: the function has
        returned or raised; what runs of it from now on asks for nothing."""
        self.greenlet: greenlet | None = None
        self.request_id = ""
        """The one pending request; empty when none."""
        self.wake: Wake | None = None
        self.sleep_seq = 0
        """Which entry of the sleepers' heap is ours; older ones are void."""
        self.step_started_ns = self.cpu_mark_ns = self.expires_ns = 0
        """When it was switched in, 0 while it is not running; with limits of the parts, the thread's CPU
        clock then; the first moment at which it can run into a limit, so that ``check`` only compares."""
        self.held_ns = self.cpu_ns = self.io_ns = self.subcall_ns = self.sleep_ns = 0
        """The account so far: wall time switched in, CPU time of it, and the three kinds of waiting."""
        self.cancel_reason: str | None = None
        self.signal_kind: ErrorKind | None = None
        """Latched at the first signal raised; decides the outcome."""
        self.raises = self.refused_since_ns = 0
        """How often the alarm has raised in this call (from the second on it was swallowed before), and
        since when it would raise but meets no user source; 0: it does not."""
        self.remote_error: BaseException | None = None
        """The last exception that the bridge raised for an answer of main (known by identity)."""
        self.remote_kind = ErrorKind.IO_ERROR
        """What the call ends with if that exception does."""
        self.last_operation = ""
        self.output: object = None
        """Where ``capture`` collects what the call prints."""
        self.span: SpanDraft | None = None
        """Notes for its span; None: it is not traced."""

    def move(self, to: ExecState) -> None:
        """Change the state and the counts by state. Raises InvalidTransitionError, changing nothing."""
        if not _LEGAL_BITS[self.state] >> to & 1:
            raise InvalidTransitionError(
                f"{self.call_id}#{self.attempt_seq}: {self.state.name} -> {to.name}"
            )
        self.counts[self.state] -= 1
        self.counts[to] += 1
        self.state = to

    def used_ns(self, now_ns: int) -> int:
        """What counts against the budget: wall time switched in, IO, sub-calls, sleep. Not queueing."""
        used = self.held_ns + self.io_ns + self.subcall_ns + self.sleep_ns
        return used + now_ns - self.step_started_ns if self.step_started_ns else used

    def left_ns(self, now_ns: int) -> int:
        """Time until ``deadline_expired_reason`` has one, if the call runs on; NEVER_NS without limits."""
        left = self.budget_ns - self.used_ns(now_ns) if self.budget_ns else NEVER_NS
        if self.limits is not None:
            left = min(left, *(limit - used for _, used, limit in self._parts(self.limits)))
        return min(left, self.deadline_ns - now_ns) if self.deadline_ns else left

    def begin_step(self, now_ns: int) -> int:
        """It is switched in. Returns the time until it can run into a limit."""
        if self.limits is not None:
            self.cpu_mark_ns = _thread_time_ns()
        self.step_started_ns = now_ns
        left_ns = self.left_ns(now_ns)
        self.expires_ns = now_ns + left_ns
        return left_ns

    def charge_wait(self, io_ns: int, subcall_ns: int, sleep_ns: int) -> None:
        """What the wait cost that the running step began with."""
        self.io_ns += io_ns
        self.subcall_ns += subcall_ns
        self.sleep_ns += sleep_ns
        self.expires_ns -= io_ns + subcall_ns + sleep_ns

    def wait_left_ns(self, now_ns: int, state: "ExecState") -> int:
        """How long a wait of that kind may take: what is left of the whole, and of its part."""
        left = self.budget_ns - self.used_ns(now_ns) if self.budget_ns else NEVER_NS
        if self.deadline_ns:
            left = min(left, self.deadline_ns - now_ns)
        if self.limits is None:
            return left
        own_left = {
            WAITING_IO: self.limits.io_ns - self.io_ns,
            WAITING_SUBCALL: self.limits.subcall_ns - self.subcall_ns,
            WAITING_SLEEP: self.limits.sleep_ns - self.sleep_ns,
        }
        return min(left, own_left.get(state, NEVER_NS))

    def budget_left_ms(self, now_ns: int, state: "ExecState") -> float:
        """For the wire, where 0 means no limit: what a wait of the running call may take, at least a microsecond."""
        if self.limits is None and not self.deadline_ns:  # mostly so: the moment is known
            left_ns = self.expires_ns - now_ns if self.budget_ns else NEVER_NS
        else:
            left_ns = self.wait_left_ns(now_ns, state)
        return 0.0 if left_ns >= NEVER_NS else max(left_ns / NS_PER_MS, 0.001)

    def deadline_expired_reason(self, now_ns: int) -> str | None:
        """Why the call must end, or None. The one decision point; the budget comes before the deadline."""
        if self.budget_ns:
            used = self.used_ns(now_ns)
            if used >= self.budget_ns:
                last = f", last in {self.last_operation}" if self.last_operation else ""
                computed = used - self.io_ns - self.subcall_ns - self.sleep_ns
                return (
                    f"call {self.call_id} of {self.function_id!r} used {used // NS_PER_MS} ms of its "
                    f"{self.budget_ns // NS_PER_MS} ms budget (running {computed // NS_PER_MS}, "
                    f"io {self.io_ns // NS_PER_MS}, sub-calls {self.subcall_ns // NS_PER_MS}, "
                    f"sleep {self.sleep_ns // NS_PER_MS}){last}"
                )
        if self.limits is not None:
            for name, used, limit in self._parts(self.limits):
                if used >= limit:
                    return (
                        f"call {self.call_id} of {self.function_id!r} used {used // NS_PER_MS} ms of its "
                        f"{limit // NS_PER_MS} ms of {name} (dispatcher.call_limits)"
                    )
        if self.deadline_ns and now_ns >= self.deadline_ns:
            return (
                f"call {self.call_id} of {self.function_id!r} ran past the end of its task's time"
            )
        return None

    def _parts(self, limits: PartLimits) -> tuple[tuple[str, int, int], ...]:
        """Name, used and limit of each part."""
        cpu_ns = self.cpu_ns
        if self.step_started_ns:
            cpu_ns += _thread_time_ns() - self.cpu_mark_ns
        return (
            ("CPU", cpu_ns, limits.cpu_ns),
            ("IO", self.io_ns, limits.io_ns),
            ("sub-calls", self.subcall_ns, limits.subcall_ns),
            ("sleep", self.sleep_ns, limits.sleep_ns),
        )

    def pending_signal(self, now_ns: int) -> CallSignal | None:
        """The signal that must be raised now, latched; None while the call may go on."""
        if self.cancel_reason is not None:
            if self.signal_kind is None:
                self.signal_kind = _CANCEL_KINDS.get(self.cancel_reason, ErrorKind.CANCELLED)
            text = (
                f"call {self.call_id} of {self.function_id!r} was cancelled: {self.cancel_reason}"
            )
            return CallCancelledError(text)
        reason = self.deadline_expired_reason(now_ns)
        if reason is not None:
            self.signal_kind = self.signal_kind or ErrorKind.DEADLINE_EXCEEDED
            return CallDeadlineExceededError(reason)
        return None

    def check(self, now_ns: int) -> None:
        """A safe point of the running call: raises the pending signal, again each time."""
        if self.cancel_reason is not None or now_ns >= self.expires_ns:
            signal = self.pending_signal(now_ns)
            if signal is not None:
                raise signal
