"""A table server for tests: the real service over a store of its own, on a loop of its own."""

import asyncio
import threading
from pathlib import Path

import msgspec

from blockx.backends.service import build_tables
from blockx.backends.table_server import TableServer
from blockx.config import BackendsConfig, Config, LoadedConfig


class ServedTables:
    """Serves the store at ``path`` from its start to ``stop``."""

    def __init__(self, path: Path, port: int = 0, **blockdb: object) -> None:
        """``blockdb``: further keys of the section."""
        sections = {"blockdb": {"path": str(path), **blockdb}}
        config = Config(backends=msgspec.convert(sections, BackendsConfig))
        self.tables = build_tables(LoadedConfig(config, path, path.parent))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = self._do(self._start(port))
        self.url = f"grpc://127.0.0.1:{self.port}"

    def _do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start(self, port: int) -> int:
        await self.tables.start()
        self.server = TableServer(self.tables)
        return await self.server.start("127.0.0.1", port)

    async def _stop(self) -> None:
        await self.server.stop()
        await self.tables.close()

    def stop(self) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
