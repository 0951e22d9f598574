"""``blockx.http`` and its backend: who may be reached, what is repeated, and what comes back. Against a real server."""

import base64
import http.server as http_server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from blockx import http
from blockx.backends import http_backend
from blockx.errors import ReadError
from blockx.sdk import provider as seam
from tests.backends.harness import Io, outcome

StartIo = Callable[..., Io]


class Server:
    """Answers with ``answers`` one after the other, then with an echo."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bytes, str]] = []
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.gate = threading.Event()
        self.gate.set()
        server = self

        class Handler(http_server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                token = self.headers.get("x-token", "")
                server.asked.append((self.command, self.path, body, token))
                server.gate.wait(10)
                echo = (200, {"X-Echo": "yes"}, b'{"n": 123456789012345678901234567890}')
                status, headers, answer = server.answers.pop(0) if server.answers else echo
                if status == 0:
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in {"content-length": str(len(answer)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = serve  # noqa: N815 - the names that http.server calls

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = http_server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_backend, "PAUSE_FIRST_S", 0.01)


class Direct:
    """A provider whose requests go to a service and wait for it."""

    def __init__(self, io: Io) -> None:
        self.io = io

    def read_req(self, backend: str, operation: str, params: Any, *, cache_key: Any = None) -> Any:
        answer = outcome(self.io.one(self.io.request(backend, operation, params)))
        if isinstance(answer, tuple):
            raise ReadError(answer[1], kind=answer[0])
        return answer

    def write_req(self, backend: str, operation: str, params: Any) -> Any:
        return self.read_req(backend, operation, params)


@pytest.fixture
def allowed(io: StartIo, server: Server) -> Iterator[Io]:
    service = io(http={"hosts": [f"127.0.0.1:{server.port}"], "body_bytes_max": 1_000})
    token = seam.set_provider(Direct(service))  # type: ignore[arg-type]
    yield service
    seam.reset_provider(token)


def test_a_get_brings_status_headers_and_content(allowed: Io, server: Server) -> None:
    response = http.get(f"{server.url}/a?b=1", headers={"x-token": "t"})
    assert server.asked == [("GET", "/a?b=1", b"", "t")]
    assert (response.status, response.ok, response.headers["x-echo"]) == (200, True, "yes")
    assert response.json() == {"n": 123456789012345678901234567890}
    assert response.text == '{"n": 123456789012345678901234567890}'


def test_a_post_sends_bytes_text_or_exact_json(allowed: Io, server: Server) -> None:
    http.post(server.url, b"\xff\0")
    http.post(server.url, "ä")
    http.post(server.url, json={"n": 2**256})
    assert [body for _, _, body, _ in server.asked] == [
        b"\xff\0",
        "ä".encode(),
        b'{"n":%d}' % 2**256,
    ]


def test_a_status_that_says_no_is_an_answer(allowed: Io, server: Server) -> None:
    server.answers = [(404, {}, b"not here")]
    response = http.get(server.url)
    assert (response.status, response.ok, response.text) == (404, False, "not here")
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_get_is_repeated_until_it_is_served(allowed: Io, server: Server, status: int) -> None:
    server.answers = [(status, {}, b"")] * 2
    assert http.get(server.url).status == 200
    assert len(server.asked) == 3
    assert allowed.service.statistics("t@1")["http"] == {"http": {"requests": 3, "retries": 2}}


def test_a_post_is_sent_once(allowed: Io, server: Server) -> None:
    server.answers = [(503, {}, b"busy")]
    assert http.post(server.url, b"x").status == 503
    server.answers = [(0, {}, b"")]
    with pytest.raises(ReadError) as caught:
        http.post(server.url, b"x")
    assert caught.value.kind == "unavailable"
    assert len(server.asked) == 2


def test_patience_ends_with_the_last_status_or_with_unavailable(
    io: StartIo, server: Server
) -> None:
    service = io(http={"hosts": ["127.0.0.1"]}, run={"io_wait_max_ms": 15})
    server.answers = [(503, {}, b"")] * 9
    answer = outcome(service.one(service.request("http", "GET", {"url": server.url})))
    assert answer["status"] == 503
    kind, text = outcome(service.one(service.request("http", "GET", {"url": "http://127.0.0.1:1"})))
    assert kind == "unavailable"
    assert text.startswith("GET http://127.0.0.1:1: Cannot connect to host")


@pytest.mark.parametrize(
    ("hosts", "url", "is_allowed"),
    [
        (["example.com"], "https://example.com:99/x", True),
        (["EXAMPLE.com"], "http://Example.COM", True),
        (["example.com:443"], "https://example.com/", False),
        (["example.com:8080"], "https://example.com:8080/", True),
        (["*.example.com"], "https://a.b.example.com", True),
        (["*.example.com"], "https://example.com", False),
        (["*.example.com"], "https://badexample.com", False),
        (["example.com"], "https://example.com.evil.org", False),
        (["example.com"], "https://example.com@evil.org/", False),
        (["example.com"], "https://evil.org/#example.com", False),
        (["example.com"], "ftp://example.com", False),
        (["example.com"], "http://[", False),
    ],
)
def test_only_allowed_hosts_are_reached(hosts: list[str], url: str, is_allowed: bool) -> None:
    backend = object.__new__(http_backend.HttpBackend)
    backend._config = http_backend.HttpBackendConfig(hosts=hosts)
    try:
        backend._check(url)
    except http_backend.ReadFailedError:
        assert not is_allowed
    else:
        assert is_allowed


def test_another_host_is_refused_by_name(allowed: Io, server: Server) -> None:
    with pytest.raises(ReadError, match=r"the host localhost is not in backends\.http\.hosts"):
        http.get(f"http://localhost:{server.port}/")
    assert server.asked == []


def test_a_redirect_is_handed_over_and_not_followed(allowed: Io, server: Server) -> None:
    server.answers = [(302, {"location": "http://elsewhere/"}, b"")]
    response = http.get(server.url)
    assert (response.status, response.headers["location"]) == (302, "http://elsewhere/")


def test_an_answer_over_the_limit_fails(allowed: Io, server: Server) -> None:
    server.answers = [(200, {}, b"x" * 1_001)]
    with pytest.raises(ReadError, match="more than 1000 bytes; too much for one answer"):
        http.get(server.url)


def test_a_calls_budget_ends_the_exchange(allowed: Io, server: Server) -> None:
    server.gate.clear()
    request = allowed.request("http", "GET", {"url": server.url}, budget_ms=30)
    kind, text = outcome(allowed.one(request))
    assert kind == "deadline_exceeded"
    assert "within the 30 ms that were left" in text


def test_a_cancelled_call_is_given_up(allowed: Io, server: Server) -> None:
    server.gate.clear()
    request = allowed.request("http", "GET", {"url": server.url})
    allowed.service.submit([request])
    allowed.service.cancel([request.call_id])
    assert outcome(allowed.replies_to(request)[0])[0] == "cancelled"


def test_without_hosts_the_message_says_how(io: StartIo) -> None:
    service = io()
    kind, text = outcome(service.one(service.request("http", "GET", {"url": "http://a"})))
    assert kind == "io_error"
    assert "add the hosts that may be reached under backends.http.hosts" in text


def test_params_of_another_form_are_malformed(allowed: Io) -> None:
    assert outcome(allowed.one(allowed.request("http", "GET", {"uri": 5})))[0] == "malformed"


def test_the_body_travels_in_base64(allowed: Io, server: Server) -> None:
    answer = outcome(allowed.one(allowed.request("http", "GET", {"url": server.url})))
    assert json.loads(base64.b64decode(answer["body"])) == {"n": 123456789012345678901234567890}
