"""What all tests share: a clean environment, short socket paths, reproducible property tests."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from blockx.dispatcher import core
from blockx.executor import runtime
from blockx.ipc import frames
from tests.postgres import postgres

__all__ = ["postgres"]

# `make compiled` runs tests a second time; they must not be those of the source again.
for module in (core, runtime, frames):
    assert str(module.__file__).endswith(".so") == ("BLOCKX_COMPILED" in os.environ)

# The same examples in every run: a test that fails today fails tomorrow, on every machine.
settings.register_profile("blockx", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("blockx")

CONFIG_VARIABLES = (
    "CALL_DEADLINE_MS",
    "CALL_RETRY_MAX_ATTEMPTS",
    "DISPATCH_INSTANCE_FAIRNESS",
    "DISPATCH_INSTANCE_FAIRNESS_QUANTUM",
    "EXECUTOR_COUNT",
    "EXECUTOR_SELECTION_SAMPLE_SIZE",
    "EXECUTOR_SPAWN_MODE",
    "EXECUTOR_TASK_SLOTS",
    "MAX_COLLECTED_OUTPUT_BYTES",
    "SCHEDULER_STALL_TIMEOUT_MS",
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on what the developer has exported."""
    for name in list(os.environ):
        if name in CONFIG_VARIABLES or name.startswith("BLOCKX_"):
            monkeypatch.delenv(name)


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """An empty folder with a path short enough for sockets (the kernel's limit is 107 bytes).

    ``tmp_path`` holds the name of the test and can be too long.
    """
    with tempfile.TemporaryDirectory(prefix="bx-", dir="/tmp") as folder:
        yield Path(folder)
