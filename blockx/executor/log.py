"""The executor's own log: JSON lines on a descriptor that user code does not know of.

Any thread, never in a signal handler. Level from ``BLOCKX_LOG_LEVEL`` (debug, info, warning, error; default
warning), form from ``BLOCKX_LOG_FORMAT`` (json, the default, or text: one line as main writes them). A line
that cannot be written is dropped.
"""

import contextlib
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from blockx.ipc import exact_json

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
LEVEL_VARIABLE: Final = "BLOCKX_LOG_LEVEL"
FORMAT_VARIABLE: Final = "BLOCKX_LOG_FORMAT"
LINE_BYTES_MAX: Final = 16 * 1024
"""Longest line; texts are shortened to half of it before they are joined."""

_write = os.write
"""Bound before user code can replace it."""


class Log:
    """Writes lines with the executor's id in each."""

    def __init__(self, descriptor: int, executor_id: str, environ: Mapping[str, str]) -> None:
        self._descriptor = descriptor
        self._executor_id = executor_id
        self._as_text = environ.get(FORMAT_VARIABLE, "").lower() == "text"
        self._level = LEVELS.get(environ.get(LEVEL_VARIABLE, "").lower(), LEVELS["warning"])

    def fileno(self) -> int:
        """The descriptor it writes to."""
        return self._descriptor

    def is_shown(self, level: str) -> bool:
        """Whether lines of that level are written at all."""
        return LEVELS[level] >= self._level

    def info(self, sentence: str, **fields: str | int) -> None:
        """Something worth a line in normal operation."""
        self._write("info", sentence, fields)

    def warning(self, sentence: str, **fields: str | int) -> None:
        """Something an operator should look at."""
        self._write("warning", sentence, fields)

    def error(self, sentence: str, **fields: str | int) -> None:
        """The reason why this executor ends."""
        self._write("error", sentence, fields)

    def _write(self, level: str, sentence: str, fields: Mapping[str, str | int]) -> None:
        if LEVELS[level] < self._level:
            return
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "message": sentence,
            "executor_id": self._executor_id,
            "pid": os.getpid(),
            **{
                name: value[-LINE_BYTES_MAX // 2 :] if isinstance(value, str) else value
                for name, value in fields.items()
            },
        }
        with contextlib.suppress(OSError, ValueError):
            data = _text_line(line) if self._as_text else exact_json.encode(line)
            _write(self._descriptor, data[:LINE_BYTES_MAX] + b"\n")


def _text_line(line: dict[str, Any]) -> bytes:
    clock, level, sentence = line.pop("time")[11:23], line.pop("level"), line.pop("message")
    fields = "".join(f" {name}={_value_text(value)}" for name, value in line.items())
    return f"{clock} {level.upper():<7} {sentence}{fields}".encode("utf-8", "backslashreplace")


def _value_text(value: str | int) -> str:
    """One word stays as it is; anything else is quoted, so that a line stays one line."""
    text = str(value)
    plain = text.isprintable() and text and not any(mark in text for mark in " \"'=")
    return text if plain else repr(text)
