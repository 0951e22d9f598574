"""The SDK's requests and answers, against a provider that writes down what it is asked."""

import dataclasses
import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

import blockdb
import blockx_sdk
import leafage
from blockx import function, sdk
from blockx.errors import BlockxError, ErrorKind, ReadError
from blockx.sdk import leafage as sdk_leafage
from blockx.sdk import provider as seam
from blockx.sdk.blockdb import Block, BlockTable, Table, TimeTable
from blockx.sdk.leafage import ChainState

ADDRESS = "0x" + "Ab" * 20
HASH = "0x" + "Cd" * 32


class Recorder:
    """A provider: keeps every request, answers with ``answer``."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answer: Any = None

    def read_req(self, backend, operation, params, *, cache_key=None):
        assert cache_key is None
        self.asked.append((backend, operation, params))
        return self.answer

    def write_req(self, backend, operation, params):
        self.asked.append(("write", backend, operation, params))

    def subcall(self, function_id, args):
        self.asked.append(("subcall", function_id, args))
        return self.answer

    def sleep(self, seconds):
        self.asked.append(("sleep", seconds))


@pytest.fixture
def recorder():
    recorder = Recorder()
    token = seam.set_provider(recorder)
    yield recorder
    seam.reset_provider(token)


# --- blockdb ------------------------------------------------------------------------------------

KEY = {"token": "0x1", "n": 2**255}


@pytest.mark.parametrize(
    ("ask", "request_"),
    [
        (lambda: Table("t").scan(), ("blockdb", "scan", {"table": "t", "prefix": {}})),
        (
            lambda: Table("t").scan({"token": "0x1"}, 5),
            ("blockdb", "scan", {"table": "t", "prefix": {"token": "0x1"}, "limit": 5}),
        ),
        (
            lambda: BlockTable("t").history(KEY),
            ("blockdb", "get_history", {"table": "t", "key": KEY}),
        ),
        (
            lambda: BlockTable("t").history(KEY, 3, Block(9), limit=2),
            ("blockdb", "get_history", {"table": "t", "key": KEY, "limit": 2, "from": 3, "to": 9}),
        ),
        (
            lambda: TimeTable("t").history(KEY, 3, datetime(2020, 1, 2, tzinfo=UTC)),
            ("blockdb", "get_history_at",
             {"table": "t", "key": KEY, "from": 3, "to": "2020-01-02T00:00:00Z"}),
        ),
    ],
)  # fmt: skip
def test_reads_of_several_rows_are_one_request(recorder, ask, request_):
    recorder.answer = [{"any": 1}]
    assert ask() == [{"any": 1}]
    assert recorder.asked == [request_]


def test_rows_of_a_time_table_are_written_in_one_request(recorder):
    TimeTable("t").upsert_rows([{"key": KEY, "at": 5, "row": {"v": 1}}])
    TimeTable("t").upsert_rows([])
    assert recorder.asked == [
        ("write", "blockdb", "upsert_rows_at",
         {"table": "t", "rows": [{"key": KEY, "at": 5, "row": {"v": 1}}]}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda: Table("t").scan(limit=0), "a limit is a whole number from 1 on, not 0"),
        (lambda: BlockTable("t").history(KEY, limit=True), "a limit is a whole number"),
        (
            lambda: TimeTable("t").history(KEY, True),
            "`at` is a datetime, a number or text, not bool",
        ),
        (
            lambda: TimeTable("t").upsert_rows([{"key": KEY, "row": {}}]),
            "a row has the fields key, at, row; not key, row",
        ),
        (
            lambda: TimeTable("t").upsert_rows([{"key": KEY, "at": 1, "row": 5}]),
            "the row itself must be a dict, not int",
        ),
    ],
)
def test_wrong_limits_moments_and_rows_are_refused_at_once(recorder, ask, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        ask()
    assert recorder.asked == []


@pytest.mark.parametrize(
    ("ask", "request_"),
    [
        (
            lambda: Table("t").get_row(KEY),
            ("blockdb", "get_row", {"table": "t", "key": KEY}),
        ),
        (
            lambda: Table("t", key=["n", "token"]).get_row(KEY),
            ("blockdb", "get_row", {"table": "t", "key": KEY, "declared_key": ["n", "token"]}),
        ),
        (
            lambda: Table("t").get_rows([KEY, {"a": 1}]),
            ("blockdb", "get_rows", {"table": "t", "keys": [KEY, {"a": 1}]}),
        ),
        (
            lambda: Table("t").upsert_rows([KEY]),
            ("write", "blockdb", "upsert_rows", {"table": "t", "rows": [KEY]}),
        ),
        (
            lambda: Table("t", ["n"]).upsert_rows(({"n": 1, "v": None},)),
            (
                "write",
                "blockdb",
                "upsert_rows",
                {"table": "t", "rows": [{"n": 1, "v": None}], "key": ["n"]},
            ),
        ),
        (
            lambda: Table("t").delete_rows([KEY]),
            ("write", "blockdb", "delete_rows", {"table": "t", "keys": [KEY]}),
        ),
        (
            lambda: BlockTable("t").get_state(KEY, 17),
            ("blockdb", "get_state", {"table": "t", "key": KEY, "block": 17}),
        ),
        (
            lambda: BlockTable("t").get_state(KEY, Block(17, HASH)),
            ("blockdb", "get_state", {"table": "t", "key": KEY, "block": 17}),
        ),
        (
            lambda: BlockTable("t").upsert_states([{"key": KEY, "block": 1, "state": {"v": 2}}]),
            (
                "write",
                "blockdb",
                "upsert_states",
                {"table": "t", "rows": [{"key": KEY, "block": 1, "state": {"v": 2}}]},
            ),
        ),
        (
            lambda: TimeTable("t").get_row(KEY, 1_700_000_000),
            ("blockdb", "get_row_at", {"table": "t", "key": KEY, "at": 1_700_000_000}),
        ),
        (
            lambda: TimeTable("t").get_row(
                KEY, datetime(2026, 6, 10, 11, 30, tzinfo=timezone(timedelta(hours=2)))
            ),
            ("blockdb", "get_row_at", {"table": "t", "key": KEY, "at": "2026-06-10T09:30:00Z"}),
        ),
        (
            lambda: TimeTable("t").get_row(KEY, datetime(2026, 6, 10, 9, 30, tzinfo=UTC)),
            ("blockdb", "get_row_at", {"table": "t", "key": KEY, "at": "2026-06-10T09:30:00Z"}),
        ),
    ],
)
def test_a_table_method_is_one_request(recorder, ask, request_):
    recorder.answer = "the answer"
    assert ask() == (None if request_[0] == "write" else "the answer")
    assert recorder.asked == [request_]


def test_nothing_to_do_asks_nobody(recorder):
    assert Table("t").get_rows([]) == []
    Table("t").upsert_rows([])
    Table("t").delete_rows([])
    BlockTable("t").upsert_states([])
    assert recorder.asked == []


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda: Table(""), "Table: the table's name must be text, not ''"),
        (lambda: BlockTable(None), "BlockTable: the table's name must be text, not None"),
        (lambda: Table("t", "n"), "Table('t'): key must be a list of column names, not 'n'"),
        (lambda: Table("t", []), "Table('t'): key needs at least one column"),
        (
            lambda: Table("t").get_row("0x1"),
            "Table('t'): a key is a dict of column -> value, not str",
        ),
        (lambda: Table("t").get_row({}), "Table('t'): a key needs at least one column"),
        (lambda: Table("t").get_row({1: 2}), "Table('t'): column names are text, not 1"),
        (lambda: Table("t").upsert_rows({"n": 1}), "Table('t'): pass a list of rows, not dict"),
        (
            lambda: Table("t").upsert_rows([{"n": 1}, 5]),
            "Table('t'): each of the rows must be a dict, not int",
        ),
        (lambda: Table("t").get_rows(KEY), "Table('t'): pass a list of keys, not dict"),
        (
            lambda: BlockTable("t").get_state(KEY, "latest"),
            "BlockTable('t'): a block is a height from 0 on, not 'latest'",
        ),
        (
            lambda: BlockTable("t").get_state(KEY, True),
            "BlockTable('t'): a block is a height from 0 on, not True",
        ),
        (
            lambda: BlockTable("t").upsert_states([{"key": KEY, "block": 1}]),
            "BlockTable('t'): a state has the fields key, block, state; not block, key",
        ),
        (
            lambda: BlockTable("t").upsert_states([{"key": KEY, "block": 1, "state": 5}]),
            "BlockTable('t'): the state itself must be a dict, not int",
        ),
        (
            lambda: TimeTable("t").get_row(KEY, None),
            "TimeTable('t'): `at` is a datetime, a number or text, not NoneType",
        ),
        (lambda: blockx_sdk.rpc.call("", []), "rpc.call: the method must be text such as"),
        (
            lambda: blockx_sdk.rpc.call("eth_call", {"to": 1}),
            "rpc.call: params must be a list, not dict",
        ),
        (lambda: ChainState(5, 1), "ChainState: the chain is a name, not 5"),
        (
            lambda: ChainState("dev", "0x10"),
            "a block is a height, a hash (0x and 64 hex digits) or \"latest\", not '0x10'",
        ),
        (lambda: ChainState("dev", None), '(0x and 64 hex digits) or "latest", not None'),
        (lambda: ChainState("dev", True), '(0x and 64 hex digits) or "latest", not True'),
        (lambda: ChainState("dev", -1), "a block height is from 0 to 2**64 - 1, not -1"),
        (
            lambda: ChainState("dev", 1).get_address_balance("0x" + "ab" * 19),
            "an address is 0x and 40 hex digits, not '0xabab",
        ),
        (
            lambda: ChainState("dev", 1).get_address_code(b"\1" * 32),
            "an address is 0x and 40 hex digits, not '0x0101",
        ),
        (lambda: ChainState("dev", 1).get_address_code(5), "an address is text, not 5"),
        (
            lambda: ChainState("dev", 1).call(ADDRESS, "0x123"),
            "call data is 0x and an even number of hex digits, not '0x123'",
        ),
        (lambda: ChainState("dev", 1).call(ADDRESS, 5), "call data is bytes or hex text, not 5"),
        (
            lambda: ChainState("dev", 1).get_storage(ADDRESS, 2**256),
            "a storage slot is a number below 2**256 or its hex text, not 115",
        ),
        (
            lambda: ChainState("dev", 1).get_receipt("0x12"),
            "the hash of a transaction is 0x and 64 hex digits, not '0x12'",
        ),
        (
            lambda: ChainState("dev", 1).get_logs(topics=["0x12"]),
            "the hash of a topic is 0x and 64 hex digits, not '0x12'",
        ),
        (
            lambda: ChainState("dev", 1).get_logs(from_block=1),
            "get_logs: give both from_block and to_block, or neither",
        ),
        (
            lambda: ChainState("dev", 1).get_logs(from_block=1, to_block="latest"),
            "a block height is a whole number, not 'latest'",
        ),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_asked(recorder, ask, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        ask()
    assert recorder.asked == []


# --- leafage ------------------------------------------------------------------------------------


def rpc_request(method: str, params: list[Any], block: Any = 7, chain: str | None = "dev"):
    named = {"chain": chain, "block": block, "params": params}
    return ("rpc", method, {name: value for name, value in named.items() if value is not None})


LOW = ADDRESS.lower()
STATE_READS = [
    (
        lambda c: c.get_address_balance(ADDRESS),
        "0x" + "f" * 64,
        rpc_request("eth_getBalance", [LOW]),
        2**256 - 1,
    ),
    (
        lambda c: c.get_address_nonce(bytes.fromhex("ab" * 20)),
        "0x0",
        rpc_request("eth_getTransactionCount", [LOW]),
        0,
    ),
    (lambda c: c.get_address_code(ADDRESS), "0x", rpc_request("eth_getCode", [LOW]), b""),
    (
        lambda c: c.get_storage(ADDRESS, 17),
        "0x05",
        rpc_request("eth_getStorageAt", [LOW, "0x11"]),
        b"\0" * 31 + b"\5",
    ),
    (
        lambda c: c.get_storage(ADDRESS, "0x0011"),
        "0x" + "00" * 32,
        rpc_request("eth_getStorageAt", [LOW, "0x11"]),
        b"\0" * 32,
    ),
    (
        lambda c: c.call(ADDRESS, "0x70a08231" + "00" * 32),
        "0x0102",
        rpc_request("eth_call", [{"to": LOW, "data": "0x70a08231" + "00" * 32}]),
        b"\1\2",
    ),
    (
        lambda c: c.call(ADDRESS, b"\1\2"),
        "0x",
        rpc_request("eth_call", [{"to": LOW, "data": "0x0102"}]),
        b"",
    ),
    (
        lambda c: c.get_block(),
        {"number": "0x7"},
        rpc_request("eth_getBlockByNumber", [False]),
        {"number": "0x7"},
    ),
    (
        lambda c: c.get_block(full=True),
        {"number": "0x7"},
        rpc_request("eth_getBlockByNumber", [True]),
        {"number": "0x7"},
    ),
    (
        lambda c: c.get_transaction(HASH),
        None,
        rpc_request("eth_getTransactionByHash", [HASH.lower()], None),
        None,
    ),
    (
        lambda c: c.get_receipt(HASH),
        {"status": "0x1"},
        rpc_request("eth_getTransactionReceipt", [HASH.lower()], None),
        {"status": "0x1"},
    ),
    (lambda c: c.get_logs(), [], rpc_request("eth_getLogs", [{}]), []),
    (
        lambda c: c.get_logs([ADDRESS], [None, [HASH], HASH]),
        [{"data": "0x"}],
        rpc_request(
            "eth_getLogs",
            [{"address": [LOW], "topics": [None, [HASH.lower()], HASH.lower()]}],
        ),
        [{"data": "0x"}],
    ),
    (
        lambda c: c.get_logs(ADDRESS, from_block=0, to_block=16),
        [],
        rpc_request("eth_getLogs", [{"address": LOW, "fromBlock": "0x0", "toBlock": "0x10"}], None),
        [],
    ),
]


@pytest.mark.parametrize(("ask", "answer", "request_", "result"), STATE_READS)
def test_a_chain_method_is_one_request_and_decodes_the_answer(
    recorder, ask, answer, request_, result
):
    recorder.answer = answer
    assert ask(ChainState("dev", 7)) == result
    assert recorder.asked == [request_]


@pytest.mark.parametrize(
    ("block", "wire"),
    [
        (0, 0),
        ("latest", "latest"),
        (HASH, HASH.lower()),
        (Block(5), 5),
        (Block(5, HASH), HASH.lower()),
    ],
)
def test_a_block_is_a_height_a_hash_latest_or_a_block(recorder, block, wire):
    recorder.answer = "0x1"
    ChainState(None, block).get_address_balance(ADDRESS)
    assert recorder.asked == [rpc_request("eth_getBalance", [LOW], wire, None)]


@pytest.mark.parametrize(
    ("ask", "answer", "kind", "text"),
    [
        (
            lambda c: c.get_address_balance(ADDRESS),
            None,
            ErrorKind.MALFORMED,
            "eth_getBalance: the node answered None instead of a hex number",
        ),
        (
            lambda c: c.get_address_balance(ADDRESS),
            17,
            ErrorKind.MALFORMED,
            "eth_getBalance: the node answered 17 instead of a hex number",
        ),
        (
            lambda c: c.call(ADDRESS),
            "0x123",
            ErrorKind.MALFORMED,
            "eth_call: the node answered '0x123' instead of hex data",
        ),
        (
            lambda c: c.get_block(),
            None,
            ErrorKind.BLOCK_UNKNOWN,
            "the node of chain dev knows no block 7",
        ),
        (
            lambda c: c.get_receipt(HASH),
            "x" * 1_000,
            ErrorKind.MALFORMED,
            f"eth_getTransactionReceipt: the node answered {'x' * 100!r} instead of an object",
        ),
        (
            lambda c: c.get_logs(),
            None,
            ErrorKind.MALFORMED,
            "eth_getLogs: the node answered None instead of a list",
        ),
    ],
)
def test_an_answer_of_the_wrong_shape_is_a_read_error(recorder, ask, answer, kind, text):
    recorder.answer = answer
    with pytest.raises(ReadError) as failed:
        ask(ChainState("dev", 7))
    assert (failed.value.kind, str(failed.value)) == (kind, text)
    assert isinstance(failed.value, BlockxError)


# --- blockx_sdk, function, shims ----------------------------------------------------------------


def test_the_plain_entry_points_are_requests_too(recorder):
    recorder.answer = 5
    assert blockx_sdk.db.get("t", KEY) == 5
    assert blockx_sdk.rpc.call("eth_chainId") == 5
    assert blockx_sdk.rpc.call("eth_call", ({"to": "x"}, "latest"), chain="dev") == 5
    assert blockx_sdk.call_subfunc("child", 1, [2]) == 5
    assert function.call("child", [1, 2]) == 5
    blockx_sdk.sleep(0.5)
    assert blockx_sdk.get_provider() is recorder
    assert recorder.asked == [
        ("blockdb", "get_row", {"table": "t", "key": KEY}),
        ("rpc", "eth_chainId", {"params": []}),
        ("rpc", "eth_call", {"chain": "dev", "params": [{"to": "x"}, "latest"]}),
        ("subcall", "child", [1, [2]]),
        ("subcall", "child", [[1, 2]]),
        ("sleep", 0.5),
    ]


def test_the_shims_are_the_sdk():
    assert [getattr(blockdb, name) for name in blockdb.__all__] == [
        Block,
        BlockTable,
        Table,
        TimeTable,
    ]
    assert [getattr(leafage, name) for name in leafage.__all__] == [ChainState, sdk_leafage.web3]
    assert blockx_sdk.__all__ == ["call_subfunc", "db", "get_provider", "rpc", "sleep"]


def test_the_table_of_the_surface_names_every_method():
    text = sdk.__doc__ or ""
    for kind in (Table, BlockTable, TimeTable, ChainState):
        for name, member in vars(kind).items():
            assert name.startswith("_") or not callable(member) or f".{name}(" in text, name


def test_a_block_is_a_value():
    assert dataclasses.asdict(Block(5, HASH, 17)) == {"height": 5, "hash": HASH, "timestamp": 17}
    assert repr(ChainState("dev", 5)) == "ChainState('dev', 5)"


def test_a_thread_that_a_call_started_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BLOCKX_EXECUTOR_RUNTIME", "1")
    with pytest.raises(RuntimeError, match="own thread"):
        seam.get_provider()
