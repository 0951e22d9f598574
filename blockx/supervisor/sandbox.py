"""The policy of the sandbox: what this machine can do, and what each executor shall give up.

Main thread. The child does it (``executor.confine``); this module decides, before the first executor starts
and once a run. It **fails closed**: a process tries everything for real, and where too little works the
run is refused with the names of what is missing. There is no weaker form that is taken in silence: what is
in force is logged and stands in the report.

Enough is the filter of system calls, and either private namespaces or Landlock (or both). The filter alone
would leave all files of the machine readable.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from blockx.config import SANDBOX_OPEN_FILES, WorkerConfig, executor_address_space_bytes
from blockx.errors import UsageError
from blockx.ipc.launch import Confinement, ExecutorLaunch, ProcessLimits
from blockx.supervisor.control_groups import ControlGroups, GroupLimits
from blockx.supervisor.spawn_mode import Ask

MEMORY_SLACK_PART: Final = 4
MEMORY_SLACK_BYTES_MIN: Final = 256 * 1024 * 1024
"""The control group's limit lies a quarter, and at least this, above the limit that main watches: main
looks every 100 ms and knows whom to charge, the kernel does not."""

_NAMESPACES_ADVICE: Final = (
    "run as root with CAP_SYS_ADMIN, or allow user namespaces"
    " (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0)"
)
_LANDLOCK_ADVICE: Final = "name landlock in the kernel's parameter lsm= (Linux 5.13)"

_Namespaces = Literal["root", "user", "none"]


def group_limits(worker: WorkerConfig, memory_limit_bytes: int) -> GroupLimits:
    """Limits of the control group of one executor."""
    slack_bytes = max(MEMORY_SLACK_BYTES_MIN, memory_limit_bytes // MEMORY_SLACK_PART)
    return GroupLimits(
        memory_bytes=memory_limit_bytes + slack_bytes,
        cpu_percent=worker.sandbox_cpu_percent,
        threads_max=worker.sandbox_threads_max,
    )


class Sandbox:
    """What executors of this run give up: a ``SpawnMode``."""

    def __init__(
        self,
        worker: WorkerConfig,
        memory_limit_bytes: int,
        *,
        mount_point: str,
        read_only: Sequence[str],
    ) -> None:
        """``mount_point``: an empty folder of our own. ``read_only``: absolute paths, besides Python's."""
        self._worker = worker
        self._memory_limit_bytes = memory_limit_bytes
        self._mount_point = mount_point
        self._read_only = tuple(read_only)
        self._namespaces: _Namespaces = "none"
        self._landlock_abi = 0
        self.missing: list[str] = []
        """What could not be had, in words; empty: everything is in force."""
        self._groups = ControlGroups.create(
            worker.executor_count, group_limits(worker, memory_limit_bytes)
        )

    @property
    def has_own_pids(self) -> bool:
        """Only where they are asked for."""
        return self._worker.sandbox_pid_namespace

    def prepare(self, ask: Ask, launch: ExecutorLaunch) -> None:
        """Find out what works. ``ask`` lets a process confine itself, and returns its answer.

        Raises:
            UsageError: too little works; the text says what is missing and what to do.
        """
        first: _Namespaces = "root" if os.geteuid() == 0 else "user"
        failures: list[str] = []
        for self._namespaces in (first, "none"):
            word, self._landlock_abi, why = _answer(ask(self.dress(launch)))
            if word == "ok":
                self._note_what_is_missing(failures)
                return
            failures.append(f"{_ROUTES[self._namespaces]}: {why}")
        self.close()
        raise UsageError(
            "worker.executor_spawn_mode: sandbox: executors cannot be confined on this machine, and nothing"
            " weaker is used in its place. "
            + "; ".join(failures)
            + ". Needed are a filter of system calls"
            " (seccomp; x86_64 or aarch64), and private namespaces or Landlock (Linux 5.13). You can"
            f" {_NAMESPACES_ADVICE}; or choose process, if you trust the functions"
        )

    def uid(self, slot: int) -> int:
        """The user id of a slot's executor; 0: main's."""
        return 0 if os.geteuid() else self._worker.sandbox_first_uid + slot

    def dress(self, launch: ExecutorLaunch) -> ExecutorLaunch:
        """With its limits, and what it gives up."""
        worker, slot = self._worker, launch.slot_index
        # Counted by user id: of a user who has other processes too, they would count.
        has_own_count = os.geteuid() == 0 or self._namespaces == "user"
        limits = ProcessLimits(
            address_space_bytes=executor_address_space_bytes(worker, self._memory_limit_bytes),
            open_files_max=worker.executor_open_files_max or SANDBOX_OPEN_FILES,
            file_bytes_max=worker.sandbox_file_bytes_max,
            threads_max=worker.sandbox_threads_max if has_own_count else 0,
        )
        confinement = Confinement(
            namespaces=self._namespaces,
            pid_namespace=worker.sandbox_pid_namespace,
            landlock_abi=self._landlock_abi,
            uid=self.uid(slot),
            mount_point=self._mount_point,
            read_only=self._read_only,
            tmp_bytes=worker.sandbox_tmp_bytes,
            groups=self._groups.join_files(slot),
        )
        return replace(launch, limits=limits, confinement=confinement, is_sealed=True)

    def was_out_of_memory(self, slot: int) -> bool:
        """Whether the kernel killed the slot's executor for the limit of its group; asked at its death."""
        return self._groups.was_out_of_memory(slot)

    def effective(self) -> Mapping[str, Any]:
        """What is in force, for the log and the report."""
        has_namespaces = self._namespaces != "none"
        return {
            "namespaces": self._namespaces,
            "pid_namespace": has_namespaces and self._worker.sandbox_pid_namespace,
            "own_user": os.geteuid() == 0,
            "landlock_abi": self._landlock_abi,
            "seccomp": True,
            "control_groups": sorted(self._groups.controllers),
            "missing": self.missing,
        }

    def advice(self) -> str:
        """Only of layers: what control groups would limit is limited in other ways too."""
        found = []
        if self._namespaces == "none":
            found.append(f"for private namespaces, {_NAMESPACES_ADVICE}")
        if not self._landlock_abi:
            found.append(f"for Landlock, {_LANDLOCK_ADVICE}")
        return "; ".join(found)

    def close(self) -> None:
        """Remove the control groups. Call it when the executors are dead."""
        self._groups.close()

    def _note_what_is_missing(self, failures: list[str]) -> None:
        worker = self._worker
        self.missing = list(failures)
        if self._namespaces == "none" and worker.sandbox_pid_namespace:
            self.close()
            raise UsageError(
                "worker.sandbox_pid_namespace: no namespaces can be made here: "
                + "; ".join(failures)
            )
        if not self._landlock_abi:
            self.missing.append("Landlock: not in this kernel, or switched off")
        wanted = {
            "memory": True,
            "cpu": worker.sandbox_cpu_percent,
            "pids": worker.sandbox_threads_max,
        }
        lacking = [c for c, value in wanted.items() if value and c not in self._groups.controllers]
        if "cpu" in lacking:
            self.close()
            raise UsageError(
                "worker.sandbox_cpu_percent: needs a control group for CPU that this process may write"
                " (run as root, or in a service with Delegate=yes); use 0 for no limit"
            )
        if lacking:
            self.missing.append(f"control groups for {', '.join(lacking)}: not writable")


_ROUTES: Final[Mapping[_Namespaces, str]] = {
    "root": "private namespaces as root",
    "user": "private namespaces in a user namespace",
    "none": "no namespaces, Landlock alone",
}


def _answer(text: str) -> tuple[str, int, str]:
    """The words of ``confine.probe``: outcome, version of Landlock, why it failed."""
    word, _, rest = text.partition(" ")
    version, _, why = rest.partition(" ")
    if word not in ("ok", "failed") or not version.isdecimal():
        return "failed", 0, "a process that tried it died"
    return word, int(version), why
