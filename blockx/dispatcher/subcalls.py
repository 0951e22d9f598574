"""Child calls: what a function asks for with ``function.call``.

Pure functions over ``CoreState``. A sub-call is a call of its own with one charged attempt; it never
appears in a job's results, takes no place on an executor, and runs where its parent runs: bound without
admission, or parked while that executor takes nothing (spec: PendingBindSubcalls) and tried again with
each snapshot. Its parent waits for it, so a call has at most one and the tree of a root is a chain. The
core keeps that chain itself: depth and cycles do not depend on what an executor says.

≠ The specification also binds parked sub-calls when their parent is bound. Here a parent that is not
bound has no sub-calls: they end with the attempt that asked for them.
"""

import math

from blockx.dispatcher import singleflight, transitions
from blockx.dispatcher.commands import ResumeParent
from blockx.dispatcher.events import SubcallRequested
from blockx.dispatcher.model import Call, CallError, CallState, FunctionRef, Via
from blockx.dispatcher.outcomes import cancel_subtree, settle
from blockx.dispatcher.state import CoreState
from blockx.errors import ErrorKind


def request(state: CoreState, parent: Call, event: SubcallRequested) -> None:
    """A call in flight, on the executor that asks, wants another function called."""
    parent.body_started = True
    if parent.child is not None:
        # A call waits for one answer at a time: the executor has given up on the older request.
        cancel_subtree(state, parent, abort=True)
    refused = _refusal(state, parent, event)
    if refused is not None or event.function is None:
        _refuse(state, parent, event, refused or _not_found(event))
        return
    call = _make(state, parent, event, event.function)
    task = call.task
    if not state.config.share_results:
        start(state, call)
        return
    output = task.cache.get(call.key)
    if output is not None:
        transitions.move(call, CallState.DONE, "cached", state.story)
        settle(state, call, output, None, Via.CACHED)
        return
    leader = task.flights.get(call.key)
    if leader is None:
        task.flights[call.key] = call
        start(state, call)
    elif singleflight.needs_place(leader):
        singleflight.take_lead(call, leader)
        start(state, call)
    elif singleflight.would_wait_for_itself(call, leader):
        start(state, call)
    else:
        singleflight.follow(call, leader)


def start(state: CoreState, call: Call) -> None:
    """Bind a READY sub-call to its parent's executor, or park it."""
    parent = call.parent
    assert parent is not None
    view = parent.view
    assert view is not None, f"{call.call_id} has a parent that is not bound"
    if view.healthy:
        transitions.bind(state, call, view, parent.call_id)
    else:
        state.parked[call.call_id] = call


def start_promoted(state: CoreState) -> None:
    """Bind the sub-calls that came to lead while the event at hand was handled."""
    while state.promoted:
        for call in _drain(state.promoted):
            if call.state is CallState.READY:
                start(state, call)


def start_parked(state: CoreState) -> None:
    """Fresh snapshots: try the parked ones again, oldest first."""
    if state.parked:
        waiting = list(state.parked.values())
        state.parked.clear()
        for call in waiting:
            start(state, call)


def _drain(calls: list[Call]) -> list[Call]:
    drained = calls[:]
    calls.clear()
    return drained


def _make(state: CoreState, parent: Call, event: SubcallRequested, function: FunctionRef) -> Call:
    state.subcall_seq += 1
    state.call_seq += 1
    call = Call(
        f"{parent.call_id}/sub-{state.subcall_seq}",
        state.call_seq,
        parent.task,
        parent.index,
        function,
        event.args,
        event.key,
        _budget_ms(event.granted_budget_ms, parent.budget_ms),
        parent=parent,
        depth=parent.depth + 1,
        request_id=event.request_id,
    )
    parent.child = call
    state.calls[call.call_id] = call
    return call


def _budget_ms(granted_ms: float, parent_ms: int) -> int:
    """What the parent grants, never more than its own budget. 0: no limit, on either side."""
    budget_ms = math.ceil(granted_ms) if granted_ms > 0 else 0
    if parent_ms and (budget_ms == 0 or budget_ms > parent_ms):
        return parent_ms
    return budget_ms


def _refusal(state: CoreState, parent: Call, event: SubcallRequested) -> CallError | None:
    """Why the sub-call cannot be; None: it can."""
    function_id = event.function_id
    why = event.load_error
    if why is not None:
        if why.kind is ErrorKind.FUNCTION_NOT_FOUND:
            return why
        return CallError(
            ErrorKind.SUBCALL_FAILED, f"function {function_id} failed: {why.kind}: {why.message}"
        )
    if event.function is None:
        return _not_found(event)
    ancestor: Call | None = parent
    while ancestor is not None:
        if ancestor.key == event.key:
            return CallError(
                ErrorKind.SUBCALL_CYCLE,
                f"function {function_id} would wait for itself: it is called again with the same "
                f"arguments by {_lineage(parent)}",
            )
        ancestor = ancestor.parent
    depth_max = state.config.max_subcall_depth
    if parent.depth >= depth_max:
        return CallError(
            ErrorKind.SUBCALL_DEPTH_EXCEEDED,
            f"function {function_id} would be {parent.depth + 1} calls deep "
            f"(dispatcher.max_subcall_depth is {depth_max}), called by {_lineage(parent)}",
        )
    return None


def _not_found(event: SubcallRequested) -> CallError:
    return CallError(
        ErrorKind.FUNCTION_NOT_FOUND, f"there is no function {event.function_id} to call"
    )


def _lineage(call: Call) -> str:
    """The functions from the root down to the call: ``a -> b -> c``."""
    names: list[str] = []
    ancestor: Call | None = call
    while ancestor is not None:
        names.append(ancestor.function.function_id)
        ancestor = ancestor.parent
    return " -> ".join(reversed(names))


def _refuse(state: CoreState, parent: Call, event: SubcallRequested, error: CallError) -> None:
    """Answer at once; the sub-call never becomes a call, but is counted as one that did not run."""
    counts = parent.task.subcalls
    counts.calls += 1
    counts.failed += 1
    counts.not_run += 1
    state.out.append(
        ResumeParent(
            parent.call_id,
            parent.attempt_seq,
            event.request_id,
            event.executor_id,
            None,
            error,
            retryable=False,
            budget_used_ms=0.0,
        )
    )
