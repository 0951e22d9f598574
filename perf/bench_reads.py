"""How many calls of three sequential node reads a second, beside what a user would write instead?

    python perf/bench_reads.py [--reps 3] [--calls 5000] [--only blockx,gevent] [--no-batches]

A call makes three reads, each of which needs the answer of the one before. A JSON-RPC node of our
own (a process of its own, answers single requests and RPC batches alike 20 ms after they came) serves
all contestants. Latency alone allows ``in flight / 60 ms`` calls a second.

Each run is a fresh process tree, warmed with 200 calls of the same kind, then timed; contestants take
turns within a repetition, so that a busy machine hurts all of them. CPU is that of the contestant's
processes during the timed calls, sampled from outside, without the node, which runs on the same cores.
blockx runs as a user runs it (``blockx.py`` with a config.yaml and a calls.jsonl, results to a file).
Its user code is synchronous; asyncio's has to be written with async and await.

``--no-batches``: the node refuses RPC batches, so every read of blockx is an HTTP request of its own.
``--node-mode`` and ``--contestant`` are for the processes that this script starts.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import msgspec
from harness import (
    PROCESSES,
    RUN_SECONDS_MAX,
    SAMPLE_S,
    CpuSampler,
    Job,
    Measures,
    machine,
    median,
    ratios,
    run_product,
)

DELAY_S = 0.020
READS = 3
WARM_UP_CALLS = 200


# --- the node


class Request(msgspec.Struct):
    """What the node reads of a request."""

    id: int
    params: tuple[str, str]


decode_request = msgspec.json.Decoder(Request).decode
decode_batch = msgspec.json.Decoder(list[Request]).decode
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
REFUSAL = (
    b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"batches are not supported"}}'
)


class NodeConnection(asyncio.Protocol):
    """One client. HTTP as far as it is needed here: the body of each POST is answered after the delay."""

    batches = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.received = b""
        self.loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self.received += data
        while True:
            head, found, rest = self.received.partition(b"\r\n\r\n")
            if not found:
                return
            size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            if len(rest) < size:
                return
            self.received = rest[size:]
            answer = self.answer(rest[:size])
            self.loop.call_later(DELAY_S, self.send, HEAD % len(answer) + answer)

    def send(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)

    def answer(self, body: bytes) -> bytes:
        if body[:1] != b"[":
            return answer_one(decode_request(body))
        if not self.batches:
            return REFUSAL
        return b"[" + b",".join([answer_one(request) for request in decode_batch(body)]) + b"]"


def answer_one(request: Request) -> bytes:
    """The balance is the number in the place of the block, plus one."""
    value = int(request.params[1], 16) + 1
    return b'{"jsonrpc":"2.0","id":%d,"result":"0x%x"}' % (request.id, value)


def run_node(batches: bool) -> None:
    """Serve until standard input ends; the port is the first line of standard output."""

    async def serve() -> None:
        NodeConnection.batches = batches
        loop = asyncio.get_running_loop()
        server = await loop.create_server(NodeConnection, "127.0.0.1", 0, backlog=4_096)
        print(server.sockets[0].getsockname()[1], flush=True)
        await loop.run_in_executor(None, sys.stdin.read)

    new_event_loop().run_until_complete(serve())


def new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


@contextlib.contextmanager
def node(batches: bool) -> Iterator[int]:
    """A node in a process of its own; its port."""
    command = [sys.executable, __file__, "--node-mode", "batches" if batches else "singles"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


# --- blockx, from outside

FUNCTION = """\
from blockx_sdk import rpc


def _(account, block):
    for _ in range({reads}):
        block = int(rpc.call("eth_getBalance", [account, hex(block)]), 16)
    return block
