"""``blockdb`` with both kinds of tables: some held in memory (read-only), the others in the store.

io thread. A request goes by the name of its table: names of ``backends.blockdb.memory`` to memory, all
others to the store. Only used when both are configured.
"""

from collections.abc import Collection

from blockx.backends.scope import Backend, IoRequest, Reply
from blockx.ipc.exact_json import InvalidJsonError, decode, raw_members


class MixedTables:
    """Two backends behind one name; each owns its tables."""

    def __init__(self, memory: Backend, store: Backend, names: Collection[str]) -> None:
        """``names``: the tables in memory."""
        self._memory = memory
        self._store = store
        self._names = frozenset(names)

    async def start(self) -> None:
        """Start both. Raises UsageError."""
        await self._memory.start()
        await self._store.start()

    def submit(self, request: IoRequest, reply: Reply) -> None:
        """Hand the request to the owner of its table; the store also answers what names none."""
        owner = self._memory if self._table_of(request) in self._names else self._store
        owner.submit(request, reply)

    @staticmethod
    def _table_of(request: IoRequest) -> object:
        try:
            return decode(raw_members(request.params).get("table", b"null"))
        except InvalidJsonError:
            return None

    def cancel(self, call_id: str) -> None:
        """The call's attempt has ended."""
        self._memory.cancel(call_id)
        self._store.cancel(call_id)

    def task_ended(self, task_id: str) -> None:
        """Release what was kept for the task."""
        self._memory.task_ended(task_id)
        self._store.task_ended(task_id)

    def statistics(self, task_id: str) -> dict[str, dict[str, int]]:
        """Numbers of both."""
        return {**self._memory.statistics(task_id), **self._store.statistics(task_id)}

    async def close(self) -> None:
        """Finish accepted writes."""
        await self._memory.close()
        await self._store.close()
