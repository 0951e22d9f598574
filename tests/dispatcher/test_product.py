"""The full product: every situation that a call can be in, times every event there is.

``TABLE`` is the behaviour, whole: what the core answers (``ANSWERS``), where the call is afterwards, and what
was counted. An event that means nothing to a call in its situation is dropped: no command, no change.
"""

import typing
from collections.abc import Callable

import pytest

from blockx.dispatcher.events import (
    AttemptCompleted,
    AttemptFailed,
    BindFailed,
    CallBound,
    CallCancelled,
    CallResumed,
    CallsSubmitted,
    CallSuspended,
    Event,
    ExecutorLost,
    ProductionEnded,
    RetryDue,
    SnapshotUpdated,
    StreamBatchSubmitted,
    StreamOpened,
    SubcallRequested,
    TaskCancelled,
    TaskRemoved,
)
from blockx.dispatcher.model import Call, Record
from blockx.dispatcher.singleflight import leader_of
from blockx.errors import ErrorKind
from tests.builders import call_spec, call_specs, dummy, error, function_ref, snapshot, task_spec
from tests.dispatcher.shell import Shell

SITUATIONS = (
    "queued",
    "backing off",
    "following",
    "quarantined",
    "bound",
    "running",
    "waiting",
    "waiting for a sub-call",
    "done",
)
CALL = "t/0"


def put(situation: str) -> Shell:
    """A world in which the call is in that situation; its task stays open, executor 0 lives."""
    s = Shell(executors=0 if situation == "queued" else 1)
    s.post(StreamOpened(task_spec(attempts_max=3), 0))
    first = [call_spec(0)]
    if situation == "following":
        first = [call_spec(1, b"[7]"), call_spec(0, b"[7]")]
    s.post(StreamBatchSubmitted("t@1", 0, first, 0))
    if situation == "backing off":
        s.fail(CALL, ErrorKind.CODE_FETCH_FAILED)
    elif situation == "quarantined":
        _quarantine(s)
    elif situation == "bound":
        s.core.state.calls[CALL].started = False
    elif situation == "waiting":
        s.post(CallSuspended(CALL, 1))
    elif situation == "waiting for a sub-call":
        s.call_function(CALL)
    elif situation == "done":
        s.complete(CALL)
    return s


def _quarantine(s: Shell) -> None:
    """It killed two executors, and waits for one that is busy with another call."""
    for n in range(2):
        seq = s.core.state.calls[CALL].call_seq
        lost = dummy(ExecutorLost, incarnation_id=f"p{n}", running_call_seq=seq)
        s.post(lost)
        s.snapshots(snapshot(incarnation_id=f"p{n + 1}"))
        if n == 1:
            s.post(StreamBatchSubmitted("t@1", 1, [call_spec(1)], 0))
        s.post(RetryDue(CALL, n + 1))


def situation_of(s: Shell) -> str:
    call = s.core.state.calls.get(CALL)
    if call is None:
        return "done"
    if call.view is not None:
        return _bound_situation(call)
    if call.backing_off:
        return "backing off"
    if call.quarantined:
        return "quarantined"
    return "following" if leader_of(call) is not None else "queued"


def _bound_situation(call: Call) -> str:
    if not call.started:
        return "bound"
    if call.child is not None:
        return "waiting for a sub-call"
    return call.state.name.lower()


def events(s: Shell) -> dict[str, Event]:
    """Every event, about this call, its task or its executor, as it would come in good order."""
    call = s.core.state.calls.get(CALL)
    seq = 1 if call is None else call.attempt_seq
    incarnation = (
        s.core.state.views.by_id["exec-0"].incarnation_id if s.core.state.views.by_id else "p0"
    )
    common: dict[str, typing.Any] = {"call_id": CALL, "attempt_seq": seq}
    made: list[Event] = [
        CallsSubmitted(task_spec("u"), [], 0),
        StreamOpened(task_spec("u"), 0),
        StreamBatchSubmitted("t@1", 9, [], 0),
        ProductionEnded("t@1"),
        dummy(CallBound, **common),
        dummy(BindFailed, **common),
        CallSuspended(CALL, seq),
        CallResumed(CALL, seq),
        dummy(AttemptCompleted, **common),
        dummy(AttemptFailed, error=error(), **common),
        dummy(
            SubcallRequested,
            parent_call_id=CALL,
            attempt_seq=seq,
            function_id="h",
            function=function_ref("h"),
            args=b"[]",
            key=b"h",
        ),
        SnapshotUpdated([snapshot(incarnation_id=incarnation, heartbeat_seq=9)], 0),
        dummy(ExecutorLost, incarnation_id=incarnation),
        RetryDue(CALL, seq),
        TaskCancelled("t@1", drain=False, now_ms=0),
        CallCancelled(CALL, 0),
        TaskRemoved("t@1"),
    ]
    return {type(event).__name__: event for event in made}


def observed(situation: str, name: str) -> str:
    """One cell: commands about the call or its task, where the call is then, what was counted."""
    s = put(situation)
    before = situation_of(s)
    event = events(s)[name]
    commands = [
        command.split()[0]
        for command in s.names(s.post(event))
        if command.split()[1].partition("/sub")[0] in (CALL, "t@1")
    ]
    after = situation_of(s)
    stale = [counter.removeprefix("stale_") for counter in s.core.counters]
    parts = [*commands]
    if after != before:
        parts.append(f"-> {after}")
    if stale:
        assert not parts, "stale, and yet something happened"
        return "stale"
    return " ".join(parts) or "."


