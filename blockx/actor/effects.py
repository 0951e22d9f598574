"""Effects: one method for each command of the core. Dumb on purpose: no decision is made here.

Actor thread only. A performer may return one event: the fact that its effect established (CallBound,
a failed send); the orchestrator handles it at once, in order.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from blockx.dispatcher import commands as c
from blockx.dispatcher.events import AttemptFailed, BindFailed, CallBound, Event, RetryDue
from blockx.dispatcher.model import TaskSpec
from blockx.functions.view import FunctionView


class CallPlaces(Protocol):
    """What effects need of ``transport.adapter``."""

    def bind(self, command: c.BindCall) -> CallBound | BindFailed:
        """Reserve a place at once."""

    def unbind(self, call_id: str, executor_id: str) -> None:
        """Give it back."""

    def start(self, command: c.StartAttempt) -> AttemptFailed | None:
        """Queue ExecuteCall."""

    def abort(self, command: c.AbortAttempt) -> None:
        """Cancel, best effort."""

    def resume_parent(self, command: c.ResumeParent) -> None:
        """Answer a sub-call request."""


class JobPort(Protocol):
    """Where a task's outcomes go; called on the actor thread, never blocks."""

    def deliver(self, commands: Sequence[c.JobCommand]) -> None:
        """Results, credits and the end, in order."""

    def reached(self, function_id: str, digest: str) -> None:
        """A call of the task is about to use a function for the first time; digest "": there is none."""


class Timers(Protocol):
    """What effects need of the reactor."""

    def call_later(self, delay_ms: int, item: Any) -> None:
        """Hand the item to the orchestrator after the delay."""


class Effects:
    """Performs commands; ``performers`` has a method for each type of command."""

    def __init__(self, adapter: CallPlaces, timers: Timers) -> None:
        self._adapter = adapter
        self._timers = timers
        self._outgoing: dict[str, list[c.JobCommand]] = {}
        self.performers: dict[type, Callable[[Any], Event | None]] = {
            c.BindCall: adapter.bind,
            c.UnbindCall: self._unbind,
            c.StartAttempt: adapter.start,
            c.AbortAttempt: self._abort,
            c.ArmRetry: self._arm_retry,
            c.ResumeParent: self._resume_parent,
            c.EmitResult: self._to_job,
            c.StopProduction: self._to_job,
            c.ReturnCredit: self._to_job,
            c.FinishTask: self._to_job,
        }

    def _unbind(self, command: c.UnbindCall) -> None:
        self._adapter.unbind(command.call_id, command.executor_id)

    def _abort(self, command: c.AbortAttempt) -> None:
        self._adapter.abort(command)

    def _arm_retry(self, command: c.ArmRetry) -> None:
        self._timers.call_later(command.delay_ms, RetryDue(command.call_id, command.attempt_seq))

    def _resume_parent(self, command: c.ResumeParent) -> None:
        self._adapter.resume_parent(command)

    def _to_job(self, command: c.JobCommand) -> None:
        outgoing = self._outgoing.get(command.task_id)
        if outgoing is None:
            outgoing = self._outgoing[command.task_id] = []
        outgoing.append(command)

    def take_outgoing(self) -> dict[str, list[c.JobCommand]]:
        """What goes to jobs in this turn, by task; in groups, since a post to a thread costs a wake-up."""
        outgoing, self._outgoing = self._outgoing, {}
        return outgoing


class OpenTask:
    """Posted by the jobs side: a task, the functions it pinned, and where its outcomes go."""

    __slots__ = ("port", "task", "view")

    def __init__(self, task: TaskSpec, view: FunctionView, port: JobPort) -> None:
        self.task = task
        self.view = view
        self.port = port
