"""Fixtures of the dispatcher's tests; every core is checked against all invariants at teardown."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from blockx.dispatcher.core import DispatcherCore
from blockx.dispatcher.invariants import assert_all
from tests.builders import dispatcher_core
from tests.dispatcher.shell import Shell


@pytest.fixture
def core() -> Iterator[DispatcherCore]:
    """A bare core without executors, validated at teardown."""
    core = dispatcher_core()
    yield core
    assert_all(core)


@pytest.fixture
def shell() -> Iterator[Callable[..., Shell]]:
    """Makes shells around cores; each core is validated after every event and at teardown."""
    shells: list[Shell] = []

    def make(executors: int = 1, **config: Any) -> Shell:
        shells.append(Shell(executors, **config))
        return shells[-1]

    yield make
    for made in shells:
        assert_all(made.core)
