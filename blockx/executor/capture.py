"""What is kept of a failed call and of what a call prints; bounded, and never failing itself.

Runs in the executor, in the failed call's greenlet and its guarded time: the text of an exception
and of local variables is made by user code (``__str__``, ``__repr__``), which may raise, print
megabytes, recurse or run for ever. Hence the law of this file: whatever user code does here becomes
text, except the framework's signals (``CallSignal``), which pass; every text is bounded before it
is joined; nothing kept refers to a user object; the tracebacks are cut off the exceptions, so that
no frame outlives the report.

What a call prints stays in a bounded tail of its own. ≠ It is not forwarded to the real stdout and
stderr: thousands of calls write at once, and a function that prints in a loop would fill the log.

What it needs of the standard library is bound at import, before user code can replace it.
"""

import contextlib
import io
import os
import sys
from collections import deque
from collections.abc import Callable, Container, Iterator
from linecache import getline
from types import FrameType, ModuleType, TracebackType
from typing import Any, Final, NamedTuple

from blockx.errors import CallSignal
from blockx.executor.loader import LoadFailedError
from blockx.functions.entry import PRELUDE, LoadError

REPORT_BYTES_MAX: Final = 64 * 1024
"""Message, stack and local variables together, in UTF-8; the sum of the limits below."""
_MESSAGE_BYTES_MAX: Final = 12 * 1024
_STACK_BYTES_MAX: Final = 28 * 1024
_LOCALS_BYTES_MAX: Final = 24 * 1024
_TITLE_BYTES_MAX: Final = 2 * 1024
"""Of the last line of a stack, which repeats the message."""
_EARLIER_TITLE_BYTES_MAX: Final = 500
_SOURCE_LINE_BYTES_MAX: Final = 300
_FILE_NAME_BYTES_MAX: Final = 200
_NAME_BYTES_MAX: Final = 100
_VALUE_CHARS_MAX: Final = 200
"""Of one local variable."""
_LOCALS_MAX: Final = 50
_FRAMES_HEAD: Final = 8
_FRAMES_TAIL: Final = 12
"""Frames shown of a deep stack: the outermost and the innermost ones."""
_EARLIER_FRAMES_HEAD: Final = 1
_EARLIER_FRAMES_TAIL: Final = 3
_CHAIN_MAX: Final = 4
"""Exceptions shown of a ``raise ... from`` chain, the last ones."""
_GROUP_MEMBERS_MAX: Final = 10
_ERRORS_CLEARED_MAX: Final = 1_000
_ITEMS_MAX: Final = 12
_DEPTH_MAX: Final = 3
_INT_BITS_SHOWN: Final = 2_048

TAIL_CHARS_MAX: Final = 8 * 1024
"""Of what a call prints, the last characters are kept."""
TAIL_CHARS_MAX_DEBUG: Final = 1024 * 1024
"""The same for a debug call: in practice all of it."""

_OUR_FOLDERS: Final = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    "blockx/",  # in tracebacks of compiled modules: the path that the compiler was given
)

# User classes may replace these attributes by properties; the base class's descriptors ask nobody.
# For the same reason types are compared by ``type(x)``: ``isinstance`` may ask ``x.__class__``.
_DESCRIPTORS: Final = vars(BaseException)
_get_cause: Callable[[BaseException], BaseException | None] = _DESCRIPTORS["__cause__"].__get__
_get_context: Callable[[BaseException], BaseException | None] = _DESCRIPTORS["__context__"].__get__
_is_context_hidden: Callable[[BaseException], bool] = _DESCRIPTORS["__suppress_context__"].__get__
_get_traceback: Callable[[BaseException], TracebackType | None]
_get_traceback = _DESCRIPTORS["__traceback__"].__get__
_set_traceback: Callable[[BaseException, None], None] = _DESCRIPTORS["__traceback__"].__set__
_get_args: Callable[[BaseException], tuple[Any, ...]] = _DESCRIPTORS["args"].__get__
_get_members: Callable[[BaseException], tuple[BaseException, ...]]
_get_members = vars(BaseExceptionGroup)["exceptions"].__get__
class_name: Final[Callable[[type], str]] = vars(type)["__name__"].__get__
"""Of the class itself: its metaclass may be the user's, with a ``__name__`` of its own."""

