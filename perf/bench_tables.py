"""How many point reads a second does the embedded table store serve, through its backend alone?

    python perf/bench_tables.py [--rows 100000] [--reads 200000] [--reps 3]

The backend as the io thread runs it, without executors and sockets: ``get_row`` requests are handed over in
groups of 256, as many as suspended calls send in one turn, for random keys of a table of ``rows`` rows; each
is answered with its row's exact JSON. One core; the figure is the bound that a table read cannot pass.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from harness import machine

from blockx.backends.scope import IoReply, IoRequest
from blockx.backends.table_files import load
from blockx.backends.tables import SqliteTables

GROUP = 256


def address(n: int) -> str:
    return f"0x{n * 0x9E3779B97F4A7C15 % 2**64:040x}"


def fill(folder: Path, rows: int) -> Path:
    lines = folder / "rows.jsonl"
    with lines.open("w") as file:
        for n in range(rows):
            file.write(json.dumps({"holder": address(n), "balance": 2**200 + n, "n": n}) + "\n")
    store = folder / "store.sqlite"
    load(store, "balances", lines, key=["holder"])
    return store


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


async def measure(store: Path, rows: int, reads: int) -> float:
    """Reads a second; every answer is looked at."""
    generator = random.Random(7)
    requests = [request(n, generator.randrange(rows)) for n in range(reads)]
    tables = SqliteTables(store, {}, 60_000)
    await tables.start()
    left, finished = GROUP, asyncio.Event()
    waiting = iter(requests)

    def answered(reply: IoReply) -> None:
        nonlocal left
        assert reply.result is not None, reply.error
        left -= 1
        if left == 0:
            asyncio.get_running_loop().call_soon(send)

    def send() -> None:
        nonlocal left
        group = list(itertools.islice(waiting, GROUP))
        left = len(group)
        for one in group:
            tables.submit(one, answered)
        if not group:
            finished.set()

    started = time.perf_counter()
    send()
    await finished.wait()
    took = time.perf_counter() - started
    await tables.close()
    return reads / took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the table")
    parser.add_argument("--reads", type=int, default=200_000, help="point reads a repetition")
    parser.add_argument("--reps", type=int, default=3, help="repetitions (default 3)")
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="blockx-bench-") as name:
        store = fill(Path(name), options.rows)
        rates = [
            asyncio.run(measure(store, options.rows, options.reads)) for _ in range(options.reps)
        ]
    print(f"point reads of {options.rows:,} rows, groups of {GROUP}, {options.reps} repetitions")
    print(f"  {statistics.median(rates):,.0f} reads/s ({min(rates):,.0f} to {max(rates):,.0f})")


if __name__ == "__main__":
    main()
