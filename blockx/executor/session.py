"""The socket seen from the executor: whole frames in, whole frames out, never a thread.

Main thread only, non-blocking. ``send`` encodes and queues a frame; ``flush`` writes what has gathered.
The runtime flushes when it is idle, when ``FRAMES_GATHERED_MAX`` frames or ``GATHER_NS`` have gathered,
and the alarm's tick flushes while user code computes. The tick may do so because it acts only while
``ctx.in_user`` is set, that is never in the middle of a ``send`` or a ``flush``: no lock is needed.

Invariant: bytes leave in the order of ``send``; a frame is queued whole or not at all.
≠ The specification has a reader and a writer thread; a hop between threads costs more than the frame.
"""

import contextlib
import select
import socket
import time
from collections.abc import Sequence
from typing import Final, Protocol

from blockx.ipc.frames import FrameDecoder, encode_frame
from blockx.ipc.messages import ExecutorMessage, MainMessage, decode_main_message

FRAMES_GATHERED_MAX: Final = 64
"""Frames after which a send is due."""
GATHER_NS: Final = 1_000_000
"""Age of the oldest queued frame after which a send is due: 1 ms."""
OUTBOX_BYTES_MAX: Final = 32 * 1024 * 1024
"""Bytes queued for main. Full: the next ``send`` first waits until main has taken half of them."""
RECEIVE_BYTES: Final = 64 * 1024
RECEIVES_MAX: Final = 16
"""Reads of one ``receive``: at most 1 MiB, so that a flood of frames does not keep calls waiting."""

Received = tuple[MainMessage, bytes | None]


class Channel(Protocol):
    """How the runtime speaks with main; ``list_channel.py`` has the one without a socket."""

    frames: int
    """Frames queued and not yet written."""
    terminal_frames: int
    """Terminal frames among them."""
    is_connected: bool

    def receive(self) -> Sequence[Received]:
        """What has arrived, without waiting."""

    def send(self, message: ExecutorMessage, sidecar: bytes | None = None) -> None:
        """Queue one frame. Raises FrameTooLargeError, and queues nothing then."""

    def send_terminal(self, message: ExecutorMessage) -> None:
        """The same for the last frame of an attempt."""

    def flush_if_due(self, now_ns: int) -> None:
        """Write if enough has gathered, or for long enough."""

    def flush(self) -> None:
        """Write as much as goes without waiting."""

    def abandon(self) -> None:
        """Never speak again."""


class UdsSession:
    """One connection to main."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._decoder = FrameDecoder()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._gathered: list[bytes] = []
        self._partial = memoryview(b"")
        self._outbox_bytes = 0
        self._gathered_since_ns = 0
        self.frames = 0
        self.terminal_frames = 0
        self.is_connected = True

    @classmethod
    def connect(cls, path: str) -> "UdsSession":
        """Connect to main's socket. Raises OSError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        return cls(connection)

    def fileno(self) -> int:
        """The descriptor, for those who close all others."""
        return self._socket.fileno()

    def receive(self) -> list[Received]:
        """What has arrived; empty if nothing has. End-of-file clears ``is_connected``.

        Raises PeerProtocolError if it is not what main may send; the connection is of no use then.
        """
        received: list[Received] = []
        for _ in range(RECEIVES_MAX):
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.is_connected = False
                break
            for body, sidecar in self._decoder.feed(data):
                received.append((decode_main_message(body), sidecar))
            if len(data) < RECEIVE_BYTES:
                break
        return received

    def send(self, message: ExecutorMessage, sidecar: bytes | None = None) -> None:
        """Queue one frame; waits only if OUTBOX_BYTES_MAX are queued. Raises FrameTooLargeError."""
        frame = encode_frame(message, sidecar)
        if not self._gathered:
            self._gathered_since_ns = time.monotonic_ns()
        self._gathered.append(frame)
        self.frames += 1
        self._outbox_bytes += len(frame)
        if self._outbox_bytes > OUTBOX_BYTES_MAX:
            self._drain_to(OUTBOX_BYTES_MAX // 2)

    def send_terminal(self, message: ExecutorMessage) -> None:
        """Queue the last frame of an attempt."""
        self.send(message)
        self.terminal_frames += 1

    def flush_if_due(self, now_ns: int) -> None:
        """Write if FRAMES_GATHERED_MAX frames have gathered, or some for GATHER_NS."""
        if self.frames and (
            self.frames >= FRAMES_GATHERED_MAX or now_ns - self._gathered_since_ns >= GATHER_NS
        ):
            self.flush()

    def flush(self) -> None:
        """Write without waiting; what does not fit stays, and ``wait`` watches for room."""
        while (self._partial or self._gathered) and self.is_connected:
            if not self._partial:
                frames, self._gathered = self._gathered, []
                self._partial = memoryview(frames[0] if len(frames) == 1 else b"".join(frames))
            try:
                written = self._socket.send(self._partial)
            except BlockingIOError:
                return
            except OSError:
                self.is_connected = False
                return
            self._partial = self._partial[written:]
            self._outbox_bytes -= written
        self.frames = self.terminal_frames = 0

    def wait(self, timeout_ms: float | None) -> None:
        """Sleep until main has sent something, there is room for what is queued, or time is up."""
        events = select.POLLIN | select.POLLOUT if self.frames else select.POLLIN
        self._poll.modify(self._socket, events)
        self._poll.poll(timeout_ms)

    def abandon(self) -> None:
        """Close this process's copy of the descriptor and forget what is queued: a forked child must
        not speak for its parent."""
        self._gathered, self._partial = [], memoryview(b"")
        self.frames = self.terminal_frames = self._outbox_bytes = 0
        self.is_connected = False
        with contextlib.suppress(OSError):
            self._socket.close()

    def _drain_to(self, bytes_max: int) -> None:
        """Wait until at most ``bytes_max`` are queued, or the connection is lost."""
        while self._outbox_bytes > bytes_max and self.is_connected:
            self.flush()
            if self._outbox_bytes > bytes_max and self.is_connected:
                self._poll.modify(self._socket, select.POLLOUT)
                self._poll.poll()
