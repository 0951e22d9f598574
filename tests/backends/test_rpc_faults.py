"""Nodes that refuse, cut, mislead or are not there. Against a scripted node."""

import gzip
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from blockx.backends import rpc_node
from blockx.errors import UsageError
from tests.backends.harness import Io, outcome
from tests.backends.node import Node, Raw, error

StartIo = Callable[..., Io]
PAGE = b"<!doctype html><title>Just a moment</title>"


def dev(*urls: str, **settings: Any) -> dict[str, Any]:
    return {"dev": {"urls": list(urls), **settings}}


@pytest.fixture
def nobody() -> str:
    """An url where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def second() -> Iterator[Node]:
    node = Node()
    yield node
    node.stop()


@pytest.mark.parametrize(
    "fault",
    [
        Raw(429, PAGE),
        Raw(500, b"upstream unavailable"),
        Raw(503, b""),
        Raw(200, PAGE, content_type="text/html"),
        Raw(200, b'[{"jsonrpc":"2.0","id":1,"resu'),
        Raw(200, b'[{"jsonrpc":"2.0","id":1', content_length="500"),
        Raw(200, b""),
        Raw(200, b"not gzip at all", content_encoding="gzip"),
        Raw(0),
    ],
    ids=["429", "500", "503", "page", "half", "cut", "empty", "bad gzip", "reset"],
)
def test_a_passing_fault_is_waited_out_inside_the_read(io: StartIo, node: Node, fault: Raw) -> None:
    node.first = [fault]
    service = io(rpc=dev(node.url))
    replies = service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(3)])
    assert [outcome(reply) for reply in replies] == [["0x0"], ["0x1"], ["0x2"]]
    assert [len(post) for post in node.posts] == [3, 3]
    assert service.statistics()["retries"] == 3
    assert all(reply.queue_us >= 100_000 for reply in replies), "the pause is no IO time"


@pytest.mark.parametrize(
    "refusal", [error(-32005, "rate limit exceeded"), error(-32000, "Too Many Requests")]
)
def test_a_member_that_is_throttled_is_asked_again_after_a_pause(
    io: StartIo, node: Node, refusal: dict[str, Any]
) -> None:
    left = [refusal]
    node.member = lambda m: left.pop() if left else None
    service = io(rpc=dev(node.url))
    replies = service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(3)])
    assert [outcome(reply) for reply in replies] == [["0x0"], ["0x1"], ["0x2"]]
    assert [len(post) for post in node.posts] == [3, 1]


@pytest.mark.slow
def test_retry_after_is_honoured(io: StartIo, node: Node) -> None:
    node.first = [Raw(429, b"", retry_after="1")]
    service = io(rpc=dev(node.url))
    reply = service.one(service.rpc("eth_blockNumber"))
    assert outcome(reply) == "0xc8"
    assert reply.queue_us >= 1_000_000


def test_a_retry_after_beyond_all_patience_fails_the_read(io: StartIo, node: Node) -> None:
    node.first = [Raw(429, b"slow down", retry_after="3600")]
    service = io(rpc=dev(node.url))
    requests = [service.rpc("eth_blockNumber"), service.rpc("eth_gasPrice")]
    first, later = service.one(requests[0]), service.one(requests[1])
    assert first.error is not None
    assert later.error is not None
    assert [first.error.kind, later.error.kind] == ["throttled", "throttled"]
    assert "HTTP 429: slow down" in later.error.message
    assert len(node.posts) == 1


def test_an_unreachable_node_is_given_up_with_url_error_and_time(io: StartIo, nobody: str) -> None:
    service = io(rpc=dev(nobody), run={"io_wait_max_ms": 150})
    kind, message = outcome(service.one(service.rpc("eth_blockNumber")))
    assert kind == "unavailable"
    assert message.startswith(
        f"eth_blockNumber: node {nobody} (chain dev): cannot connect: Connection refused; given up after 0."
    )
    assert message.endswith(" tries")


@pytest.mark.slow
def test_once_a_chain_was_silent_for_the_whole_wait_further_reads_fail_at_their_first_try(
    io: StartIo, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_node, "PAUSE_MAX_S", 0.1)
    service = io(rpc=dev(nobody), run={"io_wait_max_ms": 300})
    service.one(service.rpc("eth_blockNumber"))
    reply = service.one(service.rpc("eth_blockNumber"))
    assert reply.error is not None
    assert reply.error.message.endswith(" s and 1 tries")


def test_a_node_that_is_not_there_is_not_taken_for_one_without_final_blocks(
    io: StartIo, nobody: str
) -> None:
    service = io(rpc=dev(nobody), run={"io_wait_max_ms": 0})
    kind, message = outcome(service.one(service.rpc("eth_getBalance", "0xa", block=5)))
    assert kind == "unavailable"
    assert message.startswith(f"height of the finalised block: node {nobody}")


def test_a_node_that_does_not_answer_is_unavailable_after_its_time(io: StartIo, node: Node) -> None:
    node.gate.clear()
    service = io(rpc=dev(node.url, timeout_ms=40), run={"io_wait_max_ms": 0})
    kind, message = outcome(service.one(service.rpc("eth_blockNumber")))
    assert kind == "unavailable"
    assert "no answer within 40 ms" in message


def test_another_url_answers_when_the_first_is_down(io: StartIo, nobody: str, node: Node) -> None:
    service = io(rpc=dev(nobody, node.url))
    replies = service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(3)])
    assert [outcome(reply) for reply in replies] == [["0x0"], ["0x1"], ["0x2"]]
    assert service.statistics()["retries"] == 3
    assert outcome(service.one(service.rpc("eth_blockNumber"))) == "0xc8"


def test_the_first_url_is_preferred(io: StartIo, node: Node, second: Node) -> None:
    service = io(rpc=dev(node.url, second.url))
    service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(3)])
    assert (len(node.posts), len(second.posts)) == (1, 0)


def test_an_url_that_refuses_is_not_the_end_while_another_serves(
    io: StartIo, node: Node, second: Node
) -> None:
    node.first = [Raw(403, b"wrong token")]
    service = io(rpc=dev(node.url, second.url))
    assert outcome(service.one(service.rpc("eth_blockNumber"))) == "0xc8"
    assert outcome(service.one(service.rpc("eth_blockNumber"))) == "0xc8"
    assert (len(node.posts), len(second.posts)) == (1, 2), "it rests after its refusal"


def test_a_block_that_one_url_does_not_have_yet_comes_from_another(
    io: StartIo, node: Node, second: Node
) -> None:
    node.member = lambda m: error(-32000, "header not found") if "Balance" in m["method"] else None
    service = io(rpc=dev(node.url, second.url))
    reply = service.one(service.rpc("eth_getBalance", "0xa", block=150))
    assert outcome(reply) == hex(1150)
    assert second.methods() == [["eth_getBalance"]]


def test_a_refusal_of_the_only_url_is_final_and_says_what_the_node_said(
    io: StartIo, node: Node
) -> None:
    node.first = [Raw(403, b"<h1>wrong token</h1>")]
    service = io(rpc=dev(node.url))
    kind, message = outcome(service.one(service.rpc("eth_blockNumber")))
    assert kind == "io_error"
    assert "HTTP 403: wrong token" in message
    assert len(node.posts) == 1


def test_secrets_of_an_url_are_not_shown(io: StartIo, nobody: str) -> None:
    port = nobody.rpartition(":")[2]
    url = f"http://me:geheim@127.0.0.1:{port}/v3/0123456789abcdef0123?key=secret"
    service = io(rpc=dev(url), run={"io_wait_max_ms": 0})
    _, message = outcome(service.one(service.rpc("eth_blockNumber")))
    assert f"node http://127.0.0.1:{port}/*** (chain dev)" in message
    assert not any(secret in message for secret in ("geheim", "secret", "0123456789"))


# ---- batches that are refused --------------------------------------------------------------------


def limited(limit: int, refusal: Callable[[int], Any]) -> Callable[[list[Any]], Any]:
    return lambda answers: refusal(len(answers)) if len(answers) > limit else answers


def test_a_stated_batch_limit_is_learnt_at_once(io: StartIo, node: Node) -> None:
    node.batch = limited(
        10, lambda n: {"id": None, **error(-32000, f"batch limit 10 exceeded: {n} requests given")}
    )
    service = io(rpc=dev(node.url, posts_max=1))
    replies = service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(35)])
    assert [outcome(reply) for reply in replies] == [[hex(n)] for n in range(35)]
    assert [len(post) for post in node.posts] == [35, 10, 10, 10, 5]


@pytest.mark.parametrize(
    "refusal",
    [
        lambda n: [{"id": 1, **error(-32600, "batch too large")}],
        lambda n: {"id": 7, **error(-32603, "handle request error")},
        lambda n: {"id": None, "message": "no"},
        lambda n: {"some": "thing"},
    ],
    ids=["geth", "object", "no error in it", "no answer"],
)
def test_a_refused_batch_is_asked_again_in_halves(io: StartIo, node: Node, refusal: Any) -> None:
    node.batch = limited(2, refusal)
    service = io(rpc=dev(node.url, posts_max=1))
    replies = service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(8)])
    assert [outcome(reply) for reply in replies] == [[hex(n)] for n in range(8)]
    assert [len(post) for post in node.posts] == [8, 4, 2, 2, 2, 2]


def test_a_node_that_takes_no_batch_at_all_is_asked_singly(io: StartIo, node: Node) -> None:
    node.batch = limited(1, lambda n: {"id": 1, **error(-32603, "handle request error")})
    service = io(rpc=dev(node.url, posts_max=1))
    replies = service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(4)])
    assert [outcome(reply) for reply in replies] == [[hex(n)] for n in range(4)]
    assert [len(post) for post in node.posts] == [4, 2, 1, 1, 1, 1]


def test_a_throttled_batch_is_repeated_whole_after_a_pause(io: StartIo, node: Node) -> None:
    refusals = [{"id": None, **error(-32005, "rate limit exceeded")}]
    node.batch = lambda answers: refusals.pop() if refusals else answers
    service = io(rpc=dev(node.url))
    service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(4)])
    assert [len(post) for post in node.posts] == [4, 4]


def test_a_member_that_the_answer_leaves_out_is_asked_again_alone(io: StartIo, node: Node) -> None:
    node.batch = lambda answers: answers[:1] + answers[2:]
    service = io(rpc=dev(node.url))
    replies = service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(4)])
    assert [outcome(reply) for reply in replies] == [[hex(n)] for n in range(4)]
    assert [len(post) for post in node.posts] == [4, 1]


def test_an_answer_too_big_in_a_batch_is_asked_again_alone_and_then_fails_alone(
    io: StartIo, node: Node
) -> None:
    node.member = lambda m: (
        error(-32008, "Response is too big", data="Exceeded max limit of 9")
        if m["params"] == ["0x1"]
        else None
    )
    service = io(rpc=dev(node.url))
    replies = service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(3)])
    kind, message = outcome(replies[1])
    assert (kind, outcome(replies[0]), outcome(replies[2])) == ("io_error", ["0x0"], ["0x2"])
    assert "Response is too big (Exceeded max limit of 9)" in message
    assert [len(post) for post in node.posts] == [3, 1]


@pytest.mark.parametrize("body", [b"{}", b"[]", b"42", b"[1,2]", b'{"id":1}', b'"hello"'])
def test_json_of_another_shape_is_malformed_and_asked_for_twice_at_most(
    io: StartIo, node: Node, body: bytes
) -> None:
    node.first = [Raw(200, body)] * 5
    service = io(rpc=dev(node.url))
    kind, _ = outcome(service.one(service.rpc("eth_blockNumber")))
    assert kind == "malformed"
    assert len(node.posts) == 2


# ---- texts, encodings ----------------------------------------------------------------------------


def test_an_error_text_that_is_no_utf8_still_tells_what_it_can(io: StartIo, node: Node) -> None:
    node.member = lambda m: (
        error(-32000, "broken \udcff\udcfe text") if m["params"] == ["0x1"] else None
    )
    service = io(rpc=dev(node.url))
    replies = service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(2)])
    kind, message = outcome(replies[1])
    assert kind == "io_error"
    assert message.startswith("web3_sha3: broken �� text")
    assert outcome(replies[0]) == ["0x0"]


def test_a_result_that_is_no_utf8_is_malformed(io: StartIo, node: Node) -> None:
    node.member = lambda m: {"result": "a\udcff"}
    service = io(rpc=dev(node.url))
    assert outcome(service.one(service.rpc("eth_blockNumber")))[0] == "malformed"


def test_a_compressed_answer_is_unpacked(io: StartIo, node: Node) -> None:
    body = gzip.compress(b'{"jsonrpc":"2.0","id":1,"result":"0x7"}')
    node.first = [Raw(200, body, content_encoding="gzip")]
    service = io(rpc=dev(node.url))
    assert outcome(service.one(service.rpc("eth_blockNumber"))) == "0x7"


def test_a_redirect_is_not_followed(io: StartIo, node: Node, second: Node) -> None:
    node.first = [Raw(301, b"", location=f"{second.url}/x")]
    service = io(rpc=dev(node.url))
    kind, message = outcome(service.one(service.rpc("eth_blockNumber")))
    assert kind == "io_error"
    assert f"HTTP 301: it redirects to {second.url}/***; use that url" in message
    assert second.posts == []


@pytest.mark.parametrize("url", ["127.0.0.1:8545", "ws://127.0.0.1", "http://", "http://x:99999"])
def test_an_url_that_is_none_stops_the_start(io: StartIo, url: str) -> None:
    with pytest.raises(UsageError, match=r"backends\.rpc\.dev\.urls: .* is no http\(s\) url"):
        io(rpc=dev(url))
