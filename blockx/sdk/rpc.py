"""``blockx_sdk.rpc``: a plain JSON-RPC request."""

from collections.abc import Sequence
from typing import Any

from blockx.sdk import wire
from blockx.sdk.provider import get_provider


def call(method: str, params: Sequence[Any] | None = None, chain: str | None = None) -> Any:
    """Send one request to a node and return its ``result`` as the node gave it, integers exact.

    ``chain``: a name of ``backends.rpc``; None: the only one, an error if there are several.
    Methods that only read may be merged with equal requests and sent again; any other is sent
    exactly once.

    Raises:
        ReadError: the node answered with an error, or not at all (``.kind``); RevertedError for a
            revert.
        TypeError: the method is no text, or the parameters are no list.
    """
    if not isinstance(method, str) or not method:
        raise TypeError(
            f"rpc.call: the method must be text such as 'eth_blockNumber', not {method!r}"
        )
    if params is None:
        params = []
    if not isinstance(params, list | tuple):
        raise TypeError(f"rpc.call: params must be a list, not {type(params).__name__}")
    request: dict[str, Any] = {"params": list(params)}
    if chain is not None:  # left out rather than null, which costs the encoder a second look at all
        request["chain"] = chain
    return get_provider().read_req(wire.RPC, method, request)
