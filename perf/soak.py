"""Mixed work for minutes, with an executor killed every few seconds: is every call ended once, and nothing lost?

    python perf/soak.py [--minutes 10] [--kill-every 5] [--executors 2] [--sample sample.csv]

One blockx is started as a user would start it, with jobs of the same mixed call list, one after the other,
until the time is over (the list is cut to what fits: a first short job measures the pace). Meanwhile this
script kills a random executor by SIGKILL and looks at main and its executors: resident memory,
descriptors, threads, processes. At the end it reads all results and says

- whether each call of each job has exactly one record, in order, with the outcome that its kind must have;
- how memory, descriptors and threads of main, and of executors by age, went over the time;
- which processes, sockets and folders are left.

Exit code 0 if all is well, 1 otherwise.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
CALLS_A_JOB = 4_000
GROWTH_MIB_MAX = 60
"""Growth of main from the second to the last fifth of the time that is still called level."""

CASE = """
import os, subprocess, time
from blockx import function
def _(n):
    kind = n % 40
    if kind == 0:
        raise ValueError(f"no {n}")
    if kind == 1:
        time.sleep(0.3)
    elif kind == 2:
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end: pass
    elif kind == 3:
        return [n, function.call("child", n // 2)]
    elif kind == 4:
        return [n, len("x" * 1_000_000)]
    elif kind == 5:
        print("row", n)
    elif kind == 6 and n % 400 == 6:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    elif kind == 7 and n % 400 == 7:
        while True: pass
    elif kind == 8:
        os.chdir("/tmp"); os.environ["SOAK"] = str(n)
    else:
        time.sleep(0.002)
    return [n, os.getcwd(), os.environ.get("SOAK")] if kind > 8 else [n]
"""
CONFIG = """\
worker: {{executor_count: {executors}, executor_restart_delay_ms: 100, executor_max_restarts: 1000,
         executor_recycle_calls: 5000}}
dispatcher: {{call_deadline_ms: 1000}}
jobs:
{jobs}
report: report.json
"""


def expected(n: int) -> Any:
    """What call ``n`` must end with: a result, or a kind of failure."""
    kind = n % 40
    if kind == 0:
        return "user_error"
    if kind == 7 and n % 400 == 7:
        return "deadline_exceeded"
    if kind == 3:
        return [n, n // 2 + 1]
    if kind == 4:
        return [n, 1_000_000]
    return [n, "/", None] if kind > 8 else [n]


class Watch:
    """Looks at the product's processes once in a while."""

    def __init__(self, main: psutil.Process) -> None:
        self.main = main
        self.samples: list[dict[str, float]] = []
        self.started_s = time.monotonic()

    def executors(self) -> list[psutil.Process]:
        """Executor processes alive now."""
        found = []
        for process in self.main.children(recursive=True):
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith("blockx: exec-"):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def look(self) -> None:
        """One sample."""
        executors = self.executors()
        try:
            sample = {
                "s": time.monotonic() - self.started_s,
                "main_mib": self.main.memory_info().rss / 2**20,
                "main_fds": float(self.main.num_fds()),
                "main_threads": float(self.main.num_threads()),
                "processes": float(len(self.main.children(recursive=True))),
            }
            for name, look in (
                ("mib", lambda p: p.memory_info().rss / 2**20),
                ("fds", lambda p: p.num_fds()),
                ("threads", lambda p: p.num_threads()),
            ):
                sample[f"executor_{name}_max"] = max((float(look(p)) for p in executors), default=0)
        except psutil.Error:
            return  # one ended while it was looked at
        self.samples.append(sample)

    def means(self, name: str) -> tuple[float, float]:
        """Median over the second and the last fifth of the time."""
        values = [sample[name] for sample in self.samples]
        fifth = max(1, len(values) // 5)
        return statistics.median(values[fifth : 2 * fifth]), statistics.median(values[-fifth:])


def write(folder: Path, executors: int, jobs_count: int) -> None:
    """The functions, one call list, and a job for each repetition."""
    functions = folder / "functions"
    functions.mkdir(exist_ok=True)
    (functions / "case.py").write_text(CASE)
    (functions / "child.py").write_text(
        "import time\ndef _(n):\n    time.sleep(0.001)\n    return n + 1\n"
    )
    (folder / "calls.jsonl").write_text("".join(f"{n}\n" for n in range(CALLS_A_JOB)))
    jobs = "\n".join(
        f"  - {{name: soak{j}, function: case, calls: calls.jsonl, results: r{j}.jsonl}}"
        for j in range(jobs_count)
    )
    (folder / "config.yaml").write_text(CONFIG.format(executors=executors, jobs=jobs))


def start(folder: Path) -> subprocess.Popen[bytes]:
    """The product, its text into a file."""
    with open(folder / "product.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "blockx.py"), "--config", "config.yaml"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(folder / "tmp")},
        )


def wrong_records(folder: Path, jobs_count: int) -> list[str]:
    """What is wrong with the results."""
    wrong = []
    for job in range(jobs_count):
        lines = (folder / f"r{job}.jsonl").read_text().splitlines()
        if len(lines) != CALLS_A_JOB:
            wrong.append(f"job {job}: {len(lines)} records for {CALLS_A_JOB} calls")
        for n, line in enumerate(lines):
            record = json.loads(line)
            found = record["output"] if record["status"] == "ok" else record["error"]["kind"]
            if record["index"] != n or found != expected(n):
                wrong.append(f"job {job}, call {n}: {str(record)[:300]}")
    return wrong


def soak(
    folder: Path, jobs_count: int, kill_every_s: float, executors: int
) -> tuple[Watch, int, int]:
    """Run once; the samples, the kills, the exit code."""
    write(folder, executors, jobs_count)
    product = start(folder)
    watch, kills, rng = Watch(psutil.Process(product.pid)), 0, random.Random(7)
    next_kill_s = time.monotonic() + kill_every_s
    while product.poll() is None:
        time.sleep(0.5)
        try:
            watch.look()
            if time.monotonic() >= next_kill_s:
                next_kill_s += kill_every_s
                alive = watch.executors()
                if alive:
                    rng.choice(alive).kill()
                    kills += 1
        except psutil.NoSuchProcess:
            continue
    return watch, kills, product.returncode


def left_processes(folder: Path) -> list[str]:
    """Processes that the functions or the product left."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.cmdline() == ["sleep", "600"] or str(folder) in " ".join(process.cmdline()):
                left.append(f"{process.pid} {process.cmdline()}")
        except psutil.Error:
            continue
    return left


def main() -> int:
    """Measure the pace, soak, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kill-every", type=float, default=5, metavar="SECONDS")
    parser.add_argument("--executors", type=int, default=2)
    parser.add_argument("--sample", help="write the samples there, as CSV")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        started_s = time.monotonic()
        soak(folder, 1, options.kill_every, options.executors)
        job_s = time.monotonic() - started_s
        jobs_count = max(2, round(options.minutes * 60 / job_s))
        watch, kills, code = soak(folder, jobs_count, options.kill_every, options.executors)
        wall_s = time.monotonic() - started_s
        wrong = wrong_records(folder, jobs_count)
        report = json.loads((folder / "report.json").read_text())
        log_kib = (folder / "product.log").stat().st_size // 1024
        left = [*left_processes(folder), *map(str, (folder / "tmp").glob("*"))]
    calls = jobs_count * CALLS_A_JOB
    print(
        f"{calls:,} calls in {jobs_count} jobs, {wall_s / 60:.1f} minutes, {kills} kills, exit code {code}"
    )
    print(f"executors: {report['executors']}; log {log_kib} KiB")
    for value in watch.samples[0]:
        if value != "s":
            early, late = watch.means(value)
            print(f"{value:24} {early:8.1f} -> {late:8.1f}")
    if options.sample:
        rows = [",".join(watch.samples[0])]
        rows += [",".join(f"{v:.1f}" for v in sample.values()) for sample in watch.samples]
        Path(options.sample).write_text("\n".join(rows) + "\n")
    early, late = watch.means("main_mib")
    faults = wrong[:20] + [f"left: {item}" for item in left]
    if late - early > GROWTH_MIB_MAX:
        faults.append(f"main grew from {early:.0f} to {late:.0f} MiB")
    if code != 1:
        faults.append(f"exit code {code}, expected 1: some calls fail on purpose")
    print("\n".join(faults) or "every call ended once, with the right outcome; nothing is left")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
