"""Functions that call functions."""

from collections.abc import Callable

import pytest

from blockx.dispatcher.commands import (
    AbortAttempt,
    FinishTask,
    ResumeParent,
    StartAttempt,
    UnbindCall,
)
from blockx.dispatcher.events import (
    BindFailed,
    CallResumed,
    ExecutorLost,
    RetryDue,
    TaskCancelled,
)
from blockx.dispatcher.model import CallCounts, CallError, Via
from blockx.errors import ErrorKind
from tests.builders import call_spec, dummy, error, function_ref, key_of, snapshot
from tests.dispatcher.shell import Shell


def child_of(commands: list[object]) -> StartAttempt:
    [start] = commands
    assert isinstance(start, StartAttempt)
    return start


def finish_of(commands: list[object]) -> FinishTask:
    finish = commands[-1]
    assert isinstance(finish, FinishTask)
    return finish


def test_a_subcall_runs_where_its_parent_runs_and_answers_it(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=3)
    s.submit(2)
    assert s.started["t/1"].executor_id == "exec-1"
    assert s.call_function("t/1", args=b"[7]") == [
        StartAttempt(
            "t/1/sub-1",
            1,
            "exec-1",
            "t@1",
            function_ref("g"),
            b"[7]",
            "t/1",
            3_000,
            0,
            3,
        )
    ]
    assert s.complete("t/1/sub-1", b"49", budget_used_ms=12.5) == [
        ResumeParent("t/1", 1, "req-1", "exec-1", b"49", None, False, 12.5)
    ]
    s.post(CallResumed("t/1", 1))
    s.complete("t/1")
    finish = finish_of(s.complete("t/0"))
    assert finish.calls == CallCounts(calls=2, ok=2, ran=2, executed=2)
    assert finish.subcalls == CallCounts(calls=1, ok=1, ran=1, executed=1)
    assert list(s.results) == ["t/1", "t/0"]


def test_a_subcall_takes_no_place_on_a_full_executor(shell: Callable[..., Shell]) -> None:
    s = shell(executors=0, executor_max_inflight=1, executor_max_runnable=1)
    s.snapshots(snapshot(usable_contexts=1))
    s.submit(1)
    assert child_of(s.call_function("t/0")).call_id == "t/0/sub-1"


@pytest.mark.parametrize(
    ("granted_ms", "parent_ms", "budget_ms"),
    [
        (3_000.0, 5_000, 3_000),
        (9_000.0, 5_000, 5_000),
        (0.0, 5_000, 5_000),
        (0.2, 5_000, 1),
        (0.0, 0, 0),
        (70.0, 0, 70),
    ],
)
def test_the_budget_of_a_subcall_is_what_is_granted_within_its_parents(
    shell: Callable[..., Shell], granted_ms: float, parent_ms: int, budget_ms: int
) -> None:
    s = shell()
    s.submit(1, call_budget_ms=parent_ms)
    assert child_of(s.call_function("t/0", granted_budget_ms=granted_ms)).budget_ms == budget_ms


