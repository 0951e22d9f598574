"""Answers of one task by the bytes of their question, bounded in bytes. io thread; pure."""

from collections import OrderedDict
from typing import Final

ENTRY_BYTES: Final = 200
"""What an entry costs beside its bytes."""


class AnswerCache:
    """Full: the answer that was not asked for the longest goes."""

    __slots__ = ("_bytes", "_bytes_max", "_entries")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, question: bytes) -> bytes | None:
        """The answer, if it is here."""
        answer = self._entries.get(question)
        if answer is not None:
            self._entries.move_to_end(question)
        return answer

    def put(self, question: bytes, answer: bytes) -> None:
        """Keep an answer, unless the question has one."""
        if question in self._entries:
            return
        self._entries[question] = answer
        self._bytes += len(question) + len(answer) + ENTRY_BYTES
        while self._bytes > self._bytes_max:
            old_question, old_answer = self._entries.popitem(last=False)
            self._bytes -= len(old_question) + len(old_answer) + ENTRY_BYTES
