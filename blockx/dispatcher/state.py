"""What the core knows: one record, owned by ``DispatcherCore`` and shared by the modules of this package.

Pure data with lookups; no decisions. The rules live beside it: ``transitions`` (states and bindings),
``outcomes`` (how attempts and calls end), ``admission`` (who is next), ``selection`` (where to),
``subcalls`` (child calls). They are plain functions over this record, called by ``core`` alone, on the
actor thread.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from blockx.config import DispatcherConfig
from blockx.dispatcher.admission import TurnOrder
from blockx.dispatcher.commands import Command
from blockx.dispatcher.model import Call, CallState, Task
from blockx.dispatcher.selection import ExecutorViews

STORY_MOVES_MAX = 4_096
"""Moves kept, of all calls together. Full: the oldest are forgotten; a story may miss its beginning."""

Move = tuple[str, str, CallState, CallState]
"""Call id, cause, from, to."""


class Story:
    """The last moves of all calls: what an ``InvalidTransitionError`` or a failed invariant prints."""

    __slots__ = ("tell",)

    def __init__(self, moves_max: int = STORY_MOVES_MAX) -> None:
        self.tell: deque[Move] = deque(maxlen=moves_max)

    def of(self, call_id: str) -> list[Move]:
        """The moves of one call that are still remembered, oldest first."""
        return [move for move in self.tell if move[0] == call_id]


@dataclass(slots=True, eq=False, repr=False)
class CoreState:
    """Everything that the core remembers between two events."""

    config: DispatcherConfig
    rng: random.Random
    """For the jitter of retries and the start of a sampled selection; seeded by whoever made the core."""
    views: ExecutorViews
    turns: TurnOrder
    calls: dict[str, Call] = field(default_factory=dict)
    """All calls that are not DONE, sub-calls included."""
    tasks: dict[str, Task] = field(default_factory=dict)
    """From ``StreamOpened`` or ``CallsSubmitted`` to ``TaskRemoved``."""
    dirty: dict[str, Task] = field(default_factory=dict)
    """Tasks to look at in the next flush (a dict for its order)."""
    out: list[Command] = field(default_factory=list)
    """The answer to the event at hand, as far as it is built."""
    parked: dict[str, Call] = field(default_factory=dict)
    """Sub-calls whose parent's executor took nothing (spec: PendingBindSubcalls)."""
    promoted: list[Call] = field(default_factory=list)
    """Sub-calls that lead now and must be bound before the event at hand is answered."""
    quarantine: deque[Call] = field(default_factory=deque)
    """Suspected root calls that wait for an executor of their own."""
    story: Story = field(default_factory=Story)
    counters: dict[str, int] = field(default_factory=dict)
    """Stale input by name; grows with the number of names only."""
    call_seq: int = 0
    """Last one given; unique in the life of this process."""
    subcall_seq: int = 0
    """Last ``n`` of ``{parent}/sub-{n}``; unique in the life of this process."""
    first_deadline_ms: int = 0
    """The earliest deadline of an unfinished task; 0: none has one."""

    def take(self) -> list[Command]:
        """The finished answer; the next one starts empty."""
        commands = self.out
        self.out = []
        return commands

    def count(self, name: str) -> None:
        """Count one piece of stale input."""
        self.counters[name] = self.counters.get(name, 0) + 1

    def attempt(self, call_id: str, attempt_seq: int, stale: str) -> Call | None:
        """The call if that is its current attempt, in flight; else None, counted under ``stale``.

        Covers the four ways to be late: DONE (forgotten), an older attempt, READY again with an attempt
        behind it, and an id that never was.
        """
        call = self.calls.get(call_id)
        if call is None or call.attempt_seq != attempt_seq or call.view is None:
            self.count(stale)
            return None
        return call
