"""Errors: the kinds a call can end with, what users may catch, what only the framework raises.

Four families, four reactions. Our bug: an ``AssertionError`` (crash, print the story). A peer's bug:
``PeerProtocolError`` (close that one connection). The user's mistake in a file: ``UsageError`` (one
clear message, exit code 2). A user function that failed: an ``ErrorKind`` in its call's record.
No imports from blockx, no I/O. Source of the kinds and of their policy: the design, section 4.
"""

import enum
import functools
import sys
from dataclasses import dataclass
from types import ModuleType


class ErrorKind(enum.StrEnum):
    """Why a call (or one attempt of it) failed; the text is what stands in ``results``."""

    USER_ERROR = "user_error"
    OUTPUT_NOT_SERIALIZABLE = "output_not_serializable"
    OUTPUT_TOO_LARGE = "output_too_large"
    LOAD_ERROR = "load_error"
    FUNCTION_NOT_FOUND = "function_not_found"
    INVALID_CALL = "invalid_call"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    TASK_CANCELLED = "task_cancelled"
    OUTPUT_BYTES_EXCEEDED = "output_bytes_exceeded"
    REVERTED = "reverted"
    BLOCK_UNKNOWN = "block_unknown"
    STATE_PRUNED = "state_pruned"
    MALFORMED = "malformed"
    IO_ERROR = "io_error"
    SUBCALL_FAILED = "subcall_failed"
    SUBCALL_DEPTH_EXCEEDED = "subcall_depth_exceeded"
    SUBCALL_CYCLE = "subcall_cycle"
    SUBCALL_PARENT_NOT_RESIDENT = "subcall_parent_not_resident"
    EXECUTOR_LOST = "executor_lost"
    EXECUTOR_WEDGED = "executor_wedged"
    MEMORY_EXCEEDED = "memory_exceeded"
    CODE_FETCH_FAILED = "code_fetch_failed"
    EXECUTOR_CAPACITY_EXHAUSTED = "executor_capacity_exhausted"
    RESUME_SEND_FAILED = "resume_send_failed"
    THROTTLED = "throttled"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What happens to a call whose attempt failed with a kind."""

    retryable: bool
    """The call may get another attempt."""
    charged: bool
    """The attempt counts against ``attempts``; otherwise it is one of at most ``MOVES_MAX`` free moves."""


_FINAL = RetryPolicy(retryable=False, charged=True)
_CHARGED = RetryPolicy(retryable=True, charged=True)
_FREE = RetryPolicy(retryable=True, charged=False)

RETRY_POLICIES: dict[ErrorKind, RetryPolicy] = {
    **dict.fromkeys(ErrorKind, _FINAL),
    ErrorKind.EXECUTOR_LOST: _CHARGED,
    ErrorKind.EXECUTOR_WEDGED: _CHARGED,
    ErrorKind.MEMORY_EXCEEDED: _CHARGED,
    ErrorKind.CODE_FETCH_FAILED: _CHARGED,
    ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED: _FREE,
    ErrorKind.RESUME_SEND_FAILED: _FREE,
}
"""The table of the design, section 4. ``THROTTLED`` and ``UNAVAILABLE`` are final here since their
retries happen inside the read; what reaches the dispatcher is a read that gave up."""

MOVES_MAX = 20
"""Free attempts of one call, beside those that a death charged to another call costs it. Full: the next free move
fails the call with the kind of that move."""

FOLLOWERS_SHARE = frozenset(
    {
        ErrorKind.USER_ERROR,
        ErrorKind.OUTPUT_NOT_SERIALIZABLE,
        ErrorKind.OUTPUT_TOO_LARGE,
        ErrorKind.LOAD_ERROR,
        ErrorKind.REVERTED,
    }
)
"""Failures of a singleflight leader that its followers share; on any other the next one leads."""


class UsageError(Exception):
    """A mistake of the user in a file or on the command line; the text says where, what and what to do.

    The command line prints the text alone and exits with code 2.
    """


class PeerProtocolError(Exception):
    """The other end of a socket broke the protocol: its connection is closed, nothing else."""


class InvalidTransitionError(AssertionError):
    """Our bug: a state machine was asked for a move that is not in its table. Nothing was changed."""


class CallSignal(BaseException):
    """Base of the framework's signals; derives from BaseException so that ``except Exception`` lets it pass."""


