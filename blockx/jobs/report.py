"""What a run tells of itself: live numbers, then ``report.json`` and a table.

``JobProgress`` is written by the jobs thread and read by the main thread: plain attributes, each
written by one thread, so that a reader sees at worst numbers of a moment ago. The rest is pure.

Invariant of every line of numbers: calls = ok + failed = ran + cached + singleflight + not_run.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blockx.dispatcher.model import CallCounts, CallResult
from blockx.ipc import exact_json
from blockx.jobs.output_file import JobFailedError, OutputFile

REASON_CHARS_MAX = 200
"""Of the message of a failed call, in the summary on the terminal; ``results`` has it whole."""
NOTICES_MAX = 1_000
"""Sentences for the user that wait to be shown. Full: the oldest is dropped."""


class JobProgress:
    """Live numbers of the job that runs; the same object serves all jobs of a run, one after the
    other."""

    def __init__(self) -> None:
        self.job_name = ""
        self.started_ns = 0
        """Monotonic clock at the job's start."""
        self.produced = 0
        """Calls read from the list."""
        self.total: int | None = None
        """Calls of the list; None until its end has been read."""
        self.done = 0
        self.failed = 0
        """Those of ``done`` that failed."""
        self.running: int | None = None
        """Calls whose code or read is under way, if whoever knows it writes it here; the rest
        waits."""
        self.notices: deque[str] = deque(maxlen=NOTICES_MAX)
        """Sentences for the user, each to be shown once; taken from the left."""
        self._parts: list[JobProgress] = []

    def part(self) -> "JobProgress":
        """Numbers of one of several jobs side by side; ``gather`` adds them up."""
        part = JobProgress()
        part.notices = self.notices
        self._parts.append(part)
        return part

    def gather(self) -> None:
        """Take the numbers of the parts, if there are any. Main thread, before it reads."""
        begun = [part for part in self._parts if part.started_ns]
        if not begun:
            return
        if not self.started_ns:
            self.started_ns = min(part.started_ns for part in begun)
        self.job_name = f"{len(begun)} jobs" if len(begun) > 1 else begun[0].job_name
        self.produced = sum(part.produced for part in begun)
        self.done = sum(part.done for part in begun)
        self.failed = sum(part.failed for part in begun)
        totals = [part.total for part in self._parts if part.total is not None]
        self.total = sum(totals) if len(totals) == len(self._parts) else None

    def start_job(self, name: str, now_ns: int) -> None:
        """Begin anew for the next job."""
        self.job_name, self.started_ns = name, now_ns
        self.produced = self.done = self.failed = 0
        self.total = self.running = None

    def say(self, sentence: str) -> None:
        """Have a sentence shown to the user."""
        self.notices.append(sentence)


@dataclass(slots=True)
class FailuresOfKind:
    """Calls that failed alike in one run."""

    count: int
    first: str
    """Id of the first that ended."""
    message: str


class FailureReasons:
    """Why calls of a job failed in this run, by kind. Jobs thread."""

    def __init__(self) -> None:
        self.kinds: dict[str, FailuresOfKind] = {}

    def add(self, result: CallResult) -> None:
        """Count a call that failed."""
        assert result.error is not None, "it failed"
        kind = result.error.kind.value
        found = self.kinds.get(kind)
        if found is None:
            message = " ".join(result.error.message.split())[:REASON_CHARS_MAX]
            shown = message.encode("utf-8", "replace").decode()
            self.kinds[kind] = FailuresOfKind(1, result.call_id, shown)
        else:
            found.count += 1


