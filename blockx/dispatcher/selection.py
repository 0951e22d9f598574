"""Which executor gets the next root call: filter, then score, over the last snapshots.

Pure bookkeeping: a view is the adapter's last snapshot plus what the core bound and ended since, so that
a thousand choices between two snapshots do not all fall on the same executor. Sub-calls do not come here:
they run where their parent runs.

Choosing costs the same for 64 executors as for one: whoever changes a view *touches* it; ``select`` looks
again at the touched views alone and keeps the others in order (``BestFirst``, a heap with lazy deletion).
Invariant: a view that is not touched has the ``rank`` that filter and score would give it now.

Filter (spec, "selectExecutor"): not healthy; scheduler stalled; no headroom (usable places minus root
calls bound there minus those aborted since); runnable at the limit; root calls at the limit; memory at
the mark; and, beyond the specification, reserved for a suspected call, or turned a call away since its
last snapshot. Score: fewer runnable, fewer root calls, more headroom, smaller id.

≠ "Stalled" counts only while a call runs there: an idle executor sleeps in its poll and is not stalled.
≠ Runnable is compensated for calls suspended and resumed too, not for ended ones alone.
≠ A sampled scan (``executor_selection_sample_size``) starts at a random executor: always the same first
N would be no sample.
"""

import heapq
import random
from typing import ClassVar, Protocol

from blockx.config import DispatcherConfig
from blockx.dispatcher.model import ExecutorSnapshot, ExecutorView, Rank


class _Ranking(Protocol):
    """The eligible views in some order."""

    def add(self, view: ExecutorView) -> None:
        """The view has a new rank, not None; it may have had another one before."""

    def drop(self, view: ExecutorView) -> None:
        """The view is eligible no more."""

    def best(self) -> ExecutorView | None:
        """Who gets the next call; None: no one is eligible."""


class BestFirst:
    """The best of all: a heap of ranks; outdated entries are skipped when they come to the top.

    An entry is valid exactly if it equals the ``rank`` of its view; two equal ones do no harm. Bounded: rebuilt
    when it holds ``STALE_RATIO_MAX`` times as many entries as there are executors.
    """

    STALE_RATIO_MAX: ClassVar[int] = 8

    __slots__ = ("_by_id", "_heap")

    def __init__(self, by_id: dict[str, ExecutorView]) -> None:
        self._by_id = by_id
        self._heap: list[Rank] = []

    def add(self, view: ExecutorView) -> None:
        rank, heap = view.rank, self._heap
        assert rank is not None
        if len(heap) >= self.STALE_RATIO_MAX * len(self._by_id):
            heap[:] = [v.rank for v in self._by_id.values() if v.rank is not None]
            heapq.heapify(heap)
        else:
            heapq.heappush(heap, rank)

    def drop(self, view: ExecutorView) -> None:
        """Its entry is outdated by having lost its view's ``rank``."""

    def best(self) -> ExecutorView | None:
        heap, by_id = self._heap, self._by_id
        while heap:
            rank = heap[0]
            view = by_id.get(rank[3])
            if view is not None and view.rank == rank:
                return view
            heapq.heappop(heap)
        return None


class BestOfSample:
    """The best of a few eligible ones, from a random start (spec: a power-of-d approximation)."""

    __slots__ = ("_places", "_rng", "_sample_size", "_views")

    def __init__(self, sample_size: int, rng: random.Random) -> None:
        self._sample_size = sample_size
        self._rng = rng
        self._views: list[ExecutorView] = []
        self._places: dict[str, int] = {}

    def add(self, view: ExecutorView) -> None:
        if view.executor_id not in self._places:
            self._places[view.executor_id] = len(self._views)
            self._views.append(view)

    def drop(self, view: ExecutorView) -> None:
        """The last one takes its place, so that no one else moves."""
        place = self._places.pop(view.executor_id)
        last = self._views.pop()
        if last is not view:
            self._views[place] = last
            self._places[last.executor_id] = place

    def best(self) -> ExecutorView | None:
        views = self._views
        count = len(views)
        if count == 0:
            return None
        start = int(self._rng.random() * count)
        sample = range(start, start + min(self._sample_size, count))
        return min((views[n % count] for n in sample), key=_rank_of)


def _rank_of(view: ExecutorView) -> Rank:
    assert view.rank is not None
    return view.rank


