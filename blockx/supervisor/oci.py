"""Containers of executors: what goes into their bundles. ``executor.container`` runs them.

Main thread, once a run. A bundle is the ``config.json`` of the OCI runtime specification and an empty folder for the
root, or the root file system of an image. In the container there are: no network but its own empty one, the folder of
the slot's socket, Python and packages (read-only), a small ``/tmp``; no capabilities, a user of its own, limits of
memory, CPU and threads. The heartbeat table comes as an open descriptor. The executor loads our own filter of system
calls, as in the sandbox, so that nothing depends on what the runtime was built with.

Only for root: a rootless runtime needs a user manager for its control groups, and ``sandbox`` does without.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from blockx.config import SANDBOX_OPEN_FILES, WorkerConfig, executor_address_space_bytes
from blockx.errors import UsageError
from blockx.ipc.launch import Container, ExecutorLaunch
from blockx.supervisor.control_groups import PERIOD_US, ControlGroups
from blockx.supervisor.sandbox import group_limits
from blockx.supervisor.spawn_mode import Ask

SOCKET_FOLDER: Final = "/run/blockx"
HEARTBEAT_FD: Final = 3
"""The first descriptor that a container gets besides standard input, output and error."""
_HIDDEN: Final = (
    "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
    "/proc/sched_debug", "/proc/scsi", "/proc/sysrq-trigger", "/proc/interrupts",
)  # fmt: skip
_STRICT: Final = ("nosuid", "nodev", "noexec")


@dataclass(frozen=True, slots=True)
class HostPython:
    """A Python of this machine, as ``executor.container.tell_python`` describes it."""

    executable: str
    path: Sequence[str]
    """``sys.path``."""
    read_only: Sequence[str]
    """Folders and files to be seen in the container."""

    @classmethod
    def of(cls, answer: str) -> "HostPython":
        """Raises UsageError: the process that should tell has died."""
        try:
            told = json.loads(answer)
            return cls(told["executable"], told["path"], told["read_only"])
        except (ValueError, KeyError):
            raise UsageError(
                "worker.executor_spawn_mode: oci: the Python of this machine cannot be described: a process that"
                f" should do it answered {answer[:200]!r}"
            ) from None


class OciContainers:
    """The containers of a run, bundles and control groups: a ``SpawnMode``."""

    has_own_pids = True

    def __init__(
        self,
        worker: WorkerConfig,
        memory_limit_bytes: int,
        environment: Mapping[str, str],
        read_only: Sequence[str],
        folder: Path,
    ) -> None:
        """``folder``: private, of this run. ``environment``: what executors may see.

        Raises:
            UsageError: the runtime is missing, or this is not root, or the image is no folder.
        """
        runtime = shutil.which(worker.oci_runtime)
        if runtime is None:
            raise UsageError(
                f"worker.oci_runtime: no program {worker.oci_runtime} is installed here; install it (Debian:"
                " apt-get install runc), name it by its path, or choose executor_spawn_mode: sandbox"
            )
        if os.geteuid() != 0:
            raise UsageError(
                "worker.executor_spawn_mode: oci needs root; choose sandbox, which confines executors of a user too"
            )
        if worker.oci_root and not os.path.isdir(worker.oci_root):
            raise UsageError(f"worker.oci_root: {worker.oci_root} is no folder")
        self._runtime = runtime
        self._worker = worker
        self._memory_limit_bytes = memory_limit_bytes
        self._environment = environment
        self._read_only = read_only
        self._folder = folder
        self._python: HostPython | None = None
        self._groups = ControlGroups.create(
            worker.executor_count, group_limits(worker, memory_limit_bytes)
        )
        if worker.sandbox_cpu_percent and "cpu" not in self._groups.controllers:
            self._groups.close()
            raise UsageError(
                "worker.sandbox_cpu_percent: needs a control group for CPU that this process may write; use 0"
            )

    def prepare(self, ask: Ask, launch: ExecutorLaunch) -> None:
        """Find out what the Python of this machine needs, unless an image has its own."""
        if not self._worker.oci_root:
            self._python = HostPython.of(ask(launch))

    def uid(self, slot: int) -> int:
        """The user id of a slot's executor."""
        return self._worker.sandbox_first_uid + slot

    def dress(self, launch: ExecutorLaunch) -> ExecutorLaunch:
        """With a container, whose bundle is written here. Raises OSError."""
        bundle = self._folder / "bundles" / launch.executor_id
        root = Path(self._worker.oci_root or bundle / "root")
        root.mkdir(parents=True, exist_ok=True)
        bundle.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.config(launch, root), indent=1)
        (bundle / "config.json").write_text(text)
        container = Container(
            runtime=self._runtime,
            state_folder=str(self._folder / "containers"),
            bundle=str(bundle),
            groups=self._groups.join_files(launch.slot_index),
        )
        return replace(launch, container=container)

    def config(self, launch: ExecutorLaunch, root: Path) -> dict[str, Any]:
        """``config.json`` for one executor."""
        worker, uid = self._worker, self.uid(launch.slot_index)
        environment = {**self._environment, "HOME": "/tmp", "TMPDIR": "/tmp", "PYTHONSAFEPATH": "1"}
        python = worker.oci_python
        if self._python is not None:
            python = self._python.executable
            environment["PYTHONPATH"] = os.pathsep.join(self._python.path)
        environment.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
        limits = {
            "RLIMIT_CORE": 0,
            "RLIMIT_AS": executor_address_space_bytes(worker, self._memory_limit_bytes),
            "RLIMIT_NOFILE": worker.executor_open_files_max or SANDBOX_OPEN_FILES,
            "RLIMIT_FSIZE": worker.sandbox_file_bytes_max,
        }
        return {
            "ociVersion": "1.0.2",
            "hostname": "blockx",
            "root": {"path": str(root), "readonly": True},
            "process": {
                "user": {"uid": uid, "gid": uid},
                "cwd": "/",
                "args": [python, "-m", "blockx.executor", *_arguments(launch)],
                "env": [f"{name}={value}" for name, value in sorted(environment.items())],
                "noNewPrivileges": True,
                "capabilities": {},
                "rlimits": [
                    {"type": kind, "soft": value, "hard": value}
                    for kind, value in limits.items()
                    if value or kind == "RLIMIT_CORE"
                ],
            },
            "mounts": [*self._own_mounts(launch), *self._shown_mounts()],
            "linux": {
                "namespaces": [
                    {"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount", "cgroup")
                ],
                "cgroupsPath": f"blockx-{os.getpid()}-{launch.slot_index}",
                "resources": self._resources(),
                "maskedPaths": list(_HIDDEN),
                "readonlyPaths": ["/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs"],
            },
        }

    def was_out_of_memory(self, slot: int) -> bool:
        """Whether the kernel killed the slot's executor for the limit of its group; asked at its death."""
        return self._groups.was_out_of_memory(slot)

    def effective(self) -> Mapping[str, Any]:
        """What is in force, for the log and the report."""
        return {
            "runtime": self._runtime,
            "root": self._worker.oci_root or "this machine's Python",
            "seccomp": True,
            "control_groups": sorted(self._groups.controllers),
        }

    def advice(self) -> str:
        """None: the runtime has all of it, or fails."""
        return ""

    def close(self) -> None:
        """Remove the control groups. Call it when the executors are dead."""
        self._groups.close()

    def _own_mounts(self, launch: ExecutorLaunch) -> list[dict[str, Any]]:
        socket_folder = os.path.dirname(launch.socket_path)
        mounts = [
            _mount("/proc", "proc", "proc", _STRICT),
            _mount("/dev", "tmpfs", "tmpfs", ("nosuid", "noexec", "mode=755", "size=65536")),
            _mount(SOCKET_FOLDER, "bind", socket_folder, ("bind", "ro", *_STRICT)),
        ]
        size = self._worker.sandbox_tmp_bytes
        if size:
            mounts.append(_mount("/tmp", "tmpfs", "tmpfs", (*_STRICT, "mode=1777", f"size={size}")))
        return mounts

    def _shown_mounts(self) -> list[dict[str, Any]]:
        shown = [] if self._python is None else list(self._python.read_only)
        extra = [path for path in self._read_only if os.path.exists(path)]
        return [
            _mount(path, "bind", path, ("rbind", "ro", "nosuid", "nodev"))
            for path in [*shown, *extra]
        ]

    def _resources(self) -> dict[str, Any]:
        limits = group_limits(self._worker, self._memory_limit_bytes)
        found: dict[str, Any] = {
            "devices": [{"allow": False, "access": "rwm"}],
            "memory": {"limit": limits.memory_bytes},
        }
        if limits.cpu_percent:
            found["cpu"] = {"quota": limits.cpu_percent * PERIOD_US // 100, "period": PERIOD_US}
        if limits.threads_max:
            found["pids"] = {"limit": limits.threads_max}
        return found


def _arguments(launch: ExecutorLaunch) -> list[str]:
    options: dict[str, Any] = {
        "--executor-id": launch.executor_id,
        "--socket-path": f"{SOCKET_FOLDER}/{os.path.basename(launch.socket_path)}",
        "--heartbeat-interval": launch.heartbeat_interval_ms / 1_000,
        "--heartbeat-fd": HEARTBEAT_FD,
        "--slot-index": launch.slot_index,
        "--executor-max-inflight": launch.executor_max_inflight,
        "--executor-max-runnable": launch.executor_max_runnable,
        "--memory-mark": launch.memory_mark_bytes,
    }
    words = [str(word) for option in options.items() for word in option]
    return [*words, "--seal", *(["--requires-audit"] if launch.requires_audit else [])]


def _mount(target: str, kind: str, source: str, options: Sequence[str]) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}
