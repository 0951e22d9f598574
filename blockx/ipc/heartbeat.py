"""The heartbeat table: its layout, and the executor's end of it. No numpy: executors import this.

One sealed memfd, one page (``SLOT_BYTES``) a slot, words of int64. An executor maps its own page
only and keeps no descriptor, so it can lie about itself alone. (Native code in user hands could
stretch the mapping with mremap; that is the sandbox's business.) A page has three blocks, each in
cache lines of its own and each with **one writer**:

    scheduler block   word  0   the executor's main thread, at every turn of its scheduler
    beat block        word 32   the executor's helper thread, every ``heartbeat_interval``
    control block     word 64   the main process

Word 0 of a block is its version: odd while its writer writes. A reader that sees an odd version, or
another one after its copy, tries again, a bounded number of times. Two writers under one version
would tear, so nobody else ever writes a block. Python has no memory fence: the order of stores is
that of x86-64; elsewhere a reader could, rarely, see a mixture of two neighbouring samples.

Times are ``time.monotonic_ns()``: one clock for all processes of the machine. Source: the design,
section 2.
"""

import array
import ctypes
import fcntl
import mmap
import os
from typing import Final, NamedTuple

SLOT_BYTES: Final = mmap.PAGESIZE
SLOT_WORDS: Final = SLOT_BYTES // 8

SCHEDULER_BLOCK: Final = 0
BEAT_BLOCK: Final = 32
CONTROL_BLOCK: Final = 64

VERSION: Final = 0
"""First word of every block."""

# Words of the scheduler block: indexes into ``HeartbeatRow.scheduler``, fields of SchedulerSample.
INCARNATION: Final = 1
PID: Final = 2
ATTACHED: Final = 3
RUNNABLE: Final = 4
INFLIGHT: Final = 5
AVAILABLE_CONTEXTS: Final = 6
LAST_ACTIVE_NS: Final = 7
RUNNING_CALL_SEQ: Final = 8
RUNNING_SINCE_NS: Final = 9
RUNNING_ATTEMPT_SEQ: Final = 10
STATE_RUNNABLE: Final = 11
"""First of the seven counts of calls by ``ExecState``."""
STATE_RUNNING: Final = 12
STATE_WAITING_IO: Final = 13
STATE_WAITING_SUBCALL: Final = 14
STATE_WAITING_FUNCTION_CODE: Final = 15
STATE_WAITING_SLEEP: Final = 16
STATE_DONE: Final = 17
STALE_RESUMES: Final = 18
STALE_CANCELS: Final = 19
FINISHED_CALLS: Final = 20
RSS_AT_STEP_START: Final = 21
SCHEDULER_WORDS: Final = 22

# Words of the beat block.
BEAT_NS: Final = 1
MEMORY_BYTES: Final = 2
CPU_PPM: Final = 3
CPU_US_TOTAL: Final = 4
BEAT_WORDS: Final = 5

# Words of the control block.
CANCEL_CALL_SEQ: Final = 1
CANCEL_ATTEMPT_SEQ: Final = 2
SLOT_EPOCH: Final = 3

READ_TRIES_MAX: Final = 8
"""Reads of one block before giving up, about 0.3 us each. All torn: the last good copy stands."""

_INCARNATION_MODULUS: Final = 2**61 - 1


class SchedulerSample(NamedTuple):
    """One consistent copy of a scheduler block; the fields are the words of the block, in order."""

    version: int
    """Even; grows with each write of one incarnation."""
    incarnation: int
    """``incarnation_number`` of the incarnation id."""
    pid: int
    attached: int
    """1 once the attach has been answered; 0 again once the executor retires: it takes no new root calls."""
    runnable: int
    inflight: int
    available_contexts: int
    last_active_ns: int
    """When the scheduler last came round; never later than the moment of the read."""
    running_call_seq: int
    """The call that computes now; 0: none. Set before user code is entered, cleared after it."""
    running_since_ns: int
    running_attempt_seq: int
    state_runnable: int
    state_running: int
    state_waiting_io: int
    state_waiting_subcall: int
    state_waiting_function_code: int
    state_waiting_sleep: int
    state_done: int
    stale_resumes: int
    """Resumes dropped as stale, since the incarnation started."""
    stale_cancels: int
    finished_calls: int
    """Calls ended, since the incarnation started."""
    rss_at_step_start: int
    """Bytes of memory before the running call was entered; 0: not measured."""

    @property
    def state_counts(self) -> tuple[int, ...]:
        """Calls by ``ExecState``, in its order."""
        return self[STATE_RUNNABLE : STATE_DONE + 1]


class BeatSample(NamedTuple):
    """One consistent copy of a beat block."""

    version: int
    """Even; grows with each beat of one incarnation."""
    beat_ns: int
    memory_bytes: int
    cpu_ppm: int
    """CPU used since the beat before, in millionths of one core."""
    cpu_us_total: int
    """CPU used since the process started, in microseconds."""


def incarnation_number(incarnation_id: str) -> int:
    """The number that stands for an incarnation id in the table: positive, equal in all processes."""
    return 1 + int.from_bytes(incarnation_id.encode("utf-8", "replace")) % _INCARNATION_MODULUS


