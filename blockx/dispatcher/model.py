"""Records of the dispatcher: what a call and a task are made of, and what an executor looks like from here.

No logic beyond trivial derivations. ``Call`` and ``Task`` are owned by ``DispatcherCore`` (actor thread);
``CallSpec``, ``CallResult`` and ``ExecutorSnapshot`` are immutable by habit and may cross threads.
``Call.state`` is written by ``transitions`` alone. Times are milliseconds of the monotonic clock, handed
in with the events.
"""

import enum
from collections import deque
from dataclasses import dataclass, field

import msgspec

from blockx.dispatcher.cache import ResultCache
from blockx.errors import ErrorKind


class Record(msgspec.Struct, gc=False):
    """Base of what is made several times for each call and never changed: events, commands, results.

    Made in C: 0.08 us where a dataclass with slots takes 0.3; and not tracked by the garbage collector,
    since a record is never part of a cycle.
    """


class CallState(enum.Enum):
    """The four states of a call; DONE is the only final one."""

    READY = "READY"
    RUNNING = "RUNNING"
    WAITING = "WAITING"
    DONE = "DONE"

    # Members are singletons; the hash of Enum is a Python function, and every transition looks one up.
    __hash__ = object.__hash__


class Via(enum.Enum):
    """How a call came to its outcome; each call of a report is in exactly one of these."""

    RAN = "ran"
    """At least one body started."""
    CACHED = "cached"
    """Answered from the task's result cache."""
    SINGLEFLIGHT = "singleflight"
    """Shared the outcome of an equal call in flight."""
    NOT_RUN = "not_run"
    """Ended before any body started."""

    __hash__ = object.__hash__  # as above: the journal looks up one for each call


class FailurePolicy(enum.Enum):
    """What the final failure of a root call means for its task."""

    CONTINUE = "continue"
    """Nothing."""
    FAIL_FAST = "fail_fast"
    """The task stops: running calls end, no further one starts."""
    STOP_ABOVE_RATIO = "stop_above_ratio"
    """The same, once more than a share of the calls that have ended failed."""


@dataclass(frozen=True, slots=True)
class FunctionRef:
    """A function as a task pinned it."""

    function_id: str
    digest: str
    """SHA-256 of the source, hex."""
    entry: str
    """Name of the entry function in the source."""
    audit: str = ""
    """What the audit gave it, for the executor; empty: it was not audited."""


class CallSpec(Record):
    """One prepared root call; made by the jobs thread, so that the actor decodes nothing."""

    index: int
    """Place in the call list, from 0."""
    function: FunctionRef
    args: bytes
    """Positional arguments, a JSON list."""
    key: bytes
    """Digest and canonical arguments: equal keys are equal calls."""


@dataclass(slots=True)
class CallError:
    """Why a call failed, as it stands in ``results``."""

    kind: ErrorKind
    message: str
    """Begins with the class name of the exception where there was one."""
    stack: str = ""
    local_vars: dict[str, str] = field(default_factory=dict)
    reason: str | None = None
    data: str | None = None


class Costs(Record):
    """What a call used, over all of its attempts, in microseconds."""

    cpu_us: int = 0
    io_us: int = 0
    subcall_us: int = 0
    sleep_us: int = 0
    queue_us: int = 0


class CallResult(Record):
    """The outcome of one root call, exactly one for each."""

    index: int
    call_id: str
    function_id: str
    output: bytes | None
    """Exact JSON on one line; None if the call failed."""
    error: CallError | None
    via: Via
    attempts: int
    """Charged attempts."""
    moves: int
    """Free ones."""
    costs: Costs
    output_tail: str = ""


