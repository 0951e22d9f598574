"""How many point reads a second does a table store serve, through its backend alone?

    python perf/bench_tables.py [--rows 100000] [--reads 200000] [--reps 3] [--postgres [URL]]

The backend as the io thread runs it, without executors and sockets: ``get_row`` requests are handed over in
groups of 256, as many as suspended calls send in one turn, for random keys of a table of ``rows`` rows; each
is answered with its row's exact JSON. One core; the figure is the bound that a table read cannot pass.

``--postgres`` measures PostgreSQL too, in turns with the embedded store: in the schema ``blockx_bench`` of the
database at URL, or on a private server that it starts on this machine. There as many groups are on their way as
the pool has connections.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from blockx.backends.scope import Backend, IoReply, IoRequest
from blockx.backends.service import build_backends
from blockx.backends.table_access import files_of
from blockx.config import BackendsConfig, BlockdbConfig, Config, LoadedConfig

GROUP = 256
SCHEMA = "blockx_bench"


def address(n: int) -> str:
    return f"0x{n * 0x9E3779B97F4A7C15 % 2**64:040x}"


def fill(folder: Path, store: LoadedConfig, rows: int) -> None:
    lines = folder / "rows.jsonl"
    with lines.open("w") as file:
        for n in range(rows):
            file.write(json.dumps({"holder": address(n), "balance": 2**200 + n, "n": n}) + "\n")
    files = files_of(store)
    assert files is not None
    files.load("balances", lines, key=["holder"])


def configured(folder: Path, **blockdb: str) -> LoadedConfig:
    config = Config(backends=BackendsConfig(blockdb=BlockdbConfig(**blockdb)))
    return LoadedConfig(config, folder / "config.yaml", folder)


def request(n: int, key: int) -> IoRequest:
    params = {"table": "balances", "key": {"holder": address(key)}}
    encoded = json.dumps(params, separators=(",", ":")).encode()
    return IoRequest(
        executor_id="exec-0",
        task_id="bench@1",
        call_id=f"bench/{n}",
        attempt_seq=1,
        request_id=f"req-{n}",
        backend="blockdb",
        operation="get_row",
        params=encoded,
        sidecar=None,
        write=False,
        cache_key="",
        budget_left_ms=5_000.0,
    )


async def measure(tables: Backend, rows: int, reads: int, groups: int) -> tuple[float, float]:
    """Reads a second and our CPU in us a read, with so many groups on their way; every answer is looked at."""
    generator = random.Random(7)
    requests = [request(n, generator.randrange(rows)) for n in range(reads)]
    await tables.start()
    waiting = iter(requests)

    async def sent_in_turn() -> None:
        """A group after the one before is answered."""
        while group := list(itertools.islice(waiting, GROUP)):
            left, answered = len(group), asyncio.Event()

            def on_reply(reply: IoReply, answered: asyncio.Event = answered) -> None:
                nonlocal left
                assert reply.result is not None, reply.error
                left -= 1
                if left == 0:
                    answered.set()

            for one in group:
                tables.submit(one, on_reply)
            await answered.wait()

    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*[sent_in_turn() for _ in range(groups)])
    took, cpu = time.perf_counter() - started, time.process_time() - cpu
    await tables.close()
    return reads / took, cpu / reads * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the table")
    parser.add_argument("--reads", type=int, default=200_000, help="point reads a repetition")
    parser.add_argument("--reps", type=int, default=3, help="repetitions (default 3)")
    parser.add_argument("--postgres", nargs="?", const="", metavar="URL", help="PostgreSQL too")
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="blockx-bench-") as temp, ExitStack() as stack:
        folder = Path(temp)
        stores = {"embedded": (configured(folder, path="store.sqlite"), 1)}
        if options.postgres is not None:
            url = options.postgres or stack.enter_context(private_server())
            store = configured(folder, url=url, schema=SCHEMA)
            stores["PostgreSQL"] = (store, store.config.backends.blockdb.connections_max)
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in stores}
        for store, _ in stores.values():
            fill(folder, store, options.rows)
        for _ in range(options.reps):
            for name, (store, groups) in stores.items():
                tables = build_backends(store)["blockdb"]
                once = measure(tables, options.rows, options.reads, groups)
                figures[name].append(asyncio.run(once))
    print(f"point reads of {options.rows:,} rows, groups of {GROUP}, {options.reps} repetitions")
    for name, some in figures.items():
        rates, cpu_us = [rate for rate, _ in some], statistics.median(cpu for _, cpu in some)
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        median = statistics.median(rates)
        print(f"  {name:<10} {median:>9,.0f} reads/s ({spread}), {cpu_us:.1f} us of our CPU a read")


@contextmanager
def private_server() -> Iterator[str]:
    """The url of a PostgreSQL server that ends with the measurement."""
    from tests.postgres import PostgresServer

    server = PostgresServer()
    try:
        yield server.url
    finally:
        server.remove()


if __name__ == "__main__":
    main()
