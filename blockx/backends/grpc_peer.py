"""gRPC seen from a client: one channel to one server, and one request until it is answered or given up.

io thread only, on ``grpc.aio``; needs the package ``grpcio`` (extra ``grpc``), imported when the channel is made.
What passes by itself (no connection, "too many requests") is waited out here, with growing pauses, at most
``run.io_wait_max_ms``; a caller is charged only the time that a request was really on its way.
"""

import asyncio
import os
import time
from collections.abc import Collection, Sequence
from typing import Any, Final

from blockx.errors import ErrorKind, UsageError
from blockx.ipc.messages import WireError

PAUSE_FIRST_S = 0.1
PAUSE_MAX_S: Final = 5.0
DETAIL_CHARS_MAX: Final = 4_000
"""Of what a server says about an error; the rest is cut."""
PASSES: Final = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})
"""Statuses after which a request is sent again."""
KIND_HEADER: Final = "blockx-kind"
"""Trailing metadata in which a server of blockx names the kind of an error."""
_TOO_LARGE: Final = "message larger than max"
"""In gRPC's own words for a message over a limit; its status, RESOURCE_EXHAUSTED, is also that of "too many"."""
_KINDS: Final = {
    "UNAVAILABLE": ErrorKind.UNAVAILABLE,
    "DEADLINE_EXCEEDED": ErrorKind.UNAVAILABLE,
    "RESOURCE_EXHAUSTED": ErrorKind.THROTTLED,
}
"""Status -> kind; every other status is ``io_error``."""
_OWN_KINDS: Final = {str(kind): kind for kind in ErrorKind}
_CHANNEL: Final = (
    # Setting a keepalive also sets TCP_USER_TIMEOUT: a host that vanished is noticed after 20 s instead of the
    # 15 minutes of TCP. Pings only while requests are on their way, and rarely: servers close connections of
    # clients that ping more often than they allow (every 5 minutes by default, but for two).
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A server that comes back is found within 5 s (the default goes up to 2 minutes).
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also: how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # The retries are ours: they are counted, bounded and not charged.
    ("grpc.enable_retries", 0),
)
_monotonic: Final = time.monotonic


class GrpcRefusedError(Exception):
    """A request failed for good. Never leaves the io thread."""

    def __init__(self, where: str, status: str, detail: str, own_kind: str | None) -> None:
        """``where``: method and server; ``own_kind``: what a server of blockx said in ``KIND_HEADER``."""
        self.too_large = _TOO_LARGE in detail
        what_to_do = "; send or ask for less at once" if self.too_large else ""
        super().__init__(f"{where}: {status}: {detail}{what_to_do}")
        self.status = status
        self.detail = detail
        known = known_kind(own_kind)
        fallback = ErrorKind.IO_ERROR if self.too_large else _KINDS.get(status, ErrorKind.IO_ERROR)
        self.kind: str = known or fallback
        self.in_own_words = known is not None
        """``detail`` is a message for users as it stands."""

    def wire_error(self) -> WireError:
        """As the waiting call gets it."""
        return WireError(kind=self.kind, message=str(self), status=self.status, reason=self.detail)


class Sent:
    """When the requests of one exchange were on their way: what its readers are charged."""

    __slots__ = ("_since", "_spans")

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        """At most one an attempt, and the pauses between them grow."""
        self._since: float | None = None

    def begin(self) -> None:
        """A request leaves."""
        self._since = _monotonic()

    def end(self) -> None:
        """It is answered, refused or given up."""
        if self._since is not None:
            self._spans.append((self._since, _monotonic()))
            self._since = None

    def overlap_s(self, start: float, stop: float) -> float:
        """Seconds of ``start`` … ``stop`` during which a request was on its way."""
        spans = self._spans if self._since is None else [*self._spans, (self._since, stop)]
        return sum(max(0.0, min(stop, last) - max(start, first)) for first, last in spans)


class GrpcPeer:
    """See the module's law."""

    def __init__(
        self, target: str, *, tls: bool, message_bytes_max: int, io_wait_max_ms: int
    ) -> None:
        """``target``: ``host:port``, or any other that gRPC knows. Connects at the first request."""
        self.target = target
        self._tls = tls
        self._message_bytes_max = message_bytes_max
        self._io_wait_max_s = io_wait_max_ms / 1_000
        self._channel: Any = None
        self._closing = False

    async def start(self) -> None:
        """Make the channel; it connects at the first request."""
        import grpc.aio  # type: ignore[import-untyped, import-not-found, unused-ignore]

        options = [
            *_CHANNEL,
            ("grpc.max_receive_message_length", self._message_bytes_max),
            ("grpc.max_send_message_length", self._message_bytes_max),
        ]
        self._channel = (
            grpc.aio.secure_channel(self.target, grpc.ssl_channel_credentials(), options)
            if self._tls
            else grpc.aio.insecure_channel(self.target, options)
        )

    def hurry(self) -> None:
        """From now on nothing is sent again: the program is ending."""
        self._closing = True

    async def close(self) -> None:
        """Close the channel; what is on its way fails."""
        channel, self._channel = self._channel, None  # it is freed here, as in TableServer.stop
        if channel is not None:
            await channel.close()

    async def ask(
        self,
        method: str,
        data: bytes,
        sent: Sent,
        *,
        timeout_s: float,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        passes: Collection[str] = PASSES,
    ) -> bytes:
        """One request; the bytes of its answer. ``timeout_s`` is that of one attempt.

        Raises:
            GrpcRefusedError: it was answered with an error that does not pass, or not at all for too long.
        """
        import grpc  # type: ignore[import-untyped, import-not-found, unused-ignore]

        call = self._channel.unary_unary(method)
        arrived, pause_s = _monotonic(), PAUSE_FIRST_S
        while True:
            sent.begin()
            try:
                answer: bytes = await call(data, timeout=timeout_s, metadata=tuple(metadata))
                return answer
            except grpc.RpcError as error:
                refused = self._refused(method, error)
            finally:
                sent.end()
            is_late = _monotonic() - arrived + pause_s > self._io_wait_max_s
            if refused.status not in passes or refused.too_large or is_late or self._closing:
                raise refused
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, pause_s * 2)

    def _refused(self, method: str, error: Any) -> GrpcRefusedError:
        detail = (error.details() or "")[:DETAIL_CHARS_MAX]
        own_kind = dict(error.trailing_metadata() or ()).get(KIND_HEADER)
        return GrpcRefusedError(f"{self.target} {method}", error.code().name, detail, own_kind)


def known_kind(text: object) -> ErrorKind | None:
    """The kind that a server of blockx names; None for anything else."""
    return _OWN_KINDS.get(text) if isinstance(text, str) else None


def check_installed(what: str) -> None:
    """Raises UsageError without the package; ``what`` begins the message: "kind grpc", say."""
    # Its C core writes lines of its own to stderr, such as for each connection that a server closes.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        import grpc  # type: ignore[import-untyped, import-not-found, unused-ignore]  # noqa: F401
    except ImportError:
        raise UsageError(f"{what} needs the package grpcio: pip install 'blockx[grpc]'") from None
