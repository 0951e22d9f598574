"""Who runs next: runnable calls in order of arrival, sleepers by the time they are due.

Main thread only. A context is in at most one of the queues (``queued`` says so); the heap of sleepers
may also hold void entries of cancelled sleeps, told apart by ``sleep_seq``.
"""

import heapq
from collections import deque
from typing import Final

from blockx.executor.context import ExecContext, Wake

SLEEPERS_IN_A_ROW_MAX: Final = 64
"""Calls whose sleep is over that go before runnable ones, one after the other; then one of those."""
VOID_SLEEPERS_MAX: Final = 64
"""Heap entries of cancelled sleeps. More of them, and more than live ones: they are swept out."""


class RunQueue:
    """The queues of one executor. Bounded by its resident calls."""

    __slots__ = ("_heap", "_in_a_row", "_ready", "_runnable", "_seq", "_void")

    def __init__(self) -> None:
        self._runnable: deque[ExecContext] = deque()
        self._ready: deque[ExecContext] = deque()
        """Sleepers that are due."""
        self._heap: list[tuple[int, int, ExecContext]] = []
        self._in_a_row = 0
        self._void = 0
        self._seq = 0

    def __len__(self) -> int:
        """Calls that could run now."""
        return len(self._runnable) + len(self._ready)

    def push(self, context: ExecContext) -> None:
        """Queue behind all runnable calls."""
        context.queued = True
        self._runnable.append(context)

    def push_front(self, context: ExecContext) -> None:
        """Queue before all of them; void the sleep it may be in."""
        if context.sleep_seq:
            self._void_sleep(context)
        context.queued = True
        self._runnable.appendleft(context)

    def pop(self) -> ExecContext | None:
        """The next call; those whose sleep is over first, but never too many in a row."""
        if self._ready and (self._in_a_row < SLEEPERS_IN_A_ROW_MAX or not self._runnable):
            self._in_a_row += 1
            return self._ready.popleft()
        self._in_a_row = 0
        return self._runnable.popleft() if self._runnable else None

    def sleep(self, context: ExecContext, due_ns: int) -> None:
        """The call parks until then."""
        self._seq += 1
        context.sleep_seq = self._seq
        heapq.heappush(self._heap, (due_ns, self._seq, context))

    def next_due_ns(self) -> int | None:
        """When the first sleep ends (perhaps a void one); None without sleepers."""
        return self._heap[0][0] if self._heap else None

    def wake_due(self, now_ns: int) -> None:
        """Queue the sleepers that are due."""
        heap = self._heap
        while heap and heap[0][0] <= now_ns:
            _due_ns, seq, context = heapq.heappop(heap)
            if context.sleep_seq != seq:
                self._void -= 1
                continue
            context.sleep_seq = 0
            context.wake = Wake()
            context.queued = True
            self._ready.append(context)

    def sleepers_count(self) -> int:
        """Heap entries, void ones included."""
        return len(self._heap)

    def _void_sleep(self, context: ExecContext) -> None:
        context.sleep_seq = 0
        self._void += 1
        if VOID_SLEEPERS_MAX < self._void > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2].sleep_seq == entry[1]]
            heapq.heapify(self._heap)
            self._void = 0
