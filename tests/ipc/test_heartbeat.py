"""The heartbeat table: no torn reads, no lies beyond a slot, nothing left of an old incarnation."""

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockx.ipc import heartbeat as layout
from blockx.ipc.heartbeat import (
    BeatSample,
    HeartbeatRow,
    SchedulerSample,
    create_table_fd,
    incarnation_number,
)
from blockx.ipc.heartbeat_table import HeartbeatTable

SLOTS = 3
NOW_NS = 1_000


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_table_fd(SLOTS)
    yield fd
    os.close(fd)


@pytest.fixture
def table(fd: int) -> Iterator[HeartbeatTable]:
    """A table whose clock stands at 1,000 ns."""
    table = HeartbeatTable(fd, SLOTS, clock_ns=lambda: NOW_NS)
    yield table
    table.close()


@pytest.fixture
def row(fd: int) -> Iterator[HeartbeatRow]:
    """Slot 1."""
    row = HeartbeatRow(fd, 1)
    yield row
    row.close()


def fill(row: HeartbeatRow, value: int) -> None:
    for word in range(1, layout.SCHEDULER_WORDS):
        row.scheduler[word] = value
    row.scheduler[layout.ATTACHED] = 1


def sample_of(version: int, value: int) -> SchedulerSample:
    return SchedulerSample._make([version, *[value] * 21])._replace(attached=1)


def test_what_an_executor_writes_is_what_main_reads(
    table: HeartbeatTable, row: HeartbeatRow
) -> None:
    for word in range(1, layout.SCHEDULER_WORDS):
        row.scheduler[word] = 100 + word
    row.scheduler[layout.ATTACHED] = 1
    row.write_scheduler()
    row.write_beat(beat_ns=999, memory_bytes=2**33, cpu_ppm=500_000, cpu_us_total=77)
    sample = SchedulerSample(
        version=2,
        incarnation=101,
        pid=102,
        attached=1,
        runnable=104,
        inflight=105,
        available_contexts=106,
        last_active_ns=107,
        running_call_seq=108,
        running_since_ns=109,
        running_attempt_seq=110,
        state_runnable=111,
        state_running=112,
        state_waiting_io=113,
        state_waiting_subcall=114,
        state_waiting_function_code=115,
        state_waiting_sleep=116,
        state_done=117,
        stale_resumes=118,
        stale_cancels=119,
        finished_calls=120,
        rss_at_step_start=121,
    )
    assert table.scheduler(1) == sample
    assert sample.state_counts == (111, 112, 113, 114, 115, 116, 117)
    assert table.beat(1) == BeatSample(2, 999, 2**33, 500_000, 77)
    assert table.all_schedulers() == [None, sample, None]
    assert (table.beat(0), table.beat(2)) == (None, None)


def test_the_words_of_a_block_are_the_fields_of_its_sample() -> None:
    for fields, names in [
        (SchedulerSample._fields, layout.SCHEDULER_WORDS),
        (BeatSample._fields, layout.BEAT_WORDS),
    ]:
        assert len(fields) == names
        for index, field in enumerate(fields):
            assert getattr(layout, field.upper()) == index


def test_blocks_share_no_cache_line_and_no_page() -> None:
    ends = [
        layout.SCHEDULER_BLOCK + layout.SCHEDULER_WORDS,
        layout.BEAT_BLOCK + layout.BEAT_WORDS,
        layout.CONTROL_BLOCK + layout.SLOT_EPOCH + 1,
    ]
    starts = [layout.BEAT_BLOCK, layout.CONTROL_BLOCK, layout.SLOT_WORDS]
    for end, start in zip(ends, starts, strict=True):
        assert end <= start
        assert start % 8 == 0
    assert layout.SLOT_BYTES % mmap.ALLOCATIONGRANULARITY == 0


def test_a_sample_changes_with_every_write_and_only_then(
    table: HeartbeatTable, row: HeartbeatRow
) -> None:
    fill(row, 5)
    row.write_scheduler()
    assert table.scheduler(1) == sample_of(2, 5)
    row.scheduler[layout.RUNNABLE] = 6
    assert table.scheduler(1) == sample_of(2, 5)
    row.write_scheduler()
    assert table.scheduler(1) == sample_of(4, 5)._replace(runnable=6)
    assert table.all_schedulers() == [None, table.scheduler(1), None]
    assert table.all_schedulers() is table.all_schedulers()


