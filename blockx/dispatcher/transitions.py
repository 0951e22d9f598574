"""Transitions of a call, and its binding to an executor. The only writer of ``Call.state``.

Pure: no I/O, no clock, no choice; the caller has decided. Invariants: a call is bound (``view`` is set)
if and only if it is RUNNING or WAITING; ``attempt_seq`` never goes back; an illegal move changes nothing.
"""

from blockx.dispatcher.commands import BindCall
from blockx.dispatcher.model import Call, CallState, ExecutorView
from blockx.dispatcher.state import CoreState, Story
from blockx.errors import InvalidTransitionError

READY, RUNNING, WAITING, DONE = (
    CallState.READY,
    CallState.RUNNING,
    CallState.WAITING,
    CallState.DONE,
)

LEGAL: dict[CallState, tuple[CallState, ...]] = {
    READY: (RUNNING, DONE),
    RUNNING: (READY, WAITING, DONE),
    WAITING: (RUNNING, READY, DONE),
    DONE: (),
}
"""The diagram of the specification. WAITING -> DONE also for a function that returned before its answer
was reported as flushed."""

BACKOFF_MS_MAX = 60_000
"""Longest pause before a charged retry; reached after 13 doublings of the default base."""
BACKOFF_JITTER_RATIO = 0.05


def move(call: Call, to: CallState, cause: str, story: Story) -> None:
    """Change the state of a call and remember why.

    Raises:
        InvalidTransitionError: our bug; the message holds the call's story, nothing was changed.
    """
    now = call.state
    if to not in LEGAL[now]:
        told = "; ".join(f"{m[1]}: {m[2].name} -> {m[3].name}" for m in story.of(call.call_id))
        raise InvalidTransitionError(
            f"{call.call_id}: {now.name} -> {to.name} on {cause}; story: {told or 'none'}"
        )
    story.tell.append((call.call_id, cause, now, to))
    call.state = to


def bind(state: CoreState, call: Call, view: ExecutorView, parent_call_id: str) -> None:
    """READY -> RUNNING: a new attempt on that executor, charged until it proves to be free."""
    move(call, RUNNING, "bound", state.story)
    call.attempt_seq += 1
    call.attempts += 1
    call.view = view
    call.started = False
    call.body_started = False
    view.calls[call.call_id] = call
    view.load += 1
    state.views.touch(view)
    if call.parent is None:
        view.inflight += 1
        call.task.inflight += 1
        state.turns.took(call.task)
    state.out.append(BindCall(call.call_id, call.attempt_seq, view.executor_id, parent_call_id))


def suspend(state: CoreState, call: Call) -> None:
    """RUNNING -> WAITING: the call is parked, its executor may run others meanwhile."""
    move(call, WAITING, "suspended", state.story)
    call.body_started = True
    view = call.view
    assert view is not None
    if view.load > 0:
        view.load -= 1
        state.views.touch(view)
    if call.parent is None:
        call.task.waiting += 1


def resume(state: CoreState, call: Call) -> None:
    """WAITING -> RUNNING: its answer is on its way to the executor."""
    move(call, RUNNING, "resumed", state.story)
    view = call.view
    assert view is not None
    view.load += 1
    state.views.touch(view)
    if call.parent is None:
        call.task.waiting -= 1


def unbind(state: CoreState, call: Call, to: CallState, cause: str) -> None:
    """End the attempt in flight: RUNNING or WAITING -> READY or DONE, all counts given back."""
    was_waiting = call.state is WAITING
    move(call, to, cause, state.story)
    view = call.view
    assert view is not None
    del view.calls[call.call_id]
    call.view = None
    if view.load > 0 and not was_waiting:
        view.load -= 1
    state.views.touch(view)
    if call.parent is None:
        task = call.task
        view.inflight -= 1
        task.inflight -= 1
        if was_waiting:
            task.waiting -= 1
        state.turns.gave_back(task)
        call.quarantined = False  # the next dispatch sees it and opens the executor again


def backoff_ms(state: CoreState, call: Call) -> int:
    """Pause before the next charged attempt: base * 2^(attempts - 1), plus up to 5 % jitter."""
    base_ms = call.task.spec.base_backoff_ms or state.config.base_backoff_ms
    pause_ms = min(base_ms << min(call.attempts - 1, 30), BACKOFF_MS_MAX)
    return pause_ms + int(pause_ms * BACKOFF_JITTER_RATIO * state.rng.random() + 0.5)
