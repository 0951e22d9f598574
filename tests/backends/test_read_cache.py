"""The disk cache: what is kept between runs, what never is, and that nothing about the file can hurt a read."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockx import cli
from blockx.backends import read_cache, rpc_node
from blockx.backends.read_cache import ChainIdentity, ReadCache, numbers, read_key
from blockx.config import load_config
from tests.backends.harness import Io, outcome
from tests.backends.node import Node, block_hash, error

StartIo = Callable[..., Io]
IDENTITY = ChainIdentity("0x1", "0xgenesis", 100, "0xfinal")


@pytest.fixture
def run(io: StartIo, node: Node, tmp_path: Path) -> Callable[..., list[Any]]:
    """One run: reads in a service of its own over the same file, which is closed; what came out."""
    node.member = lambda m: {"result": "0x7a69"} if m["method"] == "eth_chainId" else None

    def go(*reads: tuple[Any, ...], **settings: Any) -> list[Any]:
        node.posts.clear()
        service = io(
            rpc={"dev": {"urls": [node.url]}}, read_cache={"path": "c/cache.sqlite", **settings}
        )
        requests = [service.rpc(method, *params, block=block) for method, block, *params in reads]
        replies = [outcome(reply) for reply in service.ask(*requests)]
        go.hits = service.statistics()["cache_hits"]  # type: ignore[attr-defined]
        service.stop()
        return replies

    return go


def asked(node: Node) -> list[str]:
    return sorted(member["method"] for post in node.posts for member in post)


OWN = ["eth_chainId", "eth_getBlockByNumber", "eth_getBlockByNumber"]


def test_a_second_run_reads_no_state_and_asks_three_questions(run: Any, node: Node) -> None:
    reads = [("eth_getBalance", n, "0xa") for n in range(50)]
    first = run(*reads)
    assert first == [hex(1000 + n) for n in range(50)]
    assert asked(node) == sorted([*OWN, *["eth_getBalance"] * 50])
    assert run(*reads) == first
    assert asked(node) == OWN
    assert run.hits == 50


def test_parameters_that_are_equal_are_one_read(run: Any, node: Node) -> None:
    run(("eth_call", 5, {"to": "0xa", "data": "0x1"}))
    run(("eth_call", 5, {"data": "0x1", "to": "0xa"}))
    assert asked(node) == OWN


@pytest.mark.parametrize(
    "read",
    [
        ("eth_getBalance", 150, "0xa"),
        ("eth_getBalance", block_hash(5), "0xa"),
        ("eth_getBalance", "latest", "0xa"),
        ("eth_gasPrice", None),
    ],
    ids=["not final", "by hash", "latest", "no state"],
)
def test_what_can_still_change_is_asked_again(run: Any, node: Node, read: tuple[Any, ...]) -> None:
    assert run(read) == run(read)
    assert read[0] in asked(node)


@pytest.mark.parametrize(
    "answer", [{"result": None}, error(3, "execution reverted"), error(-32000, "no")]
)
def test_errors_and_nulls_are_not_kept(
    run: Any, node: Node, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    monkeypatch.setattr(rpc_node, "LAG_PAUSES_S", ())
    told = node.member
    node.member = lambda m: answer if m["method"] == "eth_getCode" else told(m)
    for _ in range(2):
        run(("eth_getCode", 5, "0xa"))
        assert "eth_getCode" in asked(node)


def test_another_chain_finds_nothing_of_it(run: Any, node: Node) -> None:
    run(("eth_getBalance", 5, "0xa"))
    node.member = lambda m: {"result": "0x2"} if m["method"] == "eth_chainId" else None
    run(("eth_getBalance", 5, "0xa"))
    assert "eth_getBalance" in asked(node)


def test_a_chain_that_was_made_anew_loses_its_entries(run: Any, node: Node) -> None:
    run(("eth_getBalance", 5, "0xa"))
    told = node.member

    def anew(member: dict[str, Any]) -> Any:
        if member["params"] == ["finalized", False]:
            return {"result": {"number": "0x64", "hash": "0x" + "ee" * 32}}
        return told(member)

    node.member = anew
    run(("eth_getBalance", 5, "0xa"))
    assert "eth_getBalance" in asked(node)


def test_a_node_that_does_not_tell_its_chain_is_read_as_without_a_cache(
    run: Any, node: Node
) -> None:
    node.member = lambda m: error(-32601, "no") if m["method"] == "eth_chainId" else None
    for _ in range(2):
        assert run(("eth_getBalance", 5, "0xa")) == ["0x3ed"]
        assert "eth_getBalance" in asked(node)


def test_a_file_that_is_no_database_is_replaced(run: Any, node: Node, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "cache.sqlite").write_bytes(b"rubbish " * 2_000)
    run(("eth_getBalance", 5, "0xa"))
    run(("eth_getBalance", 5, "0xa"))
    assert asked(node) == OWN


@pytest.mark.parametrize("obstacle", ["folder", "locked"])
def test_a_file_that_cannot_be_had_hurts_nobody(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    monkeypatch.setattr(read_cache, "BUSY_MS", 10)
    path = tmp_path / "c" / "cache.sqlite"
    path.parent.mkdir()
    if obstacle == "folder":
        path.mkdir()
        assert run(("eth_getBalance", 5, "0xa")) == ["0x3ed"]
        return
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert run(("eth_getBalance", 5, "0xa")) == ["0x3ed"]
    other.close()


# ---- the file itself ---------------------------------------------------------------------------------


def with_cache(path: Path, use: Callable[[ReadCache], Any], max_bytes: int = 10**9) -> Any:
    async def main() -> Any:
        cache = ReadCache(path, max_bytes)
        cache.start()
        try:
            return await use(cache)
        finally:
            cache.close()

    return asyncio.run(main())


async def identified(cache: ReadCache) -> int:
    number: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    cache.identify(IDENTITY, number.set_result)
    return await number


async def looked_up(cache: ReadCache, keys: list[bytes]) -> list[bytes | None]:
    futures = []
    for key in keys:
        future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        cache.get(key, future.set_result)
        futures.append(future)
    return list(await asyncio.gather(*futures))


def keys(first: int, count: int) -> list[bytes]:
    return [read_key(IDENTITY, "m", b"[%d]" % n) for n in range(first, first + count)]


async def fill(cache: ReadCache, some: list[bytes]) -> None:
    chain = await identified(cache)
    for key in some:
        cache.put(key, chain, b"x" * 900)


def test_when_it_is_full_the_entries_unused_for_longest_go(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    with_cache(path, lambda cache: fill(cache, keys(0, 20)), 40_000)
    with_cache(path, lambda cache: looked_up(cache, keys(0, 10)), 40_000)
    with_cache(path, lambda cache: fill(cache, keys(100, 25)), 40_000)
    found = with_cache(path, lambda cache: looked_up(cache, keys(0, 20) + keys(100, 25)), 40_000)
    there = [entry is not None for entry in found]
    assert there[:10] + there[20:] == [True] * 35, "used by the run before, and new"
    assert sum(there[10:20]) == 1
    assert numbers(path).bytes == 36_000
    assert numbers(path).entries == 36


def test_what_would_overflow_the_queue_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_cache, "PENDING_BYTES_MAX", 3_000)
    with_cache(tmp_path / "c", lambda cache: fill(cache, keys(0, 10)))
    assert numbers(tmp_path / "c").entries == 3


KILLED = """
import asyncio, sys, time
from pathlib import Path
from tests.backends.test_read_cache import ReadCache, fill, identified, keys
from blockx.backends import read_cache, rpc_node
read_cache.WRITE_AFTER_S = 0.0

