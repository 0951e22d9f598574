"""``python -m blockx.executor``: an executor started by hand or in a container; the same as a forked one.

It has no page in the heartbeat table, so it sends Heartbeat frames every interval.
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
    options = parser.parse_args(arguments)
    if not 0.01 <= options.heartbeat_interval <= 60:
        parser.error("--heartbeat-interval must be between 0.01 and 60 seconds")
    if options.executor_max_inflight < 0:
        parser.error("--executor-max-inflight must not be negative")
    launch = ExecutorLaunch(
        executor_id=options.executor_id,
        slot_index=0,
        socket_path=options.socket_path,
        heartbeat_interval_ms=round(options.heartbeat_interval * _MS_PER_S),
        executor_max_inflight=options.executor_max_inflight,
        executor_max_runnable=options.executor_max_runnable,
        requires_audit=options.requires_audit,
    )
    preload.blockx.executor.main.run(launch, None)


if __name__ == "__main__":
    main(sys.argv[1:])
