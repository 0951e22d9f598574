"""Our own descriptors stay open, whatever user code closes.

A function that closes "all" descriptors (as daemons do: ``os.closerange(3, 1024)``) means files of its own,
but would close the connection to main with them, and end the executor with all its calls. So ``os.close``
and ``os.closerange`` skip ours, as if they were not open. Any thread. In a forked child the connection is
closed already, its number may be somebody else's: nothing is protected there.
"""

import errno
import operator
import os
from typing import SupportsIndex

_real_close, _real_closerange = os.close, os.closerange
_protected: list[int] = []
"""Sorted."""


def protect(descriptors: set[int]) -> None:
    """Keep these open from now on; an empty set protects nothing any more."""
    _protected[:] = sorted(descriptors)
    os.close = _close
    os.closerange = _closerange


def unprotect() -> None:
    """In a forked child, and in tests: all descriptors are the caller's."""
    _protected.clear()
    os.close, os.closerange = _real_close, _real_closerange


def _close(fd: SupportsIndex) -> None:
    """Close a file descriptor."""
    if operator.index(fd) in _protected:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    _real_close(operator.index(fd))


def _closerange(fd_low: SupportsIndex, fd_high: SupportsIndex, /) -> None:
    """Close all file descriptors in [fd_low, fd_high), ignoring errors."""
    low, high = operator.index(fd_low), operator.index(fd_high)
    for descriptor in _protected:
        if low <= descriptor < high:
            _real_closerange(low, descriptor)
            low = descriptor + 1
    _real_closerange(low, high)
