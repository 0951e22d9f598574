"""The functions of one task, as they were when it started: id -> digest, source, entry.

Everything is read at construction and never again, so edits of the folder take effect with the next
task. Immutable for the outside; the jobs thread and the actor thread both ask. A function is parsed
and compiled once, at the first question for it: a folder of thousands of files costs a run only
what it calls. A file that cannot be used never fails the folder: that function has an ``error``.

Imports only ``errors`` and its own package. No user code runs here.
"""

import difflib
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Final, Protocol

from blockx.errors import UsageError
from blockx.functions.entry import LoadError, compile_source, resolve_entry, user_file_name

FUNCTION_FILES_MAX: Final = 100_000
"""Files of one folder. More: the folder is refused."""
SOURCE_BYTES_MAX: Final = 1024 * 1024
"""Of one source. More: that function has an error."""
FOLDER_BYTES_MAX: Final = 512 * 1024 * 1024
"""Of all sources, held in memory during the task. More: the folder is refused."""

_SUGGESTIONS: Final = 3
_NEAR_IDS_MAX: Final = 5_000
"""Ids compared letter by letter for a suggestion; with more, only equal last segments count."""
_SUGGESTED_IDS_MAX: Final = 256
"""Unknown ids that get a suggestion; further ones get none, since each costs a search."""


@dataclass(frozen=True, slots=True)
class PinnedFunction:
    """One function of the folder."""

    function_id: str
    digest: str
    """SHA-256 of the source bytes, in hex; empty when they could not be read."""
    source: str
    entry: str
    """Name of the function to call; empty when there is an error."""
    error: str | None
    """Why calls of it end as ``load_error``; None: it compiles and has an entry."""
    audit: str = ""
    """What the judge gave it; empty: there is no judge."""


class Judge(Protocol):
    """Decides about sources before they are parsed here: the audit of the restricted mode."""

    def judge(self, function_id: str, source: str) -> tuple[str, str | None]:
        """What is to go with calls of the function, and why it is refused (None: it is not)."""


class FunctionView:
    """All functions below a folder, pinned.

    The id is the path without ``.py``, segments joined by ``/``. Folders and files whose names
    begin with a dot, ``__pycache__`` and files such as ``__init__.py`` are no functions. Symbolic
    links are followed, each folder once. With a ``judge`` all of them are judged at once, on the
    thread that makes the view, and what it refuses has an ``error`` and is never parsed here.

    Raises:
        UsageError: the folder cannot be read, or has too many or too large files.
    """

    def __init__(self, folder: Path, judge: Judge | None = None) -> None:
        self._judge = judge
        self._unresolved: dict[str, PinnedFunction] = {}
        self._resolved: dict[str, PinnedFunction] = {}
        self._sources: dict[str, str] = {}
        self._suggested: dict[str, list[str]] = {}
        self._lock = threading.Lock()
        self._read(folder)
        self._ids = sorted(self._unresolved)

    def get(self, function_id: str) -> PinnedFunction | None:
        """The function, compiled at the first question; None: there is no such file."""
        pinned = self._resolved.get(function_id)
        if pinned is not None:
            return pinned
        if function_id not in self._unresolved:
            return None
        with self._lock:
            pinned = self._resolved.get(function_id)
            if pinned is None:
                pinned = _resolve(self._unresolved[function_id])
                self._resolved[function_id] = pinned
        return pinned

    def source(self, digest: str) -> str | None:
        """The source with this digest, for an executor that asks; None: not of this task."""
        return self._sources.get(digest)

    def ids(self) -> list[str]:
        """All function ids, sorted."""
        return list(self._ids)

    def suggest(self, function_id: str) -> list[str]:
        """Ids that may have been meant, the best first; at most three."""
        with self._lock:
            near = self._suggested.get(function_id)
            if near is None:
                if len(self._suggested) >= _SUGGESTED_IDS_MAX:
                    return []
                near = self._suggested[function_id] = self._search_near(function_id)
            return list(near)

    def check_all(self) -> list[tuple[str, str]]:
        """Compile everything; what cannot be used, as (function_id, error), sorted by id."""
        checked = [self.get(function_id) for function_id in self._ids]
        return [(pin.function_id, pin.error) for pin in checked if pin is not None and pin.error]

    def _read(self, folder: Path) -> None:
        bytes_read = 0
        for path in python_files(folder):
            if len(self._unresolved) == FUNCTION_FILES_MAX:
                raise UsageError(
                    f"functions.path: {folder} has more than {FUNCTION_FILES_MAX:,} .py files; "
                    "name a folder that holds functions only"
                )
            pinned, size = _pin(_function_id(folder, path), path)
            if self._judge is not None and pinned.error is None:
                pinned = _judged(self._judge, pinned)
            bytes_read += size
            if bytes_read > FOLDER_BYTES_MAX:
                raise UsageError(
                    f"functions.path: the .py files of {folder} have more than "
                    f"{FOLDER_BYTES_MAX:,} bytes together; name a folder that holds functions only"
                )
            self._unresolved[pinned.function_id] = pinned
            if pinned.error is None:
                self._sources.setdefault(pinned.digest, pinned.source)

    def _search_near(self, function_id: str) -> list[str]:
        last_segment = function_id.rpartition("/")[2].lower()
        same = [i for i in self._ids if i.rpartition("/")[2].lower() == last_segment]
        if len(self._ids) > _NEAR_IDS_MAX:
            return same[:_SUGGESTIONS]
        close = difflib.get_close_matches(function_id[:200], self._ids, _SUGGESTIONS)
        return list(dict.fromkeys([*same, *close]))[:_SUGGESTIONS]


