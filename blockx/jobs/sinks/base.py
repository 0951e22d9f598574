"""The contract of a sink: it takes rows in list order, and shows them once they are whole.

Jobs thread only. A sink is opened with the first rows of the job, so that it can infer columns. What it makes
gets its final name in ``rename``, after ``flush_to_disk`` of all outputs of the job; before that it stands
under an unfinished name or nowhere. A row that does not fit raises ``RowRefusedError`` and leaves the sink as
it was: the row goes to ``failures``, the job goes on.

A sink of one's own is a module with a class like those beside this file, and an entry point of the group
``blockx.sinks`` that names it (see CONTRIBUTING.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

SAMPLE_ROWS = 1_000
"""Rows that a sink sees before it decides on its columns; fewer if the job has fewer."""

Row = Mapping[str, Any]
"""One row as Python values; numbers are exact."""


class RowRefusedError(Exception):
    """A row does not fit. ``field`` is empty if it is the row as a whole."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"field {field}: {why}" if field else why)
        self.field = field


class Sink(Protocol):
    """One output on its way. Every method may raise ``JobFailedError``: it cannot be written."""

    def add(self, row: Row) -> None:
        """Take one row. Raises RowRefusedError."""

    def flush_to_disk(self) -> None:
        """Everything is on the disk afterwards; called once, no row follows."""

    def rename(self) -> None:
        """Show it under its final name; after ``flush_to_disk``."""

    def discard(self) -> None:
        """Remove what was written. Never fails; idempotent; after ``rename`` without effect."""


class TableWriter(Protocol):
    """The table store, as far as a sink writes it."""

    def key_of(self, table: str) -> Sequence[str] | None:
        """Key columns of a table, from the store or the configuration. None: not known."""

    def load(self, table: str, rows_file: Path, key: Sequence[str]) -> None:
        """Upsert the lines of a file, all or nothing, durable on return. Raises UsageError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkPlace:
    """What a sink is opened with."""

    target: str
    """What stands in the configuration: a file name, or what follows the prefix."""
    path: Path
    """The place of that file."""
    declared: Mapping[str, str]
    """The job's ``schema``: column -> kind. Empty: to be inferred."""
    sample: Sequence[Row]
    """The first rows of the job, at most ``SAMPLE_ROWS``; they are added afterwards like all others."""
    tables: TableWriter | None = None
    """None: there is no table store."""


Opener = Callable[[SinkPlace], Sink]
"""Makes a sink. Raises JobFailedError: it cannot be made."""
