"""Nothing that user code started outlives its executor: orphans are adopted, found and killed.

Imported by the fork server as the last module of its preload; there, and only there, ``adopt_orphans`` is
called. Why it is needed: an executor's group is killed with it, but a process that made a session of its
own (``start_new_session``, a daemon that forked twice) is in no group that we know. As the *subreaper* of
all executors, the fork server becomes the parent of whatever a dead executor leaves behind. So its
children are executors, which main knows by number, or orphans, which nobody needs.

- While main lives, main asks for the kill after each reaped executor (``kill_orphans``); a daemon that
  separated itself from a living executor may then die before that executor does.
- When main is gone, the fork server ends by itself, and kills all that is left on its way out.
- When the fork server is killed from outside, its executors die with it, and what had left their groups
  does not: adopted by process 1, it is nobody's that we could tell from others.
"""

import atexit
import contextlib
import ctypes
import os
import select
import signal
import warnings
from collections.abc import Collection
from typing import Final

_PR_SET_CHILD_SUBREAPER: Final = 36
PASSES_MAX: Final = 200
"""Looks at the children for orphans that appear while others are killed (a process that forks for ever
loses that race, since each look stops all it finds first). Reached: the rest is left, and reported."""
CLEAR_LOOKS: Final = 3
"""Looks in a row that find nothing before it is believed: the kernel's list may miss a child while others
come and go."""
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def adopt_orphans() -> None:
    """Make this process the parent of all orphans below it, and kill them when it ends.

    Raises OSError where the kernel cannot do that.
    """
    if _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    # It collects every dead child, and would complain about those that it did not start.
    warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
    owner = os.getpid()

    def at_exit() -> None:
        if os.getpid() == owner:  # not in what it forked
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects the dead ones now
            kill_orphans(owner, keep=())

    atexit.register(at_exit)


def kill_orphans(parent_pid: int, keep: Collection[int]) -> int:
    """SIGKILL all children of a process but ``keep``, and what becomes its child by that.

    Returns how many were killed. Those it cannot kill (another user's, by a set-uid program) are left.
    Any process may call it that may signal them; about 0.1 ms when there is nothing to kill.
    """
    killed: set[int] = set()
    clear_looks = 0
    for _ in range(PASSES_MAX):
        found = [pid for pid in children_of(parent_pid) if pid not in keep and pid not in killed]
        clear_looks = 0 if found else clear_looks + 1
        if clear_looks == CLEAR_LOOKS:
            break
        for pid in found:
            _signal(pid, signal.SIGSTOP)
        for pid in found:
            _signal(pid, signal.SIGKILL)
        killed.update(found)
        for pid in found:
            _wait_dead(pid)
    return len(killed)


def children_of(pid: int) -> list[int]:
    """The living (or not yet collected) children of a process; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as children:
            return [int(child) for child in children.read().split()]
    except FileNotFoundError:
        return _children_by_search(pid)
    except OSError:
        return []


def _children_by_search(parent_pid: int) -> list[int]:
    """For kernels without the list of children."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if parent_of(pid) == parent_pid]


def parent_of(pid: int) -> int:
    """The parent of a process. 0: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _wait_dead(pid: int) -> None:
    """Until it is dead, at most a second (one may hang in the kernel): its children are adopted then."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(1_000)
    finally:
        os.close(descriptor)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
