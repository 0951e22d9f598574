"""gRPC from end to end: generated stubs inside functions, and a table store in a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from grpc_tools import protoc

from tests.e2e.conftest import LAUNCHER

pytestmark = pytest.mark.slow
SERVICE = Path(__file__).parent / "grpc_service"
WAIT_S = 30


class Peer:
    """A process that serves until it is stopped."""

    def __init__(self, *command, **options):
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options,
        )  # fmt: skip
        self.first_line = self.process.stdout.readline()

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        text, _ = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, text

    def end(self):
        self.process.kill()
        self.process.wait(WAIT_S)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def stubs(product):
    """A folder with what protoc makes of ``prices.proto``, where functions can import it."""
    folder = product.folder / "stubs"
    folder.mkdir()
    arguments = [f"-I{SERVICE}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
    assert protoc.main(["protoc", *arguments, "prices.proto"]) == 0
    product.environment["PYTHONPATH"] = str(folder)
    return folder


@pytest.fixture
def peers(product):
    """Start processes that end before the product's are counted."""
    started = []

    def start(*command, **options):
        peer = Peer(*command, **options)
        started.append(peer)
        return peer

    yield start
    for peer in started:
        peer.end()


@pytest.fixture
def prices(stubs, peers):
    """The port of a running server of prices."""
    environment = {**os.environ, "PYTHONPATH": str(stubs)}
    return int(peers(SERVICE / "server.py", env=environment).first_line)


def serve_tables(peers, folder, *more):
    """A running ``table serve`` and its url."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("backends: {blockdb: {path: store.sqlite}}\n")
    listen = more or ("--listen", "127.0.0.1:0")
    peer = peers(LAUNCHER, "table", "serve", *listen, cwd=folder)
    url = re.search(r"grpc://\S+:\d+", peer.first_line)
    return peer, url[0] if url else ""


def capability(port, **options):
    service = {"kind": "grpc", "options": {"target": f"127.0.0.1:{port}", **options}}
    return {"capabilities": {"prices": service}}


STUB = """
from blockdb import Table
from blockx import capability
from prices_pb2 import PriceRequest
from prices_pb2_grpc import PricesStub


def _(symbol, block):
    seen = Table("seen", key=["symbol", "block"])
    price = PricesStub(capability("prices").channel()).Price(PriceRequest(symbol=symbol, block=block))
    seen.upsert_rows([{"symbol": symbol, "block": block, "wei": int(price.wei)}])
    return seen.get_row({"symbol": symbol, "block": block})
"""


def test_a_generated_stub_and_a_table_server_work_inside_functions(
    product, prices, peers, tmp_path
):
    tables, url = serve_tables(peers, tmp_path / "tables")
    backends = {**capability(prices), "blockdb": {"url": url}}
    calls = [{"args": ["ETH", block]} for block in range(0, 256, 5)]
    product.write(STUB, calls, config=f"backends: {json.dumps(backends)}")
    ended = product.run()
    assert ended.code == 0, ended.text
    rows = [{"symbol": "ETH", "block": b, "wei": 2**b} for b in range(0, 256, 5)]
    assert ended.lines("rows.jsonl") == rows
    code, text = tables.stop()
    assert (code, text) == (128 + signal.SIGTERM, "")
    dump = subprocess.run(
        [sys.executable, LAUNCHER, "table", "dump", "seen"],
        cwd=tmp_path / "tables", capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = [json.loads(line) for line in dump.stdout.splitlines()]
    assert sorted(found, key=lambda row: row["block"]) == rows


CAUGHT = """
import grpc
from blockx import capability
from prices_pb2 import PriceRequest
from prices_pb2_grpc import PricesStub


def _(symbol):
    stub = PricesStub(capability("prices").channel())
    try:
        stub.Price(PriceRequest(symbol=symbol), timeout=5)
    except grpc.RpcError as error:
        caught = [type(error).__name__, error.code().name, error.details(), error.kind]
    try:
        stub.Watch(PriceRequest(symbol=symbol))
    except TypeError as error:
        refused = str(error)
    return [*caught, refused]
