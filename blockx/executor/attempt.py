"""One attempt, from its load to its terminal message.

Main thread; ``run`` in the attempt's lane, the rest also from the hub. Whatever runs user code (loading,
the call, encoding its result, wording its failure) runs with ``in_user`` set, so that the alarm can end it,
and inside the call's budget. Exactly one terminal message an attempt, none for one that was replaced.
A latched signal decides the outcome, whatever the function returned or raised afterwards.
"""

import time
from collections.abc import Callable
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw

from blockx.errors import RETRY_POLICIES, CallSignal, ErrorKind, FunctionCodeFetchError
from blockx.executor.capture import CallOutput, FailureReport, class_name, failure_report
from blockx.executor.context import NS_PER_MS, NS_PER_US, ExecContext
from blockx.executor.loader import LoadedFunction, Loader, is_user_file
from blockx.ipc import exact_json
from blockx.ipc.frames import FRAME_BYTES_MAX, FrameTooLargeError
from blockx.ipc.messages import CallCompleted, CallCompletedPayload, CallFailed, CallFailedPayload

if TYPE_CHECKING:
    from blockx.executor.runtime import ExecutorRuntime

# Phases of a call: what an exception in it means.
_LOADING, _ARGUMENTS, _BODY, _ENCODING = range(4)
_PHASE_KINDS: Final = (
    ErrorKind.LOAD_ERROR,
    ErrorKind.INVALID_CALL,
    ErrorKind.USER_ERROR,
    ErrorKind.OUTPUT_NOT_SERIALIZABLE,
)

SHORT_STEP_NS: Final = 100_000
"""A shorter step is taken to have been on the CPU all the time: to ask costs a system call, 0.4 us, and most
steps take 5 us."""

# Bound before user code can replace them.
_monotonic_ns = time.monotonic_ns
_thread_time_ns = time.thread_time_ns


