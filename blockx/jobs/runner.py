"""One task's life: pin code, produce, collect, finish.

Jobs thread (with jobs side by side, a jobs thread each), but for these doors: ``deliver`` and ``reached``
(actor thread), ``pinned`` (io thread), ``request_stop`` and ``fail`` (main thread) only put something into
the inbox and never block. Flow control by credits: at most ``stream_build.max_outstanding_batches`` stream
batches are on their way; the inbox can hold no more than their results, which is what bounds it. A settled
stream batch gives its credit back at once, since the reorder buffer keeps memory level by itself; only a
full buffer stops production.

Invariants: each call of the list gets exactly one record; what stands under a final name is from a
job that came to its end; the dispatcher is told to forget every task that it was told of.

A job that is stopped (a signal) leaves its journal and nothing else: its ``*.partial`` files are removed,
its report is not written, later jobs do not run; the next run resumes it. So does a job whose outputs or
journal cannot be written (a full disk); the jobs after it run. A job that ends early by itself
(``fail_fast``, its own deadline) is complete: calls that were never produced get their record too, so that
``failures`` holds all that is left to do. A job whose outputs pass
``dispatcher.max_collected_output_bytes`` fails as a whole and leaves nothing to resume.
"""

import queue
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

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
from blockx.jobs.call_list import (
    READ_ERRORS,
    CallListSource,
    RejectedCall,
    StreamBatch,
    missing_function,
)
from blockx.jobs.choice import Choice
from blockx.jobs.journal import Journal, JournalRecord
from blockx.jobs.ledger import Ledger
from blockx.jobs.output_file import JobFailedError, write_failed
from blockx.jobs.records import (
    EMPTY,
    JobSinks,
    all_outputs,
    form_of,
    journal_place,
    output_files,
)
from blockx.jobs.reorder import ReorderBuffer
from blockx.jobs.report import (
    FailureReasons,
    JobProgress,
    JobReport,
    add_counts,
    job_report_of,
)
from blockx.jobs.resume import Plan, Situation, command_with, make_plan, of_count
from blockx.jobs.sinks.base import TableWriter
from blockx.jobs.sources import registry as sources
from blockx.jobs.sources.base import Place, TableRows

ABORT_WAIT_MS = 5_000
"""How long a cancelled task may take to settle (an executor that does not obey is killed after 1
s). Over: the job ends without waiting for it."""

_BY_INDEX = attrgetter("index")


Pins = Mapping[str, Any]
"""Plain JSON values of the io side."""


class Tables(TableRows, TableWriter, Protocol):
    """The table store, for sources and sinks."""


class JobPort(Protocol):
    """Where a task's outcomes go."""

    def deliver(self, commands: Sequence[JobCommand]) -> None:
        """Take them, in order. Actor thread; never blocks."""

    def reached(self, function_id: str, digest: str) -> None:
        """A call of the task is about to use this function, for the first time; digest "": there is none
        of that name. Comes before the result of any call that used it. Actor thread; never blocks."""


class Dispatch(Protocol):
    """The dispatcher as a job sees it. Jobs thread; every method only posts and returns at once."""

    def open(self, task: TaskSpec, view: FunctionView, port: JobPort) -> None:
        """Announce a task; its outcomes go to ``port``."""

    def keep_pins(self, task_id: str, pins: Pins, on_pins: Callable[[str, Pins], None]) -> None:
        """Before ``open``: start with these blocks pinned, by chain, and tell of further ones as
        (chain, pins), before any result that depends on them. ``on_pins``: io thread; never blocks."""

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

    __slots__ = ("why",)

    def __init__(self, why: str) -> None:
        self.why = why


@dataclass(slots=True)
class _Reached:
    """In the inbox: see ``JobPort.reached``."""

    function_id: str
    digest: str


