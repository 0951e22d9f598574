"""How attempts and calls end: retry, free move, the one outcome of each call, what its end means for others.

Pure functions over ``CoreState``. Each call is settled exactly once: it becomes DONE, is counted, leaves
memory, and its answer goes to its one recipient (``EmitResult`` for a root call, ``ResumeParent`` for a
sub-call whose parent still waits). Whatever ends an attempt also ends the sub-call under it. Ends of
*tasks* are only marked here; they take effect in ``core.flush``.

Sharing (singleflight): a leader's success and its ``FOLLOWERS_SHARE`` failures go to its followers; on
anything else the next follower leads. A sub-call never waits for a call that itself needs a place on an
executor (such a wait could fill all places with waiters): it leads in that call's stead, here
(``hand_over_lead``) and in ``subcalls``.
"""

from blockx.dispatcher import transitions
from blockx.dispatcher.commands import AbortAttempt, ArmRetry, EmitResult, ResumeParent, UnbindCall
from blockx.dispatcher.events import AttemptCompleted, AttemptFailed
from blockx.dispatcher.model import (
    Call,
    CallCounts,
    CallError,
    CallResult,
    CallState,
    Costs,
    FailurePolicy,
    Task,
    TaskEnd,
    Via,
)
from blockx.dispatcher.singleflight import disband, heir_of, subcall_heir_of, take_lead, unfollow
from blockx.dispatcher.state import CoreState
from blockx.errors import FOLLOWERS_SHARE, MOVES_MAX, RETRY_POLICIES, ErrorKind

READY, DONE = CallState.READY, CallState.DONE
# Names of the module: reading a member of an enum from its class takes several times as long.
RAN, CACHED, SINGLEFLIGHT, NOT_RUN = Via.RAN, Via.CACHED, Via.SINGLEFLIGHT, Via.NOT_RUN

SUBCALL_ATTEMPTS_MAX = 1
"""Charged attempts of a sub-call: its parent decides what a failure means."""


def account_attempt(state: CoreState, call: Call, event: AttemptCompleted | AttemptFailed) -> None:
    """Add what an attempt cost, and what it printed, to the call's account; its instance pays."""
    if event.body_started:
        call.body_started = True
    call.output_tail = event.output_tail
    call.budget_used_ms += event.budget_used_ms
    total, costs = call.costs, event.costs
    turns = state.turns
    if turns.by_cost:
        turns.charge(call.task, costs.cpu_us + costs.io_us, is_root=call.parent is None)
    if total is None:
        call.costs = costs
        return
    call.costs = Costs(
        total.cpu_us + costs.cpu_us,
        total.io_us + costs.io_us,
        total.subcall_us + costs.subcall_us,
        total.sleep_us + costs.sleep_us,
        total.queue_us + costs.queue_us,
    )


def end_attempt(
    state: CoreState, call: Call, to: CallState, cause: str, *, abort: bool = True
) -> None:
    """Take the attempt in flight off its executor, and the sub-call under it with it.

    ``abort``: the executor lives, so the sub-calls on it are to be told; False when it is gone.
    """
    task = call.task
    if call.child is not None:
        cancel_subtree(state, call, abort=abort)
    if call.body_started:
        call.bodies += 1
        (task.counts if call.parent is None else task.subcalls).executed += 1
    transitions.unbind(state, call, to, cause)
    if task.end is not None:
        # The last attempt of a stopping task may end in a move: the flush must look at it all the same.
        state.dirty[task.spec.task_id] = task


def abort_attempt(state: CoreState, call: Call, reason: str) -> None:
    """End the attempt in flight by our own will: RUNNING or WAITING -> DONE; the executor is told."""
    view = call.view
    assert view is not None
    executor_id = view.executor_id
    end_attempt(state, call, DONE, "aborted")
    if call.started:
        if call.parent is None:
            state.turns.charge_estimate(call.task)
            view.draining += 1  # end_attempt has touched the view
        state.out.append(
            AbortAttempt(call.call_id, call.attempt_seq, executor_id, call.call_seq, reason)
        )
    else:
        state.out.append(UnbindCall(call.call_id, executor_id))


PARENT_ENDED = "the call that asked for it has ended"


def cancel_subtree(state: CoreState, parent: Call, *, abort: bool) -> None:
    """Cancel the sub-call of a parent and all below it, the lowest first; the parent is not answered."""
    child = parent.child
    if child is None:
        return
    parent.child = None
    if child.view is None:
        leave_ready(state, child)
        transitions.move(child, DONE, "parent's attempt ended", state.story)
    elif abort:
        abort_attempt(state, child, ErrorKind.CANCELLED.value)
    else:
        end_attempt(state, child, DONE, "executor lost", abort=False)
    settle(state, child, None, CallError(ErrorKind.CANCELLED, PARENT_ENDED))


