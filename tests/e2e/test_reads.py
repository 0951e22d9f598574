"""What a job asks of its node, counted at the node: few posts under load, and nothing again that is on disk."""

import pytest

from tests.chain.devchain import at
from tests.chain.faultproxy import FaultProxy
from tests.chain.fixtures import chain

__all__ = ["chain"]

pytestmark = pytest.mark.slow

CALLS = 1_500
SOURCE = (
    "from leafage import ChainState\n\n"
    "def _(block, holders):\n"
    '    chain = ChainState("dev", block)\n'
    "    return {'wei': sum(chain.get_address_balance(holder) for holder in holders)}\n"
)


@pytest.fixture
def backfill(product, chain):
    """A job of three reads a call at final heights, behind a proxy that counts; with the ledger's answers."""
    people = chain.facts["holders"]
    final = int(chain.rpc("eth_getBlockByNumber", "finalized", False)["number"], 16)
    points = [
        (1 + i * 37 % final, [people[(i + i // final + 13 * k) % len(people)] for k in range(3)])
        for i in range(CALLS)
    ]
    ledger = chain.facts["eth_balances"]
    product.want = [
        {"wei": sum(int(at(ledger[holder], block)) for holder in holders)}
        for block, holders in points
    ]
    with FaultProxy(chain.url) as proxy:
        product.write(
            SOURCE,
            points,
            config=f"backends: {{rpc: {{dev: {{urls: ['{proxy.url}']}}}}, read_cache: {{path: cache.sqlite}}}}",
        )
        product.posts = proxy.posts
        yield product


def test_under_load_a_post_carries_twenty_requests_and_more(backfill):
    ended = backfill.run()
    assert ended.outputs() == backfill.want
    requests, posts = sum(map(len, backfill.posts)), len(backfill.posts)
    numbers = ended.job()["rpc"]["dev"]
    assert (numbers["requests"], numbers["posts"]) == (requests, posts)
    assert posts <= requests / 20


def test_a_second_run_over_the_disk_cache_makes_three_requests_and_reads_no_state(backfill):
    first = backfill.run()
    backfill.posts.clear()
    second = backfill.run("--config", "config.yaml", "--fresh")
    assert second.outputs() == first.outputs() == backfill.want
    asked = sorted(method for post in backfill.posts for method in post)
    assert asked == ["eth_chainId", "eth_getBlockByNumber", "eth_getBlockByNumber"]
    without = backfill.run("--config", "config.yaml", "--fresh", "--no-cache")
    assert without.outputs() == backfill.want
    assert sum(map(len, backfill.posts)) > CALLS
