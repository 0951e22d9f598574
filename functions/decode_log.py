"""One row for one event log: its name, its fields as exact integers, the token's metadata."""

from blockx import function

# Two events can share a first topic (ERC-20 and ERC-721 both have a Transfer); the number of topics
# tells them apart: (first topic, topics): (name, standard, indexed fields, fields in the data).
TRANSFER = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
APPROVAL = "0x8c5be1e5ebec7d5bd14f71427d1e84f3dd0314c0f7b2291e5b200ac8c7c3b925"
DEPOSIT = "0xe1fffcc4923d04b559f4d29a8bfc6cda04eb5b0d3c460751c2402c5c5cc9109c"
WITHDRAWAL = "0x7fcf532c15f0a6db0bd6d0e038bea71d30d808c7d98cb3bf7268a95bf5081b65"
SYNC = "0x1c411e9a96e071241c2f21f7726b17ae89e3cab4c78be50e062b03a9fffbbad1"
SWAP_V2 = "0xd78ad95fa46c994b6551d0da85fc275fe613ce37657fb8d5e3d130840159d822"
SWAP_V3 = "0xc42079f94a6350d7e6235f29174924f928cc2ac818eb64fed8004e115fbcca67"

EVENTS = {
    (TRANSFER, 3): ("Transfer", "erc20", "address from, address to", "uint value"),
    (TRANSFER, 4): ("Transfer", "erc721", "address from, address to, uint token_id", ""),
    (APPROVAL, 3): ("Approval", "erc20", "address owner, address spender", "uint value"),
    (APPROVAL, 4): ("Approval", "erc721", "address owner, address approved, uint token_id", ""),
    (DEPOSIT, 2): ("Deposit", "weth", "address to", "uint value"),
    (WITHDRAWAL, 2): ("Withdrawal", "weth", "address from", "uint value"),
    (SYNC, 1): ("Sync", "uniswap_v2", "", "uint reserve0, uint reserve1"),
    (SWAP_V2, 3): (
        "Swap",
        "uniswap_v2",
        "address sender, address to",
        "uint amount0_in, uint amount1_in, uint amount0_out, uint amount1_out",
    ),
    (SWAP_V3, 3): (
        "Swap",
        "uniswap_v3",
        "address sender, address recipient",
        "int amount0, int amount1, uint sqrt_price_x96, uint liquidity, int tick",
    ),
}


def read_word(kind, word):
    """One field from its 64 hex digits."""
    if kind == "address":
        return "0x" + word[24:]
    number = int(word, 16)
    return number - 2**256 if kind == "int" and number >= 2**255 else number


def read_fields(declared, words):
    """``uint a, address b`` and their words -> {"a": ..., "b": ...}; None if one is missing."""
    fields = [field.split() for field in declared.split(", ")] if declared else []
    if len(fields) != len(words):
        return None
    return {name: read_word(kind, word) for (kind, name), word in zip(fields, words, strict=True)}


def decode(log):
    """(event, standard, fields) of a log; (None, None, None) for an event that we do not know."""
    topics = log["topics"]
    known = EVENTS.get((topics[0], len(topics))) if topics else None
    if known is None:
        return None, None, None
    event, standard, indexed, plain = known
    data = log["data"][2:]
    from_topics = read_fields(indexed, [topic[2:] for topic in topics[1:]])
    from_data = read_fields(plain, [data[at : at + 64] for at in range(0, len(data), 64)])
    if from_topics is None or from_data is None:  # the same topic, declared otherwise
        return None, None, None
    return event, standard, from_topics | from_data


def exact_amount(value, decimals):
    """value / 10**decimals as text, digit for digit (a float would round it)."""
    if value is None or decimals is None:
        return None
    if decimals == 0:
        return str(value)
    whole, part = divmod(value, 10**decimals)
    return f"{whole}.{part:0{decimals}d}"


def _(log):
    event, standard, fields = decode(log)
    token = function.call("token_meta", log["address"])
    return {
        "block_number": log["block_number"],
        "log_index": log["log_index"],
        "transaction_hash": log["transaction_hash"],
        "address": log["address"],
        "symbol": token["symbol"],
        "name": token["name"],
        "decimals": token["decimals"],
        "event": event,
        "standard": standard,
        "fields": fields,
        "amount": exact_amount(fields.get("value"), token["decimals"]) if fields else None,
    }
