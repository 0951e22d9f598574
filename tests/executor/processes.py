"""A real executor process over a real socket, and the test's end of it."""

import hashlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from blockx.ipc import exact_json
from blockx.ipc.frames import FrameDecoder, encode_frame
from blockx.ipc.heartbeat import create_table_fd
from blockx.ipc.heartbeat_table import HeartbeatTable
from blockx.ipc.launch import ExecutorLaunch
from blockx.ipc.messages import (
    CallCompleted,
    CallFailed,
    CallWaiting,
    ExecutorMessage,
    Heartbeat,
    HeartbeatAck,
    WaitKind,
    decode_executor_message,
    decode_main_message,
)

TIMEOUT_S = 20


class FakeMain:
    """Listens, starts calls, answers source fetches."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.listener.settimeout(TIMEOUT_S)
        self.decoder = FrameDecoder()
        self.sources: dict[str, str] = {}
        self.received: list[ExecutorMessage] = []
        self.seq = 0

    def accept(self) -> Heartbeat:
        """Take the connection; returns its first frame."""
        self.socket, _ = self.listener.accept()
        self.socket.settimeout(TIMEOUT_S)
        first = self.next()
        assert isinstance(first, Heartbeat), first
        self.send(HeartbeatAck())
        return first

    def send(self, message: Any) -> None:
        self.socket.sendall(encode_frame(message))

    def start(self, source: str, *args: Any, **fields: Any) -> str:
        self.seq += 1
        digest = hashlib.sha256(source.encode()).hexdigest()
        self.sources[digest] = source
        payload = {
            "taskId": "t",
            "functionId": "f",
            "functionCodeDigest": digest,
            "entrySelector": "_",
            "args": list(args),
            "attemptSeq": 1,
            "callSeq": self.seq,
            **fields,
        }
        message = {"messageType": "ExecuteCall", "callId": f"c{self.seq}", "payload": payload}
        self.send(decode_main_message(exact_json.encode(message)))
        return f"c{self.seq}"

    def next(self) -> ExecutorMessage:
        """The next frame that is no source fetch; EOFError at the end."""
        while True:
            while not self.received:
                data = self.socket.recv(65536)
                if not data:
                    raise EOFError
                self.received += [decode_executor_message(f.body) for f in self.decoder.feed(data)]
            message = self.received.pop(0)
            if (
                isinstance(message, CallWaiting)
                and message.payload.wait_kind is WaitKind.FUNCTION_CODE
            ):
                answer = {
                    "messageType": "ResumeCall",
                    "callId": message.call_id,
                    "requestId": message.request_id,
                    "payload": {
                        "resumeKind": "function_code",
                        "attemptSeq": message.payload.attempt_seq,
                        "result": self.sources[message.payload.function_code_digest],
                    },
                }
                self.send(decode_main_message(exact_json.encode(answer)))
                continue
            return message

    def outcome(self) -> tuple[str, Any]:
        """The next terminal frame as (call id, result or kind)."""
        while True:
            message = self.next()
            if isinstance(message, CallCompleted):
                return message.call_id, exact_json.decode(message.payload.output)
            if isinstance(message, CallFailed):
                return message.call_id, message.payload.error_kind

    def run(self, source: str, *args: Any, **fields: Any) -> Any:
        call_id = self.start(source, *args, **fields)
        found, outcome = self.outcome()
        assert found == call_id
        return outcome

    def close(self) -> None:
        self.listener.close()
        if hasattr(self, "socket"):
            self.socket.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


class Forked:
    """A forkserver child with a heartbeat table."""

    def __init__(self, path: Path, *, executor_max_inflight: int = 8, **launch_fields: Any) -> None:
        self.fd = create_table_fd(2)
        self.table = HeartbeatTable(self.fd, 2)
        launch = ExecutorLaunch(
            executor_id="exec-1",
            slot_index=1,
            socket_path=str(path),
            heartbeat_interval_ms=50,
            executor_max_inflight=executor_max_inflight,
            executor_max_runnable=8,
            **launch_fields,
        )
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["blockx.executor.preload"])
        from blockx.executor.main import run

        # DupFd is made while the process is being started, as multiprocessing wants it.
        self.process = context.Process(target=run, args=(launch, _LazyFd(self.fd)))
        self.process.start()

    def row(self) -> Any:
        return self.table.scheduler(1)

    def close(self) -> None:
        self.process.kill()
        self.process.join(TIMEOUT_S)
        # Pools of later tests in this process start their own.
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
        self.table.close()
        os.close(self.fd)


class _LazyFd:
    """Pickles as the DupFd of a descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        duplicate: Any = DupFd(self.fd)
        return type(duplicate), (duplicate.ind,)
