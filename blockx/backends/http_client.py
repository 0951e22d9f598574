"""HTTP/1.1 POSTs to one url over kept-alive connections: callbacks, no task and no coroutine a request.

io thread only. Our own and not aiohttp's: a request costs this thread 30 us with uvloop and 60 without it, by
aiohttp 145 and 170 (one node, 64 requests in flight), and what a node needs of HTTP is little. It is this: POST
with a known length, Content-Length, chunked or read-until-close bodies, gzip and deflate, TLS with the
system's certificates, user and password of the url. No redirects, cookies or proxies.

Laws: ``done`` of each request is called exactly once, on the loop, never from within ``post``; after ``close``
it is called no more. A request has one connection for itself. A kept connection that closes before the first
byte of an answer was closing already when the request was written: a request that may be repeated is written
once more, on a new connection; any other is never put on a kept connection.
"""

import asyncio
import base64
import os
import ssl
import zlib
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, cast
from urllib.parse import quote, unquote, urlsplit

IDLE_S_MAX: Final = 20.0
"""A connection that was idle for longer is not used again: nodes and balancers close theirs after 30 to 60 s."""
HEAD_BYTES_MAX: Final = 64 * 1024
"""Status line and headers of an answer, and the size line of a chunk. Full: the connection is broken."""
_HEAD_END: Final = b"\r\n\r\n"
_ZLIB_WINDOWS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 47}
"""``deflate`` is zlib data by the standard and a bare stream from some servers: 47 detects the former, and
gzip that is declared as deflate."""


class HttpAnswer(NamedTuple):
    """A whole answer, unpacked."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case; of a repeated one the last."""
    body: bytes


class HttpTrouble(NamedTuple):
    """No answer, and why."""

    text: str
    never_sent: bool = False
    """No connection could be made."""
    too_big: bool = False
    """The body is over the limit."""


Done = Callable[[HttpAnswer | HttpTrouble], None]


