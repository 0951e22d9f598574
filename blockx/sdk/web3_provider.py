"""A provider for ``web3.py``: code written for it runs in a function, its requests suspended, shared and cached.

Imported by ``leafage.web3`` alone, since it needs the package ``web3``; runs wherever user code runs.
``latest`` and ``pending`` mean the block of the ``ChainState`` that it was made for; blocks named otherwise are
read as they are named.
"""

from typing import Any, Final

from web3 import Web3  # type: ignore[import-not-found, unused-ignore]
from web3.exceptions import (  # type: ignore[import-not-found, unused-ignore]
    ContractLogicError,
)
from web3.providers.base import (  # type: ignore[import-not-found, unused-ignore]
    BaseProvider,
)

from blockx.errors import ReadError, RevertedError
from blockx.sdk import wire
from blockx.sdk.provider import get_provider

_BLOCK_POSITIONS: Final = {
    "eth_getBalance": 1,
    "eth_getCode": 1,
    "eth_getTransactionCount": 1,
    "eth_getStorageAt": 2,
    "eth_getProof": 2,
    "eth_call": 1,
    "eth_estimateGas": 1,
    "eth_createAccessList": 1,
    "eth_getBlockByNumber": 0,
    "eth_getBlockTransactionCountByNumber": 0,
    "eth_getTransactionByBlockNumberAndIndex": 0,
    "eth_getBlockReceipts": 0,
}
"""Where the block stands among the parameters."""
_FLOATING: Final = (None, "latest", "pending")


class BlockxProvider(BaseProvider):  # type: ignore[misc, unused-ignore]
    """Sends the requests of ``web3`` through the current provider of blockx."""

    def __init__(self, chain: str | None, block: int | str) -> None:
        super().__init__()
        self._chain = chain
        self._block = block

    def make_request(self, method: Any, params: Any) -> Any:
        """One request, answered in JSON-RPC's form. Raises ReadError; for a revert web3's own exception."""
        try:
            result = self._result(str(method), list(params))
        except RevertedError as error:
            text = f"execution reverted: {error.reason}" if error.reason else "execution reverted"
            raise ContractLogicError(text, data=f"0x{error.data.hex()}") from error
        return {"jsonrpc": "2.0", "id": 1, "result": result}

    def is_connected(self, show_traceback: bool = False) -> bool:
        """Whether a node answers."""
        try:
            self._ask("eth_chainId", None, [])
        except ReadError:
            if show_traceback:
                raise
            return False
        return True

    def _result(self, method: str, params: list[Any]) -> Any:
        if method == "eth_blockNumber":
            if isinstance(self._block, int):
                return hex(self._block)
            return self._ask("eth_getBlockByNumber", self._block, [False])["number"]
        position = _BLOCK_POSITIONS.get(method)
        if position is None:
            return self._ask(method, None, params)
        named = params.pop(position) if len(params) > position else None
        return self._ask(method, self._block_of(named), params)

    def _block_of(self, named: Any) -> Any:
        if named in _FLOATING:
            return self._block
        if isinstance(named, str) and named.startswith("0x") and len(named) < 66:
            return int(named, 16)
        return named

    def _ask(self, method: str, block: Any, params: list[Any]) -> Any:
        request: dict[str, Any] = {"params": params}
        if self._chain is not None:
            request["chain"] = self._chain
        if block is not None:
            request["block"] = block
        return get_provider().read_req(wire.RPC, method, request)


def web3(chain: str | None, block: int | str) -> Web3:
    """A ``Web3`` over a chain as of a block."""
    return Web3(BlockxProvider(chain, block))
