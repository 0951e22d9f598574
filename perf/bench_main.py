"""What does a no-op call cost in the main process: on the actor's thread, and on the jobs thread?

    python -m perf.bench_main [--calls 40000] [--reps 5] [--group 32] [--profile]

CPU time of one thread each, so that a busy machine disturbs it little; nothing else runs meanwhile.

actor  The real reactor, orchestrator, core and adapter over real sockets, turn by turn. The other ends are
       two executors of few lines in this process: between two turns, with the clock stopped, each reads
       its frames and answers ``--group`` of its calls. Calls come in stream batches by credit.
jobs   The real job runner with call list, journal, results file and reorder buffer. The dispatcher is a
       few lines that give each call its result at once (about 0.6 us a call, included).
"""

import argparse
import cProfile
import gc
import pstats
import random
import socket
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perf.harness import code

sys.path.insert(0, str(code()))

from blockx.actor.effects import OpenTask
from blockx.actor.memory_guard import MemoryGuard, MemoryLimits
from blockx.actor.orchestrator import Orchestrator
from blockx.actor.reactor import Reactor, monotonic_ms
from blockx.actor.watchdog import Watchdog
from blockx.app import GC_THRESHOLDS
from blockx.config import DispatcherConfig, load_config
from blockx.dispatcher.commands import EmitResult, FinishTask, JobCommand, ReturnCredit
from blockx.dispatcher.core import DispatcherCore
from blockx.dispatcher.events import ProductionEnded, StreamBatchSubmitted
from blockx.dispatcher.model import (
    CallCounts,
    CallResult,
    CallSpec,
    Costs,
    FunctionRef,
    TaskEnd,
    TaskSpec,
    Via,
)
from blockx.functions.view import FunctionView
from blockx.ipc.frames import FrameDecoder, encode_frame
from blockx.ipc.heartbeat import create_table_fd
from blockx.ipc.heartbeat_table import HeartbeatTable
from blockx.ipc.messages import (
    CallCompleted,
    CallCompletedPayload,
    ExecuteCall,
    Heartbeat,
    HeartbeatPayload,
    Raw,
    decode_main_message,
)
from blockx.jobs.report import JobProgress
from blockx.jobs.runner import JobRunner, JobTools
from blockx.observability import set_up_logging
from blockx.supervisor.memory import MachineMemory
from blockx.transport.adapter import ExecutorAdapter

BATCH_ROWS = 512
BATCHES_OUT = 8
OUTPUT = b'{"block":123,"ok":true}'
FUNCTION = FunctionRef("noop", "d" * 64, "_")
SOURCE = 'def _(p):\n    return {"block": p["block"], "ok": True}\n'
CONFIG = "jobs:\n  - {name: j, function: noop, calls: calls.jsonl, results: results.jsonl}\n"


class NoIo:
    """No call of this benchmark reads anything."""

    def submit_waiting(self, waiting: Sequence[Any]) -> None:
        assert not waiting

    def cancel(self, call_ids: Sequence[str]) -> None:
        assert not call_ids

    def task_ended(self, task_id: str) -> None:
        """Nothing was kept for it."""


class NoPool:
    """Executors of this benchmark are not processes of their own."""

    def kill(self, executor_id: str, pid: int, reason: str) -> None:
        raise AssertionError(f"{executor_id} would be killed: {reason}")

    def recycle(self, executor_id: str, pid: int, reason: str) -> None:
        raise AssertionError(f"{executor_id} would be replaced: {reason}")

    def attached(self, executor_id: str, pid: int) -> None:
        """As it should be."""


class SteppedReactor(Reactor):
    """A reactor whose turns are asked for one by one, so that what happens between them is not measured."""

    def run(self, on_item: Callable[[Any], None], on_turn_end: Callable[[], None]) -> None:
        self._on_item, self._on_turn_end = on_item, on_turn_end

    def step(self) -> None:
        self._turn(self._on_item)
        self._on_turn_end()


