"""What the load scripts share: the machine's name, medians, CPU from outside, and a run of the product.

The product is always run as its user runs it: ``blockx.py`` in a folder with a config.yaml, functions and
calls.jsonl, results to a file. A warm-up job runs first in the same process; the measured job lasts from the
moment that job's results got their final name to the moment its own did (a rename sets ``st_ctime``), so it
includes reading the list, dispatch, execution, writing the results in order and the flush to disk.
"""

import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
COMPILED_VARIABLE = "BLOCKX_COMPILED"
"""Set to 1: what is measured, here and in processes below, is the build that ``make build/compiled`` leaves."""
PROCESSES = 2
RUN_SECONDS_MAX = 600
"""A run that takes longer is stopped, and the benchmark with it."""
SAMPLE_S = 0.025

Measures = dict[str, float]


def is_compiled() -> bool:
    return os.environ.get(COMPILED_VARIABLE) == "1"


def code() -> Path:
    """The folder of the blockx that is measured. Raises SystemExit when it has not been built."""
    if not is_compiled():
        return ROOT
    folder = ROOT / "build" / "compiled"
    if not list(folder.glob("blockx/executor/runtime.*.so")):
        raise SystemExit("there is no compiled build: make build/compiled")
    return folder


def machine() -> str:
    """One line: processor, cores, system, Python, commit, load."""
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
        f"Python {platform.python_version()}, commit {commit()}, "
        f"load before the start {os.getloadavg()[0]:.1f}"
    )


def commit() -> str:
    """The commit of this checkout, ``-dirty`` when files differ from it, ``compiled-`` for the compiled build."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    return ("compiled-" if is_compiled() else "") + (described or "unknown")


def median(runs: Sequence[Measures], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def ratios(ours: Sequence[Measures], theirs: Sequence[Measures], key: str) -> list[float]:
    """``ours / theirs`` of each repetition, sorted: runs of one repetition saw the same machine."""
    return sorted(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))


def round_trips(starts_ns: Iterable[object]) -> Measures:
    """p50 and p99 of the time from one body's start to the next, in microseconds."""
    starts = [int(str(start)) for start in starts_ns]
    gaps_us = sorted((b - a) / 1_000 for a, b in itertools.pairwise(starts))
    return {"p50_us": gaps_us[len(gaps_us) // 2], "p99_us": gaps_us[len(gaps_us) * 99 // 100]}


class CpuSampler:
    """CPU seconds of a process and all its descendants over time; ended ones keep their last value."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seen: dict[int, float] = {}
        self._samples: list[tuple[int, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [self._root, *self._root.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        times = process.cpu_times()
                        self._seen[process.pid] = times.user + times.system
            self._samples.append((time.time_ns(), sum(self._seen.values())))

    def between(self, start_ns: int, end_ns: int) -> float:
        """CPU seconds used between two moments of the wall clock."""
        self._ended.set()
        self._thread.join()
        before = max((cpu for at, cpu in self._samples if at <= start_ns), default=0.0)
        return max((cpu for at, cpu in self._samples if at <= end_ns), default=before) - before


@dataclass(frozen=True)
class Job:
    """What to run: a function and its calls, one JSON text an argument list."""

    function: str
    calls: Sequence[str]
    warm_calls: Sequence[str] = ()


@dataclass(frozen=True)
class Finished:
    """One run of the product, of which every call succeeded unless ``failures`` were expected."""

    seconds: float
    """Of the measured job; see the module's docstring."""
    whole_s: float
    """Of the process, from its start to its end."""
    first_s: float
    """From the start of the process to the final name of the first results."""
    results: list[Mapping[str, Any]]
    report: Mapping[str, Any]
    cpu_s: float
    """Of all processes during the measured job."""


CONFIG = """\
worker: {worker}
dispatcher: {dispatcher}
jobs:
{jobs}report: report.json
{more}"""
JOB = "  - {{name: {name}, function: {function}, calls: {name}.jsonl, results: {name}-results.jsonl}}\n"


@contextlib.contextmanager
def product(
    functions: Mapping[str, str],
    job: Job,
    *,
    worker: str = "",
    dispatcher: str = "{}",
    more: str = "",
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The product, just started, and its folder; removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="blockx-bench-") as name:
        folder = Path(name)
        (folder / "functions").mkdir()
        for function_id, source in functions.items():
            (folder / "functions" / f"{function_id}.py").write_text(source)
        lists = {"warm": job.warm_calls, "measured": job.calls}
        jobs = ""
        for list_name, calls in lists.items():
            if calls:
                lines = "".join(f'{{"args": {call}}}\n' for call in calls)
                (folder / f"{list_name}.jsonl").write_text(lines)
                jobs += JOB.format(name=list_name, function=job.function)
        text = CONFIG.format(
            worker=worker or f"{{executor_count: {PROCESSES}}}",
            dispatcher=dispatcher,
            jobs=jobs,
            more=more,
        )
        (folder / "config.yaml").write_text(text)
        process = subprocess.Popen(
            [sys.executable, str(code() / "blockx.py"), "--config", "config.yaml"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process, folder
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def run_product(
    functions: Mapping[str, str], job: Job, *, failures: bool = False, **settings: str
) -> Finished:
    """Run the product to its end. Raises SystemExit when it fails, or a call does and none may."""
    started, started_ns = time.perf_counter(), time.time_ns()
    with product(functions, job, **settings) as (process, folder):
        sampler = CpuSampler(process.pid)
        output, _ = process.communicate(timeout=RUN_SECONDS_MAX)
        whole_s = time.perf_counter() - started
        if process.returncode not in ((0, 1) if failures else (0,)):
            raise SystemExit(f"blockx ended with {process.returncode}:\n{output}")
        first = "warm" if job.warm_calls else "measured"
        first_ns = (folder / f"{first}-results.jsonl").stat().st_ctime_ns
        end_ns = (folder / "measured-results.jsonl").stat().st_ctime_ns
        start_ns = first_ns if job.warm_calls else started_ns
        lines = (folder / "measured-results.jsonl").read_text().splitlines()
        if len(lines) != len(job.calls):
            raise SystemExit(f"blockx: {len(lines)} results of {len(job.calls)} calls")
        return Finished(
            seconds=(end_ns - start_ns) / 1e9,
            whole_s=whole_s,
            first_s=(first_ns - started_ns) / 1e9,
            results=[json.loads(line) for line in lines],
            report=json.loads((folder / "report.json").read_text()),
            cpu_s=sampler.between(start_ns, end_ns),
        )
