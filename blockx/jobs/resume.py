"""New, resumed or finished: what a run does with what an earlier one left, and why.

Jobs thread. Decided once a job, before anything of it runs, from its journal, its call list, the functions
as they are now and the flags. The law:

- A stopped job resumes; a finished one is skipped, and keeps its numbers and its exit code.
- A job is refused, rather than resumed, if a function that its calls reached, or the line of a finished call,
  has changed: its rows would be of two kinds. ``--resume-anyway`` takes that (a changed line runs again),
  ``--fresh`` begins anew. Lines behind the last finished call may change.
- A finished job of which something has changed begins anew: its outputs stay until the new ones are whole.
- ``--retry-failed`` and its like are meant for changed functions, so these do not refuse; the list must be
  the same.
"""

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from blockx.config import JobConfig, LoadedConfig
from blockx.errors import UsageError
from blockx.functions.view import FunctionView
from blockx.jobs.call_list import CallListSource, StreamBatch, digests_of
from blockx.jobs.choice import Choice
from blockx.jobs.journal import Journal, PagedTable, Past
from blockx.jobs.sources.base import Identity

FORMAT = 1
"""Of what a run writes about itself into the journal."""
NAMES_SHOWN_MAX = 5
"""Changed functions that a message names; the rest is counted."""


@dataclass(slots=True)
class Plan:
    """What is done with a job."""

    word: str
    """``new``, ``resumed`` or ``finished``."""
    why: str
    """For the first line of the run; may be empty."""
    past: Past | None = None
    """What is kept of earlier runs; None: nothing."""
    list_changed: bool = False
    """Finished calls are to be compared with their lines one by one."""


@dataclass(slots=True)
class Situation:
    """What a plan is made of."""

    job: JobConfig
    loaded: LoadedConfig
    view: FunctionView
    choice: Choice
    journal: Journal
    identity: Identity
    form: str
    """How rows stand in the records; another kind of ``output`` may need another form."""
    outputs: Mapping[str, Path]
    """Files as named in the configuration -> their places."""
    open_list: Callable[[], CallListSource]
    """Another look at the list, from its beginning."""

    def run_facts(self) -> dict[str, Any]:
        """What a run writes about itself into the journal."""
        return {
            "format": FORMAT,
            "job": self.job.name,
            "function": self.job.function,
            "fingerprint": self.identity.fingerprint,
            "count": self.identity.count,
            "form": self.form,
        }


def make_plan(situation: Situation) -> Plan:
    """Decide. Reads the journal, and the list where it cannot be known otherwise whether it has changed.

    Raises:
        UsageError: the job cannot be resumed, and nobody said to begin anew.
        OSError: the journal cannot be read.
    """
    choice, past = situation.choice, situation.journal.read_past()
    if choice.fresh:
        return Plan("new", "--fresh")
    if past.run is None:
        if choice.only_failed or choice.retry_failed:
            raise UsageError(
                f"job {situation.job.name}: there is no earlier run of which calls could have failed;"
                f" run it without --{'only' if choice.only_failed else 'retry'}-failed"
            )
        return Plan("new", "")
    if past.run.get("format") != FORMAT:
        raise UsageError(
            f"job {situation.job.name}: {situation.journal.path} is of another version of blockx;"
            f" to begin anew: {command_with(situation, '--fresh')}"
        )
    is_finished = past.end is not None and bool(past.end.get("finished"))
    return _plan_finished(situation, past) if is_finished else _plan_stopped(situation, past)


def command_with(situation: Situation, flag: str) -> str:
    """What to type for this job with another flag."""
    file, name = shlex.quote(situation.loaded.file.name), shlex.quote(situation.job.name)
    return f"{_program()} --config {file} --job {name} {flag}"


def _program() -> str:
    """How blockx was started, so that what we advise can be typed: the launcher, the module or the command."""
    started = Path(sys.argv[0])
    if started.name == "blockx.py":
        return "python blockx.py"
    return "python -m blockx" if started.parts[-2:] == ("blockx", "__main__.py") else "blockx"


def ended_how(past: Past) -> str:
    """How the last run ended, in words."""
    return "killed" if past.end is None else str(past.end.get("why", "ended"))


def of_count(past: Past, identity: Identity) -> str:
    """``412 of 5,000``; without the second number if that is not known."""
    total = identity.count
    return f"{past.finished_count:,}" + (f" of {total:,}" if total is not None else "")


# ---- a finished job --------------------------------------------------------------------------------


def _plan_finished(situation: Situation, past: Past) -> Plan:
    choice = situation.choice
    assert past.end is not None
    has_records = not past.end.get("reduced")
    list_change = _list_change_of_finished(situation, past)
    changes = [*_shape_changes(situation, past), *_function_changes(situation, past), *list_change]
    if choice.runs_finished:
        if not has_records:
            return _nothing_failed(situation, past)
        if not list_change or choice.resume_anyway:
            return _plan_again(situation, past, changes, bool(list_change))
        raise _refusal(situation, past, changes)
    if not changes:
        changes = _output_changes(situation, past)
    if not changes:
        failed = past.end["report"]["failed"]
        why = "all calls are ok" if not failed else f"{failed:,} calls failed"
        other = "--retry-failed" if failed and has_records else "--fresh"
        return Plan("finished", f"{why}; to run it again: {command_with(situation, other)}", past)
    if choice.resume_anyway and has_records:
        return _plan_again(situation, past, changes, bool(list_change))
    return Plan("new", f"since the finished run {'; '.join(changes)}")


