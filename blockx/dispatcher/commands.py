"""Everything the core can ask for, as plain records in the imperative.

The orchestrator performs them in list order. Commands of one task about its end come in the order
stop, drain, settled, converge: ``StopProduction`` -> results -> ``ReturnCredit`` -> ``FinishTask``.
"""

from blockx.dispatcher.model import CallCounts, CallError, CallResult, FunctionRef, Record, TaskEnd


class BindCall(Record):
    """Reserve a place at once; answer with CallBound or BindFailed."""

    call_id: str
    attempt_seq: int
    executor_id: str
    parent_call_id: str
    """Empty for a root call; a sub-call passes if its parent holds a live reservation."""


class UnbindCall(Record):
    """Give a reservation back; idempotent."""

    call_id: str
    executor_id: str


class StartAttempt(Record):
    """Send ExecuteCall (spec: DispatchCallCmd)."""

    call_id: str
    attempt_seq: int
    executor_id: str
    task_id: str
    function: FunctionRef
    args: bytes
    parent_call_id: str
    budget_ms: int
    """0: no limit."""
    deadline_ms: int
    """Monotonic moment; 0: none."""
    call_seq: int


class AbortAttempt(Record):
    """Mark the reservation as draining and send CancelCall, best effort (spec: CancelCallCmd)."""

    call_id: str
    attempt_seq: int
    executor_id: str
    call_seq: int
    reason: str


class ArmRetry(Record):
    """Post RetryDue after the delay."""

    call_id: str
    attempt_seq: int
    delay_ms: int


class ResumeParent(Record):
    """Answer the parent's sub-call request: fresh, cached or shared.

    Spec: sendSubcallResume, CompleteCallFromCache.
    """

    parent_call_id: str
    attempt_seq: int
    request_id: str
    executor_id: str
    output: bytes | None
    error: CallError | None
    retryable: bool
    budget_used_ms: float


class EmitResult(Record):
    """A root call is DONE: its one result, to the task's job (spec: outputs, CompleteCallFromCache)."""

    task_id: str
    result: CallResult


class StopProduction(Record):
    """The task wants no further stream batches (spec: StopCallProduction)."""

    task_id: str
    reason: str


class ReturnCredit(Record):
    """All calls of one stream batch are settled (spec: BatchSettled)."""

    task_id: str
    batch_id: int


class FinishTask(Record):
    """The task has ended; nothing of it will follow (spec: ConvergeTaskCalls)."""

    task_id: str
    end: TaskEnd
    error: CallError | None
    calls: CallCounts
    subcalls: CallCounts


Command = (
    BindCall
    | UnbindCall
    | StartAttempt
    | AbortAttempt
    | ArmRetry
    | ResumeParent
    | EmitResult
    | StopProduction
    | ReturnCredit
    | FinishTask
)
JobCommand = EmitResult | StopProduction | ReturnCredit | FinishTask
"""What goes on to the task's job, unchanged."""
