"""Executor processes by multiprocessing's fork server: start, end, exit code.

Main thread only. It starts processes and ends them; whether and when is the pool's business.

Why the fork server: it is single-threaded and has our modules loaded, so that a process starts in
about 10 ms and fork is never called from a process with threads. Its environment is fixed when it
starts, and it starts with an allowlist: what an executor must not see was never in its memory.

What was met, and is handled here:

- Death is judged by a pidfd. When the fork server dies, ``Process.is_alive()`` turns False while
  the child lives on. Only the exit code comes from the fork server (the child is its child, not
  ours); without it the code is None, unless we adopted the orphan (as process 1 of a container).
- We use ``Popen`` and not ``Process.start()``: the latter registers the child for being joined when
  the interpreter ends (a main process that fails would hang on its executors), and polls registered
  children in passing, which takes the exit code out of the pipe.
- The child would run the main module again (``blockx.py``), so it is hidden while it is described.
- A preload that fails is ignored by the fork server without a word: ``check_preload()``.

Only here are private parts of multiprocessing used; they are the same from Python 3.11 to 3.14.
"""

import contextlib
import os
import select
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, get_context, process, reduction, resource_tracker
from multiprocessing.popen_forkserver import Popen
from pathlib import Path
from typing import Any

from blockx.ipc.launch import ExecutorLaunch
from blockx.supervisor.guardian import kill_orphans

ADOPT = "blockx.supervisor.adopt"
"""Last of the preload: makes the fork server the parent of what dead executors leave behind."""

REAP_WAIT_MS = 1_000
"""Wait for the exit code of a dead process. Over (the fork server hangs): the code is unknown."""

PRELOAD_CHECK_MS = 30_000
"""Wait for the answer of ``check_preload()``. Over: an error."""

ANSWER_MS = 30_000
"""Wait for the answer of ``ask()``. Over: an error."""
ANSWER_BYTES_MAX = 60_000
"""Longest answer: what a pipe holds while nobody reads."""

ENVIRONMENT_NAMES = frozenset(
    {
        "PATH",
        "HOME",  # libraries look for their settings and caches there
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "LD_LIBRARY_PATH",  # some interpreters do not start without it
        "PYTHONHASHSEED",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_TRACES_SAMPLER_ARG",
    }
)
"""Variables that executors see if main has them; further ones are named by ``functions.env``."""

ENVIRONMENT_PREFIXES = ("LC_", "BLOCKX_EXECUTOR_", "BLOCKX_LOG_", "BLOCKX_OTEL_")
"""The same, by their beginning (the specification's variables of the executor)."""

ENVIRONMENT_DEFAULTS: Mapping[str, str] = types.MappingProxyType(
    dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
    )
)
"""Set in executors: there is one for each core, and a pool of threads in each would only be in the
way. A variable that ``functions.env`` names keeps the value that main has."""


class SpawnError(Exception):
    """A process could not be started; the text says why."""


OUTSIDE_NAMES = frozenset({"PATH", "HOME", "TMPDIR", "OTEL_EXPORTER_OTLP_ENDPOINT"})
"""Those that tell of places which a sandbox does not have."""


def executor_environment(
    environ: Mapping[str, str], names: Sequence[str], *, is_confined: bool = False
) -> dict[str, str]:
    """What executors may see of ``environ``; ``names``: the further ones of ``functions.env``.

    ≠ The specification's process mode passes everything on; here it is an allowlist in every mode.
    """
    allowed = (ENVIRONMENT_NAMES - OUTSIDE_NAMES if is_confined else ENVIRONMENT_NAMES).union(names)
    chosen = {
        name: value
        for name, value in environ.items()
        if name in allowed or name.startswith(ENVIRONMENT_PREFIXES)
    }
    return {**ENVIRONMENT_DEFAULTS, **chosen}


def package_folder() -> str:
    """The folder that must be on the path for ``import blockx`` to work from anywhere."""
    return str(Path(__file__).resolve().parents[2])


