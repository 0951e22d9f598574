"""A channel without a socket, for tests and tools: what the runtime sends is kept in lists."""

from blockx.executor.session import Received
from blockx.ipc.frames import encode_frame
from blockx.ipc.messages import ExecutorMessage


class ListChannel:
    """Messages are kept for ``ExecutorRuntime.drain_outbox``."""

    def __init__(self) -> None:
        self.sent: list[ExecutorMessage] = []
        self.sidecars: list[bytes | None] = []
        self.frames = 0
        self.terminal_frames = 0
        self.is_connected = True

    def receive(self) -> list[Received]:
        """Nothing: messages are handed to the runtime directly."""
        return []

    def send(self, message: ExecutorMessage, sidecar: bytes | None = None) -> None:
        """Keep the message. Raises FrameTooLargeError as a socket's session does."""
        encode_frame(message, sidecar)
        self.sent.append(message)
        self.sidecars.append(sidecar)

    def send_terminal(self, message: ExecutorMessage) -> None:
        """Keep the message."""
        self.send(message)

    def flush_if_due(self, now_ns: int) -> None:
        """Nothing to do."""

    def flush(self) -> None:
        """Nothing to do."""

    def abandon(self) -> None:
        """Never speak again."""
        self.is_connected = False