def _nothing_failed(situation: Situation, past: Past) -> Plan:
    if situation.choice.where is not None and situation.choice.where.names_status:
        raise UsageError(
            f"job {situation.job.name}: it has finished with all calls ok, and of such a job only the outputs"
            f" are kept; to run it anew: {command_with(situation, '--fresh')}"
        )
    return Plan("finished", "no call failed", past)


def _plan_again(situation: Situation, past: Past, changes: list[str], list_changed: bool) -> Plan:
    assert past.end is not None
    mixed = f"; {'; '.join(changes)}" if changes else ""
    why = f"finished, {past.failed_count:,} failed calls{mixed}"
    return Plan("resumed", why, past, list_changed)


def _output_changes(situation: Situation, past: Past) -> list[str]:
    assert past.end is not None
    sizes = past.end.get("files", {})
    changes = []
    for name, path in situation.outputs.items():
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            changes.append(f"{name} is missing")
        elif sizes.get(name) != size:
            changes.append(f"{name} was changed")
    return changes


def _list_change_of_finished(situation: Situation, past: Past) -> list[str]:
    assert past.run is not None
    assert past.end is not None
    if situation.identity.fingerprint:
        same = past.run["fingerprint"] == situation.identity.fingerprint
    else:
        digest = sha256()

        def add(_calls: CallListSource, batch: StreamBatch) -> bool:
            digest.update(digests_of(batch))
            return True

        _each_batch(situation, add)
        same = past.end.get("list") == digest.hexdigest()
    return [] if same else ["the call list has changed"]


# ---- a stopped job ---------------------------------------------------------------------------------


def _plan_stopped(situation: Situation, past: Past) -> Plan:
    choice = situation.choice
    assert past.run is not None
    same_list = bool(past.run["fingerprint"]) and (
        past.run["fingerprint"] == situation.identity.fingerprint
    )
    difference = "" if same_list else _first_difference(situation, past)
    functions = _function_changes(situation, past)
    shape = _shape_changes(situation, past)
    changes = [*shape, *functions, *([difference] if difference else [])]
    accepted = choice.resume_anyway or (choice.runs_finished and not difference)
    if shape or (changes and not accepted):
        raise _refusal(situation, past, changes, only_fresh=bool(shape))
    notes = [ended_how(past), *changes]
    if past.dropped_bytes:
        notes.append(f"{past.dropped_bytes:,} damaged bytes at the journal's end dropped")
    return Plan("resumed", ", ".join(notes), past, not same_list)


def _refusal(
    situation: Situation, past: Past, changes: list[str], *, only_fresh: bool = False
) -> UsageError:
    """Names what has changed, and the commands for both choices."""
    anyway = (
        ""
        if only_fresh
        else f"; to keep them and go on with what is now: {command_with(situation, '--resume-anyway')}"
    )
    return UsageError(
        f"job {situation.job.name}: not resumed: {of_count(past, situation.identity)} calls are finished"
        f" ({ended_how(past)}), but {'; '.join(changes)}{anyway}"
        f"; to begin anew: {command_with(situation, '--fresh')}"
    )


def _shape_changes(situation: Situation, past: Past) -> list[str]:
    """What makes the records useless."""
    assert past.run is not None
    changes = []
    if past.run["form"] != situation.form:
        changes.append("output is of another kind of file")
    if past.run["function"] != situation.job.function:
        changes.append(
            f"the job's function was {past.run['function'] or 'none'}, and is"
            f" {situation.job.function or 'none'}"
        )
    return changes


def _function_changes(situation: Situation, past: Past) -> list[str]:
    changes = []
    for function_id, digest in past.functions.items():
        pinned = situation.view.get(function_id)
        if (pinned.digest if pinned is not None else "") != digest:
            verb = "is gone" if pinned is None else "has changed" if digest else "is new"
            changes.append(f"function {function_id} {verb}")
    more = len(changes) - NAMES_SHOWN_MAX
    return changes[:NAMES_SHOWN_MAX] + ([f"{more} more functions"] if more > 0 else [])


# ---- the list, call by call ------------------------------------------------------------------------


def _first_difference(situation: Situation, past: Past) -> str:
    """The first finished call whose line is another one now; empty: there is none."""
    if not past.index_end:
        return ""
    old = situation.journal.call_digests()
    found = ""

    def compare(calls: CallListSource, batch: StreamBatch) -> bool:
        nonlocal found
        changed = changed_calls(batch, digests_of(batch), past, old)
        if changed:
            place = calls.place(batch.numbers[changed[0] - batch.first_index])
            found = f"the call list has changed, first at {place} (call {changed[0]:,})"
        return not found and batch.first_index + batch.count < past.index_end

    count = _each_batch(situation, compare)
    old.close()
    if not found and count < past.index_end:
        found = f"the call list has only {count:,} calls now, and call {past.index_end - 1:,} is finished"
    return found


def changed_calls(batch: StreamBatch, digests: bytes, past: Past, old: PagedTable) -> list[int]:
    """The finished calls of a batch that are not what they were."""
    now = memoryview(digests).cast("Q")
    first = batch.first_index
    return [
        index
        for index in range(first, min(first + batch.count, past.index_end))
        if past.status(index) is not None and old[index] != now[index - first]
    ]


def _each_batch(situation: Situation, look: Callable[[CallListSource, StreamBatch], bool]) -> int:
    """Read the list until ``look`` has seen enough; how many calls were read."""
    calls, count = situation.open_list(), 0
    try:
        while (batch := calls.next_batch()) is not None:
            count += batch.count
            if not look(calls, batch):
                break
    finally:
        calls.close()
    return count
