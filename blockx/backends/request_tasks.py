"""One asyncio task a request, for backends whose requests do not leave together: its end is its one reply.

io thread. The reply is made when the task is done and not in the task, which may be cancelled before it
begins. A request that our own bug ends gets an error reply: its call must not wait for ever.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from blockx.backends.replies import failed
from blockx.backends.scope import IoReply, IoRequest, Reply
from blockx.errors import ErrorKind


class RequestTasks:
    """The requests of one backend that are on their way, by call; a call has at most one."""

    def __init__(self, prefix: str = "") -> None:
        """``prefix``: begins the message of a failed request, before its operation."""
        self._prefix = prefix
        self._tasks: dict[str, asyncio.Task[IoReply]] = {}

    def start(self, request: IoRequest, work: Coroutine[Any, Any, IoReply], reply: Reply) -> None:
        """Do ``work``; ``reply`` is called once, whatever becomes of it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[request.call_id] = task
        task.add_done_callback(lambda done: reply(self._ended(request, done)))

    def cancel(self, call_id: str) -> None:
        """Give the call's request up."""
        task = self._tasks.get(call_id)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Give up what is on its way, and wait for its end."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _ended(self, request: IoRequest, task: "asyncio.Task[IoReply]") -> IoReply:
        if self._tasks.get(request.call_id) is task:
            del self._tasks[request.call_id]
        if task.cancelled():
            text = f"{self._prefix}{request.operation}: the call's attempt has ended"
            return failed(request, ErrorKind.CANCELLED, text)
        error = task.exception()
        if error is not None:
            text = f"{self._prefix}{request.operation}: {type(error).__name__}: {error}"
            return failed(request, ErrorKind.IO_ERROR, text)
        return task.result()