@dataclass(slots=True)
class CallCounts:
    """Numbers for the report: calls = ran + cached + singleflight + not_run = ok + failed."""

    calls: int = 0
    ok: int = 0
    failed: int = 0
    ran: int = 0
    cached: int = 0
    singleflight: int = 0
    not_run: int = 0
    executed: int = 0
    """Bodies started, over all attempts."""
    retries: int = 0
    """Charged attempts after the first of a call."""
    moves: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """What a job asks of the dispatcher for one run."""

    task_id: str
    """``{job}@{run}``."""
    job_name: str
    """Prefix of call ids: ``{job}/{index}``."""
    instance_id: str
    weight: int = 1
    failure_policy: FailurePolicy = FailurePolicy.CONTINUE
    failure_ratio_max: float = 0.0
    """STOP_ABOVE_RATIO: the share of failed among ended calls above which the task stops."""
    failure_calls_min: int = 1
    """STOP_ABOVE_RATIO: calls that must have ended before the share says anything."""
    attempts_max: int = 3
    base_backoff_ms: int = 0
    """0: the dispatcher's own."""
    call_budget_ms: int = 5_000
    """Budget of one root attempt. 0: no limit."""
    deadline_ms: int = 0
    """Monotonic moment by which the task must end. 0: none."""


