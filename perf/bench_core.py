"""What does a call cost in the dispatcher's core alone: submit, bind, complete, converge?

    python -m perf.bench_core [--calls 100000] [--reps 3] [--group 32] [--growth] [--level] [--profile]

One thread, no sockets and no executors: a loop does what the orchestrator does around the core. It
streams calls by credit (two stream batches on their way), answers every ``BindCall`` with ``CallBound``,
completes the oldest attempts in groups (as many terminal frames as one turn of the real loop finds),
and feeds snapshots every 400 calls. What it costs to make the specs, events and snapshots is included.

The table has a row for each number of executors and tasks; an *event* is one ``handle``. Each row holds as
many calls that have not ended as its tasks have in two stream batches, and a call costs 1.5 us more beside
10,000 of them than beside 1,000 (they no longer fit into the processor's cache), of however many tasks they
are. ``--growth`` therefore holds the calls a task and the rows a batch equal: what is left is the price of a
task. ``--level`` runs 1,000 to 1,000,000 calls through one shape and prints time and memory, which must not grow.
``--profile`` says where the time goes, function by function (under the profiler all is slower).
"""

import argparse
import cProfile
import gc
import platform
import pstats
import random
import statistics
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from perf.harness import code

sys.path.insert(0, str(code()))

from blockx.config import DispatcherConfig
from blockx.dispatcher.commands import BindCall, Command, FinishTask, ReturnCredit, StartAttempt
from blockx.dispatcher.core import DispatcherCore
from blockx.dispatcher.events import (
    AttemptCompleted,
    CallBound,
    Event,
    ProductionEnded,
    SnapshotUpdated,
    StreamBatchSubmitted,
    StreamOpened,
)
from blockx.dispatcher.model import CallSpec, Costs, ExecutorSnapshot, FunctionRef, TaskSpec

EXECUTORS = (1, 8, 64)
TASKS = (1, 10, 1_000)
LEVEL_CALLS = (1_000, 10_000, 100_000, 1_000_000)
BATCH_ROWS = 512
GROWTH_CALLS = 100
GROWTH_ROWS = 16
"""A batch of ``--growth``: 32 tasks, as many as take part at once, hold as many calls as one with 512."""
SNAPSHOT_CALLS = 400
"""At 80,000 calls/s the orchestrator's 5 ms between two snapshots."""
FUNCTION = FunctionRef("f", "d" * 64, "_")


@dataclass
class Measure:
    """One run: how long, how many events, and the memory at its highest and at its end."""

    calls: int
    seconds: float
    events: int
    peak_bytes: int = 0
    left_bytes: int = 0

    @property
    def call_us(self) -> float:
        return self.seconds * 1e6 / self.calls

    @property
    def events_per_s(self) -> float:
        return self.events / self.seconds


