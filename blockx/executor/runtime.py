"""ExecutorRuntime: the resident calls of one executor, and who of them runs next.

Main thread only. The hub is the greenlet that constructs the runtime; each started call runs in a
*lane*, a pooled greenlet that runs call after call (making a greenlet costs 11 us, entering a parked
one 0.7 us). The law of switching: ``step`` is the only place that enters a lane, ``bridge.wait`` and the
end of a call (``lane.py``) are the only ones that leave it, and nothing switches in a signal handler.

Invariants:
- One call runs at a time; its sequence number stands in the heartbeat row from before it is entered
  until after it is left, and is left standing if the process dies in it. Blame relies on that.
- A message for an old attempt, another request or a state that does not wait changes nothing and is
  counted.

≠ The specification unwinds all contexts when the connection is lost; here the process ends, since its
attempts are over for main and a new incarnation starts clean.
"""

import contextvars
import gc
import os
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Final

from greenlet import getcurrent, greenlet

from blockx.errors import ErrorKind
from blockx.executor import interrupts
from blockx.executor.ambient import Ambient
from blockx.executor.attempt import AttemptRunner
from blockx.executor.blocking import BLOCKED_NS, BlockWatch
from blockx.executor.bridge import SdkBridge
from blockx.executor.call_log import CallLog
from blockx.executor.capture import CallOutput, OutputCapture
from blockx.executor.context import (
    DONE,
    NS_PER_MS,
    NS_PER_US,
    RUNNING,
    WAITING_FUNCTION_CODE,
    WAITING_IO,
    WAITING_SUBCALL,
    Counts,
    ExecContext,
    ExecState,
    Wake,
)
from blockx.executor.interrupts import Alarm
from blockx.executor.lane import run_calls
from blockx.executor.late_code import LateCode
from blockx.executor.list_channel import ListChannel
from blockx.executor.loader import Loader
from blockx.executor.memory import ABI_CACHE_ENTRIES, AbiCaches, Garbage
from blockx.executor.queues import RunQueue
from blockx.executor.session import Channel
from blockx.executor.tasks import TASK_LINGER_NS, TaskModules
from blockx.executor.tracing import Tracer
from blockx.executor.vitals import Vitals, resident_bytes
from blockx.ipc import exact_json
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

TURN_NS: Final = 1_000_000
"""While calls are runnable, the socket is read and timers are looked at this often."""
LONG_STEP_NS: Final = 5_000_000
"""A function whose step once computed this long gets finished neighbours sent before it is entered."""
LONG_BLOCK_NS: Final = 50_000_000
"""The same for a step that took this much wall time, since it blocks. Ten times as much: on a busy machine
any step may be off the CPU for a while, and each send before a call costs 3 us."""
MEMORY_AGE_NS: Final = 10_000_000
"""Age of the memory size that is published with a step, at most; what fills memory faster is itself a long
step, after which it is measured anew. So "it grew during the step" means that step and no other."""
LONG_MEMORY_STEPS: Final = 64
"""After so many sends before steps of a function that all were short, it is no longer known as long: a
first call that loads a library, or a busy machine, must not cost each later call a send (5 us)."""
LONG_DIGESTS_MAX: Final = 4_096
"""Functions known as long. Full: the knowledge starts anew, at the cost of a few re-run neighbours."""
LANES_POOLED_MAX: Final = 256
"""Parked greenlets kept for the next calls. Full: the lane ends."""
UNLIMITED_CONTEXTS: Final = 1 << 30
"""``availableContexts`` of an executor without a limit (the specification)."""
_RESUMES: Final = {
    WaitKind.IO: WAITING_IO,
    WaitKind.SUBCALL: WAITING_SUBCALL,
    WaitKind.FUNCTION_CODE: WAITING_FUNCTION_CODE,
}
_STATE_WORDS: Final = slice(STATE_RUNNABLE, STATE_DONE + 1)

