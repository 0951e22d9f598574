"""JSON-RPC as it is on the wire: methods that are reads, bodies, answers, and the classes of errors.

Pure. User values stay raw bytes (``Raw``): parameters are spliced into a body and results out of an answer
without decoding, so no digit is lost. What arrives is a stranger's: any shape must end in a clear error.

Two data tables decide, and nothing else does: ``READ_METHODS`` (what may be merged, cached, repeated and
batched) and ``ERROR_CLASSES`` (what an error object means). Sources: EIP-1474, EIP-1898, and what geth, erigon,
nethermind, besu, reth, anvil and common gateways answer.
"""

import enum
import re
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from blockx.errors import TOO_MUCH, ErrorKind
from blockx.ipc import exact_json
from blockx.ipc.messages import WireError

TEXT_CHARS_MAX = 2_000
"""Of a node's error text that is kept; more is cut with an ellipsis."""

NULL = b"null"


# ---- methods -------------------------------------------------------------------------------------


class Pin(enum.Enum):
    """How a method is told its block when that is pinned by hash."""

    NONE = "the method has no block"
    OBJECT = "EIP-1898: an object with blockHash in the place of the number"
    SWAP = "a sister method takes the hash in the place of the number"
    HASH = "the hash itself in the place of the number"
    FILTER = "blockHash in the filter object"
    NUMBER = "by number only: above the finalised block the hash is compared after the answer"


class ReadMethod(NamedTuple):
    """A method that changes nothing, so it may be merged, batched and sent again."""

    pin: Pin = Pin.NONE
    position: int = 0
    """Of the block among the parameters."""
    by_hash: str = ""
    """The sister method, for ``Pin.SWAP``."""
    immutable: bool = False
    """The parameters alone fix a non-null answer for ever (they name a hash), so it may be cached."""


READ_METHODS: Final[dict[str, ReadMethod]] = {
    "eth_getBalance": ReadMethod(Pin.OBJECT, 1),
    "eth_getCode": ReadMethod(Pin.OBJECT, 1),
    "eth_getTransactionCount": ReadMethod(Pin.OBJECT, 1),
    "eth_getStorageAt": ReadMethod(Pin.OBJECT, 2),
    "eth_getProof": ReadMethod(Pin.OBJECT, 2),
    "eth_call": ReadMethod(Pin.OBJECT, 1),
    "eth_estimateGas": ReadMethod(Pin.OBJECT, 1),
    "eth_createAccessList": ReadMethod(Pin.OBJECT, 1),
    "debug_traceCall": ReadMethod(Pin.OBJECT, 1),
    "eth_getBlockByNumber": ReadMethod(Pin.SWAP, 0, "eth_getBlockByHash"),
    "eth_getBlockTransactionCountByNumber": ReadMethod(
        Pin.SWAP, 0, "eth_getBlockTransactionCountByHash"
    ),
    "eth_getTransactionByBlockNumberAndIndex": ReadMethod(
        Pin.SWAP, 0, "eth_getTransactionByBlockHashAndIndex"
    ),
    "eth_getUncleCountByBlockNumber": ReadMethod(Pin.SWAP, 0, "eth_getUncleCountByBlockHash"),
    "eth_getUncleByBlockNumberAndIndex": ReadMethod(Pin.SWAP, 0, "eth_getUncleByBlockHashAndIndex"),
    "debug_traceBlockByNumber": ReadMethod(Pin.SWAP, 0, "debug_traceBlockByHash"),
    "eth_getBlockReceipts": ReadMethod(Pin.HASH, 0),
    "eth_getLogs": ReadMethod(Pin.FILTER, 0),
    "trace_block": ReadMethod(Pin.NUMBER, 0),
    "eth_feeHistory": ReadMethod(Pin.NUMBER, 1),
    "eth_getBlockByHash": ReadMethod(immutable=True),
    "eth_getBlockTransactionCountByHash": ReadMethod(immutable=True),
    "eth_getTransactionByBlockHashAndIndex": ReadMethod(immutable=True),
    "eth_getUncleCountByBlockHash": ReadMethod(immutable=True),
    "eth_getUncleByBlockHashAndIndex": ReadMethod(immutable=True),
    "debug_traceBlockByHash": ReadMethod(immutable=True),
    "eth_chainId": ReadMethod(immutable=True),
    "net_version": ReadMethod(immutable=True),
    "web3_sha3": ReadMethod(immutable=True),
    "eth_accounts": ReadMethod(),
    "eth_blobBaseFee": ReadMethod(),
    "eth_blockNumber": ReadMethod(),
    "eth_gasPrice": ReadMethod(),
    "eth_getTransactionByHash": ReadMethod(),
    "eth_getTransactionReceipt": ReadMethod(),
    "eth_maxPriorityFeePerGas": ReadMethod(),
    "eth_protocolVersion": ReadMethod(),
    "eth_syncing": ReadMethod(),
    "net_listening": ReadMethod(),
    "net_peerCount": ReadMethod(),
    "web3_clientVersion": ReadMethod(),
    "debug_traceTransaction": ReadMethod(),
    "trace_filter": ReadMethod(),
    "trace_get": ReadMethod(),
    "trace_transaction": ReadMethod(),
}
"""Every other method may change something and is sent exactly once, alone, never repeated."""


