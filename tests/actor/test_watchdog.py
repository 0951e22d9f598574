"""The 500 ms tick: who is killed, for what, and who is not."""

import os
from dataclasses import dataclass, field

import pytest

from blockx.actor.watchdog import Watchdog
from blockx.dispatcher.model import ExecutorSnapshot
from blockx.errors import ErrorKind

STALL_MS, SILENCE_MS = 10_000, 15_000


@dataclass
class Executor:
    executor_id: str = "exec-0"
    pid: int = 1
    work_pid: int = os.getpid()
    lost_because: str = ""


@dataclass
class Adapter:
    """One executor in whatever state a test wants."""

    idle_ms: int = 0
    running: int = 0
    silence_ms: int = 0
    overdue_ms: int | None = None
    executor: Executor = field(default_factory=Executor)
    killed: list = field(default_factory=list)

    def snapshots(self):
        return [
            ExecutorSnapshot(
                executor_id="exec-0",
                incarnation_id="aa",
                healthy=True,
                usable_contexts=1,
                runnable_count=0,
                memory_bytes=0,
                heartbeat_seq=1,
                running_call_seq=self.running,
                scheduler_idle_ms=self.idle_ms,
            )
        ]

    def attached_executors(self):
        return [self.executor]

    def silent_ms(self, _executor):
        return self.silence_ms

    def press_cancellations(self):
        return [] if self.overdue_ms is None else [(self.executor, self.overdue_ms)]

    def drop_parked(self):
        pass

    def kill(self, executor, reason, kind):
        executor.lost_because = reason
        self.killed.append(kind)


def kills(adapter, *, ticks=1, stall_ms=STALL_MS):
    watchdog = Watchdog(adapter, stall_timeout_ms=stall_ms, heartbeat_timeout_ms=SILENCE_MS)
    for _ in range(ticks):
        watchdog.tick()
    return adapter.killed


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (Adapter(), []),
        (Adapter(running=7, idle_ms=STALL_MS), []),
        (Adapter(running=7, idle_ms=STALL_MS + 1), [ErrorKind.EXECUTOR_WEDGED]),
        (Adapter(running=0, idle_ms=STALL_MS + 1), []),
        (Adapter(overdue_ms=999), []),
        (Adapter(overdue_ms=1_000), [ErrorKind.EXECUTOR_LOST]),
    ],
)
def test_one_look(state, expected):
    assert kills(state) == expected


def test_without_a_stall_time_a_computing_call_is_never_wedged():
    assert kills(Adapter(running=7, idle_ms=10**9), stall_ms=0) == []


def test_an_executor_is_killed_once_however_often_it_is_looked_at():
    assert kills(Adapter(running=7, idle_ms=STALL_MS + 1), ticks=5) == [ErrorKind.EXECUTOR_WEDGED]


def test_a_silent_executor_that_uses_no_cpu_is_lost_at_the_second_look():
    gone = Adapter(silence_ms=SILENCE_MS + 1, executor=Executor(work_pid=2**22 + 1))
    assert kills(gone, ticks=1) == []
    assert kills(gone, ticks=2) == [ErrorKind.EXECUTOR_LOST]


def test_a_silent_executor_that_computes_is_alive():
    adapter = Adapter(silence_ms=SILENCE_MS + 1)
    watchdog = Watchdog(adapter, stall_timeout_ms=STALL_MS, heartbeat_timeout_ms=SILENCE_MS)
    for _ in range(3):
        watchdog.tick()
        before = os.times().user
        while os.times().user - before < 0.03:  # this process is the executor: it uses CPU
            pass
    assert adapter.killed == []
