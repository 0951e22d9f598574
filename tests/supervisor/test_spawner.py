"""The spawner, with real processes: what a child sees, how ends are told, what is left behind."""

import os
import select
import signal
import subprocess
import sys
import types
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from blockx.supervisor.guardian import _children_by_search, children_of
from blockx.supervisor.spawner import (
    ENVIRONMENT_DEFAULTS,
    SpawnedProcess,
    SpawnError,
    executor_environment,
)


def wait_and_reap(child: SpawnedProcess, timeout_s: int = 30) -> int | None:
    poll = select.poll()
    poll.register(child.fileno(), select.POLLIN)
    assert poll.poll(timeout_s * 1_000), "it lives on"
    return child.reap()


def test_executors_see_an_allowlist_and_the_names_of_the_configuration() -> None:
    environ = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "BLOCKX_EXECUTOR_CODE_CACHE_MAX_ENTRIES": "7",
        "BLOCKX_OTEL_SPAN_FILE": "spans.jsonl",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
        "OTEL_TRACES_SAMPLER_ARG": "0.1",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
        "BLOCKX_CONFIG": "/secret.yaml",
        "AWS_SECRET_ACCESS_KEY": "x",
        "PYTHONPATH": "/somewhere",
        "MY_NAME": "yes",
        "OMP_NUM_THREADS": "4",
    }
    assert executor_environment(environ, ["MY_NAME", "NOT_SET"]) == {
        **ENVIRONMENT_DEFAULTS,
        "PATH": "/bin",
        "LC_ALL": "C",
        "BLOCKX_EXECUTOR_CODE_CACHE_MAX_ENTRIES": "7",
        "BLOCKX_OTEL_SPAN_FILE": "spans.jsonl",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
        "OTEL_TRACES_SAMPLER_ARG": "0.1",
        "MY_NAME": "yes",
    }
    assert executor_environment(environ, ["OMP_NUM_THREADS"])["OMP_NUM_THREADS"] == "4"


