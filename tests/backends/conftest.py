"""What the tests of the backends share."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.backends.harness import Io
from tests.backends.node import Node
from tests.chain.fixtures import chain, own_chain

__all__ = ["chain", "own_chain"]


@pytest.fixture
def io(tmp_path: Path) -> Iterator[Callable[..., Io]]:
    """Start io services that end with the test: ``io(rpc={"dev": {...}}, run={...})``."""
    started: list[Io] = []

    def start(**sections: object) -> Io:
        service = Io(tmp_path, sections)
        started.append(service)
        return service

    yield start
    for service in started:
        service.stop()


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test twice: as without the extra ``fast``, and with it."""
    kind: str = request.param
    if kind == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)  # an import of it fails
    return kind


@pytest.fixture
def node() -> Iterator[Node]:
    """A scripted node."""
    running = Node()
    yield running
    running.stop()
