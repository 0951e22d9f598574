"""``leafage``: the state of a chain at one block, read from a node.

A ``ChainState`` holds a chain's name and a block, and asks nobody until a method is called; each
method is one request, suspended, batched, shared and cached without a word from here. Numbers of
the node become ``int`` and its data ``bytes``; blocks, transactions, receipts and logs stay as the
node gave them (hex texts), except what ``call`` decodes by a signature (``sdk.abi``).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from blockx.errors import TOO_MUCH, ErrorKind, ReadError
from blockx.sdk import abi, wire
from blockx.sdk.blockdb import Block
from blockx.sdk.provider import get_provider

__all__ = ["ChainState", "web3"]

_HEX_DATA: Final = re.compile(r"0x(?:[0-9a-fA-F]{2})*")
_HEX_QUANTITY: Final = re.compile(r"0x[0-9a-fA-F]{1,64}")
_SLOTS: Final = 1 << 256


class ChainState:
    """A chain as of one block.

    ``chain``: a name of ``backends.rpc``; None: the only one. ``block``: a height from 0 on, a
    block hash (0x and 64 hex digits), ``"latest"`` (the same block during the whole task), or a
    ``blockdb.Block``.

    All methods raise ReadError (``.kind`` says how; RevertedError for a revert), and ValueError or
    TypeError for a wrong argument, before anything is asked.
    """

    __slots__ = ("_block", "_chain")

    def __init__(self, chain: str | None, block: int | str | Block) -> None:
        if chain is not None and not isinstance(chain, str):
            raise TypeError(f"ChainState: the chain is a name, not {chain!r}")
        self._chain = chain
        self._block = _block(block)

    def __repr__(self) -> str:
        return f"ChainState({self._chain!r}, {self._block!r})"

    def get_address_balance(self, address: str | bytes) -> int:
        """Balance in wei."""
        return _quantity(self._state("eth_getBalance", [_address(address)]), "eth_getBalance")

    def get_address_code(self, address: str | bytes) -> bytes:
        """Code of a contract; ``b""`` for an address without one."""
        return _data(self._state("eth_getCode", [_address(address)]), "eth_getCode")

    def get_address_nonce(self, address: str | bytes) -> int:
        """Transactions sent so far (for a contract: contracts made)."""
        method = "eth_getTransactionCount"
        return _quantity(self._state(method, [_address(address)]), method)

    def get_storage(self, address: str | bytes, slot: int | str) -> bytes:
        """The 32 bytes of one storage slot; ``slot`` is a number or its hex text."""
        params = [_address(address), _slot(slot)]
        return _data(self._state("eth_getStorageAt", params), "eth_getStorageAt").rjust(32, b"\0")

    def call(self, to: str | bytes, data: str | bytes = b"", *args: Any) -> Any:
        """Call a contract without a transaction.

        ``data`` is call data (bytes, or hex text beginning with 0x), and the answer is bytes; or it is a
        signature such as ``"balanceOf(address)(uint256)"`` followed by the arguments, and the answer is
        the value, or a tuple of several (bytes if the signature names no result).

        An empty answer to call data is ``b""``; a revert raises RevertedError (``.reason``, ``.data``).
        """
        if isinstance(data, str) and "(" in data:
            return self._call_by_signature(to, abi.parse(data), args)
        if args:
            raise TypeError("call: arguments need a signature, as 'balanceOf(address)(uint256)'")
        return self._call_data(to, _call_data(data))

    def _call_by_signature(
        self, to: str | bytes, signature: abi.Signature, args: tuple[Any, ...]
    ) -> Any:
        answer = self._call_data(to, f"0x{abi.encode_call(signature, args).hex()}")
        return answer if signature.outputs is None else abi.decode_answer(signature, answer)

    def _call_data(self, to: str | bytes, data: str) -> bytes:
        transaction = {"to": _address(to), "data": data}
        return _data(self._state("eth_call", [transaction]), "eth_call")

    def get_block(self, full: bool = False) -> dict[str, Any]:
        """The block itself; ``full``: with its transactions instead of their hashes."""
        block = self._state("eth_getBlockByNumber", [bool(full)])
        if block is None:
            raise ReadError(
                f"the node of chain {self._shown_chain()} knows no block {self._block}",
                kind=ErrorKind.BLOCK_UNKNOWN,
            )
        return _object(block, "eth_getBlockByNumber")

    def get_transaction(self, hash: str) -> dict[str, Any] | None:  # noqa: A002 - the users' word
        """A transaction by its hash, whatever this object's block; None: the node knows none."""
        found = self._ask("eth_getTransactionByHash", None, [_hash(hash, "transaction")])
        return None if found is None else _object(found, "eth_getTransactionByHash")

    def get_receipt(self, hash: str) -> dict[str, Any] | None:  # noqa: A002 - the users' word
        """A transaction's receipt by its hash; None: the node knows none."""
        found = self._ask("eth_getTransactionReceipt", None, [_hash(hash, "transaction")])
        return None if found is None else _object(found, "eth_getTransactionReceipt")

    def get_logs(
        self,
        address: str | bytes | Sequence[str | bytes] | None = None,
        topics: Sequence[Any] | None = None,
        from_block: int | None = None,
        to_block: int | None = None,
    ) -> list[dict[str, Any]]:
        """Logs of this object's block, or of a range of heights (both ends included, both needed).

        A range that the node finds too much is asked for in parts.
        ``address``: one or several; ``topics``: as in JSON-RPC, each None, a 32-byte hex text or a
        list of them.
        """
        filter_: dict[str, Any] = {}
        if address is not None:
            one = isinstance(address, str | bytes)
            filter_["address"] = _address(address) if one else [_address(a) for a in address]
        if topics is not None:
            filter_["topics"] = [_topic(topic) for topic in topics]
        if (from_block is None) != (to_block is None):
            raise ValueError("get_logs: give both from_block and to_block, or neither")
        if from_block is None or to_block is None:
            found = self._state("eth_getLogs", [filter_])
        else:
            return self._logs_in_parts(filter_, _height(from_block), _height(to_block))
        return _list(found, "eth_getLogs")

    def _logs_in_parts(
        self, filter_: dict[str, Any], first: int, last: int
    ) -> list[dict[str, Any]]:
        """The logs of a range, in order. A part that is too much is halved, and so are those after it."""
        logs: list[dict[str, Any]] = []
        span = max(1, last - first + 1)
        while True:
            end = min(last, first + span - 1)
            part = {**filter_, "fromBlock": hex(first), "toBlock": hex(end)}
            try:
                logs += _list(self._ask("eth_getLogs", None, [part]), "eth_getLogs")
            except ReadError as error:
                if TOO_MUCH not in str(error) or end <= first:
                    raise
                span = (end - first + 1) // 2
                continue
            if end >= last:
                return logs
            first = end + 1

    def _state(self, method: str, params: list[Any]) -> Any:
        return self._ask(method, self._block, params)

    def _ask(self, method: str, block: int | str | None, params: list[Any]) -> Any:
        request: dict[str, Any] = {"params": params}
        if (
            self._chain is not None
        ):  # left out rather than null, which costs the encoder a second look
            request["chain"] = self._chain
        if block is not None:
            request["block"] = block
        return get_provider().read_req(wire.RPC, method, request)

    def _shown_chain(self) -> str:
        return self._chain or "(the only one)"