def test_a_writer_that_died_in_the_middle_leaves_the_last_good_copy(
    table: HeartbeatTable, row: HeartbeatRow
) -> None:
    fill(row, 5)
    row.write_scheduler()
    row.write_beat(beat_ns=1, memory_bytes=2, cpu_ppm=3, cpu_us_total=4)
    good = (table.scheduler(1), table.beat(1))
    words = table.array[1]
    words[[layout.SCHEDULER_BLOCK, layout.BEAT_BLOCK]] = 3
    words[[layout.SCHEDULER_BLOCK + layout.RUNNABLE, layout.BEAT_BLOCK + layout.BEAT_NS]] = 9
    for _ in range(2):
        assert (table.scheduler(1), table.beat(1)) == good
        assert table.all_schedulers() == [None, good[0], None]
    # A write that was interrupted does not spoil the next one.
    row.write_scheduler()
    row.write_beat(beat_ns=5, memory_bytes=2, cpu_ppm=3, cpu_us_total=4)
    assert table.all_schedulers() == [None, sample_of(4, 5), None]
    assert table.beat(1) == BeatSample(4, 5, 2, 3, 4)


def test_an_odd_version_before_any_good_sample_is_no_sample(table: HeartbeatTable) -> None:
    table.array[:, layout.SCHEDULER_BLOCK] = 1
    assert table.all_schedulers() == [None] * SLOTS


HOSTILE = [
    *[(word, -1) for word in range(1, layout.SCHEDULER_WORDS)],
    *[(word, 2**63 - 1) for word in range(1, layout.SCHEDULER_WORDS)],
    (layout.ATTACHED, 2),
    (layout.PID, 2**22 + 1),
    (layout.RUNNABLE, 2**31 + 1),
    (layout.RSS_AT_STEP_START, 2**50 + 1),
    (layout.LAST_ACTIVE_NS, NOW_NS + 1),
]


@pytest.mark.parametrize(("word", "lie"), HOSTILE)
def test_a_lie_out_of_range_or_from_the_future_is_counted_and_changes_nothing(
    table: HeartbeatTable, row: HeartbeatRow, word: int, lie: int
) -> None:
    fill(row, 5)
    row.write_scheduler()
    assert table.scheduler(1) == sample_of(2, 5)
    row.scheduler[word] = lie
    row.write_scheduler()
    assert [table.scheduler(1), table.scheduler(1)] == [sample_of(2, 5)] * 2
    assert table.all_schedulers()[1] == sample_of(2, 5)
    assert table.refused_samples == [0, 1, 0]
    fill(row, 6)
    row.write_scheduler()
    assert table.scheduler(1) == sample_of(6, 6)


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        ("beat_ns", -1), ("beat_ns", NOW_NS + 1), ("memory_bytes", 2**50 + 1), ("memory_bytes", -1),
        ("cpu_ppm", 10**10 + 1), ("cpu_us_total", -1), ("cpu_us_total", 2**63 - 1),
    ],
)  # fmt: skip
def test_a_lying_beat_is_counted_and_changes_nothing(
    table: HeartbeatTable, row: HeartbeatRow, name: str, lie: int
) -> None:
    truth = {"beat_ns": NOW_NS, "memory_bytes": 2, "cpu_ppm": 3, "cpu_us_total": 4}
    row.write_beat(**truth)
    good = BeatSample(version=2, **truth)
    assert table.beat(1) == good
    row.write_beat(**(truth | {name: lie}))
    assert [table.beat(1), table.beat(1)] == [good, good]
    assert table.refused_samples == [0, 1, 0]


@pytest.mark.parametrize("version", [-2, -(2**63), 2**63 - 2])
def test_a_lying_version_gives_no_sample(table: HeartbeatTable, version: int) -> None:
    table.array[1, layout.SCHEDULER_BLOCK] = version
    assert table.all_schedulers() == [None] * SLOTS


