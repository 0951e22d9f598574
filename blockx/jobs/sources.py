"""From a job's call list to prepared calls, in stream batches.

Jobs thread only. A list is streamed: never more than one line and one stream batch is held, so a
list of ten million calls costs what one of ten costs. Arguments are cut out of their line byte for
byte; no number is read and written again.

The law of a list (the design, section 6): a line is an object with the key ``args`` (``function``
optional where the job has one, other keys ignored), or, if the job has a function, any other JSON
value, which is the argument itself. A line that holds only white space is no call and is not
counted. Lines end at ``\\n`` and at nothing else; a byte order mark before the first line is
skipped.

Invariant: call ``index`` is the number of calls before it in the list, whether they are good or
not; a bad line becomes a rejected call with a place and a reason, and the rest of the list is
unharmed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from blockx.config import JobConfig, StreamBuildConfig
from blockx.dispatcher.model import CallError, CallSpec, FunctionRef
from blockx.errors import ErrorKind, UsageError
from blockx.functions.view import FunctionView
from blockx.ipc import exact_json
from blockx.ipc.frames import FRAME_BYTES_MAX

LINE_BYTES_MAX = FRAME_BYTES_MAX
"""Bytes of one line. Longer: the call is rejected and the line skipped without being held."""
ARGS_BYTES_MAX = FRAME_BYTES_MAX - 64 * 1024
"""Bytes of one call's arguments: they travel in one frame beside its other fields. Longer:
rejected."""
UNKNOWN_NAMES_MAX = 1_000
"""Names of missing functions whose message is kept. Full: forgotten, and worked out again."""

_WHITE_SPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_TEXT_SHOWN_CHARS = 60


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

    @property
    def count(self) -> int:
        """Calls of both kinds."""
        return len(self.calls) + len(self.rejected)


_Known = tuple[FunctionRef, bytes]
"""A function of the list that runs, and its digest as the key's beginning."""
_Line = tuple[int, bytes, str]
"""One line of a file (from 1) or inline call (from 0): its number, its bytes, or why it has none."""


class CallListSource:
    """A job's call list, read once from the beginning to the end. Close it."""

    def __init__(
        self, job: JobConfig, file: Path | None, view: FunctionView, limits: StreamBuildConfig
    ) -> None:
        """``file``: the list, or None if the calls stand in the configuration.

        Raises:
            UsageError: the file cannot be opened.
        """
        self._function_id = job.function
        self._view = view
        self._rows_max = limits.batch_max_rows
        self._args_bytes_max = limits.batch_max_args_bytes
        self._opened = None if file is None else _open(file)
        self._lines = _inline_lines(job) if self._opened is None else _file_lines(self._opened)
        self._index = 0
        self._name = job.name if file is None else file.name
        self._known: dict[str, _Known] = {}
        self._unknown: dict[str, CallError] = {}
        self.load_errors: dict[str, str] = {}
        """Functions of the list, met so far, that do not load -> why. Bounded by the view."""
        self.malformed_count = 0
        """Lines, met so far, that are no call at all."""

    def close(self) -> None:
        """Close the file."""
        if self._opened is not None:
            self._opened.close()

    def next_batch(self) -> StreamBatch | None:
        """The next calls; None at the end of the list. Blocking file reads.

        Raises:
            OSError: the file cannot be read on.
        """
        batch = StreamBatch(self._index, [], [])
        args_bytes = 0
        for number, raw, error in self._lines:
            call = self._prepare(number, raw, error)
            self._index += 1
            if isinstance(call, CallSpec):
                batch.calls.append(call)
                args_bytes += len(call.args)
            else:
                batch.rejected.append(call)
                args_bytes += len(raw)
            if (
                self._index - batch.first_index >= self._rows_max
                or args_bytes >= self._args_bytes_max
            ):
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
        if b"\r" in args:
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
        inline = self._opened is None
        place = f"job {self._name}, calls[{number}]" if inline else f"{self._name}:{number}"
        error = CallError(ErrorKind.INVALID_CALL, f"{place}: {what}")
        return RejectedCall(self._index, function_id, args, error)

    def _split(self, raw: bytes) -> tuple[str, bytes]:
        """(function id, positional arguments) of one line."""
        fields = exact_json.raw_members(raw) if raw[:1] == b"{" else {}
        if "args" not in fields:
            if not self._function_id:
                raise exact_json.InvalidJsonError(
                    f'expected {{"function": "...", "args": ...}}, got {_shortened(raw)};'
                    " a bare argument needs the job's key function"
                )
            return self._function_id, exact_json.positional(raw)
        function_id: Any = self._function_id
        if "function" in fields:
            function_id = exact_json.decode(fields["function"])
        if not isinstance(function_id, str) or not function_id:
            shown = _shortened(fields["function"]) if "function" in fields else "none"
            raise exact_json.InvalidJsonError(
                f"expected the name of a function as text, got {shown}"
            )
        return function_id, exact_json.positional(fields["args"])

    def _resolve(self, function_id: str) -> _Known | CallError:
        """The function as it was pinned, or why its calls end here."""
        error = self._unknown.get(function_id)
        if error is not None:
            return error
        pinned = self._view.get(function_id)
        if pinned is not None and pinned.error is None:
            ref = FunctionRef(function_id, pinned.digest, pinned.entry)
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


def _shortened(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace")
    return text if len(text) <= _TEXT_SHOWN_CHARS else f"{text[: _TEXT_SHOWN_CHARS - 3]}..."


def _inline_lines(job: JobConfig) -> Iterator[_Line]:
    for number, value in enumerate(job.calls):
        try:
            yield number, exact_json.encode(value), ""
        except ValueError as error:  # a text with half a surrogate pair
            yield number, b"", str(error)


def _open(file: Path) -> BinaryIO:
    try:
        return file.open("rb", buffering=1 << 18)
    except OSError as error:
        raise UsageError(f"{file}: the call list cannot be opened: {error.strerror}") from None


def _file_lines(opened: BinaryIO) -> Iterator[_Line]:
    """Lines that hold something, each checked to be UTF-8."""
    number = 0
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


def _skip_rest_of_line(opened: BinaryIO) -> None:
    while (piece := opened.readline(1 << 20)) and piece[-1:] != b"\n":
        pass


def _utf8_error(raw: bytes) -> str:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1}: {error.reason}"
    return ""