async def main():
    cache = ReadCache(Path(sys.argv[1]), 10**9)
    cache.start()
    for n in range(100_000):
        await fill(cache, keys(n * 10, 10))
        await asyncio.sleep(0)
        if n == 20:
            print("filling", flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_run_killed_while_it_writes_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"filling\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    found = with_cache(path, lambda cache: looked_up(cache, keys(0, 50)))
    assert found == [b"x" * 900] * 50
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
    assert numbers(path).bytes == 1_000 * numbers(path).entries


# ---- the verbs -----------------------------------------------------------------------------------


def test_the_verbs_show_and_delete_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, config = tmp_path / "cache.sqlite", tmp_path / "config.yaml"
    config.write_text("backends: {read_cache: {path: cache.sqlite}}")
    with_cache(path, lambda cache: fill(cache, keys(0, 3)))
    assert cli.main(["cache", "stats", "--config", str(config)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == str(path)
    assert shown[1].startswith("3 answers, 3,000 of at most 1,073,741,824 bytes (")
    assert shown[2:] == ["chain 0x1, genesis 0xgenesis: 3 answers, 2,700 bytes"]
    assert cli.main(["cache", "clear", "--config", str(config)]) == 0
    assert capsys.readouterr().err == f"{path}: 3 answers deleted\n"
    assert list(tmp_path.iterdir()) == [config]
    assert cli.main(["cache", "stats", "--config", str(config)]) == 0
    assert "\n0 answers, 0 of at most" in capsys.readouterr().out


def test_without_a_cache_the_verbs_say_how_to_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("backends: {}")
    assert cli.main(["cache", "stats", "--config", str(config)]) == 2
    assert "backends.read_cache.path is not set" in capsys.readouterr().err


def test_a_run_can_do_without_it(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("backends: {read_cache: {path: cache.sqlite}}")
    loaded = load_config(config, {})
    assert cli.cli_cache.without_cache(loaded).config.backends.read_cache.path == ""
