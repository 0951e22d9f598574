"""A simulated executor process: real frames over a memory socket, functions from the program, faults.

It computes one call at a time, for a drawn time, and holds any number of parked ones, as the real one
does. What it may not see is asserted here: an attempt started twice, two attempts of one call at once, a
sub-call without its parent, an answer to a question that it did not ask while it lived.

Faults are drawn by the world (``World.fault``); a process is *deaf* to cancelling while it is in a C call,
*mute* when nothing of it moves any more, and *paused* while it does not read its socket.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blockx.errors import ErrorKind
from blockx.ipc.frames import FrameDecoder, encode_frame
from blockx.ipc.heartbeat import SCHEDULER_WORDS, BeatSample, SchedulerSample, incarnation_number
from blockx.ipc.messages import (
    CallCompleted,
    CallCompletedPayload,
    CallFailed,
    CallFailedPayload,
    CallWaiting,
    CallWaitingPayload,
    CancelCall,
    ExecuteCall,
    Heartbeat,
    HeartbeatPayload,
    Message,
    Raw,
    ResumeCall,
    WaitKind,
    decode_main_message,
)
from tests.sim.program import Program, Step, digest_of, function_of, level_of
from tests.sim.sockets import MemorySocket

if TYPE_CHECKING:
    from tests.sim.world import World

HEARTBEAT_MS = 1_000
CONTROL_MS = 100
"""How long a computing call takes to see the control word."""


@dataclass(eq=False)
class Context:
    """One attempt that is resident."""

    order: ExecuteCall
    level: int
    arg: int
    steps: deque[Step]
    request_id: str = ""
    needs_source: bool = False
    has_started: bool = False
    failed: ErrorKind | None = None
    is_cancelled: bool = False
    cost_us: int = 0


@dataclass(eq=False)
class Process:
    """One incarnation; see the module's law."""

    world: "World"
    executor_id: str
    slot_index: int
    pid: int
    has_table: bool
    inflight_max: int
    contexts: dict[str, Context] = field(default_factory=dict)
    runnable: deque[Context] = field(default_factory=deque)
    computing: Context | None = None
    is_deaf: bool = False
    is_wedged: bool = False
    is_mute: bool = False
    is_retiring: bool = False
    paused_until_ms: int = 0
    is_alive: bool = True
    exit_code: int = 0
    socket: MemorySocket | None = None
    version: int = 0
    active_ms: int = 0
    last_frame: bytes = b""
    digests: set[str] = field(default_factory=set)
    _decoder: FrameDecoder = field(default_factory=FrameDecoder)
    _compute_seq: int = 0
    _is_due: bool = False

    @property
    def incarnation_id(self) -> str:
        return f"p{self.pid}"

    @property
    def program(self) -> Program:
        return self.world.program

    # Life ---------------------------------------------------------------------------------------

    def connect(self) -> None:
        if not self.is_alive:
            return
        self.socket = self.world.connect(self.executor_id, self.pid)
        self.socket.on_data = self.wake
        self._decoder = FrameDecoder()
        self._beat()

    def die(self, exit_code: int) -> None:
        """Its process ends; whatever it had not sent is gone, and its socket hangs up."""
        if self.is_alive:
            self.is_alive = False
            self.exit_code = exit_code
            if self.socket is not None:
                self.socket.hang_up()
            self.world.pool.process_ended(self)

    def row(self) -> SchedulerSample:
        """What stands in its page of the heartbeat table."""
        words = [0] * SCHEDULER_WORDS
        sample = SchedulerSample(*words)
        computing = self.computing
        roots = sum(not c.order.payload.parent_call_id for c in self.contexts.values())
        available = 0 if self.is_retiring else max(0, self.inflight_max - roots)
        return sample._replace(
            version=self.version,
            incarnation=incarnation_number(self.incarnation_id),
            pid=self.pid,
            attached=1,
            runnable=len(self.runnable) + (computing is not None),
            inflight=len(self.contexts),
            available_contexts=available,
            last_active_ns=self.active_ms * 1_000_000,
            running_call_seq=0 if computing is None else computing.order.payload.call_seq,
        )

    def beat_row(self) -> BeatSample:
        moment_ms = self.active_ms if self.is_mute else self.world.now_ms
        return BeatSample(self.version, moment_ms * 1_000_000, 1 << 20, 0, 0)

    def _beat(self) -> None:
        row = self.row()
        payload = HeartbeatPayload(
            executor_process_instance_id=self.incarnation_id,
            pid=self.pid,
            has_table=self.has_table,
            runnable_count=row.runnable,
            inflight_count=row.inflight,
            available_contexts=row.available_contexts,
            memory_bytes=1 << 20,
            scheduler_idle_ms=self.world.now_ms - self.active_ms if self.active_ms else 0,
            running_call_seq=row.running_call_seq,
        )
        self._say(Heartbeat(executor_id=self.executor_id, payload=payload))
        if not self.has_table:
            self.world.after(HEARTBEAT_MS, self._beat_again)

    def _beat_again(self) -> None:
        if self.is_alive and not self.is_mute:
            self._beat()

    # The scheduler ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something may have arrived: look at it a little later."""
        if not self._is_due:
            self._is_due = True
            self.world.after(self.world.hop_ms(), self._turn)

    def _turn(self) -> None:
        self._is_due = False
        world, sock = self.world, self.socket
        if not self.is_alive or self.is_mute or sock is None:
            return
        if sock.is_closed:
            self.die(0)
            return
        if world.now_ms < self.paused_until_ms:
            self._is_due = True
            world.after(self.paused_until_ms - world.now_ms, self._turn)
            return
        self.version += 2
        if self.computing is None:
            # Like the real one it reads between steps only (but for the control word).
            for frame in self._decoder.feed(sock.heard()):
                self._on_message(decode_main_message(frame.body), frame.sidecar)
            self.active_ms = world.now_ms
            self._compute_next()
        if self.is_retiring and not self.contexts:
            self.die(0)

    def _compute_next(self) -> None:
        while self.runnable and self.computing is None:
            context = self.runnable.popleft()
            if self.contexts.get(context.order.call_id) is not context:
                continue
            self.world.fault_in(self)
            if not self.is_alive or self.is_mute:
                return
            self._compute(context)

    def _compute(self, context: Context) -> None:
        world = self.world
        self.computing = context
        self._compute_seq += 1
        seq = self._compute_seq
        payload = context.order.payload
        if not context.has_started and not context.needs_source:
            context.has_started = True
            world.body_started(context.order)
        if self.is_wedged or world.fault("wedge"):
            self.is_wedged = True
            self.is_deaf = world.rng.random() < 0.5
            return
        took_ms = world.step_ms()
        context.cost_us += took_ms * 1_000
        assert payload.call_seq > 0
        world.after(took_ms, lambda: self._computed(context, seq))

    def _computed(self, context: Context, seq: int) -> None:
        if not self.is_alive or self.is_mute or seq != self._compute_seq:
            return
        self.computing = None
        self.is_wedged = False
        if context.is_cancelled:
            self._fail(context, ErrorKind.CANCELLED)
        elif context.needs_source:
            self._ask(context, WaitKind.FUNCTION_CODE, None)
        elif context.failed is not None:
            self._fail(context, context.failed)
        elif context.steps:
            step = context.steps.popleft()
            self._ask(context, WaitKind.IO if step.level < 0 else WaitKind.SUBCALL, step)
        else:
            failure = self.program.failure(context.level, context.arg)
            if failure is None:
                self._complete(context)
            else:
                self._fail(context, failure)
        self.wake()

    def control_word(self, call_seq: int, attempt_seq: int) -> None:
        """Main has asked for the end of the call that computes."""
        context = self.computing
        if context is None or self.is_deaf or self.is_mute or context.is_cancelled:
            return
        payload = context.order.payload
        if (payload.call_seq, payload.attempt_seq) == (call_seq, attempt_seq):
            context.is_cancelled = True
            self._compute_seq += 1
            seq = self._compute_seq
            self.world.after(CONTROL_MS, lambda: self._computed(context, seq))

    # Frames in ----------------------------------------------------------------------------------

    def _on_message(self, message: Message, sidecar: bytes | None) -> None:
        if isinstance(message, ExecuteCall):
            self._on_execute(message)
        elif isinstance(message, ResumeCall):
            self._on_resume(message, sidecar)
        elif isinstance(message, CancelCall):
            self._on_cancel(message)

    def _on_execute(self, order: ExecuteCall) -> None:
        payload, call_id = order.payload, order.call_id
        world = self.world
        assert call_id not in self.contexts, f"{call_id} is resident already"
        world.attempt_arrived(self, order)
        roots = sum(not c.order.payload.parent_call_id for c in self.contexts.values())
        level, arg = level_of(payload.function_id), int(bytes(payload.args)[1:-1])
        context = Context(order, level, arg, deque(self.program.steps(level, arg)))
        parent = self.contexts.get(payload.parent_call_id)
        if payload.parent_call_id and parent is None:
            self._refuse(context, ErrorKind.SUBCALL_PARENT_NOT_RESIDENT)
            return
        if not payload.parent_call_id and (self.is_retiring or roots >= self.inflight_max):
            self._refuse(context, ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED)
            return
        if world.fault("refuse"):
            free = (ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED, ErrorKind.RESUME_SEND_FAILED)
            self._refuse(context, world.rng.choice((*free, ErrorKind.CODE_FETCH_FAILED)))
            return
        context.needs_source = payload.function_code_digest not in self.digests
        self.contexts[call_id] = context
        self.runnable.append(context)

    def _on_resume(self, answer: ResumeCall, sidecar: bytes | None) -> None:
        context = self.contexts.get(answer.call_id)
        payload = answer.payload
        if context is None or context.order.payload.attempt_seq != payload.attempt_seq:
            self.world.count("late resumes")
            return
        if context.request_id != answer.request_id:
            assert "say_twice" in self.world.rates, "an answer to another question"
            self.world.count("late resumes")  # it repeated an old question, and got its answer
            return
        context.request_id = ""
        if payload.resume_kind is WaitKind.FUNCTION_CODE:
            assert sidecar is not None, "a function without source"
            context.needs_source = False
            self.digests.add(context.order.payload.function_code_digest)
        elif payload.error is not None:
            kind = ErrorKind(payload.error.kind)
            io_kinds = (ErrorKind.IO_ERROR, ErrorKind.UNAVAILABLE)
            context.failed = kind if kind in io_kinds else ErrorKind.SUBCALL_FAILED
        self.runnable.append(context)

    def _on_cancel(self, order: CancelCall) -> None:
        context = self.contexts.get(order.call_id)
        if context is None or context.order.payload.attempt_seq != order.payload.attempt_seq:
            self.world.count("late cancels")
            return
        if self.world.fault("lose_cancel"):
            return
        self._fail(context, ErrorKind.CANCELLED)

    # Frames out ---------------------------------------------------------------------------------

    def _ask(self, context: Context, kind: WaitKind, step: Step | None) -> None:
        world, payload = self.world, context.order.payload
        request_id = context.request_id = f"req-{self.incarnation_id}-{world.next_number()}"
        fields = CallWaitingPayload(
            wait_kind=kind, task_id=payload.task_id, attempt_seq=payload.attempt_seq
        )
        if step is None:
            fields.function_code_digest = payload.function_code_digest
        elif kind is WaitKind.IO:
            fields.backend, fields.params = "node", Raw(b"[%d]" % step.arg)
        else:
            fields.function_id = function_of(step.level).function_id
            fields.args = Raw(b"[%d]" % step.arg)
            fields.granted_budget_ms = 1_000.0
        self._say(
            CallWaiting(
                executor_id=self.executor_id,
                call_id=context.order.call_id,
                request_id=request_id,
                payload=fields,
            )
        )
        if world.fault("impatient"):
            world.after(world.hop_ms(), lambda: self._give_up_waiting(context, request_id))

    def _give_up_waiting(self, context: Context, request_id: str) -> None:
        """Its budget is used up while it waits."""
        resident = self.contexts.get(context.order.call_id) is context
        if self.is_alive and not self.is_mute and resident and context.request_id == request_id:
            self._fail(context, ErrorKind.DEADLINE_EXCEEDED)
            self.wake()

    def _complete(self, context: Context) -> None:
        del self.contexts[context.order.call_id]
        payload = CallCompletedPayload(
            attempt_seq=context.order.payload.attempt_seq,
            body_started=True,
            cpu_us=context.cost_us,
            output=Raw(self.program.output(context.level, context.arg)),
        )
        self._say(
            CallCompleted(
                executor_id=self.executor_id, call_id=context.order.call_id, payload=payload
            )
        )

    def _fail(self, context: Context, kind: ErrorKind) -> None:
        del self.contexts[context.order.call_id]
        self._refuse(context, kind)

    def _refuse(self, context: Context, kind: ErrorKind) -> None:
        payload = CallFailedPayload(
            attempt_seq=context.order.payload.attempt_seq,
            body_started=context.has_started,
            cpu_us=context.cost_us,
            error_kind=kind.value,
            error_message=f"Drawn: {kind}",
        )
        self._say(
            CallFailed(executor_id=self.executor_id, call_id=context.order.call_id, payload=payload)
        )

    def _say(self, message: Message) -> None:
        frame = encode_frame(message)
        sock, world = self.socket, self.world
        assert sock is not None
        is_call = not isinstance(message, Heartbeat)
        if is_call and world.fault("lose_frame"):
            # A stream loses nothing in its middle: what is lost is lost with the connection.
            world.after(world.hop_ms() * 3, sock.hang_up)
            self.is_mute = True
            world.after(world.hop_ms() * 4, lambda: self.die(-11))
            return
        sock.say(frame)
        if is_call and world.fault("say_twice"):
            sock.say(frame if world.rng.random() < 0.5 else self.last_frame or frame)
        if is_call:
            self.last_frame = frame


