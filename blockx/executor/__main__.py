"""``python -m blockx.executor``: an executor started by hand or in a container; the same as a forked one.

Without the descriptor of the heartbeat table it sends Heartbeat frames every interval.
"""

import argparse
import sys

from blockx.executor import preload
from blockx.ipc.launch import ExecutorLaunch

_MS_PER_S = 1_000


def main(arguments: list[str]) -> None:
    """Parse the command line of the specification and run until the connection ends."""
    parser = argparse.ArgumentParser(prog="python -m blockx.executor", description=__doc__)
    parser.add_argument("--executor-id", required=True)
    parser.add_argument("--socket-path", required=True, help="Unix socket on which main listens")
    parser.add_argument(
        "--heartbeat-interval", type=float, default=1.0, metavar="SECONDS", help="default 1.0"
    )
    parser.add_argument(
        "--executor-max-inflight", type=int, default=128, help="resident root calls; 0: no limit"
    )
    parser.add_argument(
        "--executor-max-runnable", type=int, default=128, help="stored only; main enforces it"
    )
    parser.add_argument(
        "--requires-audit", action="store_true", help="load only functions that main has audited"
    )
    parser.add_argument(
        "--heartbeat-fd", type=int, default=-1, help="open descriptor of the heartbeat table"
    )
    parser.add_argument("--slot-index", type=int, default=0, help="its page in that table")
    parser.add_argument(
        "--memory-mark", type=int, default=0, metavar="BYTES", help="collect garbage above it"
    )
    parser.add_argument(
        "--seal", action="store_true", help="lose most system calls before the first heartbeat"
    )
    options = parser.parse_args(arguments)
    if not 0.01 <= options.heartbeat_interval <= 60:
        parser.error("--heartbeat-interval must be between 0.01 and 60 seconds")
    if options.executor_max_inflight < 0:
        parser.error("--executor-max-inflight must not be negative")
    launch = ExecutorLaunch(
        executor_id=options.executor_id,
        slot_index=options.slot_index,
        socket_path=options.socket_path,
        heartbeat_interval_ms=round(options.heartbeat_interval * _MS_PER_S),
        executor_max_inflight=options.executor_max_inflight,
        executor_max_runnable=options.executor_max_runnable,
        memory_mark_bytes=options.memory_mark,
        requires_audit=options.requires_audit,
        is_sealed=options.seal,
    )
    heartbeat = None if options.heartbeat_fd < 0 else _Inherited(options.heartbeat_fd)
    preload.blockx.executor.main.run(launch, heartbeat)


class _Inherited:
    """A descriptor that came with the process, in the form of multiprocessing's ``DupFd``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def detach(self) -> int:
        """The descriptor, now the caller's."""
        return self._descriptor


if __name__ == "__main__":
    main(sys.argv[1:])
