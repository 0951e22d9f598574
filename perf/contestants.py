"""What a user would pick instead of blockx, each in its best configuration with two processes.

A contestant starts in a fresh process, is warmed, and runs a work; a work that it has no honest way to do is
not in its ``works``. What each needs beyond the standard library is in ``requirements-peers.lock``; Celery
needs ``redis-server`` on the path besides, and starts its own.
"""

import asyncio
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ClassVar

import bodies
from harness import PROCESSES

Body = Callable[[Any], Any]
ALL = ("noop", "cpu", "nested", "shared", "latency")
FLAT = ("noop", "cpu", "shared", "latency")
CONNECT_SECONDS_MAX = 20


class Contestant:
    """One way to run bodies elsewhere; subclasses say how."""

    works: ClassVar[Sequence[str]] = FLAT
    scale: ClassVar[float] = 1.0
    """Factor on the number of calls, for those that are slow; rates are compared, not sums."""
    nests = False
    """Whether a body can wait for other calls; else ``nested`` is cut by hand into two stages."""

    def start(self) -> None:
        """Start it; the first call may follow at once."""

    def stop(self) -> None:
        """End everything that :meth:`start` began."""

    def submit(self, body: Body, *args: Any) -> Any:
        """Hand one call over; what :meth:`result` takes."""
        raise NotImplementedError

    def result(self, handle: Any) -> Any:
        raise NotImplementedError

    def run(self, body: Body, calls: Sequence[bodies.Call]) -> list[Any]:
        return [self.result(handle) for handle in [self.submit(body, call) for call in calls]]

    def nested(self, calls: Sequence[bodies.Call]) -> list[Any]:
        """Parents that wait for two children each; here in two stages."""
        pairs = [[self.submit(bodies.child, side) for side in bodies.sides(call)] for call in calls]
        handles = [
            self.submit(bodies.combine, call["block"], self.result(left), self.result(right))
            for call, (left, right) in zip(calls, pairs, strict=True)
        ]
        return [self.result(handle) for handle in handles]


class Bare(Contestant):
    """The bound: no calls travel, each of two processes runs half of the bodies."""

    works = ("cpu",)

    def start(self) -> None:
        self.pool = ProcessPoolExecutor(PROCESSES)

    def stop(self) -> None:
        self.pool.shutdown()

    def run(self, body: Body, calls: Sequence[bodies.Call]) -> list[Any]:
        halves = [self.pool.submit(run_all, body, calls[n::PROCESSES]) for n in range(PROCESSES)]
        return [result for half in halves for result in half.result()]


def run_all(body: Body, calls: Sequence[bodies.Call]) -> list[Any]:
    return [body(call) for call in calls]


class ProcessPool(Contestant):
    works = ALL

    def start(self) -> None:
        self.pool = ProcessPoolExecutor(PROCESSES)

    def stop(self) -> None:
        self.pool.shutdown()

    def submit(self, body: Body, *args: Any) -> Any:
        return self.pool.submit(body, *args)

    def result(self, handle: Any) -> Any:
        return handle.result()


class MultiprocessingPool(Contestant):
    works = ALL

    def start(self) -> None:
        self.pool = multiprocessing.Pool(PROCESSES)

    def stop(self) -> None:
        self.pool.terminate()

    def submit(self, body: Body, *args: Any) -> Any:
        return self.pool.apply_async(body, args)

    def result(self, handle: Any) -> Any:
        return handle.get()


class Pebble(ProcessPool):
    def start(self) -> None:
        from pebble import ProcessPool as PebblePool

        self.pebble = PebblePool(max_workers=PROCESSES)

    def stop(self) -> None:
        self.pebble.stop()
        self.pebble.join()

    def submit(self, body: Body, *args: Any) -> Any:
        return self.pebble.schedule(body, args=args)


class Ray(Contestant):
    works = ALL
    scale = 0.25
    nests = True

    def start(self) -> None:
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        import ray

        self.ray = ray
        ray.init(
            num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False, configure_logging=False,
            object_store_memory=256 << 20, _node_ip_address="127.0.0.1",
        )  # fmt: skip
        self.remotes: dict[Body, Any] = {}

    def stop(self) -> None:
        self.ray.shutdown()

    def submit(self, body: Body, *args: Any) -> Any:
        if body not in self.remotes:
            self.remotes[body] = self.ray.remote(body)
        return self.remotes[body].remote(*args)

    def result(self, handle: Any) -> Any:
        return self.ray.get(handle)

    def nested(self, calls: Sequence[bodies.Call]) -> list[Any]:
        ray, child = self.ray, self.ray.remote(bodies.child)

        @ray.remote
        def parent(call: bodies.Call) -> Any:
            results = ray.get([child.remote(side) for side in bodies.sides(call)])
            return bodies.combine(call["block"], *results)

        return list(ray.get([parent.remote(call) for call in calls]))