def web3(chain: str | None, block: int | str | Block) -> Any:
    """A ``web3.Web3`` over a chain as of a block, for code that was written for web3.py.

    ``latest`` means that block. Needs the package ``web3``; without it: ModuleNotFoundError.
    """
    from blockx.sdk.web3_provider import web3 as made  # late: web3 takes a second to import

    state = ChainState(chain, block)
    return made(chain, state._block)


# --- arguments ----------------------------------------------------------------------------------


def _block(block: Any) -> int | str:
    if isinstance(block, Block):
        block = block.height if block.hash is None else block.hash
    if isinstance(block, int) and not isinstance(block, bool):
        return _height(block)
    if block == "latest":
        return "latest"
    if isinstance(block, str) and len(block) == 66 and _HEX_DATA.fullmatch(block):
        return block.lower()
    raise ValueError(
        f'a block is a height, a hash (0x and 64 hex digits) or "latest", not {_shown(block)}'
    )


def _height(height: Any) -> int:
    if not isinstance(height, int) or isinstance(height, bool):
        raise TypeError(f"a block height is a whole number, not {_shown(height)}")
    if not 0 <= height < 1 << 64:
        raise ValueError(f"a block height is from 0 to 2**64 - 1, not {_shown(height)}")
    return int(height)


def _address(address: Any) -> str:
    if isinstance(address, bytes):
        address = f"0x{address.hex()}"
    if not isinstance(address, str):
        raise TypeError(f"an address is text, not {_shown(address)}")
    if len(address) != 42 or not _HEX_DATA.fullmatch(address):
        raise ValueError(f"an address is 0x and 40 hex digits, not {_shown(address)}")
    return address.lower()