class Params(msgspec.Struct):
    """What a call sends as the parameters of backend ``rpc``."""

    params: Raw = Raw(b"[]")
    chain: str | None = None
    block: int | str | None = None


decode_params = msgspec.json.Decoder(Params).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode
_encode = msgspec.json.Encoder().encode


def place_block(
    method: str, params: Raw, number: int | None, hash_: str | None
) -> tuple[str, bytes]:
    """Method and parameters of a state read at a block: by hash if there is one, else by number.

    Raises:
        ValueError: the parameters are no list, the filter is no object, or the method takes a number
            and only the hash is known.
    """
    known = READ_METHODS.get(method, ReadMethod(Pin.OBJECT, 1_000))
    try:
        listed: list[bytes] = [bytes(item) for item in _decode_list(params)]
    except msgspec.MsgspecError as error:
        raise ValueError(f"{method} with a block takes a list of parameters: {error}") from None
    if known.pin is Pin.FILTER:
        return method, _filter_at(method, listed, number, hash_)
    if hash_ is None or known.pin is Pin.NUMBER:
        if number is None:
            raise ValueError(f"{method} takes a block by height alone, not by hash")
        block = b'"%s"' % hex(number).encode()
    elif known.pin is Pin.OBJECT:
        block = b'{"blockHash":"%s"}' % hash_.encode()
    else:
        block = b'"%s"' % hash_.encode()
        method = known.by_hash or method
    listed.insert(known.position, block)
    return method, b"[" + b",".join(listed) + b"]"


def _filter_at(method: str, listed: list[bytes], number: int | None, hash_: str | None) -> bytes:
    filter_ = exact_json.decode(listed[0]) if listed else {}
    if not isinstance(filter_, dict):
        raise ValueError(f"{method} takes a filter object")
    for key in ("fromBlock", "toBlock", "blockHash"):
        filter_.pop(key, None)
    if hash_ is not None:
        filter_["blockHash"] = hash_
    else:
        filter_["fromBlock"] = filter_["toBlock"] = hex(number or 0)
    return b"[" + exact_json.encode(filter_) + b"]"


def _head(method: str) -> bytes:
    return b',"method":' + _encode(method) + b',"params":'


_HEADS: Final = {method: _head(method) for method in READ_METHODS}


def question_body(method: str, params: bytes | Raw) -> bytes:
    """A request's body from its method on; ``member`` puts the id before it."""
    return b"%b%b}" % (_HEADS.get(method) or _head(method), params)


def member(id_: int, body: bytes) -> bytes:
    """One JSON-RPC request."""
    return b'{"jsonrpc":"2.0","id":%d%b' % (id_, body)


# ---- answers -------------------------------------------------------------------------------------


class Answer(msgspec.Struct):
    """One JSON-RPC answer; of absent fields the defaults."""

    id: Any = None
    """A number as it was sent; some nodes send it back as text."""
    result: Raw = Raw()
    error: Raw = Raw()

    @property
    def failed(self) -> bool:
        """It carries an error object."""
        return len(self.error) > 0 and bytes(self.error) != NULL


_decode_answer = msgspec.json.Decoder(Answer).decode
_decode_answers = msgspec.json.Decoder(list[Answer]).decode


class NoJsonError(Exception):
    """A body that is no JSON; the text says what it is instead, for a message."""


