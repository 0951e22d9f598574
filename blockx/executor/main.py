"""An executor process from its start to its end; ``run`` is the entry of a forkserver child.

Main thread: everything that touches calls, greenlets and the socket. Helper threads: with a heartbeat row
one that writes the beat block and nothing else, with tracing one that exports spans. Order of the start:
leave the parent's world (session, signals, descriptors), map the row and forget its descriptor, give up
what it does not need (``confine``: stage A), connect, load what tracing needs, start the helper threads, in a
sandbox lose most system calls (stage B), attach; user code comes after all of that. It ends by itself when
the connection does, always by ``os._exit``: threads and exit handlers that calls left behind must not keep
it alive.

Exit codes: 0 the connection ended, SIGTERM, or it was retired; 1 main broke the protocol or could not be
reached; 3 our bug (the story is in the log).
"""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any, Final, NoReturn, cast

import setproctitle

from blockx.errors import PeerProtocolError, UsageError
from blockx.executor import capture, confine, descriptors, vitals
from blockx.executor.call_log import CallLog
from blockx.executor.loader import Loader, code_cache_entries
from blockx.executor.log import Log
from blockx.executor.memory import GC_OBJECTS, abi_cache_entries
from blockx.executor.runtime import ExecutorRuntime
from blockx.executor.session import UdsSession
from blockx.executor.tracing import Settings, start_tracer
from blockx.executor.vitals import Vitals
from blockx.ipc.heartbeat import HeartbeatRow
from blockx.ipc.launch import ExecutorLaunch

RUNTIME_VARIABLE: Final = "BLOCKX_EXECUTOR_RUNTIME"
"""Set to 1: the sign for libraries that they run in an executor (the specification)."""

RETIRED_S_MAX: Final = 5.0
"""A retired executor without calls waits so long for main to replace it; then it ends by itself."""

_EXIT_PEER: Final = 1
_EXIT_BUG: Final = 3
_PR_SET_PDEATHSIG: Final = 1
_MS_PER_S: Final = 1_000
_libc = ctypes.CDLL(None, use_errno=True)
_exit = os._exit
"""Kept: user code may replace ``os._exit``."""


def run(
    launch: ExecutorLaunch, heartbeat: object | None, log_pipe: object | None = None
) -> NoReturn:
    """Be the executor of ``launch``; does not return.

    ``heartbeat``: the heartbeat table's descriptor as a ``multiprocessing.reduction.DupFd``, or None for
    an executor that sends Heartbeat frames. ``log_pipe``: the same of where its log goes; None: to
    descriptor 2 as it is.
    """
    code = _EXIT_BUG
    if log_pipe is not None:
        confine.become_standard_error(log_pipe)
    log = Log(2, launch.executor_id, os.environ)
    try:
        tracing = Settings.from_environment(os.environ)  # its path counts from the folder left now
        _leave_parent(launch.executor_id)
        row = None if heartbeat is None else _map_row(heartbeat, launch.slot_index)
        log = Log(capture.silence_descriptors(), launch.executor_id, os.environ)
        code = _serve(launch, row, log, tracing)
    except (OSError, PeerProtocolError, UsageError) as error:
        code = _EXIT_PEER
        log.error("executor ends", reason=f"{type(error).__name__}: {error}")
    except BaseException:  # noqa: BLE001 - our bug: tell its story, then end whatever is left
        log.error("executor failed, this is a bug of blockx", story=traceback.format_exc())
    finally:
        _exit(code)


def _connect(socket_path: str, *, is_of_a_pool: bool) -> UdsSession | None:
    """None: the run has ended while this executor started. Raises OSError: any other failure, and for one that
    was started by hand, whose path may be wrong, that one too."""
    try:
        return UdsSession.connect(socket_path)
    except (FileNotFoundError, ConnectionRefusedError):
        if is_of_a_pool:
            return None
        raise


