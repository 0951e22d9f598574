"""The backend ``http``: GET and POST for parked calls, to the hosts that the configuration allows.

io thread only; aiohttp, since strangers' servers speak all of HTTP. Operations ``GET`` and ``POST`` with
parameters ``{url, headers?, body?}`` (body in base64), answered with ``{status, headers, body}`` whatever the
status is.

Laws: a host that is not in ``hosts`` is never connected to, also not by a redirect (those are handed to the
caller as they are). A GET that finds no server, or a status 429, 502, 503, 504, is repeated with pauses until
``run.io_wait_max_ms``, then a status is handed over and a missing server is ``unavailable``; a POST is sent once.
At most ``inflight_max`` requests are on their way, the others wait. The wait is ``queue_us``, the exchange
``io_us``; a call whose budget an exchange uses up ends with ``deadline_exceeded``.
"""

import asyncio
import base64
import time
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from blockx.backends.replies import ReadFailedError, failed, named
from blockx.backends.request_tasks import RequestTasks
from blockx.backends.scope import IoReply, IoRequest, Reply
from blockx.config import HttpBackendConfig
from blockx.errors import TOO_MUCH, ErrorKind
from blockx.ipc import exact_json

if TYPE_CHECKING:
    import aiohttp

PAUSE_FIRST_S: Final = 0.2
PAUSE_MAX_S: Final = 5.0
"""Between two tries of a GET; doubles."""
_AGAIN: Final = frozenset({429, 502, 503, 504})
_monotonic: Final = time.monotonic


class _Params(msgspec.Struct):
    """What a call sends."""

    url: str
    headers: dict[str, str] = {}
    body: str = ""


class _Received(NamedTuple):
    """One exchange that ended with a status."""

    status: int
    headers: dict[str, str]
    body: bytes


_decode = msgspec.json.Decoder(_Params).decode