class ExecutorViews:
    """All executors as the core sees them; at most one is reserved at a time."""

    __slots__ = (
        "_dead",
        "_inflight_max",
        "_memory_mark_bytes",
        "_order",
        "_ranking",
        "_retired",
        "_runnable_max",
        "_stall_timeout_ms",
        "_touched",
        "by_id",
        "reserved",
    )

    def __init__(self, config: DispatcherConfig, stall_timeout_ms: int, rng: random.Random) -> None:
        self.by_id: dict[str, ExecutorView] = {}
        self.reserved: ExecutorView | None = None
        self._order: list[ExecutorView] = []
        self._retired: dict[tuple[str, str], ExecutorView] = {}
        self._dead: dict[str, str] = {}
        self._touched: list[ExecutorView] = []
        self._stall_timeout_ms = stall_timeout_ms
        self._inflight_max = config.executor_max_inflight
        self._runnable_max = config.executor_max_runnable
        self._memory_mark_bytes = config.executor_memory_high_watermark
        sample_size = config.executor_selection_sample_size
        self._ranking: _Ranking = (
            BestOfSample(sample_size, rng) if sample_size else BestFirst(self.by_id)
        )

    def update(self, snapshot: ExecutorSnapshot) -> bool:
        """Take a fresh snapshot in. False: it is of an incarnation that is known to be dead (stale)."""
        executor_id = snapshot.executor_id
        if self._dead.get(executor_id) == snapshot.incarnation_id:
            return False
        view = self.by_id.get(executor_id)
        if view is None or view.incarnation_id != snapshot.incarnation_id:
            view = self._succeed(view, snapshot)
        view.usable = snapshot.usable_contexts
        view.draining = 0
        view.residue = snapshot.draining_count
        view.refused = False
        if snapshot.heartbeat_seq != view.heartbeat_seq:
            # Only a new sample knows what we did since the old one; the same one again does not.
            view.heartbeat_seq = snapshot.heartbeat_seq
            view.load = snapshot.runnable_count
        stalled = (
            self._stall_timeout_ms > 0
            and snapshot.running_call_seq != 0
            and snapshot.scheduler_idle_ms > self._stall_timeout_ms
        )
        crowded = 0 < self._memory_mark_bytes <= snapshot.memory_bytes
        view.healthy = snapshot.healthy
        view.fit = snapshot.healthy and not stalled and not crowded
        view.open = view.fit and not view.reserved
        self.touch(view)
        return True

    def touch(self, view: ExecutorView) -> None:
        """Something of the view has changed that filter or score look at."""
        if not view.touched:
            view.touched = True
            self._touched.append(view)

    def select(self) -> ExecutorView | None:
        """The executor for one more root call; None: no one is eligible. O(touched * log executors)."""
        if self._touched:
            self._rank_touched()
        return self._ranking.best()

    def rank(self, view: ExecutorView) -> Rank | None:
        """Filter, then score, one executor; None: it is not eligible. Smaller is better."""
        if not view.open or view.load >= self._runnable_max or view.inflight >= self._inflight_max:
            return None
        room = view.usable - view.inflight - view.draining
        if room <= 0:
            return None
        return (view.load, view.inflight, -room, view.executor_id)

    def _rank_touched(self) -> None:
        ranking, touched = self._ranking, self._touched
        for view in touched:
            view.touched = False
            rank = self.rank(view)
            if rank == view.rank:
                continue
            view.rank = rank
            if rank is None:
                ranking.drop(view)
            else:
                ranking.add(view)
        touched.clear()

    def refuse(self, view: ExecutorView) -> None:
        """It turned a call away: it gets none before its next snapshot, or we would ask for ever."""
        view.refused = True
        view.open = False
        self.touch(view)

    def reserve(self) -> ExecutorView | None:
        """Keep one executor for a suspected call: the reserved one, else the open one that is emptiest."""
        view = self.reserved
        if view is not None and (view.healthy or view.calls):
            return view
        self.unreserve()
        view = min(
            (v for v in self._order if v.open and v.usable > 0),
            key=lambda v: (len(v.calls), v.load, v.executor_id),
            default=None,
        )
        if view is not None:
            view.reserved = True
            view.open = False
            self.reserved = view
            self.touch(view)
        return view

    def unreserve(self) -> None:
        """The reserved executor is for everyone again."""
        view = self.reserved
        if view is not None:
            view.reserved = False
            view.open = view.fit and not view.refused
            self.reserved = None
            self.touch(view)

    def lose(self, executor_id: str, incarnation_id: str) -> ExecutorView | None:
        """Forget a dead incarnation. None: unknown or already lost."""
        view = self.by_id.get(executor_id)
        if view is not None and view.incarnation_id == incarnation_id:
            del self.by_id[executor_id]
            self._order.remove(view)
            self._dead[executor_id] = incarnation_id
        else:
            view = self._retired.pop((executor_id, incarnation_id), None)
            if view is None:
                return None
        self._close(view)
        return view

    def all_views(self) -> list[ExecutorView]:
        """Every view that may have calls, those of replaced incarnations included."""
        return [*self._order, *self._retired.values()]

    def _succeed(self, old: ExecutorView | None, snapshot: ExecutorSnapshot) -> ExecutorView:
        """A new incarnation: fresh counts. The old one waits for its ``ExecutorLost`` if it has calls."""
        if old is not None:
            self._order.remove(old)
            self._dead[old.executor_id] = old.incarnation_id
            self._close(old)
            if old.calls:
                self._retired[old.executor_id, old.incarnation_id] = old
        view = ExecutorView(snapshot.executor_id, snapshot.incarnation_id)
        self.by_id[view.executor_id] = view
        self._order.append(view)
        self._order.sort(key=lambda v: v.executor_id)
        return view

    def _close(self, view: ExecutorView) -> None:
        if view is self.reserved:
            self.unreserve()
        view.healthy = view.fit = view.open = False
        if view.rank is not None:
            # At once: its successor has the same id, and only one of the two may be ranked.
            self._ranking.drop(view)
            view.rank = None
