"""Reads of a node: batching, matching, merging, pinning, the cache, budgets. Against a scripted node."""

from collections.abc import Callable
from typing import Any

import pytest

from blockx.backends import rpc_node, rpc_pins
from tests.backends.harness import Io, outcome
from tests.backends.node import Node, Raw, block_hash, error

StartIo = Callable[..., Io]


def dev(node: Node, **settings: Any) -> dict[str, Any]:
    return {"dev": {"urls": [node.url], **settings}}


def balance(height: int) -> str:
    return hex(1000 + height)


# ---- batches -------------------------------------------------------------------------------------


def test_nothing_is_asked_of_a_node_before_the_first_read(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    service.stop()
    assert node.posts == []


def test_reads_of_one_group_leave_in_one_batch(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    replies = service.ask(*[service.rpc("eth_getBalance", f"0x{n}", block=n) for n in range(50)])
    assert [outcome(reply) for reply in replies] == [balance(n) for n in range(50)]
    assert node.methods() == [["eth_getBlockByNumber"], ["eth_getBalance"] * 50]
    assert service.statistics() == {
        "requests": 51, "posts": 2, "merged": 0, "cache_hits": 0, "retries": 0, "multicalled": 0,
    }  # fmt: skip


def test_a_batch_has_at_most_batch_max_members(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node, batch_max=20))
    service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(50)])
    assert sorted(len(post) for post in node.posts) == [10, 20, 20]


def test_with_batch_max_1_each_request_is_a_single_object(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node, batch_max=1))
    replies = service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(5)])
    assert [outcome(reply) for reply in replies] == [[hex(n)] for n in range(5)]
    assert [body[:1] for body in node.bodies] == [b"{"] * 5


@pytest.mark.parametrize(
    "change",
    [
        lambda answers: answers[::-1],
        lambda answers: [{**answer, "id": str(answer["id"])} for answer in answers],
        lambda answers: [{"jsonrpc": "2.0", "id": 987654, "result": "0xdead"}, *answers],
        lambda answers: [answers[0], *answers],
    ],
    ids=["reversed", "ids as text", "one that nobody asked for", "one twice"],
)
def test_answers_are_matched_by_id(io: StartIo, node: Node, change: Any) -> None:
    node.batch = change
    service = io(rpc=dev(node))
    replies = service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(20)])
    assert [outcome(reply) for reply in replies] == [[hex(n)] for n in range(20)]
    assert len(node.posts) == 1


def test_a_failing_member_fails_alone(io: StartIo, node: Node) -> None:
    node.member = lambda m: error(-32000, "one of them failed") if m["params"] == ["0x3"] else None
    service = io(rpc=dev(node))
    replies = service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(6)])
    assert [reply.error is None for reply in replies] == [n != 3 for n in range(6)]
    assert outcome(replies[3]) == (
        "io_error",
        f"web3_sha3: one of them failed (error -32000 of chain dev, node {node.url})",
    )


def test_numbers_of_any_size_pass_digit_for_digit(io: StartIo, node: Node) -> None:
    node.member = lambda m: {"result": {"n": 2**256 - 1, "f": 1.0, "i": 1}}
    service = io(rpc=dev(node))
    reply = service.one(service.rpc("eth_accounts"))
    assert reply.result == b'{"n": %d, "f": 1.0, "i": 1}' % (2**256 - 1)


def test_a_batch_has_at_most_so_many_bytes(
    io: StartIo, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_node, "POST_BYTES_MAX", 600)
    service = io(rpc=dev(node))
    service.ask(*[service.rpc("web3_sha3", f"{n:0100}") for n in range(6)])
    assert [len(post) for post in node.posts] == [3, 3]


