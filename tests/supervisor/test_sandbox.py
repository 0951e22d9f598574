"""The policy of the sandbox: what is enough, what is refused and why, what is told."""

from dataclasses import replace
from typing import Any

import pytest

from blockx.config import WorkerConfig
from blockx.errors import UsageError
from blockx.ipc.launch import Confinement, ExecutorLaunch, ProcessLimits
from blockx.supervisor import sandbox as sandbox_module
from blockx.supervisor.control_groups import ControlGroups
from blockx.supervisor.sandbox import Sandbox
from blockx.supervisor.spawn_mode import PlainProcesses

LIMIT_BYTES = 1 << 30
LAUNCH = ExecutorLaunch(
    executor_id="exec-0",
    slot_index=0,
    socket_path="/run/x/exec-0/s",
    heartbeat_interval_ms=1_000,
    executor_max_inflight=1,
    executor_max_runnable=1,
)


def confinement_of(sandbox: Sandbox, slot: int = 0) -> Confinement:
    dressed = sandbox.dress(replace(LAUNCH, slot_index=slot))
    assert dressed.is_sealed
    assert dressed.confinement is not None
    return dressed.confinement


class NoGroups:
    """A machine on which no control group can be written."""

    controllers: tuple[str, ...] = ()

    def join_files(self, _slot: int) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        pass


class Machine:
    """What works on it, by the kind of namespaces; notes what was tried."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.tried: list[Confinement] = []

    def attempt(self, launch: ExecutorLaunch) -> str:
        assert launch.limits.address_space_bytes
        assert launch.confinement is not None
        self.tried.append(launch.confinement)
        return self.answers[launch.confinement.namespaces]


@pytest.fixture(autouse=True)
def _no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlGroups, "create", lambda _slots, _limits: NoGroups())


@pytest.fixture(params=["root", "user"])
def who(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Main runs as root, or as a user."""
    monkeypatch.setattr(
        sandbox_module.os, "geteuid", lambda: 0 if request.param == "root" else 1_000
    )
    return request.param


def made(**worker: Any) -> Sandbox:
    return Sandbox(
        WorkerConfig(executor_count=4, executor_spawn_mode="sandbox", **worker),
        LIMIT_BYTES,
        mount_point="/run/x/root",
        read_only=["/data"],
    )


def test_where_everything_works_everything_is_used(who: str) -> None:
    sandbox, machine = made(), Machine(root="ok 7", user="ok 7")
    sandbox.prepare(machine.attempt, LAUNCH)
    chosen = confinement_of(sandbox, 2)
    assert [tried.namespaces for tried in machine.tried] == [who]
    assert (chosen.namespaces, chosen.landlock_abi, chosen.read_only) == (who, 7, ("/data",))
    assert chosen.uid == (65_002 if who == "root" else 0)
    assert sandbox.effective() == {
        "namespaces": who,
        "pid_namespace": False,
        "own_user": who == "root",
        "landlock_abi": 7,
        "seccomp": True,
        "control_groups": [],
        "missing": ["control groups for memory, pids: not writable"],
    }
    assert sandbox.advice() == ""  # at each start it would be noise: other limits hold


def test_without_namespaces_landlock_takes_over_and_that_is_told(who: str) -> None:
    sandbox = made()
    sandbox.prepare(
        Machine(**{who: "failed 5 unshare: Operation not permitted", "none": "ok 5"}).attempt,
        LAUNCH,
    )
    assert confinement_of(sandbox).namespaces == "none"
    assert confinement_of(sandbox).landlock_abi == 5
    assert "unshare: Operation not permitted" in sandbox.missing[0]
    assert sandbox.advice().startswith("for private namespaces, run as root with CAP_SYS_ADMIN, or")
    # Threads of a user who has other processes cannot be counted apart.
    assert sandbox.dress(LAUNCH).limits.threads_max == (64 if who == "root" else 0)


def test_without_landlock_namespaces_are_enough_and_that_is_told(who: str) -> None:
    sandbox = made()
    sandbox.prepare(Machine(**{who: "ok 0"}).attempt, LAUNCH)
    assert confinement_of(sandbox).landlock_abi == 0
    assert "Landlock: not in this kernel, or switched off" in sandbox.missing
    assert sandbox.advice().startswith("for Landlock, name landlock in the kernel's parameter lsm=")


@pytest.mark.parametrize(
    ("route", "fallback", "named"),
    [
        ("failed 7 the filter of system calls: seccomp: Invalid argument",) * 2
        + ("the filter of system calls: seccomp: Invalid argument",),
        (
            "failed 0 unshare: Operation not permitted",
            "failed 0 Landlock is not in this kernel, or switched off",
            "Landlock is not in this kernel, or switched off",
        ),
        ("", "", "a process that tried it died"),
        ("failed x y", "ok", "a process that tried it died"),
    ],
)
def test_too_little_is_refused_with_what_is_missing(
    who: str, route: str, fallback: str, named: str
) -> None:
    with pytest.raises(UsageError) as refused:
        made().prepare(Machine(**{who: route, "none": fallback}).attempt, LAUNCH)
    text = str(refused.value)
    assert text.startswith("worker.executor_spawn_mode: sandbox: executors cannot be confined")
    assert named in text
    assert "nothing weaker is used" in text
    assert "choose process, if you trust the functions" in text


def test_what_was_asked_for_by_name_is_not_left_out_in_silence(who: str) -> None:
    machine = Machine(**{who: "failed 5 unshare: Operation not permitted", "none": "ok 5"})
    with pytest.raises(UsageError, match=r"worker.sandbox_pid_namespace: no namespaces .* unshare"):
        made(sandbox_pid_namespace=True).prepare(machine.attempt, LAUNCH)
    with pytest.raises(UsageError, match=r"worker\.sandbox_cpu_percent: needs a control group"):
        made(sandbox_cpu_percent=50).prepare(Machine(**{who: "ok 5"}).attempt, LAUNCH)


def test_limits_come_from_the_configuration_or_have_a_reason(who: str) -> None:
    plain = PlainProcesses(WorkerConfig(executor_open_files_max=99), LIMIT_BYTES)
    assert plain.dress(LAUNCH).limits == ProcessLimits(open_files_max=99)
    assert not plain.dress(LAUNCH).is_sealed
    limits = made().dress(LAUNCH).limits
    assert limits.address_space_bytes == LIMIT_BYTES + (1 << 30)
    assert limits.open_files_max == 256
    limits = (
        made(executor_address_space_bytes=2 << 30, executor_open_files_max=99).dress(LAUNCH).limits
    )
    assert (limits.address_space_bytes, limits.open_files_max) == (2 << 30, 99)
