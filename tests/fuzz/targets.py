"""What hostile bytes reach first, as functions of bytes that raise only for a bug.

Each takes any bytes and says by an AssertionError, or by an exception that nobody promised, what is wrong.
``test_targets.py`` runs them over random and remembered inputs, ``run.py`` under a coverage-guided fuzzer.
"""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from blockx.audit.auditor import audit_source
from blockx.errors import PeerProtocolError
from blockx.functions.entry import compile_source
from blockx.ipc import exact_json
from blockx.ipc.exact_json import InexactValueError, InvalidJsonError
from blockx.ipc.frames import FrameDecoder, encode_frame
from blockx.ipc.messages import (
    CallCompleted,
    CallCompletedPayload,
    CallWaiting,
    CallWaitingPayload,
    Raw,
    WaitKind,
    decode_executor_message,
    decode_main_message,
    encode_message,
)


def frames(data: bytes) -> None:
    """A stream from an executor: refused or cut into frames, however it was cut on its way."""
    whole, pieces = _cut(data, len(data) or 1), _cut(data, 1 + sum(data[:4]) % 7)
    assert whole == pieces, "the frames depend on how the stream was cut"
    for frame in whole:
        if isinstance(frame, tuple):
            messages(frame[0])


def _cut(data: bytes, step: int) -> list[object]:
    """The frames of a stream that comes ``step`` bytes at a time; "refused" ends it."""
    decoder, found = FrameDecoder(), list[object]()
    try:
        for start in range(0, len(data), step):
            found += [
                (bytes(body), sidecar) for body, sidecar in decoder.feed(data[start : start + step])
            ]
        decoder.eof()
    except PeerProtocolError:
        found.append("refused")
    # What stands before the refusal in one chunk may come with it or not.
    return found[-1:] if found[-1:] == ["refused"] else found


def messages(data: bytes) -> None:
    """One message of an executor or of main: refused, or it survives a round trip."""
    for decode in (decode_executor_message, decode_main_message):
        with contextlib.suppress(PeerProtocolError):
            message = decode(data)
            assert decode(encode_message(message)) == message


def json_text(data: bytes) -> None:
    """JSON as an author's file or a node brings it: refused, or exact and readable by everybody."""
    for function in (exact_json.raw_members, exact_json.raw_elements, exact_json.check_spliced):
        with contextlib.suppress(InvalidJsonError):
            function(data)
    try:
        value = exact_json.decode(data)
    except InvalidJsonError:
        return
    assert _same(value, json.loads(data)), "read otherwise than by the standard library"
    with contextlib.suppress(InexactValueError, InvalidJsonError):
        key = exact_json.canonical(data)
        assert exact_json.canonical(key) == key, "the canonical form is not canonical"
    _written(value)


def json_value(data: bytes) -> None:
    """A value as user code returns it: refused by name, or written so that it comes back."""
    _written(_Builder(data).value(0))


def audit(data: bytes) -> None:
    """A source as a stranger sends it: a verdict with readable findings, and what is accepted compiles."""
    source = data.decode("utf-8", "replace")
    verdict = audit_source(source)
    assert verdict == audit_source(source), "the verdict depends on more than the source"
    if verdict.accepted:
        compile_source("fuzzed", source, "functions/fuzzed.py#0")
    for finding in verdict.findings:
        assert finding.message.isprintable(), "a message carries what it quotes unescaped"
        assert finding.line >= 0
        assert finding.column >= 0


def _written(value: object) -> None:
    try:
        text = exact_json.encode(value)
    except InexactValueError:
        return
    assert b"\n" not in text
    exact_json.check_spliced(text)
    read = exact_json.decode(text)
    assert exact_json.encode(read) == text, "written and read, it is written otherwise"
    assert _same(read, json.loads(text))


class _Builder:
    """Any bytes as a Python value: each byte chooses what comes next."""

    DEPTH_MAX = 300
    SHARED_DEPTH_MAX = 2

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def _text(self) -> str:
        count = self._byte() % 8
        return "".join(chr((self._byte() << 8 | self._byte()) % 0x11000) for _ in range(count))

    def _integer(self) -> int:
        count = self._byte() % 40
        raw = self._data[self._at : self._at + count]
        self._at += count
        return int.from_bytes(raw, signed=True)

    def value(self, depth: int) -> Any:
        """The next value; past the end of the bytes all are None."""
        kind = self._byte() % 16 if self._at < len(self._data) else 0
        if depth > self.DEPTH_MAX:
            return None
        if kind < 10:
            return self._plain(kind)
        if kind == 10:
            return {self._text(): self.value(depth + 1) for _ in range(self._byte() % 5)}
        if kind == 11:
            return {self._plain(self._byte() % 10): self.value(depth + 1) for _ in range(3)}
        if kind == 12:
            return tuple(self.value(depth + 1) for _ in range(self._byte() % 5))
        if kind == 13:  # few levels: each is eight times the work
            shared = self.value(depth + 1)
            return [shared] * (self._byte() % 9 if depth < self.SHARED_DEPTH_MAX else 1)
        if kind == 14:
            own: list[object] = [self.value(depth + 1)]
            own.append(own)
            return own
        return [self.value(depth + 1) for _ in range(self._byte() % 5)]

    def _plain(self, kind: int) -> Any:
        makers: tuple[Callable[[], Any], ...] = (
            lambda: None,
            lambda: True,
            lambda: False,
            self._integer,
            self._text,
            lambda: self._integer() / 7.0 if self._at < 1_000 else 0.5,
            lambda: math.inf,
            lambda: math.nan,
            lambda: bytes([self._byte()]),
            lambda: 1 << 64,
        )
        try:
            return makers[kind]()
        except OverflowError:  # an integer too large for a float
            return -0.0


def _same(a: object, b: object) -> bool:
    """Equal in type too: 1, 1.0 and True differ."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "frames": frames,
    "messages": messages,
    "json_text": json_text,
    "json_value": json_value,
    "audit": audit,
}

SEEDS: Final = [
    encode_frame(
        CallCompleted(
            call_id="job/1",
            payload=CallCompletedPayload(attempt_seq=1, output=Raw(b'{"n":18446744073709551616}')),
        ),
        sidecar=b"raw",
    ),
    encode_frame(
        CallWaiting(
            call_id="job/1",
            request_id="req-1-1",
            payload=CallWaitingPayload(
                wait_kind=WaitKind.IO,
                task_id="job@1",
                attempt_seq=1,
                backend="rpc",
                operation="eth_call",
                params=Raw(b'[{"to":"0x00","data":"0x"},-1.5e3,true,null]'),
            ),
        )
    ),
]
"""Valid inputs to begin with; JSON starts four bytes later."""

_CORPUS: Final = Path(__file__).parents[1] / "audit" / "data" / "corpus.jsonl"
SOURCE_SEEDS: Final = [
    sample["source"].encode("utf-8", "replace")
    for sample in map(json.loads, _CORPUS.read_text().splitlines())
    if len(sample["source"]) < 2_000
]
"""Sources to begin with, for ``audit``: the samples of the corpus that are short."""