class TaskEnd(enum.Enum):
    """Why a task ended."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    """Its failure policy stopped it: FAIL_FAST or STOP_ABOVE_RATIO."""
    CANCELLED = "cancelled"
    OUTPUT_BYTES_EXCEEDED = "output_bytes_exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSnapshot:
    """One executor as the adapter sees it; the dispatcher adds what it bound since."""

    executor_id: str
    incarnation_id: str
    healthy: bool
    """Attached, alive and not draining for replacement."""
    usable_contexts: int
    """Places for root calls, reservations of others already taken off."""
    runnable_count: int
    memory_bytes: int
    heartbeat_seq: int
    """Grows with each sample; the same number twice is the same sample."""
    running_call_seq: int
    """0: none."""
    scheduler_idle_ms: int
    """Age of the last scheduler activity."""
    draining_count: int = 0
    """Cancelled root calls that are still there; taken off ``usable_contexts`` already."""


Rank = tuple[int, int, int, str]
"""Score of an eligible executor: runnable, root calls, headroom (negative), id; smaller is better."""


@dataclass(slots=True, eq=False, repr=False)
class ExecutorView:
    """One incarnation of one executor: its last snapshot plus what the core did to it since.

    A new incarnation gets a new view; calls keep a reference to the one that they are bound to, so that
    late accounting for a dead process cannot reach its successor.
    """

    executor_id: str
    incarnation_id: str
    calls: "dict[str, Call]" = field(default_factory=dict)
    """Bound here now, sub-calls included, in the order of their binds."""
    inflight: int = 0
    """Root calls bound here now (spec: localInflight)."""
    draining: int = 0
    """Aborted since the last snapshot: gone from ``inflight``, not yet from the executor."""
    residue: int = 0
    """Aborted before the last snapshot and still there then; ``usable`` is without their places."""
    usable: int = 0
    load: int = 0
    """Runnable calls: the last sample, plus bound and resumed, minus ended and suspended since."""
    heartbeat_seq: int = -1
    healthy: bool = False
    fit: bool = False
    """Healthy, scheduling, and below the memory mark at its last snapshot."""
    refused: bool = False
    """It turned a call away since the last snapshot: it gets none before the next one."""
    reserved: bool = False
    """Kept empty for, or in use by, one suspected call."""
    open: bool = False
    """Fit, not refused, not reserved: root calls may come."""
    touched: bool = False
    """It changed since it was ranked."""
    rank: Rank | None = None
    """Its score when it was last looked at; None: it was not eligible. Written by ``selection`` alone."""


@dataclass(slots=True, eq=False, repr=False)
class Instance:
    """A fairness group: its tasks take turns, its calls in flight are counted against its weight."""

    instance_id: str
    weight: int = 1
    """The largest of its tasks that have a slot."""
    weights: list[int] = field(default_factory=list)
    """Of its tasks that have a slot, one each."""
    inflight: int = 0
    served_seq: int = 0
    """When it was last served; settles ties for the one that waited longest."""
    used_us: float = 0.0
    """Its clock under fairness by cost: CPU + IO time of ended attempts, each over the weight."""
    mean_us: float = 0.0
    """Running mean of what a root call of it costs, sub-calls included."""
    unsettled_us: int = 0
    """Cost of sub-calls since the last root call ended."""
    turns: "deque[Task]" = field(default_factory=deque)
    """Tasks that may have a call to admit, next one first; the others come back when that changes."""


@dataclass(slots=True, eq=False, repr=False)
class Task:
    """One run of a job, from its first call to ``FinishTask``."""

    spec: TaskSpec
    cache: ResultCache
    production_open: bool = True
    live: "dict[str, Call]" = field(default_factory=dict)
    """Root calls that are not DONE."""
    ready: "deque[Call]" = field(default_factory=deque)
    """Root calls that may be admitted now, next one first."""
    flights: "dict[bytes, Call]" = field(default_factory=dict)
    """Key -> the call that runs it for all others (singleflight leader)."""
    inflight: int = 0
    """Root calls that are RUNNING or WAITING."""
    waiting: int = 0
    """Root calls that are WAITING."""
    counts: CallCounts = field(default_factory=CallCounts)
    subcalls: CallCounts = field(default_factory=CallCounts)
    output_bytes: int = 0
    open_batches: dict[int, int] = field(default_factory=dict)
    """Stream batch -> calls of it that are not DONE."""
    settled_batches: list[int] = field(default_factory=list)
    """Settled since the last flush."""
    instance: Instance | None = None
    """None: waits for a task slot, or has left its own."""
    has_turn: bool = False
    """It stands in its instance's ``turns``."""
    end: TaskEnd | None = None
    """Why it stops early; the first reason stays. None: it does not."""
    stop_error: CallError | None = None
    """What calls that are still READY end with; set together with ``end``."""
    end_error: CallError | None = None
    """Why, for ``FinishTask``."""
    abort_error: CallError | None = None
    """What running calls are aborted with at the next flush. None: they may end by themselves."""
    stop_told: bool = False
    finished: bool = False
    remove_when_finished: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One invocation of one function for its whole life, over all of its attempts."""

    call_id: str
    call_seq: int
    task: Task
    index: int
    """Place in the call list; a sub-call has that of its root."""
    function: FunctionRef
    args: bytes
    key: bytes
    budget_ms: int
    batch_id: int = -1
    """Stream batch of a root call; -1: submitted as a whole list."""
    parent: "Call | None" = None
    depth: int = 0
    request_id: str = ""
    """What the parent waits for."""
    state: CallState = CallState.READY
    view: ExecutorView | None = None
    """Where it is bound; None exactly if READY or DONE."""
    started: bool = False
    """StartAttempt has been ordered for the current attempt."""
    body_started: bool = False
    """The function of the current attempt is known to have started."""
    attempt_seq: int = 0
    """Fencing token: grows with every attempt, never goes back."""
    attempts: int = 0
    """Charged attempts, the current one included."""
    moves: int = 0
    """Free ones."""
    bystander_moves: int = 0
    """Of these: its executor died under another call, which was charged for it."""
    suspicion: int = 0
    """Executors that died while it, or a sub-call of it, ran."""
    free_deaths: int = 0
    bodies: int = 0
    """Attempts whose function started."""
    backing_off: bool = False
    """READY, and ``ArmRetry`` is out."""
    quarantined: bool = False
    """It waits for an executor of its own, or has one."""
    child: "Call | None" = None
    """The sub-call that it waits for; at most one, so the tree of a root is a chain."""
    flight: "Flight | None" = None
    """What it leads or follows; None: it follows no one and no one follows it."""
    costs: Costs | None = None
    budget_used_ms: float = 0.0
    output_tail: str = ""


@dataclass(slots=True, eq=False, repr=False)
class Flight:
    """A leader and those who share its outcome, first come first; written by ``singleflight`` alone."""

    leader: Call
    roots: dict[str, Call] = field(default_factory=dict)
    subcalls: dict[str, Call] = field(default_factory=dict)


def root_of(call: Call) -> Call:
    """The call of the list under which this one runs; itself for a root call."""
    while call.parent is not None:
        call = call.parent
    return call
