"""From a job's call list to prepared calls, in stream batches.

Jobs thread only. A list is streamed: never more than one line and one stream batch is held, so a
list of ten million calls costs what one of ten costs. Arguments are cut out of their line byte for
byte; no number is read and written again. Where the lines come from is the business of ``sources``.

The law of a list (the design, section 6): a line is an object with the key ``args`` (``function``
optional where the job has one, other keys ignored), or, if the job has a function, any other JSON
value, which is the argument itself.

Invariant: call ``index`` is the number of calls before it in the list, whether they are good or
not; a bad line becomes a rejected call with a place and a reason, and the rest of the list is
unharmed.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from blockx.config import StreamBuildConfig
from blockx.dispatcher.model import CallError, CallSpec, FunctionRef
from blockx.errors import ErrorKind
from blockx.functions.view import FunctionView
from blockx.ipc import exact_json
from blockx.ipc.frames import FRAME_BYTES_MAX
from blockx.jobs.sources.base import Line, Source

ARGS_BYTES_MAX = FRAME_BYTES_MAX - 64 * 1024
"""Bytes of one call's arguments: they travel in one frame beside its other fields. Longer:
rejected."""
UNKNOWN_NAMES_MAX = 1_000
"""Names of missing functions whose message is kept. Full: forgotten, and worked out again."""
FIRST_ROWS_MAX = 512
"""Calls of a list's first batch: the executors begin while the next one is read, which takes 5 us a call."""
DIGEST_BYTES = 8
"""Of a call, for the journal: enough to see that a line has changed."""

READ_ERRORS = (OSError, sqlite3.Error)
"""What a source may raise while it is read."""

_TEXT_SHOWN_CHARS = 60
_RETURN = ord("\r")  # a number is found in bytes ten times as fast as bytes are
_SHA256_CHARS = 64


@dataclass(slots=True)
class RejectedCall:
    """A call that ends before it is dispatched."""

    index: int
    function_id: str
    """Empty if the line named none."""
    args: bytes | None
    """Positional arguments, a JSON list; None if the line is malformed."""
    error: CallError


@dataclass(slots=True)
class StreamBatch:
    """Consecutive calls of a list: ``count`` of them from ``first_index``, good and rejected
    ones."""

    first_index: int
    calls: list[CallSpec]
    rejected: list[RejectedCall]
    numbers: list[int] = field(default_factory=list)
    """Of its lines, for messages."""

    @property
    def count(self) -> int:
        """Calls of both kinds."""
        return len(self.calls) + len(self.rejected)


_Known = tuple[FunctionRef, bytes]
"""A function of the list that runs, and its digest as the key's beginning."""


