"""An executor that has confined itself: it still works, ends as others do, and a step that fails ends it."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockx.executor import confine, landlock
from blockx.ipc.launch import Confinement, ProcessLimits
from tests import machine
from tests.executor.processes import TIMEOUT_S, FakeMain, Forked, is_alive, until

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
LIMITS = ProcessLimits(
    address_space_bytes=2_000 * MIB,
    open_files_max=128,
    file_bytes_max=64 * MIB,
    threads_max=32 if os.geteuid() == 0 else 0,
)


def need_namespaces(*, pid_namespace: bool = False) -> None:
    machine.need(machine.cached_refusal(machine.OWN_NAMESPACES, pid_namespace=pid_namespace))


def confinement(folder: Path, **changes: Any) -> Confinement:
    """By the strongest route of this machine; the test is skipped where there is none."""
    route = machine.namespaces()
    if not route:
        machine.need(machine.sandbox_refusal())
    if changes.get("pid_namespace"):
        need_namespaces(pid_namespace=True)
    fields: dict[str, Any] = {
        "namespaces": route,
        "pid_namespace": False,
        "landlock_abi": landlock.abi(),
        "uid": machine.SLOT_UID if route == "root" else 0,
        "mount_point": str(folder / "root"),
        "read_only": (),
        "tmp_bytes": 8 * MIB,
        **changes,
    }
    return Confinement(**fields)


Start = Callable[..., tuple[FakeMain, Forked]]


@pytest.fixture
def start(socket_folder: Path) -> Iterator[Start]:
    """Starts a confined executor and waits for its first frame."""
    made: list[Any] = []

    def begin(**changes: Any) -> tuple[FakeMain, Forked]:
        (socket_folder / "root").mkdir()
        slot = socket_folder / "slot"
        slot.mkdir()
        main = FakeMain(slot / "s")
        made.append(main)
        chosen = confinement(socket_folder, **changes)
        if chosen.uid:
            for path in (slot, slot / "s"):
                os.chown(path, chosen.uid, chosen.uid)
            socket_folder.chmod(0o711)
        forked = Forked(slot / "s", limits=LIMITS, confinement=chosen, is_sealed=True)
        made.append(forked)
        main.accept()
        return main, forked

    yield begin
    for part in made:
        part.close()


def test_calls_run_as_ever_with_lazy_imports_threads_time_zones_and_time_limits(start: Start):
    main, forked = start()
    source = """
