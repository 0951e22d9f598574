"""``--dry-run``: what a run would do, told from the call list, the journal and a few calls.

Jobs thread (``sampled``, ``sentences``: main thread). The first calls that a run would run are run for real, as
a job without outputs and without a journal; the io side refuses everything that is not known to be a read.
Reads are told as what these calls made: calls of another kind may need more, shared and cached reads less.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import msgspec

from blockx.config import JobConfig
from blockx.jobs.call_list import CallListSource
from blockx.jobs.choice import Choice
from blockx.jobs.journal import Journal, Past
from blockx.jobs.records import journal_place
from blockx.jobs.report import JobReport, failure_lines
from blockx.jobs.resume import Plan, make_plan
from blockx.jobs.runner import JobTools, open_list, situation_of

SAMPLE_CALLS = 20
"""Calls of each job that are run."""
FUNCTIONS_SHOWN_MAX = 5
"""Functions of a list that are named, the ones called most; the rest is counted."""


def sampled(tools: JobTools, jobs: Sequence[JobConfig]) -> tuple[JobTools, list[JobConfig]]:
    """The same jobs as samples that leave nothing."""
    config = tools.loaded.config
    quiet = [msgspec.structs.replace(job, results="", output="", failures="") for job in jobs]
    config = msgspec.structs.replace(
        config, jobs=quiet, run=msgspec.structs.replace(config.run, journal=False)
    )
    choice = Choice(where=tools.choice.where, limit=SAMPLE_CALLS, dry_run=True)
    loaded = msgspec.structs.replace(tools.loaded, config=config)
    return replace(tools, loaded=loaded, choice=choice), quiet


def sentences(
    tools: JobTools, jobs: Sequence[JobConfig], reports: Sequence[JobReport]
) -> list[str]:
    """What there is to tell of each job. Raises UsageError: a list cannot be read."""
    by_name = {report.name: report for report in reports}
    told = []
    for job in jobs:
        calls = _calls_sentence(tools, job)
        report = by_name.get(job.name)
        told.append(calls)
        if report is not None:
            told += [_sample_sentence(report), *failure_lines(report)]
    return [*told, "dry run: nothing was written"]


def _calls_sentence(tools: JobTools, job: JobConfig) -> str:
    """Raises UsageError: the list cannot be read, or the job would be refused."""
    choice, view = tools.choice, tools.view_factory()
    path = journal_place(job, tools.loaded)
    with ExitStack() as stack:
        plan = Plan("new", "")
        if tools.loaded.config.run.journal and path.exists():
            journal = stack.enter_context(closing(Journal.open(path)))
            plan = make_plan(situation_of(tools, job, view, journal))
        if plan.word == "finished":
            return f"job {job.name}: finished, {plan.why}"
        calls = stack.enter_context(closing(open_list(tools, job, view)))
        return f"job {job.name}: {plan.word}, {_counted(calls, plan.past, choice)}"


def _counted(calls: CallListSource, past: Past | None, choice: Choice) -> str:
    by_function: Counter[str] = Counter()
    total = bad = would_run = finished = 0
    while (batch := calls.next_batch()) is not None:
        total += batch.count
        bad += len(batch.rejected)
        for call in batch.calls:
            function_id = call.function.function_id
            by_function[function_id] += 1
            ok = None if past is None else past.status(call.index)
            finished += ok is not None
            would_run += choice.wants(call.index, function_id, ok)
    if choice.limit:
        would_run = min(would_run, choice.limit)
    names = ", ".join(f"{n} {c:,}" for n, c in by_function.most_common(FUNCTIONS_SHOWN_MAX))
    more = len(by_function) - FUNCTIONS_SHOWN_MAX
    rest = f" and {more} more functions" if more > 0 else ""
    wrong = f", {bad:,} lines that fail at once" if bad else ""
    return (
        f"{total:,} calls ({names or 'no function'}{rest}{wrong}),"
        f" {finished:,} of them finished, {would_run:,} would run"
    )


def _sample_sentence(report: JobReport) -> str:
    counts = report.calls
    ran = max(1, counts.calls - counts.not_run)
    parts = [f"{report.subcalls.calls / ran:.1f} sub-calls"] if report.subcalls.calls else []
    parts += [
        f"{counters.get('requests', 0) / ran:.1f} node requests to {chain}"
        for chain, counters in report.rpc.items()
    ]
    reads = f"; a call made {', '.join(parts)}" if parts else "; no call asked a node"
    error = f"; {report.error}" if report.error else ""
    return (
        f"job {report.name}: a sample of {counts.calls:,} calls: {counts.ok:,} ok, {counts.failed:,} failed"
        f"{reads}{error}"
    )