class Driver:
    """The least loop around a core that lets calls flow; see the module's docstring."""

    def __init__(
        self, executors: int, tasks: int, calls: int, group: int, rows: int = BATCH_ROWS
    ) -> None:
        config = DispatcherConfig(call_cache_max_bytes=1 << 20)
        self.core = DispatcherCore(
            config, stall_timeout_ms=10_000, rng=random.Random(1), task_slots=32
        )
        self.executors = executors
        self.group = group
        self.rows = rows
        self.events = 0
        self.finished = 0
        self.started: deque[StartAttempt] = deque()
        self.running = [0] * executors
        self.left = {f"j{n}@1": calls // tasks + (n < calls % tasks) for n in range(tasks)}
        self.made = dict.fromkeys(self.left, 0)
        self.batch_id = 0
        self.seq = 0

    def run(self) -> int:
        """All calls to their end; the number of events."""
        tasks = len(self.left)
        self.open_all()
        self.settle()
        done = 0
        while self.finished < tasks:
            started = self.started
            for _ in range(min(self.group, len(started))):
                start = started.popleft()
                self.post(AttemptCompleted(start.call_id, start.attempt_seq, b"1", Costs(), 0))
                done += 1
                if done % SNAPSHOT_CALLS == 0:
                    self.snapshots()
            self.settle()
        return self.events

    def open_all(self) -> None:
        """Open every task and produce its first calls."""
        for task_id in list(self.left):
            job = task_id.partition("@")[0]
            self.post(StreamOpened(TaskSpec(task_id=task_id, job_name=job, instance_id=job), 0))
            for _ in range(2):
                self.produce(task_id)
        self.snapshots()

    def post(self, event: Event) -> None:
        self.events += 1
        self.perform(self.core.handle(event))

    def settle(self) -> None:
        core = self.core
        while True:
            admitted = core.dispatch(0)
            self.perform(admitted)
            converged = core.flush()
            self.perform(converged)
            if not (admitted or converged):
                return

    def perform(self, commands: Iterable[Command]) -> None:
        for command in commands:
            kind = type(command)
            if kind is BindCall:
                self.post(CallBound(command.call_id, command.attempt_seq, command.executor_id))
            elif kind is StartAttempt:
                self.started.append(command)
            elif kind is ReturnCredit:
                self.produce(command.task_id)
            elif kind is FinishTask:
                self.finished += 1

    def produce(self, task_id: str) -> None:
        """One more stream batch, or the end of production."""
        left = self.left.get(task_id)
        if left is None:
            return
        if left == 0:
            del self.left[task_id]
            self.post(ProductionEnded(task_id))
            return
        rows = min(left, self.rows)
        first = self.made[task_id]
        specs = [
            CallSpec(n, FUNCTION, b"[%d]" % n, b"key:%d" % n) for n in range(first, first + rows)
        ]
        self.made[task_id] = first + rows
        self.left[task_id] = left - rows
        self.batch_id += 1
        self.post(StreamBatchSubmitted(task_id, self.batch_id, specs, 0))

    def snapshots(self) -> None:
        self.seq += 1
        found = [
            ExecutorSnapshot(
                executor_id=f"exec-{n}",
                incarnation_id="p1",
                healthy=True,
                usable_contexts=128,
                runnable_count=self.seq % 3,
                memory_bytes=0,
                heartbeat_seq=self.seq,
                running_call_seq=0,
                scheduler_idle_ms=0,
            )
            for n in range(self.executors)
        ]
        self.post(SnapshotUpdated(found, 0))


def measure(
    executors: int,
    tasks: int,
    calls: int,
    group: int,
    *,
    rows: int = BATCH_ROWS,
    memory: bool = False,
) -> Measure:
    """One run, the collector stopped as far as it was; ``memory``: traced, and therefore slower."""
    driver = Driver(executors, tasks, calls, group, rows)
    gc.collect()
    if memory:
        tracemalloc.start()
    began = time.thread_time()
    events = driver.run()
    seconds = time.thread_time() - began
    found = Measure(calls, seconds, events)
    if memory:
        found.peak_bytes = tracemalloc.get_traced_memory()[1]
        gc.collect()
        found.left_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    return found


def print_matrix(calls: int, reps: int, group: int) -> None:
    print("| executors | tasks | us a call | range | events/s |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for executors in EXECUTORS:
        for tasks in TASKS:
            found = [measure(executors, tasks, calls, group) for _ in range(reps)]
            times = sorted(m.call_us for m in found)
            rate = statistics.median(m.events_per_s for m in found)
            print(
                f"| {executors} | {tasks} | {statistics.median(times):.1f} "
                f"| {times[0]:.1f}-{times[-1]:.1f} | {rate:,.0f} |",
                flush=True,
            )


def growth(reps: int, group: int) -> dict[int, float]:
    """Microseconds a call by number of tasks, each of which has ``GROWTH_CALLS``; they take turns."""
    found: dict[int, list[float]] = {tasks: [] for tasks in TASKS}
    for _ in range(reps):
        for tasks, costs in found.items():
            calls = GROWTH_CALLS * tasks
            runs = max(1, min(100, 100_000 // calls))
            costs.append(
                statistics.median(
                    measure(8, tasks, calls, group, rows=GROWTH_ROWS).call_us for _ in range(runs)
                )
            )
    return {tasks: statistics.median(costs) for tasks, costs in found.items()}


def print_growth(reps: int, group: int) -> None:
    print(f"| tasks of {GROWTH_CALLS} calls (8 executors) | us a call |")
    print("| ---: | ---: |")
    for tasks, call_us in growth(reps, group).items():
        print(f"| {tasks:,} | {call_us:.1f} |")


def print_level(group: int) -> None:
    print("| tasks (8 executors) | calls | us a call | peak MiB | left KiB |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for tasks in (1, 10):
        for calls in LEVEL_CALLS:
            reps = max(1, min(20, 200_000 // calls))
            timed = statistics.median(measure(8, tasks, calls, group).call_us for _ in range(reps))
            traced = measure(8, tasks, calls, group, memory=True)
            print(
                f"| {tasks} | {calls:,} | {timed:.1f} | {traced.peak_bytes / 2**20:.1f} "
                f"| {traced.left_bytes / 2**10:.0f} |",
                flush=True,
            )


def print_profile(calls: int, group: int) -> None:
    driver = Driver(8, 10, calls, group)
    profile = cProfile.Profile()
    profile.runcall(driver.run)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--group", type=int, default=32, help="terminal frames a turn")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--level", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}\n")
    if options.profile:
        print_profile(options.calls, options.group)
    elif options.growth:
        print_growth(options.reps, options.group)
    elif options.level:
        print_level(options.group)
    else:
        print_matrix(options.calls, options.reps, options.group)


if __name__ == "__main__":
    main()