def create_table_fd(slots: int) -> int:
    """A memfd with one zeroed page a slot, sealed so that nobody can shrink or grow it.

    Unsealed, an executor could truncate it, and main's next read would end main with SIGBUS. The
    caller owns the descriptor. It is close-on-exec.

    Raises:
        OSError: no memfd, or no memory for it.
    """
    assert slots > 0
    fd = os.memfd_create("blockx-heartbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, slots * SLOT_BYTES)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(fd)
        raise
    return fd


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


def _map_page(fd: int, slot: int) -> int:
    """Address of a slot's page, mapped shared.

    By libc, since Python's mmap object keeps a duplicate of the descriptor (until 3.13), through
    which user code could map the whole table.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, SLOT_BYTES, protection, mmap.MAP_SHARED, fd, slot * SLOT_BYTES)
    if address is None or address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping page {slot} of the heartbeat table: {os.strerror(number)}")
    return int(address)


class HeartbeatRow:
    """An executor's own page. The scheduler methods are for its main thread, ``write_beat`` for its
    helper thread; the two never touch one block.

    ``scheduler`` is the draft of the scheduler block: set words of it by the constants above
    (``row.scheduler[RUNNABLE] = 3``, 0.03 us), then publish all at once with ``write_scheduler``.
    """

    __slots__ = (
        "_address",
        "_beat_version",
        "_control",
        "_draft",
        "_scheduler_body",
        "_scheduler_version",
        "_words",
        "scheduler",
    )

    def __init__(self, fd: int, slot: int) -> None:
        """Map the page of ``slot``. ``fd`` is not kept: the caller closes it before user code runs.

        Raises:
            OSError: the page cannot be mapped, or the table has no such slot.
        """
        slots = os.fstat(fd).st_size // SLOT_BYTES
        # A page past the end can be mapped, but touching it is SIGBUS.
        if not 0 <= slot < slots:
            raise OSError(f"the heartbeat table has {slots} slots, no slot {slot}")
        self._address = _map_page(fd, slot)
        page = (ctypes.c_char * SLOT_BYTES).from_address(self._address)
        self._words = memoryview(page).cast("B").cast("q")
        self.scheduler = array.array("q", bytes(8 * SCHEDULER_WORDS))
        self._draft = memoryview(self.scheduler)[1:]
        self._scheduler_body = self._words[SCHEDULER_BLOCK + 1 : SCHEDULER_BLOCK + SCHEDULER_WORDS]
        self._control = self._words[CONTROL_BLOCK : CONTROL_BLOCK + 8]
        # Counted here, not read back: a write that was interrupted cannot leave the parity wrong.
        self._scheduler_version = 0
        self._beat_version = 0

    def write_scheduler(self) -> None:
        """Publish the draft. About 0.15 us."""
        words = self._words
        self._scheduler_version = version = self._scheduler_version + 2
        words[SCHEDULER_BLOCK] = version - 1
        self._scheduler_body[:] = self._draft
        words[SCHEDULER_BLOCK] = version

    def clear_running(self) -> None:
        """Publish that no call runs. About 0.1 us: a single word, old or new to a reader, needs no new version."""
        self.scheduler[RUNNING_CALL_SEQ] = 0
        self._words[SCHEDULER_BLOCK + RUNNING_CALL_SEQ] = 0

    def write_beat(
        self, *, beat_ns: int, memory_bytes: int, cpu_ppm: int, cpu_us_total: int
    ) -> None:
        """Publish a beat. Helper thread only."""
        words = self._words
        self._beat_version = version = self._beat_version + 2
        words[BEAT_BLOCK] = version - 1
        words[BEAT_BLOCK + BEAT_NS] = beat_ns
        words[BEAT_BLOCK + MEMORY_BYTES] = memory_bytes
        words[BEAT_BLOCK + CPU_PPM] = cpu_ppm
        words[BEAT_BLOCK + CPU_US_TOTAL] = cpu_us_total
        words[BEAT_BLOCK] = version

    def cancel_requested(self) -> int:
        """Sequence number of the call that main wants ended while it computes; 0: none. 0.05 us.

        Cheap enough for a signal handler; when it is the running call, ask ``is_cancelled``.
        """
        return self._control[CANCEL_CALL_SEQ]

    def is_cancelled(self, call_seq: int, attempt_seq: int) -> bool:
        """Whether main wants this attempt ended; an order for another attempt of the call is none."""
        control = self._control
        if control[CANCEL_CALL_SEQ] != call_seq:
            return False
        for _ in range(READ_TRIES_MAX):
            version = control[VERSION]
            order = (control[CANCEL_CALL_SEQ], control[CANCEL_ATTEMPT_SEQ])
            if version % 2 == 0 and control[VERSION] == version:
                return order == (call_seq, attempt_seq)
        return False  # main is writing just now; the next tick asks again

    def slot_epoch(self) -> int:
        """How many incarnations main has started in this slot, this one included."""
        return self._control[SLOT_EPOCH]

    def close(self) -> None:
        """Unmap the page. Twice is harmless; any other use afterwards raises ValueError."""
        if not self._address:
            return
        for view in (self._scheduler_body, self._control, self._words):
            view.release()
        address, self._address = self._address, 0
        _libc.munmap(address, SLOT_BYTES)