class HttpClient:
    """One url. Connections are made as needed; the caller limits how many requests are on their way."""

    def __init__(self, url: str, *, timeout_s: float, body_bytes_max: int) -> None:
        """``url``: http or https with a host, checked by the caller. Opens nothing."""
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self.timeout_s = timeout_s
        self.body_bytes_max = body_bytes_max
        target = quote(parts.path or "/", safe="%/:=~!$&'()*+,;@")
        if parts.query:
            target += "?" + quote(parts.query, safe="%/:=~!$&'()*+,;@?")
        shown_host = f"[{self._host}]" if ":" in self._host else self._host
        lines = [
            f"POST {target} HTTP/1.1",
            f"host: {shown_host}{f':{parts.port}' if parts.port else ''}",
            "content-type: application/json",
            "accept: application/json",
            "accept-encoding: gzip, deflate",
            "user-agent: blockx",
        ]
        if parts.username or parts.password:
            pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
            lines.append(f"authorization: Basic {base64.b64encode(pair.encode()).decode()}")
        self._head = ("\r\n".join(lines) + "\r\ncontent-length: %d\r\n\r\n").encode(
            "latin-1", "replace"
        )
        self._head = self._head.replace(b"%", b"%%").replace(b"%%d\r\n\r\n", b"%d\r\n\r\n")
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._tls: ssl.SSLContext | None = None
        self._is_closed = False

    def post(self, body: bytes, done: Done, *, may_repeat: bool = True) -> None:
        """Send one request. ``may_repeat``: it changes nothing, so a kept connection may be used."""
        request = _Request(self._head % len(body) + body, done, may_repeat)
        loop = asyncio.get_running_loop()
        request.timer = loop.call_later(self.timeout_s, self._timed_out, request)
        connection = self._take_idle(loop.time()) if may_repeat else None
        if connection is not None:
            connection.send(request)
        else:
            self._connect(request)

    def close(self) -> None:
        """Close all connections; requests on their way are given up without a word."""
        self._is_closed = True
        for task in self._connecting:
            task.cancel()
        for connection in list(self._all):
            connection.abort()

    # ---- connections -----------------------------------------------------------------------------

    def _take_idle(self, now: float) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since <= IDLE_S_MAX and not connection.is_closing():
                return connection
            connection.abort()
        return None

    def _connect(self, request: "_Request") -> None:
        task = asyncio.get_running_loop().create_task(self._connect_and_send(request))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect_and_send(self, request: "_Request") -> None:
        try:
            if self._is_tls and self._tls is None:
                self._tls = ssl.create_default_context()
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(self), self._host, self._port, ssl=self._tls
            )
        except (OSError, ValueError) as error:  # ValueError: a host name that is none
            self.end(request, HttpTrouble(f"cannot connect: {_reason(error)}", never_sent=True))
            return
        if request.is_ended:  # it timed out meanwhile; the connection may serve the next one
            self.release(connection)
        else:
            connection.send(request)

    def _timed_out(self, request: "_Request") -> None:
        connection = request.connection
        self.end(request, HttpTrouble(f"no answer within {self.timeout_s * 1_000:.0f} ms"))
        if connection is not None:
            connection.abort()

    # ---- for connections -------------------------------------------------------------------------

    def opened(self, connection: "_Connection") -> None:
        """It can be written to."""
        self._all.add(connection)

    def closed(self, connection: "_Connection") -> None:
        """It is gone."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def release(self, connection: "_Connection") -> None:
        """Its answer is complete and it may be kept."""
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def end(self, request: "_Request", outcome: HttpAnswer | HttpTrouble) -> None:
        """Hand the outcome on, once."""
        if request.is_ended or self._is_closed:
            return
        request.is_ended = True
        request.connection = None
        if request.timer is not None:
            request.timer.cancel()
        request.done(outcome)

    def repeat(self, request: "_Request") -> None:
        """Write it once more: the kept connection was closing. Never twice, since the next one is new."""
        request.connection = None
        self._connect(request)


class _Request:
    """One POST and where it stands."""

    __slots__ = ("connection", "data", "done", "is_ended", "may_repeat", "timer")

    def __init__(self, data: bytes, done: Done, may_repeat: bool) -> None:
        self.data = data
        self.done = done
        self.may_repeat = may_repeat
        self.timer: asyncio.TimerHandle | None = None
        self.connection: _Connection | None = None
        self.is_ended = False


class _BrokenAnswerError(Exception):
    """What arrives is no HTTP; the text says how."""


class _Connection(asyncio.Protocol):
    """One connection: one request at a time, its answer collected until it is complete.

    States of an answer: head (``_body_left`` None), body of a known length, chunks, or until the end.
    """

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._request: _Request | None = None
        self._was_used = False
        """It has brought an answer before: the next request may meet its closing."""
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._received = bytearray()
        self._head: tuple[int, dict[str, str]] | None = None
        self._body_end = 0
        """Where the body ends in ``_received``; -1: chunked; -2: at the end of the connection."""
        self._chunks: list[bytes] = []
        self._chunk_bytes = 0
        self._has_surplus = False
        """More came than the answer: nobody knows what, so the connection is not kept."""

    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, request: _Request) -> None:
        assert self._transport is not None, "connected before it is used"
        assert self._request is None, "one request at a time"
        self._request = request
        request.connection = self
        self._transport.write(request.data)

    def abort(self) -> None:
        """Close without waiting for anything; its request hears nothing."""
        self._request = None
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._client.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._request is None:  # nobody asked: what comes would be taken for the next answer
            self.abort()
            return
        self._received += data
        try:
            answer = self._advance()
        except (_BrokenAnswerError, ValueError) as error:
            self._fail(HttpTrouble(f"the connection broke: no HTTP: {error}"))
        except _TooBigError:
            limit = self._client.body_bytes_max
            self._fail(HttpTrouble(f"an answer of more than {limit} bytes", too_big=True))
        except zlib.error:
            self._fail(HttpTrouble("the answer was cut short or badly compressed"))
        else:
            if answer is not None:
                self._finish(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._client.closed(self)
        request = self._request
        if request is None:
            return
        self._request = None
        if request.may_repeat and self._was_used and self._head is None and not self._received:
            self._client.repeat(request)
            return
        if self._head is not None and self._body_end == -2 and exc is None:
            self._end_at_close(request)
            return
        text = "the answer was cut short or badly compressed"
        if self._head is None and not self._received:
            reason = "Server disconnected" if exc is None else str(exc) or type(exc).__name__
            text = f"the connection broke: {reason[:200]}"
        self._client.end(request, HttpTrouble(text))

    # ---- an answer -------------------------------------------------------------------------------

    def _advance(self) -> HttpAnswer | None:
        """The answer if it is complete with what has arrived."""
        while self._head is None:
            if not self._take_head():
                return None
        if self._body_end == -1:
            return self._take_chunks()
        if len(self._received) > self._client.body_bytes_max:
            raise _TooBigError
        if self._body_end == -2 or len(self._received) < self._body_end:
            return None
        self._has_surplus = len(self._received) > self._body_end
        return self._complete(bytes(self._received[: self._body_end]))

    def _take_head(self) -> bool:
        """Read status line and headers; False while they are incomplete or of an interim answer."""
        received = self._received
        end = received.find(_HEAD_END)
        if end < 0:
            if len(received) > HEAD_BYTES_MAX:
                raise _BrokenAnswerError("the headers do not end")
            return False
        lines = received[:end].decode("latin-1").split("\r\n")
        del received[: end + 4]
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise _BrokenAnswerError(f"it begins {lines[0][:60]!r}")
        status = int(rest[:3])
        if 100 <= status < 200:
            return self._take_head()
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        headers[""] = version
        self._head = (status, headers)
        self._body_end = self._body_end_of(status, headers)
        return True

    def _body_end_of(self, status: int, headers: dict[str, str]) -> int:
        if status in (204, 304):
            return 0
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return -1
        length = headers.get("content-length")
        if length is None:
            return -2
        if not length.isdecimal():
            raise _BrokenAnswerError(f"content-length {length[:40]!r}")
        if int(length) > self._client.body_bytes_max:
            raise _TooBigError
        return int(length)

    def _take_chunks(self) -> HttpAnswer | None:
        received = self._received
        while True:
            line_end = received.find(b"\r\n")
            if line_end < 0:
                if len(received) > HEAD_BYTES_MAX:
                    raise _BrokenAnswerError("a chunk without a size")
                return None
            size = int(bytes(received[:line_end]).partition(b";")[0].strip(), 16)
            if size < 0:
                raise _BrokenAnswerError("a chunk of negative size")
            if size == 0:
                return self._take_trailer(line_end)
            if self._chunk_bytes + size > self._client.body_bytes_max:
                raise _TooBigError
            chunk_end = line_end + 2 + size
            if len(received) < chunk_end + 2:
                return None
            self._chunks.append(bytes(received[line_end + 2 : chunk_end]))
            self._chunk_bytes += size
            del received[: chunk_end + 2]

    def _take_trailer(self, line_end: int) -> HttpAnswer | None:
        """After the last chunk: nothing, or headers that we do not need."""
        received = self._received
        end = received.find(_HEAD_END, line_end)
        if end < 0:
            return None
        self._has_surplus = len(received) > end + 4
        return self._complete(b"".join(self._chunks))

    def _complete(self, body: bytes) -> HttpAnswer:
        assert self._head is not None, "the body comes after the head"
        status, headers = self._head
        return HttpAnswer(status, headers, _unpacked(body, headers, self._client.body_bytes_max))

    def _finish(self, answer: HttpAnswer) -> None:
        """The answer is whole: keep the connection if both ends may, hand the answer on."""
        request, client = self._request, self._client
        assert request is not None, "an answer belongs to a request"
        self._request = None
        headers = answer.headers
        said = headers.get("connection", "").lower()
        keeps = "close" not in said and (headers[""] != "HTTP/1.0" or "keep-alive" in said)
        keeps = keeps and request.may_repeat and not self._has_surplus
        self._was_used = True
        self._reset()
        if keeps:
            client.release(self)
        else:
            self.abort()
        client.end(request, answer)

    def _end_at_close(self, request: _Request) -> None:
        try:
            answer = self._complete(bytes(self._received))
        except zlib.error:
            trouble = HttpTrouble("the answer was cut short or badly compressed")
            self._client.end(request, trouble)
        except _TooBigError:
            limit = self._client.body_bytes_max
            trouble = HttpTrouble(f"an answer of more than {limit} bytes", too_big=True)
            self._client.end(request, trouble)
        else:
            self._client.end(request, answer)

    def _fail(self, trouble: HttpTrouble) -> None:
        request = self._request
        assert request is not None, "data without a request is not looked at"
        self.abort()
        self._client.end(request, trouble)


class _TooBigError(Exception):
    """A body over the limit."""


def _unpacked(body: bytes, headers: Mapping[str, str], bytes_max: int) -> bytes:
    """The body without its content-encoding. Raises zlib.error or _TooBigError."""
    for encoding in reversed(headers.get("content-encoding", "").lower().split(",")):
        window = _ZLIB_WINDOWS.get(encoding.strip())
        if window is None:
            continue  # identity, or one that we did not ask for: the body will be no JSON
        if window == 47 and body[:1] and body[0] & 0x0F != 8 and body[:2] != b"\x1f\x8b":
            window = -15  # a bare stream
        unpacker = zlib.decompressobj(window)
        body = unpacker.decompress(body, bytes_max + 1)
        if len(body) > bytes_max:
            raise _TooBigError
        if not unpacker.eof:
            raise zlib.error("it ends too early")
    return body


def _reason(error: Exception) -> str:
    """The system's words; asyncio's own text for a refused connection only repeats the address."""
    if not isinstance(error, OSError):
        return str(error)
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    known = error.errno is not None and error.errno > 0
    return os.strerror(error.errno or 0) if known else (error.strerror or str(error))
