"""The same backend against a real node (anvil), straight and through a proxy that misbehaves."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.backends.harness import Io, outcome
from tests.chain.devchain import DevChain, at
from tests.chain.faultproxy import FaultProxy

StartIo = Callable[..., Io]

pytestmark = pytest.mark.slow


def balances(service: Io, chain: DevChain) -> tuple[list[Any], list[str]]:
    """Requests for every fourth block of some holders, and the ledger's answers."""
    points = [(who, block) for who in chain.facts["holders"][:8] for block in range(0, 201, 4)]
    requests = [service.rpc("eth_getBalance", who, block=block) for who, block in points]
    ledger = [hex(int(at(chain.facts["eth_balances"][who], block))) for who, block in points]
    return requests, ledger


@pytest.mark.parametrize(
    "faults",
    [
        [],
        ["shuffle"],
        ["string_ids", "extra"],
        ["http429:3"],
        ["http500:2"],
        ["html:2"],
        ["cut"],
        ["reset"],
        ["empty:2"],
        ["gzip"],
        ["delay:5"],
        ["drop:1"],
        ["object"],
        ["limit:10"],
        ["geth_limit:10"],
        ["rpc429:5"],
        ["header:3"],
        ["null_block:1"],
    ],
    ids=lambda faults: "+".join(faults) or "none",
)
def test_every_answer_is_the_ledgers_whatever_the_node_does(
    io: StartIo, chain: DevChain, faults: list[str]
) -> None:
    with FaultProxy(chain.url, faults) as proxy:
        service = io(rpc={"dev": {"urls": [proxy.url]}})
        requests, ledger = balances(service, chain)
        assert [outcome(reply) for reply in service.ask(*requests)] == ledger
        statistics = service.statistics()
        assert statistics["posts"] == len(proxy.posts)
        assert statistics["requests"] == sum(map(len, proxy.posts))


def test_pruned_state_says_which_block(io: StartIo, chain: DevChain) -> None:
    who = chain.facts["holders"][0]
    with FaultProxy(chain.url, ["trie:50"]) as proxy:
        service = io(rpc={"dev": {"urls": [proxy.url]}})
        old, new = service.ask(
            *[service.rpc("eth_getBalance", who, block=block) for block in (10, 100)]
        )
    assert old.error is not None
    assert old.error.kind == "state_pruned"
    assert old.error.message.startswith("eth_getBalance at block 10: missing trie node abab")
    assert outcome(new) == hex(int(at(chain.facts["eth_balances"][who], 100)))


def test_an_answer_too_big_fails_alone(io: StartIo, chain: DevChain) -> None:
    odd = chain.facts["odd"]["address"]
    with FaultProxy(chain.url, ["big:1000"]) as proxy:
        service = io(rpc={"dev": {"urls": [proxy.url]}})
        replies = service.ask(
            *[
                service.rpc("eth_call", {"to": odd, "data": f"0x249fcc70{n:064x}"}, block=200)
                for n in (10, 5000, 20)
            ]
        )
    assert [reply.error.kind if reply.error else None for reply in replies] == [
        None,
        "io_error",
        None,
    ]


@pytest.mark.parametrize(
    ("method", "kind", "text", "reason"),
    [
        ("why()", "reverted", "because I say so", "because I say so"),
        ("custom()", "reverted", "0xf988f737", None),
        ("silent()", "reverted", "execution reverted", None),
        (
            "check()",
            "reverted",
            "panic: assertion failed (0x01)",
            "panic: assertion failed (0x01)",
        ),
        ("loop()", "io_error", "EVM error OutOfGas", None),
    ],
)
def test_a_call_that_fails_on_the_chain_is_told_as_the_contract_said_it(
    io: StartIo, chain: DevChain, method: str, kind: str, text: str, reason: str | None
) -> None:
    service = io(rpc={"dev": {"urls": [chain.url]}})
    call = {"to": chain.facts["odd"]["address"], "data": chain.data("DevOdd", method)}
    reply = service.one(service.rpc("eth_call", call, block=200))
    assert reply.error is not None
    assert reply.error.kind == kind
    assert text in reply.error.message
    assert reply.error.reason == reason


def test_reads_of_a_task_stay_on_the_block_that_was_replaced(
    io: StartIo, own_chain: DevChain
) -> None:
    rich, poor = own_chain.accounts[0], "0x" + "42" * 20
    own_chain.send(rich, poor, value=5)
    own_chain.mine(3)
    service = io(rpc={"dev": {"urls": [own_chain.url]}})
    assert outcome(service.one(service.rpc("eth_getBalance", poor, block=3))) == "0x5"
    own_chain.reorg(3)
    gone = service.one(service.rpc("eth_getBalance", rich, block=3))
    traces = service.one(service.rpc("trace_block", block=3))  # takes a height alone
    anew = service.one(service.rpc("eth_getBalance", poor, block=3, task="t@2"))
    for reply in (gone, traces):
        assert reply.error is not None
        assert reply.error.kind == "block_unknown"
    assert outcome(service.one(service.rpc("trace_block", block=3, task="t@2"))) == []
    assert outcome(anew) == "0x0"
