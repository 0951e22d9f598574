"""Do thousands of single (unbatched) node requests a second slow the dispatcher down?

    python perf/bench_io_thread.py [--reps 5] [--seconds 1.0] [--rates 0,2000,4000,20000] [--posts-per-s 0]

The io thread shares the interpreter lock with the actor thread. Here a real reactor drives the real core on no-op
calls, as fast as it can: two executors with 128 places each are a process that sends every byte back, so that a
turn has the system calls of the product, each of which gives the lock away. From its turns the same thread asks the
io service for reads at a steady rate; the node, a process of its own (20 ms an answer), refuses RPC batches.

A row for each loop (asyncio, uvloop) and rate; the legs of all rows take turns within a repetition, and figures are
medians over the repetitions. *turn*: from one turn's end to the next, so that waiting for the lock counts. CPU is
that of the thread, and does not depend on the neighbours as the rates do. ``--posts-per-s``: the key
``backends.rpc_posts_per_s``; 0, no limit, shows what it is good for.
"""

import argparse
import asyncio
import contextlib
import gc
import itertools
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_core import Driver
from bench_reads import node
from harness import machine

from blockx.actor.reactor import Reactor
from blockx.app import GC_THRESHOLDS, SWITCH_INTERVAL_S
from blockx.backends import service
from blockx.backends.scope import IoRequest
from blockx.config import BackendsConfig, Config, LoadedConfig
from blockx.dispatcher.commands import StartAttempt
from blockx.dispatcher.events import AttemptCompleted
from blockx.dispatcher.model import Costs

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
ASK_MS = 5
SNAPSHOT_CALLS = 400
WAITING_MAX = 4_096
"""Reads on their way at most: what suspended calls of a few executors could ask for."""
ECHO = """
import select, socket, sys
socks = [socket.socket(fileno=int(fd)) for fd in sys.argv[1:]]
while True:
    for sock in select.select(socks, [], [])[0]:
        data = sock.recv(65536)
        if not data:
            sys.exit()
        sock.sendall(data)
"""


@contextlib.contextmanager
def executors(count: int) -> Iterator[list[socket.socket]]:
    """Sockets to a process that sends everything back."""
    pairs = [socket.socketpair() for _ in range(count)]
    theirs = [pair[1].fileno() for pair in pairs]
    process = subprocess.Popen([sys.executable, "-c", ECHO, *map(str, theirs)], pass_fds=theirs)
    for pair in pairs:
        pair[1].close()
    try:
        yield [pair[0] for pair in pairs]
    finally:
        process.kill()
        process.wait()
        for pair in pairs:
            pair[0].close()


class Dispatcher:
    """One leg: a reactor, the core, and a steady flow of reads. Its thread is the actor thread."""

    def __init__(
        self, reactor: Reactor, socks: list[socket.socket], io: service.IoService, rate: int
    ) -> None:
        self.reactor = reactor
        self.driver = Driver(len(socks), 1, 1 << 40, 0)
        self.io = io
        self.rate = rate
        self.socks = {f"exec-{n}": sock for n, sock in enumerate(socks)}
        self.running: dict[str, deque[StartAttempt]] = {name: deque() for name in self.socks}
        self.turns: list[int] = []
        self.turn_ended = time.monotonic_ns()
        self.done = self.answered = self.waiting = self.failed = 0
        self.owed = 0.0
        self.asked_at = time.monotonic()
        self.numbers = itertools.count()
        self.cpu_s = 0.0
        for name, sock in self.socks.items():
            sock.setblocking(False)
            self.reactor.register(sock.fileno(), lambda _mask, name=name: self.completed(name))

    def run(self) -> None:
        began = time.thread_time()
        driver = self.driver
        driver.open_all()
        if self.rate:
            self.reactor.call_later(ASK_MS, "ask")
        self.reactor.post(None)
        self.reactor.run(self.take, self.end_turn)
        self.cpu_s = time.thread_time() - began

    def completed(self, name: str) -> None:
        running, driver = self.running[name], self.driver
        for _ in range(len(self.socks[name].recv(65_536))):
            start = running.popleft()
            driver.post(AttemptCompleted(start.call_id, start.attempt_seq, b"1", Costs(), 0))
            self.done += 1
            if self.done % SNAPSHOT_CALLS == 0:
                driver.snapshots()

    def take(self, item: Any) -> None:
        """Of the inbox: answers of reads, or the timer to ask for more."""
        if item != "ask":
            self.waiting -= len(item)
            self.answered += len(item)
            self.failed += sum(reply.error is not None for reply in item)
            return
        self.reactor.call_later(ASK_MS, "ask")
        now = time.monotonic()
        self.owed += (now - self.asked_at) * self.rate
        self.asked_at = now
        count = min(int(self.owed), WAITING_MAX - self.waiting)
        self.owed = min(self.owed - count, self.rate / 10)
        self.waiting += count
        self.io.submit([self.read() for _ in range(count)])

    def read(self) -> IoRequest:
        number = next(self.numbers)
        params = b'{"params":["0x%x","0x%x"]}' % (number, number)
        call = f"c{number}"
        return IoRequest(
            "exec-0",
            "t@1",
            call,
            1,
            call,
            "rpc",
            "eth_getBalance",
            params,
            None,
            False,
            "",
            5_000.0,
        )

    def end_turn(self) -> None:
        driver = self.driver
        driver.settle()
        started = dict.fromkeys(self.socks, 0)
        while driver.started:
            start = driver.started.popleft()
            self.running[start.executor_id].append(start)
            started[start.executor_id] += 1
        for name, count in started.items():
            if count:
                self.socks[name].send(b"x" * count)
        now = time.monotonic_ns()
        self.turns.append(now - self.turn_ended)
        self.turn_ended = now


