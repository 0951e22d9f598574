"""The way out of user code: every read, write, sub-call, sleep and source fetch of a call goes through here.

Runs on the executor's main thread, in the greenlet of the running call. ``wait`` is the only function
that leaves a call (``runtime.step`` is the only one that enters it). Invariants: while bridge code runs,
``ctx.in_user`` is false, so the alarm neither raises here nor touches the socket; signals are checked
before a request is sent and after its answer came, each time again; nothing but the greenlet of
the running call gets through (no ``__del__`` after its end, no thread, no forked child).
"""

import math
import operator
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

from greenlet import getcurrent
from msgspec import Raw

from blockx.errors import (
    BlockxError,
    ErrorKind,
    FunctionCodeFetchError,
    SubcallCycleDetectedError,
    SubcallDepthExceededError,
    SubcallFailedError,
    read_error,
)
from blockx.executor.context import (
    NEVER_NS,
    NS_PER_MS,
    WAITING_FUNCTION_CODE,
    WAITING_IO,
    WAITING_SLEEP,
    WAITING_SUBCALL,
    ExecContext,
    ExecState,
    Wake,
)
from blockx.ipc import exact_json
from blockx.ipc.frames import FrameTooLargeError
from blockx.ipc.messages import CallWaiting, CallWaitingPayload, WaitKind, WireError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from blockx.executor.runtime import ExecutorRuntime

_monotonic_ns = time.monotonic_ns
_modules: dict[str, Any] = sys.modules
_NS_PER_S: Final = 1_000_000_000
_IO: Final = WaitKind.IO

_SUBCALL_ERRORS: Final[dict[str, tuple[type[SubcallFailedError], ErrorKind]]] = {
    ErrorKind.SUBCALL_CYCLE.value: (SubcallCycleDetectedError, ErrorKind.SUBCALL_CYCLE),
    ErrorKind.SUBCALL_DEPTH_EXCEEDED.value: (
        SubcallDepthExceededError,
        ErrorKind.SUBCALL_DEPTH_EXCEEDED,
    ),
}
_READ_KINDS: Final[dict[str, ErrorKind]] = {
    kind.value: kind
    for kind in (
        ErrorKind.REVERTED,
        ErrorKind.BLOCK_UNKNOWN,
        ErrorKind.STATE_PRUNED,
        ErrorKind.MALFORMED,
        ErrorKind.THROTTLED,
        ErrorKind.UNAVAILABLE,
    )
}
"""Kinds of failed reads that a call may end with; any other one ends it as IO_ERROR."""


