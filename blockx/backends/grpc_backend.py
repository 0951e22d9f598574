"""A capability that forwards to any gRPC service, by method name and raw bytes.

io thread only, over ``grpc_peer``. The operation is a full method name (``/package.Service/Method``), the sidecar
the request, the answer's sidecar the response: no schema is known here. Parameters: ``timeout_ms?`` and
``metadata?`` (pairs of text; base64 where the name ends with ``-bin``).

A method may change something, so by default each request is sent for itself. For methods that the configuration
calls ``reads``, equal requests on their way (method, bytes, metadata, timeout) are one, and their answers are kept for
the task where it also allows ``cache_bytes``. What passes is waited out (see ``grpc_peer``), so a server may see a
request twice, as it may see a call twice. A call whose budget an exchange uses up ends with ``deadline_exceeded``.
"""

import asyncio
import base64
import binascii
import time
from collections.abc import Hashable, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from blockx.backends.answer_cache import AnswerCache
from blockx.backends.grpc_peer import GrpcPeer, GrpcRefusedError, Sent, check_installed
from blockx.backends.replies import ReadFailedError, failed
from blockx.backends.request_tasks import RequestTasks
from blockx.backends.scope import IoReply, IoRequest, Reply
from blockx.config import LoadedConfig
from blockx.errors import ErrorKind, UsageError

MESSAGE_BYTES_MAX = 15 * 1024 * 1024
"""Of a request and of an answer: both have to fit into a frame."""
CACHES_MAX: Final = 1_024
"""Tasks that have kept answers. Full: those of the oldest go."""
BUDGET_LOOK_S: Final = 0.005
"""Least time between two looks at a budget that pauses keep from running out."""
_monotonic: Final = time.monotonic

_Metadata = tuple[tuple[str, str | bytes], ...]


class _Options(msgspec.Struct, forbid_unknown_fields=True):
    """``options`` of the configuration."""

    target: str
    """``host:port``, or any other target that gRPC knows."""
    tls: bool = False
    timeout_ms: Annotated[int, Meta(ge=1, le=600_000)] = 10_000
    reads: list[Annotated[str, Meta(pattern=r"^/[^/]+/([^/*]+|\*)$")]] = []
    """Methods that only read, as ``/package.Service/Method`` or ``/package.Service/*``."""
    cache_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """Bytes of answers of ``reads`` that are kept for a task. 0: none."""


class _Params(msgspec.Struct):
    """What a call sends beside the request's bytes."""

    timeout_ms: int = 0
    metadata: list[tuple[str, str]] = []


_decode = msgspec.json.Decoder(_Params).decode


def make_grpc(name: str, options: Mapping[str, Any], loaded: LoadedConfig) -> "GrpcBackend":
    """Raises UsageError: options are wrong, or grpcio is missing."""
    try:
        checked = msgspec.convert(dict(options), _Options)
    except msgspec.ValidationError as error:
        raise UsageError(f"options: {error}") from None
    check_installed("kind grpc")
    return GrpcBackend(name, checked, loaded.config.run.io_wait_max_ms)


class _Flight:
    """One exchange and how many calls wait for it."""

    __slots__ = ("exchange", "key", "readers", "sent")

    def __init__(self, key: Hashable, exchange: "asyncio.Task[bytes]", sent: Sent) -> None:
        self.key = key
        self.exchange = exchange
        self.sent = sent
        self.readers = 0