import asyncio, datetime, os, threading
def _(n):
    import colorsys, decimal, sqlite3, statistics, zoneinfo  # not preloaded
    import numpy
    moment = datetime.datetime(2026, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Paris"))
    seen = []
    threads = [threading.Thread(target=seen.append, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    async def later():
        await asyncio.sleep(0)
        return 5
    count = sqlite3.connect(":memory:").execute("select 1 + 1").fetchone()[0]
    return [n + int(numpy.arange(4).sum()), str(moment.utcoffset()), len(seen), asyncio.run(later()),
            count, statistics.mean([1, 3]), os.getcwd(), os.environ["HOME"]]
"""
    assert main.run(source, 2**64) == [2**64 + 6, "2:00:00", 8, 5, 2, 2, "/", "/tmp"]
    assert main.run("def _():\n    while True: len('')", callBudgetMs=100) == "deadline_exceeded"
    first = forked.table.beat(1)
    assert first is not None
    until(lambda: forked.table.beat(1).beat_ns > first.beat_ns)
    assert forked.table.beat(1).memory_bytes > 5 * MIB


@pytest.mark.parametrize("pid_namespace", [False, True])
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("os._exit(7)", 7),
        ("ctypes.string_at(0)", -signal.SIGSEGV),
        ("signal.raise_signal(signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_its_end_is_told_as_it_was(start: Start, pid_namespace: bool, line: str, code: int):
    if pid_namespace and "SIGKILL" in line:
        line = "os._exit(137)"  # process 1 of a namespace cannot kill itself
        code = 137
    main, forked = start(pid_namespace=pid_namespace)
    with pytest.raises((EOFError, ConnectionResetError)):
        main.run(f"import ctypes, os, signal\ndef _():\n    {line}")
    forked.process.join(TIMEOUT_S)
    assert forked.process.exitcode == code


def test_sigterm_reaches_the_process_in_a_pid_namespace(start: Start):
    main, forked = start(pid_namespace=True)
    assert main.run("import os\ndef _():\n    return os.getpid()") == 1
    forked.process.terminate()
    forked.process.join(TIMEOUT_S)
    assert forked.process.exitcode == 0


def test_memory_is_refused_past_the_limit(start: Start):
    main, _ = start()
    source = """
def _():
    try:
        bytearray(3_000_000_000)
    except MemoryError:
        return "refused"
"""
    assert main.run(source) == "refused"


def test_the_private_folder_keeps_files_and_is_small(start: Start):
    need_namespaces()
    main, _ = start()
    source = """
import tempfile
def _():
    with tempfile.NamedTemporaryFile("w+") as file:
        file.write("kept")
        file.seek(0)
        kept = file.read()
    try:
        with open("/tmp/big", "wb") as file:
            for _ in range(20):
                file.write(bytes(1_000_000))
    except OSError as error:
        return [kept, error.errno]
"""
    assert main.run(source) == ["kept", errno.ENOSPC]


def test_paths_of_the_configuration_are_readable_and_stay_unwritable(
    start: Start, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "data").write_text("prices")
    (tmp_path / "private").write_text("key")
    shared.chmod(0o777)
    main, _ = start(read_only=(str(shared), str(tmp_path / "missing")))
    source = f"""
def refusal(*way):
    try:
        open(*way)
    except OSError as error:
        return error.errno
def _():
    return [open({str(shared / "data")!r}).read(), refusal({str(shared / "new")!r}, "w"),
            refusal({str(tmp_path / "private")!r})]
"""
    by_landlock_alone = machine.namespaces() == "none"
    refusals = [errno.EACCES] * 2 if by_landlock_alone else [errno.EROFS, errno.ENOENT]
    assert main.run(source) == ["prices", *refusals]


def test_without_namespaces_files_are_closed_all_the_same(start: Start) -> None:
    machine.need(machine.cached_refusal("none"))
    # As root, who may read Python wherever it is installed, but without root's capabilities.
    main, _ = start(namespaces="none", uid=0)
    source = """
import os, socket
def closed(action):
    try:
        action()
    except PermissionError:
        return True
    return False
def _():
    import colorsys, sqlite3  # lazily
    return [closed(lambda: open("/etc/passwd")), closed(lambda: open("/tmp/x", "w")),
            closed(lambda: os.listdir("/proc")), closed(socket.socket), closed(os.fork)]
"""
    assert main.run(source) == [True] * 5


@pytest.mark.parametrize("pid_namespace", [False, True])
def test_it_dies_with_the_process_that_forked_it(start: Start, pid_namespace: bool) -> None:
    main, forked = start(pid_namespace=pid_namespace)
    pid = main.run("import os\ndef _():\n    return os.getppid()")
    assert (pid == 0) is pid_namespace
    server = int(Path(f"/proc/{forked.process.pid}/stat").read_text().rpartition(")")[2].split()[1])
    workers = [forked.process.pid]
    children = Path(f"/proc/{forked.process.pid}/task/{forked.process.pid}/children")
    workers += [int(child) for child in children.read_text().split()]
    assert len(workers) == 1 + pid_namespace
    os.kill(server, signal.SIGKILL)
    until(lambda: not any(is_alive(worker) for worker in workers))


def test_a_step_that_fails_ends_it_before_it_connects(socket_folder: Path) -> None:
    (socket_folder / "root").mkdir()
    chosen = confinement(socket_folder, groups=(str(socket_folder / "no" / "cgroup.procs"),))
    forked = Forked(socket_folder / "s", confinement=chosen)
    forked.process.join(TIMEOUT_S)
    assert forked.process.exitcode == 1
    forked.close()


HARDENED = """
import ctypes, resource
def _():
    prctl = ctypes.CDLL(None).prctl
    signal = ctypes.c_int(0)
    prctl(2, ctypes.byref(signal), 0, 0, 0)
    return {"parent death": signal.value, "dumpable": prctl(3, 0, 0, 0, 0),
            "no new privileges": prctl(39, 0, 0, 0, 0), "core": resource.getrlimit(resource.RLIMIT_CORE),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
"""


def test_outside_of_a_sandbox_what_costs_nothing_is_given_up_too(
    socket_folder: Path,
) -> None:
    main = FakeMain(socket_folder / "s")
    forked = Forked(socket_folder / "s", limits=ProcessLimits(open_files_max=100))
    main.accept()
    assert main.run(HARDENED) == {
        "parent death": signal.SIGKILL,
        "dumpable": 0,
        "no new privileges": 1,
        "core": [0, 0],
        "files": 100,
    }
    main.close()
    forked.close()


def test_of_a_checkout_only_our_own_modules_are_shown() -> None:
    root = str(Path(confine.__file__).parents[2])
    assert root in sys.path
    paths = confine.library_paths()
    assert root not in paths
    assert f"{root}/blockx" in paths
    assert os.path.dirname(os.__file__) in paths


def test_paths_below_others_are_bound_once(tmp_path: Path) -> None:
    for name in ("a", "a/b", "ab"):
        (tmp_path / name).mkdir()
    paths = [f"{tmp_path}/a/b", f"{tmp_path}/ab/", f"{tmp_path}/a", f"{tmp_path}/none", "/"]
    assert confine.outermost(paths) == [f"{tmp_path}/a", f"{tmp_path}/ab"]
