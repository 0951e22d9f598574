"""Everything that can happen, as plain records in the past tense.

Nobody assigns to a field after creation. ``now_ms`` is the monotonic clock of the actor: the core has none of its own.
"""

from collections.abc import Sequence

from blockx.dispatcher.model import (
    CallError,
    CallSpec,
    Costs,
    ExecutorSnapshot,
    FunctionRef,
    Record,
    TaskSpec,
)
from blockx.errors import ErrorKind


class CallsSubmitted(Record):
    """A whole call list at once (spec: CommitCallPhase)."""

    task: TaskSpec
    calls: Sequence[CallSpec]
    now_ms: int


class StreamOpened(Record):
    """A task that will receive its calls in stream batches (spec: CommitCallStream)."""

    task: TaskSpec
    now_ms: int


class StreamBatchSubmitted(Record):
    """One stream batch of an open task (spec: CommitCallBatch)."""

    task_id: str
    batch_id: int
    calls: Sequence[CallSpec]
    now_ms: int


class ProductionEnded(Record):
    """No further stream batch will come (spec: ProductionDone)."""

    task_id: str


class CallBound(Record):
    """The adapter holds a reservation for the call on that executor."""

    call_id: str
    attempt_seq: int
    executor_id: str


class BindFailed(Record):
    """The adapter could not reserve a place; the attempt is rolled back, free of charge."""

    call_id: str
    attempt_seq: int
    executor_id: str


class CallSuspended(Record):
    """The call is parked on an IO or sub-call request (spec: HandleCallWaiting)."""

    call_id: str
    attempt_seq: int


class CallResumed(Record):
    """The answer to its request has been flushed to the executor (spec: HandleCallResumed)."""

    call_id: str
    attempt_seq: int


class AttemptCompleted(Record):
    """The function returned; its reservation is already free."""

    call_id: str
    attempt_seq: int
    output: bytes
    costs: Costs
    now_ms: int
    body_started: bool = True
    budget_used_ms: float = 0.0
    output_tail: str = ""


class AttemptFailed(Record):
    """The executor, or the adapter on its behalf, gave up on one attempt; its reservation is free.

    Whether it is retried and charged is decided by ``errors.RETRY_POLICIES``.
    """

    call_id: str
    attempt_seq: int
    error: CallError
    costs: Costs
    now_ms: int
    body_started: bool = False
    budget_used_ms: float = 0.0
    output_tail: str = ""


class SubcallRequested(Record):
    """A running call wants another function called (spec: evSubcallRequest).

    ``function`` is None if the task's view has no such function; ``load_error`` is set if its source
    does not compile. ``executor_id`` is the connection that asked: it must be the parent's own.
    """

    parent_call_id: str
    attempt_seq: int
    request_id: str
    executor_id: str
    function_id: str
    function: FunctionRef | None
    load_error: CallError | None
    args: bytes
    key: bytes
    granted_budget_ms: float
    now_ms: int


class SnapshotUpdated(Record):
    """Fresh views of executors; those not named keep their last one."""

    snapshots: Sequence[ExecutorSnapshot]
    now_ms: int


class ExecutorLost(Record):
    """An executor is gone, killed and reaped; all of its calls need a new place.

    ``running_call_seq`` is the call whose code ran when it died (0: none or unknown): its root is charged
    and suspected, everyone else moves free. ``free_of_charge``: the death was a SIGKILL that we did not
    send and no memory limit explains; the first such death of a root is free.
    """

    executor_id: str
    incarnation_id: str
    kind: ErrorKind
    """EXECUTOR_LOST, EXECUTOR_WEDGED or MEMORY_EXCEEDED: what the running call is charged with."""
    detail: str
    """For the message of the call: exit status, signal, how long it was stuck."""
    running_call_seq: int
    free_of_charge: bool
    now_ms: int


class RetryDue(Record):
    """The back-off of a call is over."""

    call_id: str
    attempt_seq: int


class TaskCancelled(Record):
    """Stop a task: running calls are aborted at once, unless ``drain``: then they may end."""

    task_id: str
    drain: bool
    now_ms: int


class CallCancelled(Record):
    """Stop one call, a root call or a sub-call, wherever it is; the rest of its task goes on."""

    call_id: str
    now_ms: int


class TaskRemoved(Record):
    """Forget a task that has ended (spec: RemoveTask)."""

    task_id: str


Event = (
    CallsSubmitted
    | StreamOpened
    | StreamBatchSubmitted
    | ProductionEnded
    | CallBound
    | BindFailed
    | CallSuspended
    | CallResumed
    | AttemptCompleted
    | AttemptFailed
    | SubcallRequested
    | SnapshotUpdated
    | ExecutorLost
    | RetryDue
    | TaskCancelled
    | CallCancelled
    | TaskRemoved
)
