"""ExecutorRuntime: the resident calls of one executor, and who of them runs next.

Main thread only. The hub is the greenlet that constructs the runtime; each started call runs in a
*lane*, a pooled greenlet that runs call after call (making a greenlet costs 11 us, entering a parked
one 0.7 us). The law of switching: ``step`` is the only place that enters a lane, ``bridge.wait`` and the
end of a call (``_lane``) are the only ones that leave it, and nothing switches in a signal handler.

Invariants:
- One call runs at a time; its sequence number stands in the heartbeat row from before it is entered
  until after it is left, and is left standing if the process dies in it. Blame relies on that.
- Exactly one terminal message an attempt, except for one that was replaced by a newer attempt.
- A message for an old attempt, another request or a state that does not wait changes nothing and is counted.
- Whatever runs user code (loading, the call, encoding its result, wording its failure) runs with
  ``in_user`` set, so that the alarm can end it, and inside the call's budget.

≠ The specification unwinds all contexts when the connection is lost; here the process ends, since its
attempts are over for main and a new incarnation starts clean.
"""

import contextvars
import gc
import heapq
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from types import CoroutineType
from typing import Any, Final

from greenlet import getcurrent, greenlet
from msgspec import Raw

from blockx.errors import RETRY_POLICIES, CallSignal, ErrorKind, FunctionCodeFetchError
from blockx.executor.bridge import SdkBridge
from blockx.executor.capture import CallOutput, FailureReport, OutputCapture, failure_report
from blockx.executor.context import NS_PER_MS, NS_PER_US, Counts, ExecContext, ExecState, Wake
from blockx.executor.interrupts import Alarm
from blockx.executor.loader import LoadedFunction, Loader, is_user_file
from blockx.executor.session import Channel, ListChannel
from blockx.executor.vitals import Vitals
from blockx.ipc import exact_json
from blockx.ipc.frames import FRAME_BYTES_MAX, FrameTooLargeError
from blockx.ipc.heartbeat import (
    ATTACHED,
    AVAILABLE_CONTEXTS,
    FINISHED_CALLS,
    INCARNATION,
    INFLIGHT,
    LAST_ACTIVE_NS,
    PID,
    RSS_AT_STEP_START,
    RUNNABLE,
    RUNNING_ATTEMPT_SEQ,
    RUNNING_CALL_SEQ,
    RUNNING_SINCE_NS,
    STALE_CANCELS,
    STALE_RESUMES,
    STATE_DONE,
    STATE_RUNNABLE,
    HeartbeatRow,
    incarnation_number,
)
from blockx.ipc.messages import (
    CallCompleted,
    CallCompletedPayload,
    CallFailed,
    CallFailedPayload,
    CancelCall,
    ExecuteCall,
    ExecutorMessage,
    Heartbeat,
    HeartbeatAck,
    HeartbeatPayload,
    MainMessage,
    ResumeCall,
    WaitKind,
    decode_main_message,
)
from blockx.sdk.provider import set_provider

SLEEPERS_IN_A_ROW_MAX: Final = 64
"""Calls whose sleep is over that go before runnable ones, one after the other; then one of those."""
TURN_NS: Final = 1_000_000
"""While calls are runnable, the socket is read and timers are looked at this often."""
LONG_STEP_NS: Final = 5_000_000
"""A function whose step once computed this long gets finished neighbours sent before it is entered."""
LONG_BLOCK_NS: Final = 50_000_000
"""The same for a step that took this much wall time, since it blocks. Ten times as much: on a busy machine
any step may be off the CPU for a while, and each send before a call costs 3 us."""
LONG_DIGESTS_MAX: Final = 4_096
"""Functions known as long. Full: the knowledge starts anew, at the cost of a few re-run neighbours."""
LANES_POOLED_MAX: Final = 256
"""Parked greenlets kept for the next calls. Full: the lane ends."""
TASK_LINGER_NS: Final = 1_000_000_000
"""How long the modules of a task stay after its last resident call, so that a task that sends one call
at a time does not load its functions anew for each."""
TASKS_LINGERING_MAX: Final = 16
"""Tasks kept that way. Full: the oldest is released at once."""
UNLIMITED_CONTEXTS: Final = 1 << 30
"""``availableContexts`` of an executor without a limit (the specification)."""
VOID_SLEEPERS_MAX: Final = 64
"""Heap entries of cancelled sleeps; more of them than live ones are swept out."""

