"""How long the modules of a task stay loaded in an executor.

Main thread only. Main does not say when a task ends, so a task's modules are released some time after
its last resident call: long enough that a task which sends one call at a time does not load its
functions anew for each, short enough that nothing of a finished task is kept.
≠ The specification releases them with the last call.
"""

from collections import OrderedDict
from typing import Final

from blockx.executor.loader import Loader

TASK_LINGER_NS: Final = 1_000_000_000
"""Between the last resident call of a task and the release of its modules: 1 s."""
TASKS_LINGERING_MAX: Final = 16
"""Tasks without a call that are kept. Full: the oldest is released at once."""


class TaskModules:
    """Counts the resident calls of each task, and releases."""

    def __init__(self, loader: Loader, linger_ns: int = TASK_LINGER_NS) -> None:
        self._loader = loader
        self._linger_ns = linger_ns
        self._calls: dict[str, int] = {}
        self._lingering: OrderedDict[str, int] = OrderedDict()
        """Task -> since when it has no call, the oldest first."""

    def call_started(self, task_id: str) -> None:
        """An attempt of the task is resident from now on."""
        self._calls[task_id] = self._calls.get(task_id, 0) + 1
        self._lingering.pop(task_id, None)

    def call_ended(self, task_id: str, now_ns: int) -> None:
        """One of them is over."""
        calls = self._calls[task_id] = self._calls[task_id] - 1
        if not calls:
            del self._calls[task_id]
            self._lingering[task_id] = now_ns

    def next_due_ns(self) -> int | None:
        """When the next release is due; None if nothing lingers."""
        if not self._lingering:
            return None
        return next(iter(self._lingering.values())) + self._linger_ns

    def is_due(self, now_ns: int) -> bool:
        """Whether ``release_due`` has anything to do."""
        due_ns = self.next_due_ns()
        return due_ns is not None and (
            now_ns >= due_ns or len(self._lingering) > TASKS_LINGERING_MAX
        )

    def release_due(self, now_ns: int) -> None:
        """Release what is due, or too much."""
        while self.is_due(now_ns):
            self._release_oldest()

    def release_all(self) -> None:
        """Release all tasks without a call."""
        while self._lingering:
            self._release_oldest()

    def _release_oldest(self) -> None:
        task_id, _since_ns = self._lingering.popitem(last=False)
        self._loader.release_task(task_id)
