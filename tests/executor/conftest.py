"""A runtime without a socket: source goes in as text, messages come out as structs."""

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from blockx.executor import interrupts
from blockx.executor.loader import Loader
from blockx.executor.runtime import ExecutorRuntime
from blockx.ipc import exact_json
from blockx.ipc.heartbeat import HeartbeatRow, create_table_fd
from blockx.ipc.messages import (
    CallCompleted,
    CallFailed,
    CallWaiting,
    ExecutorMessage,
    WaitKind,
)


class Bench:
    """Main's side of one runtime: starts calls, answers source fetches, collects the rest."""

    def __init__(
        self, row: HeartbeatRow | None = None, *, requires_audit: bool = False, **options: Any
    ) -> None:
        self.runtime = ExecutorRuntime(
            "exec-1",
            Loader(requires_audit=requires_audit),
            None,
            row,
            incarnation_id="cafe0001",
            **options,
        )
        self.sources: dict[str, str] = {}
        self._call_seq = 0

    def start(
        self, source: str = "def _(*a): return list(a)", args: Any = (), **fields: Any
    ) -> dict[str, Any]:
        """Submit an attempt; returns the message as sent."""
        self._call_seq += 1
        digest = hashlib.sha256(source.encode()).hexdigest()
        self.sources[digest] = source
        payload = {
            "taskId": "t1",
            "functionId": "f",
            "functionCodeDigest": digest,
            "entrySelector": "_",
            "args": list(args),
            "attemptSeq": 1,
            "callSeq": self._call_seq,
            **{k: v for k, v in fields.items() if k != "call_id"},
        }
        call_id = fields.get("call_id", f"c{self._call_seq}")
        message = {"messageType": "ExecuteCall", "callId": call_id, "payload": payload}
        self.runtime.handle_inbound_message(message)
        return message

    def resume(self, waiting: CallWaiting, result: Any = None, **fields: Any) -> None:
        """Answer a CallWaiting."""
        payload = {
            "resumeKind": waiting.payload.wait_kind.value,
            "attemptSeq": waiting.payload.attempt_seq,
            "result": result,
            **{k: v for k, v in fields.items() if k != "request_id"},
        }
        request_id = fields.get("request_id", waiting.request_id)
        self.runtime.handle_inbound_message(
            {
                "messageType": "ResumeCall",
                "callId": waiting.call_id,
                "requestId": request_id,
                "payload": payload,
            }
        )

    def cancel(self, call_id: str, *, attempt_seq: int = 1, reason: str = "cancelled") -> None:
        """Give up on an attempt."""
        payload = {"reason": reason, "attemptSeq": attempt_seq}
        self.runtime.handle_inbound_message(
            {"messageType": "CancelCall", "callId": call_id, "payload": payload}
        )

    def run(self) -> list[ExecutorMessage]:
        """Run until idle, with source fetches answered; returns all other messages."""
        found: list[ExecutorMessage] = []
        while True:
            self.runtime.run_until_idle()
            sent = self.runtime.drain_outbox()
            fetches = [m for m in sent if is_fetch(m)]
            found += [m for m in sent if not is_fetch(m)]
            if not fetches:
                return found
            for fetch in fetches:
                self.resume(fetch, self.sources[fetch.payload.function_code_digest])

    def run_to_end(self) -> list[ExecutorMessage]:
        """Run until no call is resident, sleeping while only time is waited for."""
        found = self.run()
        while self.runtime.inflight_count():
            delay = self.runtime.next_scheduler_delay()
            assert delay is not None, f"waits for ever: {found}"
            interrupts._real_sleep(delay)
            found += self.run()
        return found

    def call(self, source: str, *args: Any, **fields: Any) -> CallCompleted | CallFailed:
        """Run one call to its end; returns its terminal message."""
        self.start(source, args, **fields)
        sent = self.run_to_end()
        assert len(sent) == 1, sent
        assert isinstance(sent[0], CallCompleted | CallFailed)
        return sent[0]

    def output(self, source: str, *args: Any, **fields: Any) -> Any:
        """Run one call that must succeed; returns its result."""
        return output_of(self.call(source, *args, **fields))

    def failure(self, source: str, *args: Any, **fields: Any) -> tuple[str, str]:
        """Run one call that must fail; returns kind and message."""
        message = self.call(source, *args, **fields)
        assert isinstance(message, CallFailed), message
        return message.payload.error_kind, message.payload.error_message


def is_fetch(message: ExecutorMessage) -> bool:
    """Whether a message asks for source."""
    return isinstance(message, CallWaiting) and message.payload.wait_kind is WaitKind.FUNCTION_CODE


def output_of(message: ExecutorMessage) -> Any:
    """The result that a CallCompleted carries."""
    assert isinstance(message, CallCompleted), message
    return exact_json.decode(message.payload.output)


@pytest.fixture
def bench() -> Iterator[Bench]:
    yield from running(Bench())


@pytest.fixture
def new_bench() -> Iterator[Any]:
    """Makes benches with options; closes them."""
    benches: list[Bench] = []

    def make(**options: Any) -> Bench:
        benches.append(Bench(**options))
        return benches[-1]

    yield make
    for made in reversed(benches):  # each gives back what it found
        made.runtime.close()


@pytest.fixture
def row() -> Iterator[HeartbeatRow]:
    """A page of a heartbeat table of its own."""
    descriptor = create_table_fd(1)
    row = HeartbeatRow(descriptor, 0)
    os.close(descriptor)
    yield row
    row.close()


def running(made: Bench) -> Iterator[Bench]:
    """Close a bench after its test."""
    yield made
    made.runtime.close()