class Dask(Contestant):
    """Its key is a hash of the arguments, so it runs equal calls once, as blockx does."""

    works = ALL
    scale = 0.1
    nests = True

    def start(self) -> None:
        import distributed

        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        self.cluster = distributed.LocalCluster(
            n_workers=PROCESSES, threads_per_worker=1, dashboard_address=None,
            worker_dashboard_address=None, silence_logs=logging.CRITICAL, host="127.0.0.1",
        )  # fmt: skip
        self.client = distributed.Client(self.cluster)

    def stop(self) -> None:
        self.client.close(timeout=5)
        self.cluster.close(timeout=5)

    def submit(self, body: Body, *args: Any) -> Any:
        return self.client.submit(body, *args, pure=True)

    def result(self, handle: Any) -> Any:
        return handle.result()

    def run(self, body: Body, calls: Sequence[bodies.Call]) -> list[Any]:
        return list(self.client.gather([self.submit(body, call) for call in calls]))

    def nested(self, calls: Sequence[bodies.Call]) -> list[Any]:
        return list(self.client.gather(self.client.map(dask_parent, calls, pure=False)))


def dask_parent(call: bodies.Call) -> Any:
    from distributed import worker_client

    with worker_client() as client:
        pair = [client.submit(bodies.child, side, pure=False) for side in bodies.sides(call)]
        return bodies.combine(call["block"], *client.gather(pair))


class Celery(Contestant):
    """Prefork with Redis as broker and backend. A task that waits for tasks can hang it: not nested."""

    scale = 0.1

    def start(self) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.folder = tempfile.TemporaryDirectory(prefix="blockx-bench-redis-")
        self.redis = subprocess.Popen(
            ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
             "--dir", self.folder.name],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for_port(port)
        os.environ["BENCH_REDIS"] = f"redis://127.0.0.1:{port}/0"
        self.processes = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "celery_app", "worker", "-l", "ERROR", "-P", "prefork",
             "-c", str(PROCESSES), "--without-gossip", "--without-mingle", "--without-heartbeat"],
            cwd=os.path.dirname(__file__), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        import celery_app

        self.tasks = celery_app.TASKS

    def stop(self) -> None:
        for process in (self.processes, self.redis):
            process.terminate()
            process.wait()
        self.folder.cleanup()

    def submit(self, body: Body, *args: Any) -> Any:
        return self.tasks[body.__name__].apply_async(args)

    def result(self, handle: Any) -> Any:
        return handle.get()


def wait_for_port(port: int) -> None:
    end = time.monotonic() + CONNECT_SECONDS_MAX
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
        else:
            return


class Gevent(Contestant):
    """One process; no CPU is shared and no call can be stopped."""

    works = ("noop",)

    def start(self) -> None:
        import gevent.pool

        self.pool = gevent.pool.Pool(128)

    def submit(self, body: Body, *args: Any) -> Any:
        return self.pool.spawn(body, *args)

    def result(self, handle: Any) -> Any:
        return handle.get()


class Asyncio(Contestant):
    """One process, bodies as coroutines; no CPU is shared and no call can be stopped."""

    works = ("noop",)

    def run(self, body: Body, calls: Sequence[bodies.Call]) -> list[Any]:
        async def one(gate: asyncio.Semaphore, call: bodies.Call) -> Any:
            async with gate:
                return body(call)

        async def every() -> list[Any]:
            gate = asyncio.Semaphore(128)
            return await asyncio.gather(*[one(gate, call) for call in calls])

        return asyncio.run(every())


CONTESTANTS: dict[str, type[Contestant]] = {
    "two bare processes": Bare,
    "ProcessPoolExecutor": ProcessPool,
    "multiprocessing.Pool": MultiprocessingPool,
    "Pebble": Pebble,
    "Ray": Ray,
    "Dask distributed": Dask,
    "Celery + Redis": Celery,
    "gevent (one process)": Gevent,
    "asyncio (one process)": Asyncio,
}
