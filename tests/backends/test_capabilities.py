"""Capabilities: a real gRPC server behind stubs of the generated form, and backends from entry points."""

import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import Int64Value, StringValue

import blockx
from blockx.backends import grpc_backend, grpc_peer
from blockx.errors import GrpcError, ReadError, UsageError, read_error
from blockx.sdk import provider as seam
from tests.backends.harness import Io, outcome
from tests.builders import CODE

StartIo = Callable[..., Io]


class PricesStub:
    """In the form that gRPC generates."""

    def __init__(self, channel: Any) -> None:
        self.Square = channel.unary_unary(
            "/test.Prices/Square",
            request_serializer=Int64Value.SerializeToString,
            response_deserializer=StringValue.FromString,
            _registered_method=True,
        )
        self.Watch = channel.unary_stream(
            "/test.Prices/Watch",
            request_serializer=Int64Value.SerializeToString,
            response_deserializer=StringValue.FromString,
            _registered_method=True,
        )


class Server:
    """A gRPC server; ``aborts``: statuses for the first requests, used up one by one."""

    def __init__(self) -> None:
        self.aborts: list[grpc.StatusCode] = []
        self.answer_bytes = 0
        self.metadata: list[Any] = []
        self.arrived = threading.Semaphore(0)
        self.gone = threading.Event()
        """Set when a client gives a request up."""
        self.gate = threading.Event()
        self.gate.set()
        handler = grpc.unary_unary_rpc_method_handler(
            self.square, Int64Value.FromString, StringValue.SerializeToString
        )
        self.server = grpc.server(ThreadPoolExecutor(8))
        self.server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("test.Prices", {"Square": handler})]
        )
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def square(self, request: Int64Value, context: Any) -> StringValue:
        pairs = [pair for pair in context.invocation_metadata() if pair[0] in ("k", "k-bin")]
        self.metadata.append([tuple(pair) for pair in pairs])
        context.add_callback(lambda: None if context.code() else self.gone.set())
        self.arrived.release()
        self.gate.wait(10)
        if self.aborts:
            context.abort(self.aborts.pop(0), "as told")
        return StringValue(value=str(request.value**2) + "." * self.answer_bytes)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.gate.set()
    server.server.stop(None).wait()


class Direct:
    """A provider whose requests go to a service and wait for it."""

    def __init__(self, io: Io) -> None:
        self.io = io

    def capability_req(
        self, backend: str, operation: str, params: Any, *, cache_key: str = "", sidecar: Any = None
    ) -> Any:
        request = self.io.request(backend, operation, params)
        request.sidecar = sidecar
        reply = self.io.one(request)
        if reply.error is not None:
            error = reply.error
            raise read_error(error.kind, error.message, reason=error.reason, status=error.status)
        return reply.sidecar if reply.sidecar is not None else reply.result


@pytest.fixture
def connect(io: StartIo, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Io]]:
    monkeypatch.setattr(grpc_peer, "PAUSE_FIRST_S", 0.01)
    tokens = []

    def start(server: Server | None = None, *, run: Any = None, **options: Any) -> Io:
        port = server.port if server is not None else 1
        service = {"kind": "grpc", "options": {"target": f"127.0.0.1:{port}", **options}}
        started = io(capabilities={"prices": service}, **({"run": run} if run else {}))
        tokens.append(seam.set_provider(Direct(started)))  # type: ignore[arg-type]
        return started

    yield start
    for token in reversed(tokens):
        seam.reset_provider(token)


def stub() -> PricesStub:
    return PricesStub(blockx.capability("prices").channel())


def test_a_stub_works_as_over_a_real_channel(connect: Any, server: Server) -> None:
    connect(server)
    answer = stub().Square(Int64Value(value=12), timeout=5, metadata=[("k", "v")])
    assert answer == StringValue(value="144")
    assert server.metadata == [[("k", "v")]]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        assert PricesStub(channel).Square(Int64Value(value=12)) == answer


@pytest.mark.parametrize("status", ["UNAVAILABLE", "RESOURCE_EXHAUSTED"])
def test_what_passes_is_waited_out(connect: Any, server: Server, status: str) -> None:
    connect(server)
    server.aborts = [grpc.StatusCode[status]] * 2
    assert stub().Square(Int64Value(value=3)).value == "9"
    assert len(server.metadata) == 3


@pytest.mark.parametrize(
    ("status", "kind"),
    [("INVALID_ARGUMENT", "io_error"), ("UNIMPLEMENTED", "io_error"), ("DEADLINE_EXCEEDED", "unavailable")],
)  # fmt: skip
def test_other_statuses_end_the_read(connect: Any, server: Server, status: str, kind: str) -> None:
    connect(server)
    server.aborts = [grpc.StatusCode[status]]
    with pytest.raises(ReadError) as caught:
        stub().Square(Int64Value(value=3))
    assert isinstance(caught.value, GrpcError)
    assert (caught.value.kind, caught.value.status) == (kind, status)
    assert caught.value.detail == "as told"
    text = f"prices: 127.0.0.1:{server.port} /test.Prices/Square: {status}: as told"
    assert str(caught.value) == text
    assert len(server.metadata) == 1


