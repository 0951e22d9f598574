"""The two table stores give the same answer to the byte, whatever is asked of them."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from blockx.backends.scope import IoRequest
from tests.backends.harness import Io
from tests.postgres import PostgresServer

StartIo = Callable[..., Io]
VALUES = [0, 1, 1.0, 10, -1, 2**256 - 1, True, None, "", "a", "a,", 'a"', "é", "Z", "\0", 0.1]
MOMENTS = [0, 5, 5.0, 5.5, -3, 10**15, 1e15, "2024-01-01", "2024-01-01T00:00:00.5+02:00", "soon"]


class Requests:
    """Random requests, many of them wrong, over few tables and keys."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one(self, store: Io, twin: Io) -> tuple[IoRequest, IoRequest]:
        operation, table, params = self._drawn()
        return store.table(operation, table, **params), twin.table(operation, table, **params)

    def _drawn(self) -> tuple[str, str, dict[str, Any]]:
        pick = self._random.choice
        table = pick(["rows", "rows", "pairs", "states", "times", "Rows", "new"])
        operations: dict[str, Callable[[], dict[str, Any]]] = {
            "get_row": lambda: {"key": self._key()},
            "get_rows": lambda: {"keys": [self._key() for _ in range(pick([0, 1, 5]))]},
            "get_state": lambda: {"key": self._key(), "block": self._block()},
            "get_row_at": lambda: {"key": self._key(), "at": pick(MOMENTS)},
            "get_history": lambda: {"key": self._key(), "from": self._block(), **self._limit()},
            "get_history_at": lambda: {"key": self._key(), "to": pick(MOMENTS), **self._limit()},
            "scan": lambda: {"prefix": pick([{}, self._key(), None]), **self._limit()},
            "upsert_rows": lambda: {"rows": self._rows(), **self._declared()},
            "upsert_states": lambda: {
                "rows": [{**self._version(), "block": self._block()} for _ in range(3)]
            },
            "upsert_rows_at": lambda: {
                "rows": [{"key": {"k": 1}, "at": pick(MOMENTS[:7]), "row": {"n": pick(VALUES)}}]
            },
            "delete_rows": lambda: {"keys": [self._key()]},
        }
        operation = pick(list(operations))
        return operation, table, operations[operation]()

    def _key(self) -> dict[str, Any]:
        names = self._random.choice([["k"], ["k"], ["k", "l"], ["l"]])
        return {name: self._random.choice(VALUES) for name in names}

    def _rows(self) -> list[dict[str, Any]]:
        return [{**self._key(), "v": self._random.choice(VALUES)} for _ in range(2)]

    def _declared(self) -> dict[str, Any]:
        return self._random.choice([{"key": ["k"]}, {"key": ["k", "l"]}, {}])

    def _version(self) -> dict[str, Any]:
        return {"key": {"k": self._random.choice(VALUES)}, "state": {"v": self._random.random()}}

    def _block(self) -> Any:
        return self._random.choice([0, 4, 5, 10, 2**63 - 1, 2**63, -1, None])

    def _limit(self) -> dict[str, Any]:
        return self._random.choice([{}, {"limit": 1}, {"limit": 3}, {"limit": 0}])


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.parametrize("seed", range(6))
def test_both_stores_answer_alike(io: StartIo, postgres: PostgresServer, seed: int) -> None:
    stores = io(blockdb={"path": "store.sqlite"}), io(blockdb=postgres.settings())
    requests = Requests(seed)
    answered = 0
    for _ in range(400):
        # One at a time: what is asked at the same time may be done in any order.
        pair = requests.one(*stores)
        replies = [store.one(request) for store, request in zip(stores, pair, strict=True)]
        answers = [(r.result, r.error and (r.error.kind, r.error.message)) for r in replies]
        assert answers[0] == answers[1], pair[0]
        answered += replies[0].error is None
    assert answered > 50, "most of it was refused: that tests little"