def test_a_new_epoch_shows_nothing_of_the_old_incarnation(table: HeartbeatTable, fd: int) -> None:
    assert [table.next_epoch(1), table.next_epoch(0), table.next_epoch(1)] == [1, 1, 2]
    old = HeartbeatRow(fd, 1)
    fill(old, 5)
    old.write_scheduler()
    old.write_beat(beat_ns=1, memory_bytes=2, cpu_ppm=3, cpu_us_total=4)
    table.request_cancel(1, 7, 1)
    assert table.all_schedulers()[1] is not None
    assert table.beat(1) is not None
    old.close()
    assert table.next_epoch(1) == 3
    assert (table.scheduler(1), table.beat(1)) == (None, None)
    new = HeartbeatRow(fd, 1)
    assert (new.slot_epoch(), new.cancel_requested()) == (3, 0)
    # The same version number as the old incarnation had is not taken for the old sample.
    fill(new, 6)
    new.write_scheduler()
    assert table.all_schedulers() == [None, sample_of(2, 6), None]
    new.close()
    table.next_epoch(1)
    assert table.all_schedulers() == [None] * SLOTS


def test_a_sample_read_while_the_epoch_changes_is_not_kept(fd: int) -> None:
    """The supervisor starts an epoch while the actor is in the middle of a read."""
    changes: list[int] = []

    def clock_ns() -> int:
        if not changes:
            changes.append(table.next_epoch(0))
        return NOW_NS

    table = HeartbeatTable(fd, SLOTS, clock_ns)
    row = HeartbeatRow(fd, 0)
    fill(row, 5)
    row.write_scheduler()
    assert table.scheduler(0) == sample_of(2, 5)
    assert changes == [1]
    assert table.scheduler(0) is None
    row.close()
    table.close()


def test_a_cancel_reaches_its_attempt_alone(table: HeartbeatTable, row: HeartbeatRow) -> None:
    assert row.cancel_requested() == 0
    table.request_cancel(1, 7, 2)
    assert row.cancel_requested() == 7
    assert [row.is_cancelled(7, 2), row.is_cancelled(7, 1), row.is_cancelled(8, 2)] == [
        True,
        False,
        False,
    ]
    table.request_cancel(1, 8, 1)
    assert [row.is_cancelled(7, 2), row.is_cancelled(8, 1)] == [False, True]
    table.request_cancel(1, 0, 0)
    assert (row.cancel_requested(), row.is_cancelled(8, 1)) == (0, False)
    # While main writes, the pair may be half old: nothing is cancelled on that ground.
    table.request_cancel(1, 8, 1)
    table.array[1, layout.CONTROL_BLOCK] += 1
    assert row.is_cancelled(8, 1) is False


@pytest.mark.parametrize("spoilt", [-1, -(2**63), 2**63 - 1, 1])
def test_an_executor_that_spoils_its_control_block_hurts_only_itself(
    table: HeartbeatTable, fd: int, spoilt: int
) -> None:
    table.next_epoch(1)
    table.array[1, layout.CONTROL_BLOCK : layout.CONTROL_BLOCK + 8] = spoilt
    table.request_cancel(1, 7, 1)
    row = HeartbeatRow(fd, 1)
    assert (row.is_cancelled(7, 1), row.slot_epoch()) == (True, 1)
    row.close()
    assert table.next_epoch(1) == 2


