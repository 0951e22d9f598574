"""Logging of the main process: where lines go and how they look.

Any thread of main may log. Executors do not import this module: they write JSON lines of their own.

A line is a fixed sentence plus fields: ``logger.info("task finished", task_id="t1", calls=8192)``,
``logger.bind(executor_id="exec-3")``. Never build the sentence from data: loguru formats the braces
in it. Fields are safe whatever they hold, since they never become part of a format string. One INFO
line for a task and one for each change of an executor; about a single call only DEBUG (a filtered
line costs 0.3 us, a written one 12 to 30 us).
"""

import sys
from typing import TYPE_CHECKING, TextIO

from loguru import logger

if TYPE_CHECKING:
    from loguru import Record

__all__ = ["logger", "set_up_logging"]

FIELD_CHARS_MAX = 500
"""Longest text of one field. Longer: cut, with a mark that says how much is missing."""


def set_up_logging(level: str, stream: TextIO | None = None) -> None:
    """Send lines of at least ``level`` (``log.level``) to ``stream``, by default stderr, alone.

    Call it once before the first thread starts; a second call replaces the first.
    """
    logger.remove()
    logger.add(
        stream or sys.stderr,
        level=level.upper(),
        format=_line_format,
        colorize=False,
        # Values of local variables may hold a node's url with its key.
        diagnose=False,
        backtrace=False,
    )


def _line_format(record: "Record") -> str:
    # loguru applies the returned text as a format string; so the fields go in as an argument of it.
    record["extra"]["_fields"] = _fields_text(record["extra"])
    return "{time:HH:mm:ss.SSS} {level:<7} {message}{extra[_fields]}\n{exception}"


def _fields_text(fields: dict[str, object]) -> str:
    return "".join(f" {name}={_value_text(value)}" for name, value in fields.items())


def _value_text(value: object) -> str:
    """One value on one line; quoted if it would not read as one word."""
    text = str(value)
    if len(text) > FIELD_CHARS_MAX:
        text = f"{text[:FIELD_CHARS_MAX]}... ({len(text) - FIELD_CHARS_MAX} more characters)"
    plain = text.isprintable() and text and not any(mark in text for mark in " \"'=")
    return text if plain else repr(text)
