"""What nodes and providers say when they fail, word for word, and the class that each must have. A row a test."""

import pytest

from blockx.backends.rpc_wire import TOO_BIG, NodeError, revert_reason, wire_error

ROWS = [
    # source, code, message, kind
    ("geth", 3, "execution reverted: ERC20: transfer amount exceeds balance", "reverted"),
    ("geth", -32000, "execution reverted", "reverted"),
    ("geth", -32000, "missing trie node 3f1c… (path ) state 0x3f1c… is not available", "state_pruned"),
    ("geth", -32000, "required historical state unavailable (reexec=128)", "state_pruned"),
    ("geth", -32000, "historical state 9f… is not available", "state_pruned"),
    ("geth", -32000, "metadata is not found, state histories pruned", "state_pruned"),
    ("geth", 4444, "pruned history unavailable", "state_pruned"),
    ("geth", -32000, "header not found", "block_unknown"),
    ("geth", -32000, "header for hash not found", "block_unknown"),
    ("geth", -32000, "hash 0x12… is not currently canonical", "block_unknown"),
    ("geth", -39001, "Unknown block", "block_unknown"),
    ("geth", -32002, "request timed out", "unavailable"),
    ("geth", -32003, "response too large", "io_error"),
    ("geth", -32600, "batch too large", "io_error"),
    ("geth", -32000, "exceed maximum block range: 5000", "io_error"),
    ("geth", -32000, "execution aborted (timeout = 5s)", "io_error"),
    ("geth", -32000, "out of gas", "io_error"),
    ("geth", -32000, "gas required exceeds allowance (50000000)", "io_error"),
    ("geth", -32000, "insufficient funds for gas * price + value: address 0x1", "io_error"),
    ("geth", -32000, "invalid opcode: INVALID", "io_error"),
    ("geth", -32601, "the method eth_state does not exist/is not available", "io_error"),
    ("geth", -32602, "invalid argument 0: hex string has length 38, want 40 for common.Address", "io_error"),
    ("erigon", -32000, "block not found: 99999999", "block_unknown"),
    ("erigon", -32000, "block number is in the future (latest=5, requested=9)", "block_unknown"),
    ("erigon", -32000, "old data not available due to pruning", "state_pruned"),
    ("erigon", -32000, "distance to target block exceeds maximum proof window size", "state_pruned"),
    ("reth", -32001, "block not found: hash 0x1234", "block_unknown"),
    ("reth", -32000, "no state found for block number 5", "state_pruned"),
    ("reth", -32000, "state at block #5 is pruned", "state_pruned"),
    ("reth", -32602, "query exceeds max block range 100000", "io_error"),
    ("reth", -32602, "query exceeds max results 20000, retry with the range 5-9", "io_error"),
    ("reth", -32008, "Response is too big", "io_error"),
    ("reth", -32005, "Too many requests", "throttled"),
    ("nethermind", -32015, "VM execution error.", "reverted"),
    ("nethermind", -32002, "No state available for block 0x1234", "state_pruned"),
    ("nethermind", -32001, "99999999 could not be found", "block_unknown"),
    ("nethermind", -32001, "Header not found", "block_unknown"),
    ("nethermind", -32005, "Limit exceeded", "throttled"),
    ("besu", -32000, "Execution reverted", "reverted"),
    ("besu", -32000, "World state unavailable", "state_pruned"),
    ("besu", -32000, "Block not found", "block_unknown"),
    ("besu", -32005, "Requested range exceeds maximum RPC range limit", "io_error"),
    ("openethereum", -32015, "VM execution error.", "reverted"),
    (
        "openethereum",
        -32000,
        "This request is not supported because your node is running with state pruning. Run with --pruning=archive.",
        "state_pruned",
    ),
    ("anvil", 3, "execution reverted: because I say so", "reverted"),
    ("anvil", -32602, "BlockOutOfRangeError: block height is 0 but requested was 5", "block_unknown"),
    ("anvil", -32603, "EVM error OutOfGas", "io_error"),
    ("anvil", -32601, "Method not found", "io_error"),
    ("hardhat", -32603, "VM Exception while processing transaction: revert no", "reverted"),
    ("alchemy", 429, "Your app has exceeded its compute units per second capacity.", "throttled"),
    ("alchemy", 429, "Monthly capacity limit exceeded. Visit https://dashboard.example", "throttled"),
    (
        "alchemy",
        -32602,
        "Log response size exceeded. You can make eth_getLogs requests with up to a 2K block range",
        "io_error",
    ),
    (
        "alchemy",
        -32600,
        "Under the Free tier plan, you can make eth_getLogs requests with up to a 10 block range.",
        "io_error",
    ),
    ("infura", -32005, "daily request count exceeded, request rate limited", "throttled"),
    ("infura", -32005, "project ID request rate exceeded", "throttled"),
    (
        "infura",
        -32005,
        "query returned more than 10000 results. Try with this block range [0x1, 0x2].",
        "io_error",
    ),
    ("infura", -32603, "request failed or timed out", "unavailable"),
    (
        "quicknode",
        -32007,
        "50/second request limit reached - reduce calls per second or upgrade your account",
        "throttled",
    ),
    ("quicknode", -32614, "eth_getLogs is limited to a 10,000 range", "io_error"),
    ("ankr", -32029, "Too many requests, reason: call rate limit exhausted, retry in 10s", "throttled"),
    ("ankr", -32062, "Block range is too large", "io_error"),
    (
        "cloudflare",
        -32047,
        "Invalid eth_getLogs request. 'fromBlock'-'toBlock' range too large. Max range: 800",
        "io_error",
    ),
    ("drpc", 35, "ranges over 10000 blocks are not supported on freetier", "io_error"),
    ("drpc", 30, "Request timeout on the free tier, please upgrade your tier", "unavailable"),
    ("drpc", 19, "Temporary internal error. Please retry, trace-id: 1", "unavailable"),
    ("chainstack", -32005, "You've exceeded the RPS limit available on the current plan.", "throttled"),
    ("1rpc", -32001, "Exceeded the quota usage", "throttled"),
    ("proxyd", -32011, "no backends available for method", "unavailable"),
    ("proxyd", -32012, "backend is currently not healthy to serve traffic", "unavailable"),
    ("proxyd", -32016, "over rate limit", "throttled"),
    ("publicnode", -32701, "Please specify an address in your request", "io_error"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "code", "message", "kind"), ROWS)
