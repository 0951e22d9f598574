"""The outside of a world: jobs that stream calls by credit, and a node that answers reads.

Both are threads in the real program: what they say takes a drawn time and keeps its order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockx.actor.effects import OpenTask
from blockx.actor.orchestrator import IoAnswered
from blockx.dispatcher.commands import EmitResult, FinishTask, JobCommand, ReturnCredit
from blockx.dispatcher.events import (
    CallsSubmitted,
    ProductionEnded,
    StreamBatchSubmitted,
    TaskCancelled,
    TaskRemoved,
)
from blockx.dispatcher.model import CallResult, CallSpec, TaskEnd, TaskSpec
from blockx.errors import ErrorKind
from blockx.ipc.messages import CallWaiting, WireError
from tests.sim.program import View

if TYPE_CHECKING:
    from tests.sim.world import World

CREDITS = 2
CANCEL_MS_MAX = 1_500
"""Within this time a cancelled task has ended, whatever its calls do."""


class Job:
    """One task, from its opening to its removal."""

    def __init__(self, world: "World", spec: TaskSpec, calls: list[CallSpec]) -> None:
        self.world, self.spec = world, spec
        self.calls = {f"{spec.job_name}/{call.index}": call for call in calls}
        self.batches = _cut(world, calls)
        self.batches_sent: dict[int, list[CallSpec]] = {}
        self.credits = CREDITS
        self.is_producing = True
        self.is_started = False
        self.cancelled_ms = 0
        self.results: dict[str, CallResult] = {}
        self.credited: list[int] = []
        self.finish: FinishTask | None = None
        self._due_ms = 0

    @property
    def task_id(self) -> str:
        return self.spec.task_id

    def start(self) -> None:
        self.is_started = True
        self.world.reactor.post(OpenTask(self.spec, View(), self))
        self._produce()

    def cancel(self, *, drain: bool) -> None:
        """As a user does it: at any moment, and perhaps more than once."""
        if not self.is_started:
            return
        if not drain and self.finish is None and not self.cancelled_ms:
            self.cancelled_ms = self.world.now_ms
            self.world.after(CANCEL_MS_MAX, self._check_cancelled)
        self.world.reactor.post(TaskCancelled(self.task_id, drain, self.world.now_ms))

    def _check_cancelled(self) -> None:
        assert self.finish is not None, f"{self.task_id} was cancelled {CANCEL_MS_MAX} ms ago"

    # JobPort, on the actor thread ----------------------------------------------------------------

    def reached(self, function_id: str, digest: str) -> None:
        pass

    def deliver(self, commands: Sequence[JobCommand]) -> None:
        world = self.world
        for command in commands:
            self._check(command)
        self._due_ms = max(self._due_ms, world.now_ms + world.hop_ms())
        world.after(self._due_ms - world.now_ms, lambda: self._take(commands))

    def _check(self, command: JobCommand) -> None:
        """What the actor hands over: one result for a call, credits once, nothing after the end."""
        assert self.finish is None, f"{command} after the end"
        if isinstance(command, EmitResult):
            result = command.result
            assert result.call_id in self.calls, "a result of no call"
            assert result.call_id not in self.results, f"a second result of {result.call_id}"
            self.results[result.call_id] = result
        elif isinstance(command, ReturnCredit):
            assert command.batch_id not in self.credited, "a second credit"
            missing = [
                c.index
                for c in self.batches_sent[command.batch_id]
                if f"{self.spec.job_name}/{c.index}" not in self.results
            ]
            assert not missing, f"a credit before the results {missing}"
            self.credited.append(command.batch_id)
        elif isinstance(command, FinishTask):
            self.finish = command

    def _take(self, commands: Sequence[JobCommand]) -> None:
        """On the jobs thread."""
        for command in commands:
            if isinstance(command, ReturnCredit):
                self.credits += 1
            elif isinstance(command, FinishTask):
                self.batches.clear()
                self.world.reactor.post(TaskRemoved(self.task_id))
                return
            elif not isinstance(command, EmitResult):
                self.batches.clear()  # StopProduction
        self._produce()

    def _produce(self) -> None:
        world = self.world
        while self.is_producing and self.batches and self.credits:
            self.credits -= 1
            batch_id = len(self.batches_sent)
            batch = self.batches_sent[batch_id] = self.batches.pop(0)
            world.reactor.post(StreamBatchSubmitted(self.task_id, batch_id, batch, world.now_ms))
        if self.is_producing and not self.batches:
            self.is_producing = False
            world.reactor.post(ProductionEnded(self.task_id))

    # The end ------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Every call that the dispatcher took has one result, and its numbers add up."""
        finish = self.finish
        assert finish is not None
        assert finish.calls.calls == len(self.results)
        ok = sum(r.error is None for r in self.results.values())
        assert (finish.calls.ok, finish.calls.failed) == (ok, len(self.results) - ok)
        assert finish.calls.moves == sum(r.moves for r in self.results.values())
        if finish.end is TaskEnd.COMPLETED:
            assert self.results.keys() == self.calls.keys()
            assert sorted(self.credited) == sorted(self.batches_sent)


