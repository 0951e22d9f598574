"""One executor's socket, main's end: bounded outbox, coalesced writes, flush acknowledgement.

Runs on the actor thread; never blocks. Frames leave whole and in order; a partial write is kept and
continued when the socket is writable again. What arrives is decoded by ``ipc.frames`` alone.
"""

import socket
from collections import deque
from collections.abc import Sequence

from blockx.dispatcher.events import CallResumed
from blockx.ipc.frames import Frame, FrameDecoder

OUTBOX_FRAMES_MAX = 256
"""Frames waiting for one socket. Full: ExecuteCall moves free; ResumeCall and CancelCall always fit
(at most one of each for a resident context)."""
COALESCE_FRAMES_MAX = 64
"""Frames joined into one send."""
RECEIVE_BYTES_MAX = 256 * 1024
"""Bytes taken from one socket in a turn, so that one flood does not starve the others."""


class ExecutorConnection:
    """A connected executor, attached or not yet."""

    __slots__ = (
        "_decoder",
        "_head",
        "_outbox",
        "_outbox_frames_max",
        "peer_pid",
        "socket",
        "spawned_pid",
        "wants_write",
    )

    def __init__(
        self,
        sock: socket.socket,
        peer_pid: int,
        outbox_frames_max: int = OUTBOX_FRAMES_MAX,
        *,
        spawned_pid: int = 0,
    ) -> None:
        """``spawned_pid``: the process that the spawner started for it; 0: the peer itself."""
        self._outbox_frames_max = outbox_frames_max
        self.socket = sock
        self.peer_pid = peer_pid
        self.spawned_pid = spawned_pid or peer_pid
        self.wants_write = False
        """The reactor should tell when the socket is writable."""
        self._decoder = FrameDecoder()
        self._outbox: deque[tuple[bytes, CallResumed | None]] = deque()
        self._head = memoryview(b"")

    @property
    def outbox_is_full(self) -> bool:
        """Whether an ExecuteCall must go elsewhere."""
        return len(self._outbox) >= self._outbox_frames_max

    def receive(self) -> tuple[Sequence[Frame], bool]:
        """Frames that have arrived, and whether the other end is still there.

        Raises:
            PeerProtocolError: what arrived are no frames.
        """
        try:
            data = self.socket.recv(RECEIVE_BYTES_MAX)
        except (BlockingIOError, InterruptedError):
            return (), True
        except OSError:
            return (), False
        if not data:
            return (), False
        return self._decoder.feed(data), True

    def queue(self, frame: bytes, flushed: CallResumed | None = None) -> None:
        """Append a frame; ``flushed`` is handed back by the flush that writes its last byte."""
        self._outbox.append((frame, flushed))

    def flush(self) -> list[CallResumed]:
        """Write what the socket takes; returns the acknowledgements of frames that left whole.

        Raises:
            OSError: the other end is gone; what was queued is lost with it.
        """
        acknowledged: list[CallResumed] = []
        outbox = self._outbox
        while self._head or outbox:
            if not self._head:
                self._head, group = self._join(outbox)
            else:
                group = []
            try:
                sent = self.socket.send(self._head)
            except (BlockingIOError, InterruptedError):
                sent = 0
            self._head = self._head[sent:]
            # An acknowledgement of a group that went out in part would be early: it is kept with
            # the rest by putting the events behind the remaining bytes.
            if self._head:
                outbox.extendleft((b"", event) for event in reversed(group))
                self.wants_write = True
                return acknowledged
            acknowledged.extend(group)
        self.wants_write = False
        return acknowledged

    @staticmethod
    def _join(
        outbox: "deque[tuple[bytes, CallResumed | None]]",
    ) -> tuple[memoryview, list[CallResumed]]:
        frames: list[bytes] = []
        events: list[CallResumed] = []
        while outbox and len(frames) < COALESCE_FRAMES_MAX:
            frame, flushed = outbox.popleft()
            frames.append(frame)
            if flushed is not None:
                events.append(flushed)
        return memoryview(b"".join(frames)), events

    def close(self) -> None:
        """Close the socket; queued frames are dropped."""
        self.socket.close()
