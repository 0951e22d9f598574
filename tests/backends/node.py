"""A scripted node on loopback: answers like a node, or as a test tells it to.

Block ``n`` has the hash ``0x…n``; 100 is final, 200 the newest. A balance is ``1000 + height``.
"""

import http.server
import json
import threading
from collections.abc import Callable
from typing import Any

Member = dict[str, Any]


def block_hash(height: int) -> str:
    return f"0x{height:064x}"


class Raw:
    """A whole HTTP answer; ``status`` 0 closes the connection without one."""

    def __init__(self, status: int = 200, body: bytes = b"", **headers: str) -> None:
        self.status, self.body = status, body
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Node:
    """``posts``: the members of each HTTP request, in order of arrival.

    ``first``: whole answers for the first posts, used up one by one; ``member``: replaces the answer to a
    member (None: as usual); ``batch``: changes the list of answers; ``gate``: posts wait until it is set;
    ``held``: posts that begin with this method wait for ``gate`` alone.
    """

    def __init__(self) -> None:
        self.posts: list[list[Member]] = []
        self.bodies: list[bytes] = []
        self.first: list[Raw] = []
        self.member: Callable[[Member], Member | None] = lambda member: None
        self.batch: Callable[[list[Member]], Any] = lambda answers: answers
        self.gate = threading.Event()
        self.gate.set()
        self.held = ""
        self.arrived = threading.Semaphore(0)
        self.ports: list[int] = []
        self.final: int | None = 100
        self.latest = 200
        node = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                node.serve(self, self.rfile.read(int(self.headers["content-length"])))

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def methods(self) -> list[list[str]]:
        return [[member["method"] for member in post] for post in self.posts]

    def params(self, method: str) -> list[Any]:
        """Parameters of every request of a method, in order."""
        return [m["params"] for post in self.posts for m in post if m["method"] == method]

    def serve(self, handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
        request = json.loads(body)
        members = request if isinstance(request, list) else [request]
        self.posts.append(members)
        self.bodies.append(body)
        self.ports.append(handler.client_address[1])
        raw = self.first.pop(0) if self.first else None
        self.arrived.release()
        if self.held in ("", members[0]["method"]):
            self.gate.wait(20)
        if raw is None:
            answers: Any = [self.answer(member) for member in members]
            answers = self.batch(answers) if isinstance(request, list) else answers[0]
            raw = Raw(
                200, json.dumps(answers, ensure_ascii=False).encode("utf-8", "surrogateescape")
            )
        if raw.status == 0:
            handler.close_connection = True
            return
        handler.send_response(raw.status)
        for name, value in {"content-length": str(len(raw.body)), **raw.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(raw.body)
        if "content-length" in raw.headers:  # a promise that was not kept
            handler.close_connection = True

    def answer(self, member: Member) -> Member:
        told = self.member(member)
        if told is not None:
            return {"jsonrpc": "2.0", "id": member["id"], **told}
        return {"jsonrpc": "2.0", "id": member["id"], "result": self.result(member)}

    def result(self, member: Member) -> Any:
        method, params = member["method"], member["params"]
        if method in ("eth_getBlockByNumber", "eth_getBlockByHash"):
            height = self.height(params[0])
            if height is None or height > self.latest:
                return None
            return {"number": hex(height), "hash": block_hash(height)}
        if method == "eth_getBalance":
            return hex(1000 + (self.height(params[1]) or 0))
        if method == "eth_blockNumber":
            return hex(self.latest)
        return params

    def height(self, block: Any) -> int | None:
        if isinstance(block, dict):
            block = block["blockHash"]
        tags = {"finalized": self.final, "latest": self.latest}
        return tags[block] if block in tags else int(block, 16)


def error(code: int, message: str, **more: Any) -> Member:
    return {"error": {"code": code, "message": message, **more}}