def test_a_server_that_is_not_there_is_unavailable(connect: Any) -> None:
    connect(run={"io_wait_max_ms": 0})
    with pytest.raises(ReadError) as caught:
        stub().Square(Int64Value(value=3))
    assert caught.value.kind == "unavailable"


def test_a_calls_budget_ends_it(connect: Any, server: Server) -> None:
    service = connect(server)
    server.gate.clear()
    request = service.request("prices", "/test.Prices/Square", {}, budget_ms=50)
    reply = service.one(request)
    assert reply.error is not None
    assert reply.error.kind == "deadline_exceeded"


def test_a_cancelled_call_is_given_up(connect: Any, server: Server) -> None:
    service = connect(server)
    server.gate.clear()
    request = service.request("prices", "/test.Prices/Square", {})
    service.service.submit([request])
    service.service.cancel([request.call_id])
    (reply,) = service.replies_to(request)
    assert reply.error is not None
    assert reply.error.kind == "cancelled"


def test_a_request_that_nobody_waits_for_is_given_up_at_the_server(
    connect: Any, server: Server
) -> None:
    service = connect(server)
    server.gate.clear()
    request = service.request("prices", "/test.Prices/Square", {})
    service.service.submit([request])
    assert server.arrived.acquire(timeout=10)
    service.service.cancel([request.call_id])
    service.replies_to(request)
    assert server.gone.wait(10)


def test_an_error_is_also_that_of_grpc_where_grpc_is_loaded(connect: Any, server: Server) -> None:
    connect(server)
    server.aborts = [grpc.StatusCode.NOT_FOUND]
    with pytest.raises(grpc.RpcError) as caught:
        stub().Square(Int64Value(value=3))
    assert isinstance(caught.value, ReadError)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "as told"


def test_without_grpc_an_error_does_not_load_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "grpc")
    error = read_error("io_error", "text", reason="as told", status="NOT_FOUND")
    assert type(error) is GrpcError
    assert "grpc" not in sys.modules


def test_bytes_travel_as_metadata(connect: Any, server: Server) -> None:
    connect(server)
    stub().Square(Int64Value(value=1), metadata=[("k-bin", b"\xff\x00")])
    assert server.metadata == [[("k-bin", b"\xff\x00")]]


@pytest.mark.parametrize("pair", [("k", b"x"), ("k-bin", "x"), ("k", 5)])
def test_metadata_that_grpc_would_refuse_is_refused(
    connect: Any, server: Server, pair: Any
) -> None:
    connect(server)
    with pytest.raises(TypeError, match=r"metadata 'k(-bin)?': values are text, or bytes where"):
        stub().Square(Int64Value(value=1), metadata=[pair])


def test_credentials_belong_to_the_configuration(connect: Any, server: Server) -> None:
    connect(server)
    with pytest.raises(TypeError, match=r"credentials belong to backends\.capabilities\.prices"):
        stub().Square(Int64Value(value=1), credentials=object())


def test_a_message_over_the_limit_ends_at_once(
    connect: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_backend, "MESSAGE_BYTES_MAX", 100)
    service = connect(server)
    request = service.request("prices", "/test.Prices/Square", {})
    request.sidecar = b"x" * 101
    text = "prices /test.Prices/Square: a request of 101 bytes; the limit is 100 bytes: send it in parts"
    assert outcome(service.one(request)) == ("io_error", text)
    server.answer_bytes = 200
    kind, message = outcome(service.one(service.request("prices", "/test.Prices/Square", {})))
    assert kind == "io_error"
    assert "RESOURCE_EXHAUSTED: " in message
    assert "larger than max" in message
    assert message.endswith("; send or ask for less at once")
    assert len(server.metadata) == 1


# ---- methods that only read ------------------------------------------------------------------------


def squares(service: Io, number: int, count: int, **more: Any) -> list[Any]:
    requests = []
    for _ in range(count):
        request = service.request("prices", "/test.Prices/Square", {}, **more)
        request.sidecar = Int64Value(value=number).SerializeToString()
        requests.append(request)
    return requests


