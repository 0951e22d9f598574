"""The orchestrator: inbox items and adapter facts to the core, commands to effects, the flush epilogue.

Actor thread only; the one importer of ``dispatcher.core``. Every turn ends with the epilogue:
dispatch -> flush (convergence) -> sockets -> jobs -> io, repeated until quiet.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from blockx.actor.effects import CallPlaces, Effects, JobPort, OpenTask
from blockx.actor.memory_guard import TICK_MS as MEMORY_TICK_MS
from blockx.actor.memory_guard import MemoryGuard
from blockx.actor.reactor import Reactor, monotonic_ms
from blockx.actor.watchdog import Watchdog
from blockx.dispatcher.commands import Command, FinishTask
from blockx.dispatcher.core import DispatcherCore
from blockx.dispatcher.events import (
    Event,
    ExecutorLost,
    SnapshotUpdated,
    StreamOpened,
    SubcallRequested,
)
from blockx.dispatcher.model import CallError, ExecutorSnapshot, FunctionRef
from blockx.errors import ErrorKind
from blockx.functions.view import FunctionView
from blockx.ipc.exact_json import InvalidJsonError, canonical, positional
from blockx.ipc.messages import CallWaiting, Raw, ResumeCallPayload, WaitKind, WireError

SNAPSHOT_INTERVAL_MS = 5
"""How old the core's view of executors may get while calls are moving; it compensates in between."""
TICK_MS = 500
"""The watchdog's interval (spec: the 500 ms tick)."""


class Tick:
    """The watchdog's timer fired."""


class DispatchOn:
    """Posted to ourselves: the last turn left calls that can be admitted."""


class MemoryTick:
    """The memory guard's timer fired."""


@dataclass(slots=True)
class ExecutorSpawned:
    """The supervisor started a process for a slot."""

    executor_id: str
    pid: int


@dataclass(slots=True)
class ExecutorExited:
    """The supervisor reaped a slot's process; ``last`` is its heartbeat row at death."""

    executor_id: str
    pid: int
    exit_code: int | None
    last: Any
    out_of_memory: bool = False
    """The kernel ended it at the limit of its control group."""


class IoAnswer(Protocol):
    """A reply of the io side, as far as it is needed here."""

    request: Any
    result: bytes | None
    sidecar: bytes | None
    error: WireError | None
    io_us: int
    queue_us: int


@dataclass(slots=True)
class IoAnswered:
    """Replies of the io thread, a group for one turn of its loop."""

    replies: Sequence[IoAnswer]


class ExecutorAdapter(CallPlaces, Protocol):
    """What the orchestrator needs of ``transport.adapter``, beside its effects."""

    @property
    def has_unsent(self) -> bool:
        """Whether ``flush`` has something to do."""

    def flush(self) -> None:
        """Write what this turn queued."""

    def replace_drained(self) -> None:
        """Have retired executors replaced that are empty."""

    def snapshots(self) -> Sequence[ExecutorSnapshot]:
        """How each executor looks now."""

    def set_listener(self, listener: Any, /) -> None:
        """Facts go there."""

    def executor_spawned(self, executor_id: str, pid: int) -> None:
        """A process of the pool lives."""

    def executor_exited(
        self,
        executor_id: str,
        pid: int,
        exit_code: int | None,
        last: Any,
        out_of_memory: bool = False,
        /,
    ) -> None:
        """It has been reaped."""

    def resume_io(
        self,
        executor_id: str,
        call_id: str,
        request_id: str,
        payload: ResumeCallPayload,
        sidecar: bytes | None,
    ) -> None:
        """Answer a read or a write."""


class IoPort(Protocol):
    """The io side; thread-safe, never blocks."""

    def submit_waiting(self, waiting: Sequence[tuple[str, CallWaiting, bytes | None]]) -> None:
        """Requests of parked calls: executor id, its frame, its sidecar."""

    def cancel(self, call_ids: Sequence[str]) -> None:
        """Start nothing more for these."""

    def task_ended(self, task_id: str) -> None:
        """Release what the task pinned and cached."""


@dataclass(slots=True)
class _TaskEntry:
    """What the orchestrator keeps of a task: pinned functions and the way to its job."""

    view: FunctionView
    port: JobPort
    functions: dict[str, tuple[FunctionRef | None, CallError | None]]