def python_files(folder: Path) -> Iterator[Path]:
    """The .py files below a folder, in a fixed order; a folder that links reach again, once."""
    if not folder.is_dir():
        raise UsageError(
            f"functions.path: {folder} is no folder; make it and put one .py file a function in it"
        )
    seen: set[tuple[int, int]] = set()
    for where, folders, files in os.walk(folder, followlinks=True, onerror=_raise_unreadable):
        place = os.stat(where)
        if (place.st_dev, place.st_ino) in seen:
            folders.clear()
            continue
        seen.add((place.st_dev, place.st_ino))
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(".") and not _is_dunder(name):
                yield Path(where, name)


def _raise_unreadable(error: OSError) -> None:
    raise UsageError(f"functions.path: {error.filename}: {error.strerror}") from None


def _is_dunder(name: str) -> bool:
    stem = name.removesuffix(".py")
    return stem.startswith("__") and stem.endswith("__")


def _function_id(folder: Path, path: Path) -> str:
    return "/".join(path.relative_to(folder).parts).removesuffix(".py")


def _pin(function_id: str, path: Path) -> tuple[PinnedFunction, int]:
    """Read one file: the function, and how many bytes it holds in memory."""
    if not _is_utf8(function_id):
        shown = os.fsencode(function_id).decode("utf-8", "replace")
        return _unusable(shown, "LoadError: the file's name is not UTF-8; rename it"), 0
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            return _unusable(function_id, f"LoadError: {path} is no regular file"), 0
        with path.open("rb") as file:
            data = file.read(SOURCE_BYTES_MAX + 1)
    except OSError as error:
        return _unusable(function_id, f"LoadError: {path}: {error.strerror or error}"), 0
    if len(data) > SOURCE_BYTES_MAX:
        what = f"LoadError: {path} has more than {SOURCE_BYTES_MAX:,} bytes; move data out of it"
        return _unusable(function_id, what), 0
    try:
        source = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"LoadError: {path}, line {line}: not UTF-8 ({error.reason}); save it as UTF-8"
        return _unusable(function_id, what), 0
    return PinnedFunction(function_id, sha256(data).hexdigest(), source, "", None), len(data)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unusable(function_id: str, error: str) -> PinnedFunction:
    return PinnedFunction(function_id, "", "", "", error)


def _judged(judge: Judge, pinned: PinnedFunction) -> PinnedFunction:
    audit, refusal = judge.judge(pinned.function_id, pinned.source)
    return replace(pinned, audit=audit, error=refusal)


def _resolve(pinned: PinnedFunction) -> PinnedFunction:
    """Find the entry and compile the whole: a ``return`` outside a function shows only then."""
    if pinned.error is not None:
        return pinned
    function_id, digest, source = pinned.function_id, pinned.digest, pinned.source
    try:
        entry = resolve_entry(function_id, source)
        compile_source(function_id, source, user_file_name(function_id, digest))
    except LoadError as error:
        return replace(pinned, error=str(error))
    return replace(pinned, entry=entry)