# Bound before user code can replace it.
_monotonic_ns = time.monotonic_ns


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
        memory_mark_bytes: int = 0,
        abi_cache_entries: int = ABI_CACHE_ENTRIES,
        call_log: CallLog | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.executor_id = executor_id
        self.incarnation_id = incarnation_id
        self.channel: Channel = session or ListChannel()
        self.hub = getcurrent()
        self.running: ExecContext | None = None
        """The call whose lane is switched in."""
        self.retire_reason = ""
        self.is_retiring = self.is_forked = False
        """``is_forked``: this is a child that user code forked; it speaks with nobody."""
        self.memory_bytes = 0
        """Last sample, at most MEMORY_AGE_NS old when a step begins."""
        self.tracer = tracer
        """None: no attempt has a span."""
        self._alarm = Alarm(self)
        self.late_code = LateCode(self, self._alarm, row)
        self.bridge = SdkBridge(self)
        self.counters = {"stale_executes": 0, "stale_resumes": 0, "stale_cancels": 0, "finished": 0}
        self._attempts = AttemptRunner(self, loader, self._discard)
        self._tasks = TaskModules(loader, task_linger_ns)
        self._queue = RunQueue()
        self._row = row
        self._max_inflight = executor_max_inflight
        interrupts.install_sleep(self.bridge.sleep_in_call)
        self._capture = capture(self.current_output) if capture is not None else None
        self._contexts: dict[str, ExecContext] = {}
        self._roots = 0
        self._request_seq = 0
        self._lanes: list[greenlet] = []
        self._clean_context = contextvars.Context()
        self._clean_context.run(set_provider, self.bridge)
        self._long_digests: dict[str, int] = {}
        """Function -> sends before its steps until it is forgotten."""
        self._vitals = Vitals()
        self._call_log = call_log
        self._block_watch = BlockWatch(call_log.blocked) if call_log is not None else None
        self._memory_due_ns = 0
        self._garbage = Garbage(memory_mark_bytes)
        self._abi_caches = AbiCaches(abi_cache_entries)
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
        # Last: from here on a collection may run user code under the alarm, which asks this object.
        self.late_code.install()
        self._ambient = Ambient()

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
            self._attempts.refuse(message.call_id, message.payload.attempt_seq, *refusal)
            return
        context = ExecContext(message, self._counts, _monotonic_ns())
        if self.tracer is not None and message.trace is not None:
            context.span = self.tracer.begin(message.trace, context)
            if context.span is not None:
                context.span.event("receive ExecuteCall", "", context.arrived_ns)
        self._contexts[context.call_id] = context
        self._roots += not context.parent_call_id
        self._tasks.call_started(context.task_id)
        self._queue.push(context)

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
        if context.span is not None:
            context.span.event("receive ResumeCall", context.request_id, _monotonic_ns())
        context.wake = Wake(
            payload.result,
            sidecar,
            payload.error,
            payload.io_us * NS_PER_US,
            int(payload.budget_used_ms * NS_PER_MS),
        )
        self._queue.push(context)

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
            self._queue.push(context)

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

    def _replace(self, old: ExecContext) -> None:
        """A newer attempt has come: the old one unwinds without a terminal message."""
        old.stale = True
        self._leave(old)
        self._cancel(old, "replaced by a newer attempt")

    def _cancel(self, context: ExecContext, reason: str) -> None:
        if context.cancel_reason is None:
            context.cancel_reason = reason
        if not context.queued:
            self._queue.push_front(context)

    # ---- the scheduler -------------------------------------------------------------------------

    def run_until_idle(self) -> None:
        """Run until every resident call waits. Reads the socket at least every TURN_NS.

        Raises PeerProtocolError if main sends what it may not.
        """
        now_ns = self._turn()
        while (context := self._queue.pop()) is not None:
            self.step(context)
            if self._last_active_ns - now_ns >= TURN_NS:
                now_ns = self._turn()
        self._publish(self._last_active_ns)
        self.channel.flush()

    def next_scheduler_delay(self, default: float | None = None) -> float | None:
        """Seconds until something is due by time; ``default`` if nothing is. 0: calls are runnable."""
        if self._queue:
            return 0.0
        beat_ns = self._heartbeat_due_ns if self._heartbeat_interval_ns else None
        due_ns = [
            moment_ns
            for moment_ns in (self._queue.next_due_ns(), self._tasks.next_due_ns(), beat_ns)
            if moment_ns is not None
        ]
        return max(0, min(due_ns) - _monotonic_ns()) / 1e9 if due_ns else default

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
        self._tasks.release_all()
        self._alarm.uninstall()
        self.late_code.close()
        self._ambient.close()
        interrupts.uninstall_sleep()

    def step(self, context: ExecContext) -> None:
        """Run one call until it waits or ends. The only place that enters a lane."""
        lane = context.greenlet
        switch_in: ExecContext | Wake | None = context
        if lane is not None:
            switch_in, context.wake = context.wake, None
        elif context.cancel_reason is not None:
            self._attempts.end_cancelled(context)
            return
        else:
            lane = context.greenlet = self._clean_lane()
        if self.channel.terminal_frames and context.digest in self._long_digests:
            self._flush_before_long(context.digest)
        context.queued = False
        if context.state is not RUNNING:
            context.move(RUNNING)
        start_ns = _monotonic_ns()
        self.running = context
        self._announce(context, start_ns)
        self._alarm.enter(context.begin_step(start_ns))
        lane.switch(switch_in)
        if self._ambient.restore():  # while the row names the call: it may run code of that call
            self._alarm.distrust()
        self.running = None
        end_ns = _monotonic_ns()
        if context.state is DONE:
            self._park_lane(lane)
        else:
            self._attempts.charge_step(context, end_ns)
            if context.state is RUNNING:
                self._on_stray_switch(context, lane)
        if self._attempts.step_cpu_ns >= LONG_STEP_NS or end_ns - start_ns >= LONG_BLOCK_NS:
            self._after_long_step(context, start_ns, end_ns)
        self._last_active_ns = end_ns
        if self._row is not None:
            self._row.clear_running()
        self.channel.flush_if_due(end_ns)

    def plan_wake(self, context: ExecContext, due_ns: int) -> None:
        """For the bridge: the running call parks now and is queued again when it is due.

        0 is a yield: it goes to the end of the runnable calls, so that all of them get their turn.
        """
        if due_ns:
            self._queue.sleep(context, due_ns)
        else:
            self.wake(context, Wake())

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
        return self.is_retiring and not self._contexts and not self._queue

    def drain_outbox(self) -> list[ExecutorMessage]:
        """What would have been sent, when there is no session."""
        assert isinstance(self.channel, ListChannel), "there is a session"
        sent, self.channel.sent = self.channel.sent, []
        self.channel.sidecars.clear()
        return sent

    def _turn(self) -> int:
        """Between steps: read the socket, wake sleepers, see to what is due. Returns the time."""
        for message, sidecar in self.channel.receive():
            self._handlers[type(message)](message, sidecar)
        now_ns = _monotonic_ns()
        self._queue.wake_due(now_ns)
        if self._heartbeat_interval_ns and now_ns >= self._heartbeat_due_ns:
            self.send_heartbeat(now_ns)
        if self._tasks.is_due(now_ns):
            self.late_code.run(partial(self._release_tasks, now_ns))
        self._ambient.restore_fully()
        self._alarm.distrust()
        self._abi_caches.trim_if_due(now_ns)
        if self._garbage.is_due(self.memory_bytes, now_ns):
            self.late_code.run(self._collect_garbage)
        self._publish(now_ns)
        self._attempts.turn_began()
        return now_ns

    def _release_tasks(self, now_ns: int) -> None:
        self._tasks.release_due(now_ns)
        if not self._contexts:
            gc.collect()  # what user modules leave is mostly cycles; nobody waits just now

    def _collect_garbage(self) -> None:
        self._tasks.release_all()
        self.memory_bytes = self._garbage.collect()

    def forget_variables(self, context: ExecContext) -> None:
        """For the end of a call: its lane has the context variables of the next one."""
        assert context.greenlet is not None
        context.greenlet.gr_context = self._clean_context.copy()

    def _clean_lane(self) -> greenlet:
        """A lane for a new call: an empty context but for the provider, settings as they were."""
        if self._lanes:
            lane = self._lanes.pop()
        else:
            lane = greenlet(partial(run_calls, self._run, self.hub), self.hub)
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
            self._attempts.end_lost(context)
        else:
            self._queue.push(context)

    def _flush_before_long(self, digest: str) -> None:
        """If the call has to be killed in C code, finished neighbours must not run again."""
        self.channel.flush()
        left = self._long_digests[digest] = self._long_digests[digest] - 1
        if not left:
            del self._long_digests[digest]

    def _after_long_step(self, context: ExecContext, start_ns: int, end_ns: int) -> None:
        if len(self._long_digests) >= LONG_DIGESTS_MAX:
            self._long_digests.clear()
        self._long_digests[context.digest] = LONG_MEMORY_STEPS
        self._memory_due_ns = 0
        if self._block_watch is not None and end_ns - start_ns >= BLOCKED_NS:
            self._block_watch.step_ended(
                context, start_ns, end_ns - start_ns, self._attempts.step_cpu_ns
            )

    # ---- one call, in its lane -----------------------------------------------------------------

    def _run(self, context: ExecContext) -> None:
        """One attempt from its first statement to its terminal message."""
        self._attempts.run(context)
        if self.is_forked:
            os._exit(0)

    def _leave(self, context: ExecContext) -> None:
        """The attempt is resident no more."""
        del self._contexts[context.call_id]
        self._roots -= not context.parent_call_id

    def _discard(self, context: ExecContext) -> None:
        """The attempt is over."""
        context.move(DONE)
        self._counts[DONE] = 0  # counted are resident attempts
        if not context.stale:
            self._leave(context)
        self.counters["finished"] += 1
        if self._call_log is not None and context.output is not None:
            self._call_log.call_ended(context)
        self._tasks.call_ended(context.task_id, self._last_active_ns)

    # ---- what main sees ------------------------------------------------------------------------

    def current_output(self) -> CallOutput | None:
        """Where text that is printed now belongs."""
        context = self.running
        if context is None or getcurrent() is not context.greenlet:
            return None
        if context.output is None:
            context.output = CallOutput(debug=context.debug)
        return context.output if isinstance(context.output, CallOutput) else None

    def tick(self, context: ExecContext, now_ns: int, frame: FrameType | None) -> None:
        """The alarm, while user code of ``context`` computes: what cannot wait for the scheduler."""
        if self.is_forked:
            return
        self.late_code.tick(context, now_ns, frame)
        row = self._row
        if row is not None:
            if row.cancel_requested() and row.is_cancelled(context.call_seq, context.attempt_seq):
                context.cancel_reason = context.cancel_reason or ErrorKind.CANCELLED
        elif self._heartbeat_interval_ns and now_ns >= self._heartbeat_due_ns:
            self.send_heartbeat(now_ns)
        if self.channel.frames:
            self.channel.flush()
        if self._block_watch is not None:
            self._block_watch.tick(context, now_ns, frame)

    def retire(self, why: str) -> None:
        """Take no new root calls; the process ends when the resident ones have. Idempotent."""
        self.retire_reason = why
        self.is_retiring = True
        if self._row is not None:
            self._row.scheduler[ATTACHED] = (
                0  # the sign in the table; published with the next write
            )

    def close_tracer(self) -> None:
        """The process ends: export what spans there are, for half a second at most."""
        if self.tracer is not None:
            self.tracer.close()

    def become_forked_child(self) -> None:
        """User code forked: this copy of the process has no main, no row and no other calls."""
        self.is_forked = True
        self.tracer = None  # its thread is not here, and may have held its lock
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
            runnable_count=len(self._queue),
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
        draft[RUNNABLE] = len(self._queue)
        draft[INFLIGHT] = len(self._contexts)
        draft[AVAILABLE_CONTEXTS] = self._available_contexts()
        draft[LAST_ACTIVE_NS] = now_ns
        draft[RUNNING_CALL_SEQ] = 0
        draft[STALE_RESUMES] = counters["stale_resumes"]
        draft[STALE_CANCELS] = counters["stale_cancels"]
        draft[FINISHED_CALLS] = counters["finished"]
        row.write_scheduler()

    def _announce(self, context: ExecContext, now_ns: int) -> None:
        """Write who is entered now: what blame relies on. Counters follow at the end of the turn."""
        row = self._row
        if row is None:
            return
        if now_ns >= self._memory_due_ns:
            self._memory_due_ns = now_ns + MEMORY_AGE_NS
            self.memory_bytes = resident_bytes() or self.memory_bytes
        draft = row.scheduler
        draft[RUNNABLE] = len(self._queue)
        draft[LAST_ACTIVE_NS] = now_ns
        draft[RUNNING_CALL_SEQ] = context.call_seq
        draft[RUNNING_SINCE_NS] = now_ns
        draft[RUNNING_ATTEMPT_SEQ] = context.attempt_seq
        draft[RSS_AT_STEP_START] = self.memory_bytes
        row.write_scheduler()


def _missing_fields(message: ExecuteCall) -> list[str]:
    """Wire names of the ids that an ExecuteCall lacks."""
    payload = message.payload
    values = (
        message.call_id,
        payload.task_id,
        payload.function_id,
        payload.function_code_digest,
        payload.entry_selector,
        payload.attempt_seq > 0,
    )
    if all(values):
        return []
    names = ("callId", "taskId", "functionId", "functionCodeDigest", "entrySelector", "attemptSeq")
    return [name for name, value in zip(names, values, strict=True) if not value]