def parse_body(body: bytes) -> Answer | list[Answer]:
    """The answer or answers of one HTTP body; JSON of another shape is an ``Answer`` with no field set.

    Bytes that are no UTF-8 are tolerated in error texts alone (they are replaced); a result that holds such
    bytes comes back as absent, which ends as ``malformed``.

    Raises:
        NoJsonError: empty, cut, a page: no JSON at all.
    """
    clean = _utf8(body)
    start = clean.lstrip()[:1]
    try:
        answers = _decode_answers(clean) if start == b"[" else [_decode_answer(clean)]
    except (msgspec.MsgspecError, RecursionError):
        try:
            exact_json.decode(clean)
        except ValueError:
            raise NoJsonError(_what_it_is(clean)) from None
        return Answer()
    if clean is not body:
        for answer in answers:
            if "�".encode() in bytes(answer.result):
                answer.result = Raw()
    return answers if start == b"[" else answers[0]


def _utf8(body: bytes) -> bytes:
    if body.isascii():
        return body
    try:
        body.decode()
    except UnicodeDecodeError:
        return body.decode("utf-8", "replace").encode()
    return body


def _what_it_is(body: bytes) -> str:
    text = body.strip()
    if not text:
        return "an empty body"
    shown = shorten(text[:120].decode("utf-8", "replace"), 80)
    if text[:1] in (b"{", b"["):
        return f"cut or malformed JSON beginning {shown!r}"
    return f"no JSON but {shown!r}"


# ---- errors --------------------------------------------------------------------------------------


class ErrorClass(NamedTuple):
    """A row of the table: both conditions that are given must hold."""

    kind: ErrorKind
    codes: frozenset[int] | None
    text: re.Pattern[str] | None


def _row(kind: ErrorKind, codes: set[int] | None = None, text: str | None = None) -> ErrorClass:
    pattern = re.compile(text, re.IGNORECASE) if text else None
    return ErrorClass(kind, frozenset(codes) if codes else None, pattern)


TOO_BIG = re.compile(
    r"too (big|large|many (results|logs|blocks))|query returned more than|response size exceeded"
    r"|exceeds? (the )?(max|maximum|limit).*(size|range|results)|block range"
    r"|limit(ed)? to (a )?[\d,]+ .*(block|range|result)|ranges? over \d+|max range",
    re.IGNORECASE,
)
"""An answer that the node refuses for its size. In a batch it may be the batch that is too big, so such a
member is asked again alone once."""

ERROR_CLASSES: Final[tuple[ErrorClass, ...]] = (
    _row(ErrorKind.REVERTED, {3}),
    _row(ErrorKind.REVERTED, None, r"execution reverted|^reverted|VM Exception.*revert"),
    _row(ErrorKind.REVERTED, {-32015}, r"revert|VM execution error"),
    _row(ErrorKind.IO_ERROR, {-32601}),  # a method that the node has not
    _row(ErrorKind.STATE_PRUNED, {4444}),
    _row(
        ErrorKind.STATE_PRUNED,
        None,
        r"missing trie node|state (is |data )?(not available|unavailable|pruned|recreat)|historical state"
        r"|state .{0,80}(not available|pruned)|pruned history|old data not available|state already discarded"
        r"|distance to target block exceeds maximum|no state (available|found)|state pruning|state histories",
    ),
    _row(ErrorKind.IO_ERROR, {-32005}, TOO_BIG.pattern),
    _row(ErrorKind.THROTTLED, {-32005, 429, -32097, -32029}),
    _row(
        ErrorKind.THROTTLED,
        None,
        r"rate.?limit|too many requests|throttl|request limit|compute units|capacity (limit )?exceeded"
        r"|exceeded .{0,40}(capacity|quota|requests per|RPS)|call rate|request rate|requests? per second",
    ),
    _row(ErrorKind.BLOCK_UNKNOWN, {-32001}),
    _row(
        ErrorKind.BLOCK_UNKNOWN,
        None,
        r"header not found|unknown block|block .{0,80}not found|BlockOutOfRange|block not available"
        r"|cannot find block|header for hash not found|could not find block|block does not exist"
        r"|not currently canonical|block number is in the future|could not be found",
    ),
    _row(
        ErrorKind.UNAVAILABLE, {-32002}, r"unavailable|tim(e|ed).?out|too busy|try again|resource"
    ),
    _row(
        ErrorKind.UNAVAILABLE,
        None,
        r"(service|upstream|backend|node) (is )?(temporarily )?unavailable|bad gateway|gateway time.?out"
        r"|no (healthy|available) (node|upstream|backend)|try again later|server (is )?(too )?busy"
        r"|no backends? (is |are )?(available|healthy)|(backend|node) is currently not healthy"
        r"|temporary internal error|request (failed or )?timed out|request timeout",
    ),
)
"""The first row that fits decides; an error that fits none is ``io_error``."""


