"""One epoll loop: sockets, timers, and an inbox that any thread may post to.

The thread that calls ``run`` is the actor thread; everything but ``post`` and ``stop`` belongs to it.
A turn handles what is ready now, bounded by what was there when it began; what becomes ready meanwhile
waits for the next turn, so nothing can starve. The loop knows nothing of calls: it calls handlers.

The inbox is a deque (its operations are atomic) and one eventfd: a poster writes to it only when the
actor has not been woken yet, so a burst of posts costs one system call.
"""

import heapq
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

EVENTS_PER_TURN = 128
"""Descriptors handled in one turn; the rest stays ready for the next."""
_READ = select.EPOLLIN
_READ_WRITE = select.EPOLLIN | select.EPOLLOUT


def monotonic_ms() -> int:
    """The actor's clock: milliseconds of the monotonic clock, the same for all processes of a machine."""
    return time.monotonic_ns() // 1_000_000


class Reactor:
    """See the module's law."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, _READ)
        self._inbox: deque[Any] = deque()
        self._awake = False
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._writers: set[int] = set()
        self._timers: list[tuple[int, int, Any]] = []
        self._timer_seq = itertools.count()
        self._stopping = False
        self._close_lock = threading.Lock()
        self._is_closed = False

    # ---- any thread ----------------------------------------------------------------------------

    def post(self, item: Any) -> None:
        """Put an item into the inbox; the actor handles it in its next turn. After the end: dropped."""
        self._inbox.append(item)
        if not self._awake:
            self._awake = True
            with self._close_lock:  # the descriptor's number may belong to someone else once closed
                if not self._is_closed:
                    os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Let ``run`` return after its current turn."""
        self._stopping = True
        self._awake = False
        self.post(None)

    # ---- actor thread --------------------------------------------------------------------------

    def register(self, fd: int, on_ready: Callable[[int], None]) -> None:
        """Call ``on_ready(mask)`` whenever the descriptor is readable."""
        self._epoll.register(fd, _READ)
        self._handlers[fd] = on_ready

    def want_write(self, fd: int, wanted: bool) -> None:
        """Also call its handler when the descriptor is writable."""
        if wanted is not (fd in self._writers):
            (self._writers.add if wanted else self._writers.discard)(fd)
            self._epoll.modify(fd, _READ_WRITE if wanted else _READ)

    def unregister(self, fd: int) -> None:
        """Forget the descriptor; before it is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._writers.discard(fd)
            self._epoll.unregister(fd)

    def call_later(self, delay_ms: int, item: Any) -> None:
        """Hand ``item`` to the inbox handler after the delay."""
        due_ms = monotonic_ms() + delay_ms
        heapq.heappush(self._timers, (due_ms, next(self._timer_seq), item))

    def run(self, on_item: Callable[[Any], None], on_turn_end: Callable[[], None]) -> None:
        """Turn until ``stop``: sockets, inbox, timers, then ``on_turn_end`` once."""
        while not self._stopping:
            self._turn(on_item)
            on_turn_end()

    def _turn(self, on_item: Callable[[Any], None]) -> None:
        ready = self._epoll.poll(self._timeout_s(), EVENTS_PER_TURN)
        handlers = self._handlers
        for fd, mask in ready:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
                continue
            handler = handlers.get(fd)  # None: unregistered earlier in this turn
            if handler is not None:
                handler(mask)
        # Cleared before the inbox is read: whoever posts from here on wakes the next turn.
        self._awake = False
        inbox = self._inbox
        for _ in range(len(inbox)):
            item = inbox.popleft()
            if item is not None:
                on_item(item)
        if self._timers:
            self._fire_timers(on_item)

    def _timeout_s(self) -> float:
        if self._inbox:
            return 0
        if not self._timers:
            return -1
        return max(0, self._timers[0][0] - monotonic_ms()) / 1_000

    def _fire_timers(self, on_item: Callable[[Any], None]) -> None:
        now_ms, timers = monotonic_ms(), self._timers
        while timers and timers[0][0] <= now_ms:
            on_item(heapq.heappop(timers)[2])

    def close(self) -> None:
        """Close epoll and the inbox's descriptor; later posts are dropped."""
        with self._close_lock:
            self._is_closed = True
            os.close(self._wake_fd)
        self._epoll.close()
