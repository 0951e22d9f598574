"""Spans of attempts: one for each traced attempt, to a file of JSON lines and to an OTLP collector.

The main thread takes notes (``begin``, ``SpanDraft.event``, ``end``: 3 us an attempt, no I/O, no clock of its
own); the helper thread makes spans of them and exports them, every ``EXPORT_INTERVAL_S`` and at the end. So
no exporter is ever on the path of a call. Without BLOCKX_OTEL_SPAN_FILE and OTEL_EXPORTER_OTLP_ENDPOINT
there is no ``Tracer``: no thread, no import, and an attempt pays one test against None.

- OpenTelemetry (extra ``otel``) is imported for the collector only, before any user code runs. The lines of
  the file have the form of the SDK's ``ReadableSpan.to_json`` and need no library.
- Whether a call is traced is main's decision: a call without a valid ``trace`` gets no span.
- A root attempt's span has no parent, since main exports none; a sub-call's is a child of the span of
  the attempt that asked for it.
- What cannot be exported is dropped and the number logged: the ring is full (``RING_SPANS_MAX``), the file
  cannot be written, the collector does not answer. Spans of a process that is killed are lost: those of its
  running calls, and of the last ``EXPORT_INTERVAL_S``.
"""

import os
import random
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, Protocol

from blockx.executor.context import NS_PER_US, ExecContext
from blockx.executor.log import Log
from blockx.ipc import exact_json

FILE_VARIABLE: Final = "BLOCKX_OTEL_SPAN_FILE"
ENDPOINT_VARIABLE: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
EVENTS_VARIABLE: Final = "BLOCKX_OTEL_UDS_EVENTS"

RING_SPANS_MAX: Final = 16_384
"""Finished spans that wait for the helper thread. Full: the oldest is dropped, and counted."""
EVENTS_MAX: Final = 128
"""Events of one span (OpenTelemetry's own limit). Full: later ones are left out."""
MESSAGE_CHARS_MAX: Final = 1_024
"""Longest failure message in a span's status."""
EXPORT_INTERVAL_S: Final = 0.2
BATCH_SPANS_MAX: Final = 512
"""Spans in one request to the collector."""
COLLECTOR_TIMEOUT_S: Final = 5.0
"""A collector gets so long for a batch, repetitions included; then the batch is dropped."""
CLOSE_S_MAX: Final = 0.5
"""The last export gets so long at the end of the process."""

_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
_ID_BITS: Final = 64
_US_PER_S: Final = 1_000_000


class Settings(NamedTuple):
    """What the environment asks for; at least one of the first two is set."""

    span_file: str
    """Absolute path; empty: no file."""
    endpoint: str
    """Base URL of an OTLP/HTTP collector; empty: none. The SDK reads the same variable."""
    has_events: bool
    """Frames of a traced call are events of its span."""
    span_descriptor: int | None = None
    """The file when it is open already. None: opened for each batch."""

    def opened(self) -> "Settings":
        """With the file kept open, for an executor that will not see its path. Raises OSError."""
        return self._replace(span_descriptor=os.open(self.span_file, _APPEND, 0o644))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Settings | None":
        """None: tracing is off. A relative path counts from the current folder."""
        span_file, endpoint = environ.get(FILE_VARIABLE, ""), environ.get(ENDPOINT_VARIABLE, "")
        if not span_file and not endpoint:
            return None
        wish = environ.get(EVENTS_VARIABLE, "").lower()
        return cls(
            span_file and os.path.abspath(span_file), endpoint, wish not in ("", "0", "false")
        )


