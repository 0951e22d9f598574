"""The aims of blockx for speed, measured: one line an aim, reached or not, and by how much.

    python perf/aims.py [--reps 5] [--quick] [--only noop,reads] [--record] [--compiled]

Exit code 0 only when every aim was measured and reached. Everything is on as it is by default (fairness, limits,
journal, accounting), two executors. A ratio is the median of the ratios within a repetition, so that blockx and the
peer saw the same machine. ``--quick``: fewer calls and one repetition, for a look. ``--record``: adds the run to
``history.jsonl``, which ``compare.py`` reads. ``--compiled``: of the compiled build (``make build/compiled``), as
``BLOCKX_COMPILED=1`` in the environment is for every script of this folder.

Needs ``requirements-peers.lock`` (``make bench`` installs it).
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median as middle
from typing import Any

import bench_reads
import bodies
import peers
import psutil
from harness import (
    COMPILED_VARIABLE,
    Job,
    Measures,
    code,
    commit,
    machine,
    median,
    product,
    ratios,
    run_product,
)

HISTORY = Path(__file__).parent / "history.jsonl"
POLL_S = 0.01
READY_SECONDS_MAX = 30


@dataclass(frozen=True)
class Aim:
    """One line of the table. ``least`` and ``most`` bound the value; it is reached between them."""

    key: str
    what: str
    value: float
    least: float = -math.inf
    most: float = math.inf
    unit: str = "x"

    @property
    def reached(self) -> bool:
        return self.least <= self.value <= self.most

    @property
    def wanted(self) -> str:
        bound, word = (self.least, ">=") if self.least > -math.inf else (self.most, "<=")
        return f"{word} {bound:,g} {self.unit}"


@dataclass(frozen=True)
class Scale:
    """How much work a run does."""

    reps: int
    factor: float
    quick: bool

    def contest(self, work: str, names: Sequence[str]) -> peers.Runs:
        loops = bodies.calibrate()
        return peers.contest(work, names, reps=self.reps, scale=self.factor, loops=loops)


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """A call in a fresh process: what ran before must not count."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


# --- the aims, each a function of the scale


def noop(scale: Scale) -> list[Aim]:
    pools = ("multiprocessing.Pool", "Pebble")
    runs = scale.contest("noop", ["ProcessPoolExecutor", *pools])
    fastest = max(pools, key=lambda name: median(runs[name], "rate"))
    return [
        Aim("noop_ppe", "no-op calls, against ProcessPoolExecutor",
            middle(peers.better(runs, "ProcessPoolExecutor")), least=4),
        Aim("noop_fastest", f"no-op calls, against the fastest process-based peer ({fastest})",
            middle(peers.better(runs, fastest)), least=1.5),
    ]  # fmt: skip


def cpu(scale: Scale) -> list[Aim]:
    runs = scale.contest("cpu", ["two bare processes"])
    share = middle(peers.better(runs, "two bare processes"))
    return [Aim("cpu_share", "1 ms CPU calls, against two bare processes", share, least=0.95)]


def reads(scale: Scale) -> list[Aim]:
    names = bench_reads.present("")
    count = 1_000 if scale.quick else 5_000
    runs = bench_reads.contest(names, reps=min(3, scale.reps), count=count)
    best, lean = bench_reads.best_others(runs)
    many, few = "blockx, 2 x 512 in flight", "blockx, 2 x 128 in flight"
    bound = 2 * 128 / (bench_reads.READS * bench_reads.DELAY_S)
    return [
        Aim("reads_512", f"three reads of 20 ms, 512 in flight an executor, against {best}",
            middle(ratios(runs[many], runs[best], "rate")), least=5),
        Aim("reads_128", "the same, 128 in flight: share of what latency allows",
            median(runs[few], "rate") / bound, least=0.9),
        Aim("reads_cpu", f"CPU a read, 512 in flight, against {lean}",
            middle(ratios(runs[many], runs[lean], "cpu_us")), most=0.2),
    ]  # fmt: skip


def nested(scale: Scale) -> list[Aim]:
    runs = scale.contest("nested", ["Ray"])
    least, most = (1, 2) if scale.quick else (1, 8)
    stuck = sum(not nests_with(executors) for executors in range(least, most + 1))
    return [
        Aim("nested_ray", "parent and two children, against Ray",
            middle(peers.better(runs, "Ray")), least=15),
        Aim("nested_stuck", f"deadlocks with {least} to {most} executors of one call each", stuck,
            most=0, unit="pools"),
    ]  # fmt: skip


