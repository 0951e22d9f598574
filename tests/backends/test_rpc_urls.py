"""Which url takes the next post: order, weights, rates, the circuit. Pure, with times handed in; then end to end."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from blockx.backends import rpc_urls
from blockx.backends.rpc_urls import Allowance, ChainUrls, NodeUrl
from blockx.config import RpcBackendConfig, RpcUrlConfig
from blockx.errors import ErrorKind
from tests.backends.harness import Io, outcome
from tests.backends.node import Node, Raw

StartIo = Callable[..., Io]
A, B, C = "http://a", "http://b", "http://c"


def urls(
    *named: str, posts_max: int = 8, posts: Allowance | None = None, **per_url: Any
) -> ChainUrls:
    """``a={"weight": 2}``: what differs for ``http://a``."""
    settings = {f"http://{name}": RpcUrlConfig(**own) for name, own in per_url.items()}
    config = RpcBackendConfig(urls=list(named), per_url=settings, posts_max=posts_max)
    return ChainUrls("dev", config, 1_000, posts or Allowance(0))


def fail(chain: ChainUrls, url: NodeUrl, now: float, pause_s: float | None = None) -> None:
    kind = ErrorKind.UNAVAILABLE
    chain.failed(url, kind, "down", sent_at=now, now=now, asked_pause_s=pause_s)


def taken(chain: ChainUrls, posts: int, size: int = 1) -> Counter[str]:
    """Who takes the next posts if each is answered at once."""
    served: Counter[str] = Counter()
    for _ in range(posts):
        url = chain.choose(0.0, None)
        assert url is not None
        url.sent(size)
        url.inflight -= 1
        served[url.shown] += size
    return served


def test_without_weights_the_first_takes_everything() -> None:
    assert taken(urls(A, B), 10) == {A: 10}


def test_with_weights_requests_are_shared_in_their_proportion() -> None:
    chain = urls(A, B, C, a={"weight": 3}, b={"weight": 1})
    assert taken(chain, 40, size=5) == {A: 150, B: 50}


def test_an_url_without_a_weight_is_a_reserve() -> None:
    chain = urls(A, B, a={"weight": 1})
    fail(chain, chain.all[0], 1.0)
    assert chain.choose(1.0, None) is chain.all[1]
    assert chain.choose(2.0, None) is chain.all[0]


def test_with_weights_one_without_a_free_slot_is_passed_over() -> None:
    chain = urls(A, B, a={"weight": 9, "posts_max": 1}, b={"weight": 1})
    assert [chain.choose(0.0, None) for _ in range(1)] == [chain.all[0]]
    chain.all[0].sent(1)
    assert chain.choose(0.0, None) is chain.all[1]


def test_a_question_goes_rather_to_another_url_than_the_one_that_failed_it() -> None:
    chain = urls(A, B)
    assert chain.choose(0.0, chain.all[0]) is chain.all[1]
    assert urls(A).choose(0.0, chain.all[0]) is not None


def test_a_failing_url_rests_for_twice_as_long_each_time() -> None:
    chain = urls(A)
    url, now, rests = chain.all[0], 10.0, []
    for _ in range(8):
        fail(chain, url, now)
        rests.append(url.paused_until - now)
        now = url.paused_until
    assert all(0.1 * 2**n <= rest <= 0.125 * 2**n for n, rest in enumerate(rests[:6]))
    assert all(5.0 <= rest <= 6.25 for rest in rests[6:])


def test_a_pause_that_the_node_asked_for_is_kept() -> None:
    chain = urls(A)
    fail(chain, chain.all[0], 10.0, pause_s=30.0)
    assert (chain.choose(39.0, None), chain.wakes_at()) == (None, 40.0)


def test_posts_that_left_before_the_last_failure_count_as_one() -> None:
    chain = urls(A)
    url = chain.all[0]
    for _ in range(5):
        chain.failed(url, ErrorKind.UNAVAILABLE, "down", sent_at=1.0, now=2.0, asked_pause_s=None)
    assert url.failures == 1


def opened(*named: str) -> ChainUrls:
    """A chain whose first url has failed so often that its circuit is open, and whose rest is over at 100."""
    chain = urls(*named)
    for n in range(rpc_urls.OPEN_AFTER):
        fail(chain, chain.all[0], float(n + 1))
    chain.all[0].paused_until = 100.0
    return chain


def test_an_open_circuit_lets_one_request_through_and_an_answer_closes_it() -> None:
    chain = opened(A, B)
    url = chain.all[0]
    assert [health.circuit for health in chain.health(50.0)] == ["open", "closed"]
    assert chain.choose(100.0, None) is url
    assert chain.health(100.0)[0].circuit == "half open"
    assert url.room(100.0, 50) == 1
    url.sent(1)
    assert chain.choose(100.0, None) is chain.all[1], "the others serve meanwhile"
    url.inflight = 0
    chain.answered(url, 101.0, 0.5)
    assert (url.room(101.0, 50), chain.health(101.0)[0].circuit) == (50, "closed")


