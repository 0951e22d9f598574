"""The 100 ms look at the memory of executors: acts before the kernel does, and replaces what has grown.

Actor thread only; kills and replaces by asking the adapter. It reads the processes' memory itself: a call
that holds the GIL while it fills memory silences its executor. In order of urgency:

- An executor over its limit, or the largest one while the machine is nearly out of memory, is killed. The
  call that runs there is charged with ``memory_exceeded`` if the executor grew by a quarter of the limit
  during its step; else nobody is, and all its calls move: many had a share in it.
- One over its recycle mark gets no more calls and ``COLLECT_MS`` to collect its garbage (its own helper
  thread sees the same mark). If it is still over it then, it is drained and replaced.
- One that has finished ``recycle_calls`` is drained and replaced, one executor at a time.
- One that wants to go by itself (a call of it was cut inside a library) is replaced once it is empty.

Invariant: no call fails by a replacement, only by a kill, and of those at most the one that is charged.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

TICK_MS = 100
"""How often it looks. A process fills at most some 100 MB in that time."""
COLLECT_MS = 1_500
"""From stopping the admission of an executor over its mark to its replacement, if that does not help."""
LIFE_MS_MIN = 10_000
"""Executors younger than this are not replaced for their memory: if what a task needs is over the mark, each
executor works at least so long."""
READMIT_PARTS = (9, 10)
"""An executor that fell below this part of its mark gets calls again."""
RESERVE_BYTES_MIN = 64 * 1024 * 1024
RESERVE_PART = 50
"""Free memory of the machine (or control group) below a 50th of it, or 64 MiB, counts as nearly none."""
GROWTH_PART = 4
"""A step that grew by a quarter of the limit is to blame (the design, section 4)."""


class Memory(Protocol):
    """What the guard needs to know of the machine (``supervisor.memory``)."""

    total_bytes: int

    def available_bytes(self) -> int:
        """What can still be taken."""

    def resident_bytes(self, pid: int, /) -> int:
        """Of one process; 0 if it is gone."""


class RowSample(Protocol):
    """The words of an executor's heartbeat row that matter here."""

    @property
    def running_call_seq(self) -> int: ...
    @property
    def rss_at_step_start(self) -> int: ...
    @property
    def finished_calls(self) -> int: ...
    @property
    def attached(self) -> int: ...


class GuardedExecutor(Protocol):
    """An attached executor, as far as the guard looks at it."""

    executor_id: str
    incarnation_id: str
    work_pid: int
    attached_ms: int
    is_retiring: bool
    """Takes nothing new: it is killed, or drained for its replacement."""
    is_full: bool
    """Gets no more root calls for the moment."""


class GuardedExecutors(Protocol):
    """What the guard needs of ``transport.adapter``; ``Any`` is its own kind of executor."""

    def attached_executors(self) -> Iterable[Any]:
        """Those that are connected."""

    def row_sample(self, executor: Any, /) -> RowSample | None:
        """Its heartbeat row; None for an executor without one."""

    def retire(self, executor: Any, reason: str, /) -> None:
        """No more root calls; replaced when the last call has left. Again: no effect."""

    def kill_for_memory(self, executor: Any, reason: str, blamed_call_seq: int, /) -> None:
        """Killed; the call with that number is charged, 0: nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """See ``config.WorkerConfig``."""

    limit_bytes: int
    """Resident memory at which an executor is killed."""
    recycle_bytes: int
    """Mark above which it is drained and replaced."""
    recycle_calls: int
    """Finished calls after which it is. 0: never."""


class MemoryGuard:
    """Looks at every attached executor; see the module's law."""

    def __init__(
        self,
        adapter: GuardedExecutors,
        memory: Memory,
        limits: MemoryLimits,
        now_ms: Callable[[], int],
    ) -> None:
        self._adapter = adapter
        self._memory = memory
        self._limits = limits
        self._now_ms = now_ms
        self._reserve_bytes = max(RESERVE_BYTES_MIN, memory.total_bytes // RESERVE_PART)
        self._over_since_ms: dict[str, int] = {}
        """Incarnation -> since when it is over its mark; only of executors that are attached."""

    def tick(self) -> None:
        """One look."""
        executors = [e for e in self._adapter.attached_executors() if not e.is_retiring]
        sizes = {e.executor_id: self._memory.resident_bytes(e.work_pid) for e in executors}
        over = [e for e in executors if sizes[e.executor_id] >= self._limits.limit_bytes]
        if executors and not over and self._memory.available_bytes() < self._reserve_bytes:
            over = self._largest(executors, sizes)
        for executor in over:
            self._kill(executor, sizes[executor.executor_id])
        known = {executor.incarnation_id for executor in executors}
        self._over_since_ms = {k: v for k, v in self._over_since_ms.items() if k in known}
        for executor in executors:
            if executor not in over:
                self._check_mark(executor, sizes[executor.executor_id])
                self._check_row(executor)

    def _largest(self, executors: list[Any], sizes: dict[str, int]) -> list[Any]:
        """The executor to kill for the machine's sake; none if all are small: then others fill it."""
        largest = max(executors, key=lambda e: sizes[e.executor_id])
        return [largest] if sizes[largest.executor_id] >= RESERVE_BYTES_MIN * 2 else []

    def _kill(self, executor: GuardedExecutor, size_bytes: int) -> None:
        sample = self._adapter.row_sample(executor)
        blamed = 0
        if sample is not None and sample.rss_at_step_start:
            grown_bytes = size_bytes - sample.rss_at_step_start
            if grown_bytes >= self._limits.limit_bytes // GROWTH_PART:
                blamed = sample.running_call_seq
        if size_bytes >= self._limits.limit_bytes:
            reason = (
                f"it used {_mib(size_bytes)} MiB of memory, its limit is "
                f"{_mib(self._limits.limit_bytes)} MiB (worker.executor_memory_limit_bytes)"
            )
        else:
            reason = f"the machine was nearly out of memory, and it used the most, {_mib(size_bytes)} MiB"
        self._adapter.kill_for_memory(executor, reason, blamed)

    def _check_mark(self, executor: GuardedExecutor, size_bytes: int) -> None:
        mark_bytes, now_ms = self._limits.recycle_bytes, self._now_ms()
        over_since_ms = self._over_since_ms.get(executor.incarnation_id)
        if over_since_ms is None:
            if size_bytes >= mark_bytes and now_ms - executor.attached_ms >= LIFE_MS_MIN:
                self._over_since_ms[executor.incarnation_id] = now_ms
                executor.is_full = True
        elif size_bytes < mark_bytes * READMIT_PARTS[0] // READMIT_PARTS[1]:
            del self._over_since_ms[executor.incarnation_id]
            executor.is_full = False
        elif now_ms - over_since_ms >= COLLECT_MS:
            self._adapter.retire(executor, "its memory had grown over the recycle mark")

    def _check_row(self, executor: GuardedExecutor) -> None:
        sample = self._adapter.row_sample(executor)
        if sample is None or not sample.finished_calls:
            return
        calls_max = self._limits.recycle_calls
        if not sample.attached:
            self._adapter.retire(executor, "a call was cut inside a library")
        elif (
            calls_max
            and sample.finished_calls >= calls_max
            and not any(other.is_retiring for other in self._adapter.attached_executors())
        ):
            self._adapter.retire(executor, "it had run its number of calls")


def _mib(size_bytes: int) -> int:
    return size_bytes // (1024 * 1024)
