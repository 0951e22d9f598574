"""The same work on blockx and on what a user would pick instead, in one run; ratios first.

    python perf/peers.py [--works noop,cpu] [--peers ProcessPoolExecutor,Ray] [--reps 5] [--scale 1.0]

Two processes each. Every run is a fresh process tree, warmed with 200 calls, then timed. The contestants take
turns within a repetition, and a ratio compares runs of the same repetition, so that whatever else runs on
the machine hurts all of them. blockx runs as a user runs it (see ``harness.py``), with everything on that
is on by default; the others get Python objects and drop theirs. Reads are another script: ``bench_reads.py``.

noop     20,000 calls with different arguments, one submit and one result each: calls/s. Calls in chunks are
         far cheaper for a pool; that is another contest, since a chunk fails, hangs and dies as one.
cpu      2,000 calls of 1 ms of CPU: calls/s. ``two bare processes`` is the bound: no calls travel.
nested   4,000 parents that wait for two children each: parents/s. A pool whose processes wait for their own
         pool hangs, so for pools the work is cut by hand into two stages.
shared   20,000 calls of 1 ms of CPU with 200 different arguments: calls/s, and how many bodies ran.
latency  2,000 calls, one at a time. The body returns the machine's monotonic clock; the time from one body's
         start to the next is one round trip, measured alike for all: us.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import bodies
from contestants import CONTESTANTS
from harness import (
    PROCESSES,
    RUN_SECONDS_MAX,
    Job,
    Measures,
    machine,
    median,
    ratios,
    round_trips,
    run_product,
)

WARM_UP_CALLS = 200
CALLS = {"noop": 20_000, "cpu": 2_000, "nested": 4_000, "shared": 20_000, "latency": 2_000}
UNITS = {
    "noop": "calls/s",
    "cpu": "calls/s",
    "nested": "parents/s",
    "shared": "calls/s",
    "latency": "us at p50",
}
BLOCKX = "blockx"
NEEDS = {
    "Pebble": "pebble",
    "Ray": "ray",
    "Dask distributed": "distributed",
    "Celery + Redis": "celery",
    "gevent (one process)": "gevent",
}

Runs = dict[str, list[Measures]]


def run_blockx(work: str, count: int, loops: int) -> Measures:
    """One run of the product."""
    with tempfile.TemporaryDirectory(prefix="blockx-bench-") as folder:
        log = Path(folder) / "log"
        log.touch()
        warm = [f'[{{"block": {-1 - n}}}]' for n in range(WARM_UP_CALLS)]
        calls = [f"[{json.dumps(call)}]" for call in bodies.calls(work, count)]
        inflight = 1 if work == "latency" else 1_024
        done = run_product(
            bodies.functions(loops, str(log)),
            Job(work, calls, warm),
            dispatcher=f"{{task_max_inflight_calls: {inflight}}}",
        )
        if work == "latency":
            return round_trips(result["output"] for result in done.results)
        ran = max(0, log.stat().st_size - WARM_UP_CALLS)
        return {"rate": count / done.seconds, "bodies": ran, "whole_s": done.whole_s}


def run_peer(name: str, work: str, count: int, loops: int) -> Measures:
    """One run of another, in a process of its own: forking a used process would flatter or hurt it."""
    with tempfile.TemporaryDirectory(prefix="blockx-bench-") as folder:
        log = Path(folder) / "log"
        environment = os.environ | {
            "BENCH_LOOPS": str(loops),
            "BENCH_LOG": str(log),
            "PYTHONPATH": str(Path(__file__).parent),
        }
        log.touch()
        command = [sys.executable, __file__, "--run", name, work, str(count)]
        started = time.perf_counter()
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=RUN_SECONDS_MAX, check=True,
            env=environment,
        )  # fmt: skip
        measures: Measures = json.loads(done.stdout.splitlines()[-1])
        measures["bodies"] = max(0, log.stat().st_size - WARM_UP_CALLS)
        return {"whole_s": time.perf_counter() - started} | measures


def run_here(name: str, work: str, count: int) -> Measures:
    """In the peer's own process: start, warm up, measure."""
    peer = CONTESTANTS[name]()
    body = {"latency": bodies.stamp, "nested": bodies.noop}.get(work) or getattr(bodies, work)
    calls = bodies.calls(work, count)
    peer.start()
    try:
        peer.run(body, [{"block": -1 - n} for n in range(WARM_UP_CALLS)])
        if work == "latency":
            return round_trips([peer.result(peer.submit(body, call)) for call in calls])
        started = time.perf_counter()
        found = peer.nested(calls) if work == "nested" else peer.run(body, calls)
        seconds = time.perf_counter() - started
        if len(found) != count:
            raise SystemExit(f"{name}: {len(found)} results of {count} calls")
        return {"rate": count / seconds}
    finally:
        peer.stop()


