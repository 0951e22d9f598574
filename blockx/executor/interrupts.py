"""What stops user code that does not suspend: the repeating alarm, and ``time.sleep``.

Main thread only; a handler runs between two bytecodes of it. The law of the alarm:

- It acts only while ``ctx.in_user`` is set, and never switches greenlets.
- It raises a signal only if one is pending, and only where that is safe: never in a frame of the
  executor itself; never with an importlib frame on the stack (a module cut in its import stays broken
  for every later call of the process); at once when the innermost frame is user source; elsewhere only
  after ``ANYWHERE_AFTER_NS`` without such a tick, and then the executor is replaced afterwards, since
  a library may have been cut in the middle of a change.
- A tick that fell into a frame of the executor is repeated soon: a call that prints long texts in a loop is
  almost always there, but never for long.
- After ``SWALLOWED_MAX`` raises that user code swallowed it fires again a few microseconds after each
  raise, so that one of them falls outside of the ``try`` that swallows.
- User code may steal the signal, block it or stop the timer: before the next call is entered all three
  are put back (``ambient`` takes a note of it; without one the timer is armed once a turn, since each
  system call costs 0.5 us). One that does so and never returns is left to main's wedge time.

One long C call runs no handler at all; that too is left to main.
"""

import _frozen_importlib
import _frozen_importlib_external
import _signal  # type: ignore[import-not-found]
import os.path
import random
import re
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Final, Protocol

from blockx.executor.context import ExecContext
from blockx.functions.entry import is_user_file
from blockx.ipc import exact_json

TICK_NS: Final = 15_000_000
"""Period of the alarm while anything runs."""
ANYWHERE_AFTER_NS: Final = 250_000_000
"""How long the alarm looks for user source before it raises wherever it may."""
SWALLOWED_MAX: Final = 3
"""Raises that user code may swallow at the pace of the tick."""
STORM_US: Final = (3.0, 40.0)
"""Then the pause before the next one, drawn anew each time. At 30-300 it was seen not to end."""
OWN_FRAME_US: Final = (100.0, 300.0)
"""Pause after a tick in a frame of the executor, drawn anew each time, so that it keeps no step with a loop."""

_PRECISION_NS: Final = 100_000
_TICK_S: Final = TICK_NS / 1e9
_OWN_FOLDER: Final = os.path.dirname(__file__) + os.sep
_PURE_FILES: Final = frozenset({exact_json.__file__, re.__file__})
"""Code that may be cut like user source: it changes nothing, or, as the cache of ``re``, in one step.
A regular expression that backtracks for ever is too common a case to cost an executor."""
_IMPORTLIB: Final = (vars(_frozen_importlib), vars(_frozen_importlib_external))

# Bound here, and the C functions where the Python wrapper costs more than the work: user code may
# replace the attributes of these modules.
_monotonic_ns = time.monotonic_ns
_uniform = random.Random().uniform
_getsignal = _signal.getsignal
_setsignal = _signal.signal
_setitimer = _signal.setitimer
_SIGALRM: Final = int(signal.SIGALRM)
_ITIMER_REAL: Final = int(signal.ITIMER_REAL)
_real_sleep = time.sleep


class AlarmHost(Protocol):
    """What the alarm needs of the runtime."""

    running: ExecContext | None

    def tick(self, context: ExecContext, now_ns: int, frame: FrameType | None) -> None:
        """User code of this call holds the executor: send what is queued, look for a cancellation."""

    def retire(self, why: str) -> None:
        """Take no new calls, and end when the resident ones are done."""


