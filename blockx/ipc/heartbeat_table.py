"""Main's end of the heartbeat table: all slots, mapped once. numpy: never imported by an executor.

Any thread of main may read (the actor at every turn, the supervisor when it reaps); the supervisor
starts epochs, the actor orders cancels. What stands in a row is hostile: a sample is taken whole,
within ranges, and not from the future, or not at all, and then the last good copy stands and ages.
A lying executor can thus spoil its own slot only, and not look alive for ever with one write.

Invariant: no sample of an incarnation is returned once ``next_epoch`` of its slot has returned.
Reads never block, sleep or raise; they try ``READ_TRIES_MAX`` times. An odd version that stays (the
writer died while writing) is a torn read like any other.
"""

import mmap
import threading
import time
from collections.abc import Callable
from operator import gt
from typing import Final

import numpy as np
import numpy.typing as npt

from blockx.ipc import heartbeat as layout
from blockx.ipc.heartbeat import READ_TRIES_MAX, BeatSample, SchedulerSample

_COUNT_MAX: Final = 2**31
"""Calls, contexts, attempts: an unlimited executor reports 2**30 available contexts."""
_NUMBER_MAX: Final = 2**62
"""Sequence numbers, versions, times in ns, microseconds."""
_PID_MAX: Final = 2**22
_BYTES_MAX: Final = 2**50
_CPU_PPM_MAX: Final = 10**10
"""Ten thousand cores."""
_VERSION_MASK: Final = 2**62 - 1
"""Keeps a version that an executor has spoilt from overflowing its word in main."""

_SCHEDULER_MAXIMA: Final = SchedulerSample(
    version=_NUMBER_MAX,
    incarnation=_NUMBER_MAX,
    pid=_PID_MAX,
    attached=1,
    runnable=_COUNT_MAX,
    inflight=_COUNT_MAX,
    available_contexts=_COUNT_MAX,
    last_active_ns=_NUMBER_MAX,
    running_call_seq=_NUMBER_MAX,
    running_since_ns=_NUMBER_MAX,
    running_attempt_seq=_COUNT_MAX,
    state_runnable=_COUNT_MAX,
    state_running=_COUNT_MAX,
    state_waiting_io=_COUNT_MAX,
    state_waiting_subcall=_COUNT_MAX,
    state_waiting_function_code=_COUNT_MAX,
    state_waiting_sleep=_COUNT_MAX,
    state_done=_COUNT_MAX,
    stale_resumes=_NUMBER_MAX,
    stale_cancels=_NUMBER_MAX,
    finished_calls=_NUMBER_MAX,
    rss_at_step_start=_BYTES_MAX,
)
_BEAT_MAXIMA: Final = BeatSample(
    version=_NUMBER_MAX,
    beat_ns=_NUMBER_MAX,
    memory_bytes=_BYTES_MAX,
    cpu_ppm=_CPU_PPM_MAX,
    cpu_us_total=_NUMBER_MAX,
)


