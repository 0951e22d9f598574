"""How long does an executor take from its start to its first heartbeat, and what does it weigh, by spawn mode?

    python perf/bench_spawn.py [--reps 30] [--noop 5] [--scale 1.0]

start   ms from the order to the fork server until main has its first heartbeat; in a sandbox it is confined then.
        Median, the fastest, and the CPU time of the new process alone, since the machine may be busy.
PSS     MB of memory, shared pages counted in parts, 0.2 s later and idle; with a PID namespace of both processes.
noop    (--noop N) the whole product, as ``peers.py`` runs it, in both modes by turns: the median of the ratios of
        calls/s within a repetition, and of the CPU time of all its processes.

Where the machine cannot do it, it is refused with the reason, as by the product.
"""

import argparse
import os
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import machine
from peers import CALLS, run_blockx

from blockx.config import WorkerConfig
from blockx.errors import UsageError
from blockx.executor.confine import probe
from blockx.executor.main import run as run_executor
from blockx.ipc.heartbeat import create_table_fd
from blockx.ipc.launch import ExecutorLaunch
from blockx.supervisor.guardian import children_of
from blockx.supervisor.sandbox import Sandbox
from blockx.supervisor.spawner import (
    ForkserverSpawner,
    SpawnedProcess,
    executor_environment,
    package_folder,
)
from blockx.transport.socket_folder import SocketFolder

MEMORY_LIMIT_BYTES = 1 << 30
IDLE_S = 0.2
US_PER_S = 1_000_000
Confine = Callable[[ExecutorLaunch], ExecutorLaunch]


class Bench:
    """One fork server, one slot; starts executors in it and ends them."""

    def __init__(self) -> None:
        self.folder = SocketFolder()
        self.table_fd = create_table_fd(1)
        self.spawner = ForkserverSpawner(
            run_executor,
            ["blockx.executor.preload"],
            executor_environment(os.environ, []),
            [package_folder()],
            folder=str(self.folder.path),
        )
        self.spawner.start()
        self.spawner.check_preload()

    def start(self, confine: Confine, uid: int) -> tuple[float, float, float]:
        """One life: ms until its first heartbeat, ms of CPU of its process until then, MB of PSS."""
        path = self.folder.slot_socket("exec-0", uid)
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            if uid:
                os.chown(path, uid, uid)
            listener.listen()
            launch = confine(self.launch(path))
            started = time.perf_counter()
            process = self.spawner.spawn(launch, self.table_fd)
            peer, _ = listener.accept()
            with peer:
                peer.recv(65_536)
                ready_ms = (time.perf_counter() - started) * 1_000
                workers = [process.pid, *children_of(process.pid)]
                cpu_ms = sum(cpu_of(pid) for pid in workers)
                time.sleep(IDLE_S)
                pss_mb = sum(pss_of(pid) for pid in workers)
            end(process)
        return ready_ms, cpu_ms, pss_mb

    def launch(self, path: Path) -> ExecutorLaunch:
        return ExecutorLaunch(
            executor_id="exec-0",
            slot_index=0,
            socket_path=str(path),
            heartbeat_interval_ms=1_000,
            executor_max_inflight=128,
            executor_max_runnable=128,
        )

    def sandbox(self) -> Sandbox:
        """Raises UsageError: this machine cannot."""
        worker = WorkerConfig(executor_count=1, executor_spawn_mode="sandbox")
        made = Sandbox(
            worker, MEMORY_LIMIT_BYTES, mount_point=str(self.folder.mount_point()), read_only=[]
        )
        launch = self.launch(self.folder.slot_socket("exec-0", made.uid(0)))
        made.prepare(partial(self.spawner.ask, probe), launch)
        return made

    def close(self) -> None:
        self.spawner.stop()
        os.close(self.table_fd)
        self.folder.remove()


def confined(sandbox: Sandbox, pid_namespace: bool, launch: ExecutorLaunch) -> ExecutorLaunch:
    dressed = sandbox.dress(launch)
    assert dressed.confinement is not None
    return replace(dressed, confinement=replace(dressed.confinement, pid_namespace=pid_namespace))


def end(process: SpawnedProcess) -> None:
    process.kill()
    while process.reap() is None:
        time.sleep(0.001)


def cpu_of(pid: int) -> float:
    """CPU time of a process in ms, in steps of the scheduler's own count."""
    first = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
    return int(first) / 1e6


def pss_of(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1_024
    raise SystemExit(f"no PSS of process {pid}")


def measure_starts(bench: Bench, reps: int) -> None:
    modes: dict[str, tuple[Confine, int]] = {"process": (lambda launch: launch, 0)}
    try:
        sandbox = bench.sandbox()
    except UsageError as error:
        raise SystemExit(str(error)) from None
    print(f"  sandbox: {dict(sandbox.effective())}")
    for name, pid_namespace in (("sandbox", False), ("sandbox, PID namespace", True)):
        modes[name] = (partial(confined, sandbox, pid_namespace), sandbox.uid(0))
    runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in modes}
    for _ in range(reps):
        for name, (confine, uid) in modes.items():
            runs[name].append(bench.start(confine, uid))
    sandbox.close()
    print(f"\n  {'':24}{'start, ms':>12}{'fastest':>10}{'CPU, ms':>10}{'PSS, MB':>10}")
    for name, found in runs.items():
        ready, cpu, pss = zip(*found, strict=True)
        medians = [
            statistics.median(ready),
            min(ready),
            statistics.median(cpu),
            statistics.median(pss),
        ]
        print(
            f"  {name:24}"
            + "".join(f"{value:>{12 if n == 0 else 10}.1f}" for n, value in enumerate(medians))
        )


def measure_noop(reps: int, scale: float) -> None:
    """Alternating runs of the product; the modes by the environment variable."""
    count = max(10, int(CALLS["noop"] * scale))
    rates: dict[str, list[float]] = {"process": [], "sandbox": []}
    cpu: dict[str, list[float]] = {"process": [], "sandbox": []}
    for repetition in range(reps):
        order = list(rates) if repetition % 2 == 0 else list(reversed(rates))
        for mode in order:
            os.environ["EXECUTOR_SPAWN_MODE"] = mode
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            rates[mode].append(run_blockx("noop", count, loops=1)["rate"])
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
            cpu[mode].append(used_s * US_PER_S / count)
    for title, found in (("calls/s", rates), ("us of CPU a call, all processes", cpu)):
        ratios = [a / b for a, b in zip(found["sandbox"], found["process"], strict=True)]
        print(
            f"  noop, {title}: process {statistics.median(found['process']):,.0f}, sandbox"
            f" {statistics.median(found['sandbox']):,.0f}; ratio {statistics.median(ratios):.2f}"
            f" ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--reps", type=int, default=30, help="starts of each mode (default 30)")
    parser.add_argument(
        "--noop", type=int, default=0, help="repetitions of the no-op job (default 0)"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor on its number of calls")
    options = parser.parse_args()
    print(machine())
    bench = Bench()
    try:
        measure_starts(bench, options.reps)
    finally:
        bench.close()
    if options.noop:
        measure_noop(options.noop, options.scale)


if __name__ == "__main__":
    main()
