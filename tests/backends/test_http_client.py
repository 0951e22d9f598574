"""The small HTTP client: every form of answer, kept connections, and each way to go wrong. Against raw sockets."""

import asyncio
import gzip
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from blockx.backends import http_client
from blockx.backends.http_client import HttpAnswer, HttpClient, HttpTrouble
from blockx.backends.service import new_loop

pytestmark = pytest.mark.usefixtures("loop_kind")

WAIT_S = 10.0
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
Answers = list[bytes | None]


class Peer:
    """A server that answers the n-th request with the n-th bytes; None or their end: it closes."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.open: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(size))
                answer = self.answers.pop(0) if self.answers else None
                if answer is None:
                    break
                writer.write(answer)
                if b"\r\nend" in answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()


def run(
    answers: Answers, use: Callable[[HttpClient, Peer], Awaitable[Any]], **settings: Any
) -> tuple[Any, Peer]:
    """``use`` with a client of a peer; what it returned."""

    async def main() -> tuple[Any, Peer]:
        peer = Peer(answers)
        server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        path = settings.pop("path", "/")
        user = settings.pop("user", "")
        limits = {"timeout_s": WAIT_S, "body_bytes_max": 1_000, **settings}
        client = HttpClient(f"http://{user}127.0.0.1:{port}{path}", **limits)
        try:
            return await use(client, peer), peer
        finally:
            client.close()
            server.close()
            for writer in peer.open:
                writer.close()
            await asyncio.sleep(0)  # connections hear that they are closed

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(asyncio.wait_for(main(), WAIT_S))


async def post(client: HttpClient, body: bytes = b"{}", **more: Any) -> HttpAnswer | HttpTrouble:
    outcome: asyncio.Future[HttpAnswer | HttpTrouble] = asyncio.get_running_loop().create_future()
    client.post(body, outcome.set_result, **more)
    return await outcome


def one(answer: bytes | None, **settings: Any) -> HttpAnswer | HttpTrouble:
    """The outcome of one request that is answered so."""
    outcome, _ = run([answer], lambda client, _: post(client), **settings)
    return outcome


def head(*lines: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *lines]).encode() + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK, b"ok"),
        (head("Content-Length: 0"), b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (head("transfer-encoding: chunked") + b"2\r\nok\r\n1;x=y\r\n!\r\n0\r\n\r\n", b"ok!"),
        (head("transfer-encoding: chunked") + b"2\r\nok\r\n0\r\ntrailer: x\r\n\r\n", b"ok"),
        (head("connection: close") + b"until the\r\nend", b"until the\r\nend"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
        (head("content-length: 29", "content-encoding: gzip") + gzip.compress(b"unpacked!"), b"unpacked!"),
        (head("content-length: 17", "content-encoding: deflate") + zlib.compress(b"unpacked!"), b"unpacked!"),
        (head("content-length: 11", "content-encoding: deflate") + zlib.compress(b"unpacked!")[2:-4], b"unpacked!"),
    ],
    ids=["length", "empty", "204", "chunks", "trailer", "until close", "interim", "gzip", "deflate", "bare deflate"],
)  # fmt: skip
def test_every_form_of_an_answer_is_read(answer: bytes, body: bytes) -> None:
    outcome = one(answer)
    assert isinstance(outcome, HttpAnswer)
    assert outcome.body == body


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"SSH-2.0-x\r\n\r\n", "the connection broke: no HTTP: it begins 'SSH-2.0-x'"),
        (b"HTTP/1.1 abc\r\n\r\n", "the connection broke: no HTTP: it begins 'HTTP/1.1 abc'"),
        (head("content-length: x"), "the connection broke: no HTTP: content-length 'x'"),
        (
            head("transfer-encoding: chunked") + b"zz\r\n",
            "the connection broke: no HTTP: invalid literal for int() with base 16: b'zz'",
        ),
        (head("transfer-encoding: chunked") + b"-1\r\n", "the connection broke: no HTTP: a chunk of negative size"),
        (b"x" * 70_000, "the connection broke: no HTTP: the headers do not end"),
        (head("content-length: 9") + b"\r\nend", "the answer was cut short or badly compressed"),
        (head("content-length: 4", "content-encoding: gzip") + b"nope", "the answer was cut short or badly compressed"),
        (head("content-encoding: gzip") + b"\r\nend", "the answer was cut short or badly compressed"),
        (b"HTTP/1.1 200\r\nend", "the answer was cut short or badly compressed"),
        (None, "the connection broke: Server disconnected"),
    ],
    ids=["ssh", "status", "length", "chunk", "negative", "headers", "cut", "gzip", "gzip to end", "cut head", "none"],
)  # fmt: skip
def test_what_is_no_whole_answer_is_told(answer: bytes | None, text: str) -> None:
    assert one(answer) == HttpTrouble(text)


@pytest.mark.parametrize(
    "answer",
    [
        head("content-length: 1001"),
        head("transfer-encoding: chunked") + b"3e9\r\n",
        head("connection: close") + b"x" * 1_001,
        head("content-length: 29", "content-encoding: gzip") + gzip.compress(b"0" * 9_999),
    ],
    ids=["length", "chunks", "until close", "unpacked"],
)
def test_a_body_over_the_limit_is_not_kept(answer: bytes) -> None:
    size = len(answer.partition(b"\r\n\r\n")[2])
    answer = answer.replace(b"content-length: 29", b"content-length: %d" % size)
    assert one(answer) == HttpTrouble("an answer of more than 1000 bytes", too_big=True)


def test_a_request_has_the_urls_path_query_and_credentials() -> None:
    _, peer = run(
        [OK], lambda client, _: post(client, b"[1]"), user="me:p%40ss@", path="/a b/%C3%A4?k=ä%25"
    )
    lines = peer.heads[0].decode().split("\r\n")
    assert lines[0] == "POST /a%20b/%C3%A4?k=%C3%A4%25 HTTP/1.1"
    assert "authorization: Basic bWU6cEBzcw==" in lines
    assert "content-length: 3" in lines
    assert peer.bodies == [b"[1]"]


def test_a_connection_is_kept_for_the_next_request() -> None:
    async def use(client: HttpClient, _: Peer) -> None:
        for _n in range(3):
            await post(client)

    _, peer = run([OK] * 3, use)
    assert peer.connections == 1


@pytest.mark.parametrize(
    "first",
    [
        head("content-length: 2", "connection: close") + b"ok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        OK + b"more than was said",
    ],
    ids=["told to close", "old", "surplus"],
)
def test_a_connection_that_may_not_be_kept_is_not(first: bytes) -> None:
    async def use(client: HttpClient, _: Peer) -> list[Any]:
        return [await post(client), await post(client)]

    outcomes, peer = run([first, OK], use)
    assert [outcome.body for outcome in outcomes] == [b"ok", b"ok"]
    assert peer.connections == 2


def test_a_kept_connection_that_was_closing_costs_nothing_but_a_new_one() -> None:
    async def use(client: HttpClient, _: Peer) -> list[Any]:
        return [await post(client), await post(client, b"again")]

    outcomes, peer = run([OK, None, OK], use)
    assert [outcome.body for outcome in outcomes] == [b"ok", b"ok"]
    assert peer.bodies == [b"{}", b"again", b"again"]


def test_what_may_not_be_repeated_is_written_once_on_a_connection_of_its_own() -> None:
    async def use(client: HttpClient, _: Peer) -> Any:
        await post(client)
        return await post(client, b"a write", may_repeat=False)

    outcome, peer = run([OK, None, OK], use)
    assert outcome == HttpTrouble("the connection broke: Server disconnected")
    assert (peer.bodies, peer.connections) == ([b"{}", b"a write"], 2)


def test_a_connection_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "IDLE_S_MAX", -1.0)

    async def use(client: HttpClient, _: Peer) -> None:
        await post(client)
        await post(client)

    _, peer = run([OK, OK], use)
    assert peer.connections == 2


def test_a_request_ends_after_its_time_and_its_connection_with_it() -> None:
    async def use(client: HttpClient, _: Peer) -> list[Any]:
        return [await post(client), await post(client)]

    outcomes, peer = run([b"HTTP/1.1 200", OK], use, timeout_s=0.05)
    assert outcomes[0] == HttpTrouble("no answer within 50 ms")
    assert outcomes[1].body == b"ok"
    assert peer.connections == 2


def test_a_port_where_nobody_listens_is_told_as_never_sent() -> None:
    async def use(client: HttpClient, _: Peer) -> Any:
        nobody = HttpClient("http://127.0.0.1:1/", timeout_s=WAIT_S, body_bytes_max=10)
        try:
            return await post(nobody)
        finally:
            nobody.close()

    outcome, _ = run([], use)
    assert outcome == HttpTrouble("cannot connect: Connection refused", never_sent=True)


def test_after_the_end_nobody_is_told_anything() -> None:
    async def use(client: HttpClient, peer: Peer) -> list[Any]:
        told: list[Any] = []
        client.post(b"{}", told.append)
        client.close()
        await asyncio.sleep(0)
        return told

    told, _ = run([OK], use)
    assert told == []
