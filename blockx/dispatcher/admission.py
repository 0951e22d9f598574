"""Who is next: task slots, turns of tasks, fairness between instances.

Pure bookkeeping over tasks; it looks at no executor and moves no call. At most ``slots_max`` tasks take
part at once, further ones wait in the order of their arrival (spec: ExecutorTaskSlots). A task has a turn
while it has a ready call, room in its window (``TaskMaxInflightCalls``) and does not stop; tasks of one
instance take turns call by call.

``instance_fairness`` decides which instance is next:

- ``off``: all tasks belong to one instance: plain round robin over tasks.
- ``calls``: max-min; the instance with the fewest root calls in flight for its weight.
- ``cost``: max-min over CPU + IO time. Places say nothing about time: with equal places, a tenant whose
  calls last 100 times longer uses 100 times as much. Each instance has a clock (``Instance.used_us``)
  that every attempt of its calls, sub-calls included, moves on by its cost over the weight; calls in
  flight are added at the mean cost of the instance's calls. The one with the least goes first. An
  instance that comes (back) with work is moved up to the clock of the last one served, so that nobody
  saves up a right to all places, nor is made to wait for a past in which it was alone.

Ties go to the one that waited longest; an instance is served ``quantum`` calls in a row (0 and 1: one).
"""

from collections import deque

from blockx.config import DispatcherConfig
from blockx.dispatcher.model import Instance, Task

MEAN_COST_US_START = 1_000.0
"""What a call is taken to cost before any has ended."""
MEAN_COST_SHARE = 1 / 16
"""Weight of the newest call in the running mean of its instance."""

_EVERYONE = ""
"""The one instance of all tasks while fairness is off."""


class TurnOrder:
    """The tasks that have a slot, and whose turn it is."""

    __slots__ = (
        "_clock_us",
        "_current",
        "_fair",
        "_left",
        "_mean_us",
        "_quantum",
        "_seq",
        "_waiting",
        "_window_max",
        "active_count",
        "by_cost",
        "instances",
        "slots_max",
    )

    def __init__(self, config: DispatcherConfig, slots_max: int) -> None:
        self.slots_max = slots_max
        self.active_count = 0
        self.by_cost = config.instance_fairness == "cost"
        self.instances: dict[str, Instance] = {}
        self._waiting: deque[Task] = deque()
        self._window_max = config.task_max_inflight_calls
        self._fair = config.instance_fairness != "off"
        self._clock_us = 0.0
        self._mean_us = MEAN_COST_US_START
        self._quantum = max(1, config.instance_fairness_quantum)
        self._current: Instance | None = None
        self._left = 0
        self._seq = 0

    def add(self, task: Task) -> None:
        """A new task: it takes a slot, or waits for one."""
        self._waiting.append(task)
        self._fill_slots()

    def remove(self, task: Task) -> None:
        """A task has ended: its slot goes to the one that waited longest."""
        instance = task.instance
        if instance is None:
            self._waiting.remove(task)
            return
        if task.has_turn:
            instance.turns.remove(task)
            task.has_turn = False
        task.instance = None
        self.active_count -= 1
        instance.weights.remove(task.spec.weight)
        if instance.weights:
            instance.weight = max(instance.weights)
        else:
            del self.instances[instance.instance_id]
        self._fill_slots()

    def wake(self, task: Task) -> None:
        """Something changed that may give the task a turn."""
        instance = task.instance
        if instance is not None and not task.has_turn and task.ready:
            task.has_turn = True
            if not instance.turns and instance.used_us < self._clock_us:
                instance.used_us = self._clock_us
            instance.turns.append(task)

    def took(self, task: Task) -> None:
        """A root call of the task was bound."""
        assert task.instance is not None
        task.instance.inflight += 1

    def gave_back(self, task: Task) -> None:
        """A root call of the task is bound no more."""
        assert task.instance is not None
        task.instance.inflight -= 1
        if not task.has_turn:
            self.wake(task)

    def charge(self, task: Task, cost_us: int, *, is_root: bool) -> None:
        """An attempt reported what it cost: CPU + IO, in microseconds. Only ``by_cost`` asks for it."""
        instance = task.instance
        if instance is None:
            return
        instance.used_us += cost_us / instance.weight
        instance.unsettled_us += cost_us
        if is_root:
            # What its sub-calls cost since the last root call ended is part of what a call costs here.
            instance.mean_us += (instance.unsettled_us - instance.mean_us) * MEAN_COST_SHARE
            self._mean_us += (instance.unsettled_us - self._mean_us) * MEAN_COST_SHARE
            instance.unsettled_us = 0

    def charge_estimate(self, task: Task) -> None:
        """An attempt of a root call ended without a report: an executor died, or we aborted it."""
        instance = task.instance
        if self.by_cost and instance is not None:
            instance.used_us += instance.mean_us / instance.weight

    def next_task(self) -> Task | None:
        """Whose turn it is; None: no task has a call that may run now. Does not end the turn."""
        current = self._current
        if current is not None and self._left > 0:
            task = self._front(current)
            if task is not None:
                return task
        if not self._fair:
            everyone = self.instances.get(_EVERYONE)
            return None if everyone is None else self._front(everyone)
        best: Instance | None = None
        best_task: Task | None = None
        for instance in self.instances.values():
            if instance.turns and (best is None or self._goes_before(instance, best)):
                task = self._front(instance)
                if task is not None:
                    best, best_task = instance, task
        return best_task

    def end_turn(self, task: Task) -> None:
        """The task was served: the next of its instance is in front now."""
        instance = task.instance
        assert instance is not None
        if len(instance.turns) > 1:
            instance.turns.rotate(-1)
        if instance is not self._current:
            self._current = instance
            self._left = self._quantum
        self._left -= 1
        self._seq += 1
        if instance.used_us > self._clock_us:
            self._clock_us = instance.used_us
        instance.served_seq = self._seq

    def _front(self, instance: Instance) -> Task | None:
        """Its first task that may be served; those that may not lose their turn until they are woken."""
        turns = instance.turns
        while turns:
            task = turns[0]
            if task.ready and task.inflight < self._window_max and task.end is None:
                return task
            turns.popleft()
            task.has_turn = False
        return None

    def _goes_before(self, one: Instance, other: Instance) -> bool:
        if self.by_cost:
            mine = one.used_us + one.inflight * one.mean_us / one.weight
            its = other.used_us + other.inflight * other.mean_us / other.weight
        else:
            mine, its = float(one.inflight * other.weight), float(other.inflight * one.weight)
        return mine < its or (mine == its and one.served_seq < other.served_seq)

    def _fill_slots(self) -> None:
        while self._waiting and self.active_count < self.slots_max:
            task = self._waiting.popleft()
            instance_id = task.spec.instance_id if self._fair else _EVERYONE
            instance = self.instances.get(instance_id)
            if instance is None:
                instance = self.instances[instance_id] = Instance(
                    instance_id, mean_us=self._mean_us
                )
            instance.weights.append(task.spec.weight)
            instance.weight = max(instance.weights)
            task.instance = instance
            self.active_count += 1
            self.wake(task)
