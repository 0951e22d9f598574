"""Rows of a job on their way to a sink with columns, and back to ``failures`` if they do not fit.

Jobs thread only. The records of a job hold, for such an output, *groups*: a line ``R…`` for each call with rows
(its id, function, arguments and rows) and a line ``F…`` for each failed call (its line of ``failures``). Here
they arrive in list order, in pieces cut anywhere. The first ``SAMPLE_ROWS`` rows wait until the sink has its
columns. ``failures`` stays in list order, since both kinds of line pass through here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from blockx.ipc import exact_json
from blockx.jobs.sinks.base import SAMPLE_ROWS, Row, RowRefusedError, Sink

REFUSED_KIND = "row_refused"
"""Stands as ``error.kind`` in ``failures`` for a call of which a row did not fit."""


def group_of(call_id: bytes, function: bytes, args: bytes, rows: bytes) -> bytes:
    """The line for a call with rows; all four are exact JSON, ``rows`` a list of objects."""
    return b'R{"call_id":%b,"function":%b,"args":%b,"rows":%b}\n' % (call_id, function, args, rows)


class GroupWriter:
    """Takes groups, feeds the sink."""

    def __init__(
        self, open_sink: Callable[[list[Row]], Sink], write_failure: Callable[[bytes], None]
    ) -> None:
        """``open_sink``: called once, with the first rows."""
        self._open_sink = open_sink
        self._write_failure = write_failure
        self._sink: Sink | None = None
        self._sample: list[Row] = []
        self._waiting: list[Callable[[], None]] = []
        self._rest = b""
        self.refused_count = 0
        """Rows that did not fit."""
        self.first_refusal = ""
        """Call, row and field of the first one, and why."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes. Raises JobFailedError."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self._take(line)

    def flush_to_disk(self) -> None:
        """No more will come. Raises JobFailedError."""
        assert not self._rest, "a group was cut off"
        if self._sink is None:
            self._open()
        assert self._sink is not None
        self._sink.flush_to_disk()

    def rename(self) -> None:
        """Show the output. Raises JobFailedError."""
        assert self._sink is not None
        self._sink.rename()

    def discard(self) -> None:
        """Remove the output. Idempotent."""
        if self._sink is not None:
            self._sink.discard()

    def _take(self, line: bytes) -> None:
        action: Callable[[], None]
        if line[:1] == b"F":
            action = partial(self._write_failure, line[1:] + b"\n")
        else:
            group: Any = exact_json.decode(line[1:])
            action = partial(self._add, line[1:], group)
            if self._sink is None:
                self._sample += group["rows"][: SAMPLE_ROWS - len(self._sample)]
        if self._sink is not None:
            action()
            return
        self._waiting.append(action)
        # Failed calls wait in line, too; a job of nothing but failures must not pile them up.
        if len(self._sample) >= SAMPLE_ROWS or len(self._waiting) >= 10 * SAMPLE_ROWS:
            self._open()

    def _open(self) -> None:
        self._sink = self._open_sink(self._sample)
        waiting, self._waiting, self._sample = self._waiting, [], []
        for action in waiting:
            action()

    def _add(self, line: bytes, group: dict[str, Any]) -> None:
        assert self._sink is not None
        refusal = ""
        for number, row in enumerate(group["rows"]):
            try:
                self._sink.add(row)
            except RowRefusedError as error:
                self.refused_count += 1
                refusal = refusal or f"row {number}, {error}"
        if refusal:
            self.first_refusal = self.first_refusal or f"call {group['call_id']}, {refusal}"
            self._refuse(exact_json.raw_members(line), refusal)

    def _refuse(self, group: dict[str, bytes], refusal: str) -> None:
        error = {"kind": REFUSED_KIND, "message": refusal, "stack": "", "locals": {}}
        self._write_failure(
            b'{"function":%b,"args":%b,"call_id":%b,"error":%b}\n'
            % (group["function"], group["args"], group["call_id"], exact_json.encode(error))
        )
