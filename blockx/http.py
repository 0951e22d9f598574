"""``from blockx import http``: GET and POST that suspend the call instead of blocking the executor.

Runs wherever user code runs; the request itself is made by main, to hosts that ``backends.http.hosts`` of the
configuration allows. A GET may be repeated when a server does not answer; a POST is sent once an attempt.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from blockx.sdk.provider import get_provider

_BACKEND: Final = "http"


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer, whatever its status."""

    url: str
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    content: bytes

    @property
    def ok(self) -> bool:
        """The status is below 400."""
        return self.status < 400

    @property
    def text(self) -> str:
        """The content as UTF-8; what is none is replaced."""
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """The content as JSON, integers exact. Raises ValueError."""
        from blockx.ipc import exact_json

        return exact_json.decode(self.content)


def get(url: str, *, headers: Mapping[str, str] | None = None) -> Response:
    """Ask for an url.

    Raises:
        ReadError: the host is not allowed (``io_error``), there is no answer (``unavailable``,
            ``throttled``), or it is too long; ``.kind`` says which.
    """
    return _ask("GET", url, headers, b"")


def post(
    url: str,
    data: bytes | str = b"",
    *,
    json: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Send ``data``, or ``json`` as exact JSON. Raises ReadError, as ``get``."""
    sent = dict(headers or {})
    body = data.encode() if isinstance(data, str) else bytes(data)
    if json is not None:
        from blockx.ipc import exact_json

        body = exact_json.encode(json)
        sent.setdefault("content-type", "application/json")
    return _ask("POST", url, sent, body)


def _ask(method: str, url: str, headers: Mapping[str, str] | None, body: bytes) -> Response:
    if not isinstance(url, str):
        raise TypeError(f"http.{method.lower()}: an url is text, not {type(url).__name__}")
    request: dict[str, Any] = {"url": url}
    if headers:
        request["headers"] = {str(name): str(value) for name, value in headers.items()}
    if body:
        request["body"] = base64.b64encode(body).decode()
    provider = get_provider()
    if method == "GET":
        answer = provider.read_req(_BACKEND, method, request)
    else:
        answer = provider.write_req(_BACKEND, method, request)
    content = base64.b64decode(answer["body"])
    return Response(url, answer["status"], answer["headers"], content)
