"""How much memory this machine has for executors, and how much an executor uses.

Pure reads of /proc and of the control group's files; any thread, 10 to 100 us each, nothing is kept open.
The control group counts: in a container the machine's memory is not ours. Both versions of control groups
are read; of nested groups the tightest limit.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")
_MEMINFO: Final = Path("/proc/meminfo")
_GROUPS: Final = Path("/proc/self/cgroup")
_GROUP_ROOT: Final = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES: Final = 1 << 60
"""A limit above this is none: the first version of control groups has a number for "no limit"."""


class MachineMemory:
    """The memory that this process and its children share with others.

    ``meminfo``, ``groups`` and ``group_root`` are files of the kernel, replaced in tests.
    """

    def __init__(
        self, meminfo: Path = _MEMINFO, groups: Path = _GROUPS, group_root: Path = _GROUP_ROOT
    ) -> None:
        self._meminfo = meminfo
        self._limits = [
            (limit_bytes, usage) for limit_bytes, usage in _limited_groups(groups, group_root)
        ]
        total_bytes = _meminfo_bytes(meminfo)["MemTotal"]
        self.total_bytes = min([total_bytes, *(limit for limit, _ in self._limits)])
        """What can be used at most: the machine's, or the tightest control group's."""

    def available_bytes(self) -> int:
        """What can still be taken before the kernel starts to kill."""
        found = [_meminfo_bytes(self._meminfo).get("MemAvailable", self.total_bytes)]
        for limit_bytes, usage in self._limits:
            try:
                used_bytes = int(usage.read_text()) - _file_cache_bytes(usage.parent)
            except (OSError, ValueError):
                continue  # the group was moved or removed
            found.append(limit_bytes - used_bytes)
        return max(0, min(found))

    @staticmethod
    def resident_bytes(pid: int) -> int:
        """Resident memory of a process; 0 if it is gone."""
        try:
            with open(f"/proc/{pid}/statm", "rb") as statm:
                return int(statm.read().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 0


def _meminfo_bytes(path: Path) -> dict[str, int]:
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            found[name] = int(rest.split()[0]) * 1_024
    return found


def _limited_groups(groups: Path, root: Path) -> Iterator[tuple[int, Path]]:
    """Limit and usage file of each control group above this process that has a limit."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        if not controllers:  # version 2: one tree
            folder, names = root / path.lstrip("/"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folder = root / "memory" / path.lstrip("/")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path may be one of the host's: then only the root exists.
        for group in [folder, *folder.parents]:
            limit_bytes = _limit_of(group / names[0])
            if limit_bytes is not None and (group / names[1]).exists():
                yield limit_bytes, group / names[1]
            if group == root:
                break


def _limit_of(file: Path) -> int | None:
    try:
        limit_bytes = int(file.read_text())
    except (OSError, ValueError):  # not there, or the word "max"
        return None
    return limit_bytes if limit_bytes < _UNLIMITED_BYTES else None


def _file_cache_bytes(group: Path) -> int:
    """Cached file pages that count as used but are given back under pressure."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