def test_each_shape_of_an_error_has_its_class(
    source: str, code: int, message: str, kind: str
) -> None:
    assert NodeError(code, message, None).kind() == kind, source


@pytest.mark.parametrize(
    "message",
    [message for _, _, message, kind in ROWS if kind == "io_error" and "range" in message]
    + [m for _, _, m, _ in ROWS if m.startswith(("response too", "Response is"))],
)
def test_a_refusal_for_size_is_known_as_one(message: str) -> None:
    """The range of a log query can then be split, and a batch be asked singly."""
    assert TOO_BIG.search(message)


@pytest.mark.parametrize(
    "message",
    sorted({message for _, _, message, kind in ROWS if kind in ("throttled", "reverted")}),
)
def test_no_other_refusal_is_taken_for_one(message: str) -> None:
    assert not TOO_BIG.search(message)


def abi_text(text: str) -> str:
    data = text.encode().hex()
    padded = data.ljust(-(-len(data) // 64) * 64, "0")
    return f"0x08c379a0{32:064x}{len(text):064x}{padded}"


@pytest.mark.parametrize(
    ("data", "reason", "message"),
    [
        (abi_text("no"), "no", "eth_call: execution reverted: no"),
        (
            f"0x4e487b71{0x11:064x}",
            "panic: arithmetic underflow or overflow (0x11)",
            "eth_call: execution reverted: panic: arithmetic underflow or overflow (0x11)",
        ),
        (
            f"0x4e487b71{0x99:064x}",
            "panic: unknown code (0x99)",
            "eth_call: execution reverted: panic: unknown code (0x99)",
        ),
        (
            "0xf988f737",
            None,
            "eth_call: execution reverted; custom error 0xf988f737, data 0xf988f737",
        ),
        ("0x12", None, "eth_call: execution reverted; data 0x12"),
        ("0x", None, "eth_call: execution reverted"),
    ],
)
def test_a_revert_carries_its_reason_or_its_data(
    data: str, reason: str | None, message: str
) -> None:
    error = wire_error(NodeError(3, "execution reverted", data), "eth_call", "chain dev")
    assert (error.kind, error.message, error.reason, error.data) == (
        "reverted",
        message,
        reason,
        data,
    )


@pytest.mark.parametrize("data", ["4e487b71", "4e487b71" + "00" * 31, "08c379a0" + "ff" * 64])
def test_cut_or_crooked_revert_data_has_no_reason(data: str) -> None:
    assert revert_reason(bytes.fromhex(data)) is None
