"""The pool: drives the slots, so that ``executor_count`` executor processes are alive.

The main thread owns it: ``start()``, ``turn()`` again and again, ``stop()``; there the listener is
called. ``kill``, ``recycle``, ``attached`` and ``wake`` may be called from any thread: they leave a
note and return. The pool decides nothing (``slots.py`` does) and forks nothing (``spawner.py``
does). It installs no signal handler.

Invariants: the listener hears of a death after the process is dead, its group is killed and its
code collected; of the next process of a slot only after that; the heartbeat row of a slot is read
for the last time before it is cleared for the next life.
"""

import contextlib
import enum
import os
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from blockx.config import WorkerConfig
from blockx.ipc.launch import ExecutorLaunch
from blockx.observability import logger
from blockx.supervisor.slots import (
    BOOT_FAILURES_MAX,
    ArmTimer,
    ExecutorAttached,
    ExitCause,
    KillProcess,
    KillRequested,
    ProcessExited,
    ProcessStarted,
    RecycleRequested,
    ReportExit,
    Slot,
    SlotCommand,
    SlotEvent,
    SlotLimits,
    SlotState,
    StartFailed,
    StartProcess,
    StartRequested,
    StopRequested,
    TerminateProcess,
    TimerDue,
    describe_exit,
    is_hopeless,
)
from blockx.supervisor.spawner import SpawnError

RECYCLE_GRACE_MS = 1_000
"""From SIGTERM to SIGKILL of a drained executor: it has no call, so it has no reason to linger."""

KILL_WAIT_MS = 10_000
"""Wait for killed processes in ``stop()``. Over (one hangs in the kernel): left, and logged."""

REASONS_MAX = 100
"""Different reasons counted for the report. Full: further ones are counted as ``other``."""


class Process(Protocol):
    """What the pool needs of ``SpawnedProcess``."""

    pid: int

    def fileno(self) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def reap(self) -> int | None: ...


class Spawner(Protocol):
    """What the pool needs of ``ForkserverSpawner``."""

    def spawn(self, launch: ExecutorLaunch, heartbeat_fd: int | None) -> Process: ...
    def check_preload(self) -> None: ...
    def stop(self) -> None: ...


class HeartbeatRows(Protocol):
    """What the pool needs of the heartbeat table."""

    def scheduler(self, slot_index: int, /) -> object | None: ...
    def next_epoch(self, slot_index: int, /) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReport:
    """The end of one executor process, told after it is dead and reaped."""

    executor_id: str
    pid: int
    exit_code: int | None
    """Negative: the signal that ended it. None: unknown, since the fork server died too."""
    cause: ExitCause
    killed_by_us: str | None
    """The reason that was given to ``kill`` (or: no attach in time); None: not killed by us. A
    process that ended by itself before our signal came does not count as killed by us."""
    attached: bool
    """It had attached; otherwise it never got a call."""
    out_of_memory: bool
    """The kernel ended it at the limit of its control group."""
    last_scheduler: object | None
    """The scheduler block of its heartbeat row as it was at its death; None without a table."""


@dataclass(slots=True)
class PoolCounts:
    """How the executors fared, for the report; counted by reason. Main thread only."""

    restarts: int = 0
    """Processes started after the first of their slot."""
    lost: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    recycled: Counter[str] = field(default_factory=Counter)
    start_failures: Counter[str] = field(default_factory=Counter)


class PoolListener(Protocol):
    """Hears what happens to executors; called on the main thread, must not block."""

    def executor_spawned(self, executor_id: str, pid: int) -> None:
        """A process lives; it will connect with this pid (and may have done so already)."""

    def executor_exited(self, report: ExitReport) -> None:
        """It is dead and reaped: its calls may run again."""

    def pool_failed(self, message: str) -> None:
        """No executor can start. Told once; nothing is started afterwards: stop the run."""


class _Wish(enum.Enum):
    KILL = enum.auto()
    RECYCLE = enum.auto()
    ATTACHED = enum.auto()


