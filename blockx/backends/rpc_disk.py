"""One task's way to the disk cache on one chain: learns which chain it is, then looks up and keeps.

io thread only. The cache is keyed by chain id and genesis hash, which the node is asked for at the first read
of the task at a final block; together with the finalised height that is three requests, and no more when every
read is found. A node that does not tell them: the task's reads go to the node.

Invariant: ``found`` of each ``look_up`` is called exactly once, now or later on the loop.
"""

from collections.abc import Callable

import msgspec

from blockx.backends.read_cache import ChainIdentity, ReadCache, read_key
from blockx.backends.rpc_pins import AskOwn, TaskPins
from blockx.ipc.exact_json import InvalidJsonError
from blockx.ipc.messages import WireError

Found = Callable[[bytes, bytes | None], None]
"""Takes the key to keep the answer under (empty: do not keep it) and the result, None if it is not there."""


class _Block(msgspec.Struct):
    """What we need of the genesis block."""

    hash: str


_decode_block = msgspec.json.Decoder(_Block).decode
_decode_text = msgspec.json.Decoder(str).decode
_QUESTIONS = {
    "chain id": ("eth_chainId", b"[]", _decode_text),
    "hash of the genesis block": (
        "eth_getBlockByNumber",
        b'["0x0",false]',
        lambda result: _decode_block(result).hash,
    ),
}


class TaskDisk:
    """See the module's law."""

    __slots__ = (
        "_answers",
        "_ask",
        "_cache",
        "_identity",
        "_is_off",
        "_number",
        "_pins",
        "_waiting",
    )

    def __init__(self, cache: ReadCache, ask: AskOwn, pins: TaskPins) -> None:
        self._cache = cache
        self._ask = ask
        self._pins = pins
        self._answers: dict[str, str] = {}
        self._identity: ChainIdentity | None = None
        self._number = 0
        self._is_off = False
        self._waiting: list[tuple[str, bytes, Found]] = []

    def look_up(self, method: str, params: bytes, found: Found) -> None:
        """Look a read at a final block up."""
        if self._is_off:
            found(b"", None)
        elif self._number:
            self._look_up(method, params, found)
        else:
            self._waiting.append((method, params, found))
            if len(self._waiting) == 1:
                self._ask_identity()

    def keep(self, key: bytes, result: bytes) -> None:
        """Keep the answer of a read that was not found."""
        self._cache.put(key, self._number, result)

    def _look_up(self, method: str, params: bytes, found: Found) -> None:
        assert self._identity is not None, "the chain is known"
        try:
            key = read_key(self._identity, method, params)
        except InvalidJsonError:  # the node will say what it thinks of it
            found(b"", None)
            return
        self._cache.get(key, lambda result: found(key, result))

    # ---- which chain it is -----------------------------------------------------------------------

    def _ask_identity(self) -> None:
        for what, (method, params, decode) in _QUESTIONS.items():
            self._ask(method, params, what, self._taker(what, decode))

    def _taker(
        self, what: str, decode: Callable[[bytes], str]
    ) -> Callable[[bytes | None, WireError | None], None]:
        def take(result: bytes | None, error: WireError | None) -> None:
            if self._is_off:
                return
            try:
                self._answers[what] = decode(result or b"")
            except (msgspec.MsgspecError, RecursionError):
                self._go_on(0)  # an error, null, or no block: the node does not tell
                return
            if len(self._answers) == len(_QUESTIONS):
                self._identify()

        return take

    def _identify(self) -> None:
        height, hash_ = self._pins.final
        chain_id, genesis = (self._answers[what] for what in _QUESTIONS)
        self._identity = ChainIdentity(chain_id, genesis, height, hash_)
        self._cache.identify(self._identity, self._go_on)

    def _go_on(self, number: int) -> None:
        """The number of the chain in the cache is known; 0: the cache cannot be used."""
        self._number = number
        self._is_off = not number
        waiting, self._waiting = self._waiting, []
        for method, params, found in waiting:
            self.look_up(method, params, found)