class SdkBridge:
    """The ``Provider`` of all calls of this executor.

    What a user hands over is checked here and not by its declared type, which a compiled module enforces in words
    of its own: hence ``object`` for what must be text.
    """

    def __init__(self, runtime: "ExecutorRuntime") -> None:
        self._runtime = runtime
        self._fetches: dict[str, list[ExecContext]] = {}
        """Digest on its way -> calls that share the answer. At most one entry a resident call."""

    # ---- what the SDK calls --------------------------------------------------------------------

    def read_req(
        self,
        backend: object,
        operation: object,
        params: Mapping[str, Any],
        *,
        cache_key: object = None,
    ) -> Any:
        """Read through a backend. An answer that came as raw bytes (a sidecar) is returned as bytes.

        Raises:
            ReadError, RevertedError: the read failed.
            InexactValueError: ``params`` has no exact JSON form.
            CallCancelledError, CallDeadlineExceededError: signals; let them pass.
        """
        return self._io(backend, operation, params, cache_key or "", write=False)

    def write_req(self, backend: object, operation: object, params: Mapping[str, Any]) -> Any:
        """Write through a backend; returns when it is durable. Raises like ``read_req``."""
        return self._io(backend, operation, params, "", write=True)

    def capability_req(
        self,
        backend: object,
        operation: object,
        params: Mapping[str, Any],
        *,
        cache_key: object = "",
        sidecar: "Buffer | None" = None,
    ) -> Any:
        """Ask a capability backend; ``sidecar``: raw bytes beside the parameters. Raises like ``read_req``."""
        return self._io(backend, operation, params, cache_key, write=False, sidecar=sidecar)

    def subcall(self, function_id: object, args: Any) -> Any:
        """Call another function of the task; ``args`` is the list of its positional arguments.

        Raises:
            SubcallFailedError and its subclasses: it failed; ``kind`` says how.
            InexactValueError: an argument has no exact JSON form; the text names its path.
        """
        context = self.current()
        callee = _plain_text(function_id, "the id of a function")
        context.last_operation = f"sub-call {callee}"
        now_ns = self._ask(
            context,
            WAITING_SUBCALL,
            CallWaitingPayload(
                wait_kind=WaitKind.SUBCALL,
                task_id=context.task_id,
                attempt_seq=context.attempt_seq,
                function_id=callee,
                args=Raw(exact_json.encode(args if isinstance(args, list) else [args])),
            ),
        )
        wake = self._answer(context, WAITING_SUBCALL, now_ns)
        if wake.error is not None:
            raise _subcall_failed(context, callee, wake.error)
        return exact_json.decode(wake.result)

    def sleep(self, seconds: float | SupportsIndex) -> None:
        """Suspend the call for a time; 0 lets others run. Raises like ``time.sleep``."""
        self._sleep(self.current(), seconds)

    def sleep_in_call(self, seconds: float | SupportsIndex) -> bool:
        """``time.sleep``: suspend the running call, or return False where none is running."""
        context = self._runtime.running
        if context is None or not self._is_callers(context):
            return False
        self._sleep(context, seconds)
        return True

    # ---- what the loader calls -----------------------------------------------------------------

    def do_function_code_req(self, function_id: str, digest: str) -> str:
        """The source of a digest, from main. Calls that miss the same digest share one request.

        If the one that asked is cancelled, the others ask again, one of them for all.

        Raises FunctionCodeFetchError.
        """
        context = self.current()
        while True:
            followers = self._fetches.get(digest)
            if followers is None:
                wake = self._lead_fetch(context, function_id, digest)
            else:
                followers.append(context)
                try:
                    now_ns = self._ask(context, WAITING_FUNCTION_CODE, None)
                    wake = self._answer(context, WAITING_FUNCTION_CODE, now_ns)
                except BaseException:
                    if context in followers:
                        followers.remove(context)
                    raise
            if not wake.lead:
                return _source(function_id, wake)

    def _lead_fetch(self, context: ExecContext, function_id: str, digest: str) -> Wake:
        followers = self._fetches[digest] = []
        payload = CallWaitingPayload(
            wait_kind=WaitKind.FUNCTION_CODE,
            task_id=context.task_id,
            attempt_seq=context.attempt_seq,
            function_id=function_id,
            function_code_digest=digest,
        )
        wake = shared = Wake(lead=True)
        try:
            now_ns = self._ask(context, WAITING_FUNCTION_CODE, payload)
            wake = self._answer(context, WAITING_FUNCTION_CODE, now_ns)
            shared = Wake(wake.result, wake.sidecar, wake.error)
        finally:
            del self._fetches[digest]
            for follower in followers:
                self._runtime.wake(follower, shared)
        return wake

    # ---- waiting -------------------------------------------------------------------------------

    def current(self) -> ExecContext:
        """The running call, if this really is its own code. Raises RuntimeError otherwise."""
        context = self._runtime.running
        if context is None or context.is_over or not self._is_callers(context):
            raise RuntimeError(
                "reads, writes, sub-calls and sleeps work only in the function of a running call: "
                "not in a thread, a forked process, a greenlet of its own, a destructor that runs "
                "while garbage is collected, or after the call's end"
            )
        return context

    def _is_callers(self, context: ExecContext) -> bool:
        """Whether it is the code of this running call that asks."""
        runtime = self._runtime
        return (
            context.in_user
            and getcurrent() is context.greenlet
            and not runtime.late_code.is_collecting
            and not runtime.is_forked
        )

    def wait(
        self, context: ExecContext, state: ExecState, now_ns: int, due_ns: int | None = None
    ) -> Wake:
        """Park until the request that was sent is answered, or until ``due_ns``.

        The only way out of user code. The caller has cleared ``in_user``. ``due_ns`` 0 is a yield.

        Raises:
            CallCancelledError: main gave up on this attempt.
            CallDeadlineExceededError: the budget was used up during the wait.
        """
        runtime = self._runtime
        context.move(state)
        if due_ns is not None:
            runtime.plan_wake(context, due_ns)
        hub = getcurrent().parent
        assert hub is runtime.hub, "wait() called outside of a call's greenlet"
        loops = _modules.get("_asyncio")
        if loops is None:
            wake: Wake | None = hub.switch()
        else:
            # Python keeps the running event loop by thread; the other calls have none, or another.
            loop = loops._get_running_loop()
            loops._set_running_loop(None)
            wake = hub.switch()
            loops._set_running_loop(loop)
        assert runtime.running is context, f"{context.call_id} was switched in by a stranger"
        context.request_id = ""
        resumed_ns = context.step_started_ns
        if wake is not None:
            # What main says it cost, but never more than the wait took.
            waited_ns = resumed_ns - now_ns
            io_ns, subcall_ns = wake.io_ns, wake.budget_used_ns
            if io_ns or subcall_ns:
                context.charge_wait(
                    max(0, min(io_ns, waited_ns)), max(0, min(subcall_ns, waited_ns)), 0
                )
        context.check(resumed_ns)
        assert wake is not None, f"{context.call_id} was woken without an answer"
        return wake

    def _ask(
        self,
        context: ExecContext,
        state: ExecState,
        payload: CallWaitingPayload | None,
        sidecar: bytes | None = None,
    ) -> int:
        """Send a request (None: nothing), for user code: the alarm is kept out until ``_answer`` ends, and a request
        that is too large is a ValueError. Returns the moment.

        Apart from ``_answer``, since a caller keeps what it passes: while thousands wait, nothing of what has been
        sent may be kept (5 KB a call, compiled).
        """
        context.in_user = False
        try:
            now_ns = _monotonic_ns()
            context.check(now_ns)
            if payload is not None:
                self._send(context, state, payload, sidecar, now_ns)
        except FrameTooLargeError as error:
            context.in_user = True
            raise ValueError(
                f"{context.last_operation}: the request is too large: {error}"
            ) from None
        except BaseException:
            context.in_user = True
            raise
        return now_ns

    def _answer(self, context: ExecContext, state: ExecState, now_ns: int) -> Wake:
        """Wait for what was asked at that moment; then it is user code's turn again."""
        try:
            return self.wait(context, state, now_ns)
        finally:
            context.in_user = True

    def _send(
        self,
        context: ExecContext,
        state: ExecState,
        payload: CallWaitingPayload,
        sidecar: bytes | None,
        now_ns: int,
    ) -> None:
        """Queue CallWaiting. Raises FrameTooLargeError, and nothing was sent then."""
        runtime = self._runtime
        payload.budget_left_ms = context.budget_left_ms(now_ns, state)
        if state is WAITING_SUBCALL:
            payload.granted_budget_ms = payload.budget_left_ms
        request_id = runtime.next_request_id()
        message = CallWaiting(
            executor_id=runtime.executor_id,
            call_id=context.call_id,
            request_id=request_id,
            sent_at_ms=now_ns // NS_PER_MS,
            payload=payload,
        )
        if context.span is not None:
            message.trace = context.span.traceparent()
            context.span.event("send CallWaiting", request_id, now_ns)
        runtime.channel.send(message, sidecar)
        context.request_id = request_id

    def _io(
        self,
        backend: object,
        operation: object,
        params: Mapping[str, Any],
        cache_key: object,
        *,
        write: bool,
        sidecar: "Buffer | None" = None,
    ) -> Any:
        context = self.current()
        if type(backend) is not str:
            backend = _plain_text(backend, "a backend")
        if type(operation) is not str:
            operation = _plain_text(operation, "an operation")
        if type(cache_key) is not str:
            cache_key = _plain_text(cache_key, "a cache key")
        raw = sidecar if sidecar is None or type(sidecar) is bytes else bytes(memoryview(sidecar))
        context.last_operation = f"{backend} {operation}"
        now_ns = self._ask(
            context,
            WAITING_IO,
            CallWaitingPayload(
                wait_kind=_IO,
                task_id=context.task_id,
                attempt_seq=context.attempt_seq,
                backend=backend,
                operation=operation,
                params=Raw(exact_json.encode(params if isinstance(params, dict) else dict(params))),
                cache_key=cache_key,
                write=write,
            ),
            raw,
        )
        wake = self._answer(context, WAITING_IO, now_ns)
        if wake.error is not None:
            raise _read_failed(context, wake.error)
        if wake.sidecar is not None:
            return wake.sidecar
        return exact_json.decode(wake.result)

    def _sleep(self, context: ExecContext, seconds: float | SupportsIndex) -> None:
        asked_ns = _sleep_ns(seconds)
        context.in_user = False
        try:
            now_ns = _monotonic_ns()
            context.check(now_ns)
            # A sleep that outlasts the budget ends with it.
            left_ns = context.wait_left_ns(now_ns, WAITING_SLEEP)
            due_ns = now_ns + min(asked_ns, left_ns)
            context.last_operation = "sleep"
            try:
                self.wait(context, WAITING_SLEEP, now_ns, due_ns if asked_ns else 0)
            finally:
                slept_ns = max(0, min(context.step_started_ns, due_ns) - now_ns)
                context.charge_wait(0, 0, slept_ns)
            context.check(_monotonic_ns())
        finally:
            context.in_user = True


