"""The contract of the io side: a waiting call's request, its reply, and what a backend is.

Everything here runs on the io thread's loop, but ``IoRequest`` and ``IoReply`` cross threads as
immutable records. A reply that comes after its attempt ended is dropped by the adapter.

The two are made for every read, hence structs (0.2 us to make, a dataclass 1.2) that the garbage collector
does not track: they are in no cycles.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from blockx.ipc.messages import WireError


class IoRequest(msgspec.Struct, eq=False, gc=False):
    """One request of a parked call."""

    executor_id: str
    task_id: str
    call_id: str
    attempt_seq: int
    request_id: str
    backend: str
    """``blockdb``, ``rpc``, or a capability's name."""
    operation: str
    """What is asked of it, for example ``get_row`` or a JSON-RPC method."""
    params: bytes
    """Exact JSON."""
    sidecar: bytes | None
    write: bool
    cache_key: str
    budget_left_ms: float
    """The read must end by then. 0: no limit."""


class IoReply(msgspec.Struct, eq=False, gc=False):
    """Its answer: ``result`` (exact JSON), ``sidecar``, or ``error``."""

    request: IoRequest
    result: bytes | None = None
    sidecar: bytes | None = None
    error: WireError | None = None
    io_us: int = 0
    """From sending the request that carried the read to its answer."""
    queue_us: int = 0
    """Waiting before that: linger, limits, pauses between retries."""


Reply = Callable[[IoReply], None]
"""Hands one reply to the service; cheap, to be called on the io thread, exactly once for each request."""


class Backend(Protocol):
    """The real IO behind one backend name.

    Requests come as plain calls rather than coroutines, so that the reads of thousands of suspended
    calls cost no task each and can leave together.
    """

    async def start(self) -> None:
        """Open what is needed. Ask nothing of a node before the first read."""

    def submit(self, request: IoRequest, reply: Reply) -> None:
        """Take a request; ``reply`` is called once, now or later."""

    def cancel(self, call_id: str) -> None:
        """The call's attempt has ended: start nothing more for it. A late reply is harmless."""

    def task_ended(self, task_id: str) -> None:
        """Release what was pinned and cached for the task."""

    def statistics(self, task_id: str) -> dict[str, dict[str, int]]:
        """Numbers for the report, by section (``rpc`` chains), for one task."""

    async def close(self) -> None:
        """Finish accepted writes, close connections."""


class KeepsNothing:
    """The part of ``Backend`` for those that keep and count nothing by task."""

    def task_ended(self, task_id: str) -> None:
        """Nothing is kept for a task."""

    def statistics(self, task_id: str) -> dict[str, dict[str, int]]:
        """None."""
        return {}
