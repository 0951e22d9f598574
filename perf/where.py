"""Where the CPU time of a no-op call and of a read goes, in main and in an executor: the text of PROFILE.md.

    python perf/where.py [--work noop,reads] [--calls 150000] > perf/PROFILE.md

The product runs as in ``harness.py``. While its measured job runs, py-spy samples main (all threads) and one executor
for some seconds, whenever a thread holds the interpreter's lock; CPU time of the process, from the kernel, is
divided by the calls that ended meanwhile, and by the shares of the samples. A sample counts for the file of its
innermost Python frame; a function of C for the file that called it. Of the two executors each runs half of the
calls, so the figure for one is half of what a call costs there.

Needs py-spy (``pip install py-spy``), and the right to look at other processes (root, or ptrace_scope 0).
"""

import argparse
import collections
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import bench_reads
import bodies
import psutil
from harness import Job, machine, product

SECONDS = 3
RATE = 400
"""Samples a second."""
WARM_UP_S = 0.7
LINES_MAX = 12
PART_MIN = 0.01
"""Files with less are not named."""

INSTALLED = re.compile(r".*/(site-packages|lib/python3\.\d+)/")
"""The beginning of a path that is the same for all modules of Python and of packages."""

Shares = dict[str, dict[str, int]]
"""Thread -> file -> samples."""


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def sample(pid: int, folder: Path) -> "subprocess.Popen[bytes]":
    """py-spy beside a process."""
    command = [
        "py-spy", "record", "--pid", str(pid), "--duration", str(SECONDS), "--rate", str(RATE),
        "--format", "raw", "--threads", "--gil", "--output", str(folder / str(pid)),
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def shares(path: Path) -> Shares:
    """Samples by thread and file of the innermost Python frame."""
    found: Shares = collections.defaultdict(lambda: collections.defaultdict(int))
    for line in path.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        thread = frames[0].partition("): ")[2] or "main"
        place = frames[-1].partition("(")[2].rpartition(":")[0] or frames[-1]
        found[thread][INSTALLED.sub("", place)] += int(count)
    return found


def print_process(title: str, seen: Shares, cost_us: float) -> None:
    total = sum(sum(by_file.values()) for by_file in seen.values()) or 1
    print(f"\n### {title}: {cost_us:.1f} us of CPU a call\n")
    print("| thread and file | share | us a call |\n| --- | ---: | ---: |")
    for thread, by_file in sorted(seen.items(), key=lambda item: -sum(item[1].values())):
        share = sum(by_file.values()) / total
        if share < PART_MIN:
            continue
        print(f"| **{thread}** | **{share:.0%}** | **{share * cost_us:.1f}** |")
        for place, count in sorted(by_file.items(), key=lambda item: -item[1])[:LINES_MAX]:
            if count / total >= PART_MIN:
                print(f"| `{place}` | {count / total:.0%} | {count / total * cost_us:.1f} |")


def profile(work: str, functions: Mapping[str, str], job: Job, **settings: str) -> None:
    """One run: wait until the job flows, sample, print."""
    with (
        tempfile.TemporaryDirectory(prefix="blockx-bench-") as scratch,
        product(functions, job, **settings) as (process, folder),
    ):
        ended = folder / "measured-results.jsonl.partial"
        while not ended.exists() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(WARM_UP_S)
        children = psutil.Process(process.pid).children(recursive=True)
        executor = next(
            child.pid for child in children if child.cmdline()[0].startswith("blockx: exec-0")
        )
        watched = {"Main": process.pid, "One of two executors": executor}
        spies = [sample(pid, Path(scratch)) for pid in watched.values()]
        before = {pid: cpu_s(pid) for pid in watched.values()}
        lines = sum(1 for _ in ended.open("rb"))
        for spy in spies:
            spy.wait()
        done = sum(1 for _ in ended.open("rb")) - lines if ended.exists() else 0
        if done <= 0:
            sys.exit(f"{work}: the job ended while it was sampled; more --calls")
        print(f"\n## {work}: {done:,} calls in {SECONDS} s, while they were sampled")
        for title, pid in watched.items():
            cost_us = (cpu_s(pid) - before[pid]) * 1e6 / done
            print_process(title, shares(Path(scratch) / str(pid)), cost_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--work", default="noop,reads", help="comma-separated")
    parser.add_argument("--calls", type=int, default=150_000)
    options = parser.parse_args()
    print("# Where the time goes\n")
    print(f"Written by `perf/where.py`. {machine()}")
    calls = [f"[{json.dumps(call)}]" for call in bodies.calls("noop", options.calls)]
    warm = ['[{"block":-1}]']
    if "noop" in options.work:
        profile("No-op calls", bodies.functions(1, ""), Job("noop", calls, warm))
    if "reads" in options.work:
        with bench_reads.node(True) as port:
            reads = [
                f'["{account}", {block}]'
                for account, block in bench_reads.accounts(options.calls // 5)
            ]
            profile(
                "Three sequential reads a call, 512 in flight an executor",
                {"reads": bench_reads.FUNCTION.format(reads=bench_reads.READS)},
                Job("reads", reads, ['["0x01", 16000000]']),
                dispatcher=(
                    "{executor_max_inflight: 512, executor_max_runnable: 512,"
                    " task_max_inflight_calls: 1024}"
                ),
                more=f'backends: {{rpc: {{bench: {{urls: ["http://127.0.0.1:{port}"]}}}}}}\n',
            )


if __name__ == "__main__":
    main()