def nests_with(executors: int) -> bool:
    """Whether 40 parents end with so many executors that may hold one root call each."""
    job = Job("nested", [f'[{{"block":{n}}}]' for n in range(40)])
    done = run_product(
        bodies.functions(1, ""),
        job,
        worker=f"{{executor_count: {executors}}}",
        dispatcher="{executor_max_inflight: 1}",
    )
    return all(result["status"] == "ok" for result in done.results)


def shared(scale: Scale) -> list[Aim]:
    runs = scale.contest("shared", ["ProcessPoolExecutor"])
    extra = max(run["bodies"] for run in runs["blockx"]) - bodies.DISTINCT
    return [
        Aim("shared_ppe", "20,000 calls of 1 ms, 200 distinct, against ProcessPoolExecutor",
            middle(peers.better(runs, "ProcessPoolExecutor")), least=40),
        Aim("shared_bodies", "bodies run beyond the 200", extra, most=0, unit="bodies"),
    ]  # fmt: skip


def latency(scale: Scale) -> list[Aim]:
    runs = scale.contest("latency", ["multiprocessing.Pool"])
    return [
        Aim("latency_p50", "one call at a time: p50 against multiprocessing.Pool's",
            middle(ratios(runs["blockx"], runs["multiprocessing.Pool"], "p50_us")), most=1),
        Aim("latency_p99", "one call at a time: p99", median(runs["blockx"], "p99_us"), most=1_000,
            unit="us"),
    ]  # fmt: skip


def start(scale: Scale) -> list[Aim]:
    job = Job("noop", ['[{"block":1}]'])
    seconds = [run_product(bodies.functions(1, ""), job).first_s for _ in range(scale.reps)]
    return [
        Aim(
            "start",
            "start of the program to its first results",
            middle(seconds),
            most=0.5,
            unit="s",
        )
    ]


def memory(scale: Scale) -> list[Aim]:
    weight = alone(kilobytes_suspended, 2_000 if scale.quick else 10_000)
    return [
        Aim("executor_pss", "memory of an executor (PSS, two executors)", executor_pss_mb(), most=12,
            unit="MB"),
        Aim("suspended", "memory of a suspended call", weight, most=12, unit="KB"),
    ]  # fmt: skip


def kilobytes_suspended(calls: int) -> float:
    import bench_executor

    return bench_executor.kilobytes_suspended(calls)


def executor_pss_mb() -> float:
    """The largest PSS of two executors of which each holds a sleeping call, in MB."""
    with tempfile.TemporaryDirectory(prefix="blockx-bench-") as folder:
        flag = Path(folder) / "go"
        waiting = (
            "import os\nimport time\n\n\ndef _(n):\n"
            f"    while not os.path.exists({str(flag)!r}):\n        time.sleep(0.01)\n    return n\n"
        )
        job = Job("waiting", ["[1]", "[2]"])
        with product({"waiting": waiting}, job, worker="{executor_count: 2}") as (process, _):
            end = time.monotonic() + READY_SECONDS_MAX
            while len(found := executors_of(process.pid)) < 2 and time.monotonic() < end:
                time.sleep(POLL_S)
            time.sleep(1)  # both have loaded the function and sleep
            megabytes = max(pss_mb(executor) for executor in found)
            flag.touch()
            process.communicate()
    return megabytes


def executors_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if " ".join(child.cmdline()).startswith("blockx: exec-")]


def pss_mb(process: psutil.Process) -> float:
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1_024


RUNAWAY = """\
import time


def _(n):
    if n == 0:
        with open({log!r}, "w") as log:
            log.write(str(time.monotonic_ns()))
        while True:
            pass
    return time.monotonic_ns()
"""
RUNAWAY_BUDGET_MS = 500


def runaway(scale: Scale) -> list[Aim]:
    """One executor: the first body that starts after the runaway's budget says when it was stopped."""
    late, touched = [], 0
    for _ in range(scale.reps):
        with tempfile.TemporaryDirectory(prefix="blockx-bench-") as folder:
            log = Path(folder) / "log"
            done = run_product(
                {"runaway": RUNAWAY.format(log=str(log))},
                Job("runaway", [f"[{n}]" for n in range(200)]),
                worker="{executor_count: 1}",
                dispatcher=f"{{call_deadline_ms: {RUNAWAY_BUDGET_MS}}}",
                failures=True,
            )
            began_ns = int(log.read_text())
        others = done.results[1:]
        touched += sum(result["status"] != "ok" or result["attempts"] != 1 for result in others)
        after = min(result["output"] for result in others if result["output"] > began_ns)
        late.append((after - began_ns) / 1e6 - RUNAWAY_BUDGET_MS)
    return [
        Aim(
            "runaway", "an endless loop, stopped after its budget", middle(late), most=50, unit="ms"
        ),
        Aim(
            "runaway_touched", "other calls that failed or ran twice", touched, most=0, unit="calls"
        ),
    ]


