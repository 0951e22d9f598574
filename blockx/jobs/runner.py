"""One task's life: pin code, produce, collect, finish; and the jobs of a run in turn.

Jobs thread, but for three doors: ``deliver`` (actor thread) and ``request_stop`` and ``fail`` (main
thread) only put something into the inbox and never block. Flow control by credits: at most
``stream_build.max_outstanding_batches`` stream batches are on their way; the inbox can hold no more
than their results, which is what bounds it. A settled stream batch gives its credit back at once,
since the reorder buffer keeps memory level by itself; only a full buffer stops production.

Invariants: each call of the list gets exactly one record; what stands under a final name is from a
job that came to its end; the dispatcher is told to forget every task that it was told of.

A job that is stopped (a signal) leaves nothing new: its ``*.partial`` files are removed, its report
is not written, later jobs do not run. A job that ends early by itself (``fail_fast``, its own
deadline) is complete: calls that were never produced get their record too, so that ``failures``
holds all that is left to do. A job whose outputs pass ``dispatcher.max_collected_output_bytes``, or
cannot be written, fails as a whole and leaves no outputs; the jobs after it run.
"""

import queue
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Protocol

from blockx.config import JobConfig, LoadedConfig
from blockx.dispatcher.commands import (
    EmitResult,
    FinishTask,
    JobCommand,
    ReturnCredit,
    StopProduction,
)
from blockx.dispatcher.model import (
    CallCounts,
    CallError,
    CallResult,
    CallSpec,
    Costs,
    FailurePolicy,
    TaskEnd,
    TaskSpec,
    Via,
)
from blockx.errors import ErrorKind, UsageError
from blockx.functions.view import FunctionView
from blockx.jobs.reorder import ReorderBuffer
from blockx.jobs.report import JobProgress, JobReport, add_counts
from blockx.jobs.sinks import JobFailedError, JobSinks, all_outputs, check_writable
from blockx.jobs.sources import CallListSource, RejectedCall, StreamBatch, missing_function

ABORT_WAIT_MS = 5_000
"""How long a cancelled task may take to settle (an executor that does not obey is killed after 1
s). Over: the job ends without waiting for it."""

_BY_INDEX = attrgetter("index")


class JobPort(Protocol):
    """Where a task's outcomes go."""

    def deliver(self, commands: Sequence[JobCommand]) -> None:
        """Take them, in order. Actor thread; never blocks."""


class Dispatch(Protocol):
    """The dispatcher as a job sees it. Jobs thread; every method only posts and returns at once."""

    def open(self, task: TaskSpec, view: FunctionView, port: JobPort) -> None:
        """Announce a task; its outcomes go to ``port``."""

    def submit(self, task_id: str, batch_id: int, calls: list[CallSpec]) -> None:
        """Hand over one stream batch."""

    def end_production(self, task_id: str) -> None:
        """No further stream batch will come."""

    def cancel(self, task_id: str, drain: bool) -> None:
        """Stop a task; ``drain``: calls that run may end."""

    def remove(self, task_id: str) -> None:
        """Forget a task."""


