"""What calls print, and what is to be said of a single call, as lines of the log with the call's fields.

Main thread, never in a signal handler. Debug calls get their output back and are not logged here. Of all
others the kept tail (``capture``) becomes one line at INFO when the call ends; below that level nothing is
done but one comparison a call. Bounded thrice: a call's tail by ``capture``, the lines by
``LINES_A_SECOND_MAX``, and what many calls of a function print alike is told once, with a count.
Identical means identical: lines that differ in a number are different lines.
"""

import time
from typing import Final

from blockx.executor.capture import CallOutput
from blockx.executor.context import ExecContext
from blockx.executor.log import Log

LINES_A_SECOND_MAX: Final = 50
"""Lines about the output of calls in one second. Full: calls are counted, and the next line says how many."""
FUNCTIONS_MAX: Final = 256
"""Functions whose last output is remembered for folding. Full: the memory starts anew."""
SECOND_NS: Final = 1_000_000_000

_monotonic_ns = time.monotonic_ns


class CallLog:
    """Writes to the executor's log on behalf of calls."""

    __slots__ = ("_is_told", "_last", "_lines", "_log", "_suppressed", "_window_ns")

    def __init__(self, log: Log) -> None:
        self._log = log
        self._is_told = log.is_shown("info")
        self._last: dict[str, tuple[str, int]] = {}
        """Function -> its last output, and how many further calls printed the same."""
        self._window_ns = 0
        self._lines = 0
        self._suppressed = 0

    def call_ended(self, context: ExecContext) -> None:
        """The call has its outcome: tell what it printed."""
        output = context.output
        if not self._is_told or context.debug or not isinstance(output, CallOutput):
            return
        text = fold(output.text())
        last, repeats = self._last.get(context.function_id, ("", 0))
        if text == last:
            self._last[context.function_id] = (text, repeats + 1)
            return
        if not text or not self._has_room():
            self._suppressed += bool(text)
            return
        if len(self._last) >= FUNCTIONS_MAX:
            self._last.clear()
        self._last[context.function_id] = (text, 0)
        fields: dict[str, str | int] = {**call_fields(context), "output": text}
        if repeats:
            fields["repeated_before"] = repeats
        if self._suppressed:
            fields["calls_not_shown"], self._suppressed = self._suppressed, 0
        self._log.info("call output", **fields)

    def blocked(self, context: ExecContext, place: str, wall_ms: int, cpu_ms: int) -> None:
        """A step of the call held the executor without computing."""
        self._log.warning(
            "a call blocked its executor and all calls in it: use reads of blockx, which suspend",
            **call_fields(context),
            place=place,
            held_ms=wall_ms,
            cpu_ms=cpu_ms,
        )

    def _has_room(self) -> bool:
        now_ns = _monotonic_ns()
        if now_ns - self._window_ns >= SECOND_NS:
            self._window_ns, self._lines = now_ns, 0
        self._lines += 1
        return self._lines <= LINES_A_SECOND_MAX


def call_fields(context: ExecContext) -> dict[str, str | int]:
    """What every line about a call carries."""
    return {
        "task_id": context.task_id,
        "call_id": context.call_id,
        "function_id": context.function_id,
        "attempt": context.attempt_seq,
    }


def fold(text: str) -> str:
    """Lines that follow each other and are identical become one with a count."""
    folded: list[str] = []
    count, last = 0, ""
    for line in [*text.splitlines(), None]:
        if line == last and count:
            count += 1
            continue
        if count:
            folded.append(last if count == 1 else f"{last} [{count} times]")
        if line is not None:
            count, last = 1, line
    return "\n".join(folded)