_RESUMES: Final = {
    WaitKind.IO: ExecState.WAITING_IO,
    WaitKind.SUBCALL: ExecState.WAITING_SUBCALL,
    WaitKind.FUNCTION_CODE: ExecState.WAITING_FUNCTION_CODE,
}
_STATE_WORDS: Final = slice(STATE_RUNNABLE, STATE_DONE + 1)

# Phases of a call: what an exception in it means.
_LOADING, _ARGUMENTS, _BODY, _ENCODING = range(4)
_PHASE_KINDS: Final = {
    _LOADING: ErrorKind.LOAD_ERROR,
    _ARGUMENTS: ErrorKind.INVALID_CALL,
    _BODY: ErrorKind.USER_ERROR,
    _ENCODING: ErrorKind.OUTPUT_NOT_SERIALIZABLE,
}
# Bound before user code can replace them.
_monotonic_ns = time.monotonic_ns
_thread_time_ns = time.thread_time_ns


class ExecutorRuntime:
    """The calls of one executor. See the module's law.

    Without a ``session`` messages are kept for ``drain_outbox``, and are fed in with
    ``handle_inbound_message``. ``heartbeat_interval_ms`` 0: no heartbeat frames after the first
    (an executor with a row beats through its helper thread).
    """

    def __init__(
        self,
        executor_id: str,
        loader: Loader,
        session: Channel | None = None,
        row: HeartbeatRow | None = None,
        *,
        incarnation_id: str = "00000000",
        executor_max_inflight: int = 128,
        heartbeat_interval_ms: int = 0,
        capture: Callable[[Callable[[], CallOutput | None]], OutputCapture] | None = None,
        task_linger_ns: int = TASK_LINGER_NS,
    ) -> None:
        self.executor_id = executor_id
        self.incarnation_id = incarnation_id
        self.channel: Channel = session or ListChannel()
        self.hub = getcurrent()
        self.running: ExecContext | None = None
        """The call whose lane is switched in."""
        self.is_retiring = False
        self.retire_reason = ""
        self.is_forked = False
        """This is a child that user code forked; it speaks with nobody."""
        self.memory_bytes = 0
        """Last sample of the helper thread."""
        self.bridge = SdkBridge(self)
        self.counters = {"stale_executes": 0, "stale_resumes": 0, "stale_cancels": 0, "finished": 0}
        self._loader = loader
        self._row = row
        self._max_inflight = executor_max_inflight
        self._alarm = Alarm(self)
        self._capture = capture(self.current_output) if capture is not None else None
        self._contexts: dict[str, ExecContext] = {}
        self._roots = 0
        self._runnable: deque[ExecContext] = deque()
        self._sleep_ready: deque[ExecContext] = deque()
        self._sleepers_in_a_row = 0
        self._sleepers: list[tuple[int, int, ExecContext]] = []
        self._void_sleepers = 0
        self._sleep_seq = 0
        self._request_seq = 0
        self._lanes: list[greenlet] = []
        self._clean_context = contextvars.Context()
        self._clean_context.run(set_provider, self.bridge)
        self._cpu_mark_ns = _thread_time_ns()
        self._step_cpu_ns = 0
        self._long_digests: set[str] = set()
        self._task_calls: dict[str, int] = {}
        self._lingering: OrderedDict[str, int] = OrderedDict()
        self._task_linger_ns = task_linger_ns
        self._vitals = Vitals()
        self._heartbeat_interval_ns = heartbeat_interval_ms * NS_PER_MS
        self._heartbeat_due_ns = _monotonic_ns() + self._heartbeat_interval_ns
        self._last_active_ns = _monotonic_ns()
        self._counts: Counts = [0] * len(ExecState)
        if row is not None:
            # The draft of the row is the counter: no copy at each turn.
            self._counts = memoryview(row.scheduler)[_STATE_WORDS]
            row.scheduler[INCARNATION] = incarnation_number(incarnation_id)
            row.scheduler[PID] = os.getpid()
            self._publish(self._last_active_ns)
        self._handlers: dict[type, Callable[[Any, bytes | None], None]] = {
            ExecuteCall: self.submit_call,
            ResumeCall: self.resume_call,
            CancelCall: self.cancel_call,
            HeartbeatAck: self._on_heartbeat_ack,
        }

    # ---- what arrives --------------------------------------------------------------------------

    def handle_inbound_message(
        self, message: MainMessage | dict[str, Any], sidecar: bytes | None = None
    ) -> None:
        """Apply one message of main; a dict is its JSON form. Raises PeerProtocolError for a bad one."""
        if isinstance(message, dict):
            message = decode_main_message(exact_json.encode(message))
        self._handlers[type(message)](message, sidecar)

    def submit_call(self, message: ExecuteCall, _sidecar: bytes | None = None) -> None:
        """Take an attempt in, in place of an older one of the same call; or refuse it with CallFailed."""
        old = self._contexts.get(message.call_id)
        if old is not None:
            if message.payload.attempt_seq <= old.attempt_seq:
                self.counters["stale_executes"] += 1
                return
            self._replace(old)
        refusal = self._refusal(message)
        if refusal is not None:
            self._refuse(message, *refusal)
            return
        context = ExecContext(message, self._counts, _monotonic_ns())
        self._contexts[context.call_id] = context
        self._roots += not context.parent_call_id
        self._task_calls[context.task_id] = self._task_calls.get(context.task_id, 0) + 1
        self._lingering.pop(context.task_id, None)
        context.queued = True
        self._runnable.append(context)

    def resume_call(self, message: ResumeCall, sidecar: bytes | None = None) -> None:
        """Queue a waiting call with its answer. Wrong attempt, state or request: dropped and counted."""
        payload = message.payload
        context = self._contexts.get(message.call_id)
        if (
            context is None
            or context.queued
            or context.attempt_seq != payload.attempt_seq
            or context.state is not _RESUMES[payload.resume_kind]
            or not message.request_id
            or context.request_id != message.request_id
        ):
            self.counters["stale_resumes"] += 1
            return
        wake = Wake(
            payload.result,
            sidecar,
            payload.error,
            io_ns=payload.io_us * NS_PER_US,
            budget_used_ns=int(payload.budget_used_ms * NS_PER_MS),
        )
        self.wake(context, wake)

    def cancel_call(self, message: CancelCall, _sidecar: bytes | None = None) -> None:
        """Have an attempt end: its signal is raised where it waits, or before it starts."""
        context = self._contexts.get(message.call_id)
        if context is None or context.attempt_seq != message.payload.attempt_seq:
            self.counters["stale_cancels"] += 1
            return
        self._cancel(context, message.payload.reason or "worker_shutdown")

    def wake(self, context: ExecContext, wake: Wake) -> None:
        """Queue a parked call with what it waited for; nothing if something else woke it already."""
        if not context.queued:
            context.wake = wake
            context.queued = True
            self._runnable.append(context)

    def _on_heartbeat_ack(self, _message: HeartbeatAck, _sidecar: bytes | None) -> None:
        if self._row is not None:
            self._row.scheduler[ATTACHED] = 1

    def _refusal(self, message: ExecuteCall) -> tuple[ErrorKind, str] | None:
        """Why an attempt cannot be taken in."""
        payload = message.payload
        missing = _missing_fields(message)
        if missing:
            return ErrorKind.INVALID_CALL, f"ExecuteCall without {', '.join(missing)}"
        if payload.parent_call_id:
            if payload.parent_call_id in self._contexts:
                return None
            return (
                ErrorKind.SUBCALL_PARENT_NOT_RESIDENT,
                f"the parent {payload.parent_call_id} is not in {self.executor_id}",
            )
        if self.is_retiring:
            return ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED, f"{self.executor_id} is being replaced"
        if self._max_inflight and self._roots >= self._max_inflight:
            return (
                ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED,
                f"{self.executor_id} holds {self._roots} of {self._max_inflight} calls",
            )
        return None

    def _refuse(self, message: ExecuteCall, kind: ErrorKind, text: str) -> None:
        payload = CallFailedPayload(
            attempt_seq=message.payload.attempt_seq,
            error_kind=kind,
            error_message=text,
            retryable=RETRY_POLICIES[kind].retryable,
        )
        self.channel.send_terminal(
            CallFailed(
                executor_id=self.executor_id,
                call_id=message.call_id,
                sent_at_ms=_monotonic_ns() // NS_PER_MS,
                payload=payload,
            )
        )

    def _replace(self, old: ExecContext) -> None:
        """A newer attempt has come: the old one unwinds without a terminal message."""
        old.stale = True
        self._leave(old)
        self._cancel(old, "replaced by a newer attempt")

    def _cancel(self, context: ExecContext, reason: str) -> None:
        if context.cancel_reason is None:
            context.cancel_reason = reason
        if not context.queued:
            if context.state is ExecState.WAITING_SLEEP:
                self._void_sleep(context)
            context.queued = True
            self._runnable.appendleft(context)

    # ---- the scheduler -------------------------------------------------------------------------

    def run_until_idle(self) -> None:
        """Run until every resident call waits. Reads the socket at least every TURN_NS.

        Raises PeerProtocolError if main sends what it may not.
        """
        now_ns = self._turn()
        while (context := self._next_context()) is not None:
            self.step(context)
            if self._last_active_ns - now_ns >= TURN_NS:
                now_ns = self._turn()
        self._publish(self._last_active_ns)
        self.channel.flush()

    def next_scheduler_delay(self, default: float | None = None) -> float | None:
        """Seconds until something is due by time; ``default`` if nothing is. 0: calls are runnable."""
        if self._runnable or self._sleep_ready:
            return 0.0
        due_ns = []
        if self._sleepers:
            due_ns.append(self._sleepers[0][0])
        if self._heartbeat_interval_ns:
            due_ns.append(self._heartbeat_due_ns)
        if self._lingering:
            due_ns.append(next(iter(self._lingering.values())) + self._task_linger_ns)
        if not due_ns:
            return default
        return max(0, min(due_ns) - _monotonic_ns()) / 1e9

    def rest(self) -> None:
        """Before the process waits for main: nothing runs, so no alarm."""
        self._alarm.disarm()

    def close(self) -> None:
        """End all calls and give SIGALRM back; for tests and tools, a process simply ends."""
        for context in list(self._contexts.values()):
            self._cancel(context, "worker_shutdown")
        self.run_until_idle()
        for lane in self._lanes:
            lane.switch(None)
        for task_id in self._lingering:
            self._loader.release_task(task_id)
        self._alarm.uninstall()

    def step(self, context: ExecContext) -> None:
        """Run one call until it waits or ends. The only place that enters a lane."""
        lane = context.greenlet
        switch_in: ExecContext | Wake | None = context
        if lane is not None:
            switch_in, context.wake = context.wake, None
        elif context.cancel_reason is not None:
            self._end_unstarted(context)
            return
        else:
            lane = context.greenlet = self._clean_lane()
        if self.channel.terminal_frames and context.digest in self._long_digests:
            # If the call has to be killed in C code, finished neighbours must not run again.
            self.channel.flush()
        context.queued = False
        if context.state is not ExecState.RUNNING:
            context.move(ExecState.RUNNING)
        start_ns = _monotonic_ns()
        self.running = context
        row = self._row
        if row is not None:
            self._publish_running(row, context, start_ns)
        context.step_started_ns = start_ns
        self._alarm.enter(context.left_ns(start_ns))
        lane.switch(switch_in)
        self.running = None
        end_ns = _monotonic_ns()
        if context.state is ExecState.DONE:
            self._park_lane(lane)
        else:
            self._charge_step(context, end_ns)
            if context.state is ExecState.RUNNING:
                self._on_stray_switch(context, lane)
        if self._step_cpu_ns >= LONG_STEP_NS or end_ns - start_ns >= LONG_BLOCK_NS:
            self._remember_long(context.digest)
        self._last_active_ns = end_ns
        if row is not None:
            row.scheduler[RUNNING_CALL_SEQ] = 0
            row.write_scheduler()
        self.channel.flush_if_due(end_ns)

    def plan_wake(self, context: ExecContext, due_ns: int) -> None:
        """For the bridge: the running call parks now and is queued again when it is due.

        0 is a yield: it goes to the end of the runnable calls, so that all of them get their turn.
        """
        if not due_ns:
            self.wake(context, Wake())
            return
        self._sleep_seq += 1
        context.sleep_seq = self._sleep_seq
        heapq.heappush(self._sleepers, (due_ns, self._sleep_seq, context))

    def next_request_id(self) -> str:
        """Unique over all incarnations, so that an old process's answers match nothing."""
        self._request_seq += 1
        return f"req-{self.incarnation_id}-{self._request_seq}"

    def inflight_count(self) -> int:
        """Resident attempts, sub-calls included."""
        return len(self._contexts)

    @property
    def is_finished(self) -> bool:
        """A retiring executor has nothing left to do."""
        return self.is_retiring and not self._contexts and not self._runnable

    def drain_outbox(self) -> list[ExecutorMessage]:
        """What would have been sent, when there is no session."""
        assert isinstance(self.channel, ListChannel), "there is a session"
        sent, self.channel.sent = self.channel.sent, []
        self.channel.sidecars.clear()
        return sent

    def _next_context(self) -> ExecContext | None:
        if self._sleep_ready and (
            self._sleepers_in_a_row < SLEEPERS_IN_A_ROW_MAX or not self._runnable
        ):
            self._sleepers_in_a_row += 1
            return self._sleep_ready.popleft()
        self._sleepers_in_a_row = 0
        return self._runnable.popleft() if self._runnable else None

    def _turn(self) -> int:
        """Between steps: read the socket, wake sleepers, see to what is due. Returns the time."""
        for message, sidecar in self.channel.receive():
            self._handlers[type(message)](message, sidecar)
        now_ns = _monotonic_ns()
        if self._sleepers and self._sleepers[0][0] <= now_ns:
            self._wake_sleepers(now_ns)
        if self._heartbeat_interval_ns and now_ns >= self._heartbeat_due_ns:
            self.send_heartbeat(now_ns)
        if self._lingering:
            self._release_lingering(now_ns)
        self._publish(now_ns)
        return now_ns

    def _wake_sleepers(self, now_ns: int) -> None:
        sleepers = self._sleepers
        while sleepers and sleepers[0][0] <= now_ns:
            _due_ns, seq, context = heapq.heappop(sleepers)
            if context.sleep_seq != seq:
                self._void_sleepers -= 1
                continue
            context.sleep_seq = 0
            context.wake = Wake()
            context.queued = True
            self._sleep_ready.append(context)

    def _void_sleep(self, context: ExecContext) -> None:
        """A cancelled sleep leaves its heap entry behind; too many of them are swept out."""
        context.sleep_seq = 0
        self._void_sleepers += 1
        if VOID_SLEEPERS_MAX < self._void_sleepers > len(self._sleepers) // 2:
            self._sleepers = [entry for entry in self._sleepers if entry[2].sleep_seq == entry[1]]
            heapq.heapify(self._sleepers)
            self._void_sleepers = 0

    def _clean_lane(self) -> greenlet:
        """A lane for a new call: an empty context but for the provider, our own output streams."""
        lane = self._lanes.pop() if self._lanes else greenlet(self._lane, self.hub)
        lane.gr_context = self._clean_context.copy()
        if self._capture is not None:
            self._capture.restore()
        return lane

    def _park_lane(self, lane: greenlet) -> None:
        if len(self._lanes) < LANES_POOLED_MAX:
            self._lanes.append(lane)
        else:
            lane.switch(None)

    def _on_stray_switch(self, context: ExecContext, lane: greenlet) -> None:
        """User code went to the hub by itself (it may use greenlets of its own): a yield, no more."""
        if lane.dead:
            self._end_unstarted(context, "its greenlet ended outside of the function")
            return
        context.queued = True
        self._runnable.append(context)

    def _remember_long(self, digest: str) -> None:
        if len(self._long_digests) >= LONG_DIGESTS_MAX:
            self._long_digests.clear()
        self._long_digests.add(digest)

    # ---- one call, in its lane -----------------------------------------------------------------

    def _lane(self, context: ExecContext | None) -> None:
        """Body of a pooled greenlet: one call after the other; parked here between them."""
        while context is not None:
            self._run_call(context)
            if self.is_forked:
                os._exit(0)
            context = None
            context = self.hub.switch()

    def _run_call(self, context: ExecContext) -> None:
        """One attempt from its load to its terminal message. User code cannot make it raise."""
        phase = _LOADING
        try:
            context.check(context.step_started_ns)
            context.in_user = True
            loaded = self._load(context)
            phase = _ARGUMENTS
            arguments = _positional(context)
            phase = _BODY
            context.body_started = True
            result = loaded.call(*arguments)
            phase = _ENCODING
            if type(result) is CoroutineType:
                result.close()  # it is refused below; unclosed it would warn that nobody awaited it
            output = exact_json.encode(result)
            context.in_user = False
            context.check(_monotonic_ns())
        except BaseException as error:  # noqa: BLE001 - whatever user code raises ends its call only
            context.in_user = False
            self._fail(context, error, phase)
            return
        self._complete(context, output)

    def _load(self, context: ExecContext) -> LoadedFunction:
        return self._loader.load(
            context.task_id,
            context.function_id,
            context.digest,
            context.entry,
            self.bridge.do_function_code_req,
            self._check_running,
        )

    def _check_running(self) -> None:
        """For the loader: a module body that swallowed a signal is not kept."""
        assert self.running is not None
        self.running.check(_monotonic_ns())

    def _complete(self, context: ExecContext, output: bytes) -> None:
        """The function has returned and its result is encoded."""
        now_ns = _monotonic_ns()
        self._charge_step(context, now_ns)
        if context.stale:
            self._discard(context)
            return
        payload = CallCompletedPayload(attempt_seq=context.attempt_seq, output=Raw(output))
        self._write_costs(payload, context, now_ns)
        message = CallCompleted(
            executor_id=self.executor_id,
            call_id=context.call_id,
            sent_at_ms=now_ns // NS_PER_MS,
            payload=payload,
        )
        try:
            try:
                self.channel.send_terminal(message)
            except FrameTooLargeError:
                if not payload.output_tail:
                    raise
                payload.output_tail = ""  # what was printed is worth less than the result
                self.channel.send_terminal(message)
        except FrameTooLargeError:
            text = (
                f"the result of {context.function_id!r} is {len(output)} bytes of JSON; with its "
                f"envelope at most {FRAME_BYTES_MAX} bytes can leave an executor: return less"
            )
            report = FailureReport(text, "", {})
            self._send_failure(context, ErrorKind.OUTPUT_TOO_LARGE, report)
        self._discard(context)

    def _fail(self, context: ExecContext, error: BaseException, phase: int) -> None:
        """The attempt ended by an exception; a latched signal decides over everything else."""
        report = self._report(context, error)
        kind = context.signal_kind
        if kind is None:
            kind = _kind_of(context, error, phase)
        elif not isinstance(error, CallSignal):
            signal = context.pending_signal(_monotonic_ns())
            text = f"{type(signal).__name__}: {signal}; the function swallowed it and went on"
            report = report._replace(message=text)
        self._charge_step(context, _monotonic_ns())
        if not context.stale:
            self._send_failure(context, kind, report)
        self._discard(context)

    def _report(self, context: ExecContext, error: BaseException) -> FailureReport:
        """The failure in words. Runs ``__str__`` and ``__repr__`` of user classes: guarded."""
        context.in_user = True
        try:
            report = failure_report(error, is_user_file)
            context.in_user = False
        except BaseException as trouble:  # noqa: BLE001 - a signal, or trouble without end
            context.in_user = False
            name = type.__getattribute__(type(error), "__name__")
            report = FailureReport(f"{name}: <no text: {type(trouble).__name__}>", "", {})
        return report

    def _send_failure(self, context: ExecContext, kind: ErrorKind, report: FailureReport) -> None:
        now_ns = _monotonic_ns()
        payload = CallFailedPayload(
            attempt_seq=context.attempt_seq,
            error_kind=kind,
            error_message=report.message,
            error_stack=report.stack,
            local_vars=report.local_vars,
            retryable=RETRY_POLICIES[kind].retryable,
        )
        self._write_costs(payload, context, now_ns)
        self.channel.send_terminal(
            CallFailed(
                executor_id=self.executor_id,
                call_id=context.call_id,
                sent_at_ms=now_ns // NS_PER_MS,
                payload=payload,
            )
        )

    def _end_unstarted(self, context: ExecContext, why: str = "") -> None:
        """End an attempt from the hub: cancelled before its first step, or its lane is gone."""
        kind, text = ErrorKind.USER_ERROR, why
        if not why:
            signal = context.pending_signal(_monotonic_ns())
            assert signal is not None
            assert context.signal_kind is not None
            kind, text = context.signal_kind, f"{type(signal).__name__}: {signal}"
        if not context.stale:
            self._send_failure(context, kind, FailureReport(text, "", {}))
        self._discard(context)

    # ---- accounts ------------------------------------------------------------------------------

    def _charge_step(self, context: ExecContext, now_ns: int) -> None:
        """Close the account of the step that ends: wall time and this thread's CPU time."""
        context.held_ns += now_ns - context.step_started_ns
        context.step_started_ns = 0
        cpu_ns = _thread_time_ns()
        self._step_cpu_ns = cpu_ns - self._cpu_mark_ns
        self._cpu_mark_ns = cpu_ns
        context.cpu_ns += self._step_cpu_ns

    @staticmethod
    def _write_costs(
        payload: CallCompletedPayload | CallFailedPayload, context: ExecContext, now_ns: int
    ) -> None:
        """Fill in what every terminal message carries. (Attributes: half the time of keywords.)"""
        used_ns = context.used_ns(0)
        payload.body_started = context.body_started
        payload.budget_used_ms = used_ns / NS_PER_MS
        payload.cpu_us = context.cpu_ns // NS_PER_US
        payload.io_us = context.io_ns // NS_PER_US
        payload.subcall_us = context.subcall_ns // NS_PER_US
        payload.sleep_us = context.sleep_ns // NS_PER_US
        payload.queue_us = max(0, now_ns - context.arrived_ns - used_ns) // NS_PER_US
        output = context.output
        if isinstance(output, CallOutput):
            payload.output_tail = output.text()

    def _leave(self, context: ExecContext) -> None:
        """The attempt is resident no more."""
        del self._contexts[context.call_id]
        self._roots -= not context.parent_call_id

    def _discard(self, context: ExecContext) -> None:
        """The attempt is over; what it referred to must not outlive it."""
        context.move(ExecState.DONE)
        self._counts[ExecState.DONE] = 0  # counted are resident attempts
        if not context.stale:
            self._leave(context)
        context.remote_error = None
        context.output = None
        self.counters["finished"] += 1
        task_id = context.task_id
        self._task_calls[task_id] -= 1
        if not self._task_calls[task_id]:
            del self._task_calls[task_id]
            self._lingering[task_id] = _monotonic_ns()

    def _release_lingering(self, now_ns: int) -> None:
        """Release the modules of tasks that have had no call for a while."""
        released = False
        while self._lingering:
            task_id, since_ns = next(iter(self._lingering.items()))
            if (
                now_ns - since_ns < self._task_linger_ns
                and len(self._lingering) <= TASKS_LINGERING_MAX
            ):
                break
            del self._lingering[task_id]
            self._loader.release_task(task_id)
            released = True
        if released and not self._contexts:
            gc.collect()  # what user modules leave is mostly cycles; nobody waits just now

    # ---- what main sees ------------------------------------------------------------------------

    def current_output(self) -> CallOutput | None:
        """Where text that is printed now belongs."""
        context = self.running
        if context is None or getcurrent() is not context.greenlet:
            return None
        if context.output is None:
            context.output = CallOutput(debug=context.debug)
        return context.output if isinstance(context.output, CallOutput) else None

    def tick(self, context: ExecContext, now_ns: int) -> None:
        """The alarm, while user code of ``context`` computes: what cannot wait for the scheduler."""
        if self.is_forked:
            return
        row = self._row
        if row is not None:
            if row.cancel_requested() and row.is_cancelled(context.call_seq, context.attempt_seq):
                context.cancel_reason = context.cancel_reason or ErrorKind.CANCELLED
        elif self._heartbeat_interval_ns and now_ns >= self._heartbeat_due_ns:
            self.send_heartbeat(now_ns)
        if self.channel.frames:
            self.channel.flush()

    def retire(self, why: str) -> None:
        """Take no new root calls; the process ends when the resident ones have. Idempotent."""
        self.retire_reason = why
        self.is_retiring = True

    def become_forked_child(self) -> None:
        """User code forked: this copy of the process has no main, no row and no other calls."""
        self.is_forked = True
        self._row = None
        self._heartbeat_interval_ns = 0
        self.channel.abandon()

    def send_heartbeat(self, now_ns: int) -> None:
        """Queue a Heartbeat frame; the first one of a connection attaches."""
        self._heartbeat_due_ns = now_ns + self._heartbeat_interval_ns
        self.channel.send(self.build_heartbeat(now_ns))

    def build_heartbeat(self, now_ns: int | None = None) -> Heartbeat:
        """The vital signs as a frame."""
        now_ns = _monotonic_ns() if now_ns is None else now_ns
        vitals = self._vitals.sample()
        running = self.running
        payload = HeartbeatPayload(
            executor_process_instance_id=self.incarnation_id,
            pid=os.getpid(),
            has_table=self._row is not None,
            runnable_count=self._runnable_count(),
            inflight_count=len(self._contexts),
            available_contexts=self._available_contexts(),
            memory_bytes=vitals.memory_bytes,
            executor_cpu_utilization=vitals.cpu_ppm / 1_000_000,
            executor_cpu_us_total=vitals.cpu_us_total,
            scheduler_idle_ms=(now_ns - self._last_active_ns) // NS_PER_MS,
            running_call_seq=running.call_seq if running else 0,
            running_call_id=running.call_id if running else "",
            call_state_counts={state.name: self._counts[state] for state in ExecState},
        )
        return Heartbeat(
            executor_id=self.executor_id, sent_at_ms=now_ns // NS_PER_MS, payload=payload
        )

    def _runnable_count(self) -> int:
        return len(self._runnable) + len(self._sleep_ready)

    def _available_contexts(self) -> int:
        if self.is_retiring:
            return 0
        if not self._max_inflight:
            return UNLIMITED_CONTEXTS
        return max(0, self._max_inflight - self._roots)

    def _publish(self, now_ns: int) -> None:
        """Write the scheduler block while nothing runs."""
        self._last_active_ns = now_ns
        row = self._row
        if row is None:
            return
        draft, counters = row.scheduler, self.counters
        draft[RUNNABLE] = len(self._runnable) + len(self._sleep_ready)
        draft[INFLIGHT] = len(self._contexts)
        draft[AVAILABLE_CONTEXTS] = self._available_contexts()
        draft[LAST_ACTIVE_NS] = now_ns
        draft[RUNNING_CALL_SEQ] = 0
        draft[STALE_RESUMES] = counters["stale_resumes"]
        draft[STALE_CANCELS] = counters["stale_cancels"]
        draft[FINISHED_CALLS] = counters["finished"]
        row.write_scheduler()

    def _publish_running(self, row: HeartbeatRow, context: ExecContext, now_ns: int) -> None:
        """Write who is entered now: what blame relies on. Counters follow at the end of the turn."""
        draft = row.scheduler
        draft[RUNNABLE] = len(self._runnable) + len(self._sleep_ready)
        draft[LAST_ACTIVE_NS] = now_ns
        draft[RUNNING_CALL_SEQ] = context.call_seq
        draft[RUNNING_SINCE_NS] = now_ns
        draft[RUNNING_ATTEMPT_SEQ] = context.attempt_seq
        draft[RSS_AT_STEP_START] = self.memory_bytes
        row.write_scheduler()


