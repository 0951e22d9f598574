"""``from blockx import function``: the module through which user code calls other functions."""

from typing import Any

from blockx.sdk.provider import get_provider


def call(function_id: str, *args: Any) -> Any:
    """Call another function of the same task and return its result.

    ``args`` are its positional arguments; they must be JSON values. The caller is suspended meanwhile.
    Equal calls of a task run once.

    Raises:
        SubcallFailedError: the function failed (``.kind`` says how); ``SubcallCycleDetectedError`` and
            ``SubcallDepthExceededError`` are the two special cases.
        TypeError, ValueError: an argument has no exact JSON form; the message names its path.
    """
    return get_provider().subcall(function_id, list(args))
