"""The 500 ms tick: wedged executors, lost heartbeats, cancelled calls that do not end.

Actor thread only; kills by asking the adapter, which asks the pool. Order matters: a wedged executor
shows as idle scheduler with a beating heart, a lost one as a silent heart. Before silence counts as
death the process itself is looked at: a C call that holds the GIL silences the helper thread too, and
that is "wedged", with its own limit.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from blockx.dispatcher.model import ExecutorSnapshot
from blockx.errors import ErrorKind
from blockx.observability import logger

CANCEL_MS_MAX = 1_000
"""A cancelled call that still holds its executor after this gets the executor killed."""


class WatchedExecutor(Protocol):
    """An attached executor, as far as the watchdog looks at it."""

    executor_id: str
    pid: int
    work_pid: int
    lost_because: str
    """Not empty: it is being killed already."""


class WatchedExecutors(Protocol):
    """What the watchdog needs of ``transport.adapter``; ``Any`` is its own kind of executor."""

    def snapshots(self) -> Sequence[ExecutorSnapshot]:
        """How each looks now."""

    def attached_executors(self) -> Iterable[Any]:
        """Those that are connected."""

    def silent_ms(self, executor: Any, /) -> int:
        """How long since its last sign of life."""

    def press_cancellations(self) -> Sequence[tuple[Any, int]]:
        """Repeat the order to end to cancelled calls that compute; how long each has been cancelled."""

    def drop_parked(self) -> None:
        """Close connections of unknown processes that waited too long."""

    def kill(self, executor: Any, reason: str, kind: ErrorKind, /) -> None:
        """Have it killed; its calls move when it has been reaped."""


class Watchdog:
    """Looks at every attached executor; see the module's law."""

    def __init__(
        self,
        adapter: WatchedExecutors,
        *,
        stall_timeout_ms: int,
        heartbeat_timeout_ms: int,
        process_cpu_ms: Callable[[int], int] | None = None,
    ) -> None:
        """``stall_timeout_ms`` 0: no wedge kill. ``heartbeat_timeout_ms``: silence that counts as lost.

        ``process_cpu_ms``: how much CPU time a process has used; by default what /proc says.
        """
        self._process_cpu_ms = process_cpu_ms or _process_cpu_ms
        self._adapter = adapter
        self._stall_timeout_ms = stall_timeout_ms
        self._heartbeat_timeout_ms = heartbeat_timeout_ms
        self._cpu_ms: dict[str, tuple[int, int]] = {}

    def tick(self) -> None:
        """One look."""
        for executor, draining_ms in self._adapter.press_cancellations():
            if draining_ms >= CANCEL_MS_MAX:
                self._kill(
                    executor,
                    "a call did not end within 1 s of its cancellation",
                    ErrorKind.EXECUTOR_LOST,
                )
        snapshots = {snapshot.executor_id: snapshot for snapshot in self._adapter.snapshots()}
        for executor in list(self._adapter.attached_executors()):
            snapshot = snapshots.get(executor.executor_id)
            if snapshot is not None:
                self._check(executor, snapshot)
        self._adapter.drop_parked()

    def _check(self, executor: WatchedExecutor, snapshot: ExecutorSnapshot) -> None:
        stalled_ms = snapshot.scheduler_idle_ms
        if (
            self._stall_timeout_ms
            and snapshot.running_call_seq
            and stalled_ms > self._stall_timeout_ms
        ):
            self._kill(
                executor,
                f"a call held it for more than {self._stall_timeout_ms} ms",
                ErrorKind.EXECUTOR_WEDGED,
            )
            return
        silent_ms = self._adapter.silent_ms(executor)
        if silent_ms > self._heartbeat_timeout_ms and not self._is_computing(executor):
            self._kill(
                executor,
                f"no sign of life for more than {self._heartbeat_timeout_ms} ms",
                ErrorKind.EXECUTOR_LOST,
            )

    def _is_computing(self, executor: WatchedExecutor) -> bool:
        """Whether its process used CPU since the last look: then it is alive, however silent."""
        cpu_ms = self._process_cpu_ms(executor.work_pid)
        pid, before_ms = self._cpu_ms.get(executor.executor_id, (0, 0))
        self._cpu_ms[executor.executor_id] = (executor.pid, cpu_ms)
        return pid != executor.pid or cpu_ms > before_ms

    def _kill(self, executor: WatchedExecutor, reason: str, kind: ErrorKind) -> None:
        if not executor.lost_because:
            logger.bind(executor_id=executor.executor_id, pid=executor.pid, why=reason).warning(
                "killing executor"
            )
            self._adapter.kill(executor, reason, kind)


def _process_cpu_ms(pid: int) -> int:
    """User and system time of a process in milliseconds; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    ticks = int(fields[11]) + int(fields[12])
    return ticks * 10  # USER_HZ is 100 on Linux whatever the kernel's own clock
