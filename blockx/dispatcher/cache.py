"""The result cache of one task: equal calls are answered without running.

A plain container: it decides nothing, knows no call and no clock. Owned by the core (actor thread).
Invariant: ``bytes_used`` is what its entries add up to, and never above ``bytes_max``.
"""

from collections import OrderedDict

CACHE_ENTRY_BYTES = 300
"""What one entry of the result cache costs beside its key and its output: objects and table slots."""


class ResultCache:
    """Outputs of the successful calls of one task by key, least recently used first out.

    Bounded by ``bytes_max``, entries counted with their overhead. Full: the oldest leave. An output that
    alone is over the limit is not kept. 0: keeps nothing.
    """

    __slots__ = ("_entries", "bytes_max", "bytes_used")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> bytes | None:
        """The output of an equal call, or None."""
        output = self._entries.get(key)
        if output is not None:
            self._entries.move_to_end(key)
        return output

    def put(self, key: bytes, output: bytes) -> None:
        """Keep an output; the first one of a key stays (equal calls have equal outputs)."""
        size_bytes = len(key) + len(output) + CACHE_ENTRY_BYTES
        if size_bytes > self.bytes_max or key in self._entries:
            return
        self._entries[key] = output
        self.bytes_used += size_bytes
        while self.bytes_used > self.bytes_max:
            old_key, old_output = self._entries.popitem(last=False)
            self.bytes_used -= len(old_key) + len(old_output) + CACHE_ENTRY_BYTES

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.bytes_used = 0

    def counted_bytes(self) -> int:
        """What the entries add up to; for the invariant that ``bytes_used`` says so too."""
        return sum(len(k) + len(v) + CACHE_ENTRY_BYTES for k, v in self._entries.items())
