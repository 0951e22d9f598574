"""Bundles of containers: what is in ``config.json``, and what is refused before anything is written."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockx.config import WorkerConfig
from blockx.errors import UsageError
from blockx.ipc.launch import ExecutorLaunch
from blockx.supervisor import oci
from blockx.supervisor.control_groups import ControlGroups
from blockx.supervisor.oci import OciContainers

LIMIT_BYTES = 1 << 30
TOLD = json.dumps(
    {
        "executable": "/opt/bin/python3",
        "path": ["/opt/lib", "/app"],
        "read_only": ["/opt/lib", "/lib"],
    }
)
LAUNCH = ExecutorLaunch(
    executor_id="exec-3",
    slot_index=3,
    socket_path="/run/x/exec-3/s",
    heartbeat_interval_ms=250,
    executor_max_inflight=7,
    executor_max_runnable=8,
    memory_mark_bytes=9,
    requires_audit=True,
)


class Groups:
    """All controllers can be had."""

    controllers = ("memory", "cpu", "pids")

    def join_files(self, slot: int) -> tuple[str, ...]:
        return (f"/groups/{slot}/cgroup.procs",)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlGroups, "create", lambda _slots, _limits: Groups())
    monkeypatch.setattr(oci.os, "geteuid", lambda: 0)
    monkeypatch.setattr(oci.shutil, "which", lambda name: f"/usr/bin/{name}")


def made(folder: Path, **worker: Any) -> OciContainers:
    return OciContainers(
        WorkerConfig(executor_count=4, executor_spawn_mode="oci", **worker),
        LIMIT_BYTES,
        {"LANG": "C.UTF-8", "MY_NAME": "yes"},
        [str(folder), "/not/there"],
        folder,
    )


def test_a_bundle_has_no_network_no_capabilities_and_only_the_socket_folder(tmp_path: Path) -> None:
    containers = made(tmp_path, sandbox_cpu_percent=50)
    containers.prepare(lambda _launch: TOLD, LAUNCH)
    dressed = containers.dress(LAUNCH)
    assert dressed.container is not None
    assert dressed.container.groups == ("/groups/3/cgroup.procs",)
    bundle = json.loads((Path(dressed.container.bundle) / "config.json").read_text())
    process, linux = bundle["process"], bundle["linux"]
    assert {space["type"] for space in linux["namespaces"]} == {
        "pid", "network", "ipc", "uts", "mount", "cgroup",
    }  # fmt: skip
    assert (process["capabilities"], process["noNewPrivileges"]) == ({}, True)
    assert process["user"] == {"uid": 65_003, "gid": 65_003}
    assert bundle["root"]["readonly"]
    assert {m["destination"]: m["source"] for m in bundle["mounts"] if "bind" in m["type"]} == {
        "/run/blockx": "/run/x/exec-3",
        "/opt/lib": "/opt/lib",
        "/lib": "/lib",
        str(tmp_path): str(tmp_path),
    }
    assert all("ro" in m["options"] for m in bundle["mounts"] if "bind" in m["type"])
    assert linux["resources"]["cpu"] == {"quota": 50_000, "period": 100_000}
    assert linux["resources"]["memory"]["limit"] > LIMIT_BYTES
    assert linux["resources"]["pids"] == {"limit": 64}
    assert set(process["env"]) == {
        "HOME=/tmp", "LANG=C.UTF-8", "MY_NAME=yes", "PATH=/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH=/opt/lib:/app", "PYTHONSAFEPATH=1", "TMPDIR=/tmp",
    }  # fmt: skip


def test_the_command_line_is_that_of_the_specification_and_seals_itself(tmp_path: Path) -> None:
    containers = made(tmp_path)
    containers.prepare(lambda _launch: TOLD, LAUNCH)
    arguments = containers.config(LAUNCH, tmp_path)["process"]["args"]
    assert arguments == [
        "/opt/bin/python3", "-m", "blockx.executor", "--executor-id", "exec-3",
        "--socket-path", "/run/blockx/s", "--heartbeat-interval", "0.25", "--heartbeat-fd", "3",
        "--slot-index", "3", "--executor-max-inflight", "7", "--executor-max-runnable", "8",
        "--memory-mark", "9", "--seal", "--requires-audit",
    ]  # fmt: skip
    plain = containers.config(replace(LAUNCH, requires_audit=False), tmp_path)
    assert plain["process"]["args"] == arguments[:-1]


def test_an_image_brings_its_own_python_and_nothing_of_this_machine(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.mkdir()
    containers = made(tmp_path, oci_root=str(image), oci_python="/usr/bin/python3.12")
    containers.prepare(lambda _launch: pytest.fail("nobody is asked"), LAUNCH)
    config = containers.config(LAUNCH, image)
    assert config["root"] == {"path": str(image), "readonly": True}
    assert config["process"]["args"][0] == "/usr/bin/python3.12"
    assert not [entry for entry in config["process"]["env"] if entry.startswith("PYTHONPATH")]
    assert [m["source"] for m in config["mounts"] if m["type"] == "bind"] == [
        "/run/x/exec-3",
        str(tmp_path),
    ]


def test_what_cannot_be_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"worker\.oci_root: /not/there is no folder"):
        made(tmp_path, oci_root="/not/there")
    with pytest.raises(UsageError, match="cannot be described"):
        made(tmp_path).prepare(lambda _launch: "", LAUNCH)
    monkeypatch.setattr(Groups, "controllers", ("memory",))
    with pytest.raises(UsageError, match=r"worker\.sandbox_cpu_percent"):
        made(tmp_path, sandbox_cpu_percent=50)
    monkeypatch.setattr(oci.os, "geteuid", lambda: 1_000)
    with pytest.raises(UsageError, match="oci needs root; choose sandbox"):
        made(tmp_path)
    monkeypatch.setattr(oci.shutil, "which", lambda _name: None)
    with pytest.raises(UsageError, match=r"no program runc is installed here; install it"):
        made(tmp_path)
    assert os.listdir(tmp_path) == []
