"""What does the journal cost, and does memory stay level however long a list is?

    python perf/bench_jobs.py [--calls 10000,100000,1000000] [--reps 3] [--slow]

Each run is a fresh process of the product over a list of no-op calls, JSON lines to JSON lines, results and
rows kept; journal on and off take turns. calls/s is that of the job alone (from the moment its journal, or its
first unfinished output, is made to the rename of its results); peak memory is VmHWM of main. ``--slow``: the
first call sleeps until all others have ended, so that every result waits for its turn. CPU is that of all
processes, their start included: on a busy machine it tells more than the rate.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN_S_MAX = 3_600

FUNCTIONS = {
    "noop": "def _(n):\n    return {'n': n, 'ok': True}\n",
    "slow": (
        "import os, time\n\ndef _(n):\n    if n == 0:\n"
        "        while not os.path.exists({flag!r}):\n            time.sleep(0.05)\n"
        "    elif n == {last}:\n        open({flag!r}, 'w').close()\n"
        "    return {{'n': n, 'ok': True}}\n"
    ),
}
CONFIG = """\
worker: {{executor_count: 2}}
dispatcher: {{call_deadline_ms: 0}}
run: {{journal: {journal}}}
jobs:
  - {{name: bench, function: noop, calls: calls.jsonl, results: results.jsonl, output: rows.jsonl}}
report: report.json
"""


@dataclass
class Measured:
    rate: float
    peak_mb: float
    cpu_us: float
    """Of all processes, a call."""


def run(folder: Path, calls: int, *, journal: bool, slow: bool) -> Measured:
    """One run in a folder of its own."""
    (folder / "functions").mkdir()
    source = FUNCTIONS["slow" if slow else "noop"]
    if slow:
        source = source.format(flag=str(folder / "flag"), last=calls - 1)
    (folder / "functions" / "noop.py").write_text(source)
    with (folder / "calls.jsonl").open("w") as file:
        file.writelines(f"[{n}]\n" for n in range(calls))
    (folder / "config.yaml").write_text(CONFIG.format(journal=str(journal).lower()))
    command = [sys.executable, str(ROOT / "blockx.py"), "--config", "config.yaml", "--quiet"]
    cpu_s = _cpu_s_of_children()
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    started_ns, peak_kb, end = 0, 0, time.monotonic() + RUN_S_MAX
    while process.poll() is None:
        if time.monotonic() > end:
            process.kill()
        peak_kb = max(peak_kb, high_water_kb(process.pid))
        if not started_ns and (folder / "results.jsonl.partial").exists():
            started_ns = time.time_ns()
        time.sleep(0.002 if not started_ns else 0.05)
    report = json.loads((folder / "report.json").read_text())
    if report["jobs"][0]["ok"] != calls:
        raise SystemExit(f"{report['jobs'][0]['ok']} of {calls} calls ok")
    took_s = ((folder / "results.jsonl").stat().st_ctime_ns - started_ns) / 1e9
    cpu_us = (_cpu_s_of_children() - cpu_s) * 1e6 / calls
    return Measured(calls / took_s, peak_kb / 1024, cpu_us)


def _cpu_s_of_children() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def high_water_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", default="10000,100000,1000000")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--slow", action="store_true")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'calls':>10}  {'off calls/s':>11}  {'on calls/s':>10}  {'cost':>6}"
        f"  {'off CPU us':>10}  {'on CPU us':>9}  {'off MB':>6}  {'on MB':>6}"
    )
    for calls in map(int, options.calls.split(",")):
        pairs = []
        for rep in range(options.reps):
            pair = {}
            for journal in (True, False) if rep % 2 else (False, True):
                with tempfile.TemporaryDirectory(prefix="blockx-bench-") as name:
                    pair[journal] = run(Path(name), calls, journal=journal, slow=options.slow)
            pairs.append(pair)
        off = statistics.median(pair[False].rate for pair in pairs)
        on = statistics.median(pair[True].rate for pair in pairs)
        cost = statistics.median(1 - pair[True].rate / pair[False].rate for pair in pairs)
        cpu_off = statistics.median(pair[False].cpu_us for pair in pairs)
        cpu_on = statistics.median(pair[True].cpu_us for pair in pairs)
        peak_off = max(pair[False].peak_mb for pair in pairs)
        peak_on = max(pair[True].peak_mb for pair in pairs)
        print(
            f"{calls:>10,}  {off:>11,.0f}  {on:>10,.0f}  {cost:>6.1%}"
            f"  {cpu_off:>10.1f}  {cpu_on:>9.1f}  {peak_off:>6.0f}  {peak_on:>6.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