def test_a_failed_subcall_is_told_to_its_parent_with_kind_and_text(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    s.call_function("t/0", "erc20/decimals")
    assert s.fail("t/0/sub-1", ErrorKind.USER_ERROR) == [
        ResumeParent(
            "t/0",
            1,
            "req-1",
            "exec-0",
            None,
            CallError(
                ErrorKind.SUBCALL_FAILED,
                "function erc20/decimals failed: user_error: ValueError: no",
            ),
            False,
            0.0,
        )
    ]


def test_a_subcall_has_one_charged_attempt_and_says_if_a_retry_may_help(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    s.call_function("t/0")
    [resume] = s.fail("t/0/sub-1", ErrorKind.CODE_FETCH_FAILED)
    assert isinstance(resume, ResumeParent)
    assert resume.retryable


def test_a_subcall_that_found_no_room_in_the_outbox_is_tried_again_with_the_next_snapshot(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    s.call_function("t/0")
    failed = s.fail("t/0/sub-1", ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED, body_started=False)
    assert failed == []
    assert s.names(s.snapshots(snapshot())) == ["StartAttempt t/0/sub-1"]


def test_an_unknown_function_is_answered_at_once(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    assert s.call_function("t/0", "nope", function=None) == [
        ResumeParent(
            "t/0",
            1,
            "req-1",
            "exec-0",
            None,
            CallError(ErrorKind.FUNCTION_NOT_FOUND, "there is no function nope to call"),
            False,
            0.0,
        )
    ]
    assert finish_of(s.complete("t/0")).subcalls == CallCounts(calls=1, failed=1, not_run=1)


def test_a_reason_why_there_is_no_such_function_is_passed_on(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    why = error(ErrorKind.FUNCTION_NOT_FOUND, "did you mean gg?")
    [resume] = s.call_function("t/0", function=None, load_error=why)
    assert isinstance(resume, ResumeParent)
    assert resume.error == why


def test_arguments_that_are_no_json_are_told_with_their_kind(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    why = error(ErrorKind.INVALID_CALL, "arguments: 1e400")
    [resume] = s.call_function("t/0", function=None, load_error=why)
    assert isinstance(resume, ResumeParent)
    assert resume.error == CallError(
        ErrorKind.SUBCALL_FAILED, "function g failed: invalid_call: arguments: 1e400"
    )


def test_a_function_that_does_not_load_is_answered_at_once(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    [resume] = s.call_function("t/0", load_error=error(ErrorKind.LOAD_ERROR, "SyntaxError: x"))
    assert isinstance(resume, ResumeParent)
    assert resume.error == CallError(
        ErrorKind.SUBCALL_FAILED, "function g failed: load_error: SyntaxError: x"
    )


def test_depth_is_counted_by_the_core(shell: Callable[..., Shell]) -> None:
    s = shell(max_subcall_depth=2)
    s.submit(1)
    s.call_function("t/0", args=b"[1]")
    s.call_function("t/0/sub-1", args=b"[2]")
    [resume] = s.call_function("t/0/sub-1/sub-2", args=b"[3]")
    assert isinstance(resume, ResumeParent)
    assert (resume.parent_call_id, resume.error) == (
        "t/0/sub-1/sub-2",
        CallError(
            ErrorKind.SUBCALL_DEPTH_EXCEEDED,
            "function g would be 3 calls deep (dispatcher.max_subcall_depth is 2), "
            "called by f -> g -> g",
        ),
    )


def test_a_depth_limit_of_zero_allows_no_subcalls(shell: Callable[..., Shell]) -> None:
    s = shell(max_subcall_depth=0)
    s.submit(1)
    [resume] = s.call_function("t/0")
    assert isinstance(resume, ResumeParent)
    assert resume.error is not None
    assert resume.error.kind is ErrorKind.SUBCALL_DEPTH_EXCEEDED


def test_a_cycle_is_found_over_the_whole_chain(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.call_function("t/0", "g")
    [resume] = s.call_function("t/0/sub-1", "f", args=b"[0]")
    assert isinstance(resume, ResumeParent)
    assert resume.error == CallError(
        ErrorKind.SUBCALL_CYCLE,
        "function f would wait for itself: it is called again with the same arguments by f -> g",
    )


def test_the_same_function_with_other_arguments_is_no_cycle(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    assert child_of(s.call_function("t/0", "f", args=b"[1]")).call_id == "t/0/sub-1"


def test_a_finished_subcall_answers_equal_ones_of_the_task(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(2)
    s.call_function("t/0")
    s.complete("t/0/sub-1", b"6", budget_used_ms=3.0)
    assert s.call_function("t/1") == [
        ResumeParent("t/1", 1, "req-2", "exec-0", b"6", None, False, 0.0)
    ]
    s.complete("t/0")
    finish = finish_of(s.complete("t/1"))
    assert finish.subcalls == CallCounts(calls=2, ok=2, ran=1, cached=1, executed=1)


def test_a_root_call_answers_an_equal_subcall_and_the_other_way_round(
    shell: Callable[..., Shell],
) -> None:
    s = shell(task_max_inflight_calls=2)
    s.submit([call_spec(0, b"[]", "g"), call_spec(1), call_spec(2, b"[9]", "h")])
    assert s.call_function("t/1", "g") == []
    assert s.names(s.complete("t/0", b"6")) == [
        "EmitResult t/0",
        "ResumeParent t/1",
        "StartAttempt t/2",
    ]


def test_equal_subcalls_in_flight_share_success_and_failure(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=2)
    s.submit(2)
    s.call_function("t/0")
    assert s.call_function("t/1") == []
    assert s.fail("t/0/sub-1", ErrorKind.REVERTED, budget_used_ms=9.0) == [
        ResumeParent(
            "t/0", 1, "req-1", "exec-0", None,
            CallError(ErrorKind.SUBCALL_FAILED, "function g failed: reverted: ValueError: no"),
            False, 9.0,
        ),
        ResumeParent(
            "t/1", 1, "req-2", "exec-1", None,
            CallError(ErrorKind.SUBCALL_FAILED, "function g failed: reverted: ValueError: no"),
            False, 0.0,
        ),
    ]  # fmt: skip


def test_without_sharing_each_subcall_runs(shell: Callable[..., Shell]) -> None:
    s = shell(share_results=False)
    s.submit(2)
    s.call_function("t/0")
    assert child_of(s.call_function("t/1")).call_id == "t/1/sub-2"


def test_the_next_follower_runs_on_its_own_parents_executor_when_the_leader_is_cancelled(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=2)
    s.submit(2)
    s.call_function("t/0")
    s.call_function("t/1")
    assert s.names(s.fail("t/0", ErrorKind.DEADLINE_EXCEEDED)) == [
        "AbortAttempt t/0/sub-1",
        "EmitResult t/0",
        "StartAttempt t/1/sub-2",
    ]
    assert s.started["t/1/sub-2"].executor_id == "exec-1"


def test_the_end_of_a_parent_cancels_the_whole_chain_the_lowest_first(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    s.call_function("t/0", args=b"[1]")
    s.call_function("t/0/sub-1", args=b"[2]")
    commands = s.fail("t/0", ErrorKind.DEADLINE_EXCEEDED)
    assert commands[:2] == [
        AbortAttempt("t/0/sub-1/sub-2", 1, "exec-0", 3, "cancelled"),
        AbortAttempt("t/0/sub-1", 1, "exec-0", 2, "cancelled"),
    ]
    assert s.names(commands[2:]) == ["EmitResult t/0", "FinishTask t@1"]
    assert finish_of(commands).subcalls == CallCounts(
        calls=2, failed=2, ran=1, not_run=1, executed=1
    )


def test_a_retried_parent_starts_its_subcalls_anew(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.call_function("t/0")
    assert s.names(s.fail("t/0", ErrorKind.RESUME_SEND_FAILED)) == [
        "AbortAttempt t/0/sub-1",
        "StartAttempt t/0",
    ]
    assert child_of(s.call_function("t/0")).call_id == "t/0/sub-2"


def test_a_late_answer_of_a_cancelled_subcall_is_stale(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(2)
    s.call_function("t/0")
    s.fail("t/0", ErrorKind.DEADLINE_EXCEEDED)
    assert s.complete("t/0/sub-1") == []
    assert s.core.counters == {"stale_attempt_completed": 1}


def test_a_newer_request_of_the_same_attempt_replaces_the_older_one(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    s.call_function("t/0", args=b"[1]")
    assert s.names(s.call_function("t/0", args=b"[2]")) == [
        "AbortAttempt t/0/sub-1",
        "StartAttempt t/0/sub-2",
    ]


def test_a_subcall_is_parked_while_the_executor_of_its_parent_is_unhealthy(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    s.snapshots(snapshot(healthy=False))
    assert s.call_function("t/0") == []
    assert s.snapshots(snapshot(healthy=False, heartbeat_seq=2)) == []
    assert s.names(s.snapshots(snapshot(heartbeat_seq=3))) == ["StartAttempt t/0/sub-1"]


def test_a_subcall_is_not_bound_to_an_incarnation_that_was_replaced(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    s.snapshots(snapshot(incarnation_id="p1"))
    assert s.call_function("t/0") == []
    assert s.names(s.post(dummy(ExecutorLost))) == ["StartAttempt t/0"]


def test_a_subcall_whose_bind_fails_is_parked_again(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.full.add("exec-0")
    assert s.call_function("t/0") == []
    assert s.snapshots(snapshot()) == []
    s.full.clear()
    start = child_of(s.snapshots(snapshot()))
    assert (start.call_id, start.attempt_seq) == ("t/0/sub-1", 3)
    s.complete("t/0/sub-1")


def test_a_parked_subcall_leaves_with_its_parent(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.full.add("exec-0")
    s.call_function("t/0")
    assert s.names(s.fail("t/0", ErrorKind.DEADLINE_EXCEEDED)) == [
        "EmitResult t/0",
        "FinishTask t@1",
    ]


def test_a_bound_subcall_that_was_not_started_is_unbound_not_aborted(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    s.call_function("t/0")
    s.core.state.calls["t/0/sub-1"].started = False
    assert s.fail("t/0", ErrorKind.DEADLINE_EXCEEDED)[0] == UnbindCall("t/0/sub-1", "exec-0")


def test_crossed_subcalls_do_not_wait_for_each_other(shell: Callable[..., Shell]) -> None:
    """0 calls x, 1 calls y; then x calls y and y calls x."""
    s = shell()
    s.submit(2)
    s.call_function("t/0", "x")
    s.call_function("t/1", "y")
    assert s.call_function("t/0/sub-1", "y") == [], "x waits for the y of call 1"
    start = child_of(s.call_function("t/1/sub-2", "x"))
    assert start.call_id == "t/1/sub-2/sub-4", "so this y must run an x of its own"
    s.complete("t/1/sub-2/sub-4", b"1")
    assert s.names(s.complete("t/1/sub-2", b"2")) == ["ResumeParent t/1", "ResumeParent t/0/sub-1"]


def test_crossed_subcalls_over_three_roots_do_not_wait_in_a_circle(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(3)
    for root, name in enumerate("xyz"):
        s.call_function(f"t/{root}", name)
    assert s.call_function("t/0/sub-1", "y") == []
    assert s.call_function("t/1/sub-2", "z") == []
    assert child_of(s.call_function("t/2/sub-3", "x")).call_id == "t/2/sub-3/sub-6"


def test_a_subcall_leads_in_the_stead_of_a_root_call_that_waits_for_a_place(
    shell: Callable[..., Shell],
) -> None:
    """Else the only place is held by a call that waits for one that waits for the place."""
    s = shell(executors=0, executor_max_inflight=1)
    s.snapshots(snapshot(usable_contexts=1))
    s.submit([call_spec(0, b"[]", "g"), call_spec(1)])
    assert s.names(s.fail("t/0", ErrorKind.EXECUTOR_LOST)) == ["ArmRetry t/0", "StartAttempt t/1"]
    assert child_of(s.call_function("t/1", "g")).call_id == "t/1/sub-1"
    assert s.post(RetryDue("t/0", 1)) == [], "now it follows the sub-call"
    assert s.names(s.complete("t/1/sub-1", b"6")) == ["ResumeParent t/1", "EmitResult t/0"]
    assert (s.results["t/0"].output, s.results["t/0"].via) == (b"6", Via.RAN)


def test_a_root_leader_that_is_retried_hands_over_to_a_subcall_that_follows_it(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit([call_spec(0, b"[]", "g"), call_spec(1)])
    assert s.call_function("t/1", "g") == []
    assert s.names(s.fail("t/0", ErrorKind.EXECUTOR_LOST)) == [
        "ArmRetry t/0",
        "StartAttempt t/1/sub-1",
    ]
    assert s.post(RetryDue("t/0", 1)) == [], "now it follows the sub-call"
    assert s.names(s.complete("t/1/sub-1", b"6")) == ["ResumeParent t/1", "EmitResult t/0"]


def test_a_root_leader_whose_bind_fails_hands_over_too(shell: Callable[..., Shell]) -> None:
    s = shell(executors=2)
    s.submit([call_spec(0, b"[]", "g"), call_spec(1)])
    s.call_function("t/1", "g")
    s.core.state.calls["t/0"].started = False
    assert s.names(s.post(dummy(BindFailed, call_id="t/0"))) == [
        "ArmRetry t/0",
        "StartAttempt t/1/sub-1",
    ]


def test_a_root_leader_that_moves_hands_over_too(shell: Callable[..., Shell]) -> None:
    s = shell(executors=0)
    s.snapshots(snapshot(usable_contexts=2))
    s.submit([call_spec(0, b"[]", "g"), call_spec(1), call_spec(2)])
    s.call_function("t/1", "g")
    commands = s.fail("t/0", ErrorKind.RESUME_SEND_FAILED)
    assert s.names(commands) == ["StartAttempt t/1/sub-1", "StartAttempt t/2"]


def test_a_subcall_is_the_heir_before_a_root_call_that_came_earlier(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=0)
    s.snapshots(snapshot(usable_contexts=2))
    s.submit([call_spec(0, b"[]", "g"), call_spec(1, b"[]", "g"), call_spec(2)])
    s.call_function("t/2", "g")
    assert s.names(s.fail("t/0", ErrorKind.IO_ERROR)) == [
        "EmitResult t/0",
        "StartAttempt t/2/sub-1",
    ]


def test_a_follower_that_is_cancelled_is_not_answered(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(2)
    s.call_function("t/0")
    s.call_function("t/1")
    s.fail("t/1", ErrorKind.DEADLINE_EXCEEDED)
    assert s.names(s.complete("t/0/sub-1")) == ["ResumeParent t/0"]


def test_subcalls_of_a_draining_task_still_run(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.post(dummy(TaskCancelled, drain=True))
    assert child_of(s.call_function("t/0")).call_id == "t/0/sub-1"
    s.complete("t/0/sub-1")
    s.complete("t/0")
    assert s.results["t/0"].output == b"1"


def test_subcall_ids_are_unique_over_parents_and_tasks(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1, "a")
    s.submit(1, "b")
    s.call_function("a/0", args=b"[1]")
    s.call_function("b/0", args=b"[1]")
    assert [i for i in s.started if "sub" in i] == ["a/0/sub-1", "b/0/sub-2"]


def test_the_key_of_a_subcall_is_that_of_an_equal_root_call() -> None:
    assert key_of("g", b"[]") == call_spec(0, b"[]", "g").key


def test_a_parent_that_returns_without_its_answer_cancels_the_subcall(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    s.call_function("t/0")
    assert s.names(s.complete("t/0")) == [
        "AbortAttempt t/0/sub-1",
        "EmitResult t/0",
        "FinishTask t@1",
    ]
