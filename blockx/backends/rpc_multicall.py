"""``eth_call``s at one block that leave together, as one call of the contract Multicall3 (``aggregate3``).

Pure, but for the probe that ``Presence`` asks through its caller (io thread). What it may change for a call,
and why it is off by default, stands at ``RpcBackendConfig.multicall_max``. What makes the answers the same:

- Only a call that names ``to`` and ``data`` and nothing else rides: no sender, value, gas or state override.
- A success is the bytes that the contract returned, as the node would have written them. A call that fails
  inside is asked again singly, so its error is the node's own; so is everything of a group that failed whole.
- Nothing but a well-formed answer counts, so a contract that is not there (yet) only costs a request.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from blockx.backends.rpc_pins import AskOwn, OwnAnswer
from blockx.backends.rpc_wire import NULL
from blockx.ipc.messages import WireError

ADDRESS: Final = "0xca11bde05977b3631167028862be2a173976ca11"
"""Of Multicall3 on almost every chain (it is deployed by a transaction that is the same everywhere)."""
CALLDATA_BYTES_MAX: Final = 64 * 1024
"""Of one group: at 16 gas a byte it costs a fiftieth of what nodes allow a call by default (50 million gas)."""
_AGGREGATE3: Final = "82ad56cb"
_WORD: Final = 64
"""Hex digits of an ABI word."""
_CALL_WORDS: Final = 5
"""Of each call beside its data: where it stands, target, may fail, where its data stands, length."""

_ADDRESS_TEXT: Final = re.compile(r"0x[0-9a-fA-F]{40}")
_HEX_TEXT: Final = re.compile(r"0x(?:[0-9a-fA-F]{2})*")
_NUMBER_RESULT: Final = re.compile(rb'"0x([0-9a-fA-F]{1,15})"')
_HEX_RESULT: Final = re.compile(rb'"0x((?:[0-9a-fA-F]{2})*)"')


class Ride(NamedTuple):
    """A call that may ride in a group."""

    block: bytes
    """The block parameter as it stands in the request: calls of one group share it."""
    to: str
    data: str
    """Both hex without ``0x``."""

    @property
    def calldata_bytes(self) -> int:
        """What it adds to a group."""
        return _CALL_WORDS * 32 + -(-len(self.data) // _WORD) * 32


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    """The only shape of a call that rides."""

    to: str
    data: str = "0x"


_decode_params = msgspec.json.Decoder(tuple[_Call, msgspec.Raw]).decode


def ride_of(params: bytes) -> Ride | None:
    """How the call with these parameters (transaction, block) rides; None: it does not."""
    try:
        call, block = _decode_params(params)
    except msgspec.MsgspecError:
        return None
    if not _ADDRESS_TEXT.fullmatch(call.to) or not _HEX_TEXT.fullmatch(call.data):
        return None  # the node will say what it thinks of it
    return Ride(bytes(block), call.to[2:], call.data[2:])


def group_params(rides: Sequence[Ride]) -> bytes:
    """The parameters of the ``eth_call`` that carries a group."""
    offset, offsets, calls = len(rides) * 32, [], []
    for ride in rides:
        offsets.append(f"{offset:064x}")
        padding = "0" * (-len(ride.data) % _WORD)
        calls.append(
            f"{ride.to:0>64}{1:064x}{96:064x}{len(ride.data) // 2:064x}{ride.data}{padding}"
        )
        offset += ride.calldata_bytes - 32
    text = f"{_AGGREGATE3}{32:064x}{len(rides):064x}{''.join(offsets)}{''.join(calls)}"
    call = f'{{"to":"{ADDRESS}","data":"0x{text}"}}'
    return b"[%b,%b]" % (call.encode(), rides[0].block)


def group_results(result: bytes, count: int) -> list[bytes | None] | None:
    """The result of each call of a group, in order; None for one that failed inside.

    None as a whole: this is no answer of ``aggregate3`` to so many calls.
    """
    match = _HEX_RESULT.fullmatch(result)
    if match is None:
        return None
    words = match.group(1)

    def number(at: int) -> int:
        word = words[at : at + _WORD]
        if len(word) < _WORD:
            raise ValueError("the answer ends too early")
        return int(word, 16)

    try:
        start = 2 * number(0)
        if number(start) != count:
            return None
        start += _WORD
        results: list[bytes | None] = []
        for index in range(count):
            at = start + 2 * number(start + index * _WORD)
            success, data_at = number(at), at + 2 * number(at + _WORD)
            end = data_at + _WORD + 2 * number(data_at)
            if success > 1 or end > len(words):
                return None
            results.append(b'"0x%b"' % words[data_at + _WORD : end] if success else None)
    except ValueError:
        return None
    return results


class Presence:
    """From which height on the contract is known to exist on one chain, for all tasks.

    Asked only while calls want to ride, one probe at a time, halving the heights in question each time: some 25
    small requests on a long chain, and none after that. A call whose height is not settled yet leaves singly.
    """

    def __init__(self) -> None:
        self._from: int | None = None
        """It is there at this height and above; None: nowhere yet."""
        self._missing = -1
        """It is not there at this height and below, or the state is gone."""
        self._is_asking = False
        self._is_off = False
        """The node does not tell its height."""

    def covers(self, height: int, ask: AskOwn) -> bool:
        """Whether it is known to exist at a height; if that is open, asks for more."""
        if self._from is not None and height >= self._from:
            return True
        if height > self._missing and not self._is_asking and not self._is_off:
            self._is_asking = True
            if self._from is None:
                ask("eth_blockNumber", b"[]", "the newest height", self._newest(ask))
            else:
                self._probe((self._missing + self._from) // 2, ask)
        return False

    def _newest(self, ask: AskOwn) -> OwnAnswer:
        def told(result: bytes | None, _error: WireError | None) -> None:
            match = _NUMBER_RESULT.fullmatch(result or b"")
            if match is None:
                self._is_off = True
            else:
                self._probe(int(match.group(1), 16), ask)

        return told

    def _probe(self, height: int, ask: AskOwn) -> None:
        def told(result: bytes | None, _error: WireError | None) -> None:
            self._is_asking = False
            if result is not None and result not in (NULL, b'"0x"'):
                self._from = height
            else:
                self._missing = height

        params = b'["%s","%s"]' % (ADDRESS.encode(), hex(height).encode())
        ask("eth_getCode", params, f"code of Multicall3 at block {height}", told)