class SpawnedProcess:
    """A process of the fork server, until it is reaped. Main thread only.

    ``fileno()`` is ready for reading once the process is dead.
    """

    __slots__ = ("_kill_orphans", "_pidfd", "_popen", "pid")

    def __init__(self, popen: Popen, kill_orphans: Callable[[int], None]) -> None:
        """``kill_orphans(pid)`` ends what the dead process ``pid`` left in other groups."""
        self._popen = popen
        self._kill_orphans = kill_orphans
        self.pid: int = popen.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._pidfd = -1  # dead and reaped already; its exit code is in the sentinel

    def fileno(self) -> int:
        """A descriptor to poll: readable when the process is dead."""
        return self._popen.sentinel if self._pidfd < 0 else self._pidfd

    def terminate(self) -> None:
        """Ask it to end (SIGTERM). No error if it is dead."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it and its process group (SIGKILL). No error if it is dead."""
        self._send(signal.SIGKILL)
        if self._pidfd >= 0:
            self._kill_group()

    def reap(self) -> int | None:
        """Give up everything held for a dead process; its exit code, negative for a signal.

        Call it once, when ``fileno()`` is ready. What it left behind is killed, in its process group
        and out of it: nothing of user code outlives its executor. Waits at most ``REAP_WAIT_MS`` for
        the code; None: the fork server died or hangs, and the code is unknown.
        """
        self._kill_group()
        self._kill_orphans(self.pid)
        try:
            return self._exit_code()
        finally:
            self._popen.finalizer()
            pidfd, self._pidfd = self._pidfd, -1
            if pidfd >= 0:
                os.close(pidfd)

    def _send(self, signal_number: signal.Signals) -> None:
        # By pidfd: the number may belong to another process by now, a descriptor never does.
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal_number)

    def _kill_group(self) -> None:
        # The executor made a group of its own, named by its pid. While a member is left the number
        # is not given to anybody else. Before the group is made, there is nothing to kill in it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _exit_code(self) -> int | None:
        if _wait_readable(self._popen.sentinel, REAP_WAIT_MS):
            with contextlib.suppress(EOFError, OSError):
                return int(forkserver.read_signed(self._popen.sentinel))
        return self._exit_code_of_orphan()

    def _exit_code_of_orphan(self) -> int | None:
        if self._pidfd < 0:
            return None
        try:
            found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return None  # somebody else's child
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


