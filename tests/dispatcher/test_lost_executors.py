"""An executor died: who is charged, who moves free, who runs alone next time."""

from collections.abc import Callable
from typing import Any

import pytest

from blockx.dispatcher.commands import ArmRetry, Command, FinishTask, StartAttempt
from blockx.dispatcher.events import (
    CallSuspended,
    ExecutorLost,
    RetryDue,
    StreamBatchSubmitted,
    StreamOpened,
    SubcallRequested,
    TaskCancelled,
)
from blockx.dispatcher.model import CallCounts, CallError, Via
from blockx.errors import MOVES_MAX, ErrorKind
from tests.builders import call_spec, call_specs, dummy, function_ref, snapshot, task_spec
from tests.dispatcher.shell import Shell


def lose(
    s: Shell, executor_id: str = "exec-0", incarnation_id: str = "p0", **fields: Any
) -> list[Command]:
    event = dummy(ExecutorLost, executor_id=executor_id, incarnation_id=incarnation_id, **fields)
    return s.post(event)


def running(s: Shell, call_id: str) -> int:
    return s.started[call_id].call_seq


def test_the_running_call_is_charged_and_its_neighbours_move_free_in_their_order(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=1)
    s.submit(3)
    s.snapshots(snapshot("exec-1", incarnation_id="q0"))
    commands = lose(s, running_call_seq=running(s, "t/1"))
    assert s.names(commands) == ["ArmRetry t/1", "StartAttempt t/0", "StartAttempt t/2"]
    s.post(RetryDue("t/1", 1))
    for index in range(3):
        s.complete(f"t/{index}")
    numbers = {i: (r.attempts, r.moves) for i, r in sorted(s.results.items())}
    assert numbers == {"t/0": (1, 1), "t/1": (2, 0), "t/2": (1, 1)}


