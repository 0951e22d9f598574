"""What executors write reaches main's stderr line by line, marked, harmless to a terminal, and only so much of it."""

import os
from collections.abc import Iterator
from typing import BinaryIO

import pytest
from loguru import logger

from blockx.supervisor.log_relay import (
    BYTES_PER_S_MAX,
    LINE_BYTES_MAX,
    LOOK_BYTES_MAX,
    LogRelay,
)


class Ends:
    """A relay, and the end of what it writes to."""

    def __init__(self) -> None:
        reader, self.writer = os.pipe()
        self.shown: BinaryIO = os.fdopen(reader, "rb")
        self.relay = LogRelay(self.writer)

    def finish(self) -> bytes:
        """Close the relay; all that it has passed on and was not read yet."""
        self.relay.close()
        os.close(self.writer)
        return self.shown.read()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.shown.close()


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    found: list[str] = []
    sink = logger.add(
        lambda message: found.append(f"{message.record['message']} {message.record['extra']}"),
        level="WARNING",
    )
    yield found
    logger.remove(sink)


def test_a_line_comes_while_its_writer_lives_and_says_who_wrote_it(ends: Ends) -> None:
    ends.relay.start()
    first, second = ends.relay.open("exec-0"), ends.relay.open("exec-1")
    os.write(first, b'{"level": "err')
    os.write(second, b"one\ntwo\n")
    assert {ends.shown.readline() for _ in range(2)} == {b"exec-1: one\n", b"exec-1: two\n"}
    os.write(first, 'or", "message": "é"}\n'.encode())
    assert ends.shown.readline() == 'exec-0: {"level": "error", "message": "é"}\n'.encode()
    os.write(first, b"last words")
    os.close(first)
    assert ends.shown.readline() == b"exec-0: last words\n"
    os.close(second)
    assert ends.finish() == b""


def test_control_characters_and_broken_text_are_shown_and_do_nothing(ends: Ends) -> None:
    pipe = ends.relay.open("exec-0")
    os.write(pipe, b"\x1b[2J\rexec-1: lies\x00\xff\n")
    os.write(pipe, "\u2028\u202e\n".encode())
    os.close(pipe)
    assert ends.finish() == (b"exec-0: \\x1b[2J\\rexec-1: lies\\x00\\xff\nexec-0: \\u2028\\u202e\n")


def test_a_writer_is_never_blocked_and_loses_what_a_pipe_does_not_hold(ends: Ends) -> None:
    pipe = ends.relay.open("exec-0")
    written = os.write(pipe, b"x" * (1 << 20))
    assert written < 1 << 20
    with pytest.raises(BlockingIOError):
        os.write(pipe, b"x")
    os.close(pipe)


@pytest.mark.parametrize("line", [b"x" * 1_023 + b"\n", b"\n", b"\x00" * 1_023 + b"\n"])
def test_a_flood_is_cut_to_the_bytes_of_a_second_and_told(line: bytes, warnings: list[str]) -> None:
    file = os.memfd_create("shown")
    relay = LogRelay(file)
    pipe, quiet = relay.open("exec-0"), relay.open("exec-1")
    os.write(quiet, b"heard\n")
    for _ in range(3):
        os.write(pipe, line * (LOOK_BYTES_MAX // len(line)))
        relay._look()
    os.close(pipe)
    os.close(quiet)
    relay.close()
    size = os.lseek(file, 0, os.SEEK_END)
    shown = os.pread(file, size, 0).splitlines()
    assert b"exec-1: heard" in shown
    assert BYTES_PER_S_MAX <= size <= BYTES_PER_S_MAX + 5 * len(line) + 100
    assert [text.partition(" {")[0] for text in warnings] == [
        "an executor logs more than is passed on, the rest is dropped",
        "of the log of an executor that has ended there was dropped",
    ]
    os.close(file)


def test_the_next_second_has_its_own_bytes(warnings: list[str]) -> None:
    file = os.memfd_create("shown")
    relay = LogRelay(file)
    pipe = relay.open("exec-0")
    line = b"x" * 1_023 + b"\n"
    for _ in range(2):
        os.write(pipe, line * (BYTES_PER_S_MAX // len(line)))
        relay._look()
        relay._begin_second()
    os.write(pipe, b"again\n")
    os.close(pipe)
    relay.close()
    shown = os.pread(file, os.lseek(file, 0, os.SEEK_END), 0).splitlines()
    assert shown[-1] == b"exec-0: again"
    assert len(shown) == 2 * (BYTES_PER_S_MAX // (len(line) + len("exec-0: ")) + 1) + 1
    os.close(file)


def test_a_line_without_an_end_is_not_kept(ends: Ends, warnings: list[str]) -> None:
    pipe = ends.relay.open("exec-0")
    os.write(pipe, b"x" * (LINE_BYTES_MAX + 1))
    ends.relay._look()
    os.write(pipe, b"rest\nwhole\n")
    os.close(pipe)
    assert ends.finish() == b"exec-0: rest\nexec-0: whole\n"
    assert f"'dropped_bytes': {LINE_BYTES_MAX + 1}" in warnings[1]