def test_a_probe_that_fails_opens_the_circuit_again() -> None:
    chain = opened(A)
    url = chain.all[0]
    url.sent(1)
    assert chain.choose(100.0, None) is None
    assert chain.wakes_at() == float("inf"), "its end wakes those who wait"
    url.inflight = 0
    fail(chain, url, 100.5)
    assert chain.choose(100.6, None) is None


def test_what_an_url_missed_while_it_rested_is_not_made_up_for() -> None:
    chain = urls(A, B, a={"weight": 1}, b={"weight": 1})
    fail(chain, chain.all[1], 0.0)
    chain.all[0].share = 1_000.0
    chain.answered(chain.all[1], 0.0, 0.1)
    chain.all[1].paused_until = 0.0
    assert taken(chain, 10) == {A: 5, B: 5}


def test_a_rate_limit_lets_a_quarter_of_a_second_leave_at_once_and_the_rest_in_time() -> None:
    chain = urls(A, a={"requests_per_s": 40})
    url, now, sent = chain.all[0], 100.0, []
    while now < 101.0:
        room = url.room(now, 100)
        if room:
            url.sent(room)
            sent.append((round(now, 3), room))
        now = url.ready_at(now, 100)
    assert sent == [(100.0, 10), (100.25, 10), (100.5, 10), (100.75, 10)]


def test_a_rate_below_one_burst_still_lets_single_requests_through() -> None:
    url = urls(A, a={"requests_per_s": 2}).all[0]
    assert url.room(10.0, 5) == 1
    url.sent(1)
    assert url.room(10.2, 5) == 0
    assert url.ready_at(10.2, 5) == pytest.approx(10.5)


def test_the_posts_of_all_urls_of_all_chains_share_one_rate() -> None:
    posts = Allowance(1_000, rpc_urls.POSTS_BURST_S)
    both = urls(A, posts=posts).all + urls(B, posts=posts).all
    sent = []
    for step in range(101):  # 10 ms
        for url in both:
            if url.room(100.0 + step / 10_000, 300):
                url.sent(100)
                sent.append(url.shown)
    assert len(sent) == 15, "5 at once, then one a millisecond"
    assert set(sent) == {A, B}
    assert both[0].ready_at(100.01, 300) == pytest.approx(100.015), "the next 5"


def test_a_batch_limit_that_was_guessed_grows_again_and_a_stated_one_does_not() -> None:
    chain = urls(A, B)
    guessed, stated = chain.all
    chain.lower_limit(guessed, 100, 0, 10.0)
    chain.lower_limit(stated, 100, 20, 10.0)
    assert (guessed.limit, stated.limit) == (50, 20)
    for url in (guessed, stated):
        chain.answered(url, 11.0 + rpc_urls.LIMIT_GROWS_S, 0.1)
    assert (guessed.limit, stated.limit) == (100, 20)


# ---- with real posts -----------------------------------------------------------------------------


@pytest.fixture
def second() -> Any:
    node = Node()
    yield node
    node.stop()


def test_weighted_urls_share_the_reads(io: StartIo, node: Node, second: Node) -> None:
    weights = {node.url: {"weight": 1}, second.url: {"weight": 1}}
    service = io(rpc={"dev": {"urls": [node.url, second.url], "per_url": weights, "batch_max": 5}})
    service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(40)])
    assert [sum(map(len, each.posts)) for each in (node, second)] == [20, 20]


def test_a_rate_limited_url_is_never_asked_faster(io: StartIo, node: Node) -> None:
    limits = {node.url: {"requests_per_s": 200}}
    service = io(rpc={"dev": {"urls": [node.url], "per_url": limits}})
    replies = service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(60)])
    assert [outcome(reply) for reply in replies] == [[hex(n)] for n in range(60)]
    assert [len(post) for post in node.posts] == [50, 10]
    assert replies[59].queue_us >= 45_000, "waiting for the rate is no IO time"


def test_single_requests_leave_no_faster_than_the_posts_of_the_io_thread_may(
    io: StartIo, node: Node
) -> None:
    service = io(rpc={"dev": {"urls": [node.url], "batch_max": 1}}, rpc_posts_per_s=200)
    replies = service.ask(*[service.rpc("web3_sha3", hex(n)) for n in range(20)])
    assert [outcome(reply) for reply in replies] == [[hex(n)] for n in range(20)]
    assert max(reply.queue_us for reply in replies) >= 90_000, "19 of them wait 5 ms each"


def test_a_dead_url_is_probed_with_one_request_while_another_serves(
    io: StartIo, node: Node, second: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_urls, "PAUSE_FIRST_S", 0.0)
    node.first = [Raw(503, b"")] * 100
    service = io(rpc={"dev": {"urls": [node.url, second.url]}})
    for turn in range(6):
        texts = [f"{turn}/{n}" for n in range(10)]
        replies = service.ask(*[service.rpc("web3_sha3", text) for text in texts])
        assert [outcome(reply) for reply in replies] == [[text] for text in texts]
    sizes = [len(post) for post in node.posts]
    assert sizes[: rpc_urls.OPEN_AFTER] == [10] * rpc_urls.OPEN_AFTER
    assert set(sizes[rpc_urls.OPEN_AFTER :]) == {1}