def _plain_text(text: object, what: str) -> str:
    """Exactly a ``str``: what is put on the wire must not run code of the user there."""
    if not issubclass(type(text), str):
        raise TypeError(f"{what} is text, not {type(text).__name__}")
    return str.__str__(text)


def _sleep_ns(seconds: float | SupportsIndex) -> int:
    """Nanoseconds of a sleep, refused as ``time.sleep`` refuses it."""
    number = seconds if isinstance(seconds, float) else operator.index(seconds)
    if math.isnan(number):
        raise ValueError("Invalid value NaN (not a number)")
    if number < 0:
        raise ValueError("sleep length must be non-negative")
    if number > NEVER_NS / _NS_PER_S:
        raise OverflowError("timestamp too large to convert to C _PyTime_t")
    return int(number * _NS_PER_S)


def _remember(context: ExecContext, error: BlockxError, kind: ErrorKind) -> BlockxError:
    """If the function lets this very exception pass, the call ends with this kind."""
    context.remote_error = error
    context.remote_kind = kind
    return error


def _read_failed(context: ExecContext, error: WireError) -> BlockxError:
    kind = _READ_KINDS.get(error.kind, ErrorKind.IO_ERROR)
    failed = read_error(
        error.kind,
        error.message,
        retryable=error.retryable,
        reason=error.reason,
        data=error.data,
        status=error.status,
    )
    return _remember(context, failed, kind)


def _subcall_failed(context: ExecContext, function_id: str, error: WireError) -> BlockxError:
    make, kind = _SUBCALL_ERRORS.get(error.kind, (SubcallFailedError, ErrorKind.SUBCALL_FAILED))
    text = f"{function_id}: {error.message}"
    return _remember(context, make(text, kind=error.kind, retryable=error.retryable), kind)


def _source(function_id: str, wake: Wake) -> str:
    if wake.error is not None:
        text = f"the source of {function_id!r} could not be had: {wake.error.message}"
        raise FunctionCodeFetchError(text, kind=wake.error.kind, retryable=wake.error.retryable)
    if wake.sidecar is not None:
        return wake.sidecar.decode("utf-8", "surrogatepass")
    source = exact_json.decode(wake.result)
    if not isinstance(source, str):
        raise FunctionCodeFetchError(f"main answered no source for {function_id!r}")
    return source
