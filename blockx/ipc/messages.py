"""The eight messages between main and an executor: every wire field name, written once.

Pure: no sockets, no clock. A message is one msgspec struct, tagged with ``messageType``; a frame's
JSON is decoded in a single pass into the typed payload, user values stay raw bytes (``Raw``) and are
spliced in verbatim. What arrives is hostile: types are checked by the decoder, sizes by ``frames``,
ids by the adapter. Source of names: the specification, "UDS protocol"; additions: the design, section 2.

Units are in the names; ``*_ms`` are ages or durations, never times of another process.
"""

import enum
from typing import Final

import msgspec
from msgspec import Raw as Raw  # of this package's contract: user values stay bytes

from blockx.errors import PeerProtocolError

NULL: Final = Raw(b"null")
ID_CHARS_MAX: Final = 4_096
"""Longest call, task, request or function id; a longer one is a protocol error."""


class WaitKind(enum.StrEnum):
    """Why a call is parked (wire: ``waitKind`` and ``resumeKind``)."""

    IO = "io"
    SUBCALL = "subcall"
    FUNCTION_CODE = "function_code"


class _Payload(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True, gc=False):
    """Base of payloads: camelCase on the wire, fields at their default left out.

    Not tracked by the garbage collector, as messages are not: they hold texts, numbers and bytes, never
    a cycle, and thousands of them made its passes several percent of main.
    """


class ExecuteCallPayload(_Payload, kw_only=True):
    """Start one attempt. ``args`` is a JSON list; the source is fetched by digest when it is new."""

    task_id: str
    function_id: str
    function_code_digest: str
    entry_selector: str
    args: Raw
    attempt_seq: int
    call_seq: int
    """Number of the call for the heartbeat table; unique in the life of main."""
    parent_call_id: str = ""
    call_budget_ms: int = 0
    """CPU + IO + sub-calls + sleep of this attempt. 0: no limit."""
    call_deadline_ms: int = 0
    """Wall time left to the task, from the arrival of this frame. 0: none."""
    cpu_limit_ms: int = 0
    """CPU time of this attempt alone; 0: no limit of its own. The next three likewise."""
    io_limit_ms: int = 0
    subcall_limit_ms: int = 0
    sleep_limit_ms: int = 0
    debug: bool = False
    """Return the call's stdout and stderr whole in ``outputTail``."""
    audit: str = ""
    """Rules version and digest of an accepted source (``audit.verdict.audit_token``). Empty: it was not audited."""


class WireError(_Payload, kw_only=True):
    """An answer that is a failure: of a read, a sub-call or a source fetch."""

    kind: str
    message: str
    retryable: bool = False
    reason: str | None = None
    """The peer's own words: of a contract that reverted, of a gRPC server."""
    data: str | None = None
    """Raw bytes as 0x-hex, for reverts."""
    status: str = ""
    """Name of the gRPC status, for answers of gRPC servers."""


class ResumeCallPayload(_Payload, kw_only=True):
    """The answer to a pending request: ``result`` (or the sidecar), or ``error``."""

    resume_kind: WaitKind
    attempt_seq: int
    result: Raw = NULL
    error: WireError | None = None
    budget_used_ms: float = 0.0
    """What a sub-call used, for the parent's budget."""
    io_us: int = 0
    """From sending the request that carried the read to its answer; counts against the budget."""
    queue_us: int = 0
    """Linger, queueing, rate limits, pauses between retries; does not count."""


class CancelCallPayload(_Payload, kw_only=True):
    """Give up on one attempt, best effort."""

    reason: str
    attempt_seq: int


class CallWaitingPayload(_Payload, kw_only=True):
    """A call is parked on one request. Which fields are set depends on ``wait_kind``."""

    wait_kind: WaitKind
    task_id: str
    attempt_seq: int
    budget_left_ms: float = 0.0
    """0: no limit. The io side ends the read then."""
    backend: str = ""
    operation: str = ""
    params: Raw = NULL
    cache_key: str = ""
    write: bool = False
    function_id: str = ""
    args: Raw = NULL
    """Sub-call: a JSON list."""
    granted_budget_ms: float = 0.0
    function_code_digest: str = ""