class SpanDraft:
    """Notes about one attempt; written by the main thread, then read by the helper thread."""

    __slots__ = (
        "attributes", "end_ns", "events", "message", "name", "outcome", "parent_id", "span_id",
        "start_ns", "trace_id",
    )  # fmt: skip

    def __init__(
        self, trace_id: int, span_id: int, parent_id: int, start_ns: int, has_events: bool
    ) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent_id = parent_id
        """0: none."""
        self.start_ns = start_ns
        """Monotonic, as all times here."""
        self.end_ns = 0
        self.name = self.outcome = self.message = ""
        self.attributes: dict[str, str | int] = {}
        self.events: list[tuple[str, str, int]] | None = [] if has_events else None
        """What, request id, when."""

    def traceparent(self) -> str:
        """The context that what this call asks for belongs to."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    def event(self, what: str, request_id: str, now_ns: int) -> None:
        """A frame left or came, if such events are wanted."""
        if self.events is not None and len(self.events) < EVENTS_MAX:
            self.events.append((what, request_id, now_ns))


class Exporter(Protocol):
    """Where spans go. Helper thread only; never raises."""

    def export(self, spans: Sequence[SpanDraft]) -> str:
        """Why they could not be exported; empty: they are."""


class Tracer:
    """Takes notes of attempts and has them exported."""

    def __init__(
        self, executor_id: str, exporters: Sequence[Exporter], log: Log, *, has_events: bool
    ) -> None:
        self._executor_id = executor_id
        self._exporters = exporters
        self._log = log
        self._has_events = has_events
        # Of our own, since user code may seed the one of the module.
        self._next_id = random.Random(os.urandom(16)).getrandbits
        self._ring: deque[SpanDraft] = deque(maxlen=RING_SPANS_MAX)
        self._lost = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._export_all, name="spans", daemon=True)

    def start(self) -> None:
        """Start the helper thread. Call it on the main thread."""
        # A signal that it took would not interrupt the call that it is for.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def close(self) -> None:
        """Export what is left, for at most ``CLOSE_S_MAX``. Idempotent; fit for a signal handler of main."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S_MAX)

    def begin(self, trace: str, context: ExecContext) -> SpanDraft | None:
        """A span from the arrival of an attempt; None if ``trace`` is no sampled W3C context."""
        match = _TRACEPARENT.fullmatch(trace)
        if match is None or not int(match[3], 16) & 1:
            return None
        parent_id = int(match[2], 16) if context.parent_call_id else 0
        span_id = self._next_id(_ID_BITS) or 1
        return SpanDraft(
            int(match[1], 16), span_id, parent_id, context.arrived_ns, self._has_events
        )

    def end(
        self, span: SpanDraft, context: ExecContext, outcome: str, message: str, now_ns: int
    ) -> None:
        """The attempt is over; ``outcome`` is ``completed``, ``replaced`` or the kind of its failure."""
        if outcome != "replaced":
            what = "send CallCompleted" if outcome == "completed" else "send CallFailed"
            span.event(what, "", now_ns)
        span.end_ns = now_ns
        span.name = context.function_id
        span.outcome = outcome
        span.message = message[:MESSAGE_CHARS_MAX]
        used_ns = context.used_ns(now_ns)
        span.attributes = {
            "task_id": context.task_id,
            "call_id": context.call_id,
            "parent_call_id": context.parent_call_id,
            "attempt": context.attempt_seq,
            "executor_id": self._executor_id,
            "outcome": outcome,
            "cpu_us": context.cpu_ns // NS_PER_US,
            "io_us": context.io_ns // NS_PER_US,
            "subcall_us": context.subcall_ns // NS_PER_US,
            "sleep_us": context.sleep_ns // NS_PER_US,
            "queue_us": max(0, now_ns - context.arrived_ns - used_ns) // NS_PER_US,
        }
        ring = self._ring
        self._lost += len(ring) == RING_SPANS_MAX
        ring.append(span)

    def _export_all(self) -> None:
        """Body of the helper thread."""
        is_last = False
        while not is_last:
            is_last = self._closing.wait(EXPORT_INTERVAL_S)
            while spans := self._take():
                for exporter in self._exporters:
                    reason = exporter.export(spans)
                    if reason:
                        self._log.warning("spans dropped", spans=len(spans), reason=reason)
            lost, self._lost = self._lost, 0
            if lost:
                self._log.warning("spans dropped", spans=lost, reason="more than can be exported")

    def _take(self) -> list[SpanDraft]:
        ring = self._ring
        return [ring.popleft() for _ in range(min(len(ring), BATCH_SPANS_MAX))]


