"""Building replies: what every backend says in the same words. Pure; io thread."""

from blockx.backends.scope import IoReply, IoRequest
from blockx.errors import ErrorKind
from blockx.ipc.messages import WireError


class ReadFailedError(Exception):
    """Raised inside a backend to end one request with an error; never leaves the io thread."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.error = WireError(kind=kind, message=message)


def failed(request: IoRequest, kind: ErrorKind, message: str) -> IoReply:
    """An error reply that cost nothing."""
    return IoReply(request, error=WireError(kind=kind, message=message))


def named(names: "list[str] | tuple[str, ...]", none: str) -> str:
    """A list of names for a message, bounded: ``a, b, c`` (twenty at most), or what to say of none."""
    if not names:
        return none
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"
