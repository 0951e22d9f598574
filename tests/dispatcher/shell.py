"""The smallest shell around a core: it answers bind orders, runs the epilogue, checks all invariants."""

from typing import Any

from blockx.dispatcher.commands import BindCall, Command, EmitResult, StartAttempt
from blockx.dispatcher.core import DispatcherCore
from blockx.dispatcher.events import (
    AttemptCompleted,
    AttemptFailed,
    BindFailed,
    CallBound,
    CallsSubmitted,
    CallSuspended,
    Event,
    SnapshotUpdated,
    SubcallRequested,
)
from blockx.dispatcher.invariants import assert_all
from blockx.dispatcher.model import CallResult, CallSpec, ExecutorSnapshot
from tests.builders import (
    call_specs,
    dispatcher_core,
    dummy,
    error,
    function_ref,
    key_of,
    snapshot,
    task_spec,
)


class Shell:
    """Performs what a core orders, and remembers it. Bind orders to ``full`` executors fail."""

    def __init__(self, executors: int = 1, **config: Any) -> None:
        self.core: DispatcherCore = dispatcher_core(**config)
        self.full: set[str] = set()
        self.is_checked = True
        """All invariants after each event; off for long histories, each check being linear in calls."""
        self.now_ms = 1_000
        self.started: dict[str, StartAttempt] = {}
        self.results: dict[str, CallResult] = {}
        self.request_seq = 0
        if executors:
            self.snapshots(*[snapshot(f"exec-{n}") for n in range(executors)])

    def post(self, event: Event) -> list[Command]:
        """One event and its epilogue; all commands but ``BindCall``, in order."""
        commands = self._perform(self.core.handle(event))
        return commands + self.epilogue()

    def epilogue(self) -> list[Command]:
        """Dispatch and flush until nothing is ordered any more."""
        commands: list[Command] = []
        while True:
            ordered = self.core.dispatch(self.now_ms)
            more = self._perform(ordered)
            flushed = self.core.flush()
            more += self._perform(flushed)
            commands += more
            if not ordered and not flushed:
                return commands

    def _perform(self, commands: list[Command]) -> list[Command]:
        if self.is_checked:
            assert_all(self.core)
        done: list[Command] = []
        for command in commands:
            if isinstance(command, BindCall):
                done += self._perform(self.core.handle(self._answer(command)))
                continue
            done.append(command)
            if isinstance(command, StartAttempt):
                self.started[command.call_id] = command
            elif isinstance(command, EmitResult):
                assert command.result.call_id not in self.results, "a second result"
                self.results[command.result.call_id] = command.result
        return done

    def _answer(self, command: BindCall) -> Event:
        answer = BindFailed if command.executor_id in self.full else CallBound
        return answer(command.call_id, command.attempt_seq, command.executor_id)

    # Short forms --------------------------------------------------------------------------------

    def snapshots(self, *snapshots: ExecutorSnapshot) -> list[Command]:
        return self.post(SnapshotUpdated(list(snapshots), self.now_ms))

    def submit(self, calls: int | list[CallSpec], job: str = "t", **task: Any) -> list[Command]:
        specs = call_specs(range(calls)) if isinstance(calls, int) else calls
        return self.post(CallsSubmitted(task_spec(job, **task), specs, self.now_ms))

    def complete(self, call_id: str, output: bytes = b"1", **fields: Any) -> list[Command]:
        start = self.started[call_id]
        fields.setdefault("attempt_seq", start.attempt_seq)
        return self.post(dummy(AttemptCompleted, call_id=call_id, output=output, **fields))

    def fail(self, call_id: str, kind: Any, **fields: Any) -> list[Command]:
        start = self.started[call_id]
        fields.setdefault("attempt_seq", start.attempt_seq)
        fields.setdefault("body_started", True)
        return self.post(dummy(AttemptFailed, call_id=call_id, error=error(kind), **fields))

    def call_function(
        self, parent_id: str, function_id: str = "g", args: bytes = b"[]", **fields: Any
    ) -> list[Command]:
        """The parent is suspended on a sub-call."""
        start = self.started[parent_id]
        self.request_seq += 1
        self.post(CallSuspended(parent_id, start.attempt_seq))
        values: dict[str, Any] = {
            "attempt_seq": start.attempt_seq,
            "request_id": f"req-{self.request_seq}",
            "executor_id": start.executor_id,
            "function": function_ref(function_id),
            "key": key_of(function_id, args),
        }
        return self.post(
            dummy(
                SubcallRequested,
                parent_call_id=parent_id,
                function_id=function_id,
                args=args,
                **(values | fields),
            )
        )

    def names(self, commands: list[Command]) -> list[str]:
        """Type and call of each command: for tests about who and what order, not about every field."""
        named = []
        for command in commands:
            who = getattr(command, "call_id", None) or getattr(command, "parent_call_id", None)
            if isinstance(command, EmitResult):
                who = command.result.call_id
            named.append(f"{type(command).__name__} {who or getattr(command, 'task_id', '')}")
        return named