class SpanFile:
    """One JSON line a span, appended; executors share the file, since a batch is one write."""

    def __init__(
        self,
        path: str,
        resource: Mapping[str, str],
        epoch_ns: int,
        descriptor: int | None = None,
    ) -> None:
        """``epoch_ns``: wall clock minus monotonic clock. ``descriptor``: the file, if it is open."""
        self._path = path
        self._descriptor = descriptor
        self._resource = {"attributes": dict(resource), "schema_url": ""}
        self._epoch_ns = epoch_ns
        # Bound before user code can replace them.
        self._open, self._write, self._close = os.open, os.write, os.close

    def export(self, spans: Sequence[SpanDraft]) -> str:
        """Append them. Opened each time, if it can be: a kept descriptor is one that user code can close."""
        data = b"".join([exact_json.encode(self._line(span)) + b"\n" for span in spans])
        try:
            if self._descriptor is not None:
                self._write(self._descriptor, data)
                return ""
            descriptor = self._open(self._path, _APPEND, 0o644)
            try:
                self._write(descriptor, data)
            finally:
                self._close(descriptor)
        except OSError as error:
            return f"{self._path}: {error.strerror}"
        return ""

    def _line(self, span: SpanDraft) -> dict[str, Any]:
        """A span as ``ReadableSpan.to_json`` of the SDK has it."""
        is_fine = span.outcome == "completed"
        status = {"status_code": "UNSET" if is_fine else "ERROR"}
        if span.message and not is_fine:
            status["description"] = span.message
        return {
            "name": span.name,
            "context": {
                "trace_id": f"0x{span.trace_id:032x}",
                "span_id": f"0x{span.span_id:016x}",
                "trace_state": "[]",
            },
            "kind": "SpanKind.INTERNAL",
            "parent_id": f"0x{span.parent_id:016x}" if span.parent_id else None,
            "start_time": _iso_text(span.start_ns + self._epoch_ns),
            "end_time": _iso_text(span.end_ns + self._epoch_ns),
            "status": status,
            "attributes": span.attributes,
            "events": [
                {
                    "name": what,
                    "timestamp": _iso_text(moment_ns + self._epoch_ns),
                    "attributes": {"request_id": request_id},
                }
                for what, request_id, moment_ns in span.events or ()
            ],
            "links": [],
            "resource": self._resource,
        }


def _iso_text(epoch_ns: int) -> str:
    seconds, us = divmod(epoch_ns // NS_PER_US, _US_PER_S)
    moment = datetime.fromtimestamp(seconds, UTC).replace(microsecond=us)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


class _Collector:
    """An OTLP/HTTP collector, by the SDK."""

    def __init__(self, convert: Callable[[SpanDraft], Any], export: Callable[..., Any]) -> None:
        self._convert = convert
        self._export = export

    def export(self, spans: Sequence[SpanDraft]) -> str:
        """Send them in one request."""
        try:
            result = self._export([self._convert(span) for span in spans])
        except Exception as error:  # noqa: BLE001 - whatever the library raises, calls go on
            return f"the collector: {type(error).__name__}: {error}"
        return "" if result.value == 0 else "the collector did not take them"


def _collector(resource: Mapping[str, str], epoch_ns: int) -> _Collector:
    """Raises ImportError without the extra ``otel``."""
    import logging

    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

    # Its own lines would go to stderr and into the output of calls; ours tell the same.
    logger = logging.getLogger("opentelemetry")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    sampled, whose = TraceFlags(TraceFlags.SAMPLED), Resource(dict(resource))

    def convert(span: SpanDraft) -> ReadableSpan:
        parent = None
        if span.parent_id:
            parent = SpanContext(span.trace_id, span.parent_id, is_remote=True, trace_flags=sampled)
        failed = Status(StatusCode.ERROR, span.message or None)
        return ReadableSpan(
            span.name,
            SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=sampled),
            parent,
            whose,
            span.attributes,
            [
                Event(what, {"request_id": request_id}, moment_ns + epoch_ns)
                for what, request_id, moment_ns in span.events or ()
            ],
            status=Status() if span.outcome == "completed" else failed,
            start_time=span.start_ns + epoch_ns,
            end_time=span.end_ns + epoch_ns,
        )

    # No connection is kept: user code may close its descriptor, and open a file under that number.
    exporter = OTLPSpanExporter(headers={"connection": "close"}, timeout=COLLECTOR_TIMEOUT_S)
    return _Collector(convert, exporter.export)


def start_tracer(settings: Settings | None, executor_id: str, log: Log) -> Tracer | None:
    """The tracer that the settings ask for, running; None without any. Call it before user code runs.

    A collector without the extra ``otel`` is left out, with a warning in the log.
    """
    if settings is None:
        return None
    resource = {"service.name": "blockx", "service.instance.id": executor_id}
    epoch_ns = time.time_ns() - time.monotonic_ns()
    exporters: list[Exporter] = []
    if settings.span_file:
        exporters.append(SpanFile(settings.span_file, resource, epoch_ns, settings.span_descriptor))
    if settings.endpoint:
        try:
            exporters.append(_collector(resource, epoch_ns))
        except ImportError as error:
            log.warning(
                "no spans are sent, OpenTelemetry is not installed: pip install 'blockx[otel]'",
                variable=ENDPOINT_VARIABLE,
                reason=str(error),
            )
    if not exporters:
        return None
    tracer = Tracer(executor_id, exporters, log, has_events=settings.has_events)
    tracer.start()
    return tracer