def test_beside_a_post_on_its_way_reads_wait_a_moment_for_company(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    node.gate.clear()
    requests = [service.rpc("web3_sha3", hex(n)) for n in range(3)]
    service.service.submit(requests[:1])
    assert node.arrived.acquire(timeout=10)
    loop, accept = service.service._loop, service.service._accept
    assert loop is not None

    def one_a_turn() -> None:
        accept(requests[1:2])
        loop.call_soon(accept, requests[2:])

    loop.call_soon_threadsafe(one_a_turn)
    assert node.arrived.acquire(timeout=10)
    node.gate.set()
    service.replies_to(*requests)
    assert [len(post) for post in node.posts] == [1, 2]


def test_enough_reads_leave_at_once_although_a_post_is_on_its_way(
    io: StartIo, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_node, "LINGER_BELOW", 2)
    service = io(rpc=dev(node))
    node.gate.clear()
    requests = [service.rpc("web3_sha3", hex(n)) for n in range(4)]
    service.service.submit(requests[:1])
    assert node.arrived.acquire(timeout=10)
    loop, accept = service.service._loop, service.service._accept
    assert loop is not None

    def a_group_and_one_more() -> None:
        accept(requests[1:3])
        loop.call_soon(accept, requests[3:])

    loop.call_soon_threadsafe(a_group_and_one_more)
    for _ in range(2):
        assert node.arrived.acquire(timeout=10)
    node.gate.set()
    service.replies_to(*requests)
    assert [len(post) for post in node.posts] == [1, 2, 1]


def test_a_result_too_long_for_a_frame_fails_that_read(
    io: StartIo, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_node, "RESULT_BYTES_MAX", 50)
    service = io(rpc=dev(node))
    replies = service.ask(service.rpc("web3_sha3", "x" * 99), service.rpc("web3_sha3", "x"))
    assert [reply.error and reply.error.kind for reply in replies] == ["io_error", None]
    assert "a result of 103 bytes, more than 50; too much for one answer" in outcome(replies[0])[1]


def test_an_answer_too_long_is_asked_for_in_halves_and_a_single_one_fails(
    io: StartIo, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_node, "ANSWER_BYTES_MAX", 200)
    service = io(rpc=dev(node, posts_max=1))
    texts = ["a" * 90, "b" * 300, "c" * 90]
    replies = service.ask(*[service.rpc("web3_sha3", text) for text in texts])
    assert [reply.error and reply.error.kind for reply in replies] == [None, "io_error", None]
    assert [len(post) for post in node.posts] == [3, 1, 1, 1]


# ---- merging -------------------------------------------------------------------------------------


def test_identical_reads_in_flight_are_sent_once(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    replies = service.ask(*[service.rpc("eth_blockNumber") for _ in range(10)])
    assert [outcome(reply) for reply in replies] == ["0xc8"] * 10
    assert node.methods() == [["eth_blockNumber"]]
    assert service.statistics()["merged"] == 9


def test_without_merge_reads_each_is_sent(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node, merge_reads=False))
    service.ask(*[service.rpc("eth_blockNumber") for _ in range(10)])
    assert node.methods() == [["eth_blockNumber"] * 10]


def test_a_read_does_not_join_one_that_left_before_a_write(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    node.gate.clear()
    before, write = service.rpc("eth_blockNumber"), service.rpc("evm_mine")
    after = service.rpc("eth_blockNumber")
    service.service.submit([before, write, after])
    assert node.arrived.acquire(timeout=10)
    node.gate.set()
    service.replies_to(before, write, after)
    assert len(node.params("eth_blockNumber")) == 2


def test_a_read_does_not_join_one_that_left_before_a_write_ended(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    node.gate.clear()
    node.held = "eth_blockNumber"
    write, during = service.rpc("evm_mine"), service.rpc("eth_blockNumber")
    service.service.submit([write, during])
    service.replies_to(write)
    after = service.rpc("eth_blockNumber")
    service.service.submit([after])
    for _ in range(3):
        assert node.arrived.acquire(timeout=10)
    node.gate.set()
    service.replies_to(during, after)
    assert len(node.params("eth_blockNumber")) == 2


# ---- writes --------------------------------------------------------------------------------------


def test_a_method_that_is_no_read_leaves_alone_and_each_time(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    service.ask(
        service.rpc("eth_blockNumber"),
        service.rpc("evm_mine"),
        service.rpc("evm_mine"),
        service.rpc("eth_gasPrice"),
    )
    assert [post for post in node.methods() if "evm_mine" in post] == [["evm_mine"], ["evm_mine"]]


@pytest.mark.parametrize("status", [0, 429, 503])
def test_a_write_is_never_repeated(io: StartIo, node: Node, status: int) -> None:
    node.first = [Raw(status)]
    service = io(rpc=dev(node))
    reply = service.one(service.rpc("eth_sendRawTransaction", "0x00"))
    assert reply.error is not None
    assert "not sent again, since it may have been executed" in reply.error.message
    assert len(node.posts) == 1


def test_a_write_has_a_connection_of_its_own(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    for method in ("eth_blockNumber", "evm_mine", "eth_blockNumber", "evm_mine"):
        service.one(service.rpc(method))
    first, write, second, other = node.ports
    assert first == second
    assert len({first, write, other}) == 3


# ---- pins ----------------------------------------------------------------------------------------


def test_final_heights_are_read_by_number_and_newer_ones_by_hash(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    heights = [0, 100, 101, 200]
    replies = service.ask(*[service.rpc("eth_getBalance", "0xa", block=n) for n in heights])
    assert [outcome(reply) for reply in replies] == [balance(n) for n in heights]
    assert sorted(map(str, node.params("eth_getBalance"))) == sorted(
        map(
            str,
            [
                ["0xa", "0x0"],
                ["0xa", "0x64"],
                ["0xa", {"blockHash": block_hash(101)}],
                ["0xa", {"blockHash": block_hash(200)}],
            ],
        )
    )


def test_the_final_height_and_each_hash_are_asked_once_a_task(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    for address in ("0xa", "0xb"):
        service.ask(*[service.rpc("eth_getBalance", address, block=n) for n in (150, 150, 50)])
    assert node.params("eth_getBlockByNumber") == [["finalized", False], ["0x96", False]]
    service.one(service.rpc("eth_getBalance", "0xa", block=150, task="t@2"))
    assert node.params("eth_getBlockByNumber") == [["finalized", False], ["0x96", False]] * 2


def test_when_no_final_height_is_known_every_height_is_pinned_by_hash(
    io: StartIo, node: Node
) -> None:
    node.final = None
    service = io(rpc=dev(node))
    assert outcome(service.one(service.rpc("eth_getBalance", "0xa", block=5))) == balance(5)
    assert node.params("eth_getBalance") == [["0xa", {"blockHash": block_hash(5)}]]


def test_a_null_for_the_final_height_is_asked_again_alone(io: StartIo, node: Node) -> None:
    nulls = [{"result": None}]
    node.member = lambda m: nulls.pop() if nulls else None
    service = io(rpc=dev(node))
    service.one(service.rpc("eth_getBalance", "0xa", block=5))
    assert node.params("eth_getBalance") == [["0xa", "0x5"]]


def test_a_node_that_answers_with_another_block_is_malformed(io: StartIo, node: Node) -> None:
    node.member = lambda m: {"result": {"number": "0x97", "hash": block_hash(151)}}
    service = io(rpc=dev(node))
    assert outcome(service.one(service.rpc("eth_getBalance", "0xa", block=152))) == (
        "malformed",
        "block 152 of chain dev: the node answered with block 151",
    )


def test_pins_are_bounded(io: StartIo, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_pins, "PINS_MAX", 2)
    service = io(rpc=dev(node))
    for height in (150, 151, 150, 152, 150):
        service.one(service.rpc("eth_getBalance", "0xa", block=height))
    asked = [params[0] for params in node.params("eth_getBlockByNumber")]
    assert asked == ["finalized", "0x96", "0x97", "0x98", "0x96"]


def test_latest_is_one_block_during_a_task(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    first = service.one(service.rpc("eth_getBalance", "0xa", block="latest"))
    node.latest = 300
    second = service.one(service.rpc("eth_getBalance", "0xb", block="latest"))
    other = service.one(service.rpc("eth_getBalance", "0xb", block="latest", task="t@2"))
    assert [outcome(r) for r in (first, second, other)] == [
        balance(200),
        balance(200),
        balance(300),
    ]


def test_a_block_by_height_is_read_by_its_pinned_hash(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    reply = service.one(service.rpc("eth_getBlockByNumber", True, block=150))
    assert outcome(reply) == {"number": "0x96", "hash": block_hash(150)}
    assert node.params("eth_getBlockByHash") == [[block_hash(150), True]]


def test_after_a_read_that_takes_a_height_alone_the_hash_is_compared(
    io: StartIo, node: Node
) -> None:
    service = io(rpc=dev(node))
    reads = [service.rpc("trace_block", block=block) for block in (90, 150, 150)]
    assert [outcome(reply) for reply in service.ask(*reads)] == [["0x5a"], ["0x96"], ["0x96"]]
    assert outcome(service.one(service.rpc("trace_block", block=150))) == ["0x96"]
    assert node.params("trace_block") == [["0x5a"], ["0x96"]]
    assert node.params("eth_getBlockByNumber")[1:] == [["0x96", False]] * 2  # before and after


@pytest.mark.parametrize("now", [{"number": "0x96", "hash": block_hash(7)}, None])
def test_a_block_that_was_replaced_is_not_read_by_its_height(
    io: StartIo, node: Node, now: Any
) -> None:
    service = io(rpc=dev(node))
    assert outcome(service.one(service.rpc("eth_getBalance", "0xa", block=150))) == balance(150)
    was_told = node.member
    node.member = lambda m: {"result": now} if m["method"] == "eth_getBlockByNumber" else None
    kind, text = outcome(service.one(service.rpc("trace_block", block=150)))
    assert kind == "block_unknown"
    assert text.startswith("block 150 of chain dev was" if now else "block 150 is not known")
    node.member = was_told
    again = service.one(service.rpc("trace_block", block=150))
    assert outcome(again) == ["0x96"]  # the answer of the other block was not kept


def test_tasks_that_pinned_different_blocks_of_a_height_share_no_read_of_it(
    io: StartIo, node: Node
) -> None:
    service = io(rpc=dev(node))
    service.one(service.rpc("eth_getBalance", "0xa", block=150))
    replaced = {"result": {"number": "0x96", "hash": block_hash(7)}}
    node.member = lambda m: replaced if m["params"][0] == "0x96" and len(m["params"]) == 2 else None
    service.one(service.rpc("eth_getBalance", "0xa", block=150, task="t@2"))
    old, new = service.ask(
        service.rpc("trace_block", block=150), service.rpc("trace_block", block=150, task="t@2")
    )
    assert outcome(old)[0] == "block_unknown"
    assert outcome(new) == ["0x96"]
    assert len(node.params("trace_block")) == 2


def test_logs_of_a_block_are_asked_by_its_hash(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    service.one(service.rpc("eth_getLogs", {"address": "0xa"}, block=150))
    service.one(service.rpc("eth_getLogs", {"address": "0xa"}, block=50))
    assert node.params("eth_getLogs") == [
        [{"address": "0xa", "blockHash": block_hash(150)}],
        [{"address": "0xa", "fromBlock": "0x32", "toBlock": "0x32"}],
    ]


def test_a_block_that_is_not_there_yet_is_asked_for_again_by_the_next_read(
    io: StartIo, node: Node
) -> None:
    service = io(rpc=dev(node))
    early = service.one(service.rpc("eth_getBalance", "0xa", block=201))
    assert outcome(early) == (
        "block_unknown",
        "block 201 is not known to the nodes of chain dev",
    )
    node.latest = 201
    assert outcome(service.one(service.rpc("eth_getBalance", "0xa", block=201))) == balance(201)


def test_own_questions_that_fail_in_a_batch_are_asked_again_alone(io: StartIo, node: Node) -> None:
    def fail_in_batches(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"jsonrpc": "2.0", "id": a["id"], **error(-32000, "no")} for a in answers]

    node.batch = fail_in_batches
    service = io(rpc=dev(node))
    service.ask(*[service.rpc("eth_getBalance", "0xa", block=n) for n in (150, 160)])
    posts = [post for post in node.posts if post[0]["method"] == "eth_getBlockByNumber"]
    asked = [[member["params"][0] for member in post] for post in posts]
    assert asked[:2] == [["finalized"], ["0xa0", "0x96"]]
    assert sorted(asked[2:]) == [["0x96"], ["0xa0"]]  # on two connections


def test_the_hash_of_a_block_that_is_refused_for_its_size_comes_from_its_first_transaction(
    io: StartIo, node: Node
) -> None:
    def member(m: dict[str, Any]) -> dict[str, Any] | None:
        if m["method"] == "eth_getTransactionByBlockNumberAndIndex":
            return {"result": {"blockNumber": m["params"][0], "blockHash": block_hash(150)}}
        too_big = m["method"] == "eth_getBlockByNumber"
        return error(-32008, "Response is too big") if too_big else None

    node.member = member
    service = io(rpc=dev(node))
    assert outcome(service.one(service.rpc("eth_getBalance", "0xa", block=150))) == balance(150)
    assert node.params("eth_getBalance") == [["0xa", {"blockHash": block_hash(150)}]]


@pytest.mark.slow
def test_a_lagging_node_is_asked_again_for_a_block_that_is_known(io: StartIo, node: Node) -> None:
    fails = [1, 1]
    node.member = lambda m: (
        error(-32000, "header not found")
        if m["method"] == "eth_getBalance" and fails and fails.pop()
        else None
    )
    service = io(rpc=dev(node))
    assert outcome(service.one(service.rpc("eth_getBalance", "0xa", block=150))) == balance(150)
    assert service.statistics()["retries"] == 2


def test_a_hash_that_no_node_knows_fails_at_once(io: StartIo, node: Node) -> None:
    node.member = lambda m: error(-32001, "Resource not found")
    service = io(rpc=dev(node))
    reply = service.one(service.rpc("eth_getBalance", "0xa", block="0x" + "11" * 32))
    assert reply.error is not None
    assert reply.error.kind == "block_unknown"
    assert len(node.posts) == 1


@pytest.mark.parametrize("block", ["safe", "0x11", -1, 2**63])
def test_a_block_that_is_none_is_refused(io: StartIo, node: Node, block: Any) -> None:
    service = io(rpc=dev(node))
    reply = service.one(service.rpc("eth_getBalance", "0xa", block=block))
    assert reply.error is not None
    assert reply.error.kind == "io_error"
    assert node.posts == []


# ---- the cache -----------------------------------------------------------------------------------


def test_reads_at_a_pinned_block_are_cached_for_the_task(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    for _ in range(3):
        assert outcome(service.one(service.rpc("eth_getBalance", "0xa", block=5))) == balance(5)
    assert len(node.params("eth_getBalance")) == 1
    assert service.statistics()["cache_hits"] == 2
    service.one(service.rpc("eth_getBalance", "0xa", block=5, task="t@2"))
    assert len(node.params("eth_getBalance")) == 2


def test_a_task_that_ended_has_no_cache_but_its_numbers_stay(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    service.one(service.rpc("eth_getBalance", "0xa", block=5))
    service.service.task_ended("t@1")
    service.one(service.rpc("eth_getBalance", "0xa", block=5))
    assert len(node.params("eth_getBalance")) == 2
    assert service.statistics()["requests"] == 4


def test_read_cache_bytes_0_switches_the_cache_off(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node, read_cache_bytes=0))
    for _ in range(2):
        service.one(service.rpc("eth_getBalance", "0xa", block=5))
    assert len(node.params("eth_getBalance")) == 2


def test_the_cache_drops_what_was_used_longest_ago(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node, read_cache_bytes=600))  # room for two entries
    for address in ("0xa", "0xb", "0xa", "0xc", "0xa", "0xb"):
        service.one(service.rpc("eth_getBalance", address, block=5))
    assert [params[0] for params in node.params("eth_getBalance")] == ["0xa", "0xb", "0xc", "0xb"]


def test_a_null_answer_is_never_cached(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    for _ in range(2):
        assert (
            outcome(service.one(service.rpc("eth_getBlockByHash", block_hash(999), False))) is None
        )
    assert len(node.posts) == 2


def test_plain_requests_are_not_cached(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node))
    for _ in range(2):
        service.one(service.rpc("eth_getBalance", "0xa", "0x5"))
    assert node.params("eth_getBalance") == [["0xa", "0x5"]] * 2


# ---- budgets, cancellation -----------------------------------------------------------------------


def test_a_read_ends_when_its_budget_is_used_up_and_others_get_the_answer(
    io: StartIo, node: Node
) -> None:
    service = io(rpc=dev(node))
    node.gate.clear()
    hasty = service.rpc("eth_blockNumber", budget_ms=30)
    patient = service.rpc("eth_blockNumber", budget_ms=60_000)
    service.service.submit([hasty, patient])
    [reply] = service.replies_to(hasty)
    assert outcome(reply) == (
        "deadline_exceeded",
        "eth_blockNumber: no answer within the 30 ms that were left of the call's budget",
    )
    assert reply.io_us >= 30_000
    node.gate.set()
    [answered] = service.replies_to(patient)
    assert outcome(answered) == "0xc8"
    assert answered.io_us >= 30_000
    assert len(node.posts) == 1


def test_a_reader_that_joins_has_its_own_budget(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node, timeout_ms=600_000))
    node.gate.clear()
    patient = service.rpc("eth_blockNumber")
    service.service.submit([patient])
    assert node.arrived.acquire(timeout=10)
    hasty = service.one(service.rpc("eth_blockNumber", budget_ms=20))
    assert hasty.error is not None
    assert hasty.error.kind == "deadline_exceeded"
    assert len(node.posts) == 1
    node.gate.set()
    [answered] = service.replies_to(patient)
    assert outcome(answered) == "0xc8"


def test_a_read_that_is_cancelled_while_its_block_is_asked_for_is_not_sent(
    io: StartIo, node: Node
) -> None:
    service = io(rpc=dev(node))
    node.gate.clear()
    read = service.rpc("eth_getBalance", "0xa", block=5)
    service.service.submit([read])
    assert node.arrived.acquire(timeout=10)
    service.service.cancel([read.call_id])
    service.replies_to(read)
    node.gate.set()
    service.one(service.rpc("eth_getBalance", "0xb", block=5))
    assert node.params("eth_getBalance") == [["0xb", "0x5"]]


def test_a_cancelled_read_that_has_not_left_is_not_sent(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node, posts_max=1))
    node.gate.clear()
    first = service.rpc("web3_sha3", "0x1")
    service.service.submit([first])
    assert node.arrived.acquire(timeout=10)
    second, third = service.rpc("web3_sha3", "0x2"), service.rpc("web3_sha3", "0x3")
    service.service.submit([second, third])
    service.service.cancel([second.call_id])
    [reply] = service.replies_to(second)
    assert reply.error is not None
    assert reply.error.kind == "cancelled"
    node.gate.set()
    service.replies_to(first, third)
    assert node.params("web3_sha3") == [["0x1"], ["0x3"]]


def test_a_write_of_a_cancelled_call_is_not_started(io: StartIo, node: Node) -> None:
    service = io(rpc=dev(node, posts_max=1))
    node.gate.clear()
    first = service.rpc("web3_sha3", "0x1")
    service.service.submit([first])
    assert node.arrived.acquire(timeout=10)
    write = service.rpc("evm_mine")
    service.service.submit([write])
    service.service.cancel([write.call_id])
    service.replies_to(write)
    node.gate.set()
    service.replies_to(first)
    service.one(service.rpc("eth_blockNumber"))
    assert node.methods() == [["web3_sha3"], ["eth_blockNumber"]]


# ---- names ---------------------------------------------------------------------------------------


def test_a_wrong_chain_name_lists_those_there_are(io: StartIo, node: Node) -> None:
    service = io(rpc={**dev(node), "main": {"urls": [node.url]}})
    replies = service.ask(
        service.rpc("eth_blockNumber", chain="deev"), service.rpc("eth_blockNumber")
    )
    assert [outcome(reply) for reply in replies] == [
        (
            "io_error",
            "there is no chain 'deev' under backends.rpc in config.yaml; there are: dev, main",
        ),
        ("io_error", "name the chain of this request: chain=…; there are: dev, main"),
    ]
