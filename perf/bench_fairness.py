"""What do tenants get from each other, with ``instance_fairness`` off, calls and cost?

    python -m perf.bench_fairness [--scale 1.0] [--places 16]

The real core drives two simulated executors of one thread each: a call waits in its executor's queue, then
computes for its length. Time is simulated, so the numbers depend on nothing but the code and are the same on every
machine. One tenant has 100,000 calls of 1 ms, one has 100 of 200 ms, both from the start; eight small
ones come one a second with 20 calls of 5 ms each.

The share of a tenant is its part of the computing time while both big ones have work; the wait of a small
one is the time from its arrival to its last result (alone on the machine: 50 ms).
"""

import argparse
import heapq
import random
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from blockx.config import DispatcherConfig
from blockx.dispatcher.commands import BindCall, Command, FinishTask, StartAttempt
from blockx.dispatcher.core import DispatcherCore
from blockx.dispatcher.events import (
    AttemptCompleted,
    CallBound,
    CallsSubmitted,
    Event,
    SnapshotUpdated,
)
from blockx.dispatcher.model import CallSpec, Costs, ExecutorSnapshot, FunctionRef, TaskSpec

EXECUTORS = 2
SMALL_TENANTS = 8
FUNCTION = FunctionRef("f", "d" * 64, "_")
Mode = Literal["off", "calls", "cost"]
MODES: tuple[Mode, ...] = ("off", "calls", "cost")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks for how much, and when."""

    name: str
    calls: int
    call_us: int
    arrival_us: int = 0


@dataclass(slots=True)
class Executor:
    """One thread: computes its queue in order."""

    executor_id: str
    queue: deque[StartAttempt] = field(default_factory=deque)


def tenants(scale: float) -> list[Tenant]:
    small = [Tenant(f"small-{n}", 20, 5_000, 1_000_000 * (n + 1) + 1) for n in range(SMALL_TENANTS)]
    return [
        Tenant("short", round(100_000 * scale), 1_000),
        Tenant("long", round(100 * scale), 200_000),
        *small,
    ]


class Machine:
    """The core, its executors, and a heap of moments."""

    def __init__(self, mode: Mode, places: int, who: list[Tenant]) -> None:
        config = DispatcherConfig(instance_fairness=mode, executor_max_inflight=places)
        self.core = DispatcherCore(config, stall_timeout_ms=0, rng=random.Random(1))
        self.places = places
        self.tenants = {tenant.name: tenant for tenant in who}
        self.executors = {f"exec-{n}": Executor(f"exec-{n}") for n in range(EXECUTORS)}
        self.now_us = 0
        self.seq = 0
        self.moments: list[tuple[int, int, Tenant | Executor]] = []
        self.used_us = dict.fromkeys(self.tenants, 0)
        self.used_at_end: dict[str, dict[str, int]] = {}
        self.ended_us: dict[str, int] = {}

    def run(self) -> None:
        self.snapshots()
        for tenant in self.tenants.values():
            self.at(tenant.arrival_us, tenant)
        while self.moments:
            self.now_us, _, what = heapq.heappop(self.moments)
            if isinstance(what, Tenant):
                self.submit(what)
            else:
                self.complete(what)
            self.snapshots()
            self.settle()

    def at(self, moment_us: int, what: Tenant | Executor) -> None:
        self.seq += 1
        heapq.heappush(self.moments, (moment_us, self.seq, what))

    def submit(self, tenant: Tenant) -> None:
        task = TaskSpec(task_id=f"{tenant.name}@1", job_name=tenant.name, instance_id=tenant.name)
        calls = [CallSpec(n, FUNCTION, b"[%d]" % n, b"%d" % n) for n in range(tenant.calls)]
        self.post(CallsSubmitted(task, calls, self.now_us // 1_000))

    def complete(self, executor: Executor) -> None:
        start = executor.queue.popleft()
        name = start.task_id.partition("@")[0]
        cost_us = self.tenants[name].call_us
        self.used_us[name] += cost_us
        if executor.queue:
            self.compute(executor)
        costs = Costs(cpu_us=cost_us)
        now_ms = self.now_us // 1_000
        self.post(AttemptCompleted(start.call_id, start.attempt_seq, b"1", costs, now_ms))

    def compute(self, executor: Executor) -> None:
        name = executor.queue[0].task_id.partition("@")[0]
        self.at(self.now_us + self.tenants[name].call_us, executor)

    def snapshots(self) -> None:
        self.seq += 1
        found = [
            ExecutorSnapshot(
                executor_id=executor.executor_id,
                incarnation_id="p1",
                healthy=True,
                usable_contexts=self.places,
                runnable_count=len(executor.queue),
                memory_bytes=0,
                heartbeat_seq=self.seq,
                running_call_seq=0,
                scheduler_idle_ms=0,
            )
            for executor in self.executors.values()
        ]
        self.post(SnapshotUpdated(found, self.now_us // 1_000))

    def post(self, event: Event) -> None:
        self.perform(self.core.handle(event))

    def settle(self) -> None:
        while True:
            admitted = self.core.dispatch(self.now_us // 1_000)
            self.perform(admitted)
            converged = self.core.flush()
            self.perform(converged)
            if not (admitted or converged):
                return

    def perform(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, BindCall):
                self.post(CallBound(command.call_id, command.attempt_seq, command.executor_id))
            elif isinstance(command, StartAttempt):
                executor = self.executors[command.executor_id]
                executor.queue.append(command)
                if len(executor.queue) == 1:
                    self.compute(executor)
            elif isinstance(command, FinishTask):
                name = command.task_id.partition("@")[0]
                self.ended_us[name] = self.now_us
                self.used_at_end[name] = dict(self.used_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--places", type=int, default=16, help="executor_max_inflight")
    options = parser.parse_args()
    print(f"{EXECUTORS} executors with {options.places} places; simulated time\n")
    print("| fairness | share short | long | small | small waits, median | worst | long ends |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for mode in MODES:
        who = tenants(options.scale)
        machine = Machine(mode, options.places, who)
        machine.run()
        first = min(("short", "long"), key=lambda name, m=machine: m.ended_us[name])
        used = machine.used_at_end[first]
        total = sum(used.values())
        small = [t for t in who if t.name.startswith("small")]
        waits = [(machine.ended_us[t.name] - t.arrival_us) / 1_000 for t in small]
        shares = (used["short"], used["long"], sum(used[t.name] for t in small))
        cells = " | ".join(f"{100 * share / total:.0f} %" for share in shares)
        print(
            f"| {mode} | {cells} | {statistics.median(waits):,.0f} ms | {max(waits):,.0f} ms "
            f"| {machine.ended_us['long'] / 1e6:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
