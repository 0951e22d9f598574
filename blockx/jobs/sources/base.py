"""The contract of a source: lines of a call list, whatever they are made of.

Jobs thread only. A source yields *lines*: the exact JSON of one call each, as a file of call lists has them.
It is opened once for a run and read once from the beginning to the end; to look at a list before a run,
another one is opened. It holds one line at a time, so that a list of any length costs the same memory.

A source of one's own is a module with a class like those beside this file, and an entry point of the group
``blockx.sources`` that names it (see CONTRIBUTING.md).
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from blockx.errors import UsageError
from blockx.ipc import exact_json

Line = tuple[int, bytes, str]
"""Its number, for messages; the bytes of one JSON value; or, if that is empty, why there is none."""


class Source(Protocol):
    """One opened call list."""

    @property
    def name(self) -> str:
        """For messages: a file's name, or what the calls are made of."""

    def lines(self) -> Iterator[Line]:
        """All lines, once. Blocking reads.

        Raises:
            OSError, sqlite3.Error: it cannot be read on.
        """

    def place(self, number: int) -> str:
        """Where a line stands, for messages: ``calls.jsonl:12``."""

    def close(self) -> None:
        """Let go of files."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells one state of a call list from another, known before it is read line by line."""

    fingerprint: str
    """Equal: the same calls. Empty: not known without reading all of it."""
    count: int | None = None
    """Calls; None: not known."""


class TableRows(Protocol):
    """The table store, as far as a source reads it."""

    def rows(self, table: str) -> Iterator[bytes]:
        """The rows of a table in key order, exact JSON. Raises UsageError."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a source is opened with, beside its own keys."""

    job_name: str
    resolve: Callable[[str], Path]
    """An absolute path for one of the configuration."""
    tables: TableRows | None = None
    """None: there is no table store."""

    def where(self, key: str) -> str:
        """Begins a message about one of the keys below ``calls``."""
        return f"job {self.job_name}: calls.{key}"


Opener = Callable[[Mapping[str, Any], Place], Source]
"""Makes a source of the keys below ``calls``. Raises UsageError."""


def identity_of_spec(spec: object) -> Identity:
    """Of a list that is determined by what stands in the configuration."""
    return Identity(hashlib.sha256(exact_json.canonical(exact_json.encode(spec))).hexdigest())


def check_keys(
    spec: Mapping[str, Any],
    place: Place,
    required: Mapping[str, type],
    optional: Mapping[str, type],
) -> None:
    """The keys below ``calls`` are those of the source, each of its type. Raises UsageError."""
    for key, value in spec.items():
        kind = required.get(key) or optional.get(key)
        if kind is None:
            known = ", ".join([*required, *optional])
            raise UsageError(f"{place.where(key)}: unknown key; known keys: {known}")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            words = {str: "text", int: "a whole number", list: "a list", dict: "keys with values"}
            raise UsageError(f"{place.where(key)}: expected {words[kind]}, got {str(value)[:60]!r}")
    for key in required:
        if key not in spec:
            raise UsageError(f"job {place.job_name}: calls has no {key}; add it")
