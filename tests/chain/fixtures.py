"""Fixtures over a real node: import the ones you need into your folder's ``conftest.py``.

``chain``: one anvil with 200 blocks of known history for the whole run; tests read it and change nothing.
``own_chain``: a fresh anvil for one test that mines, reorganises or writes.
Without anvil (``npm ci`` was not run) the tests that ask for them are skipped, with that reason.
"""

from collections.abc import Iterator

import pytest

from tests.chain.devchain import DevChain, find_anvil


def _started() -> DevChain:
    try:
        find_anvil()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return DevChain()


@pytest.fixture(scope="session")
def chain() -> Iterator[DevChain]:
    with _started() as node:
        node.facts = node.populate(blocks=200)
        yield node


@pytest.fixture
def own_chain() -> Iterator[DevChain]:
    with _started() as node:
        yield node
