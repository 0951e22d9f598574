"""What the spawn modes have in common, and the plain one: how an executor of a slot is to be started.

Main thread. One object a run: made, ``prepare``d once when the fork server is up, asked for each slot, closed when
the executors are dead. ``sandbox.Sandbox`` and ``oci.OciContainers`` are the other two.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from blockx.config import WorkerConfig, executor_address_space_bytes
from blockx.ipc.launch import ExecutorLaunch, ProcessLimits

Ask = Callable[[ExecutorLaunch], str]
"""Lets a child of the fork server try or look at something; what it answers."""


class SpawnMode(Protocol):
    """How executors are started and what keeps them in."""

    @property
    def has_own_pids(self) -> bool:
        """Executors run in a PID namespace: who connects is a child of the process that was spawned."""

    def prepare(self, ask: Ask, launch: ExecutorLaunch) -> None:
        """Find out what works. Raises UsageError: too little."""

    def uid(self, slot: int) -> int:
        """The user id of a slot's executor. 0: main's."""

    def dress(self, launch: ExecutorLaunch) -> ExecutorLaunch:
        """``launch`` with what the mode adds to it."""

    def was_out_of_memory(self, slot: int) -> bool:
        """Whether the kernel killed the slot's executor for the limit of its group; asked at its death."""

    def effective(self) -> Mapping[str, Any]:
        """What is in force, for the log and the report. Empty: nothing beyond the common hygiene."""

    def advice(self) -> str:
        """What an operator can do so that more is in force. Empty: nothing that he could do is missing."""

    def close(self) -> None:
        """Give up what was made. Call it when the executors are dead."""


class PlainProcesses:
    """Executors as processes of main's user, with the limits that are configured."""

    has_own_pids = False

    def __init__(self, worker: WorkerConfig, memory_limit_bytes: int) -> None:
        self._limits = ProcessLimits(
            address_space_bytes=executor_address_space_bytes(worker, memory_limit_bytes),
            open_files_max=worker.executor_open_files_max,
        )

    def prepare(self, ask: Ask, launch: ExecutorLaunch) -> None:
        """Nothing to find out."""

    def uid(self, _slot: int) -> int:
        """Main's own."""
        return 0

    def dress(self, launch: ExecutorLaunch) -> ExecutorLaunch:
        """With the configured limits."""
        return replace(launch, limits=self._limits)

    def was_out_of_memory(self, _slot: int) -> bool:
        """They have no group of their own."""
        return False

    def effective(self) -> Mapping[str, Any]:
        """Nothing."""
        return {}

    def advice(self) -> str:
        """None: there is no more of it."""
        return ""

    def close(self) -> None:
        """Nothing was made."""
