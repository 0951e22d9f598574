"""The supervisor of a world: the real slot machine around simulated processes.

Wishes of the adapter and reports to it cross threads in the real program: here they take a drawn time and
keep their order.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from blockx.actor.orchestrator import ExecutorExited, ExecutorSpawned
from blockx.ipc.heartbeat import BeatSample, SchedulerSample
from blockx.supervisor.slots import (
    ArmTimer,
    ExecutorAttached,
    KillProcess,
    KillRequested,
    ProcessExited,
    ProcessStarted,
    RecycleRequested,
    ReportExit,
    Slot,
    SlotEvent,
    SlotLimits,
    StartFailed,
    StartProcess,
    StartRequested,
    TerminateProcess,
    TimerDue,
)
from tests.sim.executor import Process

if TYPE_CHECKING:
    from tests.sim.world import World

RECYCLE_GRACE_MS = 2_000


class SimTable:
    """The heartbeat table: rows of the living processes, read without tearing."""

    def __init__(self, processes: dict[int, Process]) -> None:
        self._processes = processes

    def scheduler(self, slot_index: int) -> SchedulerSample | None:
        process = self._processes.get(slot_index)
        return None if process is None else process.row()

    def beat(self, slot_index: int) -> BeatSample | None:
        process = self._processes.get(slot_index)
        return None if process is None else process.beat_row()

    def request_cancel(self, slot_index: int, call_seq: int, attempt_seq: int) -> None:
        process = self._processes.get(slot_index)
        if process is not None and process.is_alive:
            process.control_word(call_seq, attempt_seq)


class SimPool:
    """One real ``Slot`` for each executor; stands for ``supervisor.pool.ExecutorPool``."""

    def __init__(self, world: "World", executors: int) -> None:
        self.world = world
        rng = world.rng
        limits = SlotLimits(
            restart_delay_ms=rng.choice((0, 50, 1_000)),
            max_restarts=rng.choice((2, 10, 1_000)),
            restart_window_ms=rng.choice((1_000, 60_000)),
            backoff_ms=rng.choice((100, 5_000)),
        )
        self.slots = [Slot(f"exec-{n}", limits) for n in range(executors)]
        self.processes: dict[int, Process] = {}
        self.pid = 1_000
        self._posts_due_ms = 0

    def start(self) -> None:
        for index in range(len(self.slots)):
            self._handle(index, StartRequested())

    # What the adapter asks, from its thread ------------------------------------------------------

    def kill(self, executor_id: str, pid: int, reason: str) -> None:
        self._later(lambda: self._handle(_index(executor_id), KillRequested(pid, reason)))

    def attached(self, executor_id: str, pid: int) -> None:
        self._later(lambda: self._handle(_index(executor_id), ExecutorAttached(pid)))

    def recycle(self, index: int) -> None:
        """Replace whichever process runs there."""
        self._handle(index, RecycleRequested(None, "drawn", RECYCLE_GRACE_MS))

    # Processes ----------------------------------------------------------------------------------

    def process_ended(self, process: Process) -> None:
        self._later(
            lambda: self._handle(
                process.slot_index,
                ProcessExited(process.pid, process.exit_code, self.world.now_ms),
            )
        )

    def _handle(self, index: int, event: SlotEvent) -> None:
        slot = self.slots[index]
        for command in slot.handle(event):
            if isinstance(command, StartProcess):
                self._start(index)
            elif isinstance(command, ArmTimer):
                due = TimerDue(command.timer_seq)
                self.world.after(command.delay_ms, lambda due=due: self._handle(index, due))
            elif isinstance(command, TerminateProcess):
                self._signal(index, command.pid, -15)
            elif isinstance(command, KillProcess):
                self._signal(index, command.pid, -9)
            else:
                assert isinstance(command, ReportExit)
                self._report(index, command)

    def _start(self, index: int) -> None:
        world = self.world
        executor_id = self.slots[index].executor_id
        if world.fault("start_fails"):
            self._handle(index, StartFailed("drawn", world.now_ms))
            return
        self.pid += 1
        process = Process(
            world, executor_id, index, self.pid, world.rng.random() < 0.7, world.inflight_max
        )
        self.processes[index] = process
        self._post(ExecutorSpawned(executor_id, process.pid))
        world.after(world.hop_ms(), process.connect)
        self._handle(index, ProcessStarted(process.pid))

    def _signal(self, index: int, pid: int, code: int) -> None:
        process = self.processes[index]
        assert process.pid == pid
        if code == -9:
            process.die(code)
        else:
            # SIGTERM: the process ends between two steps, unless it is stuck.
            stuck = process.is_mute or process.is_wedged
            self.world.after(
                self.world.hop_ms(), lambda: None if stuck or process.is_wedged else process.die(0)
            )

    def _report(self, index: int, command: ReportExit) -> None:
        process = self.processes.pop(index)
        assert process.pid == command.pid
        last = process.row() if process.has_table else None
        self._post(ExecutorExited(process.executor_id, process.pid, command.code, last))

    # Between threads ----------------------------------------------------------------------------

    def _post(self, item: object) -> None:
        self._later(lambda: self.world.reactor.post(item))

    def _later(self, action: Callable[[], None]) -> None:
        """After a drawn time, but never before what was said earlier."""
        world = self.world
        self._posts_due_ms = max(self._posts_due_ms, world.now_ms + world.hop_ms())
        world.after(self._posts_due_ms - world.now_ms, action)


def _index(executor_id: str) -> int:
    return int(executor_id.removeprefix("exec-"))