class AttemptRunner:
    """Runs attempts, settles their accounts, sends their outcomes."""

    def __init__(
        self, runtime: "ExecutorRuntime", loader: Loader, discard: Callable[[ExecContext], None]
    ) -> None:
        self._runtime = runtime
        self._loader = loader
        self._discard = discard
        """Called when an attempt is over, after its terminal message was queued."""
        self._cpu_mark_ns = _thread_time_ns()
        """This thread's CPU time up to here is charged, or nobody's."""
        self.step_cpu_ns = 0
        """CPU time of the last step."""

    def run(self, context: ExecContext) -> None:
        """Load, call, encode, let go, send. User code cannot make it raise."""
        phase = _LOADING
        arguments: list[Any] | None = None
        result = failure = None
        try:
            context.check(context.step_started_ns)
            context.in_user = True
            loaded = self._load(context)
            phase = _ARGUMENTS
            arguments = _positional(context)
            phase = _BODY
            context.body_started = True
            result = loaded.call(*arguments)
            context.is_over = True
            phase = _ENCODING
            if type(result) is CoroutineType:
                result.close()  # it is refused below; unclosed it would warn that nobody awaited it
            output = exact_json.encode(result)
            # What goes now may run code: in the call's time.
            arguments = result = context.remote_error = None
            self._runtime.forget_variables(context)
            context.in_user = False
            context.check(_monotonic_ns())
        except BaseException as error:  # noqa: BLE001 - whatever user code raises ends its call only
            context.in_user = False
            failure = self._judged(context, error, phase)
        if failure is None:
            self._complete(context, output)
            return
        arguments = result = context.remote_error = None
        self._runtime.forget_variables(context)
        context.in_user = False
        self._fail(context, *failure)

    def end_cancelled(self, context: ExecContext) -> None:
        """End an attempt that was cancelled before its first step."""
        signal = context.pending_signal(_monotonic_ns())
        assert context.signal_kind is not None
        report = FailureReport(f"{type(signal).__name__}: {signal}", "", {})
        self._end(context, context.signal_kind, report)

    def end_lost(self, context: ExecContext) -> None:
        """End an attempt whose greenlet user code has killed."""
        report = FailureReport("its greenlet was ended outside of the function", "", {})
        self._end(context, ErrorKind.USER_ERROR, report)

    def refuse(self, call_id: str, attempt_seq: int, kind: ErrorKind, text: str) -> None:
        """Answer an ExecuteCall that is not taken in."""
        payload = CallFailedPayload(attempt_seq=attempt_seq, error_kind=kind, error_message=text)
        self._send_failed(call_id, payload, kind, _monotonic_ns())

    def charge_step(self, context: ExecContext, now_ns: int) -> None:
        """Close the account of the step that ends: wall time and this thread's CPU time."""
        step_ns = now_ns - context.step_started_ns
        context.held_ns += step_ns
        context.step_started_ns = 0
        if step_ns >= SHORT_STEP_NS:
            step_ns = min(step_ns, max(0, _thread_time_ns() - self._cpu_mark_ns))
        self._cpu_mark_ns += step_ns
        self.step_cpu_ns = step_ns
        context.cpu_ns += step_ns

    def turn_began(self) -> None:
        """Set the clock of CPU time: what the scheduler used since is nobody's, and at most a turn's."""
        self._cpu_mark_ns = _thread_time_ns()

    def _load(self, context: ExecContext) -> LoadedFunction:
        self._loader.check_audit(context.function_id, context.digest, context.audit)
        return self._loader.load(
            context.task_id,
            context.function_id,
            context.digest,
            context.entry,
            self._runtime.bridge.do_function_code_req,
            self._check_running,
            restricted=bool(context.audit),
        )

    def _check_running(self) -> None:
        """For the loader: a module body that swallowed a signal is not kept."""
        running = self._runtime.running
        assert running is not None
        running.check(_monotonic_ns())

    def _complete(self, context: ExecContext, output: bytes) -> None:
        """The function has returned and its result is encoded."""
        now_ns = _monotonic_ns()
        self.charge_step(context, now_ns)
        if not context.stale:
            payload = CallCompletedPayload(attempt_seq=context.attempt_seq, output=Raw(output))
            _write_costs(payload, context, now_ns)
            if not self._send_completed(context.call_id, payload, now_ns):
                text = (
                    f"the result of {context.function_id!r} is {len(output)} bytes of JSON; with "
                    f"its envelope at most {FRAME_BYTES_MAX} bytes can leave an executor: return less"
                )
                report = FailureReport(text, "", {})
                self._send_failure(context, ErrorKind.OUTPUT_TOO_LARGE, report)
            elif context.span is not None:
                self._end_span(context, "completed", "", now_ns)
        elif context.span is not None:
            self._end_span(context, "replaced", "", now_ns)
        self._discard(context)

    def _send_completed(self, call_id: str, payload: CallCompletedPayload, now_ns: int) -> bool:
        """Whether it fits into a frame; what was printed is dropped before the result is refused."""
        runtime = self._runtime
        message = CallCompleted(
            executor_id=runtime.executor_id,
            call_id=call_id,
            sent_at_ms=now_ns // NS_PER_MS,
            payload=payload,
        )
        while True:
            try:
                runtime.channel.send_terminal(message)
            except FrameTooLargeError:
                if not payload.output_tail:
                    return False
                payload.output_tail = ""
            else:
                return True

    def _judged(
        self, context: ExecContext, error: BaseException, phase: int
    ) -> tuple[ErrorKind, FailureReport]:
        """What the exception means, and its words. Leaves ``in_user`` set: it still has to go."""
        # A signal that comes from here on is about the words only.
        latched = context.signal_kind
        kind = latched or _kind_of(context, error, phase)
        context.is_over = True
        context.in_user = True
        try:
            report = failure_report(error, is_user_file)
        except BaseException as trouble:  # noqa: BLE001 - a signal, or trouble without end
            text = f"<no text: {class_name(type(trouble))} while it was made>"
            report = FailureReport(f"{class_name(type(error))}: {text}", "", {})
        if latched is not None and not issubclass(type(error), CallSignal):
            signal = context.pending_signal(_monotonic_ns())
            text = f"{type(signal).__name__}: {signal}; the function swallowed it and went on"
            report = report._replace(message=text)
        return kind, report

    def _fail(self, context: ExecContext, kind: ErrorKind, report: FailureReport) -> None:
        self.charge_step(context, _monotonic_ns())
        self._end(context, kind, report)

    def _end(self, context: ExecContext, kind: ErrorKind, report: FailureReport) -> None:
        if not context.stale:
            self._send_failure(context, kind, report)
        elif context.span is not None:
            self._end_span(context, "replaced", "", _monotonic_ns())
        self._discard(context)

    def _end_span(self, context: ExecContext, outcome: str, message: str, now_ns: int) -> None:
        """For a traced attempt, after its terminal message."""
        tracer, span = self._runtime.tracer, context.span
        if tracer is not None and span is not None:  # a forked child has a span and no tracer
            tracer.end(span, context, outcome, message, now_ns)

    def _send_failure(self, context: ExecContext, kind: ErrorKind, report: FailureReport) -> None:
        now_ns = _monotonic_ns()
        payload = CallFailedPayload(
            attempt_seq=context.attempt_seq,
            error_kind=kind,
            error_message=report.message,
            error_stack=report.stack,
            local_vars=report.local_vars,
        )
        _write_costs(payload, context, now_ns)
        self._send_failed(context.call_id, payload, kind, now_ns)
        if context.span is not None:
            self._end_span(context, kind.value, report.message, now_ns)

    def _send_failed(
        self, call_id: str, payload: CallFailedPayload, kind: ErrorKind, now_ns: int
    ) -> None:
        payload.retryable = RETRY_POLICIES[kind].retryable
        message = CallFailed(
            executor_id=self._runtime.executor_id,
            call_id=call_id,
            sent_at_ms=now_ns // NS_PER_MS,
            payload=payload,
        )
        self._runtime.channel.send_terminal(message)