def _hash(hash_: Any, of: str) -> str:
    if not isinstance(hash_, str) or len(hash_) != 66 or not _HEX_DATA.fullmatch(hash_):
        raise ValueError(f"the hash of a {of} is 0x and 64 hex digits, not {_shown(hash_)}")
    return hash_.lower()


def _slot(slot: Any) -> str:
    if isinstance(slot, str) and _HEX_QUANTITY.fullmatch(slot):
        slot = int(slot, 16)
    if not isinstance(slot, int) or isinstance(slot, bool) or not 0 <= slot < _SLOTS:
        raise ValueError(
            f"a storage slot is a number below 2**256 or its hex text, not {_shown(slot)}"
        )
    return hex(slot)


def _call_data(data: Any) -> str:
    if isinstance(data, bytes | bytearray):
        return f"0x{data.hex()}"
    if not isinstance(data, str):
        raise TypeError(f"call data is bytes or hex text, not {_shown(data)}")
    if not _HEX_DATA.fullmatch(data):
        raise ValueError(f"call data is 0x and an even number of hex digits, not {_shown(data)}")
    return data


def _topic(topic: Any) -> Any:
    if topic is None:
        return None
    if isinstance(topic, list | tuple):
        return [_hash(one, "topic") for one in topic]
    return _hash(topic, "topic")


def _shown(value: Any) -> str:
    """A value for a message; texts of users may be long."""
    text = repr(value) if not isinstance(value, str) else repr(value[:100])
    return text if len(text) <= 110 else f"{text[:100]}..."


# --- answers ------------------------------------------------------------------------------------


def _quantity(answer: Any, method: str) -> int:
    if not isinstance(answer, str) or not _HEX_QUANTITY.fullmatch(answer):
        raise _malformed(method, "a hex number", answer)
    return int(answer, 16)


def _data(answer: Any, method: str) -> bytes:
    if not isinstance(answer, str) or not _HEX_DATA.fullmatch(answer):
        raise _malformed(method, "hex data", answer)
    return bytes.fromhex(answer[2:])


def _object(answer: Any, method: str) -> dict[str, Any]:
    if not isinstance(answer, Mapping):
        raise _malformed(method, "an object", answer)
    return cast(dict[str, Any], answer)


def _list(answer: Any, method: str) -> list[dict[str, Any]]:
    if not isinstance(answer, list):
        raise _malformed(method, "a list", answer)
    return cast(list[dict[str, Any]], answer)


def _malformed(method: str, expected: str, answer: Any) -> ReadError:
    return ReadError(
        f"{method}: the node answered {_shown(answer)} instead of {expected}",
        kind=ErrorKind.MALFORMED,
    )
