"""What main hands to an executor when it starts it: the same for a forkserver child and the command line."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of the kernel for one executor process; 0: none of its own."""

    address_space_bytes: int = 0
    """Reserved memory. Past it an allocation raises MemoryError."""
    open_files_max: int = 0
    file_bytes_max: int = 0
    """Largest file that it may write. Past it a write is an OSError."""
    threads_max: int = 0
    """Processes and threads of its user id; only for an id of its own, since the kernel counts by id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """How an executor confines itself before it runs user code; ``supervisor.sandbox`` decides it."""

    namespaces: Literal["root", "user", "none"]
    """Who makes them: root does, a user does in a user namespace of his own; none: they cannot be made."""
    pid_namespace: bool
    """Hides the processes of the machine; costs a process that mirrors the executor's end."""
    landlock_abi: int
    """Version of Landlock to use. 0: none."""
    uid: int
    """User and group id to become. 0: stay who it is."""
    mount_point: str
    """An empty folder, on which the private file system is built."""
    read_only: tuple[str, ...]
    """Files and folders to be seen besides Python's own; what does not exist is left out."""
    tmp_bytes: int
    """Size of the private /tmp. 0: none."""
    groups: tuple[str, ...] = ()
    """Files of control groups to write the process's number into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The container that an executor runs in; ``supervisor.oci`` has written its bundle."""

    runtime: str
    """Path of the program: runc, or one with its command line."""
    state_folder: str
    """Where the program keeps its notes about containers."""
    bundle: str
    """Folder with ``config.json``."""
    groups: tuple[str, ...] = ()
    """Files of control groups to write the process's number into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLaunch:
    """Arguments of one executor process; must pickle."""

    executor_id: str
    """``exec-{slot}``; survives restarts."""
    slot_index: int
    """Page of the heartbeat table."""
    socket_path: str
    """Where main listens for this slot; at most 107 bytes."""
    heartbeat_interval_ms: int
    executor_max_inflight: int
    """Resident root contexts. 0: no limit."""
    executor_max_runnable: int
    """Stored only; main enforces it."""
    memory_mark_bytes: int = 0
    """Resident memory above which the executor collects its garbage. 0: never."""
    limits: ProcessLimits = ProcessLimits()
    confinement: Confinement | None = None
    """None: it sees what its user sees."""
    container: Container | None = None
    """None: it is a process of the fork server itself."""
    is_sealed: bool = False
    """It loses most system calls before its first heartbeat."""
    requires_audit: bool = False
    """``functions.mode: restricted``: load nothing that comes without an audit."""