class HeartbeatTable:
    """The whole table as main sees it. ``array``: a numpy view, int64, shape (slots, SLOT_WORDS).

    Any thread of main; ``close`` only when no other thread reads any more.
    """

    def __init__(
        self, fd: int, slots: int, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Map ``slots`` pages of ``fd``, which stays the caller's.

        Raises:
            ValueError: the table is smaller than that.
        """
        self.slots = slots
        self.refused_samples = [0] * slots
        """By slot: samples with values out of range or from the future."""
        self._clock_ns = clock_ns
        self._map = mmap.mmap(fd, slots * layout.SLOT_BYTES)
        self.array: npt.NDArray[np.int64] = np.frombuffer(self._map, np.int64).reshape(slots, -1)
        self._versions = self.array[:, layout.SCHEDULER_BLOCK + layout.VERSION]
        # One word of a memoryview costs 0.03 us, of a numpy array 0.05, and gives a Python int.
        self._words = memoryview(self._map).cast("q")
        # The count that main goes by; the copy in the page is the executor's, who could change it.
        self._epochs = [0] * slots
        self._last_scheduler: list[tuple[int, SchedulerSample | None]] = [(0, None)] * slots
        self._last_beat: list[tuple[int, BeatSample | None]] = [(0, None)] * slots
        self._refused_versions = [(0, 0)] * slots
        # The supervisor (next_epoch) and the actor (request_cancel) write the control block.
        self._control_lock = threading.Lock()
        self._turn_seen: tuple[list[int], list[int]] = ([], [])
        self._turn_samples: list[SchedulerSample | None] = []

    def scheduler(self, slot: int) -> SchedulerSample | None:
        """The newest good sample of a slot; None while its incarnation has none. 0.2-1.5 us."""
        epoch = self._epochs[slot]
        last_epoch, last = self._last_scheduler[slot]
        if last_epoch != epoch:
            last = None
        base = slot * layout.SLOT_WORDS + layout.SCHEDULER_BLOCK
        if last is not None and self._words[base] == last.version:
            return last
        block = self._copy(base, layout.SCHEDULER_WORDS)
        if block is None:
            return last
        if not _is_plausible(block, _SCHEDULER_MAXIMA, layout.LAST_ACTIVE_NS, self._clock_ns()):
            self._refuse(slot, base, block[0])
            return last
        sample = SchedulerSample._make(block)
        self._last_scheduler[slot] = (epoch, sample)
        return sample

    def beat(self, slot: int) -> BeatSample | None:
        """The newest good beat of a slot; None while its incarnation has none. 0.2-1 us."""
        epoch = self._epochs[slot]
        last_epoch, last = self._last_beat[slot]
        if last_epoch != epoch:
            last = None
        base = slot * layout.SLOT_WORDS + layout.BEAT_BLOCK
        if last is not None and self._words[base] == last.version:
            return last
        block = self._copy(base, layout.BEAT_WORDS)
        if block is None:
            return last
        if not _is_plausible(block, _BEAT_MAXIMA, layout.BEAT_NS, self._clock_ns()):
            self._refuse(slot, base, block[0])
            return last
        sample = BeatSample._make(block)
        self._last_beat[slot] = (epoch, sample)
        return sample

    def all_schedulers(self) -> list[SchedulerSample | None]:
        """``scheduler`` of every slot, for a turn of the event loop: one thread, do not keep the list.

        One numpy copy of all versions (about 0.6 us) finds the rows that changed; a turn in which
        none did costs no more.
        """
        # Epochs too: a new incarnation may have come to the very version that the old one had.
        seen = (self._versions.tolist(), self._epochs.copy())
        if seen != self._turn_seen:
            self._turn_samples = [self.scheduler(slot) for slot in range(self.slots)]
            self._turn_seen = seen
        return self._turn_samples

    def request_cancel(self, slot: int, call_seq: int, attempt_seq: int) -> None:
        """Ask the executor to end this attempt if it computes just now. One order a slot: the last.

        ``call_seq`` 0 takes an order back.
        """
        with self._control_lock:
            self._write_control(slot, call_seq, attempt_seq, self._epochs[slot])

    def next_epoch(self, slot: int) -> int:
        """Clear the row for a new incarnation; returns its epoch, counted from 1.

        Call it when the old process is reaped and the new one not started: the row has no writer.
        """
        with self._control_lock:
            epoch = self._epochs[slot] + 1
            self.array[slot, : layout.CONTROL_BLOCK] = 0
            self._write_control(slot, 0, 0, epoch)
            # After clearing, never before: a reader that is under way keeps what it read under
            # the old epoch, where nobody finds it.
            self._epochs[slot] = epoch
        return epoch

    def close(self) -> None:
        """Unmap. Twice is harmless; reading afterwards raises."""
        if self._map.closed:
            return
        self._words.release()
        self.array = self._versions = np.zeros((0, 0), np.int64)
        self._map.close()

    def _copy(self, base: int, count: int) -> list[int] | None:
        """An untorn copy of a block, or None if it was never written or kept changing."""
        words = self._words
        for _ in range(READ_TRIES_MAX):
            version = words[base]
            if version % 2 == 0:
                if version <= 0:
                    return None
                block = words[base : base + count].tolist()
                if words[base] == version == block[0]:
                    return block
        return None

    def _refuse(self, slot: int, base: int, version: int) -> None:
        """Count a bad sample once, however often it is read."""
        if self._refused_versions[slot] != (base, version):
            self._refused_versions[slot] = (base, version)
            self.refused_samples[slot] += 1

    def _write_control(self, slot: int, call_seq: int, attempt_seq: int, epoch: int) -> None:
        words, base = self._words, slot * layout.SLOT_WORDS + layout.CONTROL_BLOCK
        version = words[base] | 1  # whatever stands there: the executor could have changed it
        words[base] = version
        words[base + layout.CANCEL_CALL_SEQ] = call_seq
        words[base + layout.CANCEL_ATTEMPT_SEQ] = attempt_seq
        words[base + layout.SLOT_EPOCH] = epoch
        words[base] = version + 1 & _VERSION_MASK


def _is_plausible(block: list[int], maxima: tuple[int, ...], time_index: int, now_ns: int) -> bool:
    """Whether all words are in range and the one that is a time is not in the future."""
    return min(block) >= 0 and True not in map(gt, block, maxima) and block[time_index] <= now_ns
