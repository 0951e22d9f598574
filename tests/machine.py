"""What this machine lets the tests of the sandbox use: each thing is tried for real, once a session.

Machines differ: a container may have no namespaces, a kernel no Landlock, a developer no root and no runc. A test says
what it needs; where that cannot be had, it is skipped with the words of the product or of the kernel. With
``TEST_SANDBOX=require`` it fails instead: for machines that have everything, so that no test stops running unnoticed.
"""

import functools
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockx.config import WorkerConfig
from blockx.errors import UsageError
from blockx.executor.confine import probe
from blockx.executor.container import tell_python
from blockx.ipc.launch import Confinement, ExecutorLaunch
from blockx.supervisor.oci import OciContainers

VARIABLE = "TEST_SANDBOX"
ROOT = Path(__file__).resolve().parents[1]
TRY_S_MAX = 60
SLOT_UID = 65_001
MIB = 1024 * 1024
OWN_NAMESPACES = "root" if os.geteuid() == 0 else "user"
"""The kind that the product tries first."""
_CLONE_NEWUSER = 0x1000_0000
_CHILD = """
import importlib, pickle, sys
class Answer:
    def detach(self):
        return 1
module, name, launch = pickle.load(sys.stdin.buffer)
getattr(importlib.import_module(module), name)(launch, Answer())
"""


def need(lacking: str) -> None:
    """Skip the test, or fail it where nothing may be skipped, if there is something that ``lacking`` names."""
    if lacking and os.environ.get(VARIABLE) == "require":
        pytest.fail(f"{VARIABLE}=require, but {lacking}")
    if lacking:
        pytest.skip(lacking)


def refusal(namespaces: str, *, pid_namespace: bool = False, uid: int = 0, **process: Any) -> str:
    """Why a process cannot confine itself in this way, as the product tells it. Empty: one has done it.

    ``process``: options of ``subprocess.run`` and ``python``, for the one that tries.
    """
    with tempfile.TemporaryDirectory(prefix="bx-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        (Path(folder) / "root").mkdir()
        confinement: dict[str, Any] = {"namespaces": namespaces, "pid_namespace": pid_namespace}
        launch = ExecutorLaunch(
            **_launch(folder),
            confinement=Confinement(
                **confinement,
                landlock_abi=0,  # the probe takes what there is
                uid=uid,
                mount_point=f"{folder}/root",
                read_only=(),
                tmp_bytes=MIB,
            ),
            is_sealed=True,
        )
        answer = _in_child(probe, launch, **process)
    if answer.startswith("ok "):
        return ""
    return answer.removeprefix("failed ").partition(" ")[2] or f"the probe answered {answer!r}"


cached_refusal = functools.cache(refusal)


@functools.cache
def namespaces() -> str:
    """The strongest route that works here, of ``Confinement.namespaces``; a test that finds none is skipped."""
    uid = 0 if os.geteuid() else SLOT_UID
    failure = cached_refusal(OWN_NAMESPACES, uid=uid)
    if not failure:
        return OWN_NAMESPACES
    return "" if cached_refusal("none") else "none"


@functools.cache
def sandbox_refusal() -> str:
    """Why the product would refuse spawn mode sandbox here. Empty: it works by one of the routes."""
    uid = 0 if os.geteuid() else SLOT_UID
    failures = [cached_refusal(route, uid=uid) for route in (OWN_NAMESPACES, "none")]
    return f"executors cannot be confined here: {'; '.join(failures)}" if all(failures) else ""


@functools.cache
def oci_refusal() -> str:
    """Why spawn mode oci cannot work here. Empty: a container has been run."""
    with tempfile.TemporaryDirectory(prefix="bx-", dir="/tmp") as folder:
        launch = ExecutorLaunch(**_launch(folder))
        worker = WorkerConfig(executor_count=1, executor_spawn_mode="oci")
        try:
            containers = OciContainers(worker, 512 * MIB, {}, [], Path(folder))
        except UsageError as error:
            return str(error)
        try:
            containers.prepare(lambda asked: _in_child(tell_python, asked), launch)
            container = containers.dress(launch).container
            assert container is not None
            description = Path(container.bundle) / "config.json"
            config = json.loads(description.read_text())
            config["process"]["args"][1:] = ["-c", "print('it runs')"]
            description.write_text(json.dumps(config))
            runtime = [container.runtime, "--root", container.state_folder]
            ran = _run([*runtime, "run", "--bundle", container.bundle, f"try-{os.getpid()}"])
        finally:
            containers.close()
        works = ran.stdout == b"it runs\n"
        return "" if works else f"runc cannot run a container here: {_last_line(ran.stderr)}"


@functools.cache
def user_namespaces_are_closed() -> bool:
    """Whether this machine refuses them to any process, sandbox or not."""
    source = f"import ctypes, os; os._exit(ctypes.CDLL(None).unshare({_CLONE_NEWUSER}) != 0)"
    return _run([sys.executable, "-c", source]).returncode != 0


def filter_refusal(load: Callable[[], None]) -> str:
    """Why a process cannot put itself under the filter of system calls that ``load`` loads. Empty: it can."""
    try:
        subprocess.run([sys.executable, "-c", ""], check=True, preexec_fn=load)
    except subprocess.SubprocessError as error:
        return f"no filter of system calls can be loaded here: {error}"
    return ""


def _launch(folder: str) -> dict[str, Any]:
    return {
        "executor_id": "exec-0",
        "slot_index": 0,
        "socket_path": f"{folder}/s",
        "heartbeat_interval_ms": 1_000,
        "executor_max_inflight": 1,
        "executor_max_runnable": 1,
    }


def _in_child(
    entry: Callable[..., Any], launch: ExecutorLaunch, *, python: str = sys.executable, **more: Any
) -> str:
    """What the entry of a child answers to ``launch``."""
    question = pickle.dumps((entry.__module__, entry.__name__, launch))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = _run([python, "-c", _CHILD], input=question, env=environment, cwd="/", **more)
    return ran.stdout.decode(errors="replace") or _last_line(ran.stderr)


def _run(command: list[str], **more: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, check=False, timeout=TRY_S_MAX, **more)


def _last_line(text: bytes) -> str:
    return (text.decode(errors="replace").strip().splitlines() or ["it says nothing"])[-1]
