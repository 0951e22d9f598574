"""What the tests of the backends share."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from blockx.backends.table_access import files_of
from blockx.backends.table_files import TableFiles
from blockx.config import BackendsConfig, BlockdbConfig, Config, LoadedConfig
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


@dataclass
class StorePlace:
    """An empty table store: its settings (``backends.blockdb``) and its whole-table side."""

    kind: str
    blockdb: dict[str, Any]
    files: TableFiles


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StorePlace:
    """Each kind of store in turn: what is tested with it holds for all."""
    kind = request.param
    settings = {"path": str(tmp_path / "data" / "store.sqlite")}
    if kind == "postgres":
        settings = request.getfixturevalue("postgres").settings()
    config = Config(backends=BackendsConfig(blockdb=msgspec.convert(settings, BlockdbConfig)))
    files = files_of(LoadedConfig(config, tmp_path / "config.yaml", tmp_path))
    assert files is not None
    return StorePlace(kind, settings, files)


@pytest.fixture
def store(io: Callable[..., Io], place: StorePlace) -> Io:
    """A running service over that store."""
    return io(blockdb=place.blockdb)