def _missing_fields(message: ExecuteCall) -> list[str]:
    """Wire names of the ids that an ExecuteCall lacks."""
    payload = message.payload
    names = ("callId", "taskId", "functionId", "functionCodeDigest", "entrySelector", "attemptSeq")
    values = (
        message.call_id,
        payload.task_id,
        payload.function_id,
        payload.function_code_digest,
        payload.entry_selector,
        payload.attempt_seq > 0,
    )
    return (
        []
        if all(values)
        else [name for name, value in zip(names, values, strict=True) if not value]
    )


def _positional(context: ExecContext) -> list[Any]:
    """A fresh copy of the arguments for this attempt. Raises ValueError unless they are a JSON list."""
    arguments = exact_json.decode(context.args)
    if not isinstance(arguments, list):
        raise TypeError(f"args must be a JSON list, not {type(arguments).__name__}")
    return arguments


def _kind_of(context: ExecContext, error: BaseException, phase: int) -> ErrorKind:
    """The kind of a failure without a signal. Answers of main are known by identity, never by class or
    text, which user code can forge."""
    if phase == _LOADING and isinstance(error, FunctionCodeFetchError):
        return ErrorKind.CODE_FETCH_FAILED
    if phase == _BODY and error is context.remote_error:
        return context.remote_kind
    return _PHASE_KINDS[phase]
