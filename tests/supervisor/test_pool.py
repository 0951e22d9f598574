"""The pool: what it tells and in which order, with processes made of descriptors and then real ones."""

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from blockx.config import WorkerConfig
from blockx.ipc.launch import ExecutorLaunch
from blockx.supervisor.pool import (
    RECYCLE_GRACE_MS,
    ExecutorPool,
    ExitReport,
    Spawner,
)
from blockx.supervisor.slots import ATTACH_TIMEOUT_MS, BOOT_FAILURES_MAX, ExitCause
from blockx.supervisor.spawner import SpawnError


def launches(count: int) -> list[ExecutorLaunch]:
    return [
        ExecutorLaunch(
            executor_id=f"exec-{slot_index}",
            slot_index=slot_index,
            socket_path="/unused",
            heartbeat_interval_ms=1_000,
            executor_max_inflight=1,
            executor_max_runnable=1,
        )
        for slot_index in range(count)
    ]


class FakeProcess:
    """A process in this process: an eventfd that is readable when it is "dead"."""

    def __init__(self, pid: int, world: "World") -> None:
        self.pid = pid
        self.code: int | None = None
        self.deaf = False
        self._world = world
        self._fd = os.eventfd(0)

    def fileno(self) -> int:
        return self._fd

    def terminate(self) -> None:
        self._world.story.append(f"SIGTERM {self.pid}")
        if not self.deaf:
            self.die(-signal.SIGTERM)

    def kill(self) -> None:
        self._world.story.append(f"SIGKILL {self.pid}")
        self.die(-signal.SIGKILL)

    def die(self, code: int | None) -> None:
        self.code = code
        os.eventfd_write(self._fd, 1)

    def reap(self) -> int | None:
        self._world.story.append(f"reap {self.pid}")
        os.close(self._fd)
        return self.code


