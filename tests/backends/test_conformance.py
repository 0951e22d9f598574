"""Every pair of the execution-apis conformance tests through ``rpc.call``: what the node says is what is read.

A replaying node answers the recorded requests with the recorded bytes, in single requests and in batches.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from blockx.backends import rpc_node
from blockx.errors import ReadError, RevertedError, read_error
from blockx.sdk import provider as seam
from blockx.sdk import rpc
from tests.backends.harness import Io
from tests.backends.node import Node

StartIo = Callable[..., Io]
FOLDER = Path(__file__).parent / "execution_apis"
Pair = tuple[str, dict[str, Any], dict[str, Any]]


def pairs() -> list[Pair]:
    """Name, request, answer."""
    found: list[Pair] = []
    name, asked = "", None
    for path in sorted(FOLDER.glob("*.io")):
        for line in path.read_text().splitlines():
            mark, text = line[:3], line[3:]
            if mark == "// ":
                name = text
            elif mark == ">> ":
                asked = json.loads(text)
            else:
                assert asked is not None
                found.append((name, asked, msgspec.json.decode(text)))
    return found


PAIRS = pairs()


class Direct:
    """A provider over a running service."""

    def __init__(self, io: Io) -> None:
        self.io = io

    def read_req(self, backend: str, operation: str, params: Any, *, cache_key: Any = None) -> Any:
        return answer_of(self.io.one(self.io.request(backend, operation, params)))


def answer_of(reply: Any) -> Any:
    if reply.error is not None:
        error = reply.error
        raise read_error(error.kind, error.message, reason=error.reason, data=error.data)
    return msgspec.json.decode(reply.result)


@pytest.fixture
def replay(io: StartIo, node: Node, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rpc_node, "LAG_PAUSES_S", ())
    recorded = {
        (asked["method"], json.dumps(asked.get("params", []))): answer for _, asked, answer in PAIRS
    }

    def answer(member: dict[str, Any]) -> dict[str, Any]:
        found = recorded[member["method"], json.dumps(member["params"])]
        return {key: value for key, value in found.items() if key not in ("jsonrpc", "id")}

    node.member = answer
    service = io(rpc={"dev": {"urls": [node.url]}})
    token = seam.set_provider(Direct(service))  # type: ignore[arg-type]
    yield service
    seam.reset_provider(token)


def matches(answer: dict[str, Any], read: Callable[[], Any]) -> None:
    if "error" not in answer:
        assert read() == answer["result"]
        return
    error = answer["error"]
    with pytest.raises(ReadError) as caught:
        read()
    if error["code"] == 3:
        assert isinstance(caught.value, RevertedError)
        assert f"0x{caught.value.data.hex()}" == error["data"]
        assert caught.value.reason == "user error"
    else:
        assert error["message"] in str(caught.value)
        assert f"error {error['code']} " in str(caught.value)


@pytest.mark.parametrize(("name", "asked", "answer"), PAIRS, ids=[name for name, _, _ in PAIRS])
def test_a_recorded_answer_is_read_exactly(
    replay: Io, name: str, asked: dict[str, Any], answer: dict[str, Any]
) -> None:
    matches(answer, lambda: rpc.call(asked["method"], asked.get("params", [])))


def test_all_of_them_in_batches_are_read_the_same(replay: Io, node: Node) -> None:
    requests = [replay.rpc(asked["method"], *asked.get("params", [])) for _, asked, _ in PAIRS]
    replies = replay.ask(*requests)
    for (_, _, answer), reply in zip(PAIRS, replies, strict=True):
        matches(answer, lambda reply=reply: answer_of(reply))  # type: ignore[misc]
    assert max(map(len, node.posts)) > 20


def test_there_are_pairs_of_many_methods() -> None:
    assert len({asked["method"] for _, asked, _ in PAIRS}) == 20
    assert len(PAIRS) >= 40
