"""A capability that forwards to any gRPC service, by method name and raw bytes.

io thread only, on ``grpc.aio``; needs the package ``grpcio`` (extra ``grpc``), imported at the start. The operation is
a full method name (``/package.Service/Method``), the sidecar the request, the answer's sidecar the response: no
schema is known here. Parameters: ``timeout_ms?`` and ``metadata?`` (pairs of text).

Identical requests are not merged, since a method may change something. ``UNAVAILABLE`` and ``RESOURCE_EXHAUSTED``
are tried again with pauses until ``run.io_wait_max_ms``; every other status ends the read. A call whose budget
an exchange uses up ends with ``deadline_exceeded``.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from blockx.backends.replies import failed
from blockx.backends.request_tasks import RequestTasks
from blockx.backends.scope import IoReply, IoRequest, Reply
from blockx.config import LoadedConfig
from blockx.errors import ErrorKind, UsageError

PAUSE_FIRST_S: Final = 0.1
PAUSE_MAX_S: Final = 5.0
MESSAGE_BYTES_MAX: Final = 15 * 1024 * 1024
"""Of a request and of an answer: both have to fit into a frame."""
_KINDS: Final = {
    "UNAVAILABLE": ErrorKind.UNAVAILABLE,
    "DEADLINE_EXCEEDED": ErrorKind.UNAVAILABLE,
    "RESOURCE_EXHAUSTED": ErrorKind.THROTTLED,
}
"""Status -> kind; every other status is ``io_error``."""
_AGAIN: Final = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
_monotonic: Final = time.monotonic


class _Options(msgspec.Struct, forbid_unknown_fields=True):
    """``options`` of the configuration."""

    target: str
    """``host:port``, or any other target that gRPC knows."""
    tls: bool = False
    timeout_ms: int = 10_000


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
    try:
        import grpc  # type: ignore[import-untyped, import-not-found, unused-ignore]  # noqa: F401
    except ImportError:
        raise UsageError("kind grpc needs the package grpcio: pip install 'blockx[grpc]'") from None
    return GrpcBackend(name, checked, loaded.config.run.io_wait_max_ms)


class GrpcBackend:
    """See the module's law."""

    def __init__(self, name: str, options: _Options, io_wait_max_ms: int) -> None:
        self._name = name
        self._options = options
        self._io_wait_max_s = io_wait_max_ms / 1_000
        self._channel: Any = None
        self._requests = RequestTasks(f"{name} ")

    async def start(self) -> None:
        """Make the channel; it connects at the first request."""
        import grpc.aio  # type: ignore[import-untyped, import-not-found, unused-ignore]

        limits = [
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ]
        target = self._options.target
        self._channel = (
            grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(), limits)
            if self._options.tls
            else grpc.aio.insecure_channel(target, limits)
        )

    def submit(self, request: IoRequest, reply: Reply) -> None:
        """Take a request; see ``scope.Backend``."""
        try:
            params = _decode(request.params)
        except msgspec.MsgspecError as error:
            text = f"{self._name} {request.operation}: the parameters are not understood: {error}"
            reply(failed(request, ErrorKind.MALFORMED, text))
            return
        if not request.operation.startswith("/"):
            text = f"{self._name}: a gRPC method looks like /package.Service/Method, not {request.operation[:80]!r}"
            reply(failed(request, ErrorKind.IO_ERROR, text))
            return
        self._requests.start(request, self._serve(request, params), reply)

    def cancel(self, call_id: str) -> None:
        """Give the call's request up."""
        self._requests.cancel(call_id)

    def task_ended(self, task_id: str) -> None:
        """Nothing is kept for a task."""

    def statistics(self, task_id: str) -> dict[str, dict[str, int]]:
        """None."""
        return {}

    async def close(self) -> None:
        """Give up what is on its way and close the channel."""
        await self._requests.close()
        if self._channel is not None:
            await self._channel.close()

    async def _serve(self, request: IoRequest, params: _Params) -> IoReply:
        import grpc  # type: ignore[import-untyped, import-not-found, unused-ignore]

        what = f"{self._name} {request.operation}"
        arrived, io_s, pause_s = _monotonic(), 0.0, PAUSE_FIRST_S
        method = self._channel.unary_unary(request.operation)
        timeout_s = (params.timeout_ms or self._options.timeout_ms) / 1_000
        while True:
            left_s = request.budget_left_ms / 1_000 - io_s if request.budget_left_ms else timeout_s
            started = _monotonic()
            try:
                answer = await method(
                    request.sidecar or b"",
                    timeout=max(0.001, min(timeout_s, left_s)),
                    metadata=params.metadata,
                )
            except grpc.RpcError as error:
                io_s += _monotonic() - started
                status, detail = error.code().name, error.details() or ""
                text = f"{what}: {status}: {detail[:500]} ({self._options.target})"
                if left_s < timeout_s and status == "DEADLINE_EXCEEDED":
                    reply = failed(request, ErrorKind.DEADLINE_EXCEEDED, text)
                    break
                if status in _AGAIN and _monotonic() - arrived + pause_s <= self._io_wait_max_s:
                    await asyncio.sleep(pause_s)
                    pause_s = min(PAUSE_MAX_S, pause_s * 2)
                    continue
                reply = failed(request, _KINDS.get(status, ErrorKind.IO_ERROR), text)
                break
            io_s += _monotonic() - started
            reply = IoReply(request, sidecar=answer)
            break
        reply.io_us = int(io_s * 1e6)
        reply.queue_us = max(0, int((_monotonic() - arrived - io_s) * 1e6))
        return reply