def _write_costs(
    payload: CallCompletedPayload | CallFailedPayload, context: ExecContext, now_ns: int
) -> None:
    """Fill in what every terminal message carries. (Attributes: half the time of keywords.)"""
    used_ns = context.used_ns(now_ns)
    payload.body_started = context.body_started
    payload.budget_used_ms = used_ns / NS_PER_MS
    payload.cpu_us = context.cpu_ns // NS_PER_US
    payload.io_us = context.io_ns // NS_PER_US
    payload.subcall_us = context.subcall_ns // NS_PER_US
    payload.sleep_us = context.sleep_ns // NS_PER_US
    payload.queue_us = max(0, now_ns - context.arrived_ns - used_ns) // NS_PER_US
    output = context.output
    if isinstance(output, CallOutput):
        payload.output_tail = output.text()


def _positional(context: ExecContext) -> list[Any]:
    """A fresh copy of the arguments for this attempt. Raises unless they are an exact JSON list."""
    arguments = exact_json.decode(context.args)
    if not isinstance(arguments, list):
        raise TypeError(f"args must be a JSON list, not {type(arguments).__name__}")
    return arguments


def _kind_of(context: ExecContext, error: BaseException, phase: int) -> ErrorKind:
    """The kind of a failure without a signal. Answers of main are known by identity, never by class
    or text, which user code can forge."""
    kind = type(error)  # of the object itself: it may have a ``__class__`` of its own
    if phase == _LOADING and kind is FunctionCodeFetchError:
        return ErrorKind.CODE_FETCH_FAILED
    if phase == _BODY and error is context.remote_error:
        return context.remote_kind
    if phase == _ENCODING and kind is exact_json.TooLargeValueError:
        return ErrorKind.OUTPUT_TOO_LARGE
    return _PHASE_KINDS[phase]
