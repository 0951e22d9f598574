"""What confined executors log, on its way to main's stderr: a pipe for each process, read by main.

An executor that had main's stderr itself could cut or overwrite it where it is a plain file, type into it where it is a
terminal, and fill a disk. With a pipe it can say something, and no more: a line begins with the executor that wrote it,
so that none passes for one of main's or of another executor, holds no control characters, and there are only so many
bytes a second. The pipe does not block its writer: what main does not take in time, the executor that wrote it loses.

A thread of its own reads, since writing to stderr may take as long as its reader likes.
"""

import contextlib
import os
import select
import threading
from dataclasses import dataclass
from typing import Final

from blockx.observability import logger

LOOK_S: Final = 0.1
"""Between two looks at the pipes. Not at each write: a flood would then keep main busy."""
LOOK_BYTES_MAX: Final = 64 * 1024
"""Read of one pipe in a look: what a pipe holds."""
BYTES_PER_S_MAX: Final = 64 * 1024
"""Passed on of one executor, and what is left of a line. More is dropped."""
LOOKS_PER_S: Final = round(1 / LOOK_S)
LINE_BYTES_MAX: Final = 16 * 1024
"""Longest beginning of a line that is kept until its end comes. More is dropped."""


@dataclass(slots=True)
class _Source:
    """The log of one executor process."""

    executor_id: str
    begun: bytes = b""
    """A line without its end."""
    left_bytes: int = BYTES_PER_S_MAX
    """Of this second."""
    dropped_bytes: int = 0


class LogRelay:
    """Passes lines on from ``open`` to ``close``, both of main's thread."""

    def __init__(self, descriptor: int = 2) -> None:
        """``descriptor``: where lines go."""
        self._descriptor = descriptor
        self._sources: dict[int, _Source] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._epoll = select.epoll()
        self._thread = threading.Thread(target=self._run, name="blockx-executor-logs", daemon=True)

    def start(self) -> None:
        """Begin to look. Call it when the fork server is up: it is started without threads."""
        self._thread.start()

    def open(self, executor_id: str) -> int:
        """A pipe for a new process; the end to write to, which the caller hands over and closes."""
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with self._lock:
            self._sources[reader] = _Source(executor_id)
        self._epoll.register(reader, select.EPOLLIN)
        return writer

    def close(self) -> None:
        """Pass the last words on. Call it when the executors are dead."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._look()
        for reader in list(self._sources):
            self._end(reader)
        self._epoll.close()

    def _run(self) -> None:
        looks = 0
        while not self._stopping.wait(LOOK_S):
            looks += 1
            if looks % LOOKS_PER_S == 0:
                self._begin_second()
            self._look()

    def _begin_second(self) -> None:
        with self._lock:
            for source in self._sources.values():
                source.left_bytes = BYTES_PER_S_MAX

    def _look(self) -> None:
        for reader, _ in self._epoll.poll(0):
            data = os.read(reader, LOOK_BYTES_MAX)
            if data:
                self._pass_on(self._sources[reader], data)
            else:
                self._end(reader)

    def _pass_on(self, source: _Source, data: bytes) -> None:
        whole, end, source.begun = (source.begun + data).rpartition(b"\n")
        if len(source.begun) > LINE_BYTES_MAX:
            self._drop(source, len(source.begun))
            source.begun = b""
        shown = b""
        # Nothing is split of what will be dropped: a flood of empty lines would keep main busy.
        while end and source.left_bytes > 0:
            line, end, whole = whole.partition(b"\n")
            text = f"{source.executor_id}: {printable(line)}\n".encode()
            source.left_bytes -= len(text)
            shown += text
        if end:
            self._drop(source, len(whole) + 1)
        with contextlib.suppress(OSError):  # nobody reads main's stderr any more
            _write_all(self._descriptor, shown)

    def _drop(self, source: _Source, count: int) -> None:
        if not source.dropped_bytes:
            logger.warning(
                "an executor logs more than is passed on, the rest is dropped",
                executor_id=source.executor_id,
                bytes_per_s_max=BYTES_PER_S_MAX,
            )
        source.dropped_bytes += count

    def _end(self, reader: int) -> None:
        source = self._sources[reader]
        if source.begun:
            self._pass_on(source, b"\n")
        if source.dropped_bytes:
            logger.warning(
                "of the log of an executor that has ended there was dropped",
                executor_id=source.executor_id,
                dropped_bytes=source.dropped_bytes,
            )
        self._epoll.unregister(reader)
        with self._lock:
            del self._sources[reader]
        os.close(reader)


def printable(line: bytes) -> str:
    """On one line of a terminal, and without power over it."""
    text = line.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