class _TerminalPayload(_Payload, kw_only=True):
    """What every terminal frame carries: which attempt, and what it cost."""

    attempt_seq: int
    body_started: bool = False
    budget_used_ms: float = 0.0
    cpu_us: int = 0
    io_us: int = 0
    subcall_us: int = 0
    sleep_us: int = 0
    queue_us: int = 0
    output_tail: str = ""
    """Last lines that the call printed; whole for a debug call."""


class CallCompletedPayload(_TerminalPayload, kw_only=True):
    """The function returned; ``output`` is its exact JSON on one line."""

    output: Raw = NULL


class CallFailedPayload(_TerminalPayload, kw_only=True):
    """The attempt failed; texts are shortened by the executor (64 KiB together)."""

    error_kind: str
    error_message: str = ""
    error_stack: str = ""
    local_vars: dict[str, str] = {}
    retryable: bool = False
    """What the executor thinks; the dispatcher goes by its own table of kinds."""


class HeartbeatPayload(_Payload, kw_only=True):
    """Attach (first frame of a connection) and, from an executor without a table, its vital signs."""

    executor_process_instance_id: str
    pid: int
    has_table: bool = False
    runnable_count: int = 0
    inflight_count: int = 0
    available_contexts: int = 0
    memory_bytes: int = 0
    executor_cpu_utilization: float = 0.0
    executor_cpu_us_total: int = 0
    scheduler_idle_ms: int = 0
    running_call_seq: int = 0
    running_call_id: str = ""
    call_state_counts: dict[str, int] = {}


class _Message(
    msgspec.Struct,
    rename="camel",
    omit_defaults=True,
    kw_only=True,
    gc=False,
    tag_field="messageType",
):
    """The envelope: every message has these keys beside its payload."""

    executor_id: str = ""
    call_id: str = ""
    request_id: str = ""
    sent_at_ms: int = 0
    """Monotonic clock of the sender, for its own logs."""
    trace: str | None = None


class ExecuteCall(_Message, kw_only=True, tag="ExecuteCall"):
    payload: ExecuteCallPayload


class ResumeCall(_Message, kw_only=True, tag="ResumeCall"):
    payload: ResumeCallPayload


class CancelCall(_Message, kw_only=True, tag="CancelCall"):
    payload: CancelCallPayload


class HeartbeatAck(_Message, kw_only=True, tag="HeartbeatAck"):
    pass


class CallWaiting(_Message, kw_only=True, tag="CallWaiting"):
    payload: CallWaitingPayload


class CallCompleted(_Message, kw_only=True, tag="CallCompleted"):
    payload: CallCompletedPayload


class CallFailed(_Message, kw_only=True, tag="CallFailed"):
    payload: CallFailedPayload


class Heartbeat(_Message, kw_only=True, tag="Heartbeat"):
    payload: HeartbeatPayload


MainMessage = ExecuteCall | ResumeCall | CancelCall | HeartbeatAck
"""What an executor may receive."""
ExecutorMessage = CallWaiting | CallCompleted | CallFailed | Heartbeat
"""What main may receive."""
Message = MainMessage | ExecutorMessage

_encoder = msgspec.json.Encoder()
_main_decoder = msgspec.json.Decoder(MainMessage)
_executor_decoder = msgspec.json.Decoder(ExecutorMessage)

encode_message = _encoder.encode
"""Message -> JSON bytes, ``Raw`` fields spliced in verbatim."""


def decode_main_message(body: bytes | memoryview) -> MainMessage:
    """Decode what main sent. Raises PeerProtocolError for anything else."""
    try:
        return _main_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerProtocolError(f"not a message of main: {error}") from None


def decode_executor_message(body: bytes | memoryview) -> ExecutorMessage:
    """Decode what an executor sent. Raises PeerProtocolError for anything else, overlong ids included."""
    try:
        message = _executor_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerProtocolError(f"not a message of an executor: {error}") from None
    if len(message.call_id) > ID_CHARS_MAX or len(message.request_id) > ID_CHARS_MAX:
        raise PeerProtocolError(f"an id of more than {ID_CHARS_MAX} characters")
    return message
