"""A resumed job reads the blocks that its earlier run pinned."""

from collections.abc import Callable
from typing import Any

from tests.backends.harness import Io, outcome
from tests.backends.node import Node, block_hash

StartIo = Callable[..., Io]


def start(
    io: StartIo, node: Node, pins: dict[str, Any], **sections: Any
) -> tuple[Io, dict[str, Any]]:
    """A service whose task begins with these pins; what it tells of further ones, by chain."""
    service = io(rpc={"dev": {"urls": [node.url]}}, **sections)
    told: dict[str, Any] = {}
    service.service.keep_pins(
        "t@1", pins, lambda chain, new: told.setdefault(chain, {}).update(new)
    )
    return service, told


def test_every_pin_is_told_before_the_read_that_asked_for_it_goes_on(
    io: StartIo, node: Node
) -> None:
    service, told = start(io, node, {})
    service.one(service.rpc("eth_getBalance", "0xa", block="latest"))
    latest = told["dev"]["latest"]
    assert latest == [node.latest, block_hash(node.latest)]
    service.one(service.rpc("eth_getBalance", "0xa", block=150))
    final = [100, block_hash(100)]
    assert told == {"dev": {"latest": latest, "finalized": final, "150": [150, block_hash(150)]}}


def test_pins_of_an_earlier_run_are_read_again_and_not_asked_for(io: StartIo, node: Node) -> None:
    pins = {
        "dev": {
            name: [height, block_hash(height)]
            for name, height in (("latest", 140), ("finalized", 100), ("150", 150))
        }
    }
    service, told = start(io, node, pins)
    reads = [service.rpc("eth_getBalance", "0xa", block=block) for block in ("latest", 150, 90)]
    assert [outcome(reply) for reply in service.ask(*reads)] == [
        hex(1000 + height) for height in (140, 150, 90)
    ]
    assert node.params("eth_getBlockByNumber") == []
    assert told == {}
    other = service.one(service.rpc("eth_getBalance", "0xa", block="latest", task="t@2"))
    assert outcome(other) == hex(1000 + node.latest)
    assert told == {}


def test_a_resumed_task_sees_that_the_cache_is_of_a_chain_that_was_made_anew(
    io: StartIo, node: Node
) -> None:
    node.member = lambda m: {"result": "0x7a69"} if m["method"] == "eth_chainId" else None
    cached = {"read_cache": {"path": "cache.sqlite"}}
    for hash_, asked in ((block_hash(100), 1), (block_hash(100), 1), ("0x" + "ee" * 32, 2)):
        service, _ = start(io, node, {"dev": {"finalized": [100, hash_]}}, **cached)
        assert outcome(service.one(service.rpc("eth_getBalance", "0xa", block=5))) == "0x3ed"
        service.stop()
        assert len(node.params("eth_getBalance")) == asked