@dataclass(slots=True)
class _Pinned:
    """In the inbox: see ``Dispatch.keep_pins``."""

    chain: str
    pins: Pins


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTools:
    """What all jobs of a run share."""

    loaded: LoadedConfig
    view_factory: Callable[[], FunctionView]
    dispatch: Dispatch
    run_id: str
    choice: Choice = field(default_factory=Choice)
    statistics: Callable[[str], Statistics] | None = None
    """Numbers of the reads of a task, asked once when it has ended."""
    tables: Tables | None = None
    """None: there is no table store."""


class JobRunner:
    """One job, once. ``run`` does all of it."""

    # Made by ``run``, in this order, and closed by it.
    _ledger: Ledger
    _source: CallListSource
    _sinks: JobSinks
    _reorder: ReorderBuffer

    def __init__(self, tools: JobTools, job: JobConfig, progress: JobProgress) -> None:
        loaded = tools.loaded
        self._tools = tools
        self._loaded = loaded
        self._job = job
        self._dispatch = tools.dispatch
        self._progress = progress
        self._task_id = f"{job.name}@{tools.run_id}"
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._handlers: dict[type, Callable[..., None]] = {
            EmitResult: self._on_result,
            ReturnCredit: self._on_credit,
            StopProduction: self._on_stop_production,
            FinishTask: self._on_finish,
            _Reached: self._on_reached,
            _Pinned: self._on_pinned,
        }
        # A limit of calls in flight is one of credits: then each call travels alone.
        self._group_calls = 1 if job.max_inflight else 0
        self._credits = job.max_inflight or loaded.config.stream_build.max_outstanding_batches
        self._waiting: deque[list[CallSpec]] = deque()
        """Calls that were read and wait for a credit, in the groups in which they will leave."""
        self._batches: dict[int, list[CallSpec]] = {}
        self._next_batch_id = 1
        self._producing = True
        self._finished: FinishTask | None = None
        self._early = CallCounts()
        """Calls that the dispatcher never saw."""
        self._reasons = FailureReasons()
        self._left_count = 0
        """Calls that the flags of this run leave out."""
        self._is_cut = False
        """The rest of the list was not read: none of it was to run."""
        self._told_load_errors = 0
        self._stop_requests = 0
        self._stopped_by = ""
        self._stop_due_ms = 0
        """Monotonic moment at which waiting for running calls ends. 0: nobody asked to stop."""
        self._aborting = False

    # ---- other threads ---------------------------------------------------------------------------

    def deliver(self, commands: Sequence[JobCommand]) -> None:
        """JobPort. Actor thread."""
        self._inbox.put(commands)

    def reached(self, function_id: str, digest: str) -> None:
        """JobPort. Actor thread."""
        self._inbox.put((_Reached(function_id, digest),))

    def pinned(self, chain: str, pins: Pins) -> None:
        """For ``Dispatch.keep_pins``. Io thread."""
        self._inbox.put((_Pinned(chain, pins),))

    def request_stop(self, why: str) -> None:
        """First: stop admission, let running calls end within ``run.grace_ms``. Second: at once.
        ``why``: what asked for it, such as SIGINT. Main thread."""
        self._inbox.put(_Stop(why))

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
        try:
            with ExitStack() as stack:
                return self._plan_and_run(stack)
        except (UsageError, JobFailedError) as error:
            self._progress.say(f"job {self._job.name}: {_without_name(error, self._job.name)}")
            return JobReport(
                self._job.name, CallCounts(), CallCounts(), 0, complete=False, error=str(error)
            )

    def _plan_and_run(self, stack: ExitStack) -> JobReport:
        """See what is there of earlier runs, and do the rest. ``stack`` closes what is opened."""
        job, loaded, tools = self._job, self._loaded, self._tools
        view = tools.view_factory()
        check_function(job, view)
        with self._journal_errors():
            plan, facts = self._look_back(stack, view)
        if plan.word == "finished":
            return self._skip(plan)
        self._source = stack.enter_context(closing(open_list(tools, job, view)))
        self._sinks = JobSinks(job, loaded, tools.tables)
        stack.callback(self._sinks.discard)
        self._reorder = stack.enter_context(
            closing(
                ReorderBuffer(
                    self._sinks.outputs_count,
                    loaded.config.run.reorder_memory_bytes,
                    self._sinks.open_spill_file,
                    self._sinks.write,
                )
            )
        )
        pins = {} if plan.past is None else plan.past.pins
        self._dispatch.keep_pins(self._task_id, pins, self.pinned)
        return self._run_task(view, facts)

    def _look_back(self, stack: ExitStack, view: FunctionView) -> tuple[Plan, dict[str, Any]]:
        """What to do with what earlier runs left, and what this one writes about itself; opens the journal
        and the ledger unless there is nothing to run. Raises OSError."""
        job, tools = self._job, self._tools
        journal = self._open_journal(stack)
        if journal is None:
            plan, facts = Plan("new", ""), dict[str, Any]()
            why = "a sample for the dry run" if tools.choice.dry_run else ""
            self._progress.say(_line_of_new(job, self._loaded, why))
        else:
            situation = situation_of(tools, job, view, journal)
            plan, facts = make_plan(situation), situation.run_facts()
            if plan.past is not None:
                stack.callback(plan.past.offsets.close)
            self._progress.total = situation.identity.count
            self._progress.say(_first_line(situation, plan))
            if plan.word == "finished":
                return plan, facts
            journal.begin(facts, fresh=plan.past is None)
        self._ledger = stack.enter_context(closing(Ledger(journal, plan, tools.choice)))
        return plan, facts

    def _open_journal(self, stack: ExitStack) -> Journal | None:
        if not self._loaded.config.run.journal:
            return None
        path = journal_place(self._job, self._loaded)
        return stack.enter_context(closing(Journal.open(path)))

    @contextmanager
    def _journal_errors(self) -> Iterator[None]:
        """An error of the file system around the journal is one of the job."""
        try:
            yield
        except OSError as error:
            raise self._journal_failed(error) from None

    def _journal_failed(self, error: OSError) -> JobFailedError:
        return write_failed(journal_place(self._job, self._loaded), error)

    def _skip(self, plan: Plan) -> JobReport:
        """The job has finished in an earlier run: its numbers stand."""
        assert plan.past is not None
        assert plan.past.end is not None
        report = job_report_of(plan.past.end["report"])
        progress = self._progress
        progress.total = progress.produced = progress.done = report.calls.calls
        progress.failed = report.calls.failed
        return report

    def _run_task(self, view: FunctionView, facts: Mapping[str, Any]) -> JobReport:
        self._dispatch.open(self._task_spec(), view, self)
        try:
            self._collect()
            if self.was_stopped:
                return self._end_early(f"stopped by {self._stopped_by}")
            return self._finish(facts)
        except JobFailedError as error:
            self._progress.say(f"job {self._job.name}: {error}")
            self._abort_task()
            return self._end_early(str(error), error=str(error))
        finally:
            self._dispatch.remove(self._task_id)
            self._tell_oddities()

    def _end_early(self, why: str, error: str = "") -> JobReport:
        """Not all calls have ended; the next run resumes."""
        report = self._report(error=error)
        self._ledger.end(why, self._subcalls(), self._reads())
        return report

    def _collect(self) -> None:
        """Produce and take in outcomes until the task has ended, or is given up."""
        while self._finished is None:
            # Between two stream batches the inbox is looked at, so that a stop is heard at once even
            # while a list of nothing but bad lines is being read.
            timeout_s = 0 if self._produce() else self._time_left_s()
            try:
                self._ledger.commit_due()
            except OSError as error:
                raise self._journal_failed(error) from None
            try:
                item = self._inbox.get(timeout=timeout_s)
            except queue.Empty:
                if not self._on_stop_due():
                    return
                continue
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, _Stop):
                self._on_stop(item.why)
                if self._stop_requests > 1:
                    return
                continue
            self._handle(item)

    def _handle(self, commands: "Sequence[JobCommand | _Reached | _Pinned]") -> None:
        handlers = self._handlers
        for command in commands:
            handlers[type(command)](command)

    # ---- production ------------------------------------------------------------------------------

    def _produce(self) -> bool:
        """One stream batch if there is a credit for it; whether another one may follow."""
        if not self._producing or self._credits == 0:
            return False
        if self._waiting:
            self._submit(self._waiting.popleft())
            return True
        if self._reorder.is_full:
            return False
        total, produced = self._progress.total, self._progress.produced
        if total is not None and total > produced and self._ledger.is_exhausted(produced):
            self._left_count += total - produced
            self._is_cut = True
        batch = None if self._is_cut else self._next_batch()
        if batch is None:
            self._progress.total = self._progress.produced
            self._end_production()
            return False
        self._admit(batch)
        return True

    def _next_batch(self) -> StreamBatch | None:
        try:
            return self._source.next_batch()
        except READ_ERRORS as error:
            why = error.strerror if isinstance(error, OSError) else error
            name = sources.describe(self._job)
            raise JobFailedError(f"{name}: the call list cannot be read on: {why}") from None

    def _admit(self, batch: StreamBatch) -> None:
        self._progress.produced += batch.count
        self._reorder.open_batch(batch.first_index, batch.count)
        with self._journal_errors():
            self._ledger.reach(self._source.functions)
            calls = self._ledger.sort(batch)
            for record in calls.kept:
                self._keep(record)
        for index in calls.left:
            self._reorder.put(index, EMPTY)
        self._left_count += len(calls.left)
        for call in batch.rejected:
            self._reject(call)
        self._tell_load_errors()
        if not self._producing:
            self._give_up(calls.run)
        elif calls.run:
            size = self._group_calls or len(calls.run)
            starts = range(0, len(calls.run), size)
            self._waiting.extend(calls.run[start : start + size] for start in starts)
            self._submit(self._waiting.popleft())

    def _submit(self, calls: list[CallSpec]) -> None:
        self._credits -= 1
        batch_id, self._next_batch_id = self._next_batch_id, self._next_batch_id + 1
        self._batches[batch_id] = calls
        self._dispatch.submit(self._task_id, batch_id, calls)

    def _keep(self, record: JournalRecord) -> None:
        """A call that finished in an earlier run."""
        self._put(record.call_index, record.parts)
        self._count_ended(failed=not record.ok)
        if not record.ok:
            self._stop_at_unseen_failure()

    def _count_ended(self, *, failed: bool) -> None:
        progress = self._progress
        progress.done += 1
        if not failed:
            return
        progress.failed += 1

    def _stop_at_unseen_failure(self) -> None:
        """The dispatcher stops by itself at a failure that it sees; this one it did not."""
        if self._producing and self._is_stopped_by_failures():
            self._end_production()
            self._dispatch.cancel(self._task_id, True)

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
        self._put(result.index, self._sinks.encode(result, call.args))
        self._reasons.add(result)
        self._count_ended(failed=True)
        self._stop_at_unseen_failure()

    def _is_stopped_by_failures(self) -> bool:
        """Whether the job's failure policy ends it now that one more call has failed."""
        job, progress = self._job, self._progress
        if job.failure_policy == FailurePolicy.STOP_ABOVE_RATIO.value:
            ended, failed = progress.done, progress.failed
            return ended >= job.failure_calls_min and failed > job.failure_ratio_max * ended
        return job.failure_policy == FailurePolicy.FAIL_FAST.value

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
        result, sinks = command.result, self._sinks
        args = self._args_of(result.index) if sinks.needs_args(result) else None
        rows_before = sinks.rows_count
        record = sinks.encode(result, args)
        # A failure while the job is being stopped may be one that would have been retried.
        if result.error is None or not self._stop_requests:
            try:
                self._ledger.add(result, sinks.rows_count - rows_before, record)
            except OSError as error:
                raise self._journal_failed(error) from None
        self._put(result.index, record)
        progress = self._progress
        progress.done += 1
        if result.error is not None:
            progress.failed += 1
            self._reasons.add(result)

    def _put(self, index: int, record: tuple[bytes, ...]) -> None:
        try:
            self._reorder.put(index, record)
        except OSError as error:
            raise JobFailedError(
                f"finished calls cannot be kept in a temporary file beside the outputs: {error.strerror};"
                " free the disk, or raise run.reorder_memory_bytes"
            ) from None

    def _args_of(self, index: int) -> bytes | None:
        """Arguments of a call under way; asked for only where they are needed, so that no other call
        pays for it."""
        for calls in self._batches.values():
            if calls[0].index <= index <= calls[-1].index:
                call = calls[bisect_left(calls, index, key=_BY_INDEX)]
                if call.index == index:
                    return call.args
        return None

    def _on_reached(self, item: _Reached) -> None:
        self._ledger.reach({item.function_id: item.digest})

    def _on_pinned(self, item: _Pinned) -> None:
        self._ledger.pin(item.chain, item.pins)

    def _on_credit(self, command: ReturnCredit) -> None:
        del self._batches[command.batch_id]
        self._credits += 1

    def _on_stop_production(self, _command: StopProduction) -> None:
        if self._producing:
            self._end_production()

    def _on_finish(self, command: FinishTask) -> None:
        self._finished = command

    # ---- the end ---------------------------------------------------------------------------------

    def _finish(self, facts: Mapping[str, Any]) -> JobReport:
        """The task has ended by itself."""
        finished = self._finished
        assert finished is not None, "finished without FinishTask"
        if finished.end is TaskEnd.OUTPUT_BYTES_EXCEEDED:
            limit = self._loaded.config.dispatcher.max_collected_output_bytes
            self._ledger.forget()
            return self._report(
                error=f"results passed dispatcher.max_collected_output_bytes ({limit:,}); outputs are discarded"
            )
        self._producing = False
        self._give_up(self._orphans(finished.end))
        while not self._is_cut and (batch := self._next_batch()) is not None:
            self._admit(batch)
        self._progress.total = self._progress.produced
        assert self._reorder.is_empty, (
            f"{self._task_id} finished, but not each of its calls has ended"
        )
        if self._left_count:
            return self._finish_part()
        self._sinks.publish()
        report = self._report(complete=True)
        files = {n: self._loaded.resolve(n) for n in output_files(self._job).values()}
        with self._journal_errors():
            self._ledger.finish(facts, report.as_dict(), files, self._subcalls(), self._reads())
        return report

    def _finish_part(self) -> JobReport:
        """All chosen calls have ended, the others are for a later run."""
        if self._tools.choice.dry_run:
            return self._report()
        self._sinks.keep()
        self._progress.say(
            f"job {self._job.name}: {self._left_count:,} calls of the list were left out and are not finished;"
            " the others stand in the files *.partial; run again without --limit, --where and --only-failed"
            " for all"
        )
        return self._end_early("some calls were left out")

    def _orphans(self, end: TaskEnd) -> list[CallSpec]:
        """Calls that were on their way to the dispatcher while it ended the task by itself."""
        awaits = self._reorder.awaits
        groups = [*self._batches.values(), *self._waiting]
        orphans = [call for calls in groups for call in calls if awaits(call.index)]
        assert end is not TaskEnd.COMPLETED or not orphans, f"{self._task_id}: calls without an end"
        return orphans

    def _report(self, *, complete: bool = False, error: str = "") -> JobReport:
        finished, ledger = self._finished, self._ledger
        counts = CallCounts() if finished is None else finished.calls
        refused = self._sinks.refused_count
        return JobReport(
            name=self._job.name,
            calls=add_counts(add_counts(counts, self._early), ledger.kept),
            subcalls=add_counts(self._subcalls(), ledger.earlier_subcalls()),
            rows=self._sinks.rows_count + ledger.kept_rows - refused,
            complete=complete,
            error=error,
            rpc=ledger.rpc_with_earlier(self._reads()),
            resumed=ledger.kept.calls,
            left=self._left_count,
            rows_refused=refused,
            failures=self._reasons.kinds,
        )

    def _subcalls(self) -> CallCounts:
        """Of this run."""
        return CallCounts() if self._finished is None else self._finished.subcalls

    def _reads(self) -> Mapping[str, Mapping[str, int]]:
        """Of this run, by chain."""
        statistics = self._tools.statistics
        return {} if statistics is None else statistics(self._task_id).get("rpc", {})

    def _task_spec(self) -> TaskSpec:
        job, config = self._job, self._loaded.config
        budget_ms = job.call_deadline_ms
        return TaskSpec(
            task_id=self._task_id,
            job_name=job.name,
            instance_id=job.instance or job.name,
            weight=job.weight,
            failure_policy=FailurePolicy(job.failure_policy),
            failure_ratio_max=job.failure_ratio_max,
            failure_calls_min=job.failure_calls_min,
            attempts_max=job.max_attempts or config.worker.default_max_attempts,
            call_budget_ms=config.dispatcher.call_deadline_ms if budget_ms is None else budget_ms,
            deadline_ms=_now_ms() + job.deadline_ms if job.deadline_ms else 0,
        )

    # ---- stopping --------------------------------------------------------------------------------

    def _on_stop(self, why: str) -> None:
        self._stop_requests += 1
        self._stopped_by = self._stopped_by or why
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
        commit_s = self._ledger.wait_s()
        if self._stop_due_ms == 0:
            return commit_s
        stop_s = max(0, self._stop_due_ms - _now_ms()) / 1_000 + 0.001
        return stop_s if commit_s is None else min(stop_s, commit_s)

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
                self._stopped_by = self._stopped_by or item.why
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
        if self._sinks.refused_count:
            self._progress.say(
                f"job {name}: {self._sinks.refused_count:,} rows do not fit into {self._job.output} and are left"
                f" out, their calls stand in failures; first: {self._sinks.first_refusal}"
            )


