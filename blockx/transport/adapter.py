"""Main's end of all executor sockets: attach, reservations, draining, snapshots; frames become events.

Actor thread only; never blocks. Rules that hold here:

- A reservation is freed as soon as the terminal frame arrives, before the event is handed on: the frame
  proves that the executor is done, and the next BindCall of this very turn may need the place.
- A frame counts only if its executor holds a reservation for that call and attempt; anything else is
  stale and counted. A draining reservation swallows its terminal frame.
- An executor is lost only when its process has been reaped: end-of-file asks for the kill, the exit
  report makes the ``ExecutorLost``. What it sent before it died is read first.
- Malformed input closes that one connection; its executor is killed and lost.

≠ The specification has reader and writer goroutines a connection; here everything is non-blocking on
the reactor, so that no thread hop is paid on the path of a call.
"""

import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from blockx.config import CallLimitsConfig
from blockx.dispatcher.commands import AbortAttempt, BindCall, ResumeParent, StartAttempt
from blockx.dispatcher.events import (
    AttemptCompleted,
    AttemptFailed,
    BindFailed,
    CallBound,
    CallResumed,
    CallSuspended,
    ExecutorLost,
)
from blockx.dispatcher.model import CallError, Costs, ExecutorSnapshot
from blockx.errors import ErrorKind, PeerProtocolError
from blockx.ipc import messages
from blockx.ipc.exact_json import InvalidJsonError, check_spliced
from blockx.ipc.frames import FrameTooLargeError, encode_frame
from blockx.ipc.heartbeat import SchedulerSample, incarnation_number
from blockx.ipc.heartbeat_table import HeartbeatTable
from blockx.ipc.messages import (
    CallCompleted,
    CallFailed,
    CallWaiting,
    CancelCall,
    CancelCallPayload,
    ExecuteCall,
    ExecuteCallPayload,
    Heartbeat,
    HeartbeatAck,
    HeartbeatPayload,
    Raw,
    ResumeCall,
    ResumeCallPayload,
    WaitKind,
    WireError,
    decode_executor_message,
)
from blockx.observability import logger
from blockx.transport.connection import OUTBOX_FRAMES_MAX, ExecutorConnection
from blockx.transport.tracing import TRACEPARENT_CHARS, TraceSource

PARKED_MS_MAX = 5_000
"""A connection whose pid the spawner has not reported yet may wait this long, then it is closed."""
GONE_MS_MAX = 300
"""The end of its stream is the first sign of a dead executor; one that has not been reaped so long
afterwards has only closed its connection, and is killed."""
OUT_OF_MEMORY = "its memory grew past worker.executor_memory_limit_bytes and the reserve above it"
CONNECTIONS_MAX_A_SLOT = 4
"""Connections of one slot that are not attached; more are refused."""
NO_CALL_LIMITS = CallLimitsConfig()
_UCRED = struct.Struct("3i")

AdapterEvent = AttemptCompleted | AttemptFailed | CallSuspended | CallResumed | ExecutorLost


class AdapterListener(Protocol):
    """Where facts go: the orchestrator, on the same thread."""

    def handle(self, event: AdapterEvent) -> None:
        """Apply a dispatcher event."""

    def request_io(self, executor_id: str, message: CallWaiting, sidecar: bytes | None) -> None:
        """A call waits for a read or a write."""

    def request_subcall(self, executor_id: str, message: CallWaiting) -> None:
        """A call waits for another function."""

    def source_of(self, task_id: str, digest: str) -> str | None:
        """Pinned source of a digest, for ``function_code``."""

    def attempt_ended(self, call_id: str) -> None:
        """Nothing more must be started for the attempt that waited on IO."""


class Recorder(Protocol):
    """Sees every request of a call and its answer, in order; what a replay needs.

    Actor thread; must not block and must not keep ``payload`` beyond the call (copy what it needs).
    """

    def asked(self, message: CallWaiting, sidecar: bytes | None) -> None:
        """A live attempt waits for a read, a write or a sub-call."""

    def answered(
        self, call_id: str, request_id: str, payload: ResumeCallPayload, sidecar: bytes | None
    ) -> None:
        """The answer that goes to it: result, sidecar or error. Stale answers do not come here."""


class PoolPort(Protocol):
    """What the adapter asks of the supervisor; thread-safe, never blocks."""

    def kill(self, executor_id: str, pid: int, reason: str) -> None:
        """Kill that process if it is still the slot's."""

    def recycle(self, executor_id: str, pid: int, reason: str) -> None:
        """Replace that process, which has no calls, if it is still the slot's."""

    def attached(self, executor_id: str, pid: int) -> None:
        """It has attached."""


class Selector(Protocol):
    """What the adapter needs of the reactor."""

    def register(self, fd: int, on_ready: Callable[[int], None]) -> None:
        """Call ``on_ready(epoll event mask)`` when the descriptor is readable."""

    def want_write(self, fd: int, wanted: bool) -> None:
        """Also call it when the descriptor is writable."""

    def unregister(self, fd: int) -> None:
        """Forget the descriptor."""


