"""What a failed attempt means: retried or final, charged or free, by kind."""

from collections.abc import Callable

import pytest

from blockx.dispatcher.commands import ArmRetry, EmitResult, FinishTask, StartAttempt
from blockx.dispatcher.events import BindFailed, CallSuspended, RetryDue
from blockx.dispatcher.model import CallCounts, CallResult, Costs, TaskEnd, Via
from blockx.dispatcher.transitions import BACKOFF_MS_MAX
from blockx.errors import MOVES_MAX, RETRY_POLICIES, ErrorKind
from tests.builders import error, snapshot
from tests.dispatcher.shell import Shell

FINAL = [kind for kind in ErrorKind if not RETRY_POLICIES[kind].retryable]
CHARGED = [k for k in ErrorKind if RETRY_POLICIES[k].retryable and RETRY_POLICIES[k].charged]
FREE = [k for k in ErrorKind if RETRY_POLICIES[k].retryable and not RETRY_POLICIES[k].charged]


@pytest.mark.parametrize("kind", FINAL)
def test_a_final_kind_ends_the_call_at_once(shell: Callable[..., Shell], kind: ErrorKind) -> None:
    s = shell()
    s.submit(1)
    assert s.fail("t/0", kind) == [
        EmitResult("t@1", CallResult(0, "t/0", "f", None, error(kind), Via.RAN, 1, 0, Costs())),
        FinishTask(
            "t@1",
            TaskEnd.COMPLETED,
            None,
            CallCounts(calls=1, failed=1, ran=1, executed=1),
            CallCounts(),
        ),
    ]


@pytest.mark.parametrize("kind", CHARGED)
def test_a_charged_kind_is_retried_with_growing_pauses_until_the_attempts_are_used_up(
    shell: Callable[..., Shell], kind: ErrorKind
) -> None:
    s = shell()
    s.submit(1, base_backoff_ms=100)
    [first] = s.fail("t/0", kind)
    assert isinstance(first, ArmRetry)
    assert (first.call_id, first.attempt_seq) == ("t/0", 1)
    assert 100 <= first.delay_ms <= 105
    assert s.names(s.post(RetryDue("t/0", 1))) == ["StartAttempt t/0"]
    [second] = s.fail("t/0", kind)
    assert isinstance(second, ArmRetry)
    assert second.attempt_seq == 2
    assert 200 <= second.delay_ms <= 210
    s.post(RetryDue("t/0", 2))
    assert s.names(s.fail("t/0", kind)) == ["EmitResult t/0", "FinishTask t@1"]
    result = s.results["t/0"]
    assert (result.error, result.attempts, result.moves) == (error(kind), 3, 0)


def test_the_counts_of_a_retried_call(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.fail("t/0", ErrorKind.EXECUTOR_LOST)
    s.post(RetryDue("t/0", 1))
    finish = s.complete("t/0")[-1]
    assert isinstance(finish, FinishTask)
    assert finish.calls == CallCounts(calls=1, ok=1, ran=1, executed=2, retries=1)


@pytest.mark.parametrize("kind", FREE)
def test_a_free_kind_moves_the_call_without_charge(
    shell: Callable[..., Shell], kind: ErrorKind
) -> None:
    s = shell(executors=2)
    s.submit(1)
    commands = s.fail("t/0", kind, body_started=False)
    assert s.names(commands) == ["StartAttempt t/0"]
    assert isinstance(commands[0], StartAttempt)
    assert commands[0].attempt_seq == 2
    s.complete("t/0")
    result = s.results["t/0"]
    assert (result.attempts, result.moves, result.via) == (1, 1, Via.RAN)


def test_an_executor_out_of_capacity_is_left_alone_until_its_next_snapshot(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=2)
    s.submit(1)
    [start] = s.fail("t/0", ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED, body_started=False)
    assert isinstance(start, StartAttempt)
    assert start.executor_id == "exec-1"
    assert s.fail("t/0", ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED, body_started=False) == []
    assert s.names(s.snapshots(snapshot("exec-0"))) == ["StartAttempt t/0"]


def test_the_free_move_after_the_last_one_fails_the_call_with_its_kind(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    for move in range(MOVES_MAX):
        assert s.names(s.fail("t/0", ErrorKind.RESUME_SEND_FAILED)) == ["StartAttempt t/0"], move
    s.fail("t/0", ErrorKind.RESUME_SEND_FAILED)
    result = s.results["t/0"]
    assert result.error == error(ErrorKind.RESUME_SEND_FAILED)
    assert (result.attempts, result.moves) == (0, MOVES_MAX)


def test_a_failed_bind_is_rolled_back_and_retried_at_once_elsewhere(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=2)
    s.full.add("exec-0")
    assert s.submit(1) == [ArmRetry("t/0", 1, 0)]
    [start] = s.post(RetryDue("t/0", 1))
    assert isinstance(start, StartAttempt)
    assert (start.executor_id, start.attempt_seq) == ("exec-1", 2)
    s.complete("t/0")
    assert (s.results["t/0"].attempts, s.results["t/0"].moves) == (1, 1)


def test_binds_that_always_fail_end_the_call_after_the_free_moves(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.full.add("exec-0")
    s.submit(1)
    for _ in range(MOVES_MAX):
        s.post(RetryDue("t/0", s.core.state.calls["t/0"].attempt_seq))
        s.snapshots(snapshot())
    result = s.results["t/0"]
    assert result.error is not None
    assert result.error.kind is ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED
    assert (result.via, result.moves) == (Via.NOT_RUN, MOVES_MAX)


def test_a_bind_failure_after_the_start_is_stale(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    assert s.post(BindFailed("t/0", 1, "exec-0")) == []
    assert s.core.counters == {"stale_bind_failed": 1}


def test_retried_calls_go_before_those_that_did_not_run_yet(shell: Callable[..., Shell]) -> None:
    s = shell(task_max_inflight_calls=1)
    s.submit(3)
    assert s.names(s.fail("t/0", ErrorKind.RESUME_SEND_FAILED)) == ["StartAttempt t/0"]


def test_a_call_that_backs_off_takes_no_room_in_the_window(shell: Callable[..., Shell]) -> None:
    s = shell(task_max_inflight_calls=1)
    s.submit(2)
    assert s.names(s.fail("t/0", ErrorKind.EXECUTOR_LOST)) == ["ArmRetry t/0", "StartAttempt t/1"]


def test_the_pause_is_bounded(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1, base_backoff_ms=1_000, attempts_max=60)
    for attempt in range(1, 60):
        [armed] = s.fail("t/0", ErrorKind.EXECUTOR_LOST)
        assert isinstance(armed, ArmRetry)
        assert armed.delay_ms <= BACKOFF_MS_MAX * 1.05 + 1
        s.post(RetryDue("t/0", attempt))


def test_only_attempts_whose_body_started_are_counted_as_executed(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    s.post(CallSuspended("t/0", 1))
    s.fail("t/0", ErrorKind.RESUME_SEND_FAILED, body_started=False)
    s.fail("t/0", ErrorKind.RESUME_SEND_FAILED, body_started=False)
    finish = s.complete("t/0")[-1]
    assert isinstance(finish, FinishTask)
    assert finish.calls == CallCounts(calls=1, ok=1, ran=1, executed=2, moves=2)