class World:
    """Spawner, heartbeat table, listener and clock at once: all write one story."""

    def __init__(self, count: int, **config: int) -> None:
        self.story: list[str] = []
        self.reports: list[ExitReport] = []
        self.failures: list[str] = []
        self.processes: dict[int, FakeProcess] = {}
        self.now_s = 1_000.0
        self.tick_s = 0.0
        self.spawn_error = ""
        self.preload_error = ""
        self.out_of_memory: set[int] = set()
        self.rows: list[object] = ["empty"] * count
        limits: dict[str, Any] = {"executor_restart_delay_ms": 1_000, **config}
        self.pool = ExecutorPool(
            WorkerConfig(**limits),
            self,
            launches(count),
            self,
            self,
            heartbeat_fd=7,
            clock=self.clock,
            was_out_of_memory=lambda slot_index: slot_index in self.out_of_memory,
        )

    def clock(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def spawn(self, launch: ExecutorLaunch, heartbeat_fd: int | None) -> FakeProcess:
        assert heartbeat_fd == 7
        if self.spawn_error:
            raise SpawnError(self.spawn_error)
        process = FakeProcess(101 + len(self.processes), self)
        self.processes[process.pid] = process
        self.story.append(f"spawn {launch.executor_id} {process.pid}")
        return process

    def check_preload(self) -> None:
        if self.preload_error:
            raise SpawnError(self.preload_error)

    def stop(self) -> None:
        self.story.append("fork server stopped")

    def scheduler(self, slot_index: int, /) -> object:
        return self.rows[slot_index]

    def next_epoch(self, slot_index: int, /) -> int:
        self.rows[slot_index] = "empty"
        self.story.append(f"clear row {slot_index}")
        return 1

    def executor_spawned(self, executor_id: str, pid: int) -> None:
        self.story.append(f"told of {executor_id} {pid}")

    def executor_exited(self, report: ExitReport) -> None:
        self.reports.append(report)
        self.story.append(f"told the end of {report.executor_id} {report.pid}")

    def pool_failed(self, message: str) -> None:
        self.failures.append(message)

    def turn(self, *, later_ms: int = 0) -> list[str]:
        """Time passes, one turn; what happened in it."""
        self.story.clear()
        self.now_s += later_ms / 1_000
        self.pool.turn(0)
        return list(self.story)


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(count: int = 1, **config: int) -> World:
        worlds.append(World(count, **config))
        return worlds[-1]

    yield make
    for world in worlds:
        world.pool.stop(0)


MakeWorld = Callable[..., World]


def started(world: World) -> World:
    """All executors attached."""
    world.pool.start()
    for executor_id, pid in world.pool.pids().items():
        world.pool.attached(executor_id, pid)
    world.turn()
    return world


def report(**changes: Any) -> ExitReport:
    fields: dict[str, Any] = {
        "executor_id": "exec-0",
        "pid": 101,
        "exit_code": 1,
        "cause": ExitCause.LOST,
        "killed_by_us": None,
        "out_of_memory": False,
        "attached": True,
        "last_scheduler": "empty",
    }
    return ExitReport(**{**fields, **changes})


def test_the_start_clears_each_row_before_its_process_and_tells_its_pid(
    make_world: MakeWorld,
) -> None:
    world = make_world(2)
    world.pool.start()
    assert world.story == [
        "clear row 0",
        "spawn exec-0 101",
        "told of exec-0 101",
        "clear row 1",
        "spawn exec-1 102",
        "told of exec-1 102",
    ]
    assert world.pool.pids() == {"exec-0": 101, "exec-1": 102}


def test_a_lost_executor_is_reaped_told_with_its_last_row_and_replaced_after_the_delay(
    make_world: MakeWorld,
) -> None:
    world = started(make_world())
    world.rows[0] = "call 17 runs"
    world.processes[101].die(-signal.SIGSEGV)
    assert world.turn() == ["reap 101", "told the end of exec-0 101"]
    assert world.reports == [report(exit_code=-11, last_scheduler="call 17 runs")]
    assert world.turn(later_ms=999) == []
    assert world.turn(later_ms=1) == ["clear row 0", "spawn exec-0 102", "told of exec-0 102"]
    counts = world.pool.counts()
    assert (counts.restarts, counts.lost) == (1, Counter({"signal SIGSEGV": 1}))


def test_a_death_at_the_limit_of_the_control_group_is_told_as_such_unless_we_killed(
    make_world: MakeWorld,
) -> None:
    world = started(make_world())
    world.out_of_memory = {0}
    world.processes[101].die(-signal.SIGKILL)
    world.turn()
    world.turn(later_ms=1_000)
    world.pool.kill("exec-0", 102, "wedged")
    world.turn()
    world.turn()
    assert [told.out_of_memory for told in world.reports] == [True, False]
    assert world.pool.counts().lost == Counter({"out of memory": 1})


def test_a_killed_executor_is_reaped_before_anyone_is_told_and_replaced_at_once(
    make_world: MakeWorld,
) -> None:
    world = started(make_world())
    world.pool.kill("exec-0", 101, "wedged")
    world.pool.kill("exec-0", 101, "wedged again")
    assert world.turn() == ["SIGKILL 101"]
    assert world.turn() == [
        "reap 101",
        "told the end of exec-0 101",
        "clear row 0",
        "spawn exec-0 102",
        "told of exec-0 102",
    ]
    assert world.reports == [report(exit_code=-9, cause=ExitCause.KILLED, killed_by_us="wedged")]
    assert world.pool.counts().killed == Counter({"wedged": 1})


def test_a_kill_or_recycle_of_an_older_process_does_not_touch_the_new_one(
    make_world: MakeWorld,
) -> None:
    world = started(make_world(executor_restart_delay_ms=0))
    world.processes[101].die(1)
    world.turn()
    world.pool.kill("exec-0", 101, "wedged")
    world.pool.recycle("exec-0", 101)
    assert world.turn() == []
    assert world.pool.pids() == {"exec-0": 102}


def test_a_recycled_executor_is_asked_politely_and_then_killed(make_world: MakeWorld) -> None:
    world = started(make_world(2))
    world.processes[102].deaf = True
    world.pool.recycle("exec-0", reason="memory")
    world.pool.recycle("exec-1", 102, "memory")
    assert world.turn() == ["SIGTERM 101", "SIGTERM 102"]
    assert world.turn()[1:] == [
        "told the end of exec-0 101",
        "clear row 0",
        "spawn exec-0 103",
        "told of exec-0 103",
    ]
    assert world.turn(later_ms=RECYCLE_GRACE_MS) == ["SIGKILL 102"]
    assert world.turn()[-1] == "told of exec-1 104"
    assert world.reports == [
        report(exit_code=-15, cause=ExitCause.RECYCLED),
        report(executor_id="exec-1", pid=102, exit_code=-9, cause=ExitCause.RECYCLED),
    ]
    assert world.pool.counts().recycled == Counter({"memory": 2})
    assert world.pool.counts().lost == Counter()


def test_an_executor_that_does_not_attach_in_time_is_killed(make_world: MakeWorld) -> None:
    world = make_world(2)
    world.pool.start()
    world.pool.attached("exec-1", 102)
    assert world.turn(later_ms=ATTACH_TIMEOUT_MS) == ["SIGKILL 101"]
    world.turn()
    assert world.reports == [
        report(
            exit_code=-9,
            cause=ExitCause.KILLED,
            killed_by_us=f"did not connect within {ATTACH_TIMEOUT_MS} ms",
            attached=False,
        )
    ]


def test_an_attach_that_was_told_before_the_death_counts(make_world: MakeWorld) -> None:
    world = make_world()
    world.pool.start()
    world.pool.attached("exec-0", 101)
    world.processes[101].die(1)
    world.turn()
    assert world.reports == [report()]


def test_a_pool_whose_executors_never_attach_gives_up_with_a_clear_text(
    make_world: MakeWorld,
) -> None:
    world = make_world(executor_restart_delay_ms=0)
    world.pool.start()
    for life in range(BOOT_FAILURES_MAX):
        assert world.failures == []
        world.processes[101 + life].die(78)
        world.turn()
    assert len(world.failures) == 1
    assert "all 1 ended at least 3 times in a row before they could connect" in world.failures[0]
    assert "exec-0 with: exit code 78" in world.failures[0]
    world.turn(later_ms=60_000)
    assert len(world.failures) == 1
    assert not any("spawn" in line for line in world.story), "nothing is started any more"


def test_one_executor_that_works_keeps_the_pool_going(make_world: MakeWorld) -> None:
    world = make_world(2, executor_restart_delay_ms=0)
    world.pool.start()
    world.pool.attached("exec-1", 102)
    for _ in range(BOOT_FAILURES_MAX + 2):
        world.processes[world.pool.pids()["exec-0"]].die(78)
        world.turn()
    assert world.failures == []


def test_a_fork_server_that_cannot_start_executors_ends_the_run(make_world: MakeWorld) -> None:
    world = make_world()
    world.spawn_error = "no memory"
    world.pool.start()
    for _ in range(BOOT_FAILURES_MAX):
        world.turn(later_ms=1_000)
    assert len(world.failures) == 1
    assert "exec-0 with: no memory" in world.failures[0]
    assert world.pool.counts().start_failures == Counter({"no memory": BOOT_FAILURES_MAX})


def test_a_missing_preload_ends_the_run_at_its_start(make_world: MakeWorld) -> None:
    world = make_world()
    world.preload_error = "could not import blockx"
    world.pool.start()
    assert world.failures == ["executors cannot start: could not import blockx"]
    assert world.story[-1] == "SIGKILL 101"


def test_executors_that_end_too_often_wait_for_the_back_off(make_world: MakeWorld) -> None:
    world = started(make_world(executor_restart_delay_ms=0, executor_max_restarts=2))
    for pid in (101, 102, 103):
        world.pool.attached("exec-0", pid)
        world.processes[pid].die(1)
        world.turn()
    assert world.turn(later_ms=29_999) == []
    assert world.turn(later_ms=1)[-1] == "told of exec-0 104"


def test_the_stop_asks_waits_kills_reaps_and_ends_the_fork_server_last(
    make_world: MakeWorld,
) -> None:
    world = started(make_world(2))
    world.processes[102].deaf = True
    world.story.clear()
    world.tick_s = 0.01
    world.pool.stop(0.05)
    assert world.story == [
        "SIGTERM 101",
        "SIGTERM 102",
        "reap 101",
        "told the end of exec-0 101",
        "SIGKILL 102",
        "reap 102",
        "told the end of exec-1 102",
        "fork server stopped",
    ]
    assert {report.cause for report in world.reports} == {ExitCause.STOPPED}
    counts = world.pool.counts()
    assert (counts.lost, counts.killed) == (Counter(), Counter())
    world.pool.stop(0)
    assert world.story[-2:] == ["told the end of exec-1 102", "fork server stopped"]


def test_reasons_of_kills_are_bounded_in_the_report(make_world: MakeWorld) -> None:
    world = started(make_world(executor_max_restarts=1_000))
    for number in range(101):
        pid = world.pool.pids()["exec-0"]
        world.pool.attached("exec-0", pid)
        world.pool.kill("exec-0", pid, f"reason {number}")
        world.turn()
        world.turn()
    killed = world.pool.counts().killed
    assert (len(killed), killed["other"]) == (101, 1)


def test_wishes_after_the_stop_are_dropped(make_world: MakeWorld) -> None:
    world = started(make_world())
    world.pool.stop(0)
    world.pool.kill("exec-0", 101, "late")
    world.pool.attached("exec-0", 101)
    world.pool.recycle("exec-0")
    world.pool.wake()
    assert world.story[-1] == "fork server stopped"


def test_a_wish_of_another_thread_ends_the_wait_of_a_turn(make_world: MakeWorld) -> None:
    world = started(make_world())
    turn = threading.Thread(target=world.pool.turn, args=(600,))
    turn.start()
    world.pool.kill("exec-0", 101, "wedged")
    turn.join(20)
    assert not turn.is_alive()
    assert world.story[-1] == "SIGKILL 101"


# Real processes.


class Listener:
    """Remembers; ``alive_when_told`` are the ended processes that were not dead when it heard."""

    def __init__(self, processes: Any) -> None:
        self.spawned: list[tuple[str, int]] = []
        self.reports: list[ExitReport] = []
        self.failures: list[str] = []
        self.alive_when_told: list[int] = []
        self._processes = processes

    def executor_spawned(self, executor_id: str, pid: int) -> None:
        self.spawned.append((executor_id, pid))

    def executor_exited(self, report: ExitReport) -> None:
        self.reports.append(report)
        if self._processes.is_alive(report.pid):
            self.alive_when_told.append(report.pid)

    def pool_failed(self, message: str) -> None:
        self.failures.append(message)


@contextlib.contextmanager
def running(
    spawner: Spawner, starts: Sequence[ExecutorLaunch], listener: Listener
) -> Iterator[ExecutorPool]:
    config = WorkerConfig(executor_restart_delay_ms=10)
    pool = ExecutorPool(config, spawner, starts, None, listener)
    pool.start()
    try:
        yield pool
    finally:
        pool.stop(0)


def turn_until(pool: ExecutorPool, condition: Callable[[], object]) -> None:
    for _ in range(3_000):
        if condition():
            return
        pool.turn(0.01)
    raise AssertionError("waited in vain")


@pytest.mark.slow
def test_a_real_executor_killed_from_outside_is_replaced_and_its_child_is_dead(
    make_spawner: Any, bench: Any, processes: Any
) -> None:
    listener = Listener(processes)
    with running(make_spawner(), [bench.launch()], listener) as pool:
        peer = bench.accept()
        pool.attached("exec-0", peer.pid)
        child = int(peer.ask("child"))
        os.kill(peer.pid, signal.SIGKILL)
        turn_until(pool, lambda: len(listener.spawned) == 2)
        second = bench.accept()
        assert listener.spawned == [("exec-0", peer.pid), ("exec-0", second.pid)]
        assert [(end.exit_code, end.cause) for end in listener.reports] == [(-9, ExitCause.LOST)]
        processes.wait_until_dead(child)
    assert listener.alive_when_told == []
    assert not processes.is_alive(second.pid)


@pytest.mark.slow
def test_a_real_executor_that_is_killed_or_recycled_is_replaced(
    make_spawner: Any, bench: Any, processes: Any
) -> None:
    listener = Listener(processes)
    with running(make_spawner(), [bench.launch()], listener) as pool:
        first = bench.accept()
        pool.attached("exec-0", first.pid)
        pool.kill("exec-0", first.pid, "wedged")
        turn_until(pool, lambda: len(listener.spawned) == 2)
        second = bench.accept()
        pool.attached("exec-0", second.pid)
        pool.recycle("exec-0", second.pid, "memory")
        turn_until(pool, lambda: len(listener.spawned) == 3)
        ends = [(end.exit_code, end.cause, end.killed_by_us) for end in listener.reports]
        assert ends == [
            (-signal.SIGKILL, ExitCause.KILLED, "wedged"),
            (-signal.SIGTERM, ExitCause.RECYCLED, None),
        ]
    assert listener.alive_when_told == []


@pytest.mark.slow
def test_the_death_of_the_fork_server_does_not_stop_the_pool(
    make_spawner: Any, bench: Any, processes: Any
) -> None:
    listener = Listener(processes)
    with running(make_spawner(), [bench.launch(0), bench.launch(1)], listener) as pool:
        peers = {peer.facts["executor_id"]: peer for peer in (bench.accept(), bench.accept())}
        for executor_id, peer in peers.items():
            pool.attached(executor_id, peer.pid)
        processes.kill_server()
        pool.turn(0)
        assert listener.reports == [], "children of the dead fork server live"
        pool.kill("exec-0", peers["exec-0"].pid, "silent")
        turn_until(pool, lambda: len(listener.spawned) == 3)
        end = listener.reports[0]
        assert (end.exit_code, end.killed_by_us) == (None, "silent")
        replacement = bench.accept()
        pool.attached("exec-0", replacement.pid)
        os.kill(replacement.pid, signal.SIGSEGV)
        turn_until(pool, lambda: len(listener.reports) == 2)
        assert listener.reports[1].exit_code == -signal.SIGSEGV


@pytest.mark.slow
def test_executors_that_fail_at_once_end_the_run(
    make_spawner: Any, bench: Any, processes: Any
) -> None:
    listener = Listener(processes)
    with running(make_spawner("fail"), [bench.launch(0), bench.launch(1)], listener) as pool:
        turn_until(pool, lambda: listener.failures)
    assert "all 2 ended at least 3 times" in listener.failures[0]
    assert "with: exit code 9" in listener.failures[0]


@pytest.mark.slow
def test_the_stop_leaves_nothing_even_of_executors_that_ignore_it(
    make_spawner: Any, bench: Any, processes: Any, socket_folder: Path
) -> None:
    files, descriptors = set(socket_folder.iterdir()), processes.open_descriptors()
    listener = Listener(processes)
    pool = ExecutorPool(
        WorkerConfig(), make_spawner(), [bench.launch(0), bench.launch(1)], None, listener
    )
    pool.start()
    with contextlib.ExitStack() as stack:
        peers = [bench.accept(), bench.accept()]
        for peer in peers:
            stack.callback(peer.close)
        assert peers[0].ask(f"ignore {signal.SIGTERM.value}") == "ignored"
        child = int(peers[0].ask("child"))
        pids = [peer.pid for peer in peers]
        pids += [child, processes.server_pid(), processes.tracker_pid()]
        pool.stop(0.05)
    processes.wait_until_dead(child)
    assert [processes.is_alive(pid) for pid in pids] == [False] * len(pids)
    codes = {report.pid: report.exit_code for report in listener.reports}
    assert codes == {peers[0].pid: -signal.SIGKILL, peers[1].pid: -signal.SIGTERM}
    assert {report.cause for report in listener.reports} == {ExitCause.STOPPED}
    assert set(socket_folder.iterdir()) == files
    assert processes.open_descriptors() == descriptors
