"""Tasks that stop early: cancelled, failed fast, overdue."""

from collections.abc import Callable

from blockx.dispatcher.commands import AbortAttempt, FinishTask, StopProduction
from blockx.dispatcher.events import (
    AttemptCompleted,
    CallCancelled,
    ProductionEnded,
    RetryDue,
    StreamBatchSubmitted,
    StreamOpened,
    TaskCancelled,
)
from blockx.dispatcher.model import CallCounts, CallError, FailurePolicy, TaskEnd, Via
from blockx.errors import ErrorKind
from tests.builders import call_spec, call_specs, dummy, error, snapshot, task_spec
from tests.dispatcher.shell import Shell

CANCELLED = CallError(ErrorKind.TASK_CANCELLED, "the task was cancelled")
OVERDUE = CallError(
    ErrorKind.DEADLINE_EXCEEDED, "the task did not end by its deadline (deadline_ms of the job)"
)


def test_a_drained_task_lets_running_calls_end_and_then_settles_the_rest(
    shell: Callable[..., Shell],
) -> None:
    s = shell(task_max_inflight_calls=1)
    s.submit(3)
    assert s.post(TaskCancelled("t@1", True, 0)) == []
    commands = s.complete("t/0", b"7")
    assert s.names(commands) == [
        "EmitResult t/0",
        "EmitResult t/1",
        "EmitResult t/2",
        "FinishTask t@1",
    ]
    assert [(r.output, r.error, r.via) for r in s.results.values()] == [
        (b"7", None, Via.RAN),
        (None, CANCELLED, Via.NOT_RUN),
        (None, CANCELLED, Via.NOT_RUN),
    ]
    assert commands[-1] == FinishTask(
        "t@1",
        TaskEnd.CANCELLED,
        CANCELLED,
        CallCounts(calls=3, ok=1, failed=2, ran=1, not_run=2, executed=1),
        CallCounts(),
    )


