"""A real io service with a queue for its replies."""

import itertools
import json
import queue
from pathlib import Path
from typing import Any

import msgspec

from blockx.backends.scope import Backend, IoReply, IoRequest
from blockx.backends.service import IoService
from blockx.config import BackendsConfig, Config, LoadedConfig, RunConfig

WAIT_S = 20.0


class Io:
    """Starts the service of a configuration; requests get call ids ``c0``, ``c1``, …"""

    def __init__(
        self, folder: Path, sections: dict[str, Any], backends: dict[str, Backend] | None = None
    ) -> None:
        sections = dict(sections)
        run = msgspec.convert(sections.pop("run", {}), RunConfig)
        config = Config(backends=msgspec.convert(sections, BackendsConfig), run=run)
        self.groups: list[int] = []
        self._replies: queue.SimpleQueue[IoReply] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self.service = IoService(
            LoadedConfig(config, folder / "config.yaml", folder), self._on_replies, backends
        )
        self.service.start()

    def _on_replies(self, replies: list[IoReply]) -> None:
        self.groups.append(len(replies))
        for reply in replies:
            self._replies.put(reply)

    def request(
        self,
        backend: str,
        operation: str,
        params: Any,
        *,
        task: str = "t@1",
        call: str = "",
        budget_ms: float = 0.0,
        write: bool = False,
    ) -> IoRequest:
        number = next(self._numbers)
        return IoRequest(
            executor_id="exec-0",
            task_id=task,
            call_id=call or f"c{number}",
            attempt_seq=1,
            request_id=f"r{number}",
            backend=backend,
            operation=operation,
            params=json.dumps(params).encode() if not isinstance(params, bytes) else params,
            sidecar=None,
            write=write,
            cache_key="",
            budget_left_ms=budget_ms,
        )

    def rpc(
        self, method: str, *params: Any, block: Any = None, chain: str | None = None, **more: Any
    ) -> IoRequest:
        wire = {"chain": chain, "block": block, "params": list(params)}
        return self.request("rpc", method, wire, **more)

    def table(self, operation: str, table: str, **params: Any) -> IoRequest:
        return self.request("blockdb", operation, {"table": table, **params})

    def ask(self, *requests: IoRequest) -> list[IoReply]:
        """Submit in one group; the replies in the order of the requests."""
        self.service.submit(list(requests))
        return self.replies_to(*requests)

    def replies_to(self, *requests: IoRequest) -> list[IoReply]:
        by_id = {}
        while len(by_id) < len(requests):
            reply = self._replies.get(timeout=WAIT_S)
            assert reply.request.request_id not in by_id, "a second reply"
            by_id[reply.request.request_id] = reply
        return [by_id[request.request_id] for request in requests]

    def one(self, request: IoRequest) -> IoReply:
        return self.ask(request)[0]

    def statistics(self, chain: str = "dev", task: str = "t@1") -> dict[str, int]:
        return self.service.statistics(task)["rpc"][chain]

    def stop(self) -> None:
        self.service.stop()


def outcome(reply: IoReply) -> Any:
    """The result decoded exactly, or ``(kind, message)`` of the error."""
    if reply.error is not None:
        return (reply.error.kind, reply.error.message)
    assert reply.result is not None
    return msgspec.json.decode(reply.result)
