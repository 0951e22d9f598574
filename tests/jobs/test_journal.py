"""What is in the journal is whole, or it is not there; whoever is killed, and whatever the disk does."""

import errno
import fcntl
import os
import threading

import pytest

from blockx.dispatcher.model import CallError, CallResult, Costs, Via
from blockx.errors import ErrorKind, UsageError
from blockx.jobs import journal as journal_module
from blockx.jobs.journal import PAGE_ENTRIES, Journal, PagedTable, check_free

RUN = {"format": 1, "job": "j"}


def result(index, *, failed=False, via=Via.RAN, attempts=1, moves=0):
    error = CallError(ErrorKind.USER_ERROR, "no") if failed else None
    return CallResult(
        index, f"j/{index}", "f", None if failed else b"{}", error, via, attempts, moves, Costs()
    )


def write(path, *results, rows=1, end=None):
    """One run that writes down some results, each with its index as bytes."""
    journal = Journal.open(path)
    journal.read_past()
    journal.begin(RUN, fresh=False)
    for one in results:
        data = b"%d" % one.index
        journal.add_result(one, rows, (data, b"", data * 2))
    journal.commit(wait=True)
    if end is not None:
        journal.end(end)
    journal.close()


def past_of(path):
    """(statuses by index, what was read of the past)."""
    journal = Journal.open(path)
    past = journal.read_past()
    statuses = {
        index: past.status(index)
        for index in range(past.index_end)
        if past.status(index) is not None
    }
    journal.close()
    return statuses, past


def test_a_record_comes_back_as_it_was(tmp_path):
    path = tmp_path / "j.journal"
    write(path, result(3, via=Via.CACHED), result(1, failed=True, attempts=3, moves=2), rows=7)
    journal = Journal.open(path)
    past = journal.read_past()
    assert journal.read(past.offsets[3]) == (3, True, Via.CACHED, 1, 0, 7, (b"3", b"", b"33"))
    assert journal.read(past.offsets[1]) == (1, False, Via.RAN, 3, 2, 7, (b"1", b"", b"11"))
    journal.close()
    assert (past.finished_count, past.failed_count, past.index_end) == (2, 1, 4)
    assert [past.status(index) for index in range(6)] == [None, False, None, True, None, None]


def test_of_two_records_of_one_call_the_later_counts(tmp_path):
    path = tmp_path / "j.journal"
    write(path, result(0, failed=True), result(1, failed=True))
    write(path, result(0))
    statuses, past = past_of(path)
    assert statuses == {0: True, 1: False}
    assert (past.finished_count, past.failed_count) == (2, 1)


def test_everything_that_results_depend_on_is_summed_up_over_runs(tmp_path):
    path = tmp_path / "j.journal"
    journal = Journal.open(path)
    journal.read_past()
    journal.begin(RUN, fresh=False)
    journal.add_function("f", "d1")
    journal.add_pins("dev", {"latest": [7, "0xa"], "5": [5, "0xb"]})
    journal.add_calls(0, b"12345678" * 3)
    journal.end({"why": "stopped by SIGINT"})
    journal.close()
    journal = Journal.open(path)
    journal.read_past()
    journal.begin({**RUN, "job": "again"}, fresh=False)
    journal.add_function("g", "d2")
    journal.add_pins("dev", {"6": [6, "0xc"]})
    journal.add_calls(3, b"abcdefgh")
    journal.commit(wait=True)
    digests = journal.call_digests()
    journal.close()
    _, past = past_of(path)
    assert past.functions == {"f": "d1", "g": "d2"}
    assert past.pins == {"dev": {"latest": [7, "0xa"], "5": [5, "0xb"], "6": [6, "0xc"]}}
    assert past.run == {**RUN, "job": "again"}
    assert past.end is None  # the last run was killed
    assert past.tallies == [{"why": "stopped by SIGINT"}]
    assert past.known_count == 4
    assert digests[3] == int.from_bytes(b"abcdefgh", "little")
    assert digests[2] == int.from_bytes(b"12345678", "little")
    assert digests[4] == 0


@pytest.mark.slow
def test_a_journal_cut_anywhere_keeps_a_prefix_of_its_calls(tmp_path):
    path = tmp_path / "j.journal"
    journal = Journal.open(path)
    journal.read_past()
    journal.begin(RUN, fresh=False)
    for index in range(5):
        journal.add_result(result(index), 1, (b"%d" % index, b"", b""))
        journal.commit()
    journal.close()
    whole = path.read_bytes()
    kept = set()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        statuses, past = past_of(path)
        assert statuses == dict.fromkeys(range(past.finished_count), True)
        kept.add(past.finished_count)
        write(path, result(9))  # it can be written on
        assert past_of(path)[0] == {**statuses, 9: True}
    assert kept == {0, 1, 2, 3, 4, 5}


def test_a_damaged_byte_drops_what_follows_and_says_how_much(tmp_path):
    path = tmp_path / "j.journal"
    write(path, result(0))
    valid = path.stat().st_size
    write(path, result(1))
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 1
    path.write_bytes(damaged)
    statuses, past = past_of(path)
    assert statuses == {0: True}
    assert 0 < past.dropped_bytes < len(damaged) - valid + 1


def test_a_journal_is_held_by_one_run_at_a_time(tmp_path):
    path = tmp_path / "j.journal"
    journal = Journal.open(path)
    for look in (Journal.open, check_free):
        with pytest.raises(UsageError, match="another run is at work on this job"):
            look(path)
    journal.close()
    check_free(path)
    check_free(tmp_path / "none.journal")
    assert not (tmp_path / "none.journal").exists()


