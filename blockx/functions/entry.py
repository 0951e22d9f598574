"""What a function module is before it runs: its entry, its prelude, its compiled code.

Pure: text in, a name or a code object or a ``LoadError`` out; no user code runs here. Main uses it
to refuse a bad source before any call is sent, an executor to compile what it fetched, so that both
judge by the same rules. Called from any thread, one compilation at a time (Python's warning filters
are global, and compiling a user's file must not print his warnings into our log).

Source of the entry rule and the prelude: the specification, "User function programming model".
"""

import ast
import contextlib
import io
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from types import CodeType, MappingProxyType
from typing import Final

PRELUDE: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "json": ("json", ""),
        "math": ("math", ""),
        "Decimal": ("decimal", "Decimal"),
        "date": ("datetime", "date"),
        "datetime": ("datetime", "datetime"),
        "timedelta": ("datetime", "timedelta"),
        "timezone": ("datetime", "timezone"),
        "function": ("blockx.function", ""),
        "Block": ("blockx.sdk.blockdb", "Block"),
        "BlockTable": ("blockx.sdk.blockdb", "BlockTable"),
        "Table": ("blockx.sdk.blockdb", "Table"),
        "TimeTable": ("blockx.sdk.blockdb", "TimeTable"),
        "ChainState": ("blockx.sdk.leafage", "ChainState"),
    }
)
"""Names that a function has without importing them: name -> (module, attribute; empty: the module).

They are in its namespace before its first line runs, so whatever the source defines itself wins.
"""

USER_FILE_PREFIX: Final = "functions/"
"""Every user function's code has a file name beginning with this, and no other code does."""

_DIGEST_SHOWN: Final = 8
_TEXT_SHOWN: Final = 200
CODING: Final = re.compile(r"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", re.ASCII)
UTF8_NAMES: Final = frozenset({"utf-8", "utf8", "utf-8-sig", "utf_8", "u8", "ascii", "us-ascii"})
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_compile_lock = threading.Lock()


class LoadError(ValueError):
    """A source that cannot become a function; the text says where, what, and what to do.

    Ends the call as ``load_error``. The text begins with the name of the exception behind it.
    """


def user_file_name(function_id: str, digest: str) -> str:
    """The file name in tracebacks: readable, and unique for one source of one function."""
    return f"{USER_FILE_PREFIX}{function_id}.py#{digest[:_DIGEST_SHOWN]}"


def is_user_file(filename: str) -> bool:
    """Whether code with this file name is a user function's. Cheap enough for a signal handler."""
    return filename.startswith(USER_FILE_PREFIX)


def resolve_entry(function_id: str, source: str) -> str:
    """The name of the function to call in a module.

    The top-level def named like the last segment of the id; else ``def _``, or ``_ = some_def``;
    else the first def whose name has no leading underscore. An ``async def`` counts: what it
    returns is refused as a result, with a message about that.

    Raises:
        LoadError: the source does not parse, or it has no entry.
    """
    body = _parse(function_id, source).body
    names = [node.name for node in body if isinstance(node, _FunctionNode)]
    last_segment = function_id.rpartition("/")[2]
    if last_segment in names:
        return last_segment
    if "_" in names or any(_is_entry_alias(node, names) for node in body):
        return "_"
    for name in names:
        if not name.startswith("_"):
            return name
    raise LoadError(
        f'LoadError: function "{function_id}" has no entry: '
        f"write a top-level `def _(...)`{_or_named(last_segment)}"
    )


def compile_source(function_id: str, source: str, filename: str) -> CodeType:
    """Compile a whole module; line numbers are those of ``source``.

    Raises:
        LoadError: it does not compile.
    """
    _check_text(function_id, source)
    with quiet_compiler():
        try:
            return compile(source.removeprefix("\ufeff"), filename, "exec", dont_inherit=True)
        except COMPILE_ERRORS as error:
            raise _load_error(function_id, error) from None


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Around every use of the compiler: one thread at a time, and no warning of a user's file in our log."""
    with _compile_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def source_lines(source: str) -> list[str]:
    """The lines as the compiler counts them: only newlines end one, not a form feed or U+2028."""
    return io.StringIO(source.removeprefix("\ufeff"), newline=None).readlines()


COMPILE_ERRORS: Final = (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError)
"""ValueError: NUL or a lone surrogate; MemoryError and RecursionError: nested too deep."""


def _parse(function_id: str, source: str) -> ast.Module:
    _check_text(function_id, source)
    with quiet_compiler():
        try:
            return ast.parse(source.removeprefix("\ufeff"))
        except COMPILE_ERRORS as error:
            raise _load_error(function_id, error) from None


def _check_text(function_id: str, source: str) -> None:
    """Refuse what would mean one thing to Python's own file reader and another to us."""
    position = source.find("\0")
    if position >= 0:
        number = source.count("\n", 0, position) + 1
        raise LoadError(f"SyntaxError: a NUL byte ({_place(function_id, number)}); remove it")
    for line in source.split("\n", 2)[:2]:
        declared = CODING.match(line)
        if declared and declared[1].lower() not in UTF8_NAMES:
            raise LoadError(
                f"SyntaxError: the encoding {declared[1]} is declared ({_place(function_id, 1)}); "
                "function sources are UTF-8: save it as UTF-8 and remove the declaration"
            )


def _load_error(function_id: str, error: BaseException) -> LoadError:
    """The user's words for what the compiler said."""
    if isinstance(error, SyntaxError):
        place = _place(function_id, error.lineno, error.offset)
        text = (error.text or "").strip()[:_TEXT_SHOWN]
        shown = f": {text}" if text else ""
        return LoadError(f"{type(error).__name__}: {error.msg} ({place}){shown}")
    if isinstance(error, MemoryError | RecursionError):
        what = "nested too deep to compile; split the expression or the function"
    else:
        what = str(error)[:_TEXT_SHOWN]
    return LoadError(f"{type(error).__name__}: {what} ({_place(function_id)})")


def _place(function_id: str, line: int | None = None, column: int | None = None) -> str:
    place = f"{USER_FILE_PREFIX}{function_id}.py"
    if line:
        place += f", line {line}"
    if line and column and column > 0:
        place += f", column {column}"
    return place


def _is_entry_alias(node: ast.stmt, names: list[str]) -> bool:
    """Whether a statement is ``_ = some_def`` or ``_ = lambda ...``."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    else:
        return False
    if not any(isinstance(target, ast.Name) and target.id == "_" for target in targets):
        return False
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in names)


def _or_named(last_segment: str) -> str:
    return f" or `def {last_segment}(...)`" if last_segment.isidentifier() else ""
