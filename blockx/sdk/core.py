"""``call_subfunc``, ``sleep`` and ``get_provider``: the provider under its plainest names."""

from typing import Any

from blockx.sdk.provider import get_provider

__all__ = ["call_subfunc", "get_provider", "sleep"]


def call_subfunc(function_id: str, *args: Any) -> Any:
    """Call another function of the same task; the same as ``blockx.function.call``."""
    return get_provider().subcall(function_id, list(args))


def sleep(seconds: float) -> None:
    """Suspend the call for this long, while others run; 0 only lets others run.

    Counts against the call's budget. Raises ValueError for a negative time.
    """
    get_provider().sleep(seconds)
