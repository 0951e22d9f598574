"""Every load script starts: what it imports is there. What it measures is nobody's business here."""

import subprocess
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parents[1] / "perf"
AS_MODULES = ("bench_core", "bench_fairness", "bench_main")
"""Run as ``python -m perf.NAME``."""
NO_SCRIPTS = ("bodies", "celery_app", "contestants", "harness")
"""What the scripts share."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({path.stem for path in PERF.glob("*.py")} - {*NO_SCRIPTS}))
def test_a_load_script_starts_and_says_what_it_can_do(name: str) -> None:
    how = ["-m", f"perf.{name}"] if name in AS_MODULES else [f"perf/{name}.py"]
    command = [sys.executable, *how, "--help"]
    done = subprocess.run(
        command, cwd=PERF.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.startswith("usage: ")) == (0, True), done.stderr
