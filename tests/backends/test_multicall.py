"""Calls that leave as one call of Multicall3: who rides, and that every answer stays the node's own."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from eth_abi.abi import decode, encode

from blockx.backends.rpc_multicall import ADDRESS, Ride, group_params, group_results, ride_of
from blockx.backends.scope import IoReply
from tests.backends.harness import Io, outcome
from tests.backends.node import Node, Raw, error
from tests.chain.devchain import DevChain
from tests.chain.faultproxy import FaultProxy

StartIo = Callable[..., Io]
TO = "0x" + "ab" * 20
AGGREGATE3 = "0x82ad56cb"


# ---- the wire ----------------------------------------------------------------------------------------


def results_text(results: list[tuple[bool, bytes]]) -> bytes:
    return b'"0x%b"' % encode(["(bool,bytes)[]"], [results]).hex().encode()


def decoded(params: bytes) -> list[tuple[str, bool, bytes]]:
    call, _block = msgspec.json.decode(params)
    assert call["to"] == ADDRESS
    assert call["data"].startswith(AGGREGATE3)
    (calls,) = decode(["(address,bool,bytes)[]"], bytes.fromhex(call["data"][10:]))
    return list(calls)


@pytest.mark.parametrize("sizes", [[0], [1, 31, 32, 33], [4, 0, 500, 64]])
def test_a_group_is_what_an_abi_encoder_makes_of_it(sizes: list[int]) -> None:
    data = [bytes(range(n % 251)) + b"\x07" * (n - n % 251) for n in sizes]
    rides = [Ride(b'"0x5"', TO[2:], some.hex()) for some in data]
    params = group_params(rides)
    assert decoded(params) == [(TO, True, some) for some in data]
    # Canonical: encoded again, the same bytes.
    text = encode(["(address,bool,bytes)[]"], [decoded(params)]).hex()
    assert params == b'[{"to":"%b","data":"%b%b"},"0x5"]' % (
        ADDRESS.encode(), AGGREGATE3.encode(), text.encode(),
    )  # fmt: skip
    assert sum(ride.calldata_bytes for ride in rides) == len(text) // 2 - 64


def test_results_are_the_bytes_that_the_contracts_returned() -> None:
    results = [(True, b""), (False, b"\x08"), (True, bytes(33)), (True, b"\xff" * 64)]
    assert group_results(results_text(results), 4) == [
        b'"0x"', None, b'"0x%b"' % (b"00" * 33), b'"0x%b"' % (b"ff" * 64),
    ]  # fmt: skip


GOOD = results_text([(True, b"\x01"), (True, b"\x02")])


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"null",
        b'"0x"',
        b"7",
        b'"0x123"',
        b'"0x' + b"zz" * 400 + b'"',
        GOOD[:-65] + b'"',
        results_text([(True, b"\x01")]),
        results_text([(True, b"\x01")] * 3),
        b'"0x' + b"ff" * 400 + b'"',
        GOOD.replace(b"0" * 63 + b"1", b"0" * 63 + b"2", 1),  # success 2
    ],
)
def test_what_is_no_answer_to_the_group_is_told_from_one(answer: bytes) -> None:
    assert group_results(answer, 2) is None


@pytest.mark.parametrize(
    "transaction",
    [
        {"to": TO, "data": "0x01", "from": TO},
        {"to": TO, "data": "0x01", "value": "0x0"},
        {"to": TO, "data": "0x01", "gas": "0x5208"},
        {"to": TO, "input": "0x01"},
        {"data": "0x01"},
        {"to": TO, "data": "0x1"},
        {"to": TO, "data": "01"},
        {"to": TO + "00", "data": "0x01"},
        {"to": None, "data": "0x01"},
    ],
)
def test_a_call_that_says_more_or_less_does_not_ride(transaction: Any) -> None:
    assert ride_of(msgspec.json.encode([transaction, "0x5"])) is None
    good = {"to": TO, "data": "0x01"}
    assert ride_of(msgspec.json.encode([good, "0x5"])) == Ride(b'"0x5"', TO[2:], "01")
    assert ride_of(msgspec.json.encode([good, "0x5", {}])) is None  # with overrides of the state


# ---- a scripted node ---------------------------------------------------------------------------------


@pytest.fixture
def has_it(node: Node) -> Node:
    """A node with the contract from height 40 on; a call answers with its data, ``0xee…`` fails."""

    def serve(member: dict[str, Any]) -> Any:
        if member["method"] == "eth_getCode":
            return {"result": "0x60" if int(member["params"][1], 16) >= 40 else "0x"}
        if member["method"] != "eth_call":
            return None
        call = member["params"][0]
        if call["to"] != ADDRESS:
            data = call["data"]
            return (
                error(3, "execution reverted", data="0x") if data[2:4] == "ee" else {"result": data}
            )
        calls = decoded(msgspec.json.encode(member["params"]))
        results = [(data[:1] != b"\xee", data) for _to, _may_fail, data in calls]
        return {"result": msgspec.json.decode(results_text(results))}

    node.member = serve
    return node


def start(io: StartIo, url: str, **settings: Any) -> Io:
    return io(rpc={"dev": {"urls": [url], "multicall_max": 10, **settings}})


def call(service: Io, number: int, block: int = 90, **more: Any) -> Any:
    return service.rpc("eth_call", {"to": TO, "data": f"0x{number:08x}"}, block=block, **more)


def find_it(service: Io, block: int) -> None:
    """Read until calls at this height ride."""
    for number in range(1_000_000, 1_000_100):
        before = service.statistics()["multicalled"]
        service.ask(*[call(service, 10 * number + n, block) for n in range(2)])
        if service.statistics()["multicalled"] > before:
            return
    raise AssertionError("no call has left with others")


def calls_of(node: Node) -> list[Any]:
    """Of each post its calls: the data of one that left singly, of a group how many."""
    return [
        [
            len(decoded(msgspec.json.encode(m["params"])))
            if m["params"][0]["to"] == ADDRESS
            else m["params"][0]["data"]
            for m in post
        ]
        for post in node.posts
        if post[0]["method"] == "eth_call"
    ]


def test_it_is_off_by_default(io: StartIo, has_it: Node) -> None:
    service = io(rpc={"dev": {"urls": [has_it.url]}})
    service.ask(*[call(service, n) for n in range(5)])
    assert has_it.params("eth_getCode") == []
    assert len(calls_of(has_it)[0]) == 5


def test_calls_at_one_block_leave_in_groups_of_so_many(io: StartIo, has_it: Node) -> None:
    service = start(io, has_it.url)
    find_it(service, 90)
    before = service.statistics()
    has_it.posts.clear()
    replies = service.ask(*[call(service, n, 90 + n % 2) for n in range(42)])
    assert [outcome(reply) for reply in replies] == [f"0x{n:08x}" for n in range(42)]
    assert calls_of(has_it) == [[10, 10, 10, 10, "0x00000028", "0x00000029"]]
    after = service.statistics()
    assert after["requests"] - before["requests"] == 6
    assert after["multicalled"] - before["multicalled"] == 40


def test_where_it_exists_is_found_with_few_questions(io: StartIo, has_it: Node) -> None:
    service = start(io, has_it.url)
    find_it(service, 40)
    for number in range(30):
        service.ask(call(service, number, 39), call(service, 100 + number, 39))
    asked = [int(params[1], 16) for params in has_it.params("eth_getCode")]
    assert asked == [200, 99, 49, 24, 36, 42, 39, 40]
    assert all(data[:2] == "0x" for post in calls_of(has_it)[-20:] for data in post)


def test_on_a_chain_without_it_nothing_is_asked_twice(io: StartIo, has_it: Node) -> None:
    has_it.member = lambda m: {"result": "0x"} if m["method"] == "eth_getCode" else None
    service = start(io, has_it.url)
    for block in range(50, 90):
        service.ask(call(service, 1, block), call(service, 2, block))
    assert len(has_it.params("eth_getCode")) == 1
    assert service.statistics()["multicalled"] == 0


def test_a_call_that_fails_inside_is_asked_again_singly(io: StartIo, has_it: Node) -> None:
    service = start(io, has_it.url)
    find_it(service, 90)
    has_it.posts.clear()
    bad = 0xEE000001
    one, failed, two = service.ask(*[call(service, n) for n in (1, bad, 2)])
    assert [outcome(one), outcome(two)] == ["0x00000001", "0x00000002"]
    assert failed.error is not None
    assert failed.error.message == "eth_call at block 90: execution reverted"
    assert calls_of(has_it) == [[3], [f"0x{bad:08x}"]]


@pytest.mark.parametrize(
    ("answer", "sizes"),
    [
        (error(-32000, "out of gas"), [4]),
        ({"result": "0x"}, [4]),
        ({"result": None}, [4]),
        (error(-32000, "header not found"), [8]),
        (error(4444, "pruned history unavailable"), [8]),
    ],
)
def test_after_a_group_that_fails_its_calls_leave_singly(
    io: StartIo, has_it: Node, answer: Any, sizes: list[int]
) -> None:
    service = start(io, has_it.url)
    find_it(service, 90)
    told, left = has_it.member, [answer]

    def serve(member: dict[str, Any]) -> Any:
        is_group = member["method"] == "eth_call" and member["params"][0]["to"] == ADDRESS
        return left.pop() if is_group and left else told(member)

    has_it.member = serve
    has_it.posts.clear()
    replies = service.ask(*[call(service, n) for n in range(8)])
    assert [outcome(reply) for reply in replies] == [f"0x{n:08x}" for n in range(8)]
    assert calls_of(has_it) == [[8], [f"0x{n:08x}" for n in range(8)]]
    has_it.posts.clear()
    service.ask(*[call(service, n) for n in range(10, 18)])
    assert calls_of(has_it) == [sizes * (8 // sizes[0])]


@pytest.mark.parametrize(
    ("status", "rides"), [(429, True), (503, False), (413, False), (400, False)]
)
def test_a_post_that_fails_loses_no_call_of_its_group(
    io: StartIo, has_it: Node, status: int, rides: bool
) -> None:
    service = start(io, has_it.url)
    find_it(service, 90)
    has_it.first = [Raw(status, b"no")]
    has_it.posts.clear()
    replies = service.ask(*[call(service, n) for n in range(3)])
    assert [outcome(reply) for reply in replies] == [f"0x{n:08x}" for n in range(3)]
    last = calls_of(has_it)[-1]
    assert last == [3] if rides else sorted(last) == [f"0x{n:08x}" for n in range(3)]


def test_a_group_is_bounded_in_bytes(
    io: StartIo, has_it: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start(io, has_it.url)
    find_it(service, 90)
    has_it.posts.clear()
    monkeypatch.setattr("blockx.backends.rpc_node.CALLDATA_BYTES_MAX", 2 * 192)
    service.ask(*[call(service, n) for n in range(5)])
    assert calls_of(has_it) == [[2, 2, "0x00000004"]]


def test_a_group_of_two_tasks_is_a_request_of_each(io: StartIo, has_it: Node) -> None:
    service = start(io, has_it.url)
    find_it(service, 90)
    service.one(call(service, 77, task="t@2"))
    before = [service.statistics(task=task) for task in ("t@1", "t@2")]
    service.ask(call(service, 1), call(service, 2, task="t@2"))
    after = [service.statistics(task=task) for task in ("t@1", "t@2")]
    for name in ("requests", "posts", "multicalled"):
        assert [new[name] - old[name] for old, new in zip(before, after, strict=True)] == [1, 1]


# ---- a real chain ------------------------------------------------------------------------------------


def told(reply: IoReply) -> Any:
    """All that user code could see of an answer."""
    return reply.result if reply.error is None else msgspec.structs.astuple(reply.error)


@pytest.mark.slow
def test_on_a_real_chain_every_answer_is_that_of_the_single_call(
    io: StartIo, own_chain: DevChain
) -> None:
    token = own_chain.deploy("DevToken", "Dev Alpha", "DVA", 18, 10**27)
    odd = own_chain.deploy("DevOdd")
    code = own_chain.rpc("eth_getCode", own_chain.deploy("DevMulticall"), "latest")
    own_chain.mine(17)  # up to here without it
    own_chain.rpc("anvil_setCode", ADDRESS, code)  # changes block 20 in place
    own_chain.mine(10)

    requests = [
        ({"to": token, "data": own_chain.data("DevToken", "balanceOf(address)", who)}, block)
        for block in (1, 2, 15, 19, 20, 21, 29, "latest")
        for who in own_chain.accounts
    ]
    methods = ["symbol()", "name()", "maxUint()", "minInt()", "nothing()", "now_()"]
    methods += ["why()", "silent()", "custom()", "check()", "loop()"]
    data = [own_chain.data("DevOdd", method) for method in methods]
    data += [own_chain.data("DevOdd", "big(uint256)", n) for n in (0, 1, 33, 5000)]
    data += [own_chain.data("DevOdd", "div(uint256)", n) for n in (0, 3)]
    data += ["0x", "0xffffffff"]  # without a function, and with an unknown one
    for block in (1, 2, 19, 20, 25, 30):
        requests += [({"to": odd, "data": some}, block) for some in data]
        # An account without code, a precompile, the contract itself; a sender, and a creation.
        requests += [
            ({"to": to, "data": "0x1234"}, block) for to in (TO, "0x" + "00" * 19 + "04", ADDRESS)
        ]
        requests += [({"to": odd, "data": data[0], "from": TO}, block), ({"data": "0x00"}, block)]

    answers = {}
    for name, settings in (("single", {"multicall_max": 0}), ("merged", {"multicall_max": 25})):
        with FaultProxy(own_chain.url, []) as proxy:
            service = io(
                rpc={"dev": {"urls": [proxy.url], **settings}}, run={"io_wait_max_ms": 2_000}
            )
            if name == "merged":
                find_it(service, 20)
            reads = [service.rpc("eth_call", call, block=block) for call, block in requests]
            answers[name] = [
                str(told(reply)).replace(proxy.url, "URL") for reply in service.ask(*reads)
            ]
            if name == "merged":
                assert service.statistics()["multicalled"] > 100
    assert answers["merged"] == answers["single"]
    assert len(set(answers["single"])) > 20