"""


def run_blockx(inflight: int, port: int, count: int) -> Measures:
    """One run of the product; ``inflight`` calls an executor."""
    lists = [
        [f'["{account}", {block}]' for account, block in calls]
        for calls in (accounts(count), accounts(WARM_UP_CALLS, warm=True))
    ]
    done = run_product(
        {"reads": FUNCTION.format(reads=READS)},
        Job("reads", *lists),
        dispatcher=(
            f"{{executor_max_inflight: {inflight}, executor_max_runnable: {inflight},"
            f" task_max_inflight_calls: {PROCESSES * inflight}}}"
        ),
        more=f'backends: {{rpc: {{bench: {{urls: ["http://127.0.0.1:{port}"]}}}}}}\n',
    )
    check([result["output"] for result in done.results], count)
    measured = next(job for job in done.report["jobs"] if job["name"] == "measured")
    return {
        "rate": count / done.seconds,
        "cpu_us": done.cpu_s * 1e6 / (READS * count),
        "reads_a_post": READS * count / measured["rpc"]["bench"]["posts"],
    }


def accounts(count: int, *, warm: bool = False) -> list[tuple[str, int]]:
    """Account and block of each call; all accounts differ, so that no read can be shared."""
    first = 1 << 32 if warm else 0
    return [(f"0x{first + n:040x}", 16_000_000) for n in range(count)]


def check(results: Sequence[Any], count: int) -> None:
    if list(results) != [16_000_000 + READS] * count:
        raise SystemExit(f"wrong results: {len(results)} of {count}, {results[:3]} ...")


def measures(start_ns: int, end_ns: int, count: int, sampler: CpuSampler) -> Measures:
    cpu_s = sampler.between(start_ns, end_ns)
    return {"rate": count * 1e9 / (end_ns - start_ns), "cpu_us": cpu_s * 1e6 / (READS * count)}


# --- the others, in a fresh process


def body_of(account: str, block: int) -> bytes:
    request = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "eth_getBalance",
        "params": [account, hex(block)],
    }
    return json.dumps(request).encode()


HEADERS = {"Content-Type": "application/json"}
idle: list[http.client.HTTPConnection] = []
"""Kept-alive connections that nobody uses; as many are open as calls are in flight."""


def call_blocking(port: int, call: tuple[str, int]) -> int:
    """The call as one writes it with the standard library."""
    account, block = call
    connection = idle.pop() if idle else http.client.HTTPConnection("127.0.0.1", port)
    for _ in range(READS):
        connection.request("POST", "/", body_of(account, block), HEADERS)
        block = int(json.loads(connection.getresponse().read())["result"], 16)
    idle.append(connection)
    return block


Calls = Sequence[tuple[str, int]]
RunCalls = Callable[[Calls], list[int]]


async def gather_calls(port: int, inflight: int, calls: Calls) -> list[int]:
    import aiohttp

    gate = asyncio.Semaphore(inflight)
    url = f"http://127.0.0.1:{port}/"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(account: str, block: int) -> int:
            async with gate:
                for _ in range(READS):
                    data = body_of(account, block)
                    async with session.post(url, data=data, headers=HEADERS) as response:
                        block = int(json.loads(await response.read())["result"], 16)
            return block

        return await asyncio.gather(*[one(*call) for call in calls])


def asyncio_share(port: int, inflight: int, calls: Calls) -> list[int]:
    return new_event_loop().run_until_complete(gather_calls(port, inflight, calls))


def threads_share(port: int, threads: int, calls: Calls) -> list[int]:
    global pool_of_threads  # noqa: PLW0603 - kept between warm-up and measurement, in a child process
    if pool_of_threads is None:
        pool_of_threads = ThreadPoolExecutor(threads)
    return list(pool_of_threads.map(partial(call_blocking, port), calls))


pool_of_threads: ThreadPoolExecutor | None = None


def in_processes(share: RunCalls, pool: ProcessPoolExecutor, calls: Calls) -> list[int]:
    """Each process takes every second call; the pool is used as a way into two processes."""
    shares = [pool.submit(share, calls[n::PROCESSES]) for n in range(PROCESSES)]
    return [result for done in shares for result in done.result()]


@contextlib.contextmanager
def asyncio_contestant(port: int, inflight: int) -> Iterator[RunCalls]:
    yield partial(asyncio_share, port, inflight)


@contextlib.contextmanager
def asyncio_two_contestant(port: int, inflight: int) -> Iterator[RunCalls]:
    with ProcessPoolExecutor(PROCESSES) as pool:
        yield partial(in_processes, partial(asyncio_share, port, inflight), pool)


@contextlib.contextmanager
def threads_contestant(port: int, threads: int) -> Iterator[RunCalls]:
    with ProcessPoolExecutor(PROCESSES) as pool:
        yield partial(in_processes, partial(threads_share, port, threads), pool)


@contextlib.contextmanager
def gevent_contestant(port: int, inflight: int) -> Iterator[RunCalls]:
    import gevent.monkey

    gevent.monkey.patch_all()
    import gevent.pool

    pool = gevent.pool.Pool(inflight)
    yield lambda calls: list(pool.map(partial(call_blocking, port), calls))


OTHERS: dict[str, tuple[Callable[..., contextlib.AbstractContextManager[RunCalls]], int]] = {
    "ProcessPoolExecutor x 64 threads": (threads_contestant, 64),
    "ProcessPoolExecutor x 256 threads": (threads_contestant, 256),
    "asyncio + aiohttp, 256 at once": (asyncio_contestant, 256),
    "asyncio + aiohttp, 512 at once": (asyncio_contestant, 512),
    "asyncio + aiohttp, 2 processes x 512": (asyncio_two_contestant, 512),
    "gevent, 512 at once": (gevent_contestant, 512),
}
OURS = {"blockx, 2 x 128 in flight": 128, "blockx, 2 x 512 in flight": 512}


def run_other_here(contestant: str, port: int, count: int) -> None:
    """In the contestant's process: warm up, run, print the moments of start and end."""
    make, size = OTHERS[contestant]
    with make(port, size) as run:
        run(accounts(WARM_UP_CALLS, warm=True))
        calls = accounts(count)
        start_ns = time.time_ns()
        results = run(calls)
        end_ns = time.time_ns()
        # Printed before the pools end, so that their processes still count when they are sampled.
        print(json.dumps([start_ns, end_ns]), flush=True)
        check(results, count)
        time.sleep(2 * SAMPLE_S)