class NodeError(NamedTuple):
    """An error object of a node, as far as it could be read."""

    code: int
    text: str
    data: str | None

    def kind(self) -> ErrorKind:
        """Its class."""
        for row in ERROR_CLASSES:
            if row.codes is not None and self.code not in row.codes:
                continue
            if row.text is None or row.text.search(self.text):
                return row.kind
        return ErrorKind.IO_ERROR


def read_error(raw: bytes) -> NodeError:
    """An error object of any shape: a text instead of an object, a code that is no number, data anywhere."""
    try:
        error = exact_json.decode(raw)
    except ValueError:
        error = raw.decode("utf-8", "replace")
    if not isinstance(error, dict):
        return NodeError(0, shorten(str(error)), None)
    code, text, data = error.get("code"), error.get("message"), error.get("data")
    if isinstance(data, dict):  # hardhat, ganache: {"data": {"data": "0x…", "message": …}}
        data = data.get("data", data.get("result"))
    if isinstance(data, str) and data.startswith("Reverted "):  # parity and its children
        data = data.removeprefix("Reverted ")
    is_hex = isinstance(data, str) and re.fullmatch(r"0x([0-9a-fA-F]{2})*", data) is not None
    message = text if isinstance(text, str) and text else "an error without a text"
    if isinstance(data, str) and not is_hex and data not in message:
        message = f"{message} ({data})"
    return NodeError(
        code if isinstance(code, int) else 0, shorten(message), str(data) if is_hex else None
    )


_REVERT_REASON = bytes.fromhex("08c379a0")  # Error(string)
_PANIC = bytes.fromhex("4e487b71")  # Panic(uint256)
_PANICS: Final = {
    0x00: "unspecified error",
    0x01: "assertion failed",
    0x11: "arithmetic underflow or overflow",
    0x12: "division or modulo by zero",
    0x21: "failed to convert value into enum type",
    0x22: "storage byte array incorrectly encoded",
    0x31: "called `.pop()` on an empty array",
    0x32: "array out-of-bounds access",
    0x41: "memory allocation error",
    0x51: "called an invalid internal function",
}
"""Codes of ``Panic(uint256)``, from the Solidity documentation; in the words of reth and anvil."""


def revert_reason(data: bytes) -> str | None:
    """What a revert says: the text of ``require(…, "text")``, the meaning of a panic; None of any other data."""
    if data.startswith(_PANIC) and len(data) == 36:
        code = int.from_bytes(data[4:])
        return f"panic: {_PANICS.get(code, 'unknown code')} (0x{code:02x})"
    if not data.startswith(_REVERT_REASON) or len(data) < 68:
        return None
    size = int.from_bytes(data[36:68], "big")
    if size > len(data) - 68:
        return None
    return data[68 : 68 + size].decode("utf-8", "replace")


def wire_error(error: NodeError, what: str, where: str) -> WireError:
    """The error that the call gets. ``what``: method and block; ``where``: chain and node."""
    kind = error.kind()
    if kind is ErrorKind.REVERTED:
        return _reverted(error, what)
    more = f"; {TOO_MUCH}" if kind is ErrorKind.IO_ERROR and TOO_BIG.search(error.text) else ""
    text = f"{what}: {error.text} (error {error.code} of {where}{more})"
    return WireError(kind=kind, message=text)


def _reverted(error: NodeError, what: str) -> WireError:
    data = error.data or "0x"
    reason = revert_reason(bytes.fromhex(data[2:]))
    if reason is not None:
        text = f"execution reverted: {shorten(reason)}"
    elif len(data) >= 10:
        text = f"{shorten(error.text, 120)}; custom error {data[:10]}, data {shorten(data, 150)}"
    elif data != "0x":
        text = f"{shorten(error.text, 120)}; data {data}"
    else:
        text = error.text
    return WireError(kind=ErrorKind.REVERTED, message=f"{what}: {text}", reason=reason, data=data)


def shorten(text: str, chars: int = TEXT_CHARS_MAX) -> str:
    """One line without control characters (nodes put raw revert data into texts), cut to a length."""
    clean = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * chars]).split())
    return clean if len(clean) <= chars else clean[:chars] + "…"
