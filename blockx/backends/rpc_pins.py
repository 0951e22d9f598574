"""Which block a task reads: heights become hashes where a reorganisation could still change them.

io thread only; one ``TaskPins`` a task and chain. Rules of the design, section 7: heights above the node's
finalised block are pinned by hash, older ones are read by number; after a read that takes a height alone the
hash is compared; ``latest`` is pinned once a task, by hash;
the finalised height is asked once a task, at the first read that names a height; if the node knows none,
every height is pinned by hash. A null or failed answer is never remembered, so a block that is not there yet
may be there at the next read.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from blockx.backends.rpc_wire import NULL
from blockx.errors import ErrorKind
from blockx.ipc.messages import WireError

PINS_MAX = 131_072
"""Heights that a task holds pinned by hash. Full: the oldest pin goes; read again, that height is pinned anew."""

HEIGHT_MAX = 2**63 - 1


class BlockRef(NamedTuple):
    """A block as a read names it: by hash if there is one, else by number (it is final)."""

    number: int | None
    hash: str | None
    known: bool
    """A node has shown it to us, so "unknown" means a lagging node or a reorganisation."""
    name: str
    """For messages."""


Resolved = Callable[[BlockRef | WireError], None]
OwnAnswer = Callable[[bytes | None, WireError | None], None]
OnPins = Callable[[dict[str, Any]], None]
"""Takes new pins as plain JSON values; ``TaskPins.restore`` takes the sum of them."""
AskOwn = Callable[[str, bytes, str, OwnAnswer], None]
"""Ask one of our own questions: method, parameters, what it is (for messages), where the answer goes."""


class _Header(msgspec.Struct):
    """What we need of a block."""

    number: str
    hash: str


class _Transaction(msgspec.Struct, rename="camel"):
    """What we need of a transaction."""

    block_number: str
    block_hash: str


_decode_header = msgspec.json.Decoder(_Header).decode
_decode_transaction = msgspec.json.Decoder(_Transaction).decode
_GIVEN_UP = (ErrorKind.UNAVAILABLE, ErrorKind.THROTTLED)


class TaskPins:
    """The blocks of one task on one chain."""

    __slots__ = (
        "_ask",
        "_chain",
        "_finalised",
        "_hashes",
        "_latest",
        "_on_pins",
        "_waiting",
        "final",
    )

    def __init__(self, chain: str, ask: AskOwn, on_pins: OnPins | None = None) -> None:
        """``on_pins``: told of each block that is pinned, before the read that asked for it goes on."""
        self._chain = chain
        self._ask = ask
        self._on_pins = on_pins
        self.final: tuple[int, str] = (-1, "")
        """Height and hash of the finalised block as the node told it; (-1, ""): it has not."""
        self._finalised: int | None = None  # None: not asked yet; -1: the node knows none
        self._latest: BlockRef | None = None
        self._hashes: OrderedDict[int, BlockRef] = OrderedDict()
        self._waiting: dict[int | str, list[Resolved]] = {}  # by what was asked: a height or a tag

    def resolve(self, block: int | str, then: Resolved) -> None:
        """Call ``then`` with the block to read, at once or when it is known, or with an error."""
        if isinstance(block, int):
            self._resolve_height(block, then)
        elif block == "latest":
            self._resolve_latest(then)
        elif len(block) == 66 and block.startswith("0x"):
            then(BlockRef(None, block.lower(), known=False, name=block))
        else:
            text = f"a block is a height, a hash of 32 bytes or 'latest', not {block[:80]!r}"
            then(WireError(kind=ErrorKind.IO_ERROR, message=text))

    def restore(self, pins: Mapping[str, Any]) -> None:
        """Begin with what an earlier run of the task pinned; a height is a key as text."""
        for block, known in pins.items():
            ref = BlockRef(int(known[0]), str(known[1]), known=True, name=str(known[0]))
            if block == "finalized":
                self._finalised = ref.number
                self.final = (int(known[0]), str(known[1]))
            else:
                self._keep(block if block == "latest" else ref.number, ref)

    def verify(self, block: BlockRef, then: Callable[[WireError | None], None]) -> None:
        """After a read that named a pinned block by its height alone: is that height still this block?

        ``then`` gets None, or why the answer cannot be used. What it cannot see is a node that had another
        block for a moment, or one behind the same url that answers the read and not this.
        """
        number = block.number
        assert number is not None, "read by its height"

        def answered(result: bytes | None, error: WireError | None) -> None:
            now = error or self._read(number, result or NULL, _decode_header)
            if isinstance(now, BlockRef) and now.hash != block.hash:
                text = f"block {number} of chain {self._chain} was replaced while the task ran"
                now = WireError(kind=ErrorKind.BLOCK_UNKNOWN, message=text)
            then(None if isinstance(now, BlockRef) else now)

        params = b'["%s",false]' % hex(number).encode()
        self._ask("eth_getBlockByNumber", params, f"hash of block {number}", answered)

    # ---- heights ---------------------------------------------------------------------------------

    def _resolve_height(self, height: int, then: Resolved) -> None:
        pinned = self._hashes.get(height)
        if pinned is not None:
            then(pinned)
        elif not 0 <= height <= HEIGHT_MAX:
            text = f"a block's height is 0 or more and below 2^63, not {height}"
            then(WireError(kind=ErrorKind.IO_ERROR, message=text))
        elif self._finalised is None:
            self._ask_header("finalized", lambda known: self._height_or_error(height, known, then))
        elif height <= self._finalised:
            then(BlockRef(height, None, known=True, name=str(height)))
        else:
            self._ask_header(height, then)

    def _height_or_error(self, height: int, known: BlockRef | WireError, then: Resolved) -> None:
        """After the finalised height was asked: only a node that does not answer ends the read."""
        if isinstance(known, WireError) and known.kind in _GIVEN_UP:
            then(known)
            return
        self._resolve_height(height, then)

    def _resolve_latest(self, then: Resolved) -> None:
        if self._latest is not None:
            then(self._latest)
        else:
            self._ask_header("latest", then)

    # ---- our own questions -----------------------------------------------------------------------

    def _ask_header(self, block: int | str, then: Resolved) -> None:
        waiting = self._waiting.get(block)
        if waiting is not None:
            waiting.append(then)
            return
        self._waiting[block] = [then]
        text = hex(block) if isinstance(block, int) else block
        what = f"hash of block {block}" if block != "finalized" else "height of the finalised block"
        self._ask(
            "eth_getBlockByNumber",
            b'["%s",false]' % text.encode(),
            what,
            lambda result, error: self._header_answered(block, result, error),
        )

    def _header_answered(
        self, block: int | str, result: bytes | None, error: WireError | None
    ) -> None:
        if error is not None and error.kind == ErrorKind.IO_ERROR and block != "finalized":
            self._ask_transaction(block, error)
        else:
            self._known(block, error or self._read(block, result or NULL, _decode_header))

    def _ask_transaction(self, block: int | str, refusal: WireError) -> None:
        """A node refused the block, perhaps for its size: its first transaction names the hash as well."""

        def answered(result: bytes | None, error: WireError | None) -> None:
            if error is not None or result is None or result == NULL:
                self._known(block, refusal)
                return
            self._known(block, self._read(block, result, _header_of_transaction))

        text = hex(block) if isinstance(block, int) else block
        self._ask(
            "eth_getTransactionByBlockNumberAndIndex",
            b'["%s","0x0"]' % text.encode(),
            f"hash of block {block}",
            answered,
        )

    def _known(self, block: int | str, known: BlockRef | WireError) -> None:
        """Remember what was learnt and go on with those who wait for it."""
        if isinstance(known, BlockRef):
            self._remember(block, known)
            self._tell(block, known)
        elif block == "finalized" and known.kind not in _GIVEN_UP:
            self._finalised = -1
            self._tell(block, None)
        for then in self._waiting.pop(block):
            then(known)

    def _read(
        self, block: int | str, result: bytes, decode: Callable[[bytes], _Header]
    ) -> BlockRef | WireError:
        if result == NULL:
            text = f"block {block} is not known to the nodes of chain {self._chain}"
            return WireError(kind=ErrorKind.BLOCK_UNKNOWN, message=text)
        try:
            header = decode(result)
            height = int(header.number, 16)
        except (msgspec.MsgspecError, ValueError) as error:
            text = f"block {block} of chain {self._chain}: the node's answer is no block: {error}"
            return WireError(kind=ErrorKind.MALFORMED, message=text)
        if isinstance(block, int) and height != block:
            text = f"block {block} of chain {self._chain}: the node answered with block {height}"
            return WireError(kind=ErrorKind.MALFORMED, message=text)
        return BlockRef(height, header.hash, known=True, name=str(height))

    def _tell(self, block: int | str, header: BlockRef | None) -> None:
        if self._on_pins is None:
            return
        if block == "finalized" and header is None:
            self._on_pins({"finalized": [-1, ""]})
        elif header is not None:
            self._on_pins({str(block): [header.number, header.hash]})

    def _remember(self, block: int | str, header: BlockRef) -> None:
        if block == "finalized":
            assert header.number is not None, "a header has a number"
            self._finalised = header.number
            self.final = (header.number, header.hash or "")
            return
        self._keep(block, header)

    def _keep(self, block: int | str | None, header: BlockRef) -> None:
        assert header.number is not None, "a header has a number"
        if block == "latest":
            self._latest = header
        # The height of `latest` and the task's own reads of that height are one block.
        self._hashes[header.number] = header
        if len(self._hashes) > PINS_MAX:
            self._hashes.popitem(last=False)


def _header_of_transaction(result: bytes) -> _Header:
    transaction = _decode_transaction(result)
    return _Header(transaction.block_number, transaction.block_hash)