def leg(loop: str, rate: int, seconds: float, url: str, posts_per_s: int) -> dict[str, float]:
    """One run of so many seconds."""
    service.new_loop = LOOPS[loop]
    chain = {"urls": [url], "posts_max": 256, "timeout_ms": 60_000}
    sections = {"rpc": {"node": chain}, "rpc_posts_per_s": posts_per_s}
    config = Config(backends=msgspec.convert(sections, BackendsConfig))
    reactor = Reactor()
    io = service.IoService(LoadedConfig(config, Path("config.yaml"), Path()), reactor.post)
    io.start()
    with executors(2) as socks:
        dispatcher = Dispatcher(reactor, socks, io, rate)
        thread = threading.Thread(target=dispatcher.run)
        began, cpu_began = time.monotonic(), time.process_time()
        thread.start()
        time.sleep(seconds)
        reactor.stop()
        thread.join()
        took, cpu_s = time.monotonic() - began, time.process_time() - cpu_began
    io.stop()
    reactor.close()
    assert not dispatcher.failed, "reads failed"
    events = dispatcher.driver.events
    turns = sorted(dispatcher.turns)
    return {
        "events": events / took,
        "reads": dispatcher.answered / took,
        "p50": turns[len(turns) // 2] / 1e6,
        "p99": turns[len(turns) * 99 // 100] / 1e6,
        "max": turns[-1] / 1e6,
        "event_us": dispatcher.cpu_s * 1e6 / events,
        "actor": dispatcher.cpu_s / took,
        "io": (cpu_s - dispatcher.cpu_s) / took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rates", default="0,2000,4000,20000")
    parser.add_argument("--posts-per-s", type=int, default=0)
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    rows = [(loop, int(rate)) for loop in LOOPS for rate in options.rates.split(",")]
    found: dict[tuple[str, int], list[dict[str, float]]] = {row: [] for row in rows}
    print(machine())
    with node(batches=False) as port:
        for _ in range(options.reps):
            for row in rows:
                url = f"http://127.0.0.1:{port}"
                found[row].append(leg(*row, options.seconds, url, options.posts_per_s))
    print(
        "| loop | reads/s asked | answered | events/s | of none | turn p50, p99, max ms "
        "| CPU of an event us | cores: actor, io |"
    )
    print("| --- | ---: | ---: | ---: | ---: | --- | ---: | --- |")
    for (loop, rate), legs in found.items():
        base = found[loop, rows[0][1]]
        ratio = statistics.median(
            mine["events"] / none["events"] for mine, none in zip(legs, base, strict=True)
        )
        m = {key: statistics.median(run[key] for run in legs) for key in legs[0]}
        print(
            f"| {loop} | {rate:,} | {m['reads']:,.0f} | {m['events']:,.0f} | {ratio:.2f} "
            f"| {m['p50']:.2f}, {m['p99']:.2f}, {m['max']:.1f} | {m['event_us']:.1f} "
            f"| {m['actor']:.2f}, {m['io']:.2f} |"
        )


if __name__ == "__main__":
    main()