class HttpBackend:
    """See the module's law."""

    def __init__(self, config: HttpBackendConfig, io_wait_max_ms: int) -> None:
        self._config = config
        self._io_wait_max_s = io_wait_max_ms / 1_000
        self._session: aiohttp.ClientSession | None = None
        self._gate = asyncio.Semaphore(config.inflight_max)
        self._requests = RequestTasks()
        self._counters: dict[str, dict[str, int]] = {}

    async def start(self) -> None:
        """Nothing: the first request opens the session."""

    def submit(self, request: IoRequest, reply: Reply) -> None:
        """Take a request; see ``scope.Backend``."""
        try:
            params = _decode(request.params)
            self._check(params.url)
        except msgspec.MsgspecError as error:
            text = f"the parameters of an HTTP request are not understood: {error}"
            reply(failed(request, ErrorKind.MALFORMED, text))
            return
        except ReadFailedError as failure:
            reply(IoReply(request, error=failure.error))
            return
        self._requests.start(request, self._serve(request, params), reply)

    def cancel(self, call_id: str) -> None:
        """Give the call's request up."""
        self._requests.cancel(call_id)

    def task_ended(self, task_id: str) -> None:
        """Nothing is kept for a task but its numbers."""

    def statistics(self, task_id: str) -> dict[str, dict[str, int]]:
        """Requests and repeats of a task, by host."""
        return {"http": dict(self._counters.get(task_id, {"requests": 0, "retries": 0}))}

    async def close(self) -> None:
        """Give up what is on its way and close the connections."""
        await self._requests.close()
        if self._session is not None:
            await self._session.close()

    # ---- one request -----------------------------------------------------------------------------

    def _check(self, url: str) -> None:
        """Raises ReadFailedError: no http(s) url, or of a host that is not allowed."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
        except ValueError:
            host, port = "", None
        else:
            if parts.scheme not in ("http", "https"):
                host = ""
        if not host:
            raise ReadFailedError(ErrorKind.IO_ERROR, f"{url[:200]!r} is no http(s) url")
        if not any(_allows(allowed, host, port) for allowed in self._config.hosts):
            there = named(self._config.hosts, "none")
            text = f"the host {host} is not in backends.http.hosts of the configuration (allowed: {there})"
            raise ReadFailedError(ErrorKind.IO_ERROR, text)

    async def _serve(self, request: IoRequest, params: _Params) -> IoReply:
        arrived, io_s = _monotonic(), 0.0
        what = f"{request.operation} {_shown(params.url)}"
        pause_s, counted = PAUSE_FIRST_S, self._counted(request.task_id)
        received: _Received | None = None
        trouble = ""
        try:
            while True:
                async with self._gate:
                    started = _monotonic()
                    counted["requests"] += 1
                    try:
                        left_s = request.budget_left_ms / 1_000 - io_s
                        limit_s = left_s if request.budget_left_ms else None
                        async with asyncio.timeout(limit_s):
                            received, trouble = await self._exchange(request.operation, params)
                    finally:
                        io_s += _monotonic() - started
                served = received is not None and received.status not in _AGAIN
                waited_s = _monotonic() - arrived + pause_s
                if served or request.operation != "GET" or waited_s > self._io_wait_max_s:
                    break
                counted["retries"] += 1
                await asyncio.sleep(pause_s)
                pause_s = min(PAUSE_MAX_S, pause_s * 2)
        except TimeoutError:
            text = f"{what}: no answer within the {request.budget_left_ms:.0f} ms that were left of the call's budget"
            answer = failed(request, ErrorKind.DEADLINE_EXCEEDED, text)
        except ReadFailedError as failure:
            answer = failed(request, ErrorKind(failure.error.kind), f"{what}: {failure}")
        else:
            if received is None:
                answer = failed(request, ErrorKind.UNAVAILABLE, f"{what}: {trouble}")
            else:
                answer = IoReply(request, _encoded(received))
        answer.io_us = int(io_s * 1e6)
        answer.queue_us = max(0, int((_monotonic() - arrived - io_s) * 1e6))
        return answer

    def _counted(self, task_id: str) -> dict[str, int]:
        return self._counters.setdefault(task_id, {"requests": 0, "retries": 0})

    async def _exchange(self, method: str, params: _Params) -> tuple[_Received | None, str]:
        """One request and its whole answer, or why there is none. Raises ReadFailedError: too long."""
        import aiohttp  # late: 0.2 s, and few runs need it

        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), cookie_jar=aiohttp.DummyCookieJar()
            )
        limit = self._config.body_bytes_max
        try:
            async with (
                asyncio.timeout(self._config.timeout_ms / 1_000),
                self._session.request(
                    method,
                    params.url,
                    data=base64.b64decode(params.body) or None,
                    headers=params.headers,
                    allow_redirects=False,
                ) as response,
            ):
                body = await response.content.read(limit + 1)
                while len(body) <= limit and (more := await response.content.read(limit + 1)):
                    body += more
                if len(body) > limit:
                    text = f"an answer of more than {limit} bytes; {TOO_MUCH}"
                    raise ReadFailedError(ErrorKind.IO_ERROR, text)
                headers = {name.lower(): value for name, value in response.headers.items()}
                return _Received(response.status, headers, body), ""
        except TimeoutError:
            return None, f"no answer within {self._config.timeout_ms} ms"
        except (aiohttp.InvalidURL, ValueError) as error:
            raise ReadFailedError(ErrorKind.IO_ERROR, str(error)[:200]) from None
        except (aiohttp.ClientError, OSError) as error:
            return None, str(error)[:200] or type(error).__name__


def _allows(allowed: str, host: str, port: int | None) -> bool:
    """``example.com`` allows any port of that host, ``example.com:8080`` one, ``*.example.com`` what is below."""
    name, _, number = (
        allowed.lower().rpartition(":") if ":" in allowed else (allowed.lower(), "", "")
    )
    if number and number != str(port):
        return False
    if name.startswith("*."):
        return host.endswith(name[1:])
    return host == name


def _shown(url: str) -> str:
    """Without user, password and query, which may be secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:200]


def _encoded(received: _Received) -> bytes:
    return exact_json.encode(
        {
            "status": received.status,
            "headers": received.headers,
            "body": base64.b64encode(received.body).decode(),
        }
    )
