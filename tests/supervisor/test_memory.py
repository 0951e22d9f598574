"""The memory of the machine and of control groups, from files as kernels write them."""

import os
from pathlib import Path

import pytest

from blockx.supervisor.memory import MachineMemory

MEMINFO = "MemTotal:       8000 kB\nMemFree:         100 kB\nMemAvailable:   3000 kB\n"
KIB = 1024


def machine(folder: Path, groups: str, files: dict[str, str]) -> MachineMemory:
    (folder / "meminfo").write_text(MEMINFO)
    (folder / "groups").write_text(groups)
    for name, text in files.items():
        path = folder / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return MachineMemory(folder / "meminfo", folder / "groups", folder / "fs")


@pytest.mark.parametrize(
    ("groups", "files", "total_kib", "available_kib"),
    [
        ("", {}, 8_000, 3_000),
        ("0::/a/b\n", {"a/b/memory.max": "max\n"}, 8_000, 3_000),
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": f"{4_000 * KIB}\n",
                "a/b/memory.current": f"{3_500 * KIB}\n",
                "a/b/memory.stat": f"anon 5\ninactive_file {100 * KIB}\n",
            },
            4_000,
            600,
        ),
        (  # the tighter limit is the outer one's
            "0::/a/b\n",
            {
                "a/b/memory.max": f"{4_000 * KIB}\n",
                "a/b/memory.current": f"{100 * KIB}\n",
                "a/memory.max": f"{2_000 * KIB}\n",
                "a/memory.current": f"{1_900 * KIB}\n",
            },
            2_000,
            100,
        ),
        (  # version 1; "no limit" is a number
            "5:cpu:/x\n4:memory,hugetlb:/x\n",
            {
                "memory/x/memory.limit_in_bytes": f"{1_000 * KIB}\n",
                "memory/x/memory.usage_in_bytes": f"{1_200 * KIB}\n",
                "memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
                "memory/memory.usage_in_bytes": "5\n",
            },
            1_000,
            0,
        ),
        (  # a container sees its own group as the root, under a path of the host
            "0::/host/path\n",
            {"memory.max": f"{1_000 * KIB}\n", "memory.current": f"{300 * KIB}\n"},
            1_000,
            700,
        ),
    ],
)
def test_the_tightest_limit_counts(
    tmp_path: Path, groups: str, files: dict[str, str], total_kib: int, available_kib: int
) -> None:
    memory = machine(tmp_path, groups, files)
    assert memory.total_bytes == total_kib * KIB
    assert memory.available_bytes() == available_kib * KIB


def test_a_group_that_went_away_is_no_trouble(tmp_path: Path) -> None:
    files = {"a/memory.max": f"{KIB}\n", "a/memory.current": "1\n"}
    memory = machine(tmp_path, "0::/a\n", files)
    (tmp_path / "fs/a/memory.current").unlink()
    assert memory.available_bytes() == 3_000 * KIB


def test_this_machine_and_this_process_have_plausible_sizes() -> None:
    memory = MachineMemory()
    assert 0 < memory.available_bytes() <= memory.total_bytes
    assert 1024 * KIB < memory.resident_bytes(os.getpid()) < memory.total_bytes
    assert memory.resident_bytes(2**22 + 1) == 0
