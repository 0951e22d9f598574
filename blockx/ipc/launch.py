"""What main hands to an executor when it starts it: the same for a forkserver child and the command line."""

from dataclasses import dataclass


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
    requires_audit: bool = False
    """``functions.mode: restricted``: load nothing that comes without an audit."""