class ForkserverSpawner:
    """Starts executors. Main thread only; one in a process, since there is one fork server.

    ``target(launch, heartbeat)`` is the entry of the child: a module-level function that is
    importable there, in a module that starts no thread; ``heartbeat`` has ``detach() -> int`` (the
    descriptor of the heartbeat table, now the child's own) or is None. With ``open_log``, which gives
    the descriptor for the log of an executor, ``target`` gets a third argument of that kind.
    ``preload``: modules that the fork server imports. ``environment``: all that executors see, from
    ``executor_environment()``. ``python_path``: folders put on their path.
    ``folder``: a private folder for the fork server's socket, removed by its owner; None: a folder
    of multiprocessing's own in the temp folder, which stays behind if main dies by SIGKILL.
    """

    def __init__(
        self,
        target: Callable[..., None],
        preload: Sequence[str],
        environment: Mapping[str, str],
        python_path: Sequence[str],
        folder: str | None = None,
        open_log: Callable[[str], int] | None = None,
    ) -> None:
        self._target = target
        self._open_log = open_log
        self._preload = [*preload, ADOPT]
        self._environment = {
            **environment,
            "PYTHONPATH": os.pathsep.join(python_path),
            # Without it the fork server would find a user's json.py of the working folder first.
            "PYTHONSAFEPATH": "1",
        }
        self._folder = folder
        self._context = get_context("forkserver")
        self._server_pid: int | None = None
        self._started_tracker = False
        self._living: set[int] = set()
        """Started and not yet reaped: what the fork server's other children are is an orphan."""

    def start(self) -> None:
        """Start the fork server, without waiting until it is up; again: only if it died.

        Call it before main has threads: ``os.environ`` is exchanged meanwhile. When the fork server
        died, the next ``spawn`` does the same beside running threads, for about a millisecond.

        Raises:
            SpawnError: the fork server of this process is in use already, or cannot start.
        """
        if self._server_pid is None and _server_pid() is not None:
            raise SpawnError("multiprocessing's fork server is in use already in this process")
        if self._is_server_alive():
            return
        if self._folder is not None:
            _config()["tempdir"] = self._folder
        forkserver.set_forkserver_preload(self._preload)
        self._started_tracker |= _tracker_pid() is None
        try:
            with _exchanged_environment(self._environment):
                # First, since it unblocks SIGINT when it has started its process.
                resource_tracker.ensure_running()
                # Blocked signals are inherited. Ctrl-C reaches the whole foreground group and would
                # end the fork server with a traceback while it still imports.
                with _blocked(signal.SIGINT):
                    forkserver.ensure_running()
        except OSError as error:
            raise SpawnError(f"the fork server cannot start: {error}") from error
        self._server_pid = _server_pid()

    def spawn(self, launch: ExecutorLaunch, heartbeat_fd: int | None) -> SpawnedProcess:
        """Start one executor; waits until it is forked (the first time: until the server is up).

        ``heartbeat_fd`` stays open here; the child gets a copy.

        Raises:
            SpawnError: it could not be started; nothing is left of it.
        """
        heartbeat = None if heartbeat_fd is None else _InheritedFd(heartbeat_fd)
        if self._open_log is None:
            return self._fork(self._target, (launch, heartbeat), launch.executor_id)
        log = self._open_log(launch.executor_id)
        try:
            arguments = (launch, heartbeat, _InheritedFd(log))
            return self._fork(self._target, arguments, launch.executor_id)
        finally:
            os.close(log)

    def ask(self, target: Callable[[ExecutorLaunch, Any], None], launch: ExecutorLaunch) -> str:
        """Let a process try something: what ``target(launch, answer)`` wrote to ``answer``, a ``DupFd``.

        Waits for its end, at most ``ANSWER_MS``. Empty: it ended without an answer.

        Raises:
            SpawnError: it could not be started, or gave no answer in time.
        """
        reader, writer = os.pipe()
        try:
            child = self._fork(target, (launch, _InheritedFd(writer)), "question")
            is_dead = _wait_readable(child.fileno(), ANSWER_MS)
            if not is_dead:
                child.kill()
                _wait_readable(child.fileno(), REAP_WAIT_MS)
            child.reap()
            if not is_dead:
                raise SpawnError(f"a process gave no answer within {ANSWER_MS} ms")
            os.set_blocking(reader, False)
            try:
                return os.read(reader, ANSWER_BYTES_MAX).decode("utf-8", "replace")
            except BlockingIOError:
                return ""
        finally:
            os.close(reader)
            os.close(writer)

    def check_preload(self) -> None:
        """Ask the fork server, by a process that only looks, whether its preload worked.

        Waits for the answer, a few milliseconds once the server is up.

        Raises:
            SpawnError: a module of ``preload`` is missing there, or no answer came.
        """
        probe = self._fork(exec, (_PROBE, {"names": self._preload}), "preload check")
        if not _wait_readable(probe.fileno(), PRELOAD_CHECK_MS):
            probe.kill()
        code = probe.reap()
        if code == 0:
            return
        if code is not None and 0 < code <= len(self._preload):
            raise SpawnError(
                f"the fork server could not import {self._preload[code - 1]}, with the path "
                f"{self._environment['PYTHONPATH']}: is the installation complete?"
            )
        raise SpawnError(f"the fork server does not work (its check ended with code {code})")

    def stop(self) -> None:
        """End the fork server and, if it came with it, the resource tracker; wait for both.

        Call it when all executors are dead: the death of the fork server kills them. Again: no
        effect.
        """
        if self._server_pid is None:
            return
        self._server_pid = None
        # SIGKILL, since they end by themselves only when the last process that has their pipes is
        # gone, and something that user code started may have them. Neither holds anything of ours.
        pid = _server_pid()
        if pid is not None:
            kill_orphans(pid, self._living)
            os.kill(pid, signal.SIGKILL)
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
        tracker_pid = _tracker_pid()
        if self._started_tracker and tracker_pid is not None:
            os.kill(tracker_pid, signal.SIGKILL)
            resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
        self._started_tracker = False
        forkserver.set_forkserver_preload(["__main__"])  # multiprocessing's own default
        if self._folder is not None:
            _config().pop("tempdir", None)

    def _fork(
        self, target: Callable[..., Any], arguments: tuple[Any, ...], name: str
    ) -> SpawnedProcess:
        self.start()
        try:
            with _hidden_main_module():
                popen = Popen(self._context.Process(target=target, args=arguments, name=name))
        except EOFError:
            raise SpawnError("the fork server ended before it could start a process") from None
        except OSError as error:
            raise SpawnError(f"the fork server could not start a process: {error}") from error
        child = SpawnedProcess(popen, self._kill_orphans_of)
        self._living.add(child.pid)
        if _server_pid() != self._server_pid:
            # It died after our look, and multiprocessing restarted it with all of our environment.
            child.kill()
            _wait_readable(child.fileno(), REAP_WAIT_MS)
            child.reap()
            self.stop()
            raise SpawnError("the fork server died while it started a process")
        return child

    def _kill_orphans_of(self, dead_pid: int) -> None:
        """What left the group of a dead executor is a child of the fork server by now."""
        if self._server_pid is not None:
            kill_orphans(self._server_pid, self._living)
        self._living.discard(dead_pid)

    def _is_server_alive(self) -> bool:
        if self._server_pid is None:
            return False
        # WNOWAIT: multiprocessing itself collects the dead one, when it starts the next.
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._server_pid, ended) is None


