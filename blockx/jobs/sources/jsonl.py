"""A call list in a file of JSON lines, or in the configuration itself.

Jobs thread only. A line that holds only white space is no call and is not counted. Lines end at ``\\n`` and at
nothing else; a byte order mark before the first line is skipped.
"""

import hashlib
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from blockx.errors import UsageError
from blockx.ipc import exact_json
from blockx.ipc.frames import FRAME_BYTES_MAX
from blockx.jobs.sources.base import Identity, Line, identity_of_spec

LINE_BYTES_MAX = FRAME_BYTES_MAX
"""Bytes of one line. Longer: the call is rejected and the line skipped without being held."""

_WHITE_SPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 20
_BLANK_LINE = re.compile(rb"\n[ \t\r]*(?=\n)")


class JsonlSource:
    """One file."""

    def __init__(self, file: Path) -> None:
        """Raises UsageError: it cannot be opened."""
        self.name = file.name
        self._opened = open_list(file)

    def place(self, number: int) -> str:
        """``calls.jsonl:12``, from 1."""
        return f"{self.name}:{number}"

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def lines(self) -> Iterator[Line]:
        """Lines that hold something, each checked to be UTF-8."""
        opened, number = self._opened, 0
        while raw := opened.readline(LINE_BYTES_MAX + 1):
            number += 1
            if number == 1:
                raw = raw.removeprefix(_BOM)
            if len(raw) > LINE_BYTES_MAX and raw[-1:] != b"\n":
                _skip_rest_of_line(opened)
                yield number, b"", f"a line of more than {LINE_BYTES_MAX:,} bytes"
                continue
            raw = raw.strip(_WHITE_SPACE)
            if raw:
                yield number, raw, "" if raw.isascii() else _utf8_error(raw)


class InlineSource:
    """The calls that stand in the configuration."""

    def __init__(self, job_name: str, calls: Sequence[Any]) -> None:
        self.name = f"job {job_name}"
        self._calls = calls

    def place(self, number: int) -> str:
        """``job balances, calls[3]``, from 0."""
        return f"{self.name}, calls[{number}]"

    def close(self) -> None:
        """Nothing is open."""

    def lines(self) -> Iterator[Line]:
        """One for each entry."""
        for number, value in enumerate(self._calls):
            try:
                yield number, exact_json.encode(value), ""
            except ValueError as error:  # a text with half a surrogate pair
                yield number, b"", str(error)


def identity_of_inline(calls: Sequence[Any]) -> Identity:
    """Of calls in the configuration."""
    try:
        return Identity(identity_of_spec(calls).fingerprint, len(calls))
    except ValueError:  # a text with half a surrogate pair: compared call by call
        return Identity("", len(calls))


def identity_of_file(file: Path, *, count_lines: bool = True) -> Identity:
    """Of a file by its content: about 1 s for a gigabyte. A pipe has none, it can be read only once.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            return Identity("")
        digest, count, tail = hashlib.sha256(), 0, b"\n"
        with file.open("rb", buffering=0) as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
                if count_lines:
                    chunk = tail + chunk
                    count += chunk.count(b"\n", 1) - _blank_lines(chunk)
                    # Whether the line over the seam holds something is all there is to know of it.
                    rest = chunk[chunk.rfind(b"\n") :].strip(_WHITE_SPACE)
                    tail = b"\nx" if rest else b"\n"
    except OSError as error:
        raise UsageError(f"{file}: the call list cannot be opened: {error.strerror}") from None
    count += tail != b"\n"
    return Identity(digest.hexdigest(), count if count_lines else None)


def _blank_lines(chunk: bytes) -> int:
    """Lines of white space alone. The pattern takes 0.2 us a line, so it is asked only where there may be one."""
    may_be_one = any(chunk.find(b"\n%c" % space) >= 0 for space in _WHITE_SPACE)
    return len(_BLANK_LINE.findall(chunk)) if may_be_one else 0


def open_list(file: Path) -> BinaryIO:
    """Open a call list. Raises UsageError."""
    try:
        return file.open("rb", buffering=1 << 18)
    except OSError as error:
        raise UsageError(f"{file}: the call list cannot be opened: {error.strerror}") from None


def _skip_rest_of_line(opened: BinaryIO) -> None:
    while (piece := opened.readline(1 << 20)) and piece[-1:] != b"\n":
        pass


def _utf8_error(raw: bytes) -> str:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1}: {error.reason}"
    return ""