class Reservation(msgspec.Struct, gc=False):
    """The right of one attempt to be on an executor."""

    attempt_seq: int
    is_root: bool
    call_seq: int = 0
    """Known once the attempt is started."""
    draining_since_ms: int = 0
    """0: live. Else: cancelled at that moment, waiting for its terminal frame."""
    request_id: str = ""
    """The one pending request of a waiting call."""
    answered_id: str = ""
    """Its last request that was answered: said again, it is stale."""
    trace: str | None = None
    """What its sub-calls belong to: the span that its executor named with the request."""


@dataclass(slots=True)
class AttachedExecutor:
    """One incarnation of an executor, as long as it is connected."""

    executor_id: str
    slot_index: int
    connection: ExecutorConnection
    incarnation_id: str
    pid: int
    """Of the process that the spawner started."""
    work_pid: int
    """Of the process that runs the calls: the same, or its child in a PID namespace."""
    has_table: bool
    attached_ms: int
    beat_ms: int
    """Arrival of the last heartbeat frame."""
    vital: HeartbeatPayload
    heartbeat_seq: int = 1
    reservations: dict[str, Reservation] = field(default_factory=dict)
    draining_roots: int = 0
    gone_ms: int = 0
    """When it was seen to be gone."""
    is_gone: bool = False
    """End-of-file or broken protocol; waits for the exit report."""
    is_retiring: bool = False
    """Takes no new root calls: it is being killed, or drained for its replacement."""
    is_full: bool = False
    """Gets no root calls for the moment."""
    retire_reason: str = ""
    """Why it is drained; empty: it is not."""
    is_recycled: bool = False
    """It is empty and the pool replaces it."""
    lost_because: str = ""
    """Our own reason to kill it, for the failure message."""
    blamed_call_seq: int | None = None
    """The call that the reason is about, 0: none. None: the one that ran when it died."""


@dataclass(slots=True)
class _Slot:
    """A place in the pool: its listener, the pid the spawner reported, who is attached."""

    executor_id: str
    index: int
    listener: socket.socket
    path: Path
    uid: int
    """Who may connect."""
    expected_pid: int = 0
    executor: AttachedExecutor | None = None
    parked: list[tuple[ExecutorConnection, Heartbeat, int]] = field(default_factory=list)
    unattached: set[ExecutorConnection] = field(default_factory=set)