class CallCancelledError(CallSignal):
    """The main process gave up on this attempt. Raised at a safe point; let it pass."""


class CallDeadlineExceededError(CallSignal):
    """The call's budget is used up. Raised at a safe point or by the alarm; let it pass."""


class BlockxError(Exception):
    """Base of what user code may catch; ``kind`` is the text of an ``ErrorKind``."""

    kind: str = ErrorKind.IO_ERROR
    retryable: bool = False

    def __init__(
        self, message: str, *, kind: str | None = None, retryable: bool | None = None
    ) -> None:
        super().__init__(message)
        if kind is not None:
            self.kind = kind
        if retryable is not None:
            self.retryable = retryable


class SubcallFailedError(BlockxError):
    """A function called by ``function.call`` failed; the message names it and says why."""

    kind = ErrorKind.SUBCALL_FAILED


class SubcallCycleDetectedError(SubcallFailedError):
    """A function called itself, directly or through others, with the same arguments."""

    kind = ErrorKind.SUBCALL_CYCLE


class SubcallDepthExceededError(SubcallFailedError):
    """Functions called each other deeper than ``dispatcher.max_subcall_depth``."""

    kind = ErrorKind.SUBCALL_DEPTH_EXCEEDED


class FunctionCodeFetchError(BlockxError):
    """The source of a function could not be had from the main process."""

    kind = ErrorKind.CODE_FETCH_FAILED
    retryable = True


class ReadError(BlockxError):
    """A read of a table or of a node failed; ``kind`` says how."""

    kind = ErrorKind.IO_ERROR


TOO_MUCH = "too much for one answer"
"""Stands in the message of a ReadError when less would have been answered, as a smaller range of blocks."""


class RevertedError(ReadError):
    """A contract reverted: ``reason`` is its text if it gave one, ``data`` the raw bytes."""

    kind = ErrorKind.REVERTED

    def __init__(self, message: str, *, reason: str | None = None, data: bytes = b"") -> None:
        super().__init__(message)
        self.reason = reason
        self.data = data


class GrpcError(ReadError):
    """A gRPC server answered with an error, or not at all: ``status`` as in ``NOT_FOUND``, ``detail`` its words.

    Where the package ``grpc`` is loaded (generated stubs load it), it also is a ``grpc.RpcError`` whose ``code()``
    and ``details()`` answer as usual, so that code written for a real channel goes on working.
    """

    def __init__(
        self, message: str, *, kind: str, status: str, detail: str = "", retryable: bool = False
    ) -> None:
        super().__init__(message, kind=kind, retryable=retryable)
        self.status = status
        self.detail = detail


@functools.cache
def _grpc_error_class(grpc: ModuleType) -> type[GrpcError]:
    """``GrpcError`` with the face of ``grpc.RpcError``."""

    def code(self: GrpcError) -> object:
        return getattr(grpc.StatusCode, self.status, grpc.StatusCode.UNKNOWN)

    def details(self: GrpcError) -> str:
        return self.detail

    return type("GrpcError", (GrpcError, grpc.RpcError), {"code": code, "details": details})


def read_error(
    kind: str,
    message: str,
    *,
    retryable: bool = False,
    reason: str | None = None,
    data: str | None = None,
    status: str = "",
) -> ReadError:
    """The exception for a failed read, from the fields of its answer; ``data`` is 0x-hex."""
    if status:
        # Looked up and not imported: an executor loads grpc only if the user's stubs do.
        grpc = sys.modules.get("grpc")
        made = GrpcError if grpc is None else _grpc_error_class(grpc)
        return made(message, kind=kind, status=status, detail=reason or "", retryable=retryable)
    if kind != ErrorKind.REVERTED:
        return ReadError(message, kind=kind, retryable=retryable)
    try:
        raw = bytes.fromhex((data or "").removeprefix("0x"))
    except ValueError:
        raw = b""
    return RevertedError(message, reason=reason, data=raw)
