"""Which executor gets the next root call: filter, then score, over the last snapshots.

Pure bookkeeping: a view is the adapter's last snapshot plus what the core bound and ended since, so that
a thousand choices between two snapshots do not all fall on the same executor. Sub-calls do not come here:
they run where their parent runs.

Filter (spec, "selectExecutor"): not healthy; scheduler stalled; no headroom (usable places minus root
calls bound there minus those aborted since); runnable at the limit; root calls at the limit; memory at
the mark; and, beyond the specification, reserved for a suspected call, or turned a call away since its
last snapshot. Score: fewer runnable, fewer root calls, more headroom, smaller id.

≠ "Stalled" counts only while a call runs there: an idle executor sleeps in its poll and is not stalled.
≠ Runnable is compensated for calls suspended and resumed too, not for ended ones alone.
≠ A sampled scan (``executor_selection_sample_size``) starts at a random executor: always the same first
N would be no sample.
"""

import random

from blockx.config import DispatcherConfig
from blockx.dispatcher.model import ExecutorSnapshot, ExecutorView


class ExecutorViews:
    """All executors as the core sees them; at most one is reserved at a time."""

    __slots__ = (
        "_dead",
        "_inflight_max",
        "_memory_mark_bytes",
        "_order",
        "_retired",
        "_rng",
        "_runnable_max",
        "_sample_size",
        "_stall_timeout_ms",
        "by_id",
        "reserved",
    )

    def __init__(self, config: DispatcherConfig, stall_timeout_ms: int, rng: random.Random) -> None:
        self.by_id: dict[str, ExecutorView] = {}
        self.reserved: ExecutorView | None = None
        self._order: list[ExecutorView] = []
        self._retired: dict[tuple[str, str], ExecutorView] = {}
        self._dead: dict[str, str] = {}
        self._rng = rng
        self._stall_timeout_ms = stall_timeout_ms
        self._inflight_max = config.executor_max_inflight
        self._runnable_max = config.executor_max_runnable
        self._memory_mark_bytes = config.executor_memory_high_watermark
        self._sample_size = config.executor_selection_sample_size

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
        return True

    def select(self) -> ExecutorView | None:
        """The best executor for one more root call; None: no one is eligible. O(executors)."""
        if self._sample_size:
            return self._select_of(self._from_random_start(), self._sample_size)
        return self._select_of(self._order, -1)

    def refuse(self, view: ExecutorView) -> None:
        """It turned a call away: it gets none before its next snapshot, or we would ask for ever."""
        view.refused = True
        view.open = False

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
        return view

    def unreserve(self) -> None:
        """The reserved executor is for everyone again."""
        view = self.reserved
        if view is not None:
            view.reserved = False
            view.open = view.fit and not view.refused
            self.reserved = None

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

    def _from_random_start(self) -> list[ExecutorView]:
        start = int(self._rng.random() * len(self._order))
        return self._order[start:] + self._order[:start]

    def _select_of(self, views: list[ExecutorView], left: int) -> ExecutorView | None:
        best: ExecutorView | None = None
        best_key = (0, 0, 0, "")
        inflight_max, runnable_max = self._inflight_max, self._runnable_max
        for view in views:
            if not view.open or view.load >= runnable_max or view.inflight >= inflight_max:
                continue
            room = view.usable - view.inflight - view.draining
            if room <= 0:
                continue
            key = (view.load, view.inflight, -room, view.executor_id)
            if best is None or key < best_key:
                best, best_key = view, key
            left -= 1
            if left == 0:
                break
        return best