def leave_ready(state: CoreState, call: Call) -> None:
    """Take a READY call out of wherever it waits, except from its task's ready queue."""
    unfollow(call)
    state.parked.pop(call.call_id, None)


def retry_or_settle(state: CoreState, call: Call, error: CallError) -> None:
    """An attempt failed and is off its executor (the call is READY): what now, by its kind."""
    policy = RETRY_POLICIES[error.kind]
    if policy.retryable and not policy.charged:
        move_free(state, call, error)
        return
    attempts_max = call.task.spec.attempts_max if call.parent is None else SUBCALL_ATTEMPTS_MAX
    if policy.retryable and call.attempts < attempts_max and call.task.end is None:
        hand_over_lead(state, call)
        call.backing_off = True
        pause_ms = transitions.backoff_ms(state, call)
        state.out.append(ArmRetry(call.call_id, call.attempt_seq, pause_ms))
        return
    finish_ready(state, call, None, error, "failed")


def move_free(state: CoreState, call: Call, error: CallError) -> None:
    """Give the attempt back without charge and let the call run elsewhere at once.

    Straight to the front of the ready queue, no timer: the calls before it are gone, so it is the oldest
    work of its task, and holds up the ordered output. No loop can come of it: an executor that turned a
    call away gets none before its next snapshot, and ``MOVES_MAX`` bounds the rest.
    """
    if not use_move(state, call, error):
        return
    if call.parent is not None:
        state.parked[call.call_id] = call
        return
    hand_over_lead(state, call)
    make_ready(state, call)


def move_bystander(state: CoreState, call: Call, error: CallError) -> None:
    """Its executor died under another call, which is charged: move it, whatever number of moves it had.

    Not counted against ``MOVES_MAX``, or twenty functions that crash would end everybody beside them. No loop
    either: each such death takes an attempt of a call.
    """
    call.bystander_moves += 1
    move_free(state, call, error)


def use_move(state: CoreState, call: Call, error: CallError) -> bool:
    """Turn the charged attempt into a free one; False: there were ``MOVES_MAX``, the call has failed."""
    call.attempts -= 1
    if call.moves - call.bystander_moves >= MOVES_MAX:
        finish_ready(state, call, None, error, "no free move left")
        return False
    call.moves += 1
    return True


def make_ready(state: CoreState, call: Call) -> None:
    """A root call that ran before may be admitted again, before those that did not."""
    call.task.ready.appendleft(call)
    state.turns.wake(call.task)


def finish_ready(
    state: CoreState, call: Call, output: bytes | None, error: CallError | None, cause: str
) -> None:
    """Settle a call that is READY and stands in no queue."""
    transitions.move(call, DONE, cause, state.story)
    settle(state, call, output, error)


def settle(
    state: CoreState,
    call: Call,
    output: bytes | None,
    error: CallError | None,
    shared: Via | None = None,
) -> None:
    """Account for a call that has just become DONE, answer its recipient, and forget it.

    ``shared``: CACHED or SINGLEFLIGHT if the outcome is that of another call. A call that had a body of
    its own started (and moved, say, and then followed) counts as RAN all the same.
    """
    assert call.state is DONE
    del state.calls[call.call_id]
    task = call.task
    via = RAN if call.bodies else shared or NOT_RUN
    if call.parent is None:
        if output is not None and state.config.max_collected_output_bytes:
            output, error = _within_output_limit(state, task, output)
        _count(task.counts, call, error, via)
        _emit(state, call, output, error, via)
    else:
        _count(task.subcalls, call, error, via)
        _answer_parent(state, call, output, error)
    if task.flights.get(call.key) is call:
        del task.flights[call.key]
        if call.flight is not None:
            _release_followers(state, call, output, error)


def hand_over_lead(state: CoreState, call: Call) -> None:
    """A root leader is READY again: a sub-call that follows it leads, since it needs no place."""
    heir = subcall_heir_of(call)
    if heir is not None:
        take_lead(heir, call)
        state.promoted.append(heir)


def stop_task(
    state: CoreState,
    task: Task,
    end: TaskEnd,
    error: CallError,
    rest: CallError,
    *,
    abort: bool,
) -> None:
    """Mark a task as stopping; the next flush acts on it.

    ``error`` says why in ``FinishTask``, ``rest`` is what its other calls end with. The first reason
    stays; a later one can only make the stop harder (``abort``).
    """
    if task.finished:
        return
    if task.end is None:
        task.end = end
        task.end_error = error
        task.stop_error = rest
    if abort and task.abort_error is None:
        task.abort_error = rest
    state.dirty[task.spec.task_id] = task


