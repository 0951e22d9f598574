"""Sockets, epoll and timers in memory, with the interfaces of the real ones; nothing waits, nothing is random.

``MemorySocket`` is main's end of a connection; the simulated executor holds the same object and uses its
other side (``say``, ``heard``, ``hang_up``). A send takes what fits into the peer's buffer, so partial
writes and full buffers happen as they do with a kernel. ``SimReactor`` has the methods of
``actor.reactor.Reactor``, but ``run`` only remembers its two functions: the world calls ``turn``.
"""

import os
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

_UCRED = struct.Struct("3i")
READ, WRITE = 1, 4


class Fds:
    """Numbers for descriptors."""

    def __init__(self) -> None:
        self.last = 100

    def next(self) -> int:
        self.last += 1
        return self.last


class MemorySocket:
    """One connection; see the module's docstring."""

    def __init__(self, fd: int, pid: int, capacity_bytes: int) -> None:
        self.fd = fd
        self.pid = pid
        self.capacity_bytes = capacity_bytes
        self.inbound = bytearray()
        self.outbound = bytearray()
        self.is_closed = False
        self.is_hung_up = False
        self.on_data: Callable[[], None] = lambda: None

    # main's end, as socket.socket

    def fileno(self) -> int:
        return self.fd

    def setblocking(self, _flag: bool) -> None:
        pass

    def getsockopt(self, _level: int, _option: int, _size: int) -> bytes:
        return _UCRED.pack(self.pid, os.getuid(), os.getgid())

    def recv(self, size: int) -> bytes:
        assert not self.is_closed, "read after close"
        if self.inbound:
            data = bytes(self.inbound[:size])
            del self.inbound[:size]
            return data
        if self.is_hung_up:
            return b""
        raise BlockingIOError

    def send(self, data: memoryview) -> int:
        assert not self.is_closed, "write after close"
        if self.is_hung_up:
            raise BrokenPipeError
        room = self.capacity_bytes - len(self.outbound)
        if room <= 0:
            raise BlockingIOError
        self.outbound += data[:room]
        self.on_data()
        return min(room, len(data))

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.on_data()

    # the executor's end

    def say(self, data: bytes) -> None:
        if not self.is_closed and not self.is_hung_up:
            self.inbound += data

    def heard(self) -> bytes:
        data = bytes(self.outbound)
        self.outbound.clear()
        return data

    def hang_up(self) -> None:
        self.is_hung_up = True

    # epoll's view

    def ready(self) -> int:
        readable = bool(self.inbound) or self.is_hung_up
        writable = self.is_hung_up or len(self.outbound) < self.capacity_bytes
        return READ * readable | WRITE * writable


class MemoryListener:
    """A listening socket of one slot."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.backlog: deque[MemorySocket] = deque()

    def fileno(self) -> int:
        return self.fd

    def accept(self) -> tuple[MemorySocket, None]:
        if not self.backlog:
            raise BlockingIOError
        return self.backlog.popleft(), None

    def close(self) -> None:
        pass

    def ready(self) -> int:
        return READ if self.backlog else 0


class SimReactor:
    """See the module's docstring. ``after(delay_ms, action)`` is the world's clock."""

    def __init__(self, after: Callable[[int, Callable[[], None]], None]) -> None:
        self._after = after
        self.files: dict[int, MemorySocket | MemoryListener] = {}
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.writers: set[int] = set()
        self.inbox: deque[Any] = deque()
        self.on_item: Callable[[Any], None] = lambda _item: None
        self.on_turn_end: Callable[[], None] = lambda: None

    def register(self, fd: int, on_ready: Callable[[int], None]) -> None:
        assert fd not in self.handlers, "registered twice"
        self.handlers[fd] = on_ready

    def want_write(self, fd: int, wanted: bool) -> None:
        assert fd in self.handlers, "not registered"
        (self.writers.add if wanted else self.writers.discard)(fd)

    def unregister(self, fd: int) -> None:
        self.handlers.pop(fd, None)
        self.writers.discard(fd)

    def call_later(self, delay_ms: int, item: Any) -> None:
        self._after(delay_ms, lambda: self.inbox.append(item))

    def post(self, item: Any) -> None:
        self.inbox.append(item)

    def run(self, on_item: Callable[[Any], None], on_turn_end: Callable[[], None]) -> None:
        self.on_item, self.on_turn_end = on_item, on_turn_end

    def ready(self) -> list[int]:
        """Descriptors that epoll would report, in the order of their numbers."""
        return [
            fd
            for fd in sorted(self.handlers)
            if self.files[fd].ready() & (READ | WRITE * (fd in self.writers))
        ]

    def turn(self, order: Callable[[list[int]], list[int]]) -> None:
        """One turn of the loop: sockets, inbox, epilogue."""
        for fd in order(self.ready()):
            handler = self.handlers.get(fd)
            if handler is not None:
                handler(self.files[fd].ready())
        for _ in range(len(self.inbox)):
            self.on_item(self.inbox.popleft())
        self.on_turn_end()
