"""How fast is a call from job file to result, beside the standard library's two process pools?

    python perf/bench_e2e.py [--reps 3] [--works noop,subcalls,latency] [--scale 1.0]

Each run is a fresh process with two child processes that is warmed with 200 no-op calls; the three
contestants take turns within a repetition, so that a busy machine hurts all of them. Ratios are
medians of the ratios within a repetition, values are medians. blockx runs as a user runs it
(``blockx.py`` with a config.yaml and a calls.jsonl, results to a file), so its time includes
reading the list and writing every result; the pools get Python objects and drop theirs.

noop      independent calls, one submit and one result each: calls/s
subcalls  parents that wait for two children each: parents/s. A pool cannot nest calls (its
          processes would wait for each other), so there the parents are flattened by hand into two
          stages.
latency   one call at a time. Every call returns the machine's monotonic clock at the start of its
          body; the time from one start to the next is one round trip, measured alike for all.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = 2
WARM_UP_CALLS = 200
CALLS = {"noop": 20_000, "subcalls": 4_000, "latency": 2_000}
UNITS = {"noop": "calls/s", "subcalls": "parents/s", "latency": "us at p50"}
CONTESTANTS = ("blockx", "ProcessPoolExecutor", "multiprocessing.Pool")
RUN_SECONDS_MAX = 300
"""A run that takes longer is stopped, and the benchmark with it."""

Measures = dict[str, float]

FUNCTIONS = {
    "noop": 'def _(p):\n    return {"block": p["block"], "ok": True}\n',
    "child": 'def _(p):\n    return p["block"] + p["side"]\n',
    "subcalls": (
        "from blockx import function\n\n\n"
        "def _(p):\n"
        '    left = function.call("child", {"block": p["block"], "side": 1})\n'
        '    right = function.call("child", {"block": p["block"], "side": 2})\n'
        '    return {"block": p["block"], "sum": left + right}\n'
    ),
    "latency": "import time\n\n\ndef _(p):\n    return time.monotonic_ns()\n",
}
CONFIG = """\
worker: {{executor_count: {processes}}}
dispatcher: {{task_max_inflight_calls: {inflight}}}
jobs:
  - {{name: warm, function: noop, calls: warm.jsonl, results: warm-results.jsonl}}
  - {{name: measured, function: {work}, calls: calls.jsonl, results: results.jsonl}}
