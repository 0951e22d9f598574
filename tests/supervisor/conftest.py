"""Real executor-like processes: a module that children can import, and the test's end of their socket.

The child connects, tells what it sees as one line of JSON, and then obeys lines. So a test waits for
an answer or for end-of-file, and never sleeps.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blockx.ipc.launch import ExecutorLaunch
from blockx.supervisor.spawner import ForkserverSpawner, executor_environment, package_folder

TIMEOUT_S = 30
"""No test waits longer for a process; only one that fails gets there."""

_TARGETS = """
import json, os, signal, socket, subprocess, sys
modules_at_import = set(sys.modules)

def obey(launch, heartbeat):
    os.setpgid(0, 0)
    table = None
    if heartbeat is not None:
        fd = heartbeat.detach()
        table = os.pread(fd, 16, 0).decode()
        os.close(fd)
    main = sys.modules["__main__"]
    facts = {
        "pid": os.getpid(),
        "executor_id": launch.executor_id,
        "environment": dict(os.environ),
        "main_file": getattr(main, "__file__", None),
        "preloaded": "preload_me" in modules_at_import,
        "table": table,
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(launch.socket_path)
        peer.sendall(json.dumps(facts).encode() + b"\\n")
        for line in peer.makefile():
            verb, _, value = line.strip().partition(" ")
            peer.sendall(VERBS[verb](value).encode() + b"\\n")

def start_child(_):
    return str(subprocess.Popen(["sleep", "600"]).pid)

def start_stray(_):
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.write(tell, b"x")
        signal.pause()
    os.read(ready, 1)
    return str(pid)

def start_daemon(_):
    ready, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid:
            os._exit(0)
        below = subprocess.Popen(["sleep", "600"], start_new_session=True)
        os.write(tell, f"{os.getpid()} {below.pid}".encode())
        signal.pause()
    return os.read(ready, 100).decode()

def let_go(_):
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}") and "socket" not in os.readlink(f"/proc/self/fd/{fd}"):
            os.close(fd)
    return "done"

def start_hydra(_):
    ready, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.write(tell, b"x")
        while True:
            if os.fork():
                os._exit(0)
    return os.read(ready, 1).decode()

def end(code):
    os._exit(int(code))

def die(number):
    os.kill(os.getpid(), int(number))

def ignore(number):
    signal.signal(int(number), signal.SIG_IGN)
    return "ignored"

VERBS = {"child": start_child, "stray": start_stray, "daemon": start_daemon,
    "hydra": start_hydra, "let_go": let_go, "exit": end, "signal": die, "ignore": ignore}

def fail(launch, heartbeat):
    os._exit(9)
"""


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The child's module, importable here and there; its folder is ``Path(__file__).parent``."""
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "supervised.py").write_text(_TARGETS)
    (folder / "preload_me.py").write_text("import supervised_early\n")
    (folder / "supervised_early.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("supervised")
    del sys.modules["supervised"]


class Peer:
    """The test's end of one child's socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        self._connection = connection
        self._lines = connection.makefile()
        self.facts: dict[str, Any] = json.loads(self._lines.readline())
        self.pid: int = self.facts["pid"]

    def order(self, text: str) -> None:
        self._connection.sendall(text.encode() + b"\n")

    def ask(self, text: str) -> str:
        self.order(text)
        return self._lines.readline().strip()

    def wait_for_end(self) -> None:
        """Wait until the process has closed its socket: it is dead, or about to be."""
        with contextlib.suppress(ConnectionResetError):
            assert self._lines.readline() == ""

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


class Bench:
    """A listening socket and the launches that point to it."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "s")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.settimeout(TIMEOUT_S)
        self._peers: list[Peer] = []

    def launch(self, slot_index: int = 0) -> ExecutorLaunch:
        return ExecutorLaunch(
            executor_id=f"exec-{slot_index}",
            slot_index=slot_index,
            socket_path=self.path,
            heartbeat_interval_ms=1_000,
            executor_max_inflight=1,
            executor_max_runnable=1,
        )

    def accept(self) -> Peer:
        peer = Peer(self._listener.accept()[0])
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._listener.close()


@pytest.fixture
def bench(socket_folder: Path) -> Iterator[Bench]:
    bench = Bench(socket_folder)
    yield bench
    bench.close()


SpawnerFactory = Callable[..., ForkserverSpawner]


@pytest.fixture
def make_spawner(targets: ModuleType, socket_folder: Path) -> Iterator[SpawnerFactory]:
    """Spawners of this test; their fork servers are ended with it."""
    made: list[ForkserverSpawner] = []

    def make(target: str = "obey", **overrides: Any) -> ForkserverSpawner:
        arguments: dict[str, Any] = {
            "target": getattr(targets, target),
            "preload": ["preload_me"],
            "environment": executor_environment(os.environ, []),
            "python_path": [str(Path(str(targets.__file__)).parent), package_folder()],
            "folder": str(socket_folder),
        }
        made.append(ForkserverSpawner(**{**arguments, **overrides}))
        return made[-1]

    yield make
    for spawner in made:
        spawner.stop()


class Processes:
    """Looks at processes from outside, whoever is their parent."""

    TIMEOUT_S = TIMEOUT_S

    @staticmethod
    def is_alive(pid: int) -> bool:
        """A process runs under this pid (a zombie does not)."""
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state not in "ZX"

    @staticmethod
    def wait_until_dead(pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(TIMEOUT_S * 1_000), f"process {pid} lives on"
        finally:
            os.close(fd)

    @staticmethod
    def server_pid() -> int | None:
        pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        return pid

    def kill_server(self) -> None:
        """Kill the fork server and wait until it is dead."""
        pid = self.server_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.wait_until_dead(pid)

    @staticmethod
    def tracker_pid() -> int | None:
        pid: int | None = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
        return pid

    @staticmethod
    def open_descriptors() -> set[str]:
        return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def processes() -> Processes:
    return Processes()