class Executor:
    """The other end of one socket: reads ``ExecuteCall``, answers ``CallCompleted``."""

    def __init__(self, executor_id: str, path: Path, pid: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._socket.setblocking(False)
        self._decoder = FrameDecoder()
        self._calls: deque[ExecuteCall] = deque()
        payload = HeartbeatPayload(
            executor_process_instance_id="p1", pid=pid, available_contexts=512
        )
        self._socket.send(encode_frame(Heartbeat(executor_id=executor_id, payload=payload)))

    def answer(self, count: int) -> None:
        """Take in what came, answer the oldest calls."""
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            data = b""
        for frame in self._decoder.feed(data):
            message = decode_main_message(frame.body)
            if isinstance(message, ExecuteCall):
                self._calls.append(message)
        frames = []
        for _ in range(min(count, len(self._calls))):
            call = self._calls.popleft()
            payload = CallCompletedPayload(
                attempt_seq=call.payload.attempt_seq,
                body_started=True,
                budget_used_ms=0.011,
                cpu_us=11,
                output=Raw(OUTPUT),
            )
            frames.append(encode_frame(CallCompleted(call_id=call.call_id, payload=payload)))
        if frames:
            self._socket.send(b"".join(frames))

    def close(self) -> None:
        self._socket.close()


class Actor:
    """The actor's side of a main process, turned by hand; it is its own job port."""

    def __init__(self, folder: Path, calls: int, executors: int) -> None:
        config = DispatcherConfig(task_max_inflight_calls=1_024)
        self.reactor = SteppedReactor()
        self._table = HeartbeatTable(create_table_fd(executors), executors)
        self.adapter = ExecutorAdapter(
            selector=self.reactor,
            pool=NoPool(),
            table=self._table,
            executor_max_inflight=config.executor_max_inflight,
            check_pid=False,
            now_ms=monotonic_ms,
        )
        core = DispatcherCore(config, stall_timeout_ms=10_000, rng=random.Random(1))
        memory = MachineMemory()
        limits = MemoryLimits(limit_bytes=1 << 40, recycle_bytes=1 << 40, recycle_calls=0)
        self.orchestrator = Orchestrator(
            reactor=self.reactor,
            core=core,
            adapter=self.adapter,
            io=NoIo(),
            watchdog=Watchdog(
                self.adapter, stall_timeout_ms=10_000, heartbeat_timeout_ms=1_000_000
            ),
            memory_guard=MemoryGuard(self.adapter, memory, limits, monotonic_ms),
        )
        self._specs = [
            CallSpec(n, FUNCTION, b'[{"block":%d}]' % n, b"d" * 64 + b'[{"block":%d}]' % n)
            for n in range(calls)
        ]
        self.orchestrator.run()  # only tells the reactor whom to call
        self.executors = []
        for n in range(executors):
            path = folder / f"{n}.sock"
            self.adapter.listen(f"exec-{n}", n, path)
            self.executors.append(Executor(f"exec-{n}", path, 0))
        self._next = self._batch_id = 0
        self.is_finished = False
        task = TaskSpec(task_id="j@1", job_name="j", instance_id="j")
        self.reactor.post(OpenTask(task, FunctionView(folder), self))
        for _ in range(BATCHES_OUT):
            self._produce()

    def _produce(self) -> None:
        calls = self._specs[self._next : self._next + BATCH_ROWS]
        self._next += len(calls)
        if calls:
            self._batch_id += 1
            self.reactor.post(StreamBatchSubmitted("j@1", self._batch_id, calls, 0))
            if self._next >= len(self._specs):
                self.reactor.post(ProductionEnded("j@1"))

    def deliver(self, commands: Sequence[JobCommand]) -> None:
        """JobPort."""
        for command in commands:
            if type(command) is ReturnCredit:
                self._produce()
            elif type(command) is FinishTask:
                assert command.calls.ok == len(self._specs)
                self.is_finished = True

    def reached(self, function_id: str, digest: str) -> None:
        """JobPort."""

    def close(self) -> None:
        for executor in self.executors:
            executor.close()
        self.adapter.close()
        self.reactor.close()
        self._table.close()


def measure_actor(calls: int, group: int, profile: cProfile.Profile | None) -> float:
    """Seconds of CPU of the actor's turns."""
    with tempfile.TemporaryDirectory() as name:
        actor = Actor(Path(name), calls, executors=2)
        try:
            turn: Callable[[], None] = actor.reactor.step
            if profile is not None:
                turn = lambda: profile.runcall(actor.reactor.step)  # noqa: E731
            spent = 0.0
            while not actor.is_finished:
                began = time.thread_time()
                turn()
                spent += time.thread_time() - began
                for executor in actor.executors:
                    executor.answer(group)
            return spent
        finally:
            actor.close()


class Dispatcher:
    """Gives each call its result as soon as it is submitted, and its batch's credit."""

    def __init__(self) -> None:
        self._port: Any = None
        self._count = 0

    def open(self, task: TaskSpec, view: FunctionView, port: Any) -> None:
        self._port = port

    def keep_pins(self, task_id: str, pins: Any, on_pins: Any) -> None:
        """Nothing is pinned."""

    def submit(self, task_id: str, batch_id: int, calls: list[CallSpec]) -> None:
        commands: list[JobCommand] = [
            EmitResult(
                task_id,
                CallResult(
                    call.index,
                    "j/0",
                    "noop",
                    OUTPUT,
                    None,
                    Via.RAN,
                    1,
                    0,
                    Costs(11),
                ),
            )
            for call in calls
        ]
        commands.append(ReturnCredit(task_id, batch_id))
        self._count += len(calls)
        self._port.deliver(commands)

    def end_production(self, task_id: str) -> None:
        n = self._count
        counts = CallCounts(calls=n, ok=n, ran=n, executed=n)
        self._port.deliver([FinishTask(task_id, TaskEnd.COMPLETED, None, counts, CallCounts())])

    def cancel(self, task_id: str, drain: bool) -> None:
        raise AssertionError("nothing is cancelled here")

    def remove(self, task_id: str) -> None:
        """Nothing is kept."""


def measure_jobs(calls: int, _group: int, profile: cProfile.Profile | None) -> float:
    """Seconds of CPU of the job runner."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "functions").mkdir()
        (folder / "functions" / "noop.py").write_text(SOURCE)
        lines = "".join(f'{{"args": [{{"block": {n}}}]}}\n' for n in range(calls))
        (folder / "calls.jsonl").write_text(lines)
        (folder / "config.yaml").write_text(CONFIG)
        loaded = load_config(folder / "config.yaml", {})
        tools = JobTools(
            loaded=loaded,
            view_factory=lambda: FunctionView(folder / "functions"),
            dispatch=Dispatcher(),
            run_id="1",
        )
        runner = JobRunner(tools, loaded.config.jobs[0], JobProgress())
        began = time.thread_time()
        report = runner.run() if profile is None else profile.runcall(runner.run)
        spent = time.thread_time() - began
        assert report.calls.ok == calls, report
        return spent


PARTS = {"actor": measure_actor, "jobs": measure_jobs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=40_000)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--group", type=int, default=32, help="calls answered by each a turn")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    set_up_logging("WARNING")
    gc.set_threshold(*GC_THRESHOLDS)
    for part in options.parts.split(","):
        measure, profile = PARTS[part], cProfile.Profile() if options.profile else None
        found = [
            measure(options.calls, options.group, profile) * 1e6 / options.calls
            for _ in range(1 if profile else options.reps)
        ]
        print(
            f"{part:6} {statistics.median(found):6.2f} us of CPU a call"
            f" ({min(found):.2f} to {max(found):.2f})"
        )
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