TABLE: dict[str, tuple[str, ...]] = {
    "CallsSubmitted": (
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
    ),
    "StreamOpened": (
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
    ),
    "StreamBatchSubmitted": (
        "ReturnCredit",
        "ReturnCredit",
        "ReturnCredit",
        "ReturnCredit",
        "ReturnCredit",
        "ReturnCredit",
        "ReturnCredit",
        "ReturnCredit",
        "ReturnCredit",
    ),
    "ProductionEnded": (
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
        "FinishTask",
    ),
    "CallBound": (
        "stale",
        "stale",
        "stale",
        "stale",
        "StartAttempt -> running",
        "stale",
        "stale",
        "stale",
        "stale",
    ),
    "BindFailed": (
        "stale",
        "stale",
        "stale",
        "stale",
        "ArmRetry -> backing off",
        "stale",
        "stale",
        "stale",
        "stale",
    ),
    "CallSuspended": (
        "stale",
        "stale",
        "stale",
        "stale",
        "stale",
        "-> waiting",
        "stale",
        "stale",
        "stale",
    ),
    "CallResumed": (
        "stale",
        "stale",
        "stale",
        "stale",
        "stale",
        "stale",
        "-> running",
        ".",
        "stale",
    ),
    "AttemptCompleted": (
        "stale",
        "stale",
        "stale",
        "stale",
        "EmitResult ReturnCredit -> done",
        "EmitResult ReturnCredit -> done",
        "EmitResult ReturnCredit -> done",
        "AbortAttempt EmitResult ReturnCredit -> done",
        "stale",
    ),
    "AttemptFailed": (
        "stale",
        "stale",
        "stale",
        "stale",
        "EmitResult ReturnCredit -> done",
        "EmitResult ReturnCredit -> done",
        "EmitResult ReturnCredit -> done",
        "AbortAttempt EmitResult ReturnCredit -> done",
        "stale",
    ),
    "SubcallRequested": (
        "stale",
        "stale",
        "stale",
        "stale",
        "stale",
        "StartAttempt -> waiting for a sub-call",
        "StartAttempt -> waiting for a sub-call",
        "AbortAttempt StartAttempt",
        "stale",
    ),
    "SnapshotUpdated": (
        "StartAttempt -> running",
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
    ),
    "ExecutorLost": (
        "stale",
        ".",
        ".",
        ".",
        "-> queued",
        "-> queued",
        "-> queued",
        "-> queued",
        ".",
    ),
    "RetryDue": (
        "stale",
        "StartAttempt -> running",
        "stale",
        "stale",
        "stale",
        "stale",
        "stale",
        "stale",
        "stale",
    ),
    "TaskCancelled": (
        "StopProduction EmitResult ReturnCredit -> done",
        "StopProduction EmitResult ReturnCredit -> done",
        "StopProduction EmitResult ReturnCredit -> done",
        "StopProduction EmitResult ReturnCredit ReturnCredit -> done",
        "StopProduction UnbindCall EmitResult ReturnCredit -> done",
        "StopProduction AbortAttempt EmitResult ReturnCredit -> done",
        "StopProduction AbortAttempt EmitResult ReturnCredit -> done",
        "StopProduction AbortAttempt AbortAttempt EmitResult ReturnCredit -> done",
        "StopProduction",
    ),
    "CallCancelled": (
        "EmitResult ReturnCredit -> done",
        "EmitResult ReturnCredit -> done",
        "EmitResult -> done",
        "EmitResult ReturnCredit -> done",
        "UnbindCall EmitResult ReturnCredit -> done",
        "AbortAttempt EmitResult ReturnCredit -> done",
        "AbortAttempt EmitResult ReturnCredit -> done",
        "AbortAttempt AbortAttempt EmitResult ReturnCredit -> done",
        "stale",
    ),
    "TaskRemoved": (
        "EmitResult ReturnCredit FinishTask -> done",
        "EmitResult ReturnCredit FinishTask -> done",
        "EmitResult ReturnCredit FinishTask -> done",
        "EmitResult ReturnCredit ReturnCredit FinishTask -> done",
        "UnbindCall EmitResult ReturnCredit FinishTask -> done",
        "AbortAttempt EmitResult ReturnCredit FinishTask -> done",
        "AbortAttempt EmitResult ReturnCredit FinishTask -> done",
        "AbortAttempt AbortAttempt EmitResult ReturnCredit FinishTask -> done",
        "FinishTask",
    ),
}
"""Event -> one cell for each of ``SITUATIONS``. ``.``: nothing about this call; ``stale``: dropped, counted."""

CELLS = [(situation, name) for name in TABLE for situation in SITUATIONS]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_situation_is_what_it_says(situation: str) -> None:
    assert situation_of(put(situation)) == situation


@pytest.mark.parametrize(("situation", "name"), CELLS, ids=[f"{n}-{s}" for s, n in CELLS])
def test_an_event_meets_a_call(situation: str, name: str) -> None:
    assert observed(situation, name) == TABLE[name][SITUATIONS.index(situation)]


def test_the_table_has_every_event() -> None:
    names = {kind.__name__ for kind in typing.get_args(Event)}
    assert set(TABLE) == names
    assert {len(row) for row in TABLE.values()} == {len(SITUATIONS)}
    assert all(issubclass(kind, Record) for kind in typing.get_args(Event))


def test_events_that_follow_an_end_change_nothing(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(call_specs([0]))
    s.complete(CALL)
    counted = sum(s.core.counters.values())
    for event in (CallBound(CALL, 1, "exec-0"), CallCancelled(CALL, 0), RetryDue(CALL, 1)):
        assert s.post(event) == []
        counted += 1
        assert sum(s.core.counters.values()) == counted
