"""From submission to the end of a task: whole command lists."""

from collections.abc import Callable
from typing import get_args

from blockx.dispatcher.commands import BindCall, EmitResult, FinishTask, StartAttempt
from blockx.dispatcher.core import DispatcherCore
from blockx.dispatcher.events import (
    AttemptCompleted,
    CallBound,
    CallResumed,
    CallsSubmitted,
    CallSuspended,
    Event,
    SnapshotUpdated,
)
from blockx.dispatcher.model import CallCounts, CallResult, CallState, Costs, TaskEnd, Via
from tests.builders import call_spec, dummy, function_ref, snapshot, task_spec
from tests.dispatcher.shell import Shell


def test_every_event_has_a_handler(core: DispatcherCore) -> None:
    assert set(core._handlers) == set(get_args(Event))


def test_one_call_from_submission_to_the_end_of_its_task(core: DispatcherCore) -> None:
    assert core.handle(SnapshotUpdated([snapshot()], 0)) == []
    assert core.handle(CallsSubmitted(task_spec(deadline_ms=9_000), [call_spec(0)], 0)) == []
    assert core.gauges("t@1") == (1, 0, 0)
    assert core.dispatch(0) == [BindCall("t/0", 1, "exec-0", "")]
    assert core.gauges("t@1") == (0, 1, 0)
    assert core.handle(CallBound("t/0", 1, "exec-0")) == [
        StartAttempt("t/0", 1, "exec-0", "t@1", function_ref(), b"[0]", "", 5_000, 9_000, 1)
    ]
    assert core.dispatch(0) == []
    assert core.flush() == []
    costs = Costs(cpu_us=12, io_us=5)
    assert core.handle(AttemptCompleted("t/0", 1, b'{"a":1}', costs, 5, output_tail="hello\n")) == [
        EmitResult(
            "t@1",
            CallResult(0, "t/0", "f", b'{"a":1}', None, Via.RAN, 1, 0, costs, "hello\n"),
        )
    ]
    assert core.flush() == [
        FinishTask(
            "t@1",
            TaskEnd.COMPLETED,
            None,
            CallCounts(calls=1, ok=1, ran=1, executed=1),
            CallCounts(),
        )
    ]
    assert core.flush() == []
    assert core.gauges("t@1") == (0, 0, 0)
    assert core.story("t/0") == [
        ("t/0", "bound", CallState.READY, CallState.RUNNING),
        ("t/0", "completed", CallState.RUNNING, CallState.DONE),
    ]


def test_a_waiting_call_is_counted_as_waiting_until_it_is_resumed(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    assert s.post(CallSuspended("t/0", 1)) == []
    assert s.core.gauges("t@1") == (0, 0, 1)
    assert s.post(CallResumed("t/0", 1)) == []
    assert s.core.gauges("t@1") == (0, 1, 0)
    s.complete("t/0")
    assert s.results["t/0"].output == b"1"


def test_a_call_may_complete_before_its_resume_was_reported_as_flushed(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(1)
    s.post(CallSuspended("t/0", 1))
    assert s.names(s.complete("t/0")) == ["EmitResult t/0", "FinishTask t@1"]
    assert s.post(CallResumed("t/0", 1)) == []
    assert s.core.counters == {"stale_call_resumed": 1}


def test_an_empty_call_list_finishes_at_once(shell: Callable[..., Shell]) -> None:
    s = shell()
    assert s.submit(0) == [FinishTask("t@1", TaskEnd.COMPLETED, None, CallCounts(), CallCounts())]


def test_calls_wait_without_an_executor_and_start_with_the_first_snapshot(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=0)
    assert s.submit(2) == []
    assert s.names(s.snapshots(snapshot())) == ["StartAttempt t/0", "StartAttempt t/1"]


def test_a_full_house_stops_admission_and_a_finished_call_lets_the_next_one_in(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=0)
    s.snapshots(snapshot(usable_contexts=1))
    assert s.names(s.submit(3)) == ["StartAttempt t/0"]
    assert s.names(s.complete("t/0")) == ["EmitResult t/0", "StartAttempt t/1"]


def test_the_window_of_a_task_bounds_its_calls_in_flight(shell: Callable[..., Shell]) -> None:
    s = shell(task_max_inflight_calls=2)
    s.submit(5)
    assert s.core.gauges("t@1") == (3, 2, 0)
    s.complete("t/0")
    assert s.core.gauges("t@1") == (2, 2, 0)


def test_tasks_beyond_the_slots_wait_for_one_to_finish(shell: Callable[..., Shell]) -> None:
    s = shell(task_slots=1)
    assert s.names(s.submit(1, "a")) == ["StartAttempt a/0"]
    assert s.submit(1, "b") == []
    assert s.names(s.complete("a/0")) == ["EmitResult a/0", "FinishTask a@1", "StartAttempt b/0"]


def test_costs_and_attempts_add_up_over_the_attempts_of_a_call(
    shell: Callable[..., Shell],
) -> None:
    from blockx.dispatcher.events import RetryDue
    from blockx.errors import ErrorKind

    s = shell()
    s.submit(1)
    s.fail("t/0", ErrorKind.CODE_FETCH_FAILED, costs=Costs(1, 2, 3, 4, 5), body_started=False)
    s.post(RetryDue("t/0", 1))
    s.complete("t/0", costs=Costs(10, 20, 30, 40, 50))
    assert s.results["t/0"] == CallResult(
        0, "t/0", "f", b"1", None, Via.RAN, 2, 0, Costs(11, 22, 33, 44, 55)
    )


def test_a_budget_of_zero_reaches_the_executor_as_no_limit(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1, call_budget_ms=0)
    assert s.started["t/0"].budget_ms == 0


def test_call_numbers_are_unique_over_tasks(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(2, "a")
    s.submit(2, "b")
    assert [start.call_seq for start in s.started.values()] == [1, 2, 3, 4]


def test_a_late_event_for_a_finished_task_is_counted(core: DispatcherCore) -> None:
    assert core.handle(dummy(AttemptCompleted, call_id="t/0")) == []
    assert core.counters == {"stale_attempt_completed": 1}