def _cut(world: "World", calls: list[CallSpec]) -> list[list[CallSpec]]:
    """Stream batches of drawn sizes, an empty one now and then."""
    batches, rest = [], calls
    while rest:
        size = world.rng.randrange(9)
        batches.append(rest[:size])
        rest = rest[size:]
    return batches


class WholeListJob(Job):
    """The same with the whole call list at once."""

    def start(self) -> None:
        world = self.world
        self.is_started = True
        calls = [call for batch in self.batches for call in batch]
        self.batches.clear()
        self.is_producing = False
        world.orchestrator._tasks[self.task_id] = world.entry_of(self)
        world.reactor.post(CallsSubmitted(self.spec, calls, world.now_ms))


@dataclass(slots=True)
class Request:
    """What the io side needs to answer."""

    executor_id: str
    call_id: str
    request_id: str
    attempt_seq: int


@dataclass(slots=True)
class Reply:
    """An answer; stands for ``backends.scope.IoReply``."""

    request: Request
    result: bytes | None
    error: WireError | None
    sidecar: bytes | None = None
    io_us: int = 0
    queue_us: int = 0


class Node:
    """Answers reads late, twice, or after their call has ended; some always fail."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.open: dict[str, Request] = {}
        """The request that each call waits for, until it is answered or cancelled."""
        self.ended_tasks: set[str] = set()

    def submit_waiting(self, waiting: Sequence[tuple[str, CallWaiting, bytes | None]]) -> None:
        for executor_id, message, _sidecar in waiting:
            payload = message.payload
            assert payload.task_id not in self.ended_tasks, "a read for a task that has ended"
            request = Request(executor_id, message.call_id, message.request_id, payload.attempt_seq)
            self._check(request)
            self.open[request.call_id] = request
            arg = int(bytes(payload.params)[1:-1])
            error = None
            if self.world.program.read_fails(arg):
                error = WireError(kind=ErrorKind.IO_ERROR, message="drawn")
            reply = Reply(request, None if error else b"%d" % arg, error, io_us=1_000)
            for _ in range(1 + self.world.fault("answer_twice")):
                self._answer_later(reply)

    def _check(self, request: Request) -> None:
        """Nothing is started for an attempt that has ended."""
        call = self.world.core.state.calls.get(request.call_id)
        assert call is not None, f"a read for {request.call_id}, which has ended"
        assert call.attempt_seq == request.attempt_seq, "a read for an older attempt"
        assert call.view is not None, "a read for an attempt that has ended"

    def check_open(self) -> None:
        """Between two turns: what may still be started belongs to attempts that are alive."""
        for request in self.open.values():
            self._check(request)

    def _answer_later(self, reply: Reply) -> None:
        self.world.after(self.world.io_ms(), lambda: self._answer(reply))

    def _answer(self, reply: Reply) -> None:
        call_id = reply.request.call_id
        if self.open.get(call_id) is reply.request:
            del self.open[call_id]
        self.world.reactor.post(IoAnswered([reply]))

    def cancel(self, call_ids: Sequence[str]) -> None:
        for call_id in call_ids:
            self.open.pop(call_id, None)

    def task_ended(self, task_id: str) -> None:
        self.ended_tasks.add(task_id)
