"""Late, doubled and foreign input: it changes nothing, and is counted."""

from collections.abc import Callable
from typing import Any

import pytest

from blockx.dispatcher.events import (
    AttemptCompleted,
    AttemptFailed,
    BindFailed,
    CallBound,
    CallResumed,
    CallSuspended,
    ExecutorLost,
    ProductionEnded,
    RetryDue,
    SnapshotUpdated,
    StreamBatchSubmitted,
    SubcallRequested,
    TaskCancelled,
    TaskRemoved,
)
from blockx.errors import ErrorKind
from tests.builders import dummy, error, function_ref, snapshot
from tests.dispatcher.shell import Shell


def events_of(call_id: str, attempt_seq: int) -> dict[str, Any]:
    """Every event about one attempt."""
    common: dict[str, Any] = {"call_id": call_id, "attempt_seq": attempt_seq}
    return {
        "stale_call_bound": dummy(CallBound, **common),
        "stale_bind_failed": dummy(BindFailed, **common),
        "stale_call_suspended": dummy(CallSuspended, **common),
        "stale_call_resumed": dummy(CallResumed, **common),
        "stale_attempt_completed": dummy(AttemptCompleted, **common),
        "stale_attempt_failed": dummy(AttemptFailed, error=error(), **common),
        "stale_retry_due": dummy(RetryDue, **common),
        "stale_subcall_requested": dummy(
            SubcallRequested,
            parent_call_id=call_id,
            attempt_seq=attempt_seq,
            function_id="g",
            function=function_ref("g"),
            args=b"[]",
            key=b"g",
        ),
    }


NAMES = list(events_of("t/0", 1))


def is_dropped(s: Shell, name: str, call_id: str, attempt_seq: int) -> None:
    before = {**s.core.counters}
    states = {c.call_id: (c.state, c.attempt_seq) for c in s.core.state.calls.values()}
    assert s.post(events_of(call_id, attempt_seq)[name]) == []
    assert {c.call_id: (c.state, c.attempt_seq) for c in s.core.state.calls.values()} == states
    assert s.core.counters == before | {name: before.get(name, 0) + 1}


@pytest.mark.parametrize("name", NAMES)
def test_an_event_of_an_older_attempt_is_dropped(shell: Callable[..., Shell], name: str) -> None:
    s = shell()
    s.submit(1)
    s.fail("t/0", ErrorKind.EXECUTOR_LOST)
    s.post(RetryDue("t/0", 1))
    is_dropped(s, name, "t/0", 1)


@pytest.mark.parametrize("name", NAMES)
def test_an_event_of_a_later_attempt_is_dropped(shell: Callable[..., Shell], name: str) -> None:
    s = shell()
    s.submit(1)
    is_dropped(s, name, "t/0", 2)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "stale_retry_due"])
def test_an_event_for_a_call_that_backs_off_is_dropped(
    shell: Callable[..., Shell], name: str
) -> None:
    s = shell()
    s.submit(1)
    s.fail("t/0", ErrorKind.EXECUTOR_LOST)
    is_dropped(s, name, "t/0", 1)


@pytest.mark.parametrize("name", NAMES)
def test_an_event_for_a_finished_call_is_dropped(shell: Callable[..., Shell], name: str) -> None:
    s = shell()
    s.submit(2)
    s.complete("t/0")
    is_dropped(s, name, "t/0", 1)


@pytest.mark.parametrize("name", NAMES)
def test_an_event_for_an_unknown_call_is_dropped(shell: Callable[..., Shell], name: str) -> None:
    s = shell()
    is_dropped(s, name, "never/0", 1)


def test_a_second_bound_does_not_start_the_attempt_twice(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    is_dropped(s, "stale_call_bound", "t/0", 1)


def test_bound_on_another_executor_is_dropped(shell: Callable[..., Shell]) -> None:
    s = shell()
    core = s.core
    s.submit(1)
    core.state.calls["t/0"].started = False
    assert core.handle(CallBound("t/0", 1, "exec-9")) == []
    assert core.counters == {"stale_call_bound": 1}
    assert core.handle(BindFailed("t/0", 1, "exec-9")) == []
    assert core.counters == {"stale_call_bound": 1, "stale_bind_failed": 1}


@pytest.mark.parametrize("name", ["stale_call_suspended", "stale_subcall_requested"])
def test_what_an_attempt_does_before_it_was_started_is_dropped(
    shell: Callable[..., Shell], name: str
) -> None:
    s = shell()
    s.submit(1)
    s.core.state.calls["t/0"].started = False
    is_dropped(s, name, "t/0", 1)


def test_an_old_timer_does_not_end_a_later_back_off(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.fail("t/0", ErrorKind.EXECUTOR_LOST)
    s.post(RetryDue("t/0", 1))
    s.fail("t/0", ErrorKind.EXECUTOR_LOST)
    is_dropped(s, "stale_retry_due", "t/0", 1)


def test_a_doubled_suspension_or_resume_is_dropped(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    is_dropped(s, "stale_call_resumed", "t/0", 1)
    s.post(CallSuspended("t/0", 1))
    is_dropped(s, "stale_call_suspended", "t/0", 1)


def test_a_doubled_timer_does_not_queue_the_call_twice(shell: Callable[..., Shell]) -> None:
    s = shell(executors=1)
    s.submit(1)
    s.fail("t/0", ErrorKind.EXECUTOR_LOST)
    s.snapshots(snapshot(healthy=False))
    s.post(RetryDue("t/0", 1))
    is_dropped(s, "stale_retry_due", "t/0", 1)


def test_a_subcall_asked_for_by_another_executor_is_dropped(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.call_function("t/0", executor_id="exec-9")
    assert s.core.counters == {"stale_subcall_requested": 1}


def test_a_lost_executor_is_lost_once(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.post(dummy(ExecutorLost))
    assert s.post(dummy(ExecutorLost)) == []
    assert s.post(dummy(ExecutorLost, executor_id="exec-7")) == []
    assert s.core.counters == {"stale_executor_lost": 2}


def test_a_snapshot_of_a_dead_incarnation_is_dropped(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(1)
    s.post(dummy(ExecutorLost))
    assert s.post(SnapshotUpdated([snapshot(heartbeat_seq=9)], 0)) == []
    assert s.core.counters == {"stale_snapshot_updated": 1}


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("stale_stream_batch_submitted", dummy(StreamBatchSubmitted)),
        ("stale_production_ended", dummy(ProductionEnded)),
        ("stale_task_cancelled", dummy(TaskCancelled)),
        ("stale_task_removed", dummy(TaskRemoved)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_event_for_an_unknown_task_is_dropped(
    shell: Callable[..., Shell], name: str, event: Any
) -> None:
    s = shell()
    assert s.post(event) == []
    assert s.core.counters == {name: 1}