def test_when_nobody_was_known_to_run_all_move_free(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(2)
    assert lose(s) == []
    s.snapshots(snapshot(incarnation_id="p1"))
    assert lose(s, incarnation_id="p1", running_call_seq=999) == []
    s.snapshots(snapshot(incarnation_id="p2"))
    s.complete("t/0")
    assert (s.results["t/0"].attempts, s.results["t/0"].moves) == (1, 2)


def test_the_message_names_the_call_the_function_and_why(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1, attempts_max=1)
    lose(s, running_call_seq=1, kind=ErrorKind.MEMORY_EXCEEDED, detail="3 GiB of 2 GiB")
    assert s.results["t/0"].error == CallError(
        ErrorKind.MEMORY_EXCEEDED, "exec-0 ended while function f (t/0) ran: 3 GiB of 2 GiB"
    )
    assert s.results["t/0"].via is Via.RAN


def test_the_root_is_charged_for_its_running_subcall_which_the_message_names(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(2, attempts_max=1)
    s.call_function("t/0")
    commands = lose(s, running_call_seq=running(s, "t/0/sub-1"))
    assert s.names(commands) == ["EmitResult t/0"]
    assert s.results["t/0"].error == CallError(
        ErrorKind.EXECUTOR_LOST,
        "exec-0 ended while function g (t/0/sub-1) ran, called by f (t/0): killed by signal 9",
    )
    s.snapshots(snapshot(incarnation_id="p1"))
    finish = s.complete("t/1")[-1]
    assert isinstance(finish, FinishTask)
    assert finish.calls == CallCounts(calls=2, ok=1, failed=1, ran=2, executed=2, moves=1)
    assert finish.subcalls == CallCounts(calls=1, failed=1, ran=1, executed=1)


def test_nothing_is_aborted_on_a_dead_executor(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.call_function("t/0")
    assert lose(s) == []


def test_a_subcall_that_others_follow_is_led_on_by_one_on_a_living_executor(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=2)
    s.submit(2)
    s.call_function("t/0")
    s.call_function("t/1")
    commands = lose(s)
    assert s.names(commands) == ["StartAttempt t/1/sub-2", "StartAttempt t/0"]
    assert s.started["t/1/sub-2"].executor_id == "exec-1"


def test_the_first_death_that_nothing_explains_is_free_and_the_second_is_charged(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    assert lose(s, running_call_seq=1, free_of_charge=True) == []
    s.snapshots(snapshot(incarnation_id="p1"))
    [armed] = lose(s, incarnation_id="p1", running_call_seq=1, free_of_charge=True)
    assert isinstance(armed, ArmRetry)
    s.post(RetryDue("t/0", 2))
    s.snapshots(snapshot(incarnation_id="p2"))
    s.complete("t/0")
    assert (s.results["t/0"].attempts, s.results["t/0"].moves) == (2, 1)


def test_a_bystander_of_too_many_deaths_fails_as_lost(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    for n in range(MOVES_MAX + 1):
        lose(s, incarnation_id=f"p{n}")
        s.snapshots(snapshot(incarnation_id=f"p{n + 1}"))
    result = s.results["t/0"]
    assert result.error is not None
    assert (result.error.kind, result.moves) == (ErrorKind.EXECUTOR_LOST, MOVES_MAX)


def test_a_call_survives_any_number_of_deaths_that_others_are_charged_for(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    deaths = MOVES_MAX + 5
    s.submit(deaths + 1, attempts_max=1)
    for n in range(deaths):
        lose(s, incarnation_id=f"p{n}", running_call_seq=running(s, f"t/{n + 1}"))
        s.snapshots(snapshot(incarnation_id=f"p{n + 1}"))
    assert {r.error.kind for r in s.results.values() if r.error} == {ErrorKind.EXECUTOR_LOST}
    assert len(s.results) == deaths
    s.complete("t/0")
    assert (s.results["t/0"].error, s.results["t/0"].moves) == (None, deaths)


def test_calls_of_a_replaced_incarnation_wait_for_its_loss(shell: Callable[..., Shell]) -> None:
    """The new process attached before the old one was reported: they move when it is."""
    s = shell()
    s.submit(1)
    assert s.snapshots(snapshot(incarnation_id="p1")) == []
    [start] = lose(s, incarnation_id="p0")
    assert isinstance(start, StartAttempt)
    assert (start.executor_id, start.attempt_seq) == ("exec-0", 2)
    assert s.core.state.views.by_id["exec-0"].inflight == 1


def test_a_late_frame_of_the_dead_attempt_is_stale(shell: Callable[..., Shell]) -> None:
    s = shell(executors=2)
    s.submit(1)
    lose(s)
    assert s.complete("t/0", attempt_seq=1) == []
    assert s.core.counters == {"stale_attempt_completed": 1}


def twice_suspected(s: Shell, calls: int = 1) -> None:
    """t/0 has killed two incarnations of exec-0 and backs off before its last attempt."""
    s.submit(calls)
    for n in range(2):
        executor = s.started["t/0"].executor_id
        view = s.core.state.views.by_id[executor]
        lose(s, executor, view.incarnation_id, running_call_seq=running(s, "t/0"))
        s.snapshots(snapshot(executor, incarnation_id=f"{executor}-{n}"))
        if n == 0:
            s.post(RetryDue("t/0", 1))


def test_a_call_that_killed_two_executors_runs_its_last_attempt_alone(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=2)
    twice_suspected(s, calls=5)
    s.submit(6, "neighbour")
    assert s.post(RetryDue("t/0", 2)) == [], "no executor is empty"
    reserved = s.core.state.views.reserved
    assert reserved is not None
    for call_id in [c.call_id for c in reserved.calls.values()]:
        s.complete(call_id)
    start = s.started["t/0"]
    assert (start.attempt_seq, start.executor_id) == (3, reserved.executor_id)
    s.submit(3, "other")
    elsewhere = {s.started[f"other/{n}"].executor_id for n in range(3)}
    assert reserved.executor_id not in elsewhere
    s.complete("t/0")
    assert s.results["t/0"].attempts == 3
    assert s.core.state.views.reserved is None
    assert reserved.open


def test_with_one_executor_everyone_waits_until_it_is_empty(shell: Callable[..., Shell]) -> None:
    s = shell()
    twice_suspected(s, calls=2)
    s.post(RetryDue("t/0", 2))
    assert s.submit(1, "other") == []
    assert s.names(s.complete("t/1")) == ["EmitResult t/1", "StartAttempt t/0"]
    assert s.names(s.complete("t/0")) == [
        "EmitResult t/0",
        "StartAttempt other/0",
        "FinishTask t@1",
    ]


def test_a_call_that_runs_alone_may_have_subcalls(shell: Callable[..., Shell]) -> None:
    s = shell()
    twice_suspected(s)
    s.post(RetryDue("t/0", 2))
    assert s.names(s.call_function("t/0")) == ["StartAttempt t/0/sub-1"]


def test_a_third_death_is_the_last(shell: Callable[..., Shell]) -> None:
    s = shell()
    twice_suspected(s)
    s.post(RetryDue("t/0", 2))
    assert s.names(lose(s, incarnation_id="exec-0-1", running_call_seq=1)) == [
        "EmitResult t/0",
        "FinishTask t@1",
    ]
    assert s.core.state.views.reserved is None


def test_the_reservation_ends_when_its_task_is_cancelled(shell: Callable[..., Shell]) -> None:
    s = shell()
    twice_suspected(s, calls=2)
    s.post(RetryDue("t/0", 2))
    s.post(dummy(TaskCancelled))
    assert [r.via for r in s.results.values()] == [Via.NOT_RUN, Via.RAN]
    assert s.names(s.submit(1, "other")) == ["StartAttempt other/0"]


def waits_for_an_empty_executor(s: Shell) -> None:
    """t/0 waits in quarantine for exec-0, on which t/1 runs."""
    twice_suspected(s, calls=2)
    s.post(RetryDue("t/0", 2))
    assert s.core.state.views.reserved is s.core.state.views.by_id["exec-0"]


@pytest.mark.parametrize(
    "fields",
    [{"running_call_seq": 9, "scheduler_idle_ms": 99_999}, {"healthy": False}],
    ids=["stalled", "unhealthy"],
)
def test_a_reserved_executor_that_is_unfit_is_waited_for(
    shell: Callable[..., Shell], fields: dict[str, Any]
) -> None:
    s = shell()
    waits_for_an_empty_executor(s)
    s.snapshots(snapshot(incarnation_id="exec-0-1", heartbeat_seq=2, **fields))
    assert s.names(s.complete("t/1")) == ["EmitResult t/1"]
    fit = snapshot(incarnation_id="exec-0-1", heartbeat_seq=3)
    assert s.names(s.snapshots(fit)) == ["StartAttempt t/0"]


def test_a_reserved_executor_that_turned_a_call_away_is_asked_after_its_next_snapshot(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    waits_for_an_empty_executor(s)
    kind = ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED
    assert s.fail("t/1", kind, body_started=False) == []
    fresh = snapshot(incarnation_id="exec-0-1", heartbeat_seq=2)
    assert s.names(s.snapshots(fresh)) == ["StartAttempt t/0"]


def test_an_aborted_call_still_counts_as_company_until_the_next_snapshot(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    waits_for_an_empty_executor(s)
    s.submit(1, "other")
    s.core.state.views.reserved.draining = 1  # type: ignore[union-attr]
    assert s.names(s.complete("t/1")) == ["EmitResult t/1"]
    fresh = snapshot(incarnation_id="exec-0-1", heartbeat_seq=2)
    assert "StartAttempt t/0" in s.names(s.snapshots(fresh))


def test_an_aborted_call_that_is_still_there_at_the_next_snapshot_counts_as_company(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    waits_for_an_empty_executor(s)
    still_there = snapshot(incarnation_id="exec-0-1", heartbeat_seq=2, draining_count=1)
    s.snapshots(still_there)
    assert s.names(s.complete("t/1")) == ["EmitResult t/1"]
    gone = snapshot(incarnation_id="exec-0-1", heartbeat_seq=3)
    assert "StartAttempt t/0" in s.names(s.snapshots(gone))


def test_a_suspected_call_waits_for_room_in_its_window(shell: Callable[..., Shell]) -> None:
    s = shell(task_max_inflight_calls=1)
    s.post(StreamOpened(task_spec(), 0))
    s.post(StreamBatchSubmitted("t@1", 0, call_specs(range(1)), 0))
    for n, incarnation in enumerate(["p0", "p1"]):
        lose(s, incarnation_id=incarnation, running_call_seq=1)
        s.snapshots(snapshot(incarnation_id=f"p{n + 1}"))
        if n == 0:
            s.post(RetryDue("t/0", 1))
    s.snapshots(snapshot("exec-1"))
    s.submit(1, "x")
    s.submit(1, "y")
    assert s.post(RetryDue("t/0", 2)) == [], "both executors are in use"
    more = StreamBatchSubmitted("t@1", 1, call_specs(range(1, 2)), 0)
    assert s.names(s.post(more)) == ["StartAttempt t/1"]
    s.complete("x/0")
    s.complete("y/0")
    assert s.started["t/0"].attempt_seq == 2
    assert s.names(s.complete("t/1")) == ["EmitResult t/1", "StartAttempt t/0", "ReturnCredit t@1"]


def test_a_suspected_call_of_a_stopping_task_is_not_run(shell: Callable[..., Shell]) -> None:
    s = shell(executors=2)
    twice_suspected(s, calls=4)
    s.submit(6, "neighbour")
    s.post(RetryDue("t/0", 2))
    s.post(dummy(TaskCancelled, drain=True))
    for n in range(6):
        s.complete(f"neighbour/{n}")
    assert "t/0" in s.core.state.calls
    assert s.started["t/0"].attempt_seq == 2
    for n in range(1, 4):
        s.complete(f"t/{n}")
    assert s.results["t/0"].error is not None


def test_only_the_last_permitted_attempt_runs_alone(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(2, attempts_max=4)
    for n, incarnation in enumerate(["p0", "p1"]):
        lose(s, incarnation_id=incarnation, running_call_seq=1)
        s.snapshots(snapshot(incarnation_id=f"p{n + 1}"))
        started = s.names(s.post(RetryDue("t/0", n + 1)))
        assert started == ["StartAttempt t/0"]
    lose(s, incarnation_id="p2", running_call_seq=1)
    s.snapshots(snapshot(incarnation_id="p3"))
    assert s.post(RetryDue("t/0", 3)) == []


def test_equal_calls_follow_a_suspected_one_and_do_not_run_beside_others(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=1, call_cache_max_bytes=0)
    s.post(StreamOpened(task_spec(), 0))
    s.post(StreamBatchSubmitted("t@1", 0, call_specs(range(2)), 0))
    for n, incarnation in enumerate(["p0", "p1"]):
        lose(s, incarnation_id=incarnation, running_call_seq=1)
        s.snapshots(snapshot(incarnation_id=f"p{n + 1}"))
        s.post(RetryDue("t/0", n + 1))
    s.post(StreamBatchSubmitted("t@1", 1, [call_spec(2, b"[0]")], 0))
    s.complete("t/1")
    s.complete("t/0")
    assert s.results["t/2"].via is Via.SINGLEFLIGHT


def test_a_suspected_call_leads_again_when_the_subcall_that_led_has_failed(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.post(StreamOpened(task_spec(), 0))
    s.post(StreamBatchSubmitted("t@1", 0, call_specs(range(2)), 0))
    for n, incarnation in enumerate(["p0", "p1"]):
        lose(s, incarnation_id=incarnation, running_call_seq=1)
        s.snapshots(snapshot(incarnation_id=f"p{n + 1}"))
        if n == 0:
            s.post(RetryDue("t/0", 1))
    s.call_function("t/1", "f", b"[0]")
    s.fail("t/1/sub-1", ErrorKind.IO_ERROR)
    s.snapshots(snapshot("exec-1", usable_contexts=0))
    assert s.post(RetryDue("t/0", 2)) == []
    s.snapshots(snapshot("exec-1", heartbeat_seq=2))
    equal = StreamBatchSubmitted("t@1", 1, [call_spec(2, b"[0]")], 0)
    assert s.post(equal) == [], "it follows, and does not run on exec-1"


def test_a_suspected_call_that_moves_runs_alone_again(shell: Callable[..., Shell]) -> None:
    s = shell()
    twice_suspected(s)
    s.post(RetryDue("t/0", 2))
    assert s.names(s.fail("t/0", ErrorKind.RESUME_SEND_FAILED)) == ["StartAttempt t/0"]
    assert s.core.state.views.reserved is s.core.state.views.by_id["exec-0"]


def test_a_suspected_call_follows_an_equal_subcall_that_took_the_lead(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    waits_for_an_empty_executor(s)
    assert s.names(s.call_function("t/1", "f", b"[0]")) == ["StartAttempt t/1/sub-1"]
    assert s.core.state.views.reserved is None
    s.complete("t/1/sub-1", b"6")
    assert s.results["t/0"].output == b"6"


def test_a_heir_whose_parent_was_on_the_dead_executor_too_is_not_bound(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(2)
    s.call_function("t/1")
    s.call_function("t/0")
    assert lose(s) == []


def test_a_request_proves_that_the_parents_body_started(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    event = dummy(
        SubcallRequested,
        parent_call_id="t/0",
        function_id="g",
        function=function_ref("g"),
        args=b"[]",
        key=b"g",
    )
    s.post(event)
    s.post(dummy(TaskCancelled))
    assert s.results["t/0"].via is Via.RAN


def test_a_reserved_executor_that_dies_gives_way_to_another(shell: Callable[..., Shell]) -> None:
    s = shell(executors=2)
    twice_suspected(s, calls=5)
    s.submit(6, "neighbour")
    s.post(RetryDue("t/0", 2))
    reserved = s.core.state.views.reserved
    assert reserved is not None
    lose(s, reserved.executor_id, reserved.incarnation_id)
    other = s.core.state.views.reserved
    assert other is not None
    assert other is not reserved


def test_a_suspended_call_is_known_to_have_run(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(2)
    s.post(CallSuspended("t/0", 1))
    lose(s)
    s.post(dummy(TaskCancelled))
    assert {i: r.via for i, r in s.results.items()} == {"t/0": Via.RAN, "t/1": Via.NOT_RUN}