class CallListSource:
    """A job's call list, read once from the beginning to the end. Close it."""

    def __init__(
        self, source: Source, function_id: str, view: FunctionView, limits: StreamBuildConfig
    ) -> None:
        """``function_id``: the default function of the list, or empty."""
        self._source = source
        self._function_id = function_id
        self._view = view
        self._rows_max = limits.batch_max_rows
        self._args_bytes_max = limits.batch_max_args_bytes
        self._lines: Iterator[Line] = source.lines()
        self._index = 0
        self._known: dict[str, _Known] = {}
        self._unknown: dict[str, CallError] = {}
        self.functions: dict[str, str] = {}
        """Functions that the list has named so far -> digest, or "" if there is none."""
        self.load_errors: dict[str, str] = {}
        """Functions of the list, met so far, that do not load -> why. Bounded by the view."""
        self.malformed_count = 0
        """Lines, met so far, that are no call at all."""

    def place(self, number: int) -> str:
        """Where a line of the list stands, for messages."""
        return self._source.place(number)

    def close(self) -> None:
        """Let go of the list."""
        self._source.close()

    def next_batch(self) -> StreamBatch | None:
        """The next calls; None at the end of the list. Blocking reads.

        Raises:
            READ_ERRORS: the list cannot be read on.
        """
        batch = StreamBatch(self._index, [], [])
        rows_max = self._rows_max if self._index else min(self._rows_max, FIRST_ROWS_MAX)
        args_bytes = 0
        for number, raw, error in self._lines:
            batch.numbers.append(number)
            call = self._prepare(number, raw, error)
            self._index += 1
            if isinstance(call, CallSpec):
                batch.calls.append(call)
                args_bytes += len(call.args)
            else:
                batch.rejected.append(call)
                args_bytes += len(raw)
            if self._index - batch.first_index >= rows_max or args_bytes >= self._args_bytes_max:
                break
        return batch if batch.count else None

    def _prepare(self, number: int, raw: bytes, error: str) -> CallSpec | RejectedCall:
        function_id = self._function_id
        try:
            if error:
                raise exact_json.InvalidJsonError(error)
            function_id, args = self._split(raw)
            canonical = exact_json.canonical(args)
        except exact_json.InvalidJsonError as invalid:
            self.malformed_count += 1
            return self._invalid(number, function_id, None, str(invalid))
        if _RETURN in args:
            # White space to JSON, but the end of a line for many readers of our files. Inside of a
            # text it is no JSON and was refused above: none of the replaced ones is content.
            args = args.replace(b"\r", b" ")
        if len(args) > ARGS_BYTES_MAX:
            what = f"arguments of {len(args):,} bytes, at most {ARGS_BYTES_MAX:,} can be passed"
            return self._invalid(number, function_id, args, what)
        known = self._known.get(function_id) or self._resolve(function_id)
        if isinstance(known, CallError):
            return RejectedCall(self._index, function_id, args, known)
        function, digest = known
        # The form of the key is that of the sub-calls' keys: both meet in one cache.
        return CallSpec(self._index, function, args, digest + canonical)

    def _invalid(
        self, number: int, function_id: str, args: bytes | None, what: str
    ) -> RejectedCall:
        error = CallError(ErrorKind.INVALID_CALL, f"{self._source.place(number)}: {what}")
        return RejectedCall(self._index, function_id, args, error)

    def _split(self, raw: bytes) -> tuple[str, bytes]:
        """(function id, positional arguments) of one line."""
        named, args = exact_json.call_line(raw) if raw[:1] == b"{" else (None, None)
        if args is None:
            if not self._function_id:
                raise exact_json.InvalidJsonError(
                    f'expected {{"function": "...", "args": ...}}, got {_shortened(raw)};'
                    " a bare argument needs the job's key function"
                )
            return self._function_id, exact_json.positional(raw)
        function_id: Any = self._function_id if named is None else exact_json.decode(named)
        if not isinstance(function_id, str) or not function_id:
            shown = "none" if named is None else _shortened(named)
            raise exact_json.InvalidJsonError(
                f"expected the name of a function as text, got {shown}"
            )
        return function_id, exact_json.positional(args)

    def _resolve(self, function_id: str) -> _Known | CallError:
        """The function as it was pinned, or why its calls end here."""
        error = self._unknown.get(function_id)
        if error is not None:
            return error
        pinned = self._view.get(function_id)
        if pinned is not None or len(self.functions) < UNKNOWN_NAMES_MAX:
            self.functions[function_id] = "" if pinned is None else pinned.digest
        if pinned is not None and pinned.error is None:
            ref = FunctionRef(function_id, pinned.digest, pinned.entry, pinned.audit)
            known = self._known[function_id] = (ref, pinned.digest.encode())
            return known
        if pinned is None:
            error = CallError(
                ErrorKind.FUNCTION_NOT_FOUND, missing_function(function_id, self._view)
            )
        else:
            self.load_errors[function_id] = pinned.error or ""
            error = CallError(ErrorKind.LOAD_ERROR, pinned.error or "")
        if len(self._unknown) >= UNKNOWN_NAMES_MAX:
            self._unknown.clear()
        self._unknown[function_id] = error
        return error


def missing_function(function_id: str, view: FunctionView) -> str:
    """What a user is told about a function that is not there."""
    near = view.suggest(function_id)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    name = _shortened(function_id.encode("utf-8", "replace"))
    return f"no function {name!r}{hint}"


def digests_of(batch: StreamBatch) -> bytes:
    """``DIGEST_BYTES`` for each call of a batch, in list order: of function and arguments.

    The source of a function is left out (its change is told apart from one of the list). 0.4 us a call.
    """
    begun: dict[str, blake2b] = {}
    digests = [
        _digest(begun, call.function.function_id, call.key[_SHA256_CHARS:]) for call in batch.calls
    ]
    if batch.rejected:
        digests += [_digest(begun, call.function_id, call.args or b"") for call in batch.rejected]
        indexes = [call.index for call in batch.calls] + [call.index for call in batch.rejected]
        digests = [digest for _, digest in sorted(zip(indexes, digests, strict=True))]
    return b"".join(digests)


def _digest(begun: dict[str, blake2b], function_id: str, args: bytes) -> bytes:
    """``begun``: hashes that have taken in a function's name. To copy one costs half of a new one."""
    name = begun.get(function_id)
    if name is None:
        name = begun[function_id] = blake2b(digest_size=DIGEST_BYTES)
        name.update(function_id.encode("utf-8", "replace") + b"\0")
    digest = name.copy()
    digest.update(args)
    return digest.digest()


def _shortened(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace")
    return text if len(text) <= _TEXT_SHOWN_CHARS else f"{text[: _TEXT_SHOWN_CHARS - 3]}..."