report: report.json
"""


# --- blockx, from outside


def run_blockx(work: str, count: int) -> Measures:
    """One run of the product: a warm-up job, then the measured one.

    The measured job lasts from the moment the results of the warm-up job got their final name to the
    moment its own results got theirs (a rename sets ``st_ctime``).
    """
    with tempfile.TemporaryDirectory(prefix="blockx-bench-") as name:
        folder = Path(name)
        (folder / "functions").mkdir()
        for function_id, source in FUNCTIONS.items():
            (folder / "functions" / f"{function_id}.py").write_text(source)
        write_calls(folder / "warm.jsonl", WARM_UP_CALLS)
        write_calls(folder / "calls.jsonl", count)
        inflight = 1 if work == "latency" else 1_024
        config = CONFIG.format(processes=PROCESSES, inflight=inflight, work=work)
        (folder / "config.yaml").write_text(config)
        command = [sys.executable, str(ROOT / "blockx.py"), "--config", "config.yaml"]
        started = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS_MAX,
            check=False,
        )
        whole_s = time.perf_counter() - started
        if done.returncode != 0:
            raise SystemExit(f"blockx ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        report = json.loads((folder / "report.json").read_text())
        job = next(job for job in report["jobs"] if job["name"] == "measured")
        if job["ok"] != count:
            raise SystemExit(f"blockx: {job['ok']} of {count} calls ok")
        if work == "latency":
            lines = (folder / "results.jsonl").read_text().splitlines()
            return round_trips([json.loads(line)["output"] for line in lines])
        ends_ns = [
            (folder / name).stat().st_ctime_ns for name in ("warm-results.jsonl", "results.jsonl")
        ]
        return {"rate": count * 1e9 / (ends_ns[1] - ends_ns[0]), "whole_s": whole_s}


def write_calls(path: Path, count: int) -> None:
    with path.open("w") as file:
        for block in range(count):
            file.write(f'{{"args": [{{"block": {block}}}]}}\n')


# --- the pools, in a fresh process


def noop(p: dict[str, int]) -> dict[str, object]:
    return {"block": p["block"], "ok": True}


def child(p: dict[str, int]) -> int:
    return p["block"] + p["side"]


def combine(block: int, left: int, right: int) -> dict[str, int]:
    return {"block": block, "sum": left + right}


def stamp(p: dict[str, int]) -> int:
    return time.monotonic_ns()


Submit = Callable[..., Callable[[], object]]
"""Submits one call; what it returns waits for the result."""


def measure_pool(submit: Submit, work: str, count: int) -> Measures:
    for wait in [submit(noop, {"block": n}) for n in range(WARM_UP_CALLS)]:
        wait()
    calls = [{"block": n} for n in range(count)]
    if work == "latency":
        return round_trips([submit(stamp, call)() for call in calls])
    started = time.perf_counter()
    if work == "noop":
        waits = [submit(noop, call) for call in calls]
    else:
        sides = [[submit(child, call | {"side": side}) for side in (1, 2)] for call in calls]
        waits = [
            submit(combine, call["block"], left(), right())
            for call, (left, right) in zip(calls, sides, strict=True)
        ]
    for wait in waits:
        wait()
    return {"rate": count / (time.perf_counter() - started)}


def run_pool_here(contestant: str, work: str, count: int) -> Measures:
    if contestant == "ProcessPoolExecutor":
        with ProcessPoolExecutor(PROCESSES) as executor:
            return measure_pool(lambda *call: executor.submit(*call).result, work, count)
    with multiprocessing.Pool(PROCESSES) as pool:
        return measure_pool(lambda body, *a: pool.apply_async(body, a).get, work, count)


def run_pool(contestant: str, work: str, count: int) -> Measures:
    """The pool in a process of its own, since forking a used process would flatter or hurt it."""
    command = [sys.executable, __file__, "--pool", contestant, work, str(count)]
    started = time.perf_counter()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=RUN_SECONDS_MAX, check=True
    )
    measures: Measures = json.loads(done.stdout)
    return {"whole_s": time.perf_counter() - started} | measures


# --- numbers


def round_trips(stamps_ns: Sequence[object]) -> Measures:
    """p50 and p99 of the time from one body's start to the next, in microseconds."""
    starts = [int(str(stamp_ns)) for stamp_ns in stamps_ns]
    gaps_us = sorted((b - a) / 1_000 for a, b in itertools.pairwise(starts))
    return {"p50_us": gaps_us[len(gaps_us) // 2], "p99_us": gaps_us[len(gaps_us) * 99 // 100]}


def median(runs: Sequence[Measures], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def machine() -> str:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return (
        f"{model}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}, commit {commit or 'unknown'}, "
        f"load before the start {os.getloadavg()[0]:.1f}"
    )


def print_table(work: str, runs: dict[str, list[Measures]]) -> None:
    key = "p50_us" if work == "latency" else "rate"
    print(f"\n{work}: {len(runs['blockx'])} repetitions, {UNITS[work]}")
    for contestant in CONTESTANTS[1:]:
        pairs = zip(runs["blockx"], runs[contestant], strict=True)
        # A rate is good when high, a latency when low; the ratio is always "how many times better".
        ratios = [a[key] / b[key] if key == "rate" else b[key] / a[key] for a, b in pairs]
        print(
            f"  blockx is {statistics.median(ratios):6.2f} x {contestant}"
            f"  ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    for contestant in CONTESTANTS:
        mine = runs[contestant]
        extra = f"p99 {median(mine, 'p99_us'):,.0f} us" if work == "latency" else ""
        whole = f"whole process {median(mine, 'whole_s'):.2f} s" if "whole_s" in mine[0] else ""
        print(f"  {contestant:22}{median(mine, key):>12,.0f}   {extra or whole}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--reps", type=int, default=3, help="repetitions (default 3)")
    parser.add_argument("--works", default=",".join(CALLS), help="comma-separated workloads")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of calls")
    parser.add_argument("--pool", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pool:
        contestant, work, count = options.pool
        print(json.dumps(run_pool_here(contestant, work, int(count))))
        return
    works = options.works.split(",")
    if unknown := set(works) - CALLS.keys():
        parser.error(f"unknown workload {', '.join(sorted(unknown))}; there are {', '.join(CALLS)}")
    print(machine())
    for work in works:
        count = max(10, int(CALLS[work] * options.scale))
        runs: dict[str, list[Measures]] = {contestant: [] for contestant in CONTESTANTS}
        for _ in range(options.reps):
            runs["blockx"].append(run_blockx(work, count))
            for contestant in CONTESTANTS[1:]:
                runs[contestant].append(run_pool(contestant, work, count))
        print_table(work, runs)


if __name__ == "__main__":
    main()