class Alarm:
    """The repeating alarm of this process. One instance may be installed at a time."""

    def __init__(self, host: AlarmHost) -> None:
        self._host = host
        self._handler = self._on_alarm
        self._is_ticking = False

    def enter(self, left_ns: int) -> None:
        """Arm for a call that is switched in now and may run for ``left_ns``."""
        if self._is_ticking and left_ns >= TICK_NS:
            return
        self._is_ticking = left_ns >= TICK_NS
        if _getsignal(_SIGALRM) is not self._handler:
            _setsignal(_SIGALRM, self._handler)
        # Precisely, if the call ends within a tick. 0 would switch the timer off.
        _setitimer(
            _ITIMER_REAL, _TICK_S if left_ns >= TICK_NS else max(left_ns, 1_000) / 1e9, _TICK_S
        )

    def distrust(self) -> None:
        """Somebody may have stopped the timer or stolen the signal: the next ``enter`` arms anew."""
        self._is_ticking = False

    def disarm(self) -> None:
        """Nothing runs: no ticks, so that waiting for main is not interrupted."""
        self._is_ticking = False
        _setitimer(_ITIMER_REAL, 0)

    def uninstall(self) -> None:
        """Give the signal back (tests)."""
        self.disarm()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _on_alarm(self, _signum: int, frame: FrameType | None) -> None:
        context = self._host.running
        if context is None or not context.in_user:
            return
        now_ns = _monotonic_ns()
        self._host.tick(context, now_ns, frame)
        pending = context.pending_signal(now_ns)
        if pending is None:
            left_ns = context.left_ns(now_ns)
            if left_ns < TICK_NS:
                # A limit of CPU time may not come nearer while the call blocks: not too often.
                _setitimer(_ITIMER_REAL, max(left_ns, _PRECISION_NS) / 1e9, _TICK_S)
            return
        if frame is None or not self._may_raise(context, frame, now_ns):
            if frame is not None and _is_own(frame):
                _setitimer(_ITIMER_REAL, _uniform(*OWN_FRAME_US) / 1e6, _TICK_S)
            return
        context.raises += 1
        if context.raises > SWALLOWED_MAX:
            _setitimer(_ITIMER_REAL, _uniform(*STORM_US) / 1e6, _TICK_S)
        raise pending

    def _may_raise(self, context: ExecContext, frame: FrameType, now_ns: int) -> bool:
        """Whether the interrupted code may be cut here."""
        filename = frame.f_code.co_filename
        is_sleep = frame.f_code is _SLEEP_CODE  # a real one: where no call can be suspended
        if _is_own(frame) or _is_importing(frame):
            return False
        if is_user_file(filename) or filename in _PURE_FILES or is_sleep:
            context.refused_since_ns = 0
            return True
        if not context.refused_since_ns:
            context.refused_since_ns = now_ns
        if now_ns - context.refused_since_ns < ANYWHERE_AFTER_NS:
            return False
        self._host.retire(f"call {context.call_id} was cut inside {filename}")
        return True


def _is_own(frame: FrameType) -> bool:
    """Whether it is the executor's code, but for a sleep."""
    code = frame.f_code
    return code.co_filename.startswith(_OWN_FOLDER) and code is not _SLEEP_CODE


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an import is on the stack; known by the identity of importlib's own globals."""
    while frame is not None:
        if frame.f_globals is _IMPORTLIB[0] or frame.f_globals is _IMPORTLIB[1]:
            return True
        frame = frame.f_back
    return False


_sleep_in_call: Callable[[float], bool] | None = None


def install_sleep(sleep_in_call: Callable[[float], bool]) -> None:
    """Make ``time.sleep`` suspend the running call, in every form it is imported by later.

    ``sleep_in_call(seconds)`` is asked first and returns False when no call is running in this thread;
    then it blocks as usual. A second installation replaces the first one.
    """
    global _sleep_in_call  # noqa: PLW0603 - a process has one time.sleep
    _sleep_in_call = sleep_in_call
    time.sleep = _sleep  # type: ignore[assignment]


def uninstall_sleep() -> None:
    """Give ``time.sleep`` back (tests)."""
    time.sleep = _real_sleep


def _sleep(seconds: float, /) -> None:
    """Suspend the running call; outside of one, block the thread."""
    if _sleep_in_call is None or not _sleep_in_call(seconds):
        _real_sleep(seconds)


_SLEEP_CODE: Final = _sleep.__code__