@dataclass(slots=True)
class _Seat:
    """A slot and what the pool holds for it."""

    slot: Slot
    launch: ExecutorLaunch
    process: Process | None = None
    timer_seq: int = 0
    timer_due_ms: int | None = None
    """None: no timer runs."""
    lives: int = 0


class ExecutorPool:
    """Keeps one executor alive for each of ``launches``.

    ``launches``: executor ids and slot indices are unique. ``table`` with ``heartbeat_fd``: the
    rows, and the descriptor that executors map (kept open by its owner until ``stop()`` is over);
    None: executors send heartbeat frames. ``clock``: seconds, monotonic.
    """

    def __init__(
        self,
        config: WorkerConfig,
        spawner: Spawner,
        launches: Sequence[ExecutorLaunch],
        table: HeartbeatRows | None,
        listener: PoolListener,
        *,
        heartbeat_fd: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        was_out_of_memory: Callable[[int], bool] = lambda _slot_index: False,
    ) -> None:
        """``was_out_of_memory``: whether the kernel ended the slot's last process for its memory."""
        limits = SlotLimits(
            restart_delay_ms=config.executor_restart_delay_ms,
            max_restarts=config.executor_max_restarts,
            restart_window_ms=config.executor_restart_window_ms,
            backoff_ms=config.executor_backoff_ms,
        )
        self._spawner = spawner
        self._table = table
        self._listener = listener
        self._heartbeat_fd = heartbeat_fd
        self._clock = clock
        self._was_out_of_memory = was_out_of_memory
        self._seats = {
            launch.executor_id: _Seat(Slot(launch.executor_id, limits), launch)
            for launch in launches
        }
        assert len(self._seats) == len(launches), "executor ids are unique"
        self._counts = PoolCounts()
        self._closed = False
        # One note for each wish and process: repeating a wish changes nothing, so this is bounded
        # by the processes that the callers know of, and needs no full case.
        self._wishes: dict[tuple[_Wish, str, int | None], str] = {}
        # Re-entrant, since a signal handler may call wake() while this thread holds it.
        self._wishes_lock = threading.RLock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._seat_by_fd: dict[int, _Seat] = {}

    # From any thread.

    def kill(self, executor_id: str, pid: int, reason: str) -> None:
        """End this process (SIGKILL) and replace it at once. No effect if ``pid`` is not current.

        ``reason``: a phrase for the log and the report, without call ids (they would fill the
        report with reasons that occur once).
        """
        self._post(_Wish.KILL, executor_id, pid, reason)

    def recycle(self, executor_id: str, pid: int | None = None, reason: str = "drained") -> None:
        """Replace a process that has no calls: SIGTERM, SIGKILL after ``RECYCLE_GRACE_MS``.

        ``pid``: no effect if it is not current; None: whichever runs when the wish is read.
        """
        self._post(_Wish.RECYCLE, executor_id, pid, reason)

    def attached(self, executor_id: str, pid: int) -> None:
        """This process has attached. Must be told: one that does not attach in time is killed."""
        self._post(_Wish.ATTACHED, executor_id, pid, "")

    def wake(self) -> None:
        """Make a ``turn()`` that waits return; also allowed in a signal handler."""
        with self._wishes_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def _post(self, wish: _Wish, executor_id: str, pid: int | None, reason: str) -> None:
        assert executor_id in self._seats, executor_id
        with self._wishes_lock:
            if not self._closed:
                self._wishes.setdefault((wish, executor_id, pid), reason)
                os.eventfd_write(self._wake_fd, 1)

    # Main thread.

    def start(self) -> None:
        """Start all executors; returns when they are forked, before they attach.

        A fork server that does not work is told by ``pool_failed``, here or in a later turn.
        """
        for seat in self._seats.values():
            self._handle(seat, StartRequested())
        # After the starts: the fork server answers while the executors set themselves up.
        try:
            self._spawner.check_preload()
        except SpawnError as error:
            self._fail(f"executors cannot start: {error}")

    def turn(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for a death, a wish or a timer; handle all that is due."""
        due_s = self._next_timer_s()
        ready = self._epoll.poll(timeout_s if due_s is None else min(timeout_s, due_s))
        for fd, _ in ready:
            if fd == self._wake_fd:
                # A signal handler's wake() and this read may cross: then there is nothing to read.
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
        # Wishes first: "attached" must be known before the exit of the same process is judged.
        self._take_wishes()
        for fd, _ in ready:
            seat = self._seat_by_fd.get(fd)
            if seat is not None:
                self._reap(seat)
        self._run_timers()
        if is_hopeless(seat.slot for seat in self._seats.values()):
            self._fail(self._hopeless_message())

    def stop(self, grace_s: float) -> None:
        """End all executors (SIGTERM; SIGKILL after ``grace_s``, 0: at once), then the fork server.

        Returns when nothing is left; the listener heard of each exit. Wishes that come later are
        dropped. Again: no effect.
        """
        if self._closed:
            return
        for seat in self._seats.values():
            self._handle(seat, StopRequested(round(grace_s * 1_000)))
        deadline_ms = self._now_ms() + round(grace_s * 1_000) + KILL_WAIT_MS
        while self._living() and self._now_ms() < deadline_ms:
            self.turn((deadline_ms - self._now_ms()) / 1_000)
        for seat in self._living():
            logger.error("executor does not die", executor_id=seat.launch.executor_id)
        with self._wishes_lock:
            self._closed = True
            self._wishes.clear()
            os.close(self._wake_fd)
        self._epoll.close()
        self._spawner.stop()

    def counts(self) -> PoolCounts:
        """How the executors fared so far; the pool's own object, to be read only."""
        return self._counts

    def pids(self) -> dict[str, int]:
        """The living processes by executor id."""
        return {
            executor_id: seat.slot.pid
            for executor_id, seat in self._seats.items()
            if seat.slot.pid is not None
        }

    # Events to the slots.

    def _take_wishes(self) -> None:
        with self._wishes_lock:
            wishes, self._wishes = self._wishes, {}
        for (wish, executor_id, pid), reason in wishes.items():
            self._handle(self._seats[executor_id], _wish_event(wish, pid, reason))

    def _reap(self, seat: _Seat) -> None:
        process = seat.process
        assert process is not None, "a polled descriptor belongs to a process"
        fd = process.fileno()
        self._epoll.unregister(fd)
        del self._seat_by_fd[fd]
        seat.process = None
        code = process.reap()
        self._handle(seat, ProcessExited(process.pid, code, self._now_ms()))

    def _run_timers(self) -> None:
        now_ms = self._now_ms()
        for seat in self._seats.values():
            if seat.timer_due_ms is not None and seat.timer_due_ms <= now_ms:
                seat.timer_due_ms = None
                self._handle(seat, TimerDue(seat.timer_seq))

    def _next_timer_s(self) -> float | None:
        due = [seat.timer_due_ms for seat in self._seats.values() if seat.timer_due_ms is not None]
        return max(0, min(due) - self._now_ms()) / 1_000 if due else None

    def _living(self) -> list[_Seat]:
        return [seat for seat in self._seats.values() if seat.process is not None]

    def _now_ms(self) -> int:
        return int(self._clock() * 1_000)

    # Commands of the slots.

    def _handle(self, seat: _Seat, event: SlotEvent) -> None:
        before = seat.slot.state
        commands = seat.slot.handle(event)
        if seat.slot.state is SlotState.BACKOFF and before is not SlotState.BACKOFF:
            logger.warning(
                "executor ended too often, pausing",
                executor_id=seat.launch.executor_id,
                backoff_ms=seat.slot.limits.backoff_ms,
            )
        for command in commands:
            self._perform(seat, command)

    def _perform(self, seat: _Seat, command: SlotCommand) -> None:
        match command:
            case StartProcess():
                self._start_process(seat)
            case ArmTimer():
                seat.timer_seq = command.timer_seq
                seat.timer_due_ms = self._now_ms() + command.delay_ms
            case TerminateProcess():
                self._process(seat, command.pid).terminate()
            case KillProcess():
                self._process(seat, command.pid).kill()
            case ReportExit():
                self._report_exit(seat, command)
            case _:
                assert_never(command)

    def _process(self, seat: _Seat, pid: int) -> Process:
        assert seat.process is not None, seat.slot.story
        assert seat.process.pid == pid, seat.slot.story
        return seat.process

    def _start_process(self, seat: _Seat) -> None:
        launch = seat.launch
        if self._table is not None:
            self._table.next_epoch(launch.slot_index)
        try:
            process = self._spawner.spawn(launch, self._heartbeat_fd)
        except SpawnError as error:
            logger.warning(
                "executor not started", executor_id=launch.executor_id, reason=str(error)
            )
            _count(self._counts.start_failures, str(error))
            self._handle(seat, StartFailed(str(error), self._now_ms()))
            return
        seat.process = process
        self._seat_by_fd[process.fileno()] = seat
        self._epoll.register(process.fileno(), select.EPOLLIN)
        if seat.lives > 0:
            self._counts.restarts += 1
        seat.lives += 1
        logger.info("executor started", executor_id=launch.executor_id, pid=process.pid)
        self._listener.executor_spawned(launch.executor_id, process.pid)
        self._handle(seat, ProcessStarted(process.pid))

    def _report_exit(self, seat: _Seat, command: ReportExit) -> None:
        ended = describe_exit(command.code)
        level = "INFO"
        out_of_memory = self._was_out_of_memory(seat.launch.slot_index)
        if command.cause is ExitCause.LOST:
            level = "WARNING"
            ended = "out of memory" if out_of_memory else _with_hint(command.code, ended)
            _count(self._counts.lost, ended)
        elif command.cause is ExitCause.KILLED:
            level = "WARNING"
            _count(self._counts.killed, command.reason)
        elif command.cause is ExitCause.RECYCLED:
            _count(self._counts.recycled, command.reason)
        logger.log(
            level,
            "executor ended",
            executor_id=seat.launch.executor_id,
            pid=command.pid,
            cause=command.cause.value,
            reason=command.reason or ended,
        )
        row = None if self._table is None else self._table.scheduler(seat.launch.slot_index)
        self._listener.executor_exited(
            ExitReport(
                executor_id=seat.launch.executor_id,
                pid=command.pid,
                exit_code=command.code,
                cause=command.cause,
                killed_by_us=command.reason if command.cause is ExitCause.KILLED else None,
                attached=command.attached,
                out_of_memory=out_of_memory and command.cause is ExitCause.LOST,
                last_scheduler=row,
            )
        )

    # Giving up.

    def _fail(self, message: str) -> None:
        for seat in self._seats.values():
            self._handle(seat, StopRequested(0))
        self._listener.pool_failed(message)

    def _hopeless_message(self) -> str:
        first = next(iter(self._seats.values()))
        return (
            f"executors cannot start: all {len(self._seats)} ended at least {BOOT_FAILURES_MAX} "
            "times in a row before they could connect; "
            f"{first.launch.executor_id} with: {first.slot.last_failure}. What they printed on "
            "stderr says more; check the installation, and worker.executor_count against the "
            "memory and the process limit of this machine."
        )


def _wish_event(wish: _Wish, pid: int | None, reason: str) -> SlotEvent:
    if wish is _Wish.RECYCLE:
        return RecycleRequested(pid, reason, RECYCLE_GRACE_MS)
    assert pid is not None, wish
    return KillRequested(pid, reason) if wish is _Wish.KILL else ExecutorAttached(pid)


def _with_hint(code: int | None, ended: str) -> str:
    """SIGKILL from somebody else is nearly always the kernel's, short of memory."""
    return f"{ended} (out of memory?)" if code == -signal.SIGKILL else ended


def _count(counter: Counter[str], reason: str) -> None:
    counter[reason if reason in counter or len(counter) < REASONS_MAX else "other"] += 1
