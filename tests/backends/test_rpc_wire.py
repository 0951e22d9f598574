"""Error classes, error shapes, texts: the pure part of node RPC."""

import json

import pytest
from msgspec import Raw

from blockx.backends.rpc_wire import (
    NodeError,
    NoJsonError,
    parse_body,
    place_block,
    read_error,
    revert_reason,
    shorten,
    wire_error,
)
from blockx.ipc.messages import WireError


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (3, "execution reverted: because", "reverted"),
        (-32000, "execution reverted", "reverted"),
        (-32015, "VM execution error.", "reverted"),
        (-32000, "missing trie node abcd (path )", "state_pruned"),
        (-32000, "required historical state unavailable (reexec=128)", "state_pruned"),
        (-32801, "state at block #5 is pruned", "state_pruned"),
        (4444, "pruned history unavailable", "state_pruned"),
        (-32005, "rate limit exceeded", "throttled"),
        (429, "x", "throttled"),
        (-32000, "daily request count exceeded, request rate limited", "throttled"),
        (-32600, "You exceeded your compute units per second capacity", "throttled"),
        (-32005, "query returned more than 10000 results", "io_error"),
        (-32001, "Resource not found", "block_unknown"),
        (-32000, "header not found", "block_unknown"),
        (-32602, "BlockOutOfRangeError: block height is 0 but requested was 5", "block_unknown"),
        (-32000, "unknown block", "block_unknown"),
        (-32002, "request timed out", "unavailable"),
        (-32603, "service temporarily unavailable", "unavailable"),
        (-32601, "Method not found", "io_error"),
        (-32603, "EVM error OutOfGas", "io_error"),
        (-32008, "Response is too big", "io_error"),
        (-32602, "invalid string length", "io_error"),
    ],
)
def test_each_error_has_its_class(code: int, text: str, kind: str) -> None:
    assert NodeError(code, text, None).kind() == kind


@pytest.mark.parametrize(
    ("error", "read"),
    [
        ({"code": 3, "message": "m", "data": "0x00ff"}, NodeError(3, "m", "0x00ff")),
        ({"code": 3, "message": "m", "data": {"data": "0x01"}}, NodeError(3, "m", "0x01")),
        ({"code": -32015, "message": "m", "data": "Reverted 0x02"}, NodeError(-32015, "m", "0x02")),
        ({"code": -1, "message": "m", "data": "more"}, NodeError(-1, "m (more)", None)),
        ({"code": "x", "message": None}, NodeError(0, "an error without a text", None)),
        ("just text", NodeError(0, "just text", None)),
        ([1], NodeError(0, "[1]", None)),
    ],
)
def test_an_error_object_of_any_shape_is_read(error: object, read: NodeError) -> None:
    assert read_error(json.dumps(error).encode()) == read


REASON = (
    "0x08c379a0"
    + "20".rjust(64, "0")
    + "10".rjust(64, "0")
    + b"because I say so".hex().ljust(64, "0")
)


@pytest.mark.parametrize(
    ("error", "wire"),
    [
        (
            NodeError(3, "execution reverted: because I say so", REASON),
            WireError(
                kind="reverted",
                message="eth_call: execution reverted: because I say so",
                reason="because I say so",
                data=REASON,
            ),
        ),
        (
            NodeError(3, "execution reverted: custom error", "0xf988f737"),
            WireError(
                kind="reverted",
                message="eth_call: execution reverted: custom error; custom error 0xf988f737, data 0xf988f737",
                data="0xf988f737",
            ),
        ),
        (
            NodeError(3, "execution reverted", "0x"),
            WireError(kind="reverted", message="eth_call: execution reverted", data="0x"),
        ),
    ],
)
def test_a_revert_shows_reason_or_data(error: NodeError, wire: WireError) -> None:
    assert wire_error(error, "eth_call", "chain dev") == wire


@pytest.mark.parametrize("data", ["", "08c379a0", "08c379a0" + "ff" * 64, "f988f737" + "00" * 64])
def test_data_of_another_form_has_no_reason(data: str) -> None:
    assert revert_reason(bytes.fromhex(data)) is None


def test_a_text_is_one_line_without_control_characters() -> None:
    assert shorten("a\x00\x07 b\r\n\tc", 80) == "a b c"
    assert shorten("x" * 90, 80) == "x" * 80 + "…"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "an empty body"),
        (b" \n", "an empty body"),
        (b"<html>x</html>", "no JSON but '<html>x</html>'"),
        (b'{"id":1,"res', """cut or malformed JSON beginning '{"id":1,"res'"""),
        (b"[" * 200_000, "cut or malformed JSON beginning '" + "[" * 80 + "…'"),
    ],
)
def test_what_is_no_json_is_named(body: bytes, text: str) -> None:
    with pytest.raises(NoJsonError) as caught:
        parse_body(body)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("method", "params", "number", "hash_", "placed"),
    [
        ("eth_call", b'[{"to":"0xa"}]', 5, None, b'[{"to":"0xa"},"0x5"]'),
        ("eth_call", b'["t",{"o":1}]', None, "0xh", b'["t",{"blockHash":"0xh"},{"o":1}]'),
        ("eth_getStorageAt", b'["0xa","0x0"]', 5, "0xh", b'["0xa","0x0",{"blockHash":"0xh"}]'),
        ("eth_getBlockReceipts", b"[]", 5, "0xh", b'["0xh"]'),
        ("trace_block", b"[]", 5, "0xh", b'["0x5"]'),
        ("unheard_of", b'["x"]', 5, None, b'["x","0x5"]'),
    ],
)
def test_a_block_is_put_where_the_method_takes_it(
    method: str, params: bytes, number: int | None, hash_: str | None, placed: bytes
) -> None:
    assert place_block(method, Raw(params), number, hash_) == (method, placed)


@pytest.mark.parametrize(
    ("method", "params", "number", "hash_"),
    [
        ("eth_call", b'{"to":1}', 5, None),
        ("eth_getLogs", b"[1]", 5, None),
        ("trace_block", b"[]", None, "0xh"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    method: str, params: bytes, number: int | None, hash_: str | None
) -> None:
    with pytest.raises(ValueError, match=method):
        place_block(method, Raw(params), number, hash_)
