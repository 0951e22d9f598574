"""Finished calls wait here for their turn: calls end in any order, outputs are in list order.

Jobs thread only. A finished call is a *record*: its bytes for each output, already formatted. The
record whose turn it is goes out at once; the others are held, and past ``memory_max_bytes`` they
all go to a temporary file without a name (it vanishes with the process). So memory stays level
however long the call in front takes: a settled stream batch costs a few numbers, only unsettled
ones (at most the credit window) cost something for each call.

Invariants: each index is put exactly once; what has gone out is a prefix of the list.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

Record = tuple[bytes, ...]
"""Bytes of one call for each output, in a fixed order; empty where it has none."""

BATCHES_MAX = 65_536
"""Stream batches held, settled ones included. Full: ``is_full``, and no further one is produced."""
_RECORD_OVERHEAD_BYTES = 120
_COPY_BYTES = 1 << 20


class _Region(NamedTuple):
    """Where a record, or a whole settled batch, stands in the file."""

    offset: int
    lengths: tuple[int, ...]
    """Bytes for each output, one after the other."""


class _Batch:
    """One stream batch on its way out."""

    __slots__ = ("count", "first_index", "missing", "records", "region", "written")

    def __init__(self, first_index: int, count: int) -> None:
        self.first_index = first_index
        self.count = count
        self.missing = count
        self.records: list[Record | _Region | None] = [None] * count
        self.region: _Region | None = None
        """Set once the settled batch is in the file as a whole; ``records`` is empty then."""
        self.written = 0
        """Records that have gone out; more than 0 only for the batch in front."""


class ReorderBuffer:
    """See the module. ``close`` it."""

    def __init__(
        self,
        outputs_count: int,
        memory_max_bytes: int,
        open_file: Callable[[], BinaryIO],
        write: Callable[[int, bytes], None],
    ) -> None:
        """``write``: takes bytes for one output; ``open_file``: makes the temporary file when it is
        needed."""
        self._outputs_count = outputs_count
        self._memory_max_bytes = memory_max_bytes
        self._open_file = open_file
        self._write = write
        self._file: BinaryIO | None = None
        self._file_end = 0
        self._at_end = False  # where the file's own position is
        self._in_file = 0  # regions in the file that have not gone out
        self._batches: deque[_Batch] = deque()
        self._unsettled: list[_Batch] = []
        self._starts: list[int] = []  # of the unsettled ones, for the search
        self._held_bytes = 0
        self.spilled_bytes = 0
        """Bytes ever written to the temporary file."""

    @property
    def is_empty(self) -> bool:
        """Everything has gone out."""
        return not self._batches

    @property
    def is_full(self) -> bool:
        """No further stream batch may be opened now."""
        return len(self._batches) >= BATCHES_MAX

    def awaits(self, index: int) -> bool:
        """The batch of this call is open, and its record has not been put."""
        at = bisect_right(self._starts, index) - 1
        if at < 0:
            return False
        batch = self._unsettled[at]
        slot = index - batch.first_index
        return batch.written <= slot < batch.count and batch.records[slot] is None

    def close(self) -> None:
        """Drop what is held, and the file."""
        self._batches.clear()
        if self._file is not None:
            self._file.close()

    def open_batch(self, first_index: int, count: int) -> None:
        """Expect ``count`` records from ``first_index``; batches come in list order."""
        batch = _Batch(first_index, count)
        self._batches.append(batch)
        self._unsettled.append(batch)
        self._starts.append(first_index)

    def put(self, index: int, record: Record) -> None:
        """Take the record of one call, and write what now has its turn.

        Raises:
            OSError: an output or the temporary file cannot be written.
        """
        at = bisect_right(self._starts, index) - 1
        batch = self._unsettled[at]
        slot = index - batch.first_index
        assert batch.written <= slot < batch.count, f"call {index} ended twice or was never opened"
        assert batch.records[slot] is None, f"call {index} ended twice"
        batch.missing -= 1
        if batch is self._batches[0] and slot == batch.written:
            self._write_record(record)
            batch.written += 1
            self._write_prefix(batch)
        else:
            self._hold(batch, slot, record)
        if not batch.missing:
            self._settle(at, batch)

    def _hold(self, batch: _Batch, slot: int, record: Record) -> None:
        batch.records[slot] = record
        self._held_bytes += sum(map(len, record)) + _RECORD_OVERHEAD_BYTES
        if self._held_bytes > self._memory_max_bytes:
            self._spill()

    def _settle(self, at: int, batch: _Batch) -> None:
        """All calls of a batch have ended."""
        del self._unsettled[at], self._starts[at]
        if batch is not self._batches[0]:
            if any(isinstance(record, _Region) for record in batch.records):
                self._spill_batch(batch)  # into one piece: a region for each call would pile up
            return
        while self._batches:
            front = self._batches[0]
            self._write_prefix(front)
            if front.missing:
                return
            self._batches.popleft()

    # ---- going out -------------------------------------------------------------------------------

    def _write_prefix(self, batch: _Batch) -> None:
        """Write the records of the batch in front as far as they have come."""
        if batch.region is not None:
            self._write_region(batch.region)
            batch.region, batch.written = None, batch.count
            return
        records = batch.records
        while batch.written < batch.count:
            record = records[batch.written]
            if record is None:
                return
            records[batch.written] = None
            batch.written += 1
            if isinstance(record, _Region):
                self._write_region(record)
            else:
                self._held_bytes -= sum(map(len, record)) + _RECORD_OVERHEAD_BYTES
                self._write_record(record)

    def _write_record(self, record: Record) -> None:
        write = self._write
        for output, data in enumerate(record):
            if data:
                write(output, data)

    def _write_region(self, region: _Region) -> None:
        offset = region.offset
        for output, length in enumerate(region.lengths):
            for piece in self._pieces(offset, length):
                self._write(output, piece)
            offset += length
        self._forget_region()

    # ---- the file --------------------------------------------------------------------------------

    def _spill(self) -> None:
        """Move everything that is held to the file."""
        for batch in self._batches:
            if batch.region is None and not batch.missing:
                self._spill_batch(batch)
            elif batch.missing:
                self._spill_records(batch)
        self._held_bytes = 0

    def _spill_batch(self, batch: _Batch) -> None:
        """Write a settled batch as one region: all of its first output, then all of its second,
        …"""
        lengths = []
        start = self._file_end
        for output in range(self._outputs_count):
            before = self._file_end
            for record in batch.records:
                self._append_part(record, output)
            lengths.append(self._file_end - before)
        for record in batch.records:
            if isinstance(record, _Region):
                self._in_file -= 1
            elif record is not None:
                self._held_bytes -= sum(map(len, record)) + _RECORD_OVERHEAD_BYTES
        batch.records, batch.region = [], _Region(start, tuple(lengths))
        self._in_file += 1

    def _append_part(self, record: Record | _Region | None, output: int) -> None:
        assert record is not None, "a settled batch has all of its records"
        if not isinstance(record, _Region):
            self._append(record[output])
            return
        offset = record.offset + sum(record.lengths[:output])
        for piece in self._pieces(offset, record.lengths[output]):
            self._append(piece)

    def _spill_records(self, batch: _Batch) -> None:
        for slot, record in enumerate(batch.records):
            if record is not None and not isinstance(record, _Region):
                region = _Region(self._file_end, tuple(map(len, record)))
                for data in record:
                    self._append(data)
                batch.records[slot] = region
                self._in_file += 1

    def _append(self, data: bytes) -> None:
        if self._file is None:
            self._file = self._open_file()
        if not self._at_end:  # a seek empties the file's buffer, so only after a read
            self._file.seek(self._file_end)
            self._at_end = True
        self._file.write(data)
        self._file_end += len(data)
        self.spilled_bytes += len(data)

    def _pieces(self, offset: int, length: int) -> Iterator[bytes]:
        """Bytes of the file, in pieces of at most ``_COPY_BYTES``."""
        file = self._file
        assert file is not None, "a region without a file"
        self._at_end = False
        while length:
            file.seek(offset)
            piece = file.read(min(length, _COPY_BYTES))
            if not piece:
                raise OSError(f"the temporary file of finished calls ends {length} bytes early")
            yield piece
            offset += len(piece)
            length -= len(piece)

    def _forget_region(self) -> None:
        """A region has gone out; once none is left, the file starts anew instead of growing for
        ever."""
        self._in_file -= 1
        if not self._in_file and self._file is not None:
            self._file.truncate(0)
            self._file_end = 0
            self._at_end = False