class Orchestrator:
    """See the module's law."""

    def __init__(
        self,
        *,
        reactor: Reactor,
        core: DispatcherCore,
        adapter: ExecutorAdapter,
        io: IoPort,
        watchdog: Watchdog,
        memory_guard: MemoryGuard,
        now_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        """``now_ms``: the reactor's own clock."""
        self._now_ms = now_ms
        self._reactor = reactor
        self._core = core
        self._adapter = adapter
        self._io = io
        self._watchdog = watchdog
        self._memory_guard = memory_guard
        self._effects = Effects(adapter, reactor)
        self._performers = self._effects.performers
        self._tasks: dict[str, _TaskEntry] = {}
        self._io_waiting: list[tuple[str, CallWaiting, bytes | None]] = []
        self._io_cancelled: list[str] = []
        self._snapshot_ms = 0
        self._items: dict[type, Callable[[Any], None]] = {
            OpenTask: self._open_task,
            ExecutorSpawned: lambda i: adapter.executor_spawned(i.executor_id, i.pid),
            ExecutorExited: lambda i: adapter.executor_exited(
                i.executor_id, i.pid, i.exit_code, i.last, i.out_of_memory
            ),
            IoAnswered: self._on_io_answered,
            Tick: self._on_tick,
            DispatchOn: lambda _item: None,  # the turn's epilogue does it
            MemoryTick: self._on_memory_tick,
        }
        self.gauges: dict[str, tuple[int, int, int]] = {}
        """Ready, running and waiting calls by task; replaced as a whole, readable from any thread."""
        adapter.set_listener(self)

    def run(self) -> None:
        """The actor thread's body."""
        self._reactor.call_later(TICK_MS, Tick())
        self._reactor.call_later(MEMORY_TICK_MS, MemoryTick())
        self._reactor.run(self._on_item, self._epilogue)

    # ---- facts in ------------------------------------------------------------------------------

    def _on_item(self, item: Any) -> None:
        handler = self._items.get(type(item))
        if handler is None:
            self.handle(item)
        else:
            handler(item)

    def _open_task(self, item: OpenTask) -> None:
        self._tasks[item.task.task_id] = _TaskEntry(item.view, item.port, {})
        self.handle(StreamOpened(item.task, self._now_ms()))

    def _on_tick(self, _tick: Tick) -> None:
        self._reactor.call_later(TICK_MS, Tick())
        self._watchdog.tick()
        self._refresh_snapshots(self._now_ms())
        self._perform(self._core.tick(self._now_ms()))
        self.gauges = {task_id: self._core.gauges(task_id) for task_id in self._tasks}

    def _on_memory_tick(self, _tick: MemoryTick) -> None:
        self._reactor.call_later(MEMORY_TICK_MS, MemoryTick())
        self._memory_guard.tick()
        self._adapter.replace_drained()

    def handle(self, event: Event) -> None:
        """Apply an event to the core and perform what it orders."""
        if type(event) is ExecutorLost:
            # First the truth about the executors, then the failures: or calls would go back to it.
            self._refresh_snapshots(self._now_ms())
        self._perform(self._core.handle(event))

    def _perform(self, commands: Iterable[Command]) -> None:
        """Perform commands in order; a fact that one establishes is handled before the next."""
        performers, handle = self._performers, self._core.handle
        for command in commands:
            event = performers[type(command)](command)
            # Mostly a chain: a bind order, its fact, the start order.
            while event is not None:
                more = handle(event)
                if len(more) != 1:
                    self._perform_all(more)
                    break
                event = performers[type(more[0])](more[0])

    def _perform_all(self, commands: Sequence[Command]) -> None:
        """The same for what branches; without recursion, since nothing bounds its depth."""
        performers, handle = self._performers, self._core.handle
        todo = deque(commands)
        while todo:
            command = todo.popleft()
            event = performers[type(command)](command)
            if event is not None:
                todo.extendleft(reversed(handle(event)))

    def request_io(self, executor_id: str, message: CallWaiting, sidecar: bytes | None) -> None:
        """AdapterListener: a call waits for a read or a write."""
        self._io_waiting.append((executor_id, message, sidecar))

    def attempt_ended(self, call_id: str) -> None:
        """AdapterListener: nothing more must be started for it."""
        self._io_cancelled.append(call_id)

    def source_of(self, task_id: str, digest: str) -> str | None:
        """AdapterListener: pinned source, for ``function_code``."""
        task = self._tasks.get(task_id)
        return None if task is None else task.view.source(digest)

    def request_subcall(self, executor_id: str, message: CallWaiting) -> None:
        """AdapterListener: a call waits for another function; the core decides."""
        payload = message.payload
        function, error = self._resolve(payload.task_id, payload.function_id)
        args = positional(bytes(payload.args))
        try:
            key = args if function is None else function.digest.encode() + canonical(args)
        except InvalidJsonError as invalid:
            function, key = None, args
            error = CallError(ErrorKind.INVALID_CALL, f"arguments: {invalid}")
        self.handle(
            SubcallRequested(
                parent_call_id=message.call_id,
                attempt_seq=payload.attempt_seq,
                request_id=message.request_id,
                executor_id=executor_id,
                function_id=payload.function_id,
                function=function,
                load_error=error,
                args=args,
                key=key,
                granted_budget_ms=payload.granted_budget_ms,
                now_ms=self._now_ms(),
            )
        )

    def _resolve(
        self, task_id: str, function_id: str
    ) -> tuple[FunctionRef | None, CallError | None]:
        """The function as the task pinned it, or why it cannot be called."""
        task = self._tasks.get(task_id)
        if task is None:
            return None, CallError(ErrorKind.FUNCTION_NOT_FOUND, f"no task {task_id}")
        known = task.functions.get(function_id)
        if known is None:
            known = task.functions[function_id] = _resolve_in(task.view, function_id)
            pinned = task.view.get(function_id)
            # Before anything that comes of it: the job notes what its results depend on.
            task.port.reached(function_id, "" if pinned is None else pinned.digest)
        return known

    def _on_io_answered(self, item: IoAnswered) -> None:
        for reply in item.replies:
            request = reply.request
            payload = ResumeCallPayload(
                resume_kind=WaitKind.IO,
                attempt_seq=request.attempt_seq,
                error=reply.error,
                io_us=reply.io_us,
                queue_us=reply.queue_us,
            )
            if reply.result is not None:
                payload.result = Raw(reply.result)
            self._adapter.resume_io(
                request.executor_id, request.call_id, request.request_id, payload, reply.sidecar
            )

    def _refresh_snapshots(self, now_ms: int) -> None:
        self._snapshot_ms = now_ms
        self._perform(self._core.handle(SnapshotUpdated(self._adapter.snapshots(), now_ms)))

    # ---- the end of a turn ---------------------------------------------------------------------

    def _epilogue(self) -> None:
        now_ms = self._now_ms()
        if now_ms - self._snapshot_ms >= SNAPSHOT_INTERVAL_MS:
            self._refresh_snapshots(now_ms)
        self._settle(now_ms)
        # Before the ends of tasks: the io side must not meet a request of a task that it has forgotten.
        self._hand_over_requests()
        self._deliver()

    def _hand_over_requests(self) -> None:
        """Requests of this turn to the io side, without those whose attempt has ended in it.

        Cancelling them afterwards would not do: a write may be started before the order to start
        nothing more for its call arrives.
        """
        waiting, self._io_waiting = self._io_waiting, []
        cancelled, self._io_cancelled = self._io_cancelled, []
        if cancelled:
            ended = set(cancelled)
            waiting = [entry for entry in waiting if entry[1].call_id not in ended]
            self._io.cancel(cancelled)
        if waiting:
            self._io.submit_waiting(waiting)

    def _settle(self, now_ms: int) -> None:
        """Dispatch, converge and send until nothing moves: each may make work for the others.

        A task that finishes frees its slot in ``flush``; an acknowledgement of a sent frame is an event.
        A long run of cached calls is cut by the core: the rest is done in the next turn, so that what
        has been answered is delivered, and sockets and timers get their turn in between.
        """
        core, adapter = self._core, self._adapter
        while True:
            admitted = core.dispatch(now_ms)
            self._perform(admitted)
            converged = core.flush()
            self._perform(converged)
            if adapter.has_unsent:
                adapter.flush()
            elif not (admitted or converged or core.has_more):
                return
            if core.has_more:
                self._reactor.post(DispatchOn())
                return

    def _deliver(self) -> None:
        for task_id, commands in self._effects.take_outgoing().items():
            task = self._tasks.get(task_id)
            if task is None:
                continue
            if type(commands[-1]) is FinishTask:
                del self._tasks[task_id]
                self._io.task_ended(task_id)
            task.port.deliver(commands)


def _resolve_in(
    view: FunctionView, function_id: str
) -> tuple[FunctionRef | None, CallError | None]:
    pinned = view.get(function_id)
    if pinned is None:
        near = view.suggest(function_id)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        return None, CallError(ErrorKind.FUNCTION_NOT_FOUND, f"no function {function_id!r}{hint}")
    if pinned.error is not None:
        return None, CallError(ErrorKind.LOAD_ERROR, pinned.error)
    return FunctionRef(function_id, pinned.digest, pinned.entry, pinned.audit), None
