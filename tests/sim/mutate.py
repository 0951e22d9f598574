"""Delete each guard in turn: does a test or the simulator notice?

    python -m tests.sim.mutate [--only NAME,...] [--worlds 300] [--list]

Each mutant is a copy of the tree with one piece of text replaced; first the tests of the dispatcher and of
the adapter run on it, then worlds; the first failure is printed. A mutant that survives both is a guard that
nothing defends: the exit code is 1. A mutant whose text is not found is an error, so that the list does not
rot. A whole run takes a few minutes; a slow test runs three of them.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN_SECONDS_MAX = 600


@dataclass(frozen=True, slots=True)
class Mutant:
    """One guard, and the text without it."""

    name: str
    path: str
    old: str
    new: str


def load(path: Path) -> list[Mutant]:
    """The mutants of a list in the form that its head describes."""
    mutants = []
    for entry in path.read_text().split("\n=== ")[1:]:
        head, _, body = entry.partition("\n")
        name, _, file = head.partition(" | ")
        old, _, new = f"{body}\n".partition("\n---\n")
        mutants.append(Mutant(name, file, old, new.rstrip("\n")))
    return mutants


MUTANTS = load(Path(__file__).with_name("mutants.txt"))


def judge(mutant: Mutant, worlds: int) -> str:
    """The first test or world that fails without the guard; empty: it survived."""
    with tempfile.TemporaryDirectory(prefix="blockx-mutant-") as name:
        tree = Path(name)
        for part in ("blockx", "tests"):
            ignored = shutil.ignore_patterns("__pycache__", "data")
            shutil.copytree(ROOT / part, tree / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", tree)
        _apply(mutant, tree)
        chosen = ["tests/dispatcher", "tests/transport/test_adapter.py", "tests/actor"]
        skipped = ["--deselect", "tests/dispatcher/test_random_world.py"]
        command = [
            "-m",
            "pytest",
            "-x",
            "-q",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
        ]
        killer = _first(
            r"(?m)^(?:FAILED|ERROR) (\S+::\S+)", _run(tree, [*command, *skipped, *chosen])
        )
        if killer:
            return killer
        sim = ["-m", "tests.sim.run", "--stop", "--seeds", str(worlds)]
        return _first(r"(seed \d+) failed", _run(tree, sim))


def _apply(mutant: Mutant, tree: Path) -> None:
    path = tree / mutant.path
    text = path.read_text()
    found = text.count(mutant.old)
    if found == 0:
        raise SystemExit(f"{mutant.name}: its text is not in {mutant.path} any more")
    path.write_text(text.replace(mutant.old, mutant.new, 1))


def _run(tree: Path, arguments: Sequence[str]) -> str:
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    environ.pop("SIM_SEED", None)
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tree,
            env=environ,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "FAILED endless::loop\nseed 0 failed"
    return done.stdout


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return "" if match is None else match[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--worlds", type=int, default=300)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    only = {name for name in options.only.split(",") if name}
    chosen = [mutant for mutant in MUTANTS if not only or mutant.name in only]
    if options.list:
        sys.stdout.writelines(f"{mutant.name}: {mutant.path}\n" for mutant in chosen)
        return 0
    survivors = 0
    for mutant in chosen:
        killer = judge(mutant, options.worlds)
        survivors += not killer
        sys.stdout.write(f"| {mutant.name} | {killer or '**survives**'} |\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(chosen)} mutants, {survivors} survive\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
