"""Keys of nodes stay in main: no executor holds them, and nothing that a run leaves shows them.

The function under test looks through its whole process, in open mode. It gets the secrets as halves, so that looking
for them does not put them there; that it would find one is shown by a canary of its own.
"""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

SECRETS = ["Pw7Zq3SECRET1xK", "PATHKEYzzSECRET2", "Qy8SECRET3uvwm"]
USER, PASSWORD_KEY = "someuser", SECRETS[0]
HALVES = [[secret[:7], secret[7:]] for secret in SECRETS]

SEARCH = """
import gc, os
from blockx_sdk import rpc

def holds(data, head, tail):
    at = data.find(head)
    while at >= 0:
        start = at + len(head)
        if data[start : start + len(tail)] == tail:
            return True
        at = data.find(head, at + 1)
    return False

def memory():
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, permissions, *_ = line.split()
            if permissions[0] != "r" or "[v" in line:
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            for begin in range(start, end, 1 << 24):
                try:
                    memory.seek(begin)
                    yield line, memory.read(min(end - begin + 64, (1 << 24) + 64))
                except (OSError, OverflowError):
                    break

def files():
    for name in ("environ", "cmdline", "comm"):
        with open(f"/proc/self/{name}", "rb") as file:
            yield name, file.read()
    yield "os.environ", repr(dict(os.environ)).encode()

def _(halves):
    kept = "".join(["Canary", "SECRET", "0pq"])  # shows that it finds what is there
    try:
        error = str(rpc.call("eth_chainId", [], "dev"))
    except Exception as failed:
        error = str(failed)
    found = []
    for head, tail in [*halves, ["CanaryS", "ECRET0pq"]]:
        head, tail = head.encode(), tail.encode()
        for source in (files, memory):
            found += [[head.decode(), place] for place, data in source() if holds(data, head, tail)]
    return {"found": found, "canary": len(kept), "error": error}
"""


class _Refusing(BaseHTTPRequestHandler):
    """A node that says no, and repeats all that it was sent."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        text = f"no project {SECRETS[1]} at {self.path} for {USER} with {PASSWORD_KEY}".encode()
        self.send_response(403)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        """Nothing."""


@pytest.fixture
def node_port():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def with_url(product, port):
    url = f"http://{USER}:{PASSWORD_KEY}@127.0.0.1:{port}/v2/{SECRETS[1]}?key={SECRETS[2]}"
    return product.write(
        SEARCH,
        [[HALVES], [HALVES]],
        config=(
            f"backends: {{rpc: {{dev: {{urls: ['{url}'], per_url: {{'{url}': {{weight: 1}}}}}}}}}}\n"
            "run: {io_wait_max_ms: 300}\nlog: {level: debug}"
        ),
    )


def assert_no_secret_is_left(product, text):
    for secret in SECRETS:
        assert secret not in text
        for folder in (product.folder, product.folder.parent / "t"):
            for path in folder.rglob("*"):
                if path.is_file() and path.name != "config.yaml":
                    assert secret.encode() not in path.read_bytes(), path


@pytest.mark.spawn_modes("process")  # elsewhere it cannot look into itself: there is no /proc
@pytest.mark.parametrize("is_up", [True, False])
def test_no_executor_holds_a_secret_of_a_node(product, node_port, is_up):
    port = node_port if is_up else 1  # nobody listens there
    ended = with_url(product, port).run()
    for output in ended.outputs():
        places = [place for head, place in output["found"] if head != "CanaryS"]
        assert places == [], output["found"]
        assert [head for head, _ in output["found"]].count("CanaryS") > 0
        assert f"http://127.0.0.1:{port}/***" in output["error"]
    assert_no_secret_is_left(product, ended.text)


def test_neither_check_nor_a_mistake_shows_a_secret(product):
    with_url(product, 1)
    checked = product.run("check", "--config", "config.yaml")
    assert "http://127.0.0.1:1/***" in checked.text
    assert_no_secret_is_left(product, checked.text)
    config = product.folder / "config.yaml"
    config.write_text(config.read_text().replace("weight: 1", "wait: 1"))
    refused = product.run("check", "--config", "config.yaml")
    assert (refused.code, "wait" in refused.text) == (2, True)
    assert_no_secret_is_left(product, refused.text)
