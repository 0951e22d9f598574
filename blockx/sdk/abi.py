"""Contract calls by signature: ``balanceOf(address)(uint256)`` to call data, and the answer to Python values.

Runs wherever user code runs. ``eth_abi`` is imported at the first call of a process (0.2 to 0.4 s, part of that
call's budget): most functions never need it. Selectors are remembered, ``SIGNATURES_MAX`` of them.

A signature is a name, the types of the arguments, and, if the answer is wanted decoded, the types of what comes
back, in the notation of Solidity's ABI: ``slot0()(uint160,int24,uint16,uint16,uint16,uint8,bool)``; tuples are
``(uint256,address)``, arrays ``uint8[]``. Integers are exact, ``bytes`` types are bytes, addresses are lower-case
hex text, tuples are tuples.
"""

import functools
import re
from typing import Any, Final, NamedTuple

from blockx.errors import ErrorKind, ReadError

SIGNATURES_MAX: Final = 4_096
_NAME: Final = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_SHOWN_BYTES: Final = 64


class Signature(NamedTuple):
    """A signature taken apart."""

    text: str
    selector: bytes
    """First four bytes of the hash of name and argument types."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] | None
    """None: not given, the answer stays bytes."""


@functools.lru_cache(maxsize=SIGNATURES_MAX)
def parse(text: str) -> Signature:
    """Take a signature apart.

    Raises:
        ValueError: it is none; the message says what one looks like.
    """
    from eth_abi.abi import is_encodable_type
    from eth_hash.auto import keccak

    compact = "".join(text.split())
    name = _NAME.match(compact)
    lists = _lists(compact[name.end() :]) if name is not None else []
    if name is None or len(lists) not in (1, 2):
        raise ValueError(
            f"a signature looks like 'balanceOf(address)(uint256)', not {text[:100]!r}"
        )
    for kind in (kind for types in lists for kind in types):
        if not is_encodable_type(kind):
            raise ValueError(f"{text[:100]!r}: {kind[:40]!r} is no type of the ABI")
    canonical = f"{name[0]}({','.join(lists[0])})"
    outputs = lists[1] if len(lists) == 2 else None
    return Signature(text, keccak(canonical.encode())[:4], lists[0], outputs)


def _lists(text: str) -> list[tuple[str, ...]]:
    """``(a,(b,c))(d)`` as its lists of types; [] if the brackets do not match."""
    lists: list[tuple[str, ...]] = []
    types: list[str] = []
    depth, start = 0, 0
    for index, char in enumerate(text):
        if char == "(":
            depth += 1
            if depth == 1:
                types, start = [], index + 1
        elif depth == 0:
            return []
        elif char == ")":
            depth -= 1
            if depth == 0:
                if index > start or types:
                    types.append(text[start:index])
                lists.append(tuple(types))
        elif char == "," and depth == 1:
            types.append(text[start:index])
            start = index + 1
    return lists if depth == 0 else []


def encode_call(signature: Signature, args: tuple[Any, ...]) -> bytes:
    """Call data.

    Raises:
        ValueError: another number of arguments, or one that is no value of its type.
    """
    from eth_abi.abi import encode
    from eth_abi.exceptions import EncodingError

    if len(args) != len(signature.inputs):
        raise ValueError(
            f"{signature.text} takes {len(signature.inputs)} arguments, not {len(args)}"
        )
    try:
        return signature.selector + encode(signature.inputs, args)
    except (EncodingError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{signature.text}: {error}") from None


def decode_answer(signature: Signature, data: bytes) -> Any:
    """The one value that came back, a tuple of several, or None for none.

    Raises:
        ReadError: ``malformed``: the answer is no such value; an empty one often means no contract.
    """
    from eth_abi.abi import decode
    from eth_abi.exceptions import DecodingError

    outputs = signature.outputs
    assert outputs is not None, "asked for by the caller"
    if not outputs:
        return None
    try:
        values = decode(outputs, data)
    except (DecodingError, ValueError, OverflowError):
        shown = f"0x{data[:_SHOWN_BYTES].hex()}{'…' if len(data) > _SHOWN_BYTES else ''}"
        hint = "; is there a contract with this function?" if not data else ""
        raise ReadError(
            f"{signature.text}: the answer {shown} is no ({','.join(outputs)}){hint}",
            kind=ErrorKind.MALFORMED,
        ) from None
    return values[0] if len(values) == 1 else values
