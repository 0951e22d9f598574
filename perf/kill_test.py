"""Does a job that is killed over and over leave the rows of one that is not?

    python perf/kill_test.py [--kills 100] [--calls 2000] [--seed 1]

A job with sub-calls, table writes, failing calls and calls whose executor dies under them is run once in
peace. Then the same job is started again and again, and at a random moment (a random number of calls after
its start, or while it starts or ends) main is ended by SIGKILL, SIGINT or SIGTERM, or executors by SIGKILL;
the tail of the journal is cut off now and then. Once a job has come to its end its outputs are compared with
those of the run in peace: results (without attempts and costs, which may differ), rows, failures, and the
table that it wrote, row for row; and the next job begins, until there were enough kills. Exit code 1, with
the seed, at the first difference, and for a final name that is there before its job has ended.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUN_S_MAX = 120
"""A run that takes longer hangs."""
OUTPUTS = ("results.jsonl", "rows.jsonl", "failures.jsonl")
MAY_DIFFER = (
    "attempts",
    "moves",
    "cached",
    "cpu_us",
    "io_us",
    "subcall_us",
    "sleep_us",
    "queue_us",
)

FUNCTIONS = {
    "step": """\
import os
import time
from blockx import function
from blockdb import Table

TALLY = open("{folder}/starts", "ab", buffering=0)


def _(n):
    TALLY.write(b".")
    if n % 101 == 7:
        marker = f"{folder}/died-{{n}}"
        if not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(1)
    if n % 13 == 3:
        raise ValueError(f"no {{n}}")
    child = function.call("child", n % 50)
    Table("seen", key=["n"]).upsert_rows([{{"n": n, "child": child}}])
    time.sleep(0.01)
    return [{{"n": n, "child": child}}, {{"n": n, "big": 2**256 - 1 - n}}]
""",
    "child": "def _(n):\n    return n * 10**30\n",
}
CONFIG = """\
worker: {executor_count: 2, executor_restart_delay_ms: 20, executor_max_restarts: 100000}
dispatcher: {executor_max_inflight: 16}
backends: {blockdb: {path: store.sqlite}}
stream_build: {batch_max_rows: 64}
run: {grace_ms: 200}
jobs:
  - {name: kills, function: step, calls: calls.jsonl, results: results.jsonl, output: rows.jsonl,
     failures: failures.jsonl, max_attempts: 100}