FaultAction = Callable[[Process], None]


def _die(process: Process) -> None:
    if process.socket is not None and process.world.rng.random() < 0.3:
        process.socket.say(b"\x00\x00\x01")  # half a frame
    process.die(process.world.rng.choice((1, 0, -9, -9, -11)))


def _babble(process: Process) -> None:
    assert process.socket is not None
    process.socket.say(
        process.world.rng.choice((b"\xff" * 8, b"\x00\x00\x00\x02{}", b"GET / HTTP"))
    )


def _mute(process: Process) -> None:
    process.is_mute = True


def _pause(process: Process) -> None:
    process.paused_until_ms = process.world.now_ms + process.world.rng.randrange(1, 800)


def _reconnect(process: Process) -> None:
    """It drops its connection and opens another one, as if nothing had been."""
    assert process.socket is not None
    process.socket.hang_up()
    process.connect()


def _retire(process: Process) -> None:
    process.is_retiring = True


ACTIONS: dict[str, FaultAction] = {
    "die": _die,
    "babble": _babble,
    "mute": _mute,
    "pause": _pause,
    "reconnect": _reconnect,
    "retire": _retire,
}
"""Faults of a process as a whole, drawn before each step of a call."""

__all__ = ["ACTIONS", "Context", "Process", "digest_of"]
