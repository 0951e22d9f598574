"""What a run knows of finished calls: it keeps those of earlier runs, and writes down its own.

Jobs thread only. Between the runner and the journal: for each stream batch it says which calls run, which are
kept as they are, and which are left out by the flags; and it puts the outcomes of this run into the journal,
with all that they depend on. Without a journal (``run.journal: false``) every call runs and nothing is kept.

Invariant: a call that was given up (cancelled, never started) is never written down as finished.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from blockx.dispatcher.model import CallCounts, CallResult, CallSpec, Via
from blockx.errors import ErrorKind
from blockx.jobs.call_list import DIGEST_BYTES, StreamBatch, digests_of
from blockx.jobs.choice import Choice
from blockx.jobs.journal import Journal, JournalRecord, PagedTable
from blockx.jobs.reorder import Record
from blockx.jobs.resume import Plan, changed_calls

_GIVEN_UP = frozenset(
    {ErrorKind.CANCELLED, ErrorKind.TASK_CANCELLED, ErrorKind.OUTPUT_BYTES_EXCEEDED}
)
"""Kinds of calls that did not come to an end of their own."""

Rpc = Mapping[str, Mapping[str, int]]


@dataclass(slots=True)
class Sorted:
    """The calls of one stream batch."""

    run: list[CallSpec]
    kept: Iterator[JournalRecord]
    """Finished earlier; read one by one. May raise OSError."""
    left: list[int]
    """Calls that the flags leave out."""


class Ledger:
    """See the module."""

    def __init__(self, journal: Journal | None, plan: Plan, choice: Choice) -> None:
        self._journal = journal
        self._choice = choice
        self._past = plan.past
        self._chosen_left = choice.limit or None
        self._old_digests: PagedTable | None = None
        if plan.list_changed and journal is not None:
            self._old_digests = journal.call_digests()
        self._digests_from = 0
        if plan.past is not None and not plan.list_changed:
            self._digests_from = plan.past.known_count
        self._list_digest = sha256()
        self.functions: dict[str, str] = dict(plan.past.functions) if plan.past is not None else {}
        self.kept = CallCounts()
        """Calls of earlier runs that were kept."""
        self.kept_rows = 0
        self._written_functions: dict[str, str] = dict(self.functions)

    def close(self) -> None:
        """Let go of what was read for comparison."""
        if self._old_digests is not None:
            self._old_digests.close()

    # ---- calls -----------------------------------------------------------------------------------

    def sort(self, batch: StreamBatch) -> Sorted:
        """Which calls of a batch run now; to be asked once for each batch, in list order."""
        changed = self._note_digests(batch)
        if self._past is None and not self._choice.narrows:
            return Sorted(batch.calls, iter(()), [])
        run, kept, left = [], [], []
        for call in batch.calls:
            index = call.index
            ok = None
            if self._past is not None and index not in changed:
                ok = self._past.status(index)
            if self._wants(call, ok):
                run.append(call)
            elif ok is None:
                left.append(index)
            else:
                kept.append(index)
        return Sorted(run, self._kept(kept), left)

    def is_exhausted(self, next_index: int) -> bool:
        """No call from there on will run, and none was finished earlier: the rest need not be read."""
        end = 0 if self._past is None else self._past.index_end
        return self._chosen_left == 0 and next_index >= end

    def _wants(self, call: CallSpec, ok: bool | None) -> bool:
        if not self._choice.wants(call.index, call.function.function_id, ok):
            return False
        if self._chosen_left is None:
            return True
        if self._chosen_left == 0:
            return False
        self._chosen_left -= 1
        return True

    def _kept(self, indexes: list[int]) -> Iterator[JournalRecord]:
        past, journal = self._past, self._journal
        if past is None or journal is None:
            return
        for index in indexes:
            record = journal.read(past.offsets[index])
            self._count(record)
            yield record

    def _count(self, record: JournalRecord) -> None:
        """As the run that ran it counted it; ``executed`` takes one body for each charged attempt."""
        kept = self.kept
        kept.calls += 1
        kept.ok += record.ok
        kept.failed += not record.ok
        kept.ran += record.via is Via.RAN
        kept.cached += record.via is Via.CACHED
        kept.singleflight += record.via is Via.SINGLEFLIGHT
        kept.not_run += record.via is Via.NOT_RUN
        kept.executed += record.attempts if record.via is Via.RAN else 0
        kept.retries += max(0, record.attempts - 1)
        kept.moves += record.moves
        self.kept_rows += record.rows

    def _note_digests(self, batch: StreamBatch) -> "set[int]":
        """Write down what the calls are; the finished ones that have changed since."""
        if self._journal is None:
            return set()
        digests = digests_of(batch)
        self._list_digest.update(digests)
        known = max(0, self._digests_from - batch.first_index)
        if known < batch.count:
            self._journal.add_calls(batch.first_index + known, digests[known * DIGEST_BYTES :])
        if self._old_digests is None or self._past is None:
            return set()
        return set(changed_calls(batch, digests, self._past, self._old_digests))

    # ---- writing down ----------------------------------------------------------------------------

    def add(self, result: CallResult, rows: int, record: Record) -> None:
        """A call of this run has ended. Raises OSError."""
        if self._journal is None or (result.error is not None and result.error.kind in _GIVEN_UP):
            return
        self._journal.add_result(result, rows, record)

    def reach(self, functions: Mapping[str, str]) -> None:
        """Calls of the job depend on these functions from now on."""
        if self._journal is None:
            return
        for function_id, digest in functions.items():
            if self._written_functions.get(function_id) != digest:
                self._written_functions[function_id] = digest
                self._journal.add_function(function_id, digest)

    def pin(self, chain: str, pins: Mapping[str, Any]) -> None:
        """Calls of the job depend on these blocks from now on."""
        if self._journal is not None:
            self._journal.add_pins(chain, pins)

    def wait_s(self) -> float | None:
        """How long until ``commit_due`` must be called. None: for ever."""
        return None if self._journal is None else self._journal.wait_s()

    def commit_due(self) -> None:
        """Write what is pending, if it is time. Raises OSError."""
        if self._journal is not None:
            self._journal.commit_due()

    # ---- the end ---------------------------------------------------------------------------------

    def end(self, why: str, subcalls: CallCounts, rpc: Rpc) -> None:
        """The job ends before all of its calls have; never fails, the disk may be full."""
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal.end({"why": why, **_tally(subcalls, rpc)})

    def finish(
        self,
        run: Mapping[str, Any],
        report: Mapping[str, Any],
        files: Mapping[str, Path],
        subcalls: CallCounts,
        rpc: Rpc,
    ) -> None:
        """All calls have ended and the outputs have their names. ``report``: its place in report.json.

        Results are kept only where calls failed: that is what ``--retry-failed`` merges into. Raises OSError.
        """
        if self._journal is None:
            return
        end = {
            "finished": True,
            "why": "finished",
            "report": dict(report),
            "list": self._list_digest.hexdigest(),
            "files": {name: path.stat().st_size for name, path in files.items()},
            **_tally(subcalls, rpc),
        }
        if report["failed"]:
            self._journal.end(end)
        else:
            self._journal.reduce(run, self._written_functions, {**end, "reduced": True})

    def forget(self) -> None:
        """Nothing of this job is to be resumed."""
        if self._journal is not None:
            self._journal.remove()

    def earlier_subcalls(self) -> CallCounts:
        """Sub-calls of earlier runs, as far as these came to tell."""
        total = CallCounts()
        for tally in self._tallies():
            for name, number in tally.get("subcalls", {}).items():
                setattr(total, name, getattr(total, name) + number)
        return total

    def rpc_with_earlier(self, rpc: Rpc) -> dict[str, dict[str, int]]:
        """Reads of this run and of earlier ones, as far as these came to tell."""
        total = {chain: dict(counters) for chain, counters in rpc.items()}
        for tally in self._tallies():
            for chain, counters in tally.get("rpc", {}).items():
                sums = total.setdefault(chain, {})
                for name, number in counters.items():
                    sums[name] = sums.get(name, 0) + number
        return total

    def _tallies(self) -> list[dict[str, Any]]:
        return [] if self._past is None else self._past.tallies


def _tally(subcalls: CallCounts, rpc: Rpc) -> dict[str, Any]:
    """What is told of a run beyond its calls."""
    return {"subcalls": asdict(subcalls), "rpc": {chain: dict(c) for chain, c in rpc.items()}}