_PROBE = """
import sys
for index, name in enumerate(names, start=1):
    if name not in sys.modules:
        sys.exit(min(index, 255))
"""


class _InheritedFd:
    """A descriptor among the arguments of a process: becomes multiprocessing's ``DupFd`` in it.

    ``DupFd`` must be made while the process is pickled; made earlier, it starts a server thread.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        inherited: Any = reduction.DupFd(self._fd)
        return type(inherited), (inherited.ind,)


def _server_pid() -> int | None:
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def _tracker_pid() -> int | None:
    pid: int | None = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    return pid


def _config() -> dict[str, Any]:
    """Multiprocessing's settings of this process; ``tempdir`` is where its sockets go."""
    config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    return config


def _wait_readable(fd: int, timeout_ms: int) -> bool:
    poll = select.poll()  # not select.select: descriptors may be above 1,023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


@contextlib.contextmanager
def _exchanged_environment(values: Mapping[str, str]) -> Iterator[None]:
    """``os.environ`` is ``values``, and then again what it was. Common names never disappear."""
    saved = dict(os.environ)
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(saved)


def _set_environment(values: Mapping[str, str]) -> None:
    os.environ.update(values)
    for name in os.environ.keys() - values.keys():
        del os.environ[name]


@contextlib.contextmanager
def _blocked(signal_number: signal.Signals) -> Iterator[None]:
    """The signal waits, in this thread and in processes started meanwhile (there: for good)."""
    saved = signal.pthread_sigmask(signal.SIG_BLOCK, {signal_number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, saved)


@contextlib.contextmanager
def _hidden_main_module() -> Iterator[None]:
    """An empty ``__main__``, so that a child has nothing to run again."""
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module