def test_the_table_can_be_neither_cut_nor_grown_nor_unsealed(fd: int) -> None:
    for size in (0, layout.SLOT_BYTES, SLOTS * layout.SLOT_BYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", SLOTS * layout.SLOT_BYTES)
    assert os.fstat(fd).st_size == SLOTS * layout.SLOT_BYTES
    assert os.get_inheritable(fd) is False


def test_a_row_is_its_own_page_and_keeps_no_descriptor(table: HeartbeatTable, fd: int) -> None:
    def open_files() -> list[str]:
        return sorted(os.listdir("/proc/self/fd"))

    before = open_files()
    row = HeartbeatRow(fd, 1)
    assert open_files() == before
    assert row._words.nbytes == layout.SLOT_BYTES
    fill(row, 5)
    row.write_scheduler()
    row.write_beat(beat_ns=1, memory_bytes=2, cpu_ppm=3, cpu_us_total=4)
    assert not table.array[[0, 2]].any()
    row.close()
    row.close()
    for use in (row.write_scheduler, row.cancel_requested, lambda: row.is_cancelled(1, 1)):
        with pytest.raises(ValueError, match="released"):
            use()


@pytest.mark.parametrize("slot", [-1, SLOTS, 2**40])
def test_a_row_that_the_table_has_not_is_refused(fd: int, slot: int) -> None:
    with pytest.raises(OSError, match=f"the heartbeat table has 3 slots, no slot {slot}"):
        HeartbeatRow(fd, slot)


def test_a_descriptor_that_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(bytes(layout.SLOT_BYTES))
    with path.open("rb") as read_only, pytest.raises(OSError, match="mapping page 0"):
        HeartbeatRow(read_only.fileno(), 0)


def test_closing_the_table_twice_is_harmless(fd: int) -> None:
    table = HeartbeatTable(fd, SLOTS)
    table.close()
    table.close()
    with pytest.raises(ValueError, match="released"):
        table.scheduler(0)


def test_incarnation_numbers_are_positive_differ_and_fit_a_word() -> None:
    ids = ["", "a", "b", "00000000", "0000000000000000", "ffffffff", "é" * 1000, "\ud800"]
    numbers = [incarnation_number(text) for text in ids]
    assert len(set(numbers)) == len(ids)
    assert all(0 < number <= 2**61 for number in numbers)


WRITER = """
import sys, threading, time
from blockx.ipc import heartbeat
row = heartbeat.HeartbeatRow(int(sys.argv[1]), 1)
stopped = threading.Event()
def beat():
    n = 0
    while not stopped.is_set():
        n += 1
        row.write_beat(beat_ns=n, memory_bytes=n, cpu_ppm=n, cpu_us_total=n)
        if n % 1000 == 0:
            time.sleep(0.001)
helper = threading.Thread(target=beat)
helper.start()
draft, n = row.scheduler, 0
print("ready", flush=True)
ended = threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()))
ended.start()
while not stopped.is_set():
    n += 1
    for word in range(1, heartbeat.SCHEDULER_WORDS):
        draft[word] = n
    draft[heartbeat.ATTACHED] = 1
    row.write_scheduler()
    if n % 1000 == 0:
        time.sleep(0.001)
"""


@pytest.mark.slow
def test_a_million_reads_beside_two_flat_out_writers_are_never_torn(fd: int) -> None:
    table = HeartbeatTable(fd, SLOTS)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(fd)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd],
    ) as writer:  # fmt: skip
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        torn: list[object] = []
        versions: set[int] = set()
        beat_versions: set[int] = set()
        reads = 0
        # On one core a new sample is seen only after each change of process: then read on.
        deadline = time.monotonic() + 60
        while reads < 1_000_000 or len(versions) < 200 or len(beat_versions) < 200:
            assert time.monotonic() < deadline, (reads, len(versions), len(beat_versions))
            reads += 2
            sample, beat = table.scheduler(1), table.beat(1)
            if sample is not None:
                versions.add(sample.version)
                if set(sample[4:]) != {sample.version // 2}:
                    torn.append(sample)
            if beat is not None:
                beat_versions.add(beat.version)
                if set(beat[1:]) != {beat.version // 2}:
                    torn.append(beat)
        assert writer.stdin is not None
        writer.stdin.close()
    assert torn == []
    assert table.refused_samples == [0, 0, 0]
    table.close()


def test_a_thread_that_starts_epochs_beside_a_reader_never_shows_an_old_one(fd: int) -> None:
    table = HeartbeatTable(fd, SLOTS)
    wrong, ended = [], threading.Event()
    floor = [0]

    def read() -> None:
        while not ended.is_set():
            at_least = floor[0]
            sample = table.scheduler(0)
            if sample is not None and sample.incarnation < at_least:
                wrong.append((at_least, sample))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 300):
        row = HeartbeatRow(fd, 0)
        row.scheduler[layout.INCARNATION] = number
        row.scheduler[layout.LAST_ACTIVE_NS] = time.monotonic_ns()
        for _ in range(3):
            row.write_scheduler()
        row.close()
        table.next_epoch(0)
        floor[0] = number + 1
    ended.set()
    reader.join(10)
    assert wrong == []
    table.close()
