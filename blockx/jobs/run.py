"""The jobs of a run: which one starts when, and what they come to together.

Jobs thread. Jobs run one after the other in the order of the configuration, on this thread, unless
``parallel: true`` or a job's ``after`` says otherwise; then each has a thread of its own, at most
``JOBS_AT_ONCE_MAX`` at a time, further ones wait. A job waits for the jobs that it names in ``after``, else
(without ``parallel``) for all jobs before it; it starts whatever became of them. How jobs side by side share
the executors is the dispatcher's business (``instance``, ``weight``, ``dispatcher.instance_fairness``).

``request_stop`` and ``fail`` are for the main thread; they reach every job, running or not.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from blockx.config import JobConfig, LoadedConfig, waits_for
from blockx.errors import UsageError
from blockx.functions.view import FunctionView
from blockx.jobs.journal import check_free
from blockx.jobs.output_file import check_writable
from blockx.jobs.records import journal_place, output_files
from blockx.jobs.report import JobProgress, JobReport
from blockx.jobs.runner import JobRunner, JobTools, check_function
from blockx.jobs.sinks import registry as sinks
from blockx.jobs.sources import registry as sources
from blockx.jobs.sources.base import Place

JOBS_AT_ONCE_MAX = 16
"""Jobs side by side. Full: further ones wait for the end of one."""

_Ended = tuple[str, "JobReport | BaseException"]


class JobsRun:
    """See the module. ``run`` once."""

    def __init__(self, tools: JobTools, jobs: Sequence[JobConfig], progress: JobProgress) -> None:
        self.was_stopped = False
        """A job was stopped, or one did not start since the run was asked to stop."""
        config = tools.loaded.config
        self._waits_for = {
            name: names & {job.name for job in jobs} for name, names in waits_for(config).items()
        }
        self._in_turn = not config.parallel and all(job.after is None for job in jobs)
        self._progress = progress
        self._stop_requests = 0
        self._reports: dict[str, JobReport] = {}
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        # Jobs side by side have numbers of their own; what is shown is their sum.
        parts = [progress if self._in_turn else progress.part() for _ in jobs]
        self._runners = {
            job.name: JobRunner(tools, job, part) for job, part in zip(jobs, parts, strict=True)
        }

    @property
    def reports(self) -> list[JobReport]:
        """Of the jobs that have ended, in the order of the configuration."""
        return [self._reports[name] for name in self._runners if name in self._reports]

    def run(self) -> int:
        """All jobs; the exit code: 0 all right, 1 a call or a job failed. See ``was_stopped``
        first."""
        if self._in_turn:
            self._run_in_turn()
        else:
            self._run_side_by_side()
        if self.was_stopped:
            self._progress.say(
                "stopped; nothing was written under a final name by the job that ran, and the same command"
                " resumes it"
            )
        return 0 if all(report.is_right for report in self.reports) else 1

    def request_stop(self, why: str) -> None:
        """First: end softly. Second: at once. ``why``: such as SIGINT. Main thread."""
        self._stop_requests += 1
        for runner in self._runners.values():
            runner.request_stop(why)

    def fail(self, error: BaseException) -> None:
        """The dispatcher is gone: ``run`` raises ``error``. Main thread."""
        for runner in self._runners.values():
            runner.fail(error)

    def _run_in_turn(self) -> None:
        for name, runner in self._runners.items():
            if self._stop_requests:
                self.was_stopped = True
                return
            self._note(name, runner.run())

    def _note(self, name: str, report: JobReport) -> None:
        self._reports[name] = report
        self.was_stopped |= self._runners[name].was_stopped and not report.complete

    def _run_side_by_side(self) -> None:
        waiting, running = list(self._runners), set[str]()
        while waiting or running:
            if self._stop_requests and waiting:
                self.was_stopped = True
                waiting.clear()
                continue
            for name in self._startable(waiting, running):
                waiting.remove(name)
                running.add(name)
                body = partial(self._run_one, name)
                threading.Thread(target=body, name=f"blockx-job-{name}", daemon=True).start()
            name, outcome = self._ended.get()
            running.discard(name)
            if isinstance(outcome, BaseException):
                raise outcome
            self._note(name, outcome)

    def _startable(self, waiting: Sequence[str], running: "set[str]") -> list[str]:
        room = JOBS_AT_ONCE_MAX - len(running)
        ready = [name for name in waiting if self._waits_for[name] <= self._reports.keys()]
        return ready[:room]

    def _run_one(self, name: str) -> None:
        """The body of a job's thread."""
        try:
            self._ended.put((name, self._runners[name].run()))
        except BaseException as error:  # noqa: BLE001 - kept whole; the jobs thread raises it
            self._ended.put((name, error))


def check_jobs(
    loaded: LoadedConfig,
    jobs: Sequence[JobConfig],
    view: FunctionView,
) -> None:
    """What can be known before anything runs: functions, call lists, outputs, whether another run is at it.

    Raises:
        UsageError: one line for each mistake.
    """
    checks: list[Callable[[], None]] = []
    written: set[Path] = set()
    for job in jobs:
        checks.append(partial(check_function, job, view))
        checks.append(partial(_check_calls, job, loaded, frozenset(written)))
        checks.append(partial(_check_output_kind, job))
        for name in output_files(job).values():
            written.add(loaded.resolve(name).resolve())
            checks.append(partial(check_writable, loaded.resolve(name)))
        checks.append(partial(check_free, journal_place(job, loaded)))
    if loaded.config.report:
        checks.append(partial(check_writable, loaded.resolve(loaded.config.report)))
    mistakes = _failures_of(checks)
    if mistakes:
        raise UsageError("\n".join(mistakes))


def _failures_of(checks: Sequence[Callable[[], None]]) -> list[str]:
    failures = []
    for check in checks:
        try:
            check()
        except UsageError as error:
            failures.append(str(error))
    return failures


def _check_calls(job: JobConfig, loaded: LoadedConfig, written: "frozenset[Path]") -> None:
    """The call list can be opened, unless an earlier job writes it or the store holds it."""
    calls = job.calls
    if isinstance(calls, dict) and "table" in calls:
        return
    name = calls if isinstance(calls, str) else ""
    if isinstance(calls, dict):
        name = next(
            (v for k, v in calls.items() if k in ("csv", "sqlite") and isinstance(v, str)), ""
        )
    if name and loaded.resolve(name).resolve() in written:
        return
    if name and loaded.resolve(name).is_fifo():  # opening it would wait for its writer
        return
    try:
        with contextlib.closing(sources.open_source(job, Place(job.name, loaded.resolve))):
            pass
    except UsageError as error:
        text = str(error)
        raise UsageError(text if text.startswith("job ") else f"job {job.name}: {text}") from None


def _check_output_kind(job: JobConfig) -> None:
    if not job.output:
        return
    kind = sinks.kind_of(job.output)
    if not kind:
        raise UsageError(
            f"job {job.name}: output {job.output}: there is no such kind of output; known:"
            f" {sinks.known_kinds()}"
        )
    if kind == sinks.LINES_SUFFIX and job.schema:
        raise UsageError(
            f"job {job.name}: schema: {job.output} holds rows as they are; columns are for"
            f" {sinks.known_kinds().partition(' ')[2]}"
        )