@pytest.mark.parametrize(
    ("reads", "sent"),
    [([], 6), (["/test.Prices/Square"], 2), (["/test.Prices/*"], 2), (["/test.Prices/Other"], 6)],
    ids=["none", "the method", "all of the service", "another method"],
)
def test_equal_requests_on_their_way_are_one_if_the_method_only_reads(
    connect: Any, server: Server, reads: list[str], sent: int
) -> None:
    service = connect(server, reads=reads)
    server.gate.clear()
    requests = [*squares(service, 2, 3), *squares(service, 3, 3)]
    service.service.submit(requests)
    for _ in range(sent):
        assert server.arrived.acquire(timeout=10)
    server.gate.set()
    answers = [StringValue.FromString(r.sidecar).value for r in service.replies_to(*requests)]
    assert answers == ["4"] * 3 + ["9"] * 3
    assert len(server.metadata) == sent


def test_other_metadata_is_another_request(connect: Any, server: Server) -> None:
    service = connect(server, reads=["/test.Prices/*"])
    first, second = squares(service, 2, 2)
    second.params = b'{"metadata":[["k","v"]]}'
    service.ask(first, second)
    assert sorted(server.metadata) == [[], [("k", "v")]]


def test_one_reader_that_leaves_does_not_end_the_others(connect: Any, server: Server) -> None:
    service = connect(server, reads=["/test.Prices/*"])
    server.gate.clear()
    first, second, third = squares(service, 2, 3)
    third.budget_left_ms = 20
    service.service.submit([first, second, third])
    assert server.arrived.acquire(timeout=10)
    service.service.cancel([first.call_id])
    assert [outcome(r)[0] for r in service.replies_to(first, third)] == [
        "cancelled",
        "deadline_exceeded",
    ]
    server.gate.set()
    (reply,) = service.replies_to(second)
    assert StringValue.FromString(reply.sidecar).value == "4"
    assert len(server.metadata) == 1


def test_after_the_last_reader_has_left_an_equal_request_is_sent_anew(
    connect: Any, server: Server
) -> None:
    service = connect(server, reads=["/test.Prices/*"])
    server.gate.clear()
    first, second = squares(service, 2, 2)
    service.service.submit([first])
    assert server.arrived.acquire(timeout=10)
    service.service.cancel([first.call_id])
    service.service.submit([second])
    assert server.arrived.acquire(timeout=10)
    server.gate.set()
    replies = service.replies_to(first, second)
    assert [reply.error and reply.error.kind for reply in replies] == ["cancelled", None]


def test_answers_of_reads_are_kept_for_a_task_where_that_is_allowed(
    connect: Any, server: Server
) -> None:
    service = connect(server, reads=["/test.Prices/*"], cache_bytes=1_000_000)
    for task in ("a@1", "a@1", "b@1"):
        service.ask(*squares(service, 2, 1, task=task))
    assert len(server.metadata) == 2
    service.service.task_ended("a@1")
    service.ask(*squares(service, 2, 1, task="a@1"))
    assert len(server.metadata) == 3


def test_errors_are_not_kept(connect: Any, server: Server) -> None:
    service = connect(server, reads=["/test.Prices/*"], cache_bytes=1_000_000)
    server.aborts = [grpc.StatusCode.NOT_FOUND]
    replies = [service.one(request) for request in squares(service, 2, 2)]
    assert [reply.error is None for reply in replies] == [False, True]


def test_streams_and_futures_are_refused_when_they_are_called(connect: Any, server: Server) -> None:
    connect(server)
    with pytest.raises(TypeError, match="Watch: streams are not offered"):
        stub().Watch(Int64Value(value=1))
    with pytest.raises(TypeError, match="futures are not offered"):
        stub().Square.future(Int64Value(value=1))
    with pytest.raises(TypeError, match="with_call is not offered"):
        stub().Square.with_call(Int64Value(value=1))


@pytest.mark.parametrize(
    ("operation", "params", "kind"),
    [("Square", {}, "io_error"), ("/test.Prices/Square", {"timeout_ms": "x"}, "malformed")],
)
def test_a_wrong_request_is_refused(
    connect: Any, server: Server, operation: str, params: Any, kind: str
) -> None:
    connect(server)
    with pytest.raises(ReadError) as caught:
        blockx.capability("prices").ask(operation, params)
    assert caught.value.kind == kind


@pytest.mark.parametrize("data", [Int64Value(value=1), "text", bytearray(b"x")])
def test_data_that_is_no_bytes_is_refused_where_it_is_given(
    connect: Any, server: Server, data: Any
) -> None:
    connect(server)
    prices = blockx.capability("prices")
    with pytest.raises(TypeError, match=r"prices /test.Prices/Square: the data is bytes, .* not "):
        prices.ask("/test.Prices/Square", data=data)
    with pytest.raises(TypeError, match=r"prices /test.Prices/Square: the data is bytes, .* not "):
        prices.channel().unary_unary("/test.Prices/Square")(data)


def test_a_capability_has_a_name() -> None:
    with pytest.raises(TypeError, match="a capability's name is text"):
        blockx.capability("")