@pytest.mark.slow
def test_a_child_sees_its_environment_the_preload_the_table_and_not_our_main_module(
    make_spawner: Any, bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "launcher.py")
    Path(main.__file__).write_text("raise SystemExit('the launcher ran in a child')")
    monkeypatch.setitem(sys.modules, "__main__", main)
    # A user's file of the working folder must not stand in for a module of the fork server.
    (tmp_path / "supervised_early.py").write_text("raise SystemExit('imported from the cwd')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "x")
    environ = dict(os.environ)
    table_fd = os.memfd_create("rows")
    os.write(table_fd, b"the heartbeat table")
    spawner = make_spawner(environment={"PATH": "/bin", "SHOWN": "1"})
    spawner.start()
    assert dict(os.environ) == environ
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child = spawner.spawn(bench.launch(), table_fd)
    assert sys.modules["__main__"] is main
    os.close(table_fd)

    facts = bench.accept().facts
    path = facts["environment"].pop("PYTHONPATH")
    assert path.startswith(str(tmp_path / "lib"))
    for name in ("LC_CTYPE", "LINES", "COLUMNS"):  # set by Python and readline, below os.environ
        facts["environment"].pop(name, None)
    assert facts == {
        "pid": child.pid,
        "executor_id": "exec-0",
        "environment": {"PATH": "/bin", "SHOWN": "1", "PYTHONSAFEPATH": "1"},
        "main_file": None,
        "preloaded": True,
        "table": "the heartbeat ta",
        "blocked": [signal.SIGINT],
    }
    child.kill()
    assert wait_and_reap(child) == -signal.SIGKILL


@pytest.mark.slow
def test_exit_codes_and_signals_are_told_exactly_also_255(make_spawner: Any, bench: Any) -> None:
    spawner = make_spawner()
    codes = []
    for order in ("exit 0", "exit 3", "exit 255", f"signal {signal.SIGSEGV.value}"):
        child = spawner.spawn(bench.launch(), None)
        bench.accept().order(order)
        codes.append(wait_and_reap(child))
    child = spawner.spawn(bench.launch(), None)
    bench.accept()
    child.terminate()
    codes.append(wait_and_reap(child))
    assert codes == [0, 3, 255, -signal.SIGSEGV, -signal.SIGTERM]
    child.kill()  # a dead process: no error, no signal to a stranger


@pytest.mark.slow
def test_what_an_executor_leaves_in_its_group_dies_with_it(
    make_spawner: Any, bench: Any, processes: Any
) -> None:
    spawner = make_spawner()
    child = spawner.spawn(bench.launch(), None)
    peer = bench.accept()
    crashed_with = int(peer.ask("child"))
    peer.order("exit 1")
    assert wait_and_reap(child) == 1
    processes.wait_until_dead(crashed_with)

    child = spawner.spawn(bench.launch(), None)
    killed_with = int(bench.accept().ask("child"))
    child.kill()
    processes.wait_until_dead(killed_with)
    assert wait_and_reap(child) == -signal.SIGKILL


@pytest.mark.slow
def test_when_the_fork_server_dies_children_live_on_and_the_next_start_brings_a_new_one(
    make_spawner: Any, bench: Any, processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawner = make_spawner(environment={"PATH": "/bin"})
    orphan = spawner.spawn(bench.launch(), None)
    orphan_peer = bench.accept()
    first_server = processes.server_pid()
    processes.kill_server()
    poll = select.poll()
    poll.register(orphan.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    assert int(orphan_peer.ask("child")) > 0

    monkeypatch.setenv("SECRET", "x")
    child = spawner.spawn(bench.launch(), None)
    facts = bench.accept().facts
    assert processes.server_pid() != first_server
    assert facts["preloaded"]
    assert "SECRET" not in facts["environment"]
    orphan.kill()
    assert wait_and_reap(orphan) is None
    child.kill()
    assert wait_and_reap(child) == -signal.SIGKILL


@pytest.mark.slow
def test_a_preload_that_failed_is_told(make_spawner: Any) -> None:
    spawner = make_spawner(preload=["preload_me", "not_there"])
    with pytest.raises(SpawnError, match=r"could not import not_there, with the path /"):
        spawner.check_preload()
    spawner.stop()
    make_spawner().check_preload()


@pytest.mark.slow
def test_a_preload_that_ends_the_fork_server_is_told(
    make_spawner: Any, bench: Any, targets: Any
) -> None:
    (Path(targets.__file__).parent / "supervised_early.py").write_text("raise SystemExit(3)")
    spawner = make_spawner()
    with pytest.raises(SpawnError, match="fork server"):
        spawner.spawn(bench.launch(), None)


@pytest.mark.slow
def test_the_end_leaves_no_process_no_file_and_no_descriptor(
    make_spawner: Any, bench: Any, processes: Any, socket_folder: Path
) -> None:
    files, descriptors = set(socket_folder.iterdir()), processes.open_descriptors()
    spawner = make_spawner()
    spawner.check_preload()
    child = spawner.spawn(bench.launch(), None)
    child.kill()
    wait_and_reap(child)
    pids = processes.server_pid(), processes.tracker_pid()
    assert set(socket_folder.iterdir()) > files, "the fork server's socket is in our folder"
    spawner.stop()
    spawner.stop()
    assert [processes.is_alive(pid) for pid in pids] == [False, False]
    assert set(socket_folder.iterdir()) == files
    assert processes.open_descriptors() == descriptors


@pytest.mark.slow
def test_what_left_the_group_of_an_executor_dies_with_it_and_its_neighbours_live_on(
    make_spawner: Any, bench: Any, processes: Any
) -> None:
    spawner = make_spawner()
    child, neighbour = (spawner.spawn(bench.launch(slot), None) for slot in (0, 1))
    peers = {peer.pid: peer for peer in (bench.accept(), bench.accept())}
    # A session of its own, an orphan at once, with children of its own, and all pipes of the executor.
    daemon, below = (int(pid) for pid in peers[child.pid].ask("daemon").split())
    child.kill()
    assert wait_and_reap(child) == -signal.SIGKILL
    assert [processes.is_alive(pid) for pid in (daemon, below)] == [False, False]
    stray = int(peers[neighbour.pid].ask("stray"))
    spawner.stop()
    neighbour.kill()
    wait_and_reap(neighbour)
    os.kill(stray, signal.SIGKILL)  # the fork server that would have known of it was stopped before


@pytest.mark.slow
def test_a_process_that_forks_for_ever_is_caught(
    make_spawner: Any, bench: Any, processes: Any
) -> None:
    spawner = make_spawner()
    child = spawner.spawn(bench.launch(), None)
    peer = bench.accept()
    peer.ask("hydra")
    peer.order("exit 4")
    assert wait_and_reap(child) == 4
    assert [pid for pid in children_of(processes.server_pid()) if processes.is_alive(pid)] == []


@pytest.mark.slow
def test_when_main_is_killed_nothing_of_its_executors_lives_on(
    targets: Any, socket_folder: Path, bench: Any, processes: Any
) -> None:
    lib = str(Path(targets.__file__).parent)
    main = subprocess.Popen(
        [sys.executable, "-c", MAIN.format(lib=lib, folder=str(socket_folder), path=bench.path)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
    )
    peer = bench.accept()
    peer.ask("let_go")  # of the pipes by which the fork server sees that main has ended
    pids = [peer.pid, *(int(pid) for pid in peer.ask("daemon").split())]
    assert [processes.is_alive(pid) for pid in pids] == [True, True, True]
    main.kill()
    for pid in pids:
        processes.wait_until_dead(pid)
    main.communicate()


MAIN = """
import sys
sys.path.insert(0, {lib!r})
import supervised
from blockx.ipc.launch import ExecutorLaunch
from blockx.supervisor.guardian import _children_by_search, children_of
from blockx.supervisor.spawner import ForkserverSpawner, package_folder
spawner = ForkserverSpawner(supervised.obey, [], {{}}, [{lib!r}, package_folder()], {folder!r})
spawner.spawn(ExecutorLaunch(executor_id="exec-0", slot_index=0, socket_path={path!r},
    heartbeat_interval_ms=1, executor_max_inflight=1, executor_max_runnable=1), None)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_resource_tracker_that_ran_before_is_left_alone(
    make_spawner: Any, processes: Any
) -> None:
    resource_tracker.ensure_running()
    pid = processes.tracker_pid()
    try:
        spawner = make_spawner()
        spawner.start()
        spawner.stop()
        assert processes.tracker_pid() == pid
        assert processes.is_alive(pid)
    finally:
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_there_is_one_fork_server_in_a_process(make_spawner: Any) -> None:
    make_spawner().start()
    with pytest.raises(SpawnError, match="in use already"):
        make_spawner().start()


@pytest.mark.slow
def test_a_main_process_that_fails_does_not_wait_for_its_executors(
    targets: Any, socket_folder: Path, bench: Any
) -> None:
    lib = str(Path(targets.__file__).parent)
    script = socket_folder / "main.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {lib!r})
import supervised
from blockx.ipc.launch import ExecutorLaunch
from blockx.supervisor.guardian import _children_by_search, children_of
from blockx.supervisor.spawner import ForkserverSpawner, package_folder
spawner = ForkserverSpawner(supervised.obey, [], {{}}, [{lib!r}, package_folder()],
                            {str(socket_folder)!r})
spawner.spawn(ExecutorLaunch(executor_id="exec-0", slot_index=0, socket_path={bench.path!r},
    heartbeat_interval_ms=1, executor_max_inflight=1, executor_max_runnable=1), None)
raise KeyError("our bug")
"""
    )
    root = str(Path(__file__).parents[2])
    # Not a pipe for its errors: the executor that stays holds the other end.
    with open(socket_folder / "errors", "w+") as errors:
        ended = subprocess.run(
            [sys.executable, str(script)],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": root},
            timeout=30,
            stderr=errors,
            check=False,
        )
        errors.seek(0)
        assert errors.read().endswith("KeyError: 'our bug'\n")
    assert ended.returncode == 1
    os.kill(bench.accept().pid, signal.SIGKILL)


def test_children_are_found_with_and_without_the_list_of_the_kernel() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert child.pid in children_of(os.getpid())
        assert child.pid in _children_by_search(os.getpid())
    assert child.pid not in _children_by_search(os.getpid())
    assert children_of(child.pid) == []