"""


def test_an_error_of_the_service_is_caught_as_over_a_real_channel(product, prices):
    product.write(CAUGHT, [{"args": "none"}], config=f"backends: {json.dumps(capability(prices))}")
    ended = product.run()
    assert ended.outputs() == [[
        "GrpcError", "NOT_FOUND", "no such symbol", "io_error",
        "prices /team.prices.Prices/Watch: streams are not offered; a call suspends on one answer",
    ]]  # fmt: skip


def test_an_error_that_is_not_caught_ends_the_call_with_its_kind(product, prices):
    source = CAUGHT.replace("except grpc.RpcError", "except ZeroDivisionError")
    product.write(source, [{"args": "none"}], config=f"backends: {json.dumps(capability(prices))}")
    [record] = product.run().lines()
    assert record["error"]["kind"] == "io_error"
    text = f"GrpcError: prices: 127.0.0.1:{prices} /team.prices.Prices/Price: NOT_FOUND: no such symbol"
    assert record["error"]["message"] == text


WITHOUT_STUB = """
import sys
from blockx import capability
from prices_pb2 import PriceReply, PriceRequest


def _(block):
    request = PriceRequest(symbol="ETH", block=block).SerializeToString()
    reply = PriceReply.FromString(capability("prices").ask("/team.prices.Prices/Price", data=request))
    return [reply.wei, reply.asked, "grpc" in sys.modules]
"""


def test_equal_reads_of_calls_are_one_request_and_no_executor_loads_grpc_by_itself(product, prices):
    config = capability(prices, reads=["/team.prices.Prices/*"], cache_bytes=1_000_000)
    more = "\ndispatcher: {share_results: false}"
    calls = [{"args": 7}] * 50
    product.write(WITHOUT_STUB, calls, config=f"backends: {json.dumps(config)}{more}")
    assert product.run().outputs() == [["128", 1, False]] * 50


def test_a_stub_works_in_a_script_too(product, prices):
    product.write("def _():\n    pass\n", [], config=f"backends: {json.dumps(capability(prices))}")
    script = (
        "from blockx import capability\nfrom prices_pb2 import PriceRequest\n"
        "from prices_pb2_grpc import PricesStub\n"
        "stub = PricesStub(capability('prices').channel())\n"
        "print(stub.Price(PriceRequest(symbol='ETH', block=255)).wei)\n"
    )
    root = str(LAUNCHER.parent)
    path = os.pathsep.join([root, product.environment["PYTHONPATH"]])
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=product.folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == (f"{2**255}\n", "")


# ---- table serve -----------------------------------------------------------------------------------


def test_a_table_server_says_where_it_serves_and_ends_with_its_signal(peers, tmp_path):
    folder = tmp_path / "tables"
    tables, url = serve_tables(peers, folder)
    assert tables.first_line == f"serving {folder}/store.sqlite at {url}\n"
    assert tables.stop(signal.SIGINT) == (128 + signal.SIGINT, "")


def test_a_table_server_open_to_others_says_what_that_means(peers, tmp_path):
    tables, _ = serve_tables(peers, tmp_path / "tables", "--listen", "0.0.0.0:0")
    assert tables.first_line.endswith("; whoever reaches the port may read and write\n")


def test_a_port_that_is_taken_is_told(peers, tmp_path):
    _, url = serve_tables(peers, tmp_path / "tables")
    listen = url.removeprefix("grpc://")
    second, _ = serve_tables(peers, tmp_path / "others", "--listen", listen)
    assert second.first_line == (
        f"blockx: --listen {listen}: the port cannot be had; it is taken by another program, or the host is no"
        " address of this machine\n"
    )
    assert second.process.wait(WAIT_S) == 2


@pytest.mark.parametrize("backend", ["serve", "url", "capability"])
def test_without_grpcio_it_is_said_what_to_install(product, peers, tmp_path, backend):
    package = tmp_path / "none" / "grpc"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError\n")
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    if backend == "serve":
        (tmp_path / "config.yaml").write_text("backends: {blockdb: {path: store.sqlite}}\n")
        command, folder, what = ["table", "serve"], tmp_path, "table serve"
    else:
        url = {"blockdb": {"url": "grpc://127.0.0.1:1"}}
        sections = url if backend == "url" else capability(1)
        product.write("def _():\n    pass\n", [], config=f"backends: {json.dumps(sections)}")
        command, folder = ["--config", "config.yaml"], product.folder
        what = (
            "backends.blockdb.url: grpc://"
            if backend == "url"
            else "backends.capabilities.prices: kind grpc"
        )
    peer = peers(LAUNCHER, *command, cwd=folder, env=environment)
    assert (
        peer.first_line == f"blockx: {what} needs the package grpcio: pip install 'blockx[grpc]'\n"
    )
    assert peer.process.wait(WAIT_S) == 2
