"""Control groups: limits below main's own group, in folders that stand for the kernel's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from blockx.supervisor.control_groups import ControlGroups, GroupLimits, remove_leftovers

LIMITS = GroupLimits(memory_bytes=1 << 30, cpu_percent=150, threads_max=64)
NONE = GroupLimits(memory_bytes=0, cpu_percent=0, threads_max=0)


class Tree:
    """A folder with the files of main's own groups; a new folder gets what the kernel puts into it."""

    def __init__(self, base: Path, lines: str) -> None:
        self.root, self.groups = base / "fs", base / "self"
        self.groups.write_text(lines)

    def group(self, path: str, **files: str) -> Path:
        folder = self.root / path
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)
        return folder

    def create(self, slots: int = 2, limits: GroupLimits = LIMITS) -> ControlGroups:
        return ControlGroups.create(slots, limits, self.groups, self.root)


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_the_first_version_has_a_group_in_each_tree_below_mains_own(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "4:memory:/a/b\n3:cpu,cpuacct:/\n2:pids:/a\n1:name=systemd:/\n0::/\n")
    memory, cpu = tree.group("memory/a/b"), tree.group("cpu,cpuacct")
    pids = tree.group("pids/a")
    made = tree.create()
    assert made.controllers == ["memory", "cpu", "pids"]
    name = f"blockx-{os.getpid()}-1"
    assert made.join_files(1) == tuple(str(g / name / "cgroup.procs") for g in (memory, cpu, pids))
    assert content(memory / name) == {"memory.limit_in_bytes": str(1 << 30)}
    assert content(cpu / name) == {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}
    assert content(pids / name) == {"pids.max": "64"}


def test_the_second_version_moves_main_aside_before_its_group_may_have_children(
    tmp_path: Path,
) -> None:
    tree = Tree(tmp_path, "0::/service\n")
    own = tree.group(
        "service",
        cgroup__controllers="cpu memory pids",
        cgroup__subtree_control="",
        cgroup__procs=f"{os.getpid()}\n",
    )
    made = tree.create()
    assert made.controllers == ["memory", "cpu", "pids"]
    main = own / f"blockx-{os.getpid()}-main"
    assert (main / "cgroup.procs").read_text() == str(os.getpid())
    assert (own / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    assert content(own / f"blockx-{os.getpid()}-0") == {
        "memory.max": str(1 << 30),
        "cpu.max": "150000 100000",
        "pids.max": "64",
    }


def test_a_group_that_others_are_in_is_left_alone(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/session\n")
    own = tree.group(
        "session",
        cgroup__controllers="memory pids",
        cgroup__subtree_control="",
        cgroup__procs=f"{os.getpid()}\n1\n",
    )
    made = tree.create()
    assert (made.controllers, made.join_files(0)) == ([], ())
    assert [path for path in own.iterdir() if path.is_dir()] == []
    made.close()


def test_without_limits_and_without_trees_there_are_no_groups(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "4:memory:/a\n0::/\n")
    assert tree.create().controllers == []  # nothing is mounted
    tree.group("memory/a")
    assert tree.create(limits=NONE).controllers == []
    assert Tree(tmp_path, "").create().controllers == []


def test_deaths_for_memory_are_told_once_each(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "4:memory:/\n")
    folder = tree.group("memory") / f"blockx-{os.getpid()}-0"
    made = tree.create(slots=1)
    assert not made.was_out_of_memory(0)
    (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert [made.was_out_of_memory(0) for _ in range(2)] == [True, False]
    (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert made.was_out_of_memory(0)


def test_groups_of_a_dead_main_are_removed_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for pid in (dead.pid, os.getpid(), os.getppid()):
        (tmp_path / f"blockx-{pid}-0").mkdir()
    (tmp_path / "blockx-other").mkdir()
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"blockx-{os.getppid()}-0",
        "blockx-other",
    }


def real_memory_tree() -> Path | None:
    """The group that this process is in, if it may make groups there."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _number, names, path = line.split(":", 2)
        if "memory" in names.split(","):
            folder = Path("/sys/fs/cgroup") / names / path.lstrip("/")
            return folder if os.access(folder, os.W_OK) else None
    return None


@pytest.mark.slow
@pytest.mark.skipif(real_memory_tree() is None, reason="control groups are not ours to write here")
def test_the_kernel_ends_what_fills_memory_and_says_so() -> None:
    limits = GroupLimits(memory_bytes=64 << 20, cpu_percent=0, threads_max=16)
    made = ControlGroups.create(1, limits)
    try:
        script = (
            "import sys\nfor file in sys.argv[1:]: open(file, 'w').write('0')\nx = bytes(300 << 20)\n"
            "print(sum(x[::4096]))\nx = b'x' * (300 << 20)"
        )
        command = [sys.executable, "-c", script, *made.join_files(0)]
        assert subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == -9
        assert made.was_out_of_memory(0)
        folders = [Path(file).parent for file in made.join_files(0)]
    finally:
        made.close()
    assert [folder for folder in folders if folder.exists()] == []