class ExecutorAdapter:
    """All executors of the pool, behind one set of calls (spec: executor.Adapter)."""

    def __init__(
        self,
        *,
        selector: Selector,
        pool: PoolPort,
        table: HeartbeatTable,
        executor_max_inflight: int,
        check_pid: bool,
        now_ms: Callable[[], int],
        outbox_frames_max: int = OUTBOX_FRAMES_MAX,
        call_limits: CallLimitsConfig = NO_CALL_LIMITS,
        spawned_pid: Callable[[int], int] = int,
    ) -> None:
        """``check_pid``: only processes that the spawner reported may attach (``worker.attach: pool``).

        ``spawned_pid``: the process that the spawner knows, for one that connects; another only with
        PID namespaces, where its child does.
        """
        self._spawned_pid = spawned_pid
        self._outbox_frames_max = outbox_frames_max
        self._selector = selector
        self._pool = pool
        self._table = table
        self._inflight_max = executor_max_inflight
        self._check_pid = check_pid
        self._call_limits = call_limits
        self._now_ms = now_ms
        self._slots: dict[str, _Slot] = {}
        self._dirty: dict[str, AttachedExecutor] = {}
        self._listener: AdapterListener | None = None
        self._emit: Callable[[AdapterEvent], None] = _no_listener
        self.counters: Counter[str] = Counter()
        """Stale and refused frames by name."""
        self.recorder: Recorder | None = None
        """None: nothing is recorded, at no cost but this test. Set before the first frame."""
        self.traces: TraceSource | None = None
        """None: no call is traced, at no cost but this test. Set before the first frame."""

    def set_listener(self, listener: AdapterListener) -> None:
        """Facts go there; called once before the first frame."""
        self._listener = listener
        self._emit = listener.handle

    # ---- connections ---------------------------------------------------------------------------

    def listen(self, executor_id: str, slot_index: int, path: Path, uid: int = 0) -> None:
        """Open a slot's socket for the user ``uid``, 0: our own. Raises OSError if that fails."""
        sock = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        sock.bind(str(path))
        path.chmod(0o600)
        if uid:
            os.chown(path, uid, uid)
        sock.listen(CONNECTIONS_MAX_A_SLOT)
        self.serve(executor_id, slot_index, sock, path, uid)

    def serve(
        self, executor_id: str, slot_index: int, sock: socket.socket, path: Path, uid: int = 0
    ) -> None:
        """Take the connections of a slot from a listening, non-blocking socket; ``path`` is its file."""
        slot = self._slots[executor_id] = _Slot(
            executor_id, slot_index, sock, path, uid or os.getuid()
        )
        self._selector.register(sock.fileno(), lambda _mask: self._accept(slot))

    def executor_spawned(self, executor_id: str, pid: int) -> None:
        """The spawner started a process for the slot; a parked connection of that pid attaches now."""
        slot = self._slots[executor_id]
        slot.expected_pid = pid
        parked, slot.parked = slot.parked, []
        for connection, heartbeat, _since in parked:
            self._attach(slot, connection, heartbeat)

    def _accept(self, slot: _Slot) -> None:
        try:
            sock, _address = slot.listener.accept()
        except OSError:
            return  # the peer was faster to leave
        sock.setblocking(False)
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, _gid = _UCRED.unpack(credentials)
        if uid != slot.uid or len(slot.unattached) >= CONNECTIONS_MAX_A_SLOT:
            self.counters["connections_refused"] += 1
            sock.close()
            return
        connection = ExecutorConnection(
            sock, pid, self._outbox_frames_max, spawned_pid=self._spawned_pid(pid)
        )
        slot.unattached.add(connection)
        self._selector.register(
            sock.fileno(), lambda _mask: self._read_unattached(slot, connection)
        )

    def _read_unattached(self, slot: _Slot, connection: ExecutorConnection) -> None:
        """The first frame must be a Heartbeat; there is no other registration."""
        try:
            frames, is_open = connection.receive()
            message = decode_executor_message(frames[0].body) if frames else None
            if not is_open or (message is not None and not isinstance(message, Heartbeat)):
                raise PeerProtocolError("the first frame was no Heartbeat")
        except PeerProtocolError as error:
            self._refuse(slot, connection, str(error))
            return
        if message is not None:
            self._attach(slot, connection, message)

    def _attach(self, slot: _Slot, connection: ExecutorConnection, heartbeat: Heartbeat) -> None:
        payload = heartbeat.payload
        if heartbeat.executor_id != slot.executor_id:
            self._refuse(slot, connection, f"it says it is {heartbeat.executor_id!r}")
            return
        if self._check_pid and connection.spawned_pid != slot.expected_pid:
            # Its process may have been faster than the spawner's report: park it, refuse it later.
            self._selector.unregister(connection.socket.fileno())
            slot.parked.append((connection, heartbeat, self._now_ms()))
            return
        if slot.executor is not None:
            self._refuse(slot, connection, "the slot has an executor already")
            return
        now_ms = self._now_ms()
        executor = slot.executor = AttachedExecutor(
            executor_id=slot.executor_id,
            slot_index=slot.index,
            connection=connection,
            incarnation_id=payload.executor_process_instance_id,
            pid=connection.spawned_pid,
            work_pid=connection.peer_pid,
            has_table=payload.has_table,
            attached_ms=now_ms,
            beat_ms=now_ms,
            vital=payload,
        )
        slot.unattached.discard(connection)
        fd = connection.socket.fileno()
        self._selector.unregister(fd)
        self._selector.register(fd, lambda mask: self._on_ready(executor, mask))
        self._send(executor, HeartbeatAck(executor_id=slot.executor_id))
        self._pool.attached(slot.executor_id, executor.pid)
        logger.bind(executor_id=slot.executor_id, pid=executor.pid).debug("executor attached")

    def _refuse(self, slot: _Slot, connection: ExecutorConnection, why: str) -> None:
        self.counters["connections_refused"] += 1
        logger.bind(executor_id=slot.executor_id, pid=connection.peer_pid, why=why).warning(
            "connection refused"
        )
        slot.unattached.discard(connection)
        self._selector.unregister(connection.socket.fileno())
        connection.close()

    # ---- frames in -----------------------------------------------------------------------------

    def _on_ready(self, executor: AttachedExecutor, _mask: int) -> None:
        if executor.is_gone:
            return
        self._receive(executor)
        if executor.connection.wants_write and not executor.is_gone:
            self._dirty[executor.executor_id] = executor

    def _receive(self, executor: AttachedExecutor) -> bool:
        """Handle what has arrived; False once nothing more can come."""
        try:
            frames, is_open = executor.connection.receive()
            # One reading of the clock for all: they were there when it was read.
            now_ms = self._now_ms() if frames else 0
            for body, sidecar in frames:
                message = decode_executor_message(body)
                # Most frames are of this kind; the others cost one more call.
                if type(message) is CallCompleted:
                    self._on_completed(executor, message, now_ms)
                else:
                    self._on_other(executor, message, sidecar, now_ms)
        except (PeerProtocolError, InvalidJsonError) as error:
            logger.bind(executor_id=executor.executor_id, pid=executor.pid, why=str(error)).error(
                "executor broke the protocol, closing its connection"
            )
            self._gone(executor, f"it broke the protocol: {error}")
            return False
        if not is_open:
            self._gone(executor, "")
        return is_open and bool(frames)

    def _on_other(
        self,
        executor: AttachedExecutor,
        message: CallWaiting | CallFailed | Heartbeat | CallCompleted,
        sidecar: bytes | None,
        now_ms: int,
    ) -> None:
        if isinstance(message, CallWaiting):
            self._on_waiting(executor, message, sidecar)
        elif isinstance(message, CallFailed):
            self._on_failed(executor, message, now_ms)
        elif isinstance(message, Heartbeat):
            self._on_heartbeat(executor, message, now_ms)

    def _release(self, executor: AttachedExecutor, call_id: str, attempt_seq: int) -> bool:
        """Free a reservation on its terminal frame; whether the frame still means something."""
        reservation = executor.reservations.get(call_id)
        if reservation is None or reservation.attempt_seq != attempt_seq:
            self.counters["stale_terminal_frames"] += 1
            return False
        if reservation.draining_since_ms:
            self._forget(executor, call_id, reservation)
            return False
        del executor.reservations[call_id]
        if reservation.request_id and self._listener is not None:
            # It ended without its answer (its budget, say): a write of it must not be started now.
            self._listener.attempt_ended(call_id)
        return True

    @staticmethod
    def _forget(executor: AttachedExecutor, call_id: str, reservation: Reservation) -> None:
        del executor.reservations[call_id]
        if reservation.draining_since_ms and reservation.is_root:
            executor.draining_roots -= 1

    def _on_completed(
        self, executor: AttachedExecutor, message: CallCompleted, now_ms: int
    ) -> None:
        payload = message.payload
        output = bytes(payload.output)
        check_spliced(output)
        if self._release(executor, message.call_id, payload.attempt_seq):
            self._emit(
                AttemptCompleted(
                    message.call_id,
                    payload.attempt_seq,
                    output,
                    Costs(
                        payload.cpu_us,
                        payload.io_us,
                        payload.subcall_us,
                        payload.sleep_us,
                        payload.queue_us,
                    ),
                    now_ms,
                    payload.body_started,
                    payload.budget_used_ms,
                    payload.output_tail,
                )
            )

    def _on_failed(self, executor: AttachedExecutor, message: CallFailed, now_ms: int) -> None:
        payload = message.payload
        try:
            kind = ErrorKind(payload.error_kind)
        except ValueError:
            raise PeerProtocolError(f"unknown error kind {payload.error_kind!r}") from None
        if self._release(executor, message.call_id, payload.attempt_seq):
            self._emit(
                AttemptFailed(
                    message.call_id,
                    payload.attempt_seq,
                    CallError(kind, payload.error_message, payload.error_stack, payload.local_vars),
                    Costs(
                        payload.cpu_us,
                        payload.io_us,
                        payload.subcall_us,
                        payload.sleep_us,
                        payload.queue_us,
                    ),
                    now_ms,
                    payload.body_started,
                    payload.budget_used_ms,
                    payload.output_tail,
                )
            )

    def _on_waiting(
        self, executor: AttachedExecutor, message: CallWaiting, sidecar: bytes | None
    ) -> None:
        payload = message.payload
        reservation = executor.reservations.get(message.call_id)
        if (
            reservation is None
            or reservation.attempt_seq != payload.attempt_seq
            or reservation.draining_since_ms
        ):
            self.counters["stale_waiting_frames"] += 1
            return
        if not message.request_id:
            raise PeerProtocolError(f"{message.call_id} waits without a request id")
        if message.request_id in (reservation.request_id, reservation.answered_id):
            self.counters["stale_waiting_frames"] += 1  # said twice
            return
        if reservation.request_id:
            raise PeerProtocolError(f"{message.call_id} has two pending requests")
        reservation.request_id = message.request_id
        if message.trace is not None:
            reservation.trace = message.trace if len(message.trace) == TRACEPARENT_CHARS else None
        assert self._listener is not None
        if payload.wait_kind is WaitKind.FUNCTION_CODE:
            self._answer_source(executor, message)
            return
        if self.recorder is not None:
            self.recorder.asked(message, sidecar)
        self._emit(CallSuspended(message.call_id, payload.attempt_seq))
        if payload.wait_kind is WaitKind.IO:
            self._listener.request_io(executor.executor_id, message, sidecar)
        else:
            self._listener.request_subcall(executor.executor_id, message)

    def _answer_source(self, executor: AttachedExecutor, message: CallWaiting) -> None:
        """``function_code`` does not change the dispatcher's state: the source goes straight back."""
        assert self._listener is not None
        payload = message.payload
        source = self._listener.source_of(payload.task_id, payload.function_code_digest)
        error = None
        if source is None:
            error = WireError(
                kind=ErrorKind.CODE_FETCH_FAILED,
                message=f"no source with digest {payload.function_code_digest} in task {payload.task_id}",
            )
        answer = ResumeCallPayload(
            resume_kind=WaitKind.FUNCTION_CODE, attempt_seq=payload.attempt_seq, error=error
        )
        sidecar = None if source is None else source.encode("utf-8", "surrogatepass")
        self._resume(
            executor, message.call_id, message.request_id, answer, sidecar, acknowledge=False
        )

    def _on_heartbeat(self, executor: AttachedExecutor, message: Heartbeat, now_ms: int) -> None:
        if message.payload.executor_process_instance_id != executor.incarnation_id:
            raise PeerProtocolError("its incarnation changed within one connection")
        executor.vital = message.payload
        executor.beat_ms = now_ms
        executor.heartbeat_seq += 1
        self._send(executor, HeartbeatAck(executor_id=executor.executor_id))

    # ---- orders --------------------------------------------------------------------------------

    def bind(self, command: BindCall) -> CallBound | BindFailed:
        """Reserve a place; a sub-call passes if its parent holds a live reservation there."""
        call_id, parent_id = command.call_id, command.parent_call_id
        executor = self._live(command.executor_id)
        if executor is not None and not executor.is_recycled:
            reservations = executor.reservations
            if call_id not in reservations and (
                not parent_id or self._is_live(reservations.get(parent_id))
            ):
                reservations[call_id] = Reservation(command.attempt_seq, not parent_id)
                return CallBound(call_id, command.attempt_seq, command.executor_id)
        return BindFailed(call_id, command.attempt_seq, command.executor_id)

    @staticmethod
    def _is_live(reservation: Reservation | None) -> bool:
        return reservation is not None and not reservation.draining_since_ms

    def unbind(self, call_id: str, executor_id: str) -> None:
        """Give a reservation back; idempotent with the release by the terminal frame."""
        slot = self._slots[executor_id]
        if slot.executor is not None:
            reservation = slot.executor.reservations.get(call_id)
            if reservation is not None and not reservation.draining_since_ms:
                self._forget(slot.executor, call_id, reservation)

    def start(self, command: StartAttempt) -> AttemptFailed | None:
        """Queue ExecuteCall; a free-of-charge failure if the executor cannot take it now."""
        executor = self._live(command.executor_id)
        if executor is None or executor.connection.outbox_is_full:
            error = CallError(
                ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED, "the executor's outbox is full"
            )
            return self._not_started(command, error)
        function, limits = command.function, self._call_limits
        deadline_ms = command.deadline_ms
        message = ExecuteCall(
            executor_id=command.executor_id,
            call_id=command.call_id,
            payload=ExecuteCallPayload(
                task_id=command.task_id,
                function_id=function.function_id,
                function_code_digest=function.digest,
                entry_selector=function.entry,
                audit=function.audit,
                args=Raw(command.args),
                attempt_seq=command.attempt_seq,
                call_seq=command.call_seq,
                parent_call_id=command.parent_call_id,
                call_budget_ms=command.budget_ms,
                cpu_limit_ms=limits.cpu_ms,
                io_limit_ms=limits.io_ms,
                subcall_limit_ms=limits.subcall_ms,
                sleep_limit_ms=limits.sleep_ms,
                call_deadline_ms=max(1, deadline_ms - self._now_ms()) if deadline_ms else 0,
            ),
        )
        if self.traces is not None:
            message.trace = self._trace_of(self.traces, executor, command)
        try:
            frame = encode_frame(message)
        except FrameTooLargeError as too_large:
            error = CallError(ErrorKind.INVALID_CALL, f"arguments too large: {too_large}")
            return self._not_started(command, error)
        executor.connection.queue(frame)
        self._dirty[executor.executor_id] = executor
        executor.reservations[command.call_id].call_seq = command.call_seq
        return None

    def _not_started(self, command: StartAttempt, error: CallError) -> AttemptFailed:
        self.unbind(command.call_id, command.executor_id)
        return AttemptFailed(command.call_id, command.attempt_seq, error, Costs(), self._now_ms())

    @staticmethod
    def _trace_of(
        traces: TraceSource, executor: AttachedExecutor, command: StartAttempt
    ) -> str | None:
        """A root call's own context; a sub-call's is its parent's, which is on the same executor."""
        if not command.parent_call_id:
            return traces.root(command.call_id)
        parent = executor.reservations.get(command.parent_call_id)
        return None if parent is None else parent.trace

    def abort(self, command: AbortAttempt) -> None:
        """Mark the reservation as draining and cancel: by frame, and by the control word if it computes."""
        executor = self._slots[command.executor_id].executor
        if executor is None:
            return
        reservation = executor.reservations.get(command.call_id)
        if reservation is None or reservation.attempt_seq != command.attempt_seq:
            return
        if reservation.draining_since_ms:
            return
        if reservation.request_id and self._listener is not None:
            self._listener.attempt_ended(command.call_id)
        if executor.is_gone:
            return  # nobody to tell; its exit will free the place
        reservation.draining_since_ms = self._now_ms()
        executor.draining_roots += reservation.is_root
        payload = CancelCallPayload(reason=command.reason, attempt_seq=command.attempt_seq)
        self._send(
            executor,
            CancelCall(executor_id=executor.executor_id, call_id=command.call_id, payload=payload),
        )
        self._cancel_if_running(executor, reservation)

    def _cancel_if_running(self, executor: AttachedExecutor, reservation: Reservation) -> None:
        """The control word has room for one call: it is used for the one that computes."""
        sample = self._table.scheduler(executor.slot_index) if executor.has_table else None
        if sample is not None and sample.running_call_seq == reservation.call_seq:
            self._table.request_cancel(
                executor.slot_index, reservation.call_seq, reservation.attempt_seq
            )

    def resume_parent(self, command: ResumeParent) -> None:
        """Answer a sub-call request."""
        executor = self._live(command.executor_id)
        if executor is None:
            self.counters["stale_resumes"] += 1
            return
        error = None
        if command.error is not None:
            error = WireError(
                kind=command.error.kind,
                message=command.error.message,
                retryable=command.retryable,
                reason=command.error.reason,
                data=command.error.data,
            )
        payload = ResumeCallPayload(
            resume_kind=WaitKind.SUBCALL,
            attempt_seq=command.attempt_seq,
            result=messages.NULL if command.output is None else Raw(command.output),
            error=error,
            budget_used_ms=command.budget_used_ms,
        )
        self._resume(executor, command.parent_call_id, command.request_id, payload, None)

    def resume_io(
        self,
        executor_id: str,
        call_id: str,
        request_id: str,
        payload: ResumeCallPayload,
        sidecar: bytes | None,
    ) -> None:
        """Answer a read or a write; dropped if its attempt has ended meanwhile."""
        executor = self._live(executor_id)
        if executor is None:
            self.counters["stale_resumes"] += 1
            return
        self._resume(executor, call_id, request_id, payload, sidecar)

    def _resume(
        self,
        executor: AttachedExecutor,
        call_id: str,
        request_id: str,
        payload: ResumeCallPayload,
        sidecar: bytes | None,
        *,
        acknowledge: bool = True,
    ) -> None:
        reservation = executor.reservations.get(call_id)
        if (
            reservation is None
            or reservation.request_id != request_id
            or reservation.attempt_seq != payload.attempt_seq
            or reservation.draining_since_ms
        ):
            self.counters["stale_resumes"] += 1
            return
        reservation.request_id = ""
        reservation.answered_id = request_id
        message = ResumeCall(
            executor_id=executor.executor_id,
            call_id=call_id,
            request_id=request_id,
            payload=payload,
        )
        try:
            frame = encode_frame(message, sidecar)
        except FrameTooLargeError as error:
            message.payload = ResumeCallPayload(
                resume_kind=payload.resume_kind,
                attempt_seq=payload.attempt_seq,
                error=WireError(
                    kind=ErrorKind.IO_ERROR, message=f"the answer is too large: {error}"
                ),
            )
            frame = encode_frame(message)
        if self.recorder is not None and acknowledge:
            self.recorder.answered(call_id, request_id, message.payload, sidecar)
        flushed = CallResumed(call_id, payload.attempt_seq) if acknowledge else None
        executor.connection.queue(frame, flushed)
        self._dirty[executor.executor_id] = executor

    def _send(self, executor: AttachedExecutor, message: messages.MainMessage) -> None:
        executor.connection.queue(encode_frame(message))
        self._dirty[executor.executor_id] = executor

    def _live(self, executor_id: str) -> AttachedExecutor | None:
        executor = self._slots[executor_id].executor
        return None if executor is None or executor.is_gone else executor

    def flush(self) -> None:
        """Write what has been queued in this turn; acknowledgements become CallResumed events."""
        dirty, self._dirty = self._dirty, {}
        for executor in dirty.values():
            if executor.is_gone:
                continue
            try:
                acknowledged = executor.connection.flush()
            except OSError:
                self._gone(executor, "")
                continue
            self._selector.want_write(
                executor.connection.socket.fileno(), executor.connection.wants_write
            )
            for event in acknowledged:
                self._emit(event)

    @property
    def has_unsent(self) -> bool:
        """Whether ``flush`` has something to do."""
        return bool(self._dirty)

    # ---- life and death ------------------------------------------------------------------------

    def snapshots(self) -> list[ExecutorSnapshot]:
        """How each attached executor looks now; a gone one is reported unhealthy."""
        now_ms = self._now_ms()
        found = []
        for slot in self._slots.values():
            executor = slot.executor
            if executor is not None:
                found.append(self._snapshot(executor, now_ms))
        return found

    def _snapshot(self, executor: AttachedExecutor, now_ms: int) -> ExecutorSnapshot:
        vital, memory_bytes = executor.vital, executor.vital.memory_bytes
        runnable, running_seq, idle_ms = (
            vital.runnable_count,
            vital.running_call_seq,
            vital.scheduler_idle_ms,
        )
        inflight, available = vital.inflight_count, vital.available_contexts
        retires = False
        heartbeat_seq = executor.heartbeat_seq
        if executor.has_table:
            sample, beat = (
                self._table.scheduler(executor.slot_index),
                self._table.beat(executor.slot_index),
            )
            if sample is not None:
                runnable, running_seq = sample.runnable, sample.running_call_seq
                inflight, available = sample.inflight, sample.available_contexts
                retires = not sample.attached and sample.finished_calls > 0
                idle_ms = max(0, now_ms - sample.last_active_ns // 1_000_000)
                heartbeat_seq = sample.version
            if beat is not None:
                memory_bytes = beat.memory_bytes
        else:
            idle_ms += now_ms - executor.beat_ms
        # It has room, and says that it takes nothing. Its calls and their sub-calls go on.
        retires = retires or (available == 0 and inflight < self._inflight_max)
        takes_none = retires or executor.is_full or bool(executor.retire_reason)
        return ExecutorSnapshot(
            executor_id=executor.executor_id,
            incarnation_id=executor.incarnation_id,
            healthy=not (executor.is_gone or executor.lost_because),
            usable_contexts=(
                0 if takes_none else max(0, self._inflight_max - executor.draining_roots)
            ),
            runnable_count=runnable,
            memory_bytes=memory_bytes,
            heartbeat_seq=heartbeat_seq,
            running_call_seq=running_seq,
            scheduler_idle_ms=idle_ms,
            draining_count=executor.draining_roots,
        )

    def attached_executors(self) -> Iterable[AttachedExecutor]:
        """Executors that are connected, for the watchdog."""
        return [s.executor for s in self._slots.values() if s.executor and not s.executor.is_gone]

    def silent_ms(self, executor: AttachedExecutor) -> int:
        """How long since the executor last showed that it is alive, by its table row or by frames."""
        beat = self._table.beat(executor.slot_index) if executor.has_table else None
        last_ms = (
            executor.beat_ms
            if beat is None
            else max(executor.attached_ms, beat.beat_ns // 1_000_000)
        )
        return self._now_ms() - last_ms

    def press_cancellations(self) -> list[tuple[AttachedExecutor, int]]:
        """Repeat the control word for cancelled calls that compute; returns those and for how long."""
        now_ms, overdue = self._now_ms(), []
        for executor in self.attached_executors():
            for reservation in executor.reservations.values():
                if reservation.draining_since_ms:
                    self._cancel_if_running(executor, reservation)
                    overdue.append((executor, now_ms - reservation.draining_since_ms))
        return overdue

    def drop_parked(self) -> None:
        """Close connections whose pid was not reported within PARKED_MS_MAX."""
        now_ms = self._now_ms()
        for slot in self._slots.values():
            expired = [entry for entry in slot.parked if now_ms - entry[2] > PARKED_MS_MAX]
            for entry in expired:
                slot.parked.remove(entry)
                self._refuse(slot, entry[0], f"pid {entry[0].peer_pid} is not the slot's process")

    def kill(self, executor: AttachedExecutor, reason: str, kind: ErrorKind) -> None:
        """Have an executor killed; its calls move when it has been reaped."""
        if not executor.lost_because:
            executor.lost_because = f"{kind}:{reason}"
            executor.is_retiring = True
            self._pool.kill(executor.executor_id, executor.pid, reason)

    def row_sample(self, executor: AttachedExecutor) -> SchedulerSample | None:
        """What it says of itself in the table; None if it has no row."""
        return self._table.scheduler(executor.slot_index) if executor.has_table else None

    def retire(self, executor: AttachedExecutor, reason: str) -> None:
        """No more root calls; replaced as soon as the last of its calls has left."""
        if executor.retire_reason or executor.lost_because:
            return
        executor.is_retiring = True
        executor.retire_reason = reason
        logger.bind(executor_id=executor.executor_id, pid=executor.pid, why=reason).info(
            "executor is drained for its replacement"
        )

    def replace_drained(self) -> None:
        """Have retired executors replaced that are empty, and killed those that hung up and live on."""
        for slot in self._slots.values():
            gone = slot.executor
            if gone is not None and gone.is_gone and self._now_ms() - gone.gone_ms >= GONE_MS_MAX:
                self._pool.kill(gone.executor_id, gone.pid, "it closed its connection")
        for executor in self.attached_executors():
            if executor.retire_reason and not executor.reservations and not executor.is_recycled:
                executor.is_recycled = True
                self._pool.recycle(executor.executor_id, executor.pid, executor.retire_reason)

    def kill_for_memory(
        self, executor: AttachedExecutor, reason: str, blamed_call_seq: int
    ) -> None:
        """Killed for what it uses; the call with that number is charged, 0: nobody."""
        if executor.lost_because:
            return
        executor.blamed_call_seq = blamed_call_seq
        logger.bind(executor_id=executor.executor_id, pid=executor.pid, why=reason).warning(
            "killing executor"
        )
        executor.lost_because = f"{ErrorKind.MEMORY_EXCEEDED}:{reason}"
        executor.is_retiring = True
        self._pool.kill(executor.executor_id, executor.pid, "out of memory")

    def _gone(self, executor: AttachedExecutor, why: str) -> None:
        """Nothing more can be said to it; lost when its process has been reaped."""
        if executor.is_gone:
            return
        executor.is_gone = True
        self._selector.unregister(executor.connection.socket.fileno())
        executor.connection.close()
        executor.gone_ms = self._now_ms()
        if self._check_pid and why:
            self._pool.kill(executor.executor_id, executor.pid, why)
        if why and not executor.lost_because:
            executor.lost_because = f"{ErrorKind.EXECUTOR_LOST}:{why}"
        if not self._check_pid and self._slots[executor.executor_id].expected_pid != executor.pid:
            # Started by hand: nobody will report its exit.
            self.executor_exited(executor.executor_id, executor.pid, None, None)

    def executor_exited(
        self,
        executor_id: str,
        pid: int,
        exit_code: int | None,
        last: SchedulerSample | None,
        out_of_memory: bool = False,
    ) -> None:
        """The process has been reaped: read what it still said, then all its calls need a new place.

        ``exit_code``: negative for a signal, None if unknown. ``last``: its heartbeat row at death.
        ``out_of_memory``: the kernel ended it at the limit of its control group, faster than we look.
        """
        slot = self._slots[executor_id]
        self._forget_process(slot, pid)
        executor = slot.executor
        if executor is None or executor.pid != pid:
            return
        while not executor.is_gone and self._receive(executor):
            pass
        if not executor.is_gone:
            executor.is_gone = True
            self._selector.unregister(executor.connection.socket.fileno())
            executor.connection.close()
        if out_of_memory and not executor.lost_because:
            executor.lost_because = f"{ErrorKind.MEMORY_EXCEEDED}:{OUT_OF_MEMORY}"
        slot.executor = None
        for call_id, reservation in executor.reservations.items():
            if reservation.request_id and self._listener is not None:
                self._listener.attempt_ended(call_id)
        self._emit(self._lost(executor, exit_code, last))

    def _forget_process(self, slot: _Slot, pid: int) -> None:
        """What a dead process left at the door must not attach: nobody would report its exit again, and
        the slot would be taken for ever."""
        if slot.expected_pid == pid:
            slot.expected_pid = 0
        for entry in [entry for entry in slot.parked if entry[0].spawned_pid == pid]:
            slot.parked.remove(entry)
            self._refuse(slot, entry[0], "its process has ended")
        for connection in [c for c in slot.unattached if c.spawned_pid == pid]:
            self._refuse(slot, connection, "its process has ended")

    def _lost(
        self, executor: AttachedExecutor, exit_code: int | None, last: SchedulerSample | None
    ) -> ExecutorLost:
        running_seq = executor.vital.running_call_seq
        if executor.has_table:
            is_own = last is not None and last.incarnation == incarnation_number(
                executor.incarnation_id
            )
            running_seq = last.running_call_seq if last is not None and is_own else 0
        if executor.blamed_call_seq is not None:
            running_seq = executor.blamed_call_seq
        kind, _, why = executor.lost_because.partition(":")
        if executor.is_recycled:
            why = why or f"replaced: {executor.retire_reason}"
        detail = why or _exit_text(exit_code)
        logger.bind(executor_id=executor.executor_id, pid=executor.pid, why=detail).log(
            "INFO" if executor.is_recycled else "WARNING", "executor lost"
        )
        return ExecutorLost(
            executor_id=executor.executor_id,
            incarnation_id=executor.incarnation_id,
            kind=ErrorKind(kind) if kind else ErrorKind.EXECUTOR_LOST,
            detail=detail,
            running_call_seq=running_seq,
            free_of_charge=not executor.lost_because and exit_code in (None, -9),
            now_ms=self._now_ms(),
        )

    def close(self) -> None:
        """Close every socket; executors end by themselves at the end-of-file."""
        for slot in self._slots.values():
            slot.listener.close()
            slot.path.unlink(missing_ok=True)
            for connection in slot.unattached:
                connection.close()
            if slot.executor is not None and not slot.executor.is_gone:
                slot.executor.connection.close()
        self._slots.clear()


def _no_listener(event: AdapterEvent) -> None:
    raise AssertionError(f"set_listener comes before the first frame: {event}")


def _exit_text(exit_code: int | None) -> str:
    if exit_code is None:
        return "its process ended, nobody knows how"
    if exit_code < 0:
        return f"its process was killed by signal {-exit_code}"
    return f"its process ended with exit code {exit_code}"
