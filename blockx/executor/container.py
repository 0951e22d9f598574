"""From a child of the fork server to a container: it becomes the program that runs it.

The program stays in the foreground and ends as the container does, passes SIGTERM on, and is a process like
any other executor to the spawner. It dies with the fork server; the executor inside dies with it, since it is
its child and asks for that (``confine.harden``). What it leaves behind when it is killed, the fork server adopts.
"""

import json
import os
import signal
import sys
from typing import Final, NoReturn, cast

from blockx.executor import confine
from blockx.ipc.launch import ExecutorLaunch

HEARTBEAT_FD: Final = 3
"""Where the heartbeat table is in the container: the first one after standard error."""
_EXIT_NOT_STARTED: Final = 1


def run_container(launch: ExecutorLaunch, heartbeat: object, log_pipe: object) -> NoReturn:
    """Entry of the child. Ends with code 1, and a line in its log, if the program cannot be run."""
    container = launch.container
    assert container is not None
    try:
        confine.become_standard_error(log_pipe)
        confine.die_with_parent()
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for group in container.groups:
            confine.join_group(group)
        descriptor = cast(confine.Descriptor, heartbeat).detach()
        os.dup2(descriptor, HEARTBEAT_FD)
        os.closerange(HEARTBEAT_FD + 1, os.sysconf("SC_OPEN_MAX"))
        os.execv(
            container.runtime,
            [
                container.runtime,
                "--root",
                container.state_folder,
                "run",
                "--preserve-fds",
                "1",
                "--bundle",
                container.bundle,
                # Unlike that of any earlier life, of which there may be notes left.
                f"{launch.executor_id}-{os.getpid()}",
            ],
        )
    except OSError as error:
        line = f"{launch.executor_id}: {container.runtime} cannot be run: {error}\n"
        os.write(2, line.encode("utf-8", "backslashreplace"))
    finally:
        os._exit(_EXIT_NOT_STARTED)


def tell_python(_launch: ExecutorLaunch, answer: object) -> NoReturn:
    """Entry of a child that only tells, as JSON, which files a Python of this machine needs in a container."""
    descriptor = cast(confine.Descriptor, answer).detach()
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    paths = [*confine.library_paths(), *confine.SYSTEM_FILES, executable]
    told = {
        "executable": executable,
        "path": [entry for entry in sys.path if os.path.isabs(entry)],
        "read_only": confine.outermost(paths),
    }
    os.write(descriptor, json.dumps(told).encode())
    os._exit(0)
