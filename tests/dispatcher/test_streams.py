"""Call lists that arrive in stream batches: credits, level memory, limits, the end."""

from collections.abc import Callable

import pytest

from blockx.dispatcher.commands import (
    EmitResult,
    FinishTask,
    ReturnCredit,
    StopProduction,
)
from blockx.dispatcher.events import (
    ProductionEnded,
    StreamBatchSubmitted,
    StreamOpened,
    TaskRemoved,
)
from blockx.dispatcher.model import CallCounts, CallError, CallResult, Costs, TaskEnd, Via
from blockx.errors import ErrorKind
from tests.builders import call_spec, call_specs, task_spec
from tests.dispatcher.shell import Shell

OVER_LIMIT = CallError(
    ErrorKind.OUTPUT_BYTES_EXCEEDED,
    "the outputs of the task are over dispatcher.max_collected_output_bytes (4 bytes); "
    "raise it, or return less",
)


def opened(s: Shell, job: str = "t") -> Shell:
    s.post(StreamOpened(task_spec(job), 0))
    return s


def batch(s: Shell, batch_id: int, indexes: range) -> list[object]:
    return s.post(StreamBatchSubmitted("t@1", batch_id, call_specs(indexes), 0))


def test_a_credit_returns_when_the_last_call_of_its_stream_batch_is_settled(
    shell: Callable[..., Shell],
) -> None:
    s = opened(shell())
    batch(s, 0, range(2))
    batch(s, 1, range(2, 3))
    assert s.names(s.complete("t/0")) == ["EmitResult t/0"]
    assert s.complete("t/2")[-1] == ReturnCredit("t@1", 1)
    assert s.complete("t/1")[-1] == ReturnCredit("t@1", 0)
    assert isinstance(s.post(ProductionEnded("t@1"))[-1], FinishTask)


def test_a_task_ends_only_when_production_has_ended_and_all_calls_are_settled(
    shell: Callable[..., Shell],
) -> None:
    s = opened(shell())
    batch(s, 0, range(1))
    assert s.post(ProductionEnded("t@1")) == []
    assert s.complete("t/0") == [
        EmitResult("t@1", CallResult(0, "t/0", "f", b"1", None, Via.RAN, 1, 0, Costs())),
        ReturnCredit("t@1", 0),
        FinishTask(
            "t@1",
            TaskEnd.COMPLETED,
            None,
            CallCounts(calls=1, ok=1, ran=1, executed=1),
            CallCounts(),
        ),
    ]


def test_an_empty_stream_batch_returns_its_credit_at_once(shell: Callable[..., Shell]) -> None:
    s = opened(shell())
    assert batch(s, 3, range(0)) == [ReturnCredit("t@1", 3)]


def test_followers_settle_the_stream_batches_that_they_came_in(
    shell: Callable[..., Shell],
) -> None:
    s = opened(shell())
    s.post(StreamBatchSubmitted("t@1", 0, [call_spec(0, b"[1]")], 0))
    s.post(StreamBatchSubmitted("t@1", 1, [call_spec(1, b"[1]")], 0))
    assert s.complete("t/0")[-2:] == [ReturnCredit("t@1", 0), ReturnCredit("t@1", 1)]


def test_a_long_stream_runs_in_level_memory(shell: Callable[..., Shell]) -> None:
    s = opened(shell(call_cache_max_bytes=0))
    for batch_id in range(20):
        batch(s, batch_id, range(batch_id * 5, batch_id * 5 + 5))
        for index in range(batch_id * 5, batch_id * 5 + 5):
            s.complete(f"t/{index}")
    state, task = s.core.state, s.core.state.tasks["t@1"]
    sizes = [len(x) for x in (state.calls, state.dirty, task.live, task.flights, task.open_batches)]
    assert sizes == [0, 0, 0, 0, 0]


def test_a_stream_batch_after_the_end_of_production_is_our_bug(
    shell: Callable[..., Shell],
) -> None:
    s = opened(shell())
    batch(s, 0, range(1))
    s.post(ProductionEnded("t@1"))
    with pytest.raises(AssertionError, match="stream batch 1 after the end"):
        batch(s, 1, range(1, 2))


def test_outputs_over_the_limit_stop_production_and_discard_the_rest(
    shell: Callable[..., Shell],
) -> None:
    s = opened(shell(max_collected_output_bytes=4, task_max_inflight_calls=2))
    batch(s, 0, range(4))
    s.complete("t/0", b"1234")
    commands = s.complete("t/1", b"5")
    assert s.names(commands) == [
        "EmitResult t/1",
        "StopProduction t@1",
        "AbortAttempt t/2",
        "EmitResult t/2",
        "EmitResult t/3",
        "ReturnCredit t@1",
    ]
    assert commands[1] == StopProduction("t@1", "output_bytes_exceeded")
    assert [r.error for r in s.results.values()] == [None, OVER_LIMIT, OVER_LIMIT, OVER_LIMIT]
    assert s.post(ProductionEnded("t@1")) == [
        FinishTask(
            "t@1",
            TaskEnd.OUTPUT_BYTES_EXCEEDED,
            OVER_LIMIT,
            CallCounts(calls=4, ok=1, failed=3, ran=2, not_run=2, executed=2),
            CallCounts(),
        )
    ]


def test_outputs_exactly_at_the_limit_are_fine(shell: Callable[..., Shell]) -> None:
    s = shell(max_collected_output_bytes=4)
    s.submit(2)
    s.complete("t/0", b"12")
    finish = s.complete("t/1", b"34")[-1]
    assert isinstance(finish, FinishTask)
    assert finish.end is TaskEnd.COMPLETED


def test_shared_outputs_count_too_since_they_are_kept(shell: Callable[..., Shell]) -> None:
    s = shell(max_collected_output_bytes=4)
    s.submit([call_spec(n, b"[1]") for n in range(3)])
    s.complete("t/0", b"12")
    assert [r.error for r in s.results.values()] == [None, None, OVER_LIMIT]


def test_a_stream_batch_on_its_way_to_a_stopped_task_gets_results_and_its_credit(
    shell: Callable[..., Shell],
) -> None:
    s = opened(shell(max_collected_output_bytes=4))
    batch(s, 0, range(1))
    s.complete("t/0", b"12345")
    assert s.names(batch(s, 1, range(1, 3))) == [
        "EmitResult t/1",
        "EmitResult t/2",
        "ReturnCredit t@1",
    ]
    assert [r.error for r in s.results.values()] == [OVER_LIMIT] * 3
    assert [r.via for r in s.results.values()] == [Via.RAN, Via.NOT_RUN, Via.NOT_RUN]


def test_a_removed_task_is_forgotten(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.complete("t/0")
    assert s.post(TaskRemoved("t@1")) == []
    assert s.core.state.tasks == {}
    s.results.clear()
    assert s.names(s.submit(1)) == ["StartAttempt t/0"]


def test_removing_a_task_that_runs_cancels_it_first(shell: Callable[..., Shell]) -> None:
    s = opened(shell())
    batch(s, 0, range(1))
    assert s.names(s.post(TaskRemoved("t@1"))) == [
        "AbortAttempt t/0",
        "EmitResult t/0",
        "ReturnCredit t@1",
        "FinishTask t@1",
    ]
    assert s.core.state.tasks == {}


def test_opening_a_task_twice_is_our_bug(shell: Callable[..., Shell]) -> None:
    s = opened(shell())
    with pytest.raises(AssertionError, match="is open already"):
        opened(s)