def run_other(contestant: str, port: int, count: int) -> Measures:
    command = [sys.executable, __file__, "--contestant", contestant, str(port), str(count)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    sampler = CpuSampler(process.pid)
    output, _ = process.communicate(timeout=RUN_SECONDS_MAX)
    if process.returncode != 0:
        raise SystemExit(f"{contestant} ended with {process.returncode}")
    return measures(*json.loads(output), count, sampler)


# --- the table


def best_others(runs: dict[str, list[Measures]]) -> tuple[str, str]:
    """The fastest and the leanest of the others that ran; "" when none did."""
    others = [name for name in runs if name in OTHERS]
    best = max(others, key=lambda name: median(runs[name], "rate"), default="")
    return best, min(others, key=lambda name: median(runs[name], "cpu_us"), default="")


def print_table(runs: dict[str, list[Measures]]) -> None:
    ours = [name for name in runs if name in OURS]
    best, lean = best_others(runs)
    for mine in ours:
        bound = PROCESSES * OURS[mine] / (READS * DELAY_S)
        print(
            f"{mine}: {median(runs[mine], 'rate') / bound:.2f} of what latency allows ({bound:,.0f}/s)"
        )
        if best:
            rate = statistics.median(ratios(runs[mine], runs[best], "rate"))
            cpu = statistics.median(ratios(runs[mine], runs[lean], "cpu_us"))
            print(f"  {rate:.2f} x the calls/s of the best other ({best})")
            print(f"  {cpu:.2f} x the CPU a read of the leanest other ({lean})")
    print(f"\n{'':40}{'calls/s':>9}{'us CPU a read':>15}{'reads a post':>14}")
    for name, mine in runs.items():
        reads = f"{median(mine, 'reads_a_post'):.1f}" if "reads_a_post" in mine[0] else "1"
        print(f"{name:40}{median(mine, 'rate'):>9,.0f}{median(mine, 'cpu_us'):>15,.0f}{reads:>14}")


def contest(
    names: Sequence[str], *, reps: int, count: int, batches: bool = True
) -> dict[str, list[Measures]]:
    """All of ``names`` in turns, beside one node."""
    runs: dict[str, list[Measures]] = {name: [] for name in names}
    with node(batches) as port:
        for _ in range(reps):
            for name, mine in runs.items():
                if name in OURS:
                    mine.append(run_blockx(OURS[name], port, count))
                else:
                    mine.append(run_other(name, port, count))
    return runs


def present(only: str) -> list[str]:
    """Names of the contestants that contain one of the words; without gevent where it is missing."""
    words = only.split(",")
    names = [name for name in [*OURS, *OTHERS] if any(word in name for word in words)]
    try:
        import gevent  # noqa: F401
    except ImportError:
        names = [name for name in names if not name.startswith("gevent")]
        print("gevent is not installed: left out", file=sys.stderr)
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--reps", type=int, default=3, help="repetitions (default 3)")
    parser.add_argument("--calls", type=int, default=5_000, help="calls a run (default 5000)")
    parser.add_argument("--only", default="", help="words of contestants' names, comma-separated")
    parser.add_argument("--no-batches", action="store_true", help="the node refuses RPC batches")
    parser.add_argument("--node-mode", help=argparse.SUPPRESS)
    parser.add_argument("--contestant", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node_mode:
        run_node(options.node_mode == "batches")
        return
    if options.contestant:
        name, port, count = options.contestant
        run_other_here(name, int(port), int(count))
        return
    print(machine())
    runs = contest(
        present(options.only),
        reps=options.reps,
        count=options.calls,
        batches=not options.no_batches,
    )
    print(
        f"{options.reps} repetitions of {options.calls} calls, load after {os.getloadavg()[0]:.1f}"
    )
    print_table(runs)


if __name__ == "__main__":
    main()