# ---- from the configuration ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capabilities", "text"),
    [
        ({"rpc": {"kind": "grpc"}}, r"capabilities\.rpc: the name belongs to the section backends\.rpc"),
        ({"x": {"kind": "grpc"}}, r"capabilities\.x: options: .*`target`"),
        ({"x": {"kind": "grpc", "options": {"target": "a", "tsl": 1}}}, r"capabilities\.x: options: .*`tsl`"),
        ({"x": {"kind": "grpc", "options": {"target": "a", "reads": ["Square"]}}}, r"`\$\.reads\[0\]`"),
        ({"x": {"kind": "nothing"}}, r"capabilities\.x: there is no kind 'nothing' \(there are: grpc"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_stops_the_start(io: StartIo, capabilities: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        io(capabilities=capabilities)


PLUGIN = """
from blockx.backends.scope import IoReply


class Echo:
    def __init__(self, prefix):
        self.prefix = prefix

    async def start(self):
        pass

    def submit(self, request, reply):
        reply(IoReply(request, result=b'"%b"' % (self.prefix + request.operation).encode()))

    def cancel(self, call_id):
        pass

    def task_ended(self, task_id):
        pass

    def statistics(self, task_id):
        return {}

    async def close(self):
        pass


def make(name, options, loaded):
    return Echo(options["prefix"])
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package ``echo_plugin`` that is installed, with an entry point ``echo`` and a broken one."""
    site = tmp_path / "site"
    info = site / "echo_plugin-1.dist-info"
    info.mkdir(parents=True)
    (site / "echo_plugin.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[blockx.backends]\necho = echo_plugin:make\nbroken = echo_plugin:nothing\n"
    )
    monkeypatch.syspath_prepend(str(site))


def test_an_entry_point_is_a_backend(io: StartIo, plugin: None) -> None:
    service = io(capabilities={"e": {"kind": "echo", "options": {"prefix": "> "}}})
    assert service.one(service.request("e", "hello", {})).result == b'"> hello"'


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("echo", r"backends\.capabilities\.e: kind echo failed: KeyError: 'prefix'"),
        ("broken", r"backends\.capabilities\.e: kind broken cannot be imported: AttributeError"),
        ("none", r"there is no kind 'none' \(there are: grpc, broken, echo\)"),
    ],
)
def test_an_entry_point_that_fails_is_told_by_name(
    io: StartIo, plugin: None, kind: str, text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        io(capabilities={"e": {"kind": kind}})


class PriceServer(threading.Thread):
    """Knows the price of ETH."""

    def __init__(self) -> None:
        super().__init__(daemon=True)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/ETH" else 404)
                self.end_headers()
                self.wfile.write(b'{"usd": 1}')

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.start()

    def run(self) -> None:
        self.server.serve_forever(0.01)

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.join()


# ---- through an executor ----------------------------------------------------------------------------

FUNCTION = """
import blockx
from google.protobuf.wrappers_pb2 import Int64Value, StringValue


def _(n):
    square = blockx.capability("prices").channel().unary_unary(
        "/test.Prices/Square",
        request_serializer=Int64Value.SerializeToString,
        response_deserializer=StringValue.FromString,
    )
    return {"square": square(Int64Value(value=n)).value}
"""


@pytest.mark.slow
def test_a_teams_own_service_works_inside_executors(server: Server, tmp_path: Path) -> None:
    (tmp_path / "functions").mkdir()
    (tmp_path / "functions" / "f.py").write_text(FUNCTION)
    (tmp_path / "config.yaml").write_text(
        "worker: {executor_count: 1}\n"
        f"backends: {{capabilities: {{prices: {{kind: grpc, options: {{target: '127.0.0.1:{server.port}'}}}}}}}}\n"
        "jobs: [{name: j, function: f, calls: [1, 2, 3], output: rows.jsonl}]\n"
    )
    ran = subprocess.run(
        [sys.executable, str(CODE / "blockx.py"), "--config", "config.yaml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = (tmp_path / "rows.jsonl").read_text().split()
    assert rows == ['{"square":"1"}', '{"square":"4"}', '{"square":"9"}']


def test_the_example_of_the_contributing_guide_works(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (source,) = [block for block in blocks if "def make(" in block]
    names: dict[str, Any] = {}
    exec(compile(source, "CONTRIBUTING.md", "exec"), names)
    peer = PriceServer()
    made = names["make"]("prices", {"url": peer.url}, None)
    service = Io(tmp_path, {}, backends={"prices": made})
    known, unknown = service.ask(
        service.request("prices", "price", {"symbol": "ETH"}),
        service.request("prices", "price", {"symbol": "none"}),
    )
    service.stop()
    peer.stop()
    assert known.result == b'{"usd": 1}'
    assert unknown.error is not None
    assert (unknown.error.kind, "404" in unknown.error.message) == ("unavailable", True)
