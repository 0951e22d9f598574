"""Control groups of executors: a group a slot below main's own, with limits of memory, CPU and threads.

Main thread. Made once at the start, removed at the end; executors join by themselves before they confine
themselves. Where a controller cannot be had (not mounted, not ours to write), its limit is left to others
and its name is missing in ``controllers``: the caller says so.

Version 1 has a tree for each controller. Version 2 has one tree, and its rule that a group with processes
has no children with limits: main moves into a group of its own first, if it is alone in its group, as in a
service with ``Delegate=yes``.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

GROUPS: Final = Path("/proc/self/cgroup")
GROUP_ROOT: Final = Path("/sys/fs/cgroup")
PERIOD_US: Final = 100_000
"""CPU time is given out anew each 100 ms."""
_PREFIX: Final = "blockx-"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """Limits of one executor; 0: none."""

    memory_bytes: int
    cpu_percent: int
    """100: one core."""
    threads_max: int

    def files(self, version: int) -> Mapping[str, Sequence[tuple[str, str]]]:
        """Controller -> files of a group and what to write into them, in order."""
        found: dict[str, list[tuple[str, str]]] = {}
        memory, quota_us = str(self.memory_bytes), str(self.cpu_percent * PERIOD_US // 100)
        if version == 1:
            if self.memory_bytes:
                found["memory"] = [
                    ("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory),
                ]  # fmt: skip
            if self.cpu_percent:
                found["cpu"] = [
                    ("cpu.cfs_period_us", str(PERIOD_US)), ("cpu.cfs_quota_us", quota_us),
                ]  # fmt: skip
        else:
            if self.memory_bytes:
                found["memory"] = [("memory.max", memory), ("memory.swap.max", "0")]
            if self.cpu_percent:
                found["cpu"] = [("cpu.max", f"{quota_us} {PERIOD_US}")]
        if self.threads_max:
            found["pids"] = [("pids.max", str(self.threads_max))]
        return found


_OPTIONAL: Final = ("memory.memsw.limit_in_bytes", "memory.swap.max")
"""There only where the kernel counts swap."""


@dataclass(slots=True)
class ControlGroups:
    """The groups of all slots."""

    controllers: list[str]
    """What is limited by them; empty: nothing could be had."""
    _folders: list[list[Path]]
    """Of each slot."""
    _own: list[Path]
    """Main's own groups, in all trees: a container runtime makes groups in each of them."""
    _main_group: Path | None = None
    """Version 2: where main has moved to."""
    _kills: dict[int, int] = field(default_factory=dict)

    @classmethod
    def create(
        cls, slots: int, limits: GroupLimits, groups: Path = GROUPS, root: Path = GROUP_ROOT
    ) -> "ControlGroups":
        """Make what can be made. ``groups``, ``root``: files of the kernel, replaced in tests."""
        own = list(_own_groups(groups, root))
        made = cls([], [[] for _ in range(slots)], [folder for _, _, folder in own])
        for folder in made._own:
            remove_leftovers(folder)
        for version, controllers, folder in own:
            wanted = {c: f for c, f in limits.files(version).items() if c in controllers}
            if not wanted:
                continue
            try:
                if version == 2:
                    made._enable(folder, list(wanted))
                for slot in range(slots):
                    group = folder / f"{_PREFIX}{os.getpid()}-{slot}"
                    group.mkdir()
                    made._folders[slot].append(group)
                    for name, value in (pair for pairs in wanted.values() for pair in pairs):
                        if name not in _OPTIONAL or (group / name).exists():
                            (group / name).write_text(value)
            except OSError:
                made._remove(folder)
                continue
            made.controllers += wanted
        return made

    def join_files(self, slot: int) -> tuple[str, ...]:
        """What a process of the slot writes its number into."""
        return tuple(str(folder / "cgroup.procs") for folder in self._folders[slot])

    def was_out_of_memory(self, slot: int) -> bool:
        """Whether the kernel has killed a process of the slot for its limit since the last question."""
        kills = sum(_oom_kills(folder) for folder in self._folders[slot])
        before, self._kills[slot] = self._kills.get(slot, 0), kills
        return kills > before

    def close(self) -> None:
        """Remove the groups. Call it when the executors are dead."""
        for folder in self._own:
            self._remove(folder)
            for left in folder.glob(f"{_PREFIX}{os.getpid()}-[0-9]*"):
                _remove_tree(left)
        if self._main_group is not None:
            parent = self._main_group.parent
            with contextlib.suppress(OSError):
                enabled = (parent / "cgroup.subtree_control").read_text().split()
                _write(parent / "cgroup.subtree_control", " ".join(f"-{c}" for c in enabled))
                _write(parent / "cgroup.procs", str(os.getpid()))
                self._main_group.rmdir()

    def _remove(self, parent: Path) -> None:
        for folders in self._folders:
            for folder in [folder for folder in folders if folder.parent == parent]:
                folders.remove(folder)
                _remove_tree(folder)

    def _enable(self, folder: Path, controllers: list[str]) -> None:
        """Let children of main's own group have limits. Raises OSError."""
        control = folder / "cgroup.subtree_control"
        missing = [c for c in controllers if c not in control.read_text().split()]
        if not missing:
            return
        others = {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
        if others - {os.getpid()}:
            raise OSError("other processes are in the group")
        main_group = folder / f"{_PREFIX}{os.getpid()}-main"
        main_group.mkdir()
        self._main_group = main_group
        _write(main_group / "cgroup.procs", str(os.getpid()))
        _write(control, " ".join(f"+{controller}" for controller in missing))


def remove_leftovers(parent: Path) -> None:
    """Remove groups of mains that are dead."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        is_dead = pid == str(os.getpid()) or not os.path.exists(f"/proc/{pid}")
        if pid.isdecimal() and is_dead:  # our own number: of a dead main that had it before us
            _remove_tree(folder)


def _remove_tree(folder: Path) -> None:
    """Remove a group and those in it; one with processes stays (they are dying just now)."""
    with contextlib.suppress(OSError):
        for inner in folder.iterdir():
            if inner.is_dir():
                _remove_tree(inner)
        folder.rmdir()


def _own_groups(groups: Path, root: Path) -> Iterator[tuple[int, list[str], Path]]:
    """Version, controllers and folder of each group that this process is in."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _number, names, path = line.split(":", 2)
        if names:
            folder = root / names / path.lstrip("/")
            if folder.is_dir():
                yield 1, names.split(","), folder
            continue
        for base in (root, root / "unified"):
            folder = base / path.lstrip("/")
            with contextlib.suppress(OSError):
                yield 2, (folder / "cgroup.controllers").read_text().split(), folder


def _oom_kills(folder: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in (folder / name).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return 0


def _write(file: Path, text: str) -> None:
    file.write_text(text)
