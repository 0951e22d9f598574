"""The io thread: takes the requests of parked calls to their backends and hands the replies back in groups.

One thread named ``io`` runs one asyncio loop (uvloop where it is installed); backends live on it and
nowhere else. ``submit``, ``cancel``, ``task_ended`` and ``statistics`` may be called from any thread and
never block: a deque and at most one wake-up of the loop for everything that gathered meanwhile. Requests,
cancellations and task ends are handled in the order they were handed in.

Invariants: every accepted request gets exactly one reply, also when its backend raises; ``on_replies`` is
called on the io thread, once a loop turn, with all replies of that turn; it must not block.
"""

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from blockx.backends.blockdb import MixedTables
from blockx.backends.capabilities import make_capability
from blockx.backends.http_backend import HttpBackend
from blockx.backends.memory import MemoryTables
from blockx.backends.postgres_place import place_of
from blockx.backends.read_cache import ReadCache
from blockx.backends.replies import failed, named
from blockx.backends.rpc import RpcBackend
from blockx.backends.scope import Backend, IoReply, IoRequest
from blockx.backends.tables import SqliteTables
from blockx.config import LoadedConfig, is_table_server
from blockx.errors import ErrorKind

WAITING_REQUESTS_MAX = 262_144
"""Requests accepted and not answered. Full: a further one is answered at once with ``unavailable``. More
calls than that are never resident together with the default limits, so this guards against our own mistakes
and against hand-written executors."""

STOP_WAIT_S = 10.0
"""How long ``stop`` waits for accepted writes before it gives the thread up (it is a daemon)."""

Statistics = dict[str, dict[str, dict[str, int]]]
"""Backend name -> section (for ``rpc`` the chains) -> counter -> number."""