def _serve(
    launch: ExecutorLaunch, row: HeartbeatRow | None, log: Log, tracing: Settings | None
) -> int:
    """Connect, attach, and run calls until there is a reason to end. Returns the exit code."""
    kept = {log.fileno(), vitals.keep_statm()}
    if tracing is not None and tracing.span_file and launch.confinement is not None:
        tracing = tracing.opened()
        kept.add(cast(int, tracing.span_descriptor))
    _close_descriptors(keep={0, 1, 2, *kept})
    socket_path = launch.socket_path
    if launch.confinement is None:
        confine.harden(launch.limits)
    else:
        socket_path = confine.enter(launch, launch.confinement)
    session = _connect(socket_path, is_of_a_pool=row is not None)
    if session is None:
        log.info("executor ends: main has closed its socket")
        return _EXIT_PEER
    descriptors.protect({*kept, session.fileno()})
    os.environ[RUNTIME_VARIABLE] = "1"
    termination = _Termination()
    gc.set_threshold(GC_OBJECTS, *gc.get_threshold()[1:])
    runtime = ExecutorRuntime(
        launch.executor_id,
        Loader(code_cache_entries(os.environ), requires_audit=launch.requires_audit),
        session,
        row,
        incarnation_id=os.urandom(4).hex(),
        executor_max_inflight=launch.executor_max_inflight,
        heartbeat_interval_ms=0 if row is not None else launch.heartbeat_interval_ms,
        capture=capture.install,
        call_log=CallLog(log),
        memory_mark_bytes=launch.memory_mark_bytes,
        abi_cache_entries=abi_cache_entries(os.environ),
        tracer=start_tracer(tracing, launch.executor_id, log),
    )
    _Forks(runtime)
    termination.runtime = runtime
    if row is not None:
        _start_beating(row, launch.heartbeat_interval_ms)
    if launch.is_sealed:
        confine.seal()
    # Main sends calls once it has this.
    runtime.send_heartbeat(time.monotonic_ns())
    session.flush()
    is_leaving = False
    while session.is_connected and not termination.is_asked:
        runtime.run_until_idle()
        delay_s = runtime.next_scheduler_delay()
        if runtime.is_finished:
            if is_leaving:
                break  # nobody has replaced us in time
            is_leaving, delay_s = True, RETIRED_S_MAX
            log.warning("executor retires", reason=runtime.retire_reason)
        if delay_s == 0:
            continue
        runtime.rest()
        termination.is_waiting = True
        session.wait(None if delay_s is None else delay_s * _MS_PER_S)
        termination.is_waiting = False
    session.flush()
    runtime.close_tracer()
    return 0


class _Termination:
    """SIGTERM: end now if nothing can be broken, else at the next turn of the loop."""

    def __init__(self) -> None:
        self.runtime: ExecutorRuntime | None = None
        """Set when there is one."""
        self.is_asked = False
        self.is_waiting = False
        """The main thread sleeps in ``session.wait``."""
        signal.signal(signal.SIGTERM, self._on_terminate)

    def _on_terminate(self, _signum: int, _frame: FrameType | None) -> None:
        self.is_asked = True
        if self.runtime is None:
            return
        running = self.runtime.running
        if self.runtime.is_forked or self.is_waiting or (running is not None and running.in_user):
            # Not in the middle of a send: what is finished leaves whole.
            self.runtime.channel.flush()
            self.runtime.close_tracer()
            _exit(0)


def _leave_parent(executor_id: str) -> None:
    """A process of its own: title, group, signals, input, folder; it dies with its parent."""
    confine.die_with_parent()
    with contextlib.suppress(PermissionError):  # leads a group already: started by a shell
        os.setsid()
    setproctitle.setproctitle(f"blockx: {executor_id}")
    for ignored in (signal.SIGINT, signal.SIGVTALRM, signal.SIGPROF):
        # The first is main's to act on. The others come from timers that a call may leave running,
        # and would end the process under a later call.
        signal.signal(ignored, signal.SIG_IGN)
    os.umask(0o022)
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    if nowhere != 0:
        os.close(nowhere)


def _map_row(heartbeat: object, slot_index: int) -> HeartbeatRow:
    """Map this slot's page; the descriptor is closed, so that user code never sees the table."""
    descriptor = cast(confine.Descriptor, heartbeat).detach()
    try:
        return HeartbeatRow(descriptor, slot_index)
    finally:
        os.close(descriptor)


def _close_descriptors(keep: set[int]) -> None:
    """Close what came with the fork, and make multiprocessing forget the numbers of its own."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with contextlib.suppress(OSError):  # the one that listed the folder
                os.close(int(name))
    # Otherwise it would write into whatever file gets these numbers next.
    tracker: Any = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is not None:
        tracker._resource_tracker._fd = None
    forkserver: Any = sys.modules.get("multiprocessing.forkserver")
    if forkserver is not None:
        forkserver._forkserver._forkserver_alive_fd = None
        forkserver._forkserver._forkserver_address = None


def _start_beating(row: HeartbeatRow, interval_ms: int) -> None:
    """Start the helper thread: a beat now and every interval. It touches its own block only."""
    vitals = Vitals()
    pause = threading.Event().wait
    monotonic_ns = time.monotonic_ns

    def beat() -> None:
        # The alarm is the main thread's: taken here it would not interrupt it.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            row.write_beat(beat_ns=monotonic_ns(), **vitals.sample()._asdict())
            pause(interval_ms / _MS_PER_S)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


class _Forks:
    """What user code forks says nothing to main, and dies with the process that forked it."""

    def __init__(self, runtime: ExecutorRuntime) -> None:
        self._runtime = runtime
        self._parent_pid = os.getpid()
        os.register_at_fork(before=self._before, after_in_child=self._in_child)

    def _before(self) -> None:
        self._parent_pid = os.getpid()

    def _in_child(self) -> None:
        descriptors.unprotect()
        vitals.forget_statm()
        self._runtime.become_forked_child()
        # Our handler only asks the executor's loop to end; the child has none. Who sends SIGTERM to a child
        # of a pool and waits for it (multiprocessing does) would wait for ever.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._parent_pid:
            _exit(0)