Statistics = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Backend -> section -> counter -> number; the chains are the sections of ``rpc``."""


class _Stop:
    """In the inbox: the user asked to stop."""


class JobRunner:
    """One job, once. ``run`` does all of it."""

    # Made by ``run``, in this order, and closed by it.
    _source: CallListSource
    _sinks: JobSinks
    _reorder: ReorderBuffer

    def __init__(
        self,
        loaded: LoadedConfig,
        job: JobConfig,
        view_factory: Callable[[], FunctionView],
        dispatch: Dispatch,
        run_id: str,
        progress: JobProgress,
        statistics: Callable[[str], Statistics] | None = None,
    ) -> None:
        """``statistics``: numbers of the reads of a task, asked once when it has ended."""
        self._loaded = loaded
        self._job = job
        self._view_factory = view_factory
        self._dispatch = dispatch
        self._progress = progress
        self._statistics = statistics
        self._task_id = f"{job.name}@{run_id}"
        self._inbox: queue.SimpleQueue[Sequence[JobCommand] | _Stop | BaseException] = (
            queue.SimpleQueue()
        )
        self._handlers: dict[type, Callable[..., None]] = {
            EmitResult: self._on_result,
            ReturnCredit: self._on_credit,
            StopProduction: self._on_stop_production,
            FinishTask: self._on_finish,
        }
        self._credits = loaded.config.stream_build.max_outstanding_batches
        self._batches: dict[int, StreamBatch] = {}
        self._next_batch_id = 1
        self._producing = True
        self._finished: FinishTask | None = None
        self._early = CallCounts()
        """Calls that the dispatcher never saw."""
        self._told_load_errors = 0
        self._stop_requests = 0
        self._stop_due_ms = 0
        """Monotonic moment at which waiting for running calls ends. 0: nobody asked to stop."""
        self._aborting = False

    # ---- other threads ---------------------------------------------------------------------------

    def deliver(self, commands: Sequence[JobCommand]) -> None:
        """JobPort. Actor thread."""
        self._inbox.put(commands)

    def request_stop(self) -> None:
        """First: stop admission, let running calls end within ``run.grace_ms``. Second: at once.
        Main thread."""
        self._inbox.put(_Stop())

    def fail(self, error: BaseException) -> None:
        """The dispatcher is gone, no FinishTask will come: ``run`` raises ``error``. Main
        thread."""
        self._inbox.put(error)

    # ---- jobs thread -----------------------------------------------------------------------------

    @property
    def was_stopped(self) -> bool:
        """The job was asked to stop before it had ended."""
        return self._stop_requests > 0

    def run(self) -> JobReport:
        """Run the job to its end, whatever that is. What vanished since it was checked (the call
        list, a function, the folder of an output) fails this job alone."""
        self._progress.start_job(self._job.name, time.monotonic_ns())
        job, loaded = self._job, self._loaded
        try:
            view = self._view_factory()
            _check_function(job, view)
            file = loaded.resolve(job.calls) if isinstance(job.calls, str) else None
            with closing(CallListSource(job, file, view, loaded.config.stream_build)) as source:
                self._sinks = JobSinks(job, loaded)
                try:
                    self._progress.say(_first_line(job, loaded))
                    return self._run_task(source, view)
                finally:
                    self._sinks.discard()
        except (UsageError, JobFailedError) as error:
            self._progress.say(f"job {job.name}: {error}")
            return JobReport(
                job.name, CallCounts(), CallCounts(), 0, complete=False, error=str(error)
            )

    def _run_task(self, source: CallListSource, view: FunctionView) -> JobReport:
        sinks = self._sinks
        self._source = source
        with closing(
            ReorderBuffer(
                sinks.outputs_count,
                self._loaded.config.run.reorder_memory_bytes,
                sinks.open_spill_file,
                sinks.write,
            )
        ) as self._reorder:
            self._dispatch.open(self._task_spec(), view, self)
            try:
                self._collect()
                if self.was_stopped:
                    return self._report()
                return self._finish()
            except JobFailedError as error:
                self._progress.say(f"job {self._job.name}: {error}")
                self._abort_task()
                return self._report(error=str(error))
            finally:
                self._dispatch.remove(self._task_id)
                self._tell_oddities()

    def _collect(self) -> None:
        """Produce and take in outcomes until the task has ended, or is given up."""
        while self._finished is None:
            # Between two stream batches the inbox is looked at, so that a stop is heard at once even
            # while a list of nothing but bad lines is being read.
            timeout_s = 0 if self._produce() else self._time_left_s()
            try:
                item = self._inbox.get(timeout=timeout_s)
            except queue.Empty:
                if not self._on_stop_due():
                    return
                continue
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, _Stop):
                self._on_stop()
                if self._stop_requests > 1:
                    return
                continue
            self._handle(item)

    def _handle(self, commands: Sequence[JobCommand]) -> None:
        handlers = self._handlers
        for command in commands:
            handlers[type(command)](command)

    # ---- production ------------------------------------------------------------------------------

    def _produce(self) -> bool:
        """One stream batch if there is a credit for it; whether another one may follow."""
        if not self._producing or self._credits == 0 or self._reorder.is_full:
            return False
        batch = self._next_batch()
        if batch is None:
            self._progress.total = self._progress.produced
            self._end_production()
            return False
        self._admit(batch)
        return True

    def _next_batch(self) -> StreamBatch | None:
        try:
            return self._source.next_batch()
        except OSError as error:
            raise JobFailedError(
                f"{self._job.calls}: the call list cannot be read on: {error.strerror}"
            ) from None

    def _admit(self, batch: StreamBatch) -> None:
        self._progress.produced += batch.count
        self._reorder.open_batch(batch.first_index, batch.count)
        for call in batch.rejected:
            self._reject(call)
        self._tell_load_errors()
        if batch.calls and self._producing:
            self._credits -= 1
            batch_id, self._next_batch_id = self._next_batch_id, self._next_batch_id + 1
            self._batches[batch_id] = batch
            self._dispatch.submit(self._task_id, batch_id, batch.calls)
        else:
            self._give_up(batch.calls)

    def _reject(self, call: RejectedCall) -> None:
        """A call that ends here: its record goes its way like any other."""
        result = CallResult(
            index=call.index,
            call_id=f"{self._job.name}/{call.index}",
            function_id=call.function_id,
            output=None,
            error=call.error,
            via=Via.NOT_RUN,
            attempts=0,
            moves=0,
            costs=Costs(),
        )
        early = self._early
        early.calls += 1
        early.failed += 1
        early.not_run += 1
        self._take(result, call.args)
        if self._job.failure_policy == FailurePolicy.FAIL_FAST.value and self._producing:
            # The dispatcher stops by itself at a failure that it sees; this one it does not.
            self._end_production()
            self._dispatch.cancel(self._task_id, True)

    def _give_up(self, calls: Sequence[CallSpec]) -> None:
        """Calls that were read, and are not dispatched any more."""
        error = None if self._finished is None else self._finished.error
        error = error or CallError(
            ErrorKind.TASK_CANCELLED, "not run: the job had ended before this call's turn"
        )
        for call in calls:
            self._reject(RejectedCall(call.index, call.function.function_id, call.args, error))

    def _end_production(self) -> None:
        self._producing = False
        self._dispatch.end_production(self._task_id)

    # ---- outcomes --------------------------------------------------------------------------------

    def _on_result(self, command: EmitResult) -> None:
        result = command.result
        self._take(result, None if result.error is None else self._args_of(result.index))

    def _take(self, result: CallResult, args: bytes | None) -> None:
        try:
            self._reorder.put(result.index, self._sinks.encode(result, args))
        except OSError as error:
            raise JobFailedError(
                f"finished calls cannot be kept in a temporary file beside the outputs: {error.strerror};"
                " free the disk, or raise run.reorder_memory_bytes"
            ) from None
        progress = self._progress
        progress.done += 1
        if result.error is not None:
            progress.failed += 1

    def _args_of(self, index: int) -> bytes | None:
        """Arguments of a call under way; only failed ones are asked for, so that no call pays for
        it."""
        for batch in self._batches.values():
            calls = batch.calls
            if calls[0].index <= index <= calls[-1].index:
                return calls[bisect_left(calls, index, key=_BY_INDEX)].args
        return None

    def _on_credit(self, command: ReturnCredit) -> None:
        del self._batches[command.batch_id]
        self._credits += 1

    def _on_stop_production(self, _command: StopProduction) -> None:
        if self._producing:
            self._end_production()

    def _on_finish(self, command: FinishTask) -> None:
        self._finished = command

    # ---- the end ---------------------------------------------------------------------------------

    def _finish(self) -> JobReport:
        """The task has ended by itself."""
        finished = self._finished
        assert finished is not None, "finished without FinishTask"
        if finished.end is TaskEnd.OUTPUT_BYTES_EXCEEDED:
            limit = self._loaded.config.dispatcher.max_collected_output_bytes
            return self._report(
                error=f"results passed dispatcher.max_collected_output_bytes ({limit:,}); outputs are discarded"
            )
        self._producing = False
        self._give_up(self._orphans(finished.end))
        while (batch := self._next_batch()) is not None:
            self._admit(batch)
        self._progress.total = self._progress.produced
        assert self._reorder.is_empty, (
            f"{self._task_id} finished, but not each of its calls has ended"
        )
        self._sinks.publish()
        return self._report(complete=True)

    def _orphans(self, end: TaskEnd) -> list[CallSpec]:
        """Calls that were on their way to the dispatcher while it ended the task by itself."""
        awaits = self._reorder.awaits
        orphans = [call for b in self._batches.values() for call in b.calls if awaits(call.index)]
        assert end is not TaskEnd.COMPLETED or not orphans, f"{self._task_id}: calls without an end"
        return orphans

    def _report(self, *, complete: bool = False, error: str = "") -> JobReport:
        finished = self._finished
        counts = CallCounts() if finished is None else finished.calls
        rpc = self._statistics(self._task_id).get("rpc", {}) if self._statistics is not None else {}
        return JobReport(
            name=self._job.name,
            calls=add_counts(counts, self._early),
            subcalls=CallCounts() if finished is None else finished.subcalls,
            rows=self._sinks.rows_count,
            complete=complete,
            error=error,
            rpc=rpc,
        )

    def _task_spec(self) -> TaskSpec:
        job, config = self._job, self._loaded.config
        budget_ms = job.call_deadline_ms
        return TaskSpec(
            task_id=self._task_id,
            job_name=job.name,
            instance_id=job.instance or job.name,
            weight=job.weight,
            failure_policy=FailurePolicy(job.failure_policy),
            attempts_max=job.max_attempts or config.worker.default_max_attempts,
            call_budget_ms=config.dispatcher.call_deadline_ms if budget_ms is None else budget_ms,
            deadline_ms=_now_ms() + job.deadline_ms if job.deadline_ms else 0,
        )

    # ---- stopping --------------------------------------------------------------------------------

    def _on_stop(self) -> None:
        self._stop_requests += 1
        if self._stop_requests > 1:
            self._dispatch.cancel(self._task_id, False)
            return
        grace_ms = self._loaded.config.run.grace_ms
        self._stop_due_ms = _now_ms() + grace_ms
        self._progress.say(
            f"job {self._job.name}: stopping, running calls have {grace_ms / 1_000:g} s to end"
            " (interrupt again to stop at once)"
        )
        if self._producing:
            self._end_production()
        self._dispatch.cancel(self._task_id, True)

    def _on_stop_due(self) -> bool:
        """A time of stopping is over: the grace, then the wait for cancelled calls. False: give
        up."""
        if self._stop_due_ms == 0 or _now_ms() < self._stop_due_ms:
            return True
        if self._aborting:
            return False
        self._aborting = True
        self._stop_due_ms = _now_ms() + ABORT_WAIT_MS
        self._dispatch.cancel(self._task_id, False)
        return True

    def _time_left_s(self) -> float | None:
        if self._stop_due_ms == 0:
            return None
        return max(0, self._stop_due_ms - _now_ms()) / 1_000 + 0.001

    def _abort_task(self) -> None:
        """The job has failed: cancel what runs, and wait until the dispatcher is through with
        it."""
        if self._finished is not None:
            return
        if self._producing:
            self._end_production()
        self._dispatch.cancel(self._task_id, False)
        due_ms = _now_ms() + ABORT_WAIT_MS
        while self._finished is None and (left_ms := due_ms - _now_ms()) > 0:
            try:
                item = self._inbox.get(timeout=left_ms / 1_000)
            except queue.Empty:
                return
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, _Stop):
                self._stop_requests += 1
                return
            self._finished = next((c for c in item if isinstance(c, FinishTask)), None)

    # ---- what the user is told -------------------------------------------------------------------

    def _tell_load_errors(self) -> None:
        """Each function that does not load, once, as soon as the list asks for it."""
        errors = self._source.load_errors
        if len(errors) > self._told_load_errors:
            for function_id, error in list(errors.items())[self._told_load_errors :]:
                self._progress.say(
                    f"job {self._job.name}: {function_id} does not load, its calls fail: {error}"
                )
            self._told_load_errors = len(errors)

    def _tell_oddities(self) -> None:
        name = self._job.name
        malformed = self._source.malformed_count
        if malformed:
            self._progress.say(
                f"job {name}: {malformed:,} malformed lines in the call list; results say where and"
                " why, failures leaves them out"
            )
        for function_id, what in self._sinks.rowless_functions.items():
            self._progress.say(
                f"job {name}: {function_id} returned {what}, which gives no row; return a dict, a list of"
                " dicts, or None"
            )


class JobsRun:
    """The jobs of a run, one after the other. ``run`` on the jobs thread, ``request_stop`` from
    main."""

    def __init__(
        self,
        loaded: LoadedConfig,
        jobs: Sequence[JobConfig],
        view_factory: Callable[[], FunctionView],
        dispatch: Dispatch,
        run_id: str,
        progress: JobProgress,
        statistics: Callable[[str], Statistics] | None = None,
    ) -> None:
        self.reports: list[JobReport] = []
        """Of the jobs that have ended, in order."""
        self.was_stopped = False
        """A job was stopped, or one did not start since the run was asked to stop."""
        self._stop_requests = 0
        self._runners = [
            JobRunner(loaded, job, view_factory, dispatch, run_id, progress, statistics)
            for job in jobs
        ]
        self._progress = progress

    def run(self) -> int:
        """All jobs; the exit code: 0 all right, 1 a call or a job failed. See ``was_stopped``
        first."""
        for runner in self._runners:
            if self._stop_requests:
                self.was_stopped = True
                break
            self.reports.append(runner.run())
            self.was_stopped |= runner.was_stopped and not self.reports[-1].complete
        if self.was_stopped:
            self._progress.say(
                "stopped; nothing was written under a final name by the job that ran"
            )
        return 0 if all(report.is_right for report in self.reports) else 1

    def request_stop(self) -> None:
        """First: end softly. Second: at once. Main thread."""
        self._stop_requests += 1
        for runner in self._runners:
            runner.request_stop()

    def fail(self, error: BaseException) -> None:
        """The dispatcher is gone: ``run`` raises ``error``. Main thread."""
        for runner in self._runners:
            runner.fail(error)


def check_jobs(loaded: LoadedConfig, jobs: Sequence[JobConfig], view: FunctionView) -> None:
    """What can be known before anything runs: functions, call lists, outputs.

    Raises:
        UsageError: one line for each mistake.
    """
    checks: list[Callable[[], None]] = []
    written: set[Path] = set()
    for job in jobs:
        checks.append(partial(_check_function, job, view))
        if isinstance(job.calls, str):
            file = loaded.resolve(job.calls)
            if file.resolve() not in written:  # else an earlier job writes it
                checks.append(partial(_check_readable, job, file))
        for name in all_outputs(job):
            written.add(loaded.resolve(name).resolve())
            checks.append(partial(check_writable, loaded.resolve(name)))
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


def _check_function(job: JobConfig, view: FunctionView) -> None:
    if job.function and view.get(job.function) is None:
        raise UsageError(f"job {job.name}: {missing_function(job.function, view)}")


def _check_readable(job: JobConfig, file: Path) -> None:
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise UsageError(
            f"job {job.name}: the call list {file} cannot be opened: {error.strerror}"
        ) from None


def _first_line(job: JobConfig, loaded: LoadedConfig) -> str:
    """``job NAME: new, …``: what begins, from where to where."""
    outputs = all_outputs(job)
    source = (
        job.calls if isinstance(job.calls, str) else f"{len(job.calls)} calls of {loaded.file.name}"
    )
    earlier = [name for name in outputs if loaded.resolve(name).exists()]
    replaces = f", replaces {', '.join(earlier)} of an earlier run" if earlier else ""
    return f"job {job.name}: new, {source} -> {', '.join(outputs) or 'no files'}{replaces}"


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