@dataclass(slots=True)
class JobReport:
    """One job, as far as it came."""

    name: str
    calls: CallCounts
    subcalls: CallCounts
    rows: int
    complete: bool
    """All calls have ended and the outputs have their final names."""
    error: str = ""
    """Why the job itself failed, beyond its calls."""
    rpc: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Chain -> counters of its reads."""
    resumed: int = 0
    """Calls that had finished in an earlier run; the numbers above count them, too."""
    left: int = 0
    """Calls that the flags of the run left out."""
    rows_refused: int = 0
    """Rows that did not fit into the columns of ``output``; ``rows`` does not count them."""
    failures: Mapping[str, FailuresOfKind] = field(default_factory=dict)
    """Kind -> the calls that failed so in this run; for the terminal alone, since the report of a job that was
    resumed is that of one that never stopped."""

    @property
    def is_right(self) -> bool:
        """Complete, or as far as it was asked for, and every call is ok."""
        is_whole = self.complete or self.left > 0
        return is_whole and not (self.error or self.calls.failed or self.rows_refused)

    def as_dict(self) -> dict[str, Any]:
        """Its place in ``report.json``."""
        fields: dict[str, Any] = {"name": self.name, **asdict(self.calls), "rows": self.rows}
        fields["subcalls"] = asdict(self.subcalls)
        fields["rpc"] = {chain: dict(counters) for chain, counters in self.rpc.items()}
        for name in ("resumed", "left", "rows_refused"):
            if number := getattr(self, name):
                fields[name] = number
        if self.error:
            fields["error"] = self.error
        return fields


def job_report_of(fields: Mapping[str, Any]) -> JobReport:
    """What ``as_dict`` made a report of, of a job that was complete."""
    numbers = {"resumed": 0, "left": 0, "rows_refused": 0, **fields}
    return JobReport(
        name=numbers["name"],
        calls=_counts_of(fields),
        subcalls=_counts_of(fields["subcalls"]),
        rows=numbers["rows"],
        complete=True,
        rpc=numbers["rpc"],
        resumed=numbers["resumed"],
        rows_refused=numbers["rows_refused"],
    )


def _counts_of(fields: Mapping[str, Any]) -> CallCounts:
    return CallCounts(**{name: fields[name] for name in asdict(CallCounts())})


@dataclass(slots=True)
class RunReport:
    """All jobs of a run that were started."""

    jobs: Sequence[JobReport]
    wall_s: float
    exit_code: int
    executors: Mapping[str, Any]
    """``restarts``, ``lost``, ``killed``, ``recycled``, with reasons."""

    def as_dict(self) -> dict[str, Any]:
        """The content of ``report.json``."""
        return {
            "jobs": [job.as_dict() for job in self.jobs],
            "executors": dict(self.executors),
            "wall_s": round(self.wall_s, 3),
            "exit_code": self.exit_code,
        }

    def write(self, path: Path) -> None:
        """Write ``report.json``, whole or not at all.

        Raises:
            JobFailedError: it cannot be written.
        """
        file = OutputFile(path)
        try:
            file.write(exact_json.encode(self.as_dict()) + b"\n")
            file.flush_to_disk()
            file.rename()
        except JobFailedError:
            file.discard()
            raise


_COLUMNS = (
    "job",
    "calls",
    "ok",
    "failed",
    "ran",
    "cached",
    "shared",
    "not run",
    "retries",
    "moves",
    "rows",
    "calls/s",
)


def table_lines(report: RunReport) -> list[tuple[str, ...]]:
    """Heading and one line a job, as texts; the main thread prints them, in a frame or plain."""
    lines: list[tuple[str, ...]] = [_COLUMNS]
    for job in report.jobs:
        lines.append(
            _numbers(
                job.name,
                job.calls,
                f"{job.rows:,}",
                report.wall_s if len(report.jobs) == 1 and not job.resumed else 0,
            )
        )
        if job.subcalls.calls:
            lines.append(_numbers("  sub-calls", job.subcalls, "", 0))
    return lines


def plain_table(lines: Sequence[Sequence[str]]) -> str:
    """Columns one below the other, the first to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def summary_lines(report: RunReport) -> list[str]:
    """What does not fit into the table: reads by chain, executors, jobs that failed themselves,
    time."""
    lines = []
    for job in report.jobs:
        lines += [
            f"{job.name}: {chain}: {_counters(counters)}" for chain, counters in job.rpc.items()
        ]
        if job.resumed:
            lines.append(f"{job.name}: {job.resumed:,} calls had finished in an earlier run")
        if job.rows_refused:
            lines.append(f"{job.name}: {job.rows_refused:,} rows did not fit into the output")
        lines += failure_lines(job)
        if job.error:
            lines.append(f"{job.name}: failed: {job.error}")
    counters = {
        key: value for key, value in report.executors.items() if isinstance(value, int) and value
    }
    if counters:
        lines.append(f"executors: {_counters(counters)}")
    lines.append(f"wall time {report.wall_s:.1f} s, exit code {report.exit_code}")
    return lines


def failure_lines(job: JobReport) -> list[str]:
    """One line a kind of failure: how many calls, and what the first one says."""
    return [
        f"{job.name}: {found.count:,} failed with {kind}; the first, {found.first}: {found.message}"
        for kind, found in job.failures.items()
    ]


def add_counts(first: CallCounts, second: CallCounts) -> CallCounts:
    """The sums."""
    return CallCounts(**{key: value + getattr(second, key) for key, value in asdict(first).items()})


def _numbers(name: str, counts: CallCounts, rows: str, wall_s: float) -> tuple[str, ...]:
    numbers = (
        counts.calls,
        counts.ok,
        counts.failed,
        counts.ran,
        counts.cached,
        counts.singleflight,
        counts.not_run,
        counts.retries,
        counts.moves,
    )
    rate = f"{counts.calls / wall_s:,.0f}" if wall_s else ""
    return (name, *(f"{number:,}" for number in numbers), rows, rate)


def _counters(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in counters.items())