def _within_output_limit(
    state: CoreState, task: Task, output: bytes
) -> tuple[bytes | None, CallError | None]:
    """Discard an output that would take its task over ``max_collected_output_bytes``, and stop the task."""
    limit_bytes = state.config.max_collected_output_bytes
    task.output_bytes += len(output)
    if task.output_bytes <= limit_bytes:
        return output, None
    why = CallError(
        ErrorKind.OUTPUT_BYTES_EXCEEDED,
        "the outputs of the task are over dispatcher.max_collected_output_bytes "
        f"({limit_bytes} bytes); raise it, or return less",
    )
    stop_task(state, task, TaskEnd.OUTPUT_BYTES_EXCEEDED, why, why, abort=True)
    return None, why


def _count(counts: CallCounts, call: Call, error: CallError | None, via: Via) -> None:
    counts.calls += 1
    if error is None:
        counts.ok += 1
    else:
        counts.failed += 1
    if via is RAN:
        counts.ran += 1
    elif via is CACHED:
        counts.cached += 1
    elif via is SINGLEFLIGHT:
        counts.singleflight += 1
    else:
        counts.not_run += 1
    if call.attempts > 1:
        counts.retries += call.attempts - 1
    if call.moves:
        counts.moves += call.moves


def _emit(
    state: CoreState, call: Call, output: bytes | None, error: CallError | None, via: Via
) -> None:
    task = call.task
    task_id = task.spec.task_id
    del task.live[call.call_id]
    state.out.append(
        EmitResult(
            task_id,
            CallResult(
                call.index,
                call.call_id,
                call.function.function_id,
                output,
                error,
                via,
                call.attempts,
                call.moves,
                call.costs or Costs(),
                call.output_tail,
            ),
        )
    )
    batch_id = call.batch_id
    if batch_id >= 0:
        left = task.open_batches[batch_id] - 1
        task.open_batches[batch_id] = left
        if left == 0:
            del task.open_batches[batch_id]
            task.settled_batches.append(batch_id)
    state.dirty[task_id] = task
    if error is not None and task.end is None:
        _apply_failure_policy(state, task, call, error)


def _apply_failure_policy(state: CoreState, task: Task, call: Call, error: CallError) -> None:
    """A root call failed for good: does its task go on?"""
    spec = task.spec
    if spec.failure_policy is FailurePolicy.FAIL_FAST:
        why = f"call {call.call_id} failed before, and the job has failure_policy fail_fast"
    elif spec.failure_policy is FailurePolicy.STOP_ABOVE_RATIO:
        failed, ended = task.counts.failed, task.counts.calls
        if ended < spec.failure_calls_min or failed <= spec.failure_ratio_max * ended:
            return
        why = (
            f"{failed} of {ended} calls failed before, above the failure_ratio_max "
            f"{spec.failure_ratio_max:g} of the job"
        )
        error = CallError(error.kind, f"{why}; the last: {call.call_id}: {error.message}")
    else:
        return
    rest = CallError(ErrorKind.CANCELLED, f"not run: {why}")
    stop_task(state, task, TaskEnd.STOPPED, error, rest, abort=False)


def _answer_parent(
    state: CoreState, call: Call, output: bytes | None, error: CallError | None
) -> None:
    """Resume the parent if it still waits for this very sub-call."""
    parent = call.parent
    assert parent is not None
    if parent.child is not call:
        return
    parent.child = None
    assert parent.view is not None
    retryable = False
    if error is not None:
        retryable = RETRY_POLICIES[error.kind].retryable
        error = CallError(
            ErrorKind.SUBCALL_FAILED,
            f"function {call.function.function_id} failed: {error.kind}: {error.message}",
        )
    state.out.append(
        ResumeParent(
            parent.call_id,
            parent.attempt_seq,
            call.request_id,
            parent.view.executor_id,
            output,
            error,
            retryable,
            call.budget_used_ms,
        )
    )


def _release_followers(
    state: CoreState, leader: Call, output: bytes | None, error: CallError | None
) -> None:
    """The leader is DONE: share its outcome, or let the next follower lead."""
    if error is None or error.kind in FOLLOWERS_SHARE:
        for follower in disband(leader):
            transitions.move(follower, DONE, "leader ended", state.story)
            settle(state, follower, output, error, SINGLEFLIGHT)
        return
    heir = heir_of(leader)
    if heir is None:
        return
    take_lead(heir, leader)
    if heir.parent is None:
        make_ready(state, heir)
    else:
        state.promoted.append(heir)