report: report.json
"""


@dataclass
class Tally:
    """What was done so far."""

    mains: int = 0
    executors: int = 0
    cuts: int = 0
    jobs: int = 0
    calls: int = 0
    starts: int = 0
    rows: int = 0

    @property
    def kills(self) -> int:
        return self.mains + self.executors


class Job:
    """One folder, one job."""

    def __init__(self, folder: Path, calls: int) -> None:
        self.folder, self.calls = folder, calls
        (folder / "functions").mkdir(parents=True)
        for name, source in FUNCTIONS.items():
            text = source.format(folder=folder) if name == "step" else source
            (folder / "functions" / f"{name}.py").write_text(text)
        (folder / "calls.jsonl").write_text("".join(f"[{n}]\n" for n in range(calls)))
        (folder / "config.yaml").write_text(CONFIG)
        self.log = (folder / "log").open("ab")

    def start(self) -> "subprocess.Popen[bytes]":
        command = [
            sys.executable,
            "-X",
            "faulthandler",
            str(ROOT / "blockx.py"),
            "--config",
            "config.yaml",
        ]
        return subprocess.Popen(command, cwd=self.folder, stdout=self.log, stderr=self.log)

    def starts(self) -> int:
        path = self.folder / "starts"
        return path.stat().st_size if path.exists() else 0

    def runs_begun(self) -> int:
        """Runs that said what they do: Python and blockx had started."""
        return (self.folder / "log").read_bytes().count(b"job kills: ")

    def answers(self) -> dict[str, Any]:
        """Everything that must not depend on kills."""
        results = [json.loads(line) for line in (self.folder / "results.jsonl").open()]
        for record in results:
            for key in MAY_DIFFER:
                del record[key]
            if "error" in record:
                record["error"] = record["error"]["message"]
        failures = [json.loads(line)["args"] for line in (self.folder / "failures.jsonl").open()]
        with sqlite3.connect(self.folder / "store.sqlite") as db:
            table = db.execute("SELECT key, row FROM seen ORDER BY key").fetchall()
        db.close()
        rows = (self.folder / "rows.jsonl").read_text().splitlines()
        return {"results": results, "rows": rows, "failures": failures, "table": table}


def run_in_peace(base: Path, calls: int) -> dict[str, Any]:
    job = Job(base / "peace", calls)
    code = job.start().wait(RUN_S_MAX)
    if code != 1:  # some calls fail on purpose
        raise SystemExit(f"the run in peace ended with {code}: {(job.folder / 'log').read_text()}")
    return job.answers()


def run_with_kills(job: Job, rng: random.Random, tally: Tally, kills: int) -> None:
    """Start the job until it has come to its end."""
    while True:
        process = job.start()
        if tally.kills < kills:
            disturb(job, process, rng, tally)
        code = process.wait(RUN_S_MAX)
        if code in (0, 1):
            if not (job.folder / "results.jsonl").exists():
                raise SystemExit(f"no results: {(job.folder / 'log').read_text()[-3000:]}")
            return
        if code not in (-9, -15, -2, 130, 143):  # -15, -2: its handlers had gone, at the very end
            raise SystemExit(f"ended with {code}: {(job.folder / 'log').read_text()[-3000:]}")
        check_unfinished(job)
        if code == -9 and rng.random() < 0.3:
            cut_journal(job, rng, tally)


def disturb(job: Job, process: "subprocess.Popen[bytes]", rng: random.Random, tally: Tally) -> None:
    """Wait for a random moment, then kill someone."""
    begun = job.runs_begun()
    wait_for = job.starts() + rng.choice((0, 1, rng.randrange(200), rng.randrange(200)))
    pause_s = rng.random() * 0.4
    end = time.monotonic() + pause_s
    while process.poll() is None and time.monotonic() < end + RUN_S_MAX:
        if job.starts() >= wait_for and time.monotonic() >= end:
            break
        time.sleep(0.002)
    if rng.random() < 0.3:
        victims = executors_of(process.pid)
        for pid in victims if rng.random() < 0.5 else victims[:1]:
            send(pid, signal.SIGKILL)
        tally.executors += bool(victims)
        time.sleep(rng.random() * 0.1)
    if rng.random() < 0.8 and process.poll() is None:
        number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM))
        if (
            job.runs_begun() == begun
        ):  # Python itself is still starting, and would die of the others
            number = signal.SIGKILL
        send(process.pid, number)
        tally.mains += 1


def executors_of(main: int) -> list[int]:
    """Executors are children of the fork server, which is a child of main."""
    found = []
    for child in children(main):
        found += children(child)
    return found


def children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def check_unfinished(job: Job) -> None:
    """A kill between the first rename and the last word may leave whole files; nothing else may be there."""
    early = [name for name in OUTPUTS if (job.folder / name).exists()]
    for name in early:
        lines = (job.folder / name).read_text().splitlines()
        if name == "results.jsonl" and len(lines) != job.calls:
            raise SystemExit(f"{job.folder / name} is there before its job has ended")


def cut_journal(job: Job, rng: random.Random, tally: Tally) -> None:
    """As a power failure may leave it."""
    journal = job.folder / "results.jsonl.journal"
    if journal.exists() and journal.stat().st_size > 5_000:
        with journal.open("r+b") as file:
            file.truncate(journal.stat().st_size - rng.randrange(1, 2_000))
        tally.cuts += 1


def compare(want: dict[str, Any], got: dict[str, Any], where: str) -> None:
    for name, expected in want.items():
        if got[name] == expected:
            continue
        pairs = zip(expected, got[name], strict=False)
        first = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        shown = "" if first is None else f"\nwanted {expected[first]}\ngot    {got[name][first]}"
        raise SystemExit(
            f"{where}: {name} differs at {first}: {len(expected)} and {len(got[name])}{shown}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--calls", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng, tally = random.Random(options.seed), Tally()
    with tempfile.TemporaryDirectory(prefix="blockx-kills-") as name:
        base = Path(name)
        want = run_in_peace(base, options.calls)
        while tally.kills < options.kills:
            job = Job(base / f"job-{tally.jobs}", options.calls)
            run_with_kills(job, rng, tally, options.kills)
            compare(want, job.answers(), f"seed {options.seed}, job {tally.jobs}")
            tally.jobs += 1
            tally.calls += options.calls
            tally.starts += job.starts()
            tally.rows += sum(len(part) for part in want.values())
    print(
        f"{tally.kills} kills ({tally.mains} of main, {tally.executors} of executors, {tally.cuts} journals cut)"
        f" in {tally.jobs} jobs: {tally.calls:,} calls, {tally.starts:,} started,"
        f" {tally.rows:,} rows compared, no difference"
    )


if __name__ == "__main__":
    main()