def test_followers_of_a_running_call_share_its_outcome_while_the_task_drains(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit([call_spec(0, b"[1]"), call_spec(1, b"[1]")])
    s.post(TaskCancelled("t@1", True, 0))
    s.complete("t/0")
    assert s.results["t/1"].via is Via.SINGLEFLIGHT


def test_a_cancelled_task_aborts_its_running_calls_at_once(shell: Callable[..., Shell]) -> None:
    s = shell(task_max_inflight_calls=1)
    s.submit(2)
    s.call_function("t/0")
    commands = s.post(TaskCancelled("t@1", False, 0))
    assert s.names(commands) == [
        "AbortAttempt t/0/sub-1",
        "AbortAttempt t/0",
        "EmitResult t/0",
        "EmitResult t/1",
        "FinishTask t@1",
    ]
    assert commands[1] == AbortAttempt("t/0", 1, "exec-0", 1, "task_cancelled")
    assert [r.error for r in s.results.values()] == [CANCELLED, CANCELLED]


def test_late_frames_of_aborted_calls_are_stale(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.post(TaskCancelled("t@1", False, 0))
    assert s.post(dummy(AttemptCompleted, call_id="t/0")) == []
    assert s.core.counters == {"stale_attempt_completed": 1}


def test_a_drain_can_be_made_harder_but_its_end_stays(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.post(TaskCancelled("t@1", True, 0))
    assert s.names(s.post(TaskCancelled("t@1", False, 0))) == [
        "AbortAttempt t/0",
        "EmitResult t/0",
        "FinishTask t@1",
    ]


def test_the_first_reason_to_stop_is_the_one_that_is_told(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(2, failure_policy=FailurePolicy.FAIL_FAST)
    s.fail("t/0", ErrorKind.USER_ERROR)
    finish = s.post(TaskCancelled("t@1", False, 0))[-1]
    assert isinstance(finish, FinishTask)
    assert (finish.end, finish.error) == (TaskEnd.STOPPED, error())
    assert s.results["t/1"].error == CANCELLED


def test_followers_of_a_call_that_backs_off_are_settled_with_it(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit([call_spec(n, b"[1]") for n in range(3)])
    s.fail("t/0", ErrorKind.EXECUTOR_LOST)
    s.post(TaskCancelled("t@1", True, 0))
    assert [(r.error, r.via) for r in s.results.values()] == [
        (CANCELLED, Via.RAN),
        (CANCELLED, Via.NOT_RUN),
        (CANCELLED, Via.NOT_RUN),
    ]


def test_the_place_of_an_aborted_call_is_free_with_the_next_snapshot(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=0)
    s.snapshots(snapshot(usable_contexts=1))
    s.submit(1, "a")
    s.submit(1, "b")
    s.post(TaskCancelled("a@1", False, 0))
    assert "b/0" not in s.started
    s.snapshots(snapshot(usable_contexts=1))
    assert "b/0" in s.started


def test_cancelling_an_open_stream_stops_production_first(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.post(StreamOpened(task_spec(), 0))
    s.post(StreamBatchSubmitted("t@1", 0, call_specs(range(1)), 0))
    commands = s.post(TaskCancelled("t@1", False, 0))
    assert commands[0] == StopProduction("t@1", "task_cancelled")
    assert s.names(commands[1:]) == ["AbortAttempt t/0", "EmitResult t/0", "ReturnCredit t@1"]
    assert s.post(TaskCancelled("t@1", False, 0)) == [], "production is stopped once"
    assert s.names(s.post(ProductionEnded("t@1"))) == ["FinishTask t@1"]


def test_a_call_that_backs_off_in_a_stopping_task_is_not_run_again(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(2)
    s.fail("t/0", ErrorKind.EXECUTOR_LOST)
    s.post(TaskCancelled("t@1", True, 0))
    s.complete("t/1")
    assert (s.results["t/0"].error, s.results["t/0"].via) == (CANCELLED, Via.RAN)
    assert s.post(RetryDue("t/0", 1)) == []


def test_a_charged_failure_in_a_stopping_task_is_final(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.post(TaskCancelled("t@1", True, 0))
    s.fail("t/0", ErrorKind.EXECUTOR_LOST)
    assert s.results["t/0"].error == error(ErrorKind.EXECUTOR_LOST)


def test_a_free_move_in_a_stopping_task_ends_as_cancelled(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.post(TaskCancelled("t@1", True, 0))
    s.fail("t/0", ErrorKind.RESUME_SEND_FAILED)
    assert s.results["t/0"].error == CANCELLED


def test_under_fail_fast_the_first_failure_stops_the_task(shell: Callable[..., Shell]) -> None:
    s = shell(task_max_inflight_calls=2)
    s.submit(4, failure_policy=FailurePolicy.FAIL_FAST)
    assert s.names(s.fail("t/0", ErrorKind.USER_ERROR)) == ["EmitResult t/0"]
    commands = s.complete("t/1")
    rest = CallError(
        ErrorKind.CANCELLED,
        "not run: call t/0 failed before, and the job has failure_policy fail_fast",
    )
    assert [r.error for r in s.results.values()] == [error(), None, rest, rest]
    assert commands[-1] == FinishTask(
        "t@1",
        TaskEnd.STOPPED,
        error(),
        CallCounts(calls=4, ok=1, failed=3, ran=2, not_run=2, executed=2),
        CallCounts(),
    )


def test_under_fail_fast_a_retried_failure_does_not_stop_the_task(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1, failure_policy=FailurePolicy.FAIL_FAST)
    s.fail("t/0", ErrorKind.EXECUTOR_LOST)
    s.post(RetryDue("t/0", 1))
    finish = s.complete("t/0")[-1]
    assert isinstance(finish, FinishTask)
    assert finish.end is TaskEnd.COMPLETED


def test_under_continue_failures_do_not_stop_the_task(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(2)
    s.fail("t/0", ErrorKind.USER_ERROR)
    finish = s.complete("t/1")[-1]
    assert isinstance(finish, FinishTask)
    assert (finish.end, finish.error) == (TaskEnd.COMPLETED, None)


def test_a_task_that_is_overdue_is_aborted_by_the_tick(shell: Callable[..., Shell]) -> None:
    s = shell(task_max_inflight_calls=1)
    s.submit(2, deadline_ms=5_000)
    assert s.core.tick(4_999) == []
    commands = s.core.tick(5_000)
    assert s.names(commands) == [
        "AbortAttempt t/0",
        "EmitResult t/0",
        "EmitResult t/1",
        "FinishTask t@1",
    ]
    finish = commands[-1]
    assert isinstance(finish, FinishTask)
    assert (finish.end, finish.error) == (TaskEnd.CANCELLED, OVERDUE)
    assert s.core.tick(9_000) == []


def test_no_call_starts_after_the_deadline_of_its_task(shell: Callable[..., Shell]) -> None:
    s = shell(task_max_inflight_calls=1)
    s.submit(2, deadline_ms=5_000)
    s.now_ms = 5_001
    assert s.names(s.complete("t/0")) == ["EmitResult t/0", "EmitResult t/1", "FinishTask t@1"]


def test_each_task_has_its_own_deadline(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1, "a", deadline_ms=5_000)
    s.submit(1, "b", deadline_ms=3_000)
    s.submit(1, "c")
    assert s.names(s.core.tick(4_000))[-1] == "FinishTask b@1"
    assert s.names(s.core.tick(5_000))[-1] == "FinishTask a@1"
    assert s.core.state.first_deadline_ms == 0


def test_a_task_that_waits_for_a_slot_can_be_cancelled(shell: Callable[..., Shell]) -> None:
    s = shell(task_slots=1)
    s.submit(1, "a")
    s.submit(1, "b")
    assert s.names(s.post(TaskCancelled("b@1", False, 0))) == ["EmitResult b/0", "FinishTask b@1"]


# Share of failures -----------------------------------------------------------------------------------


def test_above_a_share_of_failures_the_task_stops_and_running_calls_end(
    shell: Callable[..., Shell],
) -> None:
    s = shell(task_max_inflight_calls=3)
    policy = FailurePolicy.STOP_ABOVE_RATIO
    s.submit(9, failure_policy=policy, failure_ratio_max=0.5, failure_calls_min=2)
    s.fail("t/0", ErrorKind.USER_ERROR)  # 1 of 1: too few have ended
    s.complete("t/1")  # 1 of 2: not above
    assert s.core.state.tasks["t@1"].end is None
    s.fail("t/2", ErrorKind.USER_ERROR)  # 2 of 3
    s.complete("t/3")
    finish = s.complete("t/4")[-1]
    why = "2 of 3 calls failed before, above the failure_ratio_max 0.5 of the job"
    assert finish == FinishTask(
        "t@1",
        TaskEnd.STOPPED,
        CallError(ErrorKind.USER_ERROR, f"{why}; the last: t/2: ValueError: no"),
        CallCounts(calls=9, ok=3, failed=6, ran=5, not_run=4, executed=5),
        CallCounts(),
    )
    assert s.results["t/8"].error == CallError(ErrorKind.CANCELLED, f"not run: {why}")


# One call ----------------------------------------------------------------------------------------------

CALL_CANCELLED = CallError(ErrorKind.CANCELLED, "the call was cancelled")


def test_cancelling_a_running_call_ends_it_at_once_and_the_others_go_on(
    shell: Callable[..., Shell],
) -> None:
    s = shell(task_max_inflight_calls=1)
    s.submit(2)
    assert s.names(s.post(CallCancelled("t/0", 0))) == [
        "AbortAttempt t/0",
        "EmitResult t/0",
        "StartAttempt t/1",
    ]
    assert s.results["t/0"].error == CALL_CANCELLED
    assert s.post(dummy(AttemptCompleted, call_id="t/0")) == []
    s.complete("t/1")
    assert s.results["t/1"].error is None


def test_cancelling_a_call_that_waits_for_its_turn_takes_it_out_of_the_queue(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=0)
    s.submit(3)
    assert s.names(s.post(CallCancelled("t/1", 0))) == ["EmitResult t/1"]
    s.snapshots(snapshot())
    assert list(s.started) == ["t/0", "t/2"]


def test_when_a_leader_is_cancelled_the_next_follower_leads(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit([call_spec(0, b"[7]"), call_spec(1, b"[7]")])
    assert s.names(s.post(CallCancelled("t/0", 0))) == [
        "AbortAttempt t/0",
        "EmitResult t/0",
        "StartAttempt t/1",
    ]


def test_a_cancelled_follower_does_not_share_what_its_leader_brings(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit([call_spec(0, b"[7]"), call_spec(1, b"[7]")])
    assert s.names(s.post(CallCancelled("t/1", 0))) == ["EmitResult t/1"]
    assert s.names(s.complete("t/0")) == ["EmitResult t/0", "FinishTask t@1"]


def test_a_call_cancelled_while_it_backs_off_is_not_woken(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(2)
    s.fail("t/0", ErrorKind.EXECUTOR_LOST)
    assert s.names(s.post(CallCancelled("t/0", 0))) == ["EmitResult t/0"]
    assert s.post(RetryDue("t/0", 1)) == []
    assert s.core.counters == {"stale_retry_due": 1}


def test_cancelling_a_parent_cancels_what_it_waits_for(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(2)
    s.call_function("t/0")
    assert s.names(s.post(CallCancelled("t/0", 0))) == [
        "AbortAttempt t/0/sub-1",
        "AbortAttempt t/0",
        "EmitResult t/0",
    ]


def test_cancelling_a_subcall_fails_what_its_parent_asked_for(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.call_function("t/0")
    answer = s.post(CallCancelled("t/0/sub-1", 0))
    assert s.names(answer) == ["AbortAttempt t/0/sub-1", "ResumeParent t/0"]
    assert answer[1].error == CallError(
        ErrorKind.SUBCALL_FAILED, "function g failed: cancelled: the call was cancelled"
    )


def test_cancelling_a_parked_subcall_answers_its_parent(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.snapshots(snapshot(healthy=False))
    s.call_function("t/0")
    assert s.names(s.post(CallCancelled("t/0/sub-1", 0))) == ["ResumeParent t/0"]
    assert s.core.state.parked == {}
