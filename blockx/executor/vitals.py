"""The vital signs of this process: resident memory and CPU use.

One ``Vitals`` belongs to one thread: the helper thread of an executor with a heartbeat row, the main
thread of one that sends frames. Reads ``/proc/self/statm``; about 10 us a sample, 2 from a kept descriptor.
"""

import os
import time
from typing import Final, NamedTuple

_PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")
_PPM: Final = 1_000_000
_STATM_BYTES: Final = 200
# Bound before user code can replace them.
_open, _read, _pread, _close = os.open, os.read, os.pread, os.close
_monotonic_ns, _process_time_ns = time.monotonic_ns, time.process_time_ns


_kept: list[int] = []
"""The descriptor of ``keep_statm``, or empty."""


def keep_statm() -> int:
    """Open the file for good, since a sandbox has no /proc; returns the descriptor.

    Again, in a process that was forked since: its own file, under the same number.
    """
    opened = _open_statm()
    if _kept:
        os.dup2(opened, _kept[0], inheritable=False)
        _close(opened)
    else:
        _kept.append(opened)
    return _kept[0]


def forget_statm() -> None:
    """In a forked child: the descriptor tells of its parent."""
    _kept.clear()


class VitalSigns(NamedTuple):
    """One sample."""

    memory_bytes: int
    """Resident set."""
    cpu_ppm: int
    """CPU used since the sample before, in millionths of one core."""
    cpu_us_total: int
    """CPU used since the process started."""


class Vitals:
    """Takes samples. Raises OSError or ValueError at construction where /proc is of no use."""

    def __init__(self) -> None:
        self._last_ns = _monotonic_ns()
        self._last_cpu_ns = _process_time_ns()
        self._last = VitalSigns(_read_resident_bytes(), 0, self._last_cpu_ns // 1_000)

    def sample(self) -> VitalSigns:
        """The signs now; memory stays at its last value when it cannot be read any more."""
        now_ns, cpu_ns = _monotonic_ns(), _process_time_ns()
        elapsed_ns = max(1, now_ns - self._last_ns)
        cpu_ppm = max(0, cpu_ns - self._last_cpu_ns) * _PPM // elapsed_ns
        self._last_ns, self._last_cpu_ns = now_ns, cpu_ns
        memory_bytes = resident_bytes() or self._last.memory_bytes
        self._last = VitalSigns(memory_bytes, cpu_ppm, cpu_ns // 1_000)
        return self._last


def resident_bytes() -> int:
    """Resident memory of this process; 0 if it cannot be read just now."""
    try:
        return _read_resident_bytes()
    except (OSError, ValueError, IndexError):  # user code may have used up all descriptors
        return 0


def _read_resident_bytes() -> int:
    if _kept:
        return int(_pread(_kept[0], _STATM_BYTES, 0).split()[1]) * _PAGE_BYTES
    descriptor = _open_statm()
    try:
        return int(_read(descriptor, _STATM_BYTES).split()[1]) * _PAGE_BYTES
    finally:
        _close(descriptor)


def _open_statm() -> int:
    return _open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