def contest(work: str, peers: Sequence[str], *, reps: int, scale: float, loops: int) -> Runs:
    """All contestants of one work in turns."""
    count = max(10, int(CALLS[work] * scale))
    runs: Runs = {BLOCKX: []}
    runs |= {name: [] for name in peers if work in CONTESTANTS[name].works}
    for _ in range(reps):
        for name, mine in runs.items():
            if name == BLOCKX:
                mine.append(run_blockx(work, count, loops))
            else:
                share = 1.0 if work == "latency" else CONTESTANTS[name].scale
                mine.append(run_peer(name, work, max(10, int(count * share)), loops))
    return runs


def present(wanted: Sequence[str]) -> list[str]:
    """The wanted contestants that are installed; says which are not."""
    names = []
    for name in wanted:
        missing = NEEDS.get(name, "")
        if missing and importlib.util.find_spec(missing) is None:
            print(f"{name}: {missing} is not installed (requirements-peers.lock), left out")
        elif name == "Celery + Redis" and shutil.which("redis-server") is None:
            print(f"{name}: redis-server is not on the path, left out")
        else:
            names.append(name)
    return names


def better(runs: Runs, other: str) -> list[float]:
    """How many times better blockx is, by repetition: a rate is good when high, a latency when low."""
    if "rate" in runs[other][0]:
        return ratios(runs[BLOCKX], runs[other], "rate")
    return ratios(runs[other], runs[BLOCKX], "p50_us")


def print_table(work: str, runs: Runs) -> None:
    print(f"\n{work}: {len(runs[BLOCKX])} repetitions, {UNITS[work]}")
    for name in runs:
        if name != BLOCKX:
            found = better(runs, name)
            print(
                f"  blockx is {statistics.median(found):7.2f} x {name:24}"
                f" ({found[0]:.2f} to {found[-1]:.2f})"
            )
    for name, mine in runs.items():
        key = "rate" if "rate" in mine[0] else "p50_us"
        extra = f"p99 {median(mine, 'p99_us'):,.0f} us" if key == "p50_us" else ""
        if work == "shared":
            extra = f"{median(mine, 'bodies'):,.0f} bodies ran"
        print(f"  {name:24}{median(mine, key):>12,.0f}   {extra}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--reps", type=int, default=5, help="repetitions (default 5)")
    parser.add_argument("--works", default=",".join(CALLS), help="comma-separated")
    parser.add_argument("--peers", default=",".join(CONTESTANTS), help="comma-separated")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of calls")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        name, work, count = options.run
        print(json.dumps(run_here(name, work, int(count))))
        return
    works, peers = options.works.split(","), options.peers.split(",")
    for given, known in ((works, CALLS), (peers, CONTESTANTS)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    print(machine())
    loops = bodies.calibrate()
    print(f"{PROCESSES} processes each; 1 ms of CPU is {loops:,} loops")
    peers = present(peers)
    for work in works:
        print_table(work, contest(work, peers, reps=options.reps, scale=options.scale, loops=loops))


if __name__ == "__main__":
    main()
