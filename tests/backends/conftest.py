"""What the tests of the backends share."""

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


@pytest.fixture
def node() -> Iterator[Node]:
    """A scripted node."""
    running = Node()
    yield running
    running.stop()
