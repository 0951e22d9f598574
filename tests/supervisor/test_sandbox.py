"""The policy of the sandbox: what is enough, what is refused and why, what is told."""

from typing import Any

import pytest

from blockx.config import WorkerConfig
from blockx.errors import UsageError
from blockx.ipc.launch import Confinement, ProcessLimits
from blockx.supervisor import sandbox as sandbox_module
from blockx.supervisor.control_groups import ControlGroups
from blockx.supervisor.sandbox import Sandbox, process_limits

LIMIT_BYTES = 1 << 30


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

    def attempt(self, limits: ProcessLimits, confinement: Confinement) -> str:
        assert limits.address_space_bytes
        self.tried.append(confinement)
        return self.answers[confinement.namespaces]


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
    sandbox.probe(machine.attempt)
    chosen = sandbox.confinement(2)
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


def test_without_namespaces_landlock_takes_over_and_that_is_told(who: str) -> None:
    sandbox = made()
    sandbox.probe(
        Machine(**{who: "failed 5 unshare: Operation not permitted", "none": "ok 5"}).attempt
    )
    assert sandbox.confinement(0).namespaces == "none"
    assert sandbox.confinement(0).landlock_abi == 5
    assert "unshare: Operation not permitted" in sandbox.missing[0]
    # Threads of a user who has other processes cannot be counted apart.
    assert sandbox.limits().threads_max == (64 if who == "root" else 0)


def test_without_landlock_namespaces_are_enough_and_that_is_told(who: str) -> None:
    sandbox = made()
    sandbox.probe(Machine(**{who: "ok 0"}).attempt)
    assert sandbox.confinement(0).landlock_abi == 0
    assert "Landlock: not in this kernel, or switched off" in sandbox.missing


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
        made().probe(Machine(**{who: route, "none": fallback}).attempt)
    text = str(refused.value)
    assert text.startswith("worker.executor_spawn_mode: sandbox: executors cannot be confined")
    assert named in text
    assert "nothing weaker is used" in text
    assert "choose process, if you trust the functions" in text


def test_what_was_asked_for_by_name_is_not_left_out_in_silence(who: str) -> None:
    machine = Machine(**{who: "failed 5 unshare: Operation not permitted", "none": "ok 5"})
    with pytest.raises(UsageError, match=r"worker.sandbox_pid_namespace: no namespaces .* unshare"):
        made(sandbox_pid_namespace=True).probe(machine.attempt)
    with pytest.raises(UsageError, match=r"worker\.sandbox_cpu_percent: needs a control group"):
        made(sandbox_cpu_percent=50).probe(Machine(**{who: "ok 5"}).attempt)


def test_limits_come_from_the_configuration_or_have_a_reason(who: str) -> None:
    assert process_limits(WorkerConfig(), LIMIT_BYTES) == ProcessLimits()
    limits = made().limits()
    assert limits.address_space_bytes == LIMIT_BYTES + (1 << 30)
    assert limits.open_files_max == 256
    limits = made(executor_address_space_bytes=2 << 30, executor_open_files_max=99).limits()
    assert (limits.address_space_bytes, limits.open_files_max) == (2 << 30, 99)
