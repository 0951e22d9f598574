"""The loop that is a lane: one call after the other in one greenlet, parked in the hub between them.

A module of its own, because it is interpreted also where the modules around it are compiled: greenlet takes one
without a Python frame for one that runs in another thread, and refuses to give it the context of its next call.
"""

from collections.abc import Callable

from greenlet import greenlet

from blockx.executor.context import ExecContext


def run_calls(
    run: Callable[[ExecContext], None], hub: greenlet, context: ExecContext | None
) -> None:
    """Run the call it is entered with, then those that the hub switches in; None ends it."""
    while context is not None:
        run(context)
        context = None
        context = hub.switch()
