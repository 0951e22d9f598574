"""The 100 ms look at memory: who is killed, who is charged for it, who is replaced, and who is not."""

from dataclasses import dataclass, field

import pytest

from blockx.actor.memory_guard import COLLECT_MS, LIFE_MS_MIN, MemoryGuard, MemoryLimits

MIB = 1024 * 1024
LIMITS = MemoryLimits(limit_bytes=1_000 * MIB, recycle_bytes=700 * MIB, recycle_calls=50)


WORK = 1_000
"""From the pid of an executor to that of the process in which its calls run."""


@dataclass(eq=False)
class Executor:
    executor_id: str
    pid: int
    attached_ms: int = 0
    is_retiring: bool = False
    is_full: bool = False

    @property
    def incarnation_id(self):
        return f"{self.executor_id}/{self.pid}"

    @property
    def work_pid(self):
        return self.pid + WORK


@dataclass
class Row:
    running_call_seq: int = 7
    rss_at_step_start: int = 100 * MIB
    finished_calls: int = 1
    attached: int = 1


@dataclass
class World:
    """Two executors, their sizes in MiB, and what the guard asks for."""

    sizes: dict = field(default_factory=lambda: {1: 100, 2: 100})
    free: int = 4_000
    now_ms: int = LIFE_MS_MIN
    rows: dict = field(default_factory=lambda: {1: Row(), 2: Row()})
    total_bytes: int = 8_000 * MIB
    asked: list = field(default_factory=list)

    def __post_init__(self):
        self.executors = [Executor("exec-0", 1), Executor("exec-1", 2)]
        self.guard = MemoryGuard(self, self, LIMITS, lambda: self.now_ms)

    def available_bytes(self):
        return self.free * MIB

    def resident_bytes(self, pid):
        return self.sizes[pid - WORK] * MIB

    def attached_executors(self):
        return self.executors

    def row_sample(self, executor):
        return self.rows[executor.pid]

    def retire(self, executor, reason):
        executor.is_retiring = True
        self.asked.append((executor.executor_id, reason))

    def kill_for_memory(self, executor, reason, blamed_call_seq):
        executor.is_retiring = True
        self.asked.append((executor.executor_id, reason, blamed_call_seq))

    def look(self, **changes):
        for name, value in changes.items():
            setattr(self, name, value)
        self.guard.tick()
        asked, self.asked = self.asked, []
        return asked


def test_small_executors_are_left_alone():
    assert World().look() == []


@pytest.mark.parametrize(
    ("row", "blamed"),
    [
        (Row(rss_at_step_start=750 * MIB), 7),  # it grew by a quarter of the limit
        (Row(rss_at_step_start=751 * MIB), 0),  # by less: others had filled it
        (Row(rss_at_step_start=0), 0),  # nobody knows
        (Row(running_call_seq=0), 0),  # nothing runs
        (None, 0),
    ],
)
def test_an_executor_over_its_limit_is_killed_and_the_call_that_filled_it_is_charged(row, blamed):
    world = World(rows={1: row, 2: Row()})
    text = "it used 1000 MiB of memory, its limit is 1000 MiB (worker.executor_memory_limit_bytes)"
    assert world.look(sizes={1: 1_000, 2: 999}) == [("exec-0", text, blamed)]
    assert world.look() == [], "once"


def test_the_largest_goes_when_the_machine_is_nearly_out_of_memory():
    text = "the machine was nearly out of memory, and it used the most, 300 MiB"
    assert World(sizes={1: 200, 2: 300}).look(free=159) == [("exec-1", text, 0)]
    assert World(sizes={1: 200, 2: 300}).look(free=160) == []
    assert World(sizes={1: 100, 2: 127}).look(free=1) == [], "others fill the machine"


def test_one_over_its_mark_gets_no_calls_then_time_to_collect_then_a_successor():
    world = World(sizes={1: 700, 2: 699})
    first, second = world.executors
    assert world.look() == []
    assert (first.is_full, second.is_full) == (True, False)
    assert world.look(now_ms=world.now_ms + COLLECT_MS - 1) == []
    reason = "its memory had grown over the recycle mark"
    assert world.look(now_ms=world.now_ms + 1) == [("exec-0", reason)]


def test_one_that_collected_enough_gets_calls_again():
    world = World(sizes={1: 700, 2: 100})
    world.look()
    world.look(sizes={1: 631, 2: 100})
    assert world.executors[0].is_full, "not far enough below its mark"
    world.look(sizes={1: 629, 2: 100})
    assert not world.executors[0].is_full
    assert world.look(now_ms=world.now_ms + COLLECT_MS) == []


def test_a_young_one_is_not_replaced_for_its_memory():
    world = World(sizes={1: 900, 2: 900}, now_ms=LIFE_MS_MIN - 1)
    assert world.look() == []
    assert not world.executors[0].is_full


def test_after_its_number_of_calls_one_is_replaced_and_never_two_at_once():
    world = World(rows={1: Row(finished_calls=49), 2: Row(finished_calls=50)})
    reason = "it had run its number of calls"
    assert world.look() == [("exec-1", reason)]
    world.rows[1].finished_calls = 60
    assert world.look() == []
    world.executors.pop()
    assert world.look() == [("exec-0", reason)]


def test_one_that_wants_to_go_is_replaced():
    world = World(rows={1: Row(attached=0), 2: Row(attached=0, finished_calls=0)})
    assert world.look() == [("exec-0", "a call was cut inside a library")]


def test_nothing_is_remembered_of_executors_that_are_gone():
    world = World(sizes={1: 700, 2: 700})
    world.look()
    assert len(world.guard._over_since_ms) == 2
    world.executors.pop()
    world.look()
    assert len(world.guard._over_since_ms) == 1