_SYS: Final = vars(sys)
"""Attributes of ``sys``; as a dict, since a call may have deleted one."""

UserFiles = Callable[[str], bool] | Container[str]


class FailureReport(NamedTuple):
    """A failure as text; at most ``REPORT_BYTES_MAX`` together, valid UTF-8."""

    message: str
    """Begins with the exception's class name: ``ValueError: text``."""
    stack: str
    """Python's traceback text: user frames and what they called in libraries, with source lines."""
    local_vars: dict[str, str]
    """Of the innermost user frame: name -> shortened repr."""


def failure_report(error: BaseException, is_user_file: UserFiles) -> FailureReport:
    """Put a failed call into words, and cut the tracebacks off its exceptions.

    ``is_user_file`` says which file names are user code: a function, or the names themselves.
    For a failed load the report is about the exception in the module's body.

    Raises:
        CallSignal: the call was told to stop while the ``__str__`` of an exception ran. (While the ``__repr__`` of
            a local variable did, only the variables are missing.)
    """
    is_user = is_user_file if callable(is_user_file) else is_user_file.__contains__
    cause = error
    if type(error) is LoadFailedError and error.error is not None:
        cause = error.error
    try:
        title = _title(cause)
        stack = _stack_text(cause, title, is_user)
        try:
            local_vars = _local_variables(cause, is_user)
        except CallSignal as signal:
            local_vars = {"...": f"not shown: {class_name(type(signal))} while their repr was made"}
    finally:
        _clear_tracebacks(error)
    return FailureReport(_cut(title, _MESSAGE_BYTES_MAX), stack, local_vars)


# --- text of user objects -----------------------------------------------------------------------


def _title(error: BaseException) -> str:
    """``ClassName: text``, not yet shortened."""
    if issubclass(type(error), LoadError):
        return str(error)
    name, text = class_name(type(error)), _guarded(_error_text, error)
    return f"{name}: {text}" if text else name


def _guarded(make: Callable[[Any], str], value: Any) -> str:
    """What ``make`` says of a user object; when user code in it fails, that it failed."""
    try:
        return make(value)
    except CallSignal:
        raise
    except BaseException as trouble:  # noqa: BLE001 - user code; whatever it raises becomes text
        return f"<no text: {class_name(type(trouble))} while it was made>"


def _error_text(error: BaseException) -> str:
    """``str(error)``, without the megabytes that an argument may have."""
    kind, arguments = type(error), _get_args(error)
    if kind.__str__ is BaseException.__str__:
        if len(arguments) == 1:
            return _argument_text(arguments[0])
        return _short(arguments, _TITLE_BYTES_MAX) if arguments else ""
    if kind.__str__ is KeyError.__str__ and len(arguments) == 1:
        return _short(arguments[0], _TITLE_BYTES_MAX)
    return str(error)


def _argument_text(argument: Any) -> str:
    if issubclass(type(argument), str):
        return str.__getitem__(argument, slice(None))
    if type(argument) in _SHORTENERS:
        return _short(argument, _TITLE_BYTES_MAX)
    return str(argument)


def _short(value: Any, chars_max: int, depth: int = 0) -> str:
    """A bounded repr: built-in containers item by item, everything else by its own ``__repr__``."""
    shortener = _SHORTENERS.get(type(value))
    if shortener is not None:
        return shortener(value, chars_max, depth)
    return _cut(_guarded(repr, value), chars_max)


def _short_text(value: Any, chars_max: int, _depth: int) -> str:
    if len(value) <= chars_max:
        return repr(value)
    return f"{value[:chars_max]!r}... [{len(value)} {_LENGTH_UNITS[type(value)]}]"