def growth(scale: Scale) -> list[Aim]:
    """The core alone, whose executors are simulated: the dearest against the cheapest."""
    lengths = (1_000, 10_000, 100_000) if scale.quick else (1_000, 10_000, 100_000, 1_000_000)
    shapes = [
        ("growth_calls", f"10^3 to 10^{round(math.log10(lengths[-1]))} calls",
         [(8, 1, calls) for calls in lengths]),
        ("growth_executors", "1 to 64 executors (simulated)",
         [(executors, 1, 100_000) for executors in (1, 8, 64)]),
    ]  # fmt: skip
    return [
        Aim("growth_tasks", "cost of a call in the core, 10 and 1,000 tasks of 100 calls: highest to that of one",
            alone(task_growth, scale.reps), most=1.15),
    ] + [
        Aim(key, f"cost of a call in the core, {what}: highest to lowest", alone(spread, cases, scale.reps),
            most=1.15)
        for key, what, cases in shapes
    ]  # fmt: skip


def task_growth(reps: int) -> float:
    """With equal calls a task: what a task itself costs is in all of them alike."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from perf import bench_core

    costs = bench_core.growth(reps, 32)
    return max(costs.values()) / costs[1]


def spread(cases: Sequence[tuple[int, int, int]], reps: int) -> float:
    """The highest median cost of (executors, tasks, calls) over the lowest; the cases take turns."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from perf import bench_core

    costs: dict[tuple[int, int, int], list[float]] = {case: [] for case in cases}
    for _ in range(reps):
        for executors, tasks, calls in cases:
            runs = max(1, min(20, 50_000 // calls))
            found = [bench_core.measure(executors, tasks, calls, 32).call_us for _ in range(runs)]
            costs[executors, tasks, calls].append(middle(found))
    medians = [middle(found) for found in costs.values()]
    return max(medians) / min(medians)


AIMS: dict[str, Callable[[Scale], list[Aim]]] = {
    "noop": noop,
    "cpu": cpu,
    "reads": reads,
    "nested": nested,
    "shared": shared,
    "latency": latency,
    "start": start,
    "memory": memory,
    "runaway": runaway,
    "growth": growth,
}


def record(found: Sequence[Aim], seconds: float) -> None:
    line: Measures = {aim.key: round(aim.value, 4) for aim in found}
    entry = {
        "commit": commit(),
        "machine": machine(),
        "seconds": round(seconds),
        "values": line,
    }
    with HISTORY.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--reps", type=int, default=5, help="repetitions (default 5)")
    parser.add_argument("--quick", action="store_true", help="one repetition of less work")
    parser.add_argument("--only", default=",".join(AIMS), help="comma-separated")
    parser.add_argument("--record", action="store_true", help="add the run to history.jsonl")
    parser.add_argument("--compiled", action="store_true", help="of the compiled build")
    options = parser.parse_args()
    if options.compiled:
        os.environ[COMPILED_VARIABLE] = "1"
    code()  # ends here if it is wanted and was not built
    wanted = options.only.split(",")
    if unknown := set(wanted) - AIMS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(AIMS)}")
    peers_needed = ["Pebble", "Ray", "gevent (one process)"]
    if len(peers.present(peers_needed)) < len(peers_needed):
        sys.exit(
            "The aims are ratios to these: install requirements-peers.lock, or run `make bench`."
        )
    scale = Scale(1, 0.2, quick=True) if options.quick else Scale(options.reps, 1.0, quick=False)
    print(machine())
    print(f"\n{'aim':86}{'wanted':>16}{'measured':>12}")
    began, found = time.monotonic(), []
    for name in wanted:
        for aim in AIMS[name](scale):
            found.append(aim)
            mark = "reached" if aim.reached else "NOT REACHED"
            print(f"{aim.what:86}{aim.wanted:>16}{aim.value:>12,.2f}  {mark}", flush=True)
    seconds = time.monotonic() - began
    missed = [aim.key for aim in found if not aim.reached]
    print(f"\n{len(found) - len(missed)} of {len(found)} reached, {seconds:,.0f} s")
    if options.record:
        record(found, seconds)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