def open_list(tools: JobTools, job: JobConfig, view: FunctionView) -> CallListSource:
    """The call list of a job from its beginning. Raises UsageError."""
    source = sources.open_source(job, Place(job.name, tools.loaded.resolve, tools.tables))
    return CallListSource(source, job.function, view, tools.loaded.config.stream_build)


def situation_of(
    tools: JobTools, job: JobConfig, view: FunctionView, journal: Journal
) -> Situation:
    """What there is to be looked at before a job runs. Raises UsageError: the list cannot be read."""
    loaded = tools.loaded
    return Situation(
        job=job,
        loaded=loaded,
        view=view,
        choice=tools.choice,
        journal=journal,
        identity=sources.identify(job, Place(job.name, loaded.resolve, tools.tables)),
        form=form_of(job),
        outputs={name: loaded.resolve(name) for name in output_files(job).values()},
        open_list=partial(open_list, tools, job, view),
    )


_Item = Sequence[JobCommand | _Reached | _Pinned] | _Stop | BaseException


def check_function(job: JobConfig, view: FunctionView) -> None:
    """The job's default function is there. Raises UsageError."""
    if job.function and view.get(job.function) is None:
        raise UsageError(f"job {job.name}: {missing_function(job.function, view)}")


def _first_line(situation: Situation, plan: Plan) -> str:
    """What becomes of the job, why, and the command for the other choice."""
    job = situation.job
    if plan.word == "finished":
        return f"job {job.name}: finished, {plan.why}"
    if plan.word == "new":
        return _line_of_new(job, situation.loaded, plan.why)
    assert plan.past is not None
    count = of_count(plan.past, situation.identity)
    return f"job {job.name}: resumed {count} ({plan.why}); to begin anew: {command_with(situation, '--fresh')}"


def _line_of_new(job: JobConfig, loaded: LoadedConfig, why: str) -> str:
    """What begins, from where to where."""
    outputs = all_outputs(job)
    earlier = [name for name in output_files(job).values() if loaded.resolve(name).exists()]
    replaces = f", replaces {', '.join(earlier)}" if earlier else ""
    reason = f" ({why})" if why else ""
    source = sources.describe(job)
    return f"job {job.name}: new{reason}, {source} -> {', '.join(outputs) or 'no files'}{replaces}"


def _without_name(error: Exception, name: str) -> str:
    return str(error).removeprefix(f"job {name}: ")


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