def _short_int(value: int, _chars_max: int, _depth: int) -> str:
    """Decimal text of a huge integer takes for ever, and Python refuses it past 4,300 digits."""
    if value.bit_length() <= _INT_BITS_SHOWN:
        return repr(value)
    return f"<int of {value.bit_length()} bits>"


def _short_plain(value: Any, _chars_max: int, _depth: int) -> str:
    return repr(value)


def _short_items(value: Any, chars_max: int, depth: int) -> str:
    if not value:
        return repr(value)
    opening, closing = _BRACKETS[type(value)]
    items = _some_items(value, chars_max // 4, depth + 1) if depth < _DEPTH_MAX else ["..."]
    comma = "," if type(value) is tuple and len(value) == 1 else ""
    return f"{opening}{', '.join(items)}{comma}{closing}"


def _some_items(value: Any, chars_max: int, depth: int) -> list[str]:
    pairs = type(value) is dict
    items = []
    for index, item in enumerate(value.items() if pairs else value):
        if index == _ITEMS_MAX:
            items.append(f"... [{len(value)} items]")
            break
        parts = item if pairs else (item,)
        items.append(": ".join([_short(part, chars_max, depth) for part in parts]))
    return items


_BRACKETS: Final[dict[type, tuple[str, str]]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    dict: ("{", "}"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}
_LENGTH_UNITS: Final[dict[type, str]] = {str: "characters", bytes: "bytes", bytearray: "bytes"}
_SHORTENERS: Final[dict[type, Callable[[Any, int, int], str]]] = {
    **dict.fromkeys(_LENGTH_UNITS, _short_text),
    **dict.fromkeys(_BRACKETS, _short_items),
    **dict.fromkeys((float, bool, complex, type(None)), _short_plain),
    int: _short_int,
}
"""Exact types only: a subclass may have a ``__repr__`` or ``__iter__`` of its own."""


def _cut(text: str, bytes_max: int) -> str:
    """At most ``bytes_max`` bytes of valid UTF-8; says so when it shortened."""
    length = str.__len__(text)
    data = str.__getitem__(text, slice(bytes_max + 1)).encode("utf-8", "backslashreplace")
    if len(data) <= bytes_max:
        return data.decode()
    mark = f"... [shortened, {length} characters]"
    return data[: max(0, bytes_max - len(mark))].decode("utf-8", "ignore") + mark


# --- stack and local variables ------------------------------------------------------------------


def _stack_text(error: BaseException, title: str, is_user: Callable[[str], bool]) -> str:
    """The traceback text of an exception and of those it came from, the oldest first."""
    sections = [
        _section(
            error, _cut(title, _TITLE_BYTES_MAX), is_user, head=_FRAMES_HEAD, tail=_FRAMES_TAIL
        )
    ]
    seen = {id(error)}
    while len(sections) < 2 * _CHAIN_MAX - 1:
        earlier, link = _earlier(error)
        if earlier is None or id(earlier) in seen:
            break
        seen.add(id(earlier))
        sections += [
            link,
            _section(
                earlier,
                _cut(_title(earlier), _EARLIER_TITLE_BYTES_MAX),
                is_user,
                head=_EARLIER_FRAMES_HEAD,
                tail=_EARLIER_FRAMES_TAIL,
            ),
        ]
        error = earlier
    return _cut("\n\n".join(reversed(sections)), _STACK_BYTES_MAX)


def _earlier(error: BaseException) -> tuple[BaseException | None, str]:
    cause = _get_cause(error)
    if cause is not None:
        return cause, "The above exception was the direct cause of the following exception:"
    if _is_context_hidden(error):
        return None, ""
    return (
        _get_context(error),
        "During handling of the above exception, another exception occurred:",
    )


def _section(
    error: BaseException, title: str, is_user: Callable[[str], bool], *, head: int, tail: int
) -> str:
    frames = _user_frames(error, is_user)
    shown = [_frame_text(*frame) for frame in frames[:head]]
    if len(frames) > head + tail:
        shown.append(f"  ... [{len(frames) - head - tail} frames not shown]")
    shown += [_frame_text(*frame) for frame in frames[max(head, len(frames) - tail) :]]
    if shown:
        shown.insert(0, "Traceback (most recent call last):")
    return "\n".join([*shown, title, *_member_titles(error)])


def _user_frames(
    error: BaseException, is_user: Callable[[str], bool]
) -> list[tuple[FrameType, int]]:
    """From the outermost user frame on, without the frames of blockx itself."""
    frames: list[tuple[FrameType, int]] = []
    for frame, line in _walk(error):
        filename = frame.f_code.co_filename
        if is_user(filename) or (frames and not filename.startswith(_OUR_FOLDERS)):
            frames.append((frame, line))
    return frames


def _walk(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    traceback = _get_traceback(error)
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _frame_text(frame: FrameType, line: int) -> str:
    code = frame.f_code
    text = (
        f'  File "{_cut(code.co_filename, _FILE_NAME_BYTES_MAX)}", line {line}, '
        f"in {_cut(code.co_name, _NAME_BYTES_MAX)}"
    )
    source = _cut(_guarded(_source_line, (frame, line)), _SOURCE_LINE_BYTES_MAX)
    return f"{text}\n    {source}" if source else text


def _source_line(place: tuple[FrameType, int]) -> str:
    frame, line = place
    return getline(frame.f_code.co_filename, line, frame.f_globals).strip()


def _member_titles(error: BaseException) -> list[str]:
    """One line for each of the first members of an exception group."""
    if not issubclass(type(error), BaseExceptionGroup):
        return []
    members = _get_members(error)
    titles = [
        f"  | {_cut(_title(member), _SOURCE_LINE_BYTES_MAX)}"
        for member in members[:_GROUP_MEMBERS_MAX]
    ]
    if len(members) > _GROUP_MEMBERS_MAX:
        titles.append(f"  | ... [{len(members)} exceptions]")
    return titles


def _local_variables(error: BaseException, is_user: Callable[[str], bool]) -> dict[str, str]:
    """Of the innermost user frame; at module level without what every module has."""
    innermost = None
    for frame, _line in _walk(error):
        if is_user(frame.f_code.co_filename):
            innermost = frame
    if innermost is None:
        return {}
    shown: dict[str, str] = {}
    bytes_left = _LOCALS_BYTES_MAX
    named = _named_values(innermost)
    for full_name, value in named:
        text = _cut(_guarded(_short_value, value), 4 * _VALUE_CHARS_MAX)
        name = _cut(full_name, _NAME_BYTES_MAX)
        bytes_left -= len(name.encode()) + len(text.encode())
        if len(shown) == _LOCALS_MAX or bytes_left < _NAME_BYTES_MAX:
            shown["..."] = f"{len(named) - len(shown)} more variables"
            break
        shown[name] = text
    return shown


def _short_value(value: Any) -> str:
    return _short(value, _VALUE_CHARS_MAX)


def _named_values(frame: FrameType) -> list[tuple[str, Any]]:
    try:
        items = list(frame.f_locals.items())
    except CallSignal:
        raise
    except BaseException:  # noqa: BLE001 - the namespace of a class body may be user code
        return []
    if frame.f_locals is frame.f_globals:
        items = [
            (name, value)
            for name, value in items
            if name not in PRELUDE and type(value) is not ModuleType
        ]
    return [(n, v) for n, v in items if type(n) is str and n.isidentifier() and n[:2] != "__"]


def _clear_tracebacks(error: BaseException) -> None:
    """Frames hold every local variable; a user's global may hold the exception for ever."""
    waiting, seen = deque([error]), {id(error)}
    while waiting and len(seen) < _ERRORS_CLEARED_MAX:
        current = waiting.popleft()
        _set_traceback(current, None)
        others = [_get_cause(current), _get_context(current)]
        if issubclass(type(current), BaseExceptionGroup):
            others += _get_members(current)[:_ERRORS_CLEARED_MAX]
        for other in others:
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                waiting.append(other)


# --- what calls print ---------------------------------------------------------------------------


class CallOutput:
    """The bounded tail of what one call printed; the runtime keeps one in each context."""

    __slots__ = ("_chars", "_chars_max", "_dropped", "_parts")

    def __init__(self, *, debug: bool = False) -> None:
        self._chars_max = TAIL_CHARS_MAX_DEBUG if debug else TAIL_CHARS_MAX
        self._parts: list[str] = []
        self._chars = 0
        self._dropped = 0

    def append(self, text: str) -> None:
        """Add printed text; the oldest goes when the limit is passed. Constant time a character."""
        if len(text) > self._chars_max:
            self._dropped += len(text) - self._chars_max
            text = text[-self._chars_max :]
        self._parts.append(text)
        self._chars += len(text)
        if self._chars > 2 * self._chars_max or len(self._parts) > self._chars_max:
            self._compact()

    def text(self) -> str:
        """What is kept, as valid UTF-8; the first line says if something was dropped."""
        self._compact()
        kept = "".join(self._parts).encode("utf-8", "backslashreplace").decode()
        if self._dropped:
            return f"[{self._dropped} characters before this were dropped]\n{kept}"
        return kept

    def _compact(self) -> None:
        text = "".join(self._parts)
        excess = len(text) - self._chars_max
        if excess > 0:
            self._dropped += excess
            text = text[excess:]
        self._parts = [text] if text else []
        self._chars = len(text)


class _CallBytes(io.RawIOBase):
    """``sys.stdout.buffer``: bytes written by a call are text of its output."""

    def __init__(self, stream: "_CallStream") -> None:
        super().__init__()
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(bytes(view).decode("utf-8", "replace"))
        return len(view)

    def close(self) -> None:
        """Shared by all calls: stays open."""


class _CallStream(io.TextIOBase):
    """Stands for ``sys.stdout`` or ``sys.stderr``; shared by all calls, so nobody can close it."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, lookup: Callable[[], CallOutput | None]) -> None:
        super().__init__()
        self._lookup = lookup
        self.buffer = _CallBytes(self)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        output = self._lookup()
        if output is not None:
            output.append(str.__getitem__(text, slice(None)))
        return str.__len__(text)

    def writable(self) -> bool:
        return True

    def reconfigure(self, **_settings: Any) -> None:
        """Accepted and ignored: there is nothing to configure."""

    def close(self) -> None:
        """Shared by all calls: stays open."""


class OutputCapture:
    """Gives each call its own ``sys.stdout`` and ``sys.stderr``. Main thread of the executor.

    ``lookup`` answers whose output is written now; None (between calls, in a foreign thread):
    dropped. A call that replaced ``sys.stdout`` and then waits shares the replacement with the
    calls that run meanwhile, as in any process: the module ``sys`` is one.
    """

    __slots__ = ("_stderr", "_stdout")

    def __init__(self, lookup: Callable[[], CallOutput | None]) -> None:
        self._stdout = _CallStream(lookup)
        self._stderr = _CallStream(lookup)

    def restore(self) -> None:
        """Put our streams in place if a call replaced them; cheap, for the start of each call."""
        if _SYS.get("stdout") is not self._stdout:
            _SYS["stdout"] = self._stdout
        if _SYS.get("stderr") is not self._stderr:
            _SYS["stderr"] = self._stderr


def install(lookup: Callable[[], CallOutput | None]) -> OutputCapture:
    """Capture from now on what calls print."""
    capture = OutputCapture(lookup)
    capture.restore()
    return capture


def silence_descriptors() -> int:
    """Send descriptors 1 and 2 to nowhere; returns a private copy of the old 2 for our own log.

    What C code and child processes of a call write there is dropped, so that no call can fill the
    log or forge a line of it. Call once, before any user code.
    """
    private = _write_only_copy(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    return private


def _write_only_copy(descriptor: int) -> int:
    """A copy through which a terminal cannot be read: user code would see what its owner types.

    Other files are opened for writing only, as a rule, and must share the position in them.
    """
    if os.isatty(descriptor):
        with contextlib.suppress(OSError):  # not ours to open: somebody else's terminal
            flags = os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{descriptor}", flags)
    return os.dup(descriptor)