class GrpcBackend:
    """See the module's law."""

    def __init__(self, name: str, options: _Options, io_wait_max_ms: int) -> None:
        self._name = name
        self._timeout_ms = options.timeout_ms
        self._cache_bytes = options.cache_bytes
        self._read_methods = frozenset(options.reads)
        self._peer = GrpcPeer(
            options.target,
            tls=options.tls,
            message_bytes_max=MESSAGE_BYTES_MAX,
            io_wait_max_ms=io_wait_max_ms,
        )
        self._requests = RequestTasks(f"{name} ")
        self._flights: dict[Hashable, _Flight] = {}
        """Reads on their way that further ones may join."""
        self._caches: dict[str, AnswerCache] = {}
        """By task."""

    async def start(self) -> None:
        """Make the channel; it connects at the first request."""
        await self._peer.start()

    def submit(self, request: IoRequest, reply: Reply) -> None:
        """Take a request; see ``scope.Backend``."""
        try:
            params = _decode(request.params)
            metadata = _metadata_of(params)
            self._check(request)
        except (msgspec.MsgspecError, binascii.Error) as error:
            text = f"{self._name} {request.operation}: the parameters are not understood: {error}"
            reply(failed(request, ErrorKind.MALFORMED, text))
        except ReadFailedError as error:
            reply(IoReply(request, error=error.error))
        else:
            timeout_ms = params.timeout_ms if params.timeout_ms > 0 else self._timeout_ms
            self._requests.start(request, self._serve(request, timeout_ms, metadata), reply)

    def cancel(self, call_id: str) -> None:
        """Give the call's request up."""
        self._requests.cancel(call_id)

    def task_ended(self, task_id: str) -> None:
        """Drop its kept answers."""
        self._caches.pop(task_id, None)

    def statistics(self, task_id: str) -> dict[str, dict[str, int]]:
        """None."""
        return {}

    async def close(self) -> None:
        """Give up what is on its way and close the channel."""
        await self._requests.close()
        await self._peer.close()

    def _check(self, request: IoRequest) -> None:
        if not request.operation.startswith("/"):
            text = f"{self._name}: a gRPC method looks like /package.Service/Method, not {request.operation[:80]!r}"
            raise ReadFailedError(ErrorKind.IO_ERROR, text)
        size = len(request.sidecar or b"")
        if size > MESSAGE_BYTES_MAX:
            text = (
                f"{self._name} {request.operation}: a request of {size:,} bytes; the limit is"
                f" {MESSAGE_BYTES_MAX:,} bytes: send it in parts"
            )
            raise ReadFailedError(ErrorKind.IO_ERROR, text)

    def _cache_of(self, task_id: str) -> AnswerCache:
        cache = self._caches.get(task_id)
        if cache is None:
            if len(self._caches) >= CACHES_MAX:
                del self._caches[next(iter(self._caches))]
            cache = self._caches[task_id] = AnswerCache(self._cache_bytes)
        return cache

    async def _serve(self, request: IoRequest, timeout_ms: int, metadata: _Metadata) -> IoReply:
        arrived = _monotonic()
        key = self._read_key(request, metadata)
        cache = self._cache_of(request.task_id) if key is not None and self._cache_bytes else None
        kept = cache.get(key) if key is not None and cache is not None else None
        if kept is not None:
            return IoReply(request, sidecar=kept)
        flight = self._flight(request, key, timeout_ms, metadata)
        flight.readers += 1
        try:
            reply = await self._answer(request, flight, arrived)
        finally:
            flight.readers -= 1
            if not flight.readers:
                self._forget(flight)
                flight.exchange.cancel()
        if reply.sidecar is not None and key is not None and cache is not None:
            cache.put(key, reply.sidecar)
        io_s = flight.sent.overlap_s(arrived, _monotonic())
        reply.io_us = int(io_s * 1e6)
        reply.queue_us = max(0, int((_monotonic() - arrived - io_s) * 1e6))
        return reply

    def _read_key(self, request: IoRequest, metadata: _Metadata) -> bytes | None:
        """What makes two requests equal; None: no other is, for the method may change something."""
        method = request.operation
        every = f"{method.rpartition('/')[0]}/*"
        if method not in self._read_methods and every not in self._read_methods:
            return None
        return repr((method, metadata)).encode() + b"\0" + (request.sidecar or b"")

    def _flight(
        self,
        request: IoRequest,
        read_key: bytes | None,
        timeout_ms: int,
        metadata: _Metadata,
    ) -> _Flight:
        """The exchange to wait for: an equal one on its way, or a new one."""
        key: Hashable = object() if read_key is None else (read_key, timeout_ms)
        flight = self._flights.get(key)
        if flight is not None:
            return flight
        sent = Sent()
        exchange = asyncio.get_running_loop().create_task(
            self._peer.ask(
                request.operation,
                request.sidecar or b"",
                sent,
                timeout_s=timeout_ms / 1_000,
                metadata=metadata,
            )
        )
        flight = self._flights[key] = _Flight(key, exchange, sent)
        exchange.add_done_callback(lambda _: self._landed(flight))
        return flight

    def _landed(self, flight: _Flight) -> None:
        self._forget(flight)
        if not flight.exchange.cancelled():
            flight.exchange.exception()  # looked at here, since all who waited may have left just before

    def _forget(self, flight: _Flight) -> None:
        """Nobody joins it any more."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    async def _answer(self, request: IoRequest, flight: _Flight, arrived: float) -> IoReply:
        """Wait for an exchange within the call's budget, of which pauses use nothing."""
        budget_s = request.budget_left_ms / 1_000
        while not flight.exchange.done():
            left_s = None
            if budget_s:
                left_s = budget_s - flight.sent.overlap_s(arrived, _monotonic())
                if left_s <= 0:
                    text = f"{self._name} {request.operation}: the call's budget is used up"
                    return failed(request, ErrorKind.DEADLINE_EXCEEDED, text)
                left_s = max(left_s, BUDGET_LOOK_S)
            await asyncio.wait((flight.exchange,), timeout=left_s)
        try:
            return IoReply(request, sidecar=flight.exchange.result())
        except GrpcRefusedError as error:
            wire = error.wire_error()
            wire.message = f"{self._name}: {wire.message}"
            return IoReply(request, error=wire)


def _metadata_of(params: _Params) -> _Metadata:
    return tuple(
        (name, base64.b64decode(value, validate=True) if name.endswith("-bin") else value)
        for name, value in params.metadata
    )
