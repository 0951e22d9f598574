"""Whatever order records come in and however little memory there is, they go out in list order."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockx.jobs.reorder import ReorderBuffer


class Outputs:
    """Two outputs, and the buffer in front of them."""

    def __init__(self, memory_max_bytes):
        self.data = [b"", b""]
        self.files = []
        self.buffer = ReorderBuffer(2, memory_max_bytes, self.open_file, self.write)

    def open_file(self):
        self.files.append(io.BytesIO())
        return self.files[-1]

    def write(self, output, data):
        self.data[output] += data


def record(index):
    """Two parts of different lengths, the second often empty."""
    return b"%d," % index * (index % 4 + 1), b"%d;" % index if index % 3 else b""


def joined(count):
    parts = list(map(record, range(count)))
    return [b"".join(p[0] for p in parts), b"".join(p[1] for p in parts)]


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    memory=st.sampled_from([0, 150, 400, 1_000, 1 << 20]),
    data=st.data(),
)
def test_any_order_of_ends_gives_list_order(sizes, memory, data):
    outputs = Outputs(memory)
    opened = 0
    waiting = []
    for size in [*sizes, 0]:
        # At any moment: some batches are open, and some of their calls end.
        if size:
            outputs.buffer.open_batch(opened, size)
            waiting += range(opened, opened + size)
            opened += size
        ending = data.draw(st.permutations(waiting))
        count = data.draw(st.integers(0, len(ending))) if size else len(ending)
        for index in ending[:count]:
            assert outputs.buffer.awaits(index)
            outputs.buffer.put(index, record(index))
            assert not outputs.buffer.awaits(index)
        waiting = ending[count:]
    assert outputs.buffer.is_empty
    assert outputs.data == joined(opened)
    # Nothing is held, and no space of the file is taken, or a long job would run out of both.
    assert outputs.buffer._held_bytes == 0
    assert [file.getvalue() for file in outputs.files if file.getvalue()] == []


def test_a_record_goes_out_as_soon_as_it_has_its_turn():
    outputs = Outputs(1 << 20)
    outputs.buffer.open_batch(0, 3)
    outputs.buffer.put(0, (b"0", b"a"))
    assert outputs.data == [b"0", b"a"]
    outputs.buffer.put(2, (b"2", b""))
    assert outputs.data == [b"0", b"a"]
    outputs.buffer.put(1, (b"1", b"b"))
    assert outputs.data == [b"012", b"ab"]
    assert outputs.files == []


def test_memory_stays_level_behind_a_call_that_does_not_end():
    outputs = Outputs(memory_max_bytes=10_000)
    outputs.buffer.open_batch(0, 1)
    held = []
    for batch in range(200):
        outputs.buffer.open_batch(1 + batch * 10, 10)
        for index in reversed(range(1 + batch * 10, 11 + batch * 10)):
            outputs.buffer.put(index, (b"x" * 100, b""))
            held.append(outputs.buffer._held_bytes)
    assert max(held) <= 10_000 + 220
    assert outputs.buffer.spilled_bytes >= 190_000
    # A settled batch is one region, not one for each call.
    assert all(not b.records for b in list(outputs.buffer._batches)[1:150])
    outputs.buffer.put(0, (b"0", b""))
    assert outputs.data == [b"0" + b"x" * 200_000, b""]
    assert outputs.files[0].getvalue() == b""


def test_a_settled_batch_costs_one_region_even_if_each_call_was_spilled_alone():
    outputs = Outputs(1_000)  # some are in the file, the last ones in memory
    outputs.buffer.open_batch(0, 1)
    outputs.buffer.open_batch(1, 100)
    for index in range(1, 101):
        outputs.buffer.put(index, record(index))
    [_front, settled] = outputs.buffer._batches
    assert settled.records == []
    assert settled.region is not None
    outputs.buffer.put(0, record(0))
    assert outputs.data == joined(101)


def test_the_file_is_used_again_from_its_beginning_once_it_has_been_read():
    outputs = Outputs(0)
    for start in range(0, 30, 3):
        outputs.buffer.open_batch(start, 3)
        for index in (start + 2, start + 1, start):
            outputs.buffer.put(index, record(index))
    assert outputs.data == joined(30)
    assert len(outputs.files) == 1
    assert outputs.buffer.spilled_bytes > 50
    assert outputs.files[0].getvalue() == b""


def test_a_call_that_ends_twice_is_our_bug():
    outputs = Outputs(1 << 20)
    outputs.buffer.open_batch(0, 3)
    for index in (0, 2):
        outputs.buffer.put(index, (b"", b""))
        with pytest.raises(AssertionError, match=f"call {index} ended twice"):
            outputs.buffer.put(index, (b"", b""))