def test_another_file_is_not_taken_for_a_journal(tmp_path):
    path = tmp_path / "j.journal"
    path.write_text("my notes")
    with pytest.raises(UsageError, match="no journal of this version of blockx; move the file"):
        Journal.open(path)
    assert path.read_text() == "my notes"


def test_a_full_disk_takes_the_half_written_block_back(tmp_path, monkeypatch):
    path = tmp_path / "j.journal"
    journal = Journal.open(path)
    journal.read_past()
    journal.begin(RUN, fresh=False)
    journal.add_result(result(0), 1, (b"0", b"", b""))
    journal.commit(wait=True)
    pwrite, calls = os.pwrite, []

    def half(fd, data, offset):
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, bytes(data)[:10], offset)

    size = path.stat().st_size
    monkeypatch.setattr(journal_module.os, "pwrite", half)
    journal.add_result(result(1), 1, (b"1" * 100, b"", b""))
    with pytest.raises(OSError, match="No space left"):
        journal.commit(wait=True)
    monkeypatch.undo()
    assert path.stat().st_size == size
    journal.add_result(result(2), 1, (b"2", b"", b""))
    with pytest.raises(OSError, match="No space left"):  # nothing more is taken, and the job ends
        journal.commit()
    journal.end({"why": "the disk was full"})
    journal.close()
    statuses, past = past_of(path)
    assert (statuses, past.end) == ({0: True}, {"why": "the disk was full"})


def test_an_error_of_the_disk_reaches_the_job(tmp_path, monkeypatch):
    journal = Journal.open(tmp_path / "j.journal")
    journal.read_past()
    journal.begin(RUN, fresh=False)

    def fail(_fd, _data, _offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(journal_module.os, "pwrite", fail)
    journal.add_result(result(0), 1, (b"0", b"", b""))
    with pytest.raises(OSError, match="Input/output error"):
        journal.commit(wait=True)
    journal.close()


def test_a_slow_disk_holds_the_job_up_before_memory_fills(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "UNWRITTEN_BYTES_MAX", 1_000)
    journal = Journal.open(tmp_path / "j.journal")
    journal.read_past()
    journal.begin(RUN, fresh=False)
    pwrite, may_go_on = os.pwrite, threading.Event()

    def slow(fd, data, offset):
        assert may_go_on.wait(20)
        return pwrite(fd, data, offset)

    monkeypatch.setattr(journal_module.os, "pwrite", slow)
    journal.add_result(result(0), 1, (b"0" * 900, b"", b""))
    journal.commit()  # fits
    journal.add_result(result(1), 1, (b"1" * 900, b"", b""))
    threading.Timer(0.05, may_go_on.set).start()
    journal.commit()  # waits for the first
    assert may_go_on.is_set()
    journal.close()
    assert past_of(tmp_path / "j.journal")[0] == {0: True, 1: True}


def test_results_are_due_soon_after_the_first_of_them(tmp_path):
    journal = Journal.open(tmp_path / "j.journal")
    journal.read_past()
    journal.begin(RUN, fresh=False)
    assert journal.wait_s() is None
    journal.add_result(result(0), 1, (b"0", b"", b""))
    assert 0 <= journal.wait_s() <= journal_module.COMMIT_MS / 1_000
    journal._due_ns = 1
    journal.commit_due()
    assert journal.wait_s() is None
    journal.close()  # what was handed over is written all the same
    assert past_of(tmp_path / "j.journal")[0] == {0: True}


def test_a_finished_journal_without_failures_is_small_and_keeps_the_numbers(tmp_path):
    path = tmp_path / "j.journal"
    write(path, *map(result, range(1_000)))
    journal = Journal.open(path)
    journal.read_past()
    journal.begin(RUN, fresh=False)
    journal.reduce(RUN, {"f": "d"}, {"finished": True, "report": {"ok": 1_000}})
    journal.close()
    statuses, past = past_of(path)
    assert (statuses, past.functions) == ({}, {"f": "d"})
    assert past.end == {"finished": True, "report": {"ok": 1_000}}
    assert path.stat().st_size < 1_000
    assert [file.name for file in tmp_path.iterdir()] == ["j.journal"]


def test_a_table_of_many_pages_holds_few_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "PAGES_MAX", 2)
    table = PagedTable(lambda: open_raw(tmp_path))
    for page in range(9):
        table[page * PAGE_ENTRIES + page] = page + 1
    assert len(table._pages) == 2
    assert [table[page * PAGE_ENTRIES + page] for page in range(9)] == list(range(1, 10))
    table[3] = 2**64 - 1
    assert [table[n] for n in (8 * PAGE_ENTRIES, 3, 0, 1)] == [0, 2**64 - 1, 1, 0]
    table.close()


def open_raw(folder):
    return (folder / "pages").open("w+b", buffering=0)


def test_a_write_returns_when_it_is_on_the_disk(tmp_path):
    journal = Journal.open(tmp_path / "j.journal")
    flags = fcntl.fcntl(journal._fd, fcntl.F_GETFL)
    assert flags & os.O_DSYNC
    journal.close()


def test_a_journal_that_is_replaced_before_it_is_locked_is_opened_again(tmp_path, monkeypatch):
    """A run that ends replaces the file: the lock must be on the one that the next run will open."""
    path = tmp_path / "j.journal"
    write(path, result(0))
    flock, locked = fcntl.flock, []

    def replace_then_lock(fd, how):
        if not locked:
            (tmp_path / "new").write_bytes(path.read_bytes())
            (tmp_path / "new").replace(path)
        locked.append(fd)
        flock(fd, how)

    monkeypatch.setattr(journal_module.fcntl, "flock", replace_then_lock)
    journal = Journal.open(path)
    monkeypatch.undo()
    assert len(locked) == 2
    with pytest.raises(UsageError, match="another run"):
        Journal.open(path)
    journal.close()