class IoService:
    """Owner of the io thread and of the backends. One life: ``start`` once, ``stop`` once."""

    def __init__(
        self,
        loaded: LoadedConfig,
        on_replies: Callable[[list[IoReply]], None],
        backends: Mapping[str, Backend] | None = None,
    ) -> None:
        """``backends``: used instead of those of the configuration."""
        self._loaded = loaded
        self._on_replies = on_replies
        self._backends = dict(backends) if backends is not None else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._woken = False
        self._waiting: dict[
            int, IoRequest
        ] = {}  # by id(): the request itself is held, so it is unique
        self._replies: list[IoReply] = []
        self.dropped_replies = 0
        """Second replies to one request: a backend's bug, dropped."""

    # ---- any thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Build the backends and start the thread.

        Raises:
            UsageError: a backend's configuration or file is wrong; the thread has ended again.
        """
        if self._backends is None:
            self._backends = build_backends(self._loaded)
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="io", daemon=True)
        self._thread.start()
        try:
            ready.result()
        except BaseException:
            self._thread.join()
            raise

    def submit(self, requests: list[IoRequest]) -> None:
        """Take requests; each is answered once through ``on_replies``."""
        self._post(lambda: self._accept(requests))

    def cancel(self, call_ids: list[str]) -> None:
        """These calls' attempts have ended: nothing more is started for them."""
        self._post(lambda: self._cancel(call_ids))

    def task_ended(self, task_id: str) -> None:
        """Release what was pinned and cached for the task; its statistics stay readable."""
        self._post(lambda: self._task_ended(task_id))

    def keep_pins(
        self,
        task_id: str,
        pins: Mapping[str, Any],
        on_pins: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        """Before a task's first request: begin with these pinned blocks, by chain, and tell of further
        ones. ``on_pins``: on the io thread, before the read that asked for the block goes on."""
        rpc = (self._backends or {}).get("rpc")
        if isinstance(rpc, RpcBackend):
            self._post(lambda: rpc.keep_pins(task_id, pins, on_pins))

    def statistics(self, task_id: str) -> Statistics:
        """Numbers of one task so far, by backend."""
        return {
            name: backend.statistics(task_id) for name, backend in (self._backends or {}).items()
        }

    def stop(self) -> None:
        """Finish accepted writes, close connections, end the thread. Idempotent; unanswered reads get no reply."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return
        self._post(loop.stop)
        thread.join(STOP_WAIT_S)

    def _post(self, action: Callable[[], None]) -> None:
        # The append comes before the look at the flag, and the drain clears the flag before it looks at the
        # deque: an action is never left behind. Two threads may both wake the loop; that is harmless.
        self._inbox.append(action)
        if not self._woken and self._loop is not None:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop is closed: the service has stopped
                self._inbox.clear()

    # ---- io thread -------------------------------------------------------------------------------

    def _run(self, ready: concurrent.futures.Future[None]) -> None:
        loop = new_loop()
        asyncio.set_event_loop(loop)
        try:
            try:
                for backend in self._backends_now.values():
                    loop.run_until_complete(backend.start())
            except BaseException as error:  # noqa: BLE001 - handed to the thread that called start()
                ready.set_exception(error)
                return
            self._loop = loop
            loop.call_soon(self._drain)
            ready.set_result(None)
            loop.run_forever()
        finally:
            _finish(loop, [backend.close() for backend in self._backends_now.values()])

    @property
    def _backends_now(self) -> dict[str, Backend]:
        assert self._backends is not None, "start() builds the backends first"
        return self._backends

    def _drain(self) -> None:
        self._woken = False
        inbox = self._inbox
        try:
            while inbox:
                inbox.popleft()()
        finally:
            if inbox:  # one action raised (our bug, reported by the loop): the others are done all the same
                asyncio.get_running_loop().call_soon(self._drain)

    def _accept(self, requests: list[IoRequest]) -> None:
        backends, waiting = self._backends_now, self._waiting
        for request in requests:
            waiting[id(request)] = request
            backend = backends.get(request.backend)
            if backend is None:
                self._reply(
                    failed(
                        request,
                        ErrorKind.IO_ERROR,
                        _unknown_backend(request.backend, list(backends)),
                    )
                )
            elif len(waiting) > WAITING_REQUESTS_MAX:
                text = f"more than {WAITING_REQUESTS_MAX} requests are waiting for backends"
                self._reply(failed(request, ErrorKind.UNAVAILABLE, text))
            else:
                try:
                    backend.submit(request, self._reply)
                except Exception as error:  # noqa: BLE001 - our bug in a backend must not lose the request
                    text = f"backend {request.backend} failed on {request.operation}: {type(error).__name__}: {error}"
                    self._reply(failed(request, ErrorKind.IO_ERROR, text))

    def _cancel(self, call_ids: list[str]) -> None:
        for backend in self._backends_now.values():
            for call_id in call_ids:
                backend.cancel(call_id)

    def _task_ended(self, task_id: str) -> None:
        for backend in self._backends_now.values():
            backend.task_ended(task_id)

    def _reply(self, reply: IoReply) -> None:
        if self._waiting.pop(id(reply.request), None) is None:
            self.dropped_replies += 1
            return
        if not self._replies:
            asyncio.get_running_loop().call_soon(self._flush)
        self._replies.append(reply)

    def _flush(self) -> None:
        replies, self._replies = self._replies, []
        self._on_replies(replies)


def build_backends(loaded: LoadedConfig) -> dict[str, Backend]:
    """The backends that the configuration names; opens nothing."""
    config = loaded.config.backends
    backends: dict[str, Backend] = {}
    if config.rpc:
        cache = config.read_cache
        disk = ReadCache(loaded.resolve(cache.path), cache.max_bytes) if cache.path else None
        backends["rpc"] = RpcBackend(
            config.rpc, loaded.config.run.io_wait_max_ms, disk, config.rpc_posts_per_s
        )
    tables = build_tables(loaded)
    if tables is not None:
        backends["blockdb"] = tables
    if config.http.hosts:
        backends["http"] = HttpBackend(config.http, loaded.config.run.io_wait_max_ms)
    for name, service in config.capabilities.items():
        backends[name] = make_capability(name, service, loaded)
    return backends


def build_tables(loaded: LoadedConfig) -> Backend | None:
    """The backend ``blockdb`` that the configuration names; opens nothing. Raises UsageError."""
    config = loaded.config.backends.blockdb
    store = _build_store(loaded)
    if not config.memory:
        return store
    memory = MemoryTables({name: loaded.resolve(path) for name, path in config.memory.items()})
    return memory if store is None else MixedTables(memory, store, config.memory)


def _build_store(loaded: LoadedConfig) -> Backend | None:
    """Packages of a store elsewhere are extras: only those who use it load them."""
    config, wait_ms = loaded.config.backends.blockdb, loaded.config.run.io_wait_max_ms
    declared = {name: table.key for name, table in config.tables.items()}
    if is_table_server(config.url):
        from blockx.backends.grpc_tables import GrpcTables

        scheme, _, target = config.url.partition("://")
        return GrpcTables(target, wait_ms, tls=scheme == "grpcs", coalesce=config.coalesce)
    if config.url:
        place = place_of(config)
        from blockx.backends.postgres_tables import PostgresTables

        return PostgresTables(place, declared, wait_ms, coalesce=config.coalesce)
    if config.path:
        path = loaded.resolve(config.path)
        return SqliteTables(path, declared, wait_ms, coalesce=config.coalesce)
    return None


def _unknown_backend(name: str, configured: list[str]) -> str:
    there = named(configured, "none is configured")
    how = {
        "blockdb": "; add backends.blockdb.path (a SQLite file) or .url (PostgreSQL) to config.yaml",
        "http": "; add the hosts that may be reached under backends.http.hosts to config.yaml",
        "rpc": "; add a chain with its urls under backends.rpc to config.yaml",
    }.get(name, "")
    return f"backend {name!r} is not configured{how} (configured: {there})"


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: half the CPU of a request."""
    try:
        import uvloop  # type: ignore[import-not-found, unused-ignore]  # the extra `fast`
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _finish(loop: asyncio.AbstractEventLoop, closing: list[Coroutine[Any, Any, None]]) -> None:
    """Close the backends, then whatever tasks are left, then the loop."""

    async def finish() -> None:
        await asyncio.gather(*closing, return_exceptions=True)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    try:
        loop.run_until_complete(finish())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
