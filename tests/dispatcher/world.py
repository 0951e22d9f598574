"""A small world around one core, all of it drawn from one seed: jobs, functions, executors, faults.

The functions are a plain model: what a call returns follows from its key alone (``Program.outcome``), so
that whatever the world does, a call must end with that, or with a failure of the infrastructure. In a
world with cycles functions may call each other in circles; there only the number of outcomes is checked.
Nothing here looks at a clock or iterates a set.
"""

import random
from dataclasses import dataclass, field

from blockx.dispatcher.commands import (
    AbortAttempt,
    ArmRetry,
    BindCall,
    Command,
    EmitResult,
    FinishTask,
    ResumeParent,
    ReturnCredit,
    StartAttempt,
    StopProduction,
    UnbindCall,
)
from blockx.dispatcher.events import (
    AttemptCompleted,
    AttemptFailed,
    BindFailed,
    CallBound,
    CallResumed,
    CallSuspended,
    Event,
    ExecutorLost,
    ProductionEnded,
    RetryDue,
    SnapshotUpdated,
    StreamBatchSubmitted,
    StreamOpened,
    SubcallRequested,
    TaskCancelled,
)
from blockx.dispatcher.invariants import assert_all
from blockx.dispatcher.model import CallError, CallResult, CallSpec, Costs
from blockx.errors import ErrorKind
from tests.builders import dispatcher_core, error, function_ref, key_of, snapshot, task_spec

LEVELS = 4
INFRASTRUCTURE = {
    ErrorKind.EXECUTOR_LOST,
    ErrorKind.EXECUTOR_WEDGED,
    ErrorKind.CODE_FETCH_FAILED,
    ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED,
    ErrorKind.RESUME_SEND_FAILED,
    ErrorKind.TASK_CANCELLED,
    ErrorKind.SUBCALL_FAILED,
}
"""What a call may end with instead of its own outcome; a sub-call that met one fails its parent."""


class Program:
    """What every function does, by its level and argument; drawn once."""

    def __init__(self, seed: int, *, args: int, cycles: bool) -> None:
        self.seed, self.args, self.cycles = seed, args, cycles

    def steps(self, level: int, arg: int) -> list[tuple[str, int, int]]:
        """("io", 0, 0) and ("call", level, arg), in order."""
        rng = random.Random(f"{self.seed}/{level}/{arg}")
        steps = []
        for _ in range(rng.randrange(4)):
            if rng.random() < 0.5:
                steps.append(("io", 0, 0))
            elif self.cycles:
                steps.append(("call", rng.randrange(LEVELS), rng.randrange(self.args)))
            elif level + 1 < LEVELS:
                steps.append(("call", level + 1, rng.randrange(self.args)))
        return steps

    def fails(self, level: int, arg: int) -> bool:
        return random.Random(f"{self.seed}/{level}/{arg}/fails").random() < 0.1

    def output(self, level: int, arg: int) -> bytes:
        return b"%d" % (level * 1_000 + arg)

    def outcome(self, level: int, arg: int) -> bytes | ErrorKind:
        """The plain model: sub-calls one after the other, then the result."""
        for kind, below, below_arg in self.steps(level, arg):
            if kind == "call" and isinstance(self.outcome(below, below_arg), ErrorKind):
                return ErrorKind.SUBCALL_FAILED
        return ErrorKind.USER_ERROR if self.fails(level, arg) else self.output(level, arg)


@dataclass
class Context:
    """One attempt on a fake executor."""

    start: StartAttempt
    level: int
    arg: int
    steps: list[tuple[str, int, int]]
    request_id: str = ""
    """Waits for the answer to it; "io" for an IO request."""
    failed: bool = False
    """Its sub-call failed."""


@dataclass
class Process:
    """One incarnation of a fake executor."""

    executor_id: str
    incarnation_id: str
    places: int
    bound: dict[str, bool] = field(default_factory=dict)
    """Call id -> takes a place."""
    contexts: dict[str, Context] = field(default_factory=dict)
    samples: int = 0


class World:
    """Steps a core through a drawn history; every event is followed by all invariants."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.now_ms = rng.randrange(1 << 40)
        self.fault_rate = rng.choice([0.0, 0.02, 0.1])
        self.cancel_rate = rng.choice([0.0, 0.0, 0.0, 0.01])
        cycles = rng.random() < 0.3
        self.program = Program(seed, args=rng.choice([2, 5, 30]), cycles=cycles)
        self.core = dispatcher_core(
            seed=rng.randrange(1 << 30),
            task_slots=rng.choice([1, 2, 32]),
            task_max_inflight_calls=rng.choice([1, 3, 1_024]),
            instance_fairness=rng.choice(["off", "calls"]),
            instance_fairness_quantum=rng.choice([0, 3]),
            share_results=rng.random() < 0.8,
            call_cache_max_bytes=rng.choice([0, 1_000, 1 << 20]),
            executor_max_inflight=rng.choice([1, 3, 128]),
            executor_selection_sample_size=rng.choice([0, 0, 2]),
        )
        self.processes: dict[str, Process] = {}
        self.down: list[str] = [f"exec-{n}" for n in range(rng.choice([1, 2, 4]))]
        self.inbox: list[Event] = []
        self.timers: list[Event] = []
        self.past: list[Event] = []
        self.submitted: dict[str, CallSpec] = {}
        self.results: dict[str, CallResult] = {}
        self.credits: list[tuple[str, int]] = []
        self.batches: list[tuple[str, int]] = []
        self.unsent: dict[str, list[StreamBatchSubmitted]] = {}
        self.finished: dict[str, FinishTask] = {}
        self.starts = 0
        self.request_seq = 0
        self.incarnation_seq = 0

    # Jobs ---------------------------------------------------------------------------------------

    def submit(self, tasks: int, calls: int) -> "World":
        rng = self.rng
        for number in range(tasks):
            job = f"j{number}"
            task = task_spec(job, instance_id=f"i{number % 2}", weight=rng.choice([1, 3]))
            self.inbox.append(StreamOpened(task, self.now_ms))
            specs = []
            for index in range(calls):
                level, arg = rng.randrange(LEVELS), rng.randrange(self.program.args)
                args = b"[%d]" % arg
                spec = CallSpec(index, function_ref(f"f{level}"), args, key_of(f"f{level}", args))
                specs.append(spec)
                self.submitted[f"{job}/{index}"] = spec
            batches = []
            while specs:
                size = rng.randrange(1, 8)
                batches.append(
                    StreamBatchSubmitted(task.task_id, len(batches), specs[:size], self.now_ms)
                )
                specs = specs[size:]
            self.batches += [(task.task_id, b.batch_id) for b in batches]
            self.unsent[task.task_id] = batches
        return self

    # Running ------------------------------------------------------------------------------------

    def run(self, steps_max: int) -> None:
        """Faults for a while, then none; all tasks must end within ``steps_max`` steps of peace."""
        for _ in range(self.rng.randrange(300)):
            self._step(self.fault_rate)
        for _ in range(steps_max):
            if not self.unsent and not self.inbox and not self.core.state.calls:
                return
            self._step(0.0)
        raise AssertionError(f"no end in sight: {self.core.state.calls.keys()}")

    def outcomes(self) -> dict[str, int]:
        return dict.fromkeys(self.results, 1)

    def wrong(self) -> dict[str, object]:
        """Calls whose result is neither that of the model nor a failure of the infrastructure."""
        wrong: dict[str, object] = {}
        for call_id, spec in self.submitted.items():
            level, arg = int(spec.function.function_id[1:]), int(spec.args[1:-1])
            result = self.results[call_id]
            if result.error is not None and result.error.kind in INFRASTRUCTURE:
                continue
            got = result.output if result.error is None else result.error.kind
            if got != self.program.outcome(level, arg):
                wrong[call_id] = got
        return wrong

    def _step(self, fault_rate: float) -> None:
        rng = self.rng
        self.now_ms += rng.randrange(50)
        if rng.random() < fault_rate:
            self._fault()
        elif rng.random() < self.cancel_rate and fault_rate:
            self._post(TaskCancelled(rng.choice(list(self.unsent) or ["?"]), rng.random() < 0.5, 0))
        elif self.inbox:
            self._post(self.inbox.pop(0))
        else:
            actions = [self._produce, self._beat, self._timer, *[self._work] * 6]
            rng.choice(actions)()

    def _post(self, event: Event) -> None:
        self.past.append(event)
        self._perform(self.core.handle(event))
        while True:
            ordered = self.core.dispatch(self.now_ms)
            self._perform(ordered)
            flushed = self.core.flush()
            self._perform(flushed)
            if not ordered and not flushed:
                return

    def _produce(self) -> None:
        if not self.unsent:
            return
        task_id = self.rng.choice(list(self.unsent))
        batches = self.unsent[task_id]
        if batches:
            self._post(batches.pop(0))
        else:
            del self.unsent[task_id]
            self._post(ProductionEnded(task_id))

    def _beat(self) -> None:
        for executor_id in self.down:
            self.incarnation_seq += 1
            process = Process(executor_id, f"p{self.incarnation_seq}", self.rng.randrange(1, 5))
            self.processes[executor_id] = process
        self.down.clear()
        snapshots = []
        for process in self.processes.values():
            process.samples += 1
            snapshots.append(
                snapshot(
                    process.executor_id,
                    incarnation_id=process.incarnation_id,
                    usable_contexts=process.places,
                    runnable_count=sum(not c.request_id for c in process.contexts.values()),
                    heartbeat_seq=process.samples,
                )
            )
        self._post(SnapshotUpdated(snapshots, self.now_ms))

    def _timer(self) -> None:
        if self.timers:
            self._post(self.timers.pop(self.rng.randrange(len(self.timers))))

    def _work(self) -> None:
        """One context of one executor gets one step further."""
        busy = [p for p in self.processes.values() if p.contexts]
        if not busy:
            return
        process = self.rng.choice(busy)
        context = self.rng.choice(list(process.contexts.values()))
        call_id, attempt_seq = context.start.call_id, context.start.attempt_seq
        if context.request_id == "io":
            context.request_id = ""
            self._post(CallResumed(call_id, attempt_seq))
        elif context.request_id:
            return
        elif context.failed:
            self._end(process, context, error(ErrorKind.SUBCALL_FAILED))
        elif not context.steps:
            failed = self.program.fails(context.level, context.arg)
            self._end(process, context, error() if failed else None)
        else:
            kind, level, arg = context.steps.pop(0)
            if kind == "io":
                context.request_id = "io"
                self._post(CallSuspended(call_id, attempt_seq))
            else:
                self._ask(process, context, level, arg)

    def _ask(self, process: Process, context: Context, level: int, arg: int) -> None:
        self.request_seq += 1
        context.request_id = f"req-{self.request_seq}"
        args, start = b"[%d]" % arg, context.start
        self._post(CallSuspended(start.call_id, start.attempt_seq))
        self._post(
            SubcallRequested(
                start.call_id,
                start.attempt_seq,
                context.request_id,
                process.executor_id,
                f"f{level}",
                function_ref(f"f{level}"),
                None,
                args,
                key_of(f"f{level}", args),
                1_000.0,
                self.now_ms,
            )
        )

    def _end(self, process: Process, context: Context, why: CallError | None) -> None:
        start = context.start
        del process.contexts[start.call_id]
        del process.bound[start.call_id]
        if why is None:
            output = self.program.output(context.level, context.arg)
            self._post(
                AttemptCompleted(start.call_id, start.attempt_seq, output, Costs(), self.now_ms)
            )
        else:
            self._post(
                AttemptFailed(start.call_id, start.attempt_seq, why, Costs(), self.now_ms, True)
            )

    # Faults -------------------------------------------------------------------------------------

    def _fault(self) -> None:
        rng = self.rng
        fault = rng.choice([self._lose, self._repeat, self._break_attempt])
        fault()

    def _lose(self) -> None:
        if not self.processes:
            return
        process = self.processes.pop(self.rng.choice(list(self.processes)))
        self.down.append(process.executor_id)
        if self.rng.random() < 0.3:
            self._beat()  # its successor attached before the loss was reported
        running = [c.start.call_seq for c in process.contexts.values() if not c.request_id]
        self._post(
            ExecutorLost(
                process.executor_id,
                process.incarnation_id,
                self.rng.choice([ErrorKind.EXECUTOR_LOST, ErrorKind.EXECUTOR_WEDGED]),
                "drawn",
                self.rng.choice([0, *running]),
                self.rng.random() < 0.3,
                self.now_ms,
            )
        )

    def _repeat(self) -> None:
        """Something that was said before is said again; tasks and requests are not (our own callers)."""
        event = self.rng.choice(self.past) if self.past else None
        if isinstance(
            event, AttemptCompleted | AttemptFailed | CallBound | RetryDue | ExecutorLost
        ):
            call = self.core.state.calls.get(getattr(event, "call_id", ""))
            assert call is None or call.attempt_seq >= getattr(event, "attempt_seq", 0)
            self._post(event)

    def _break_attempt(self) -> None:
        for process in self.processes.values():
            for context in process.contexts.values():
                kind = self.rng.choice(
                    [
                        ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED,
                        ErrorKind.RESUME_SEND_FAILED,
                        ErrorKind.CODE_FETCH_FAILED,
                    ]
                )
                self._end(process, context, error(kind))
                return

    # Commands -----------------------------------------------------------------------------------

    def _perform(self, commands: list[Command]) -> None:
        assert_all(self.core)
        for command in commands:
            self._perform_one(command)

    def _perform_one(self, command: Command) -> None:
        if isinstance(command, BindCall):
            answer = self._bind(command)
            self.past.append(answer)
            self._perform(self.core.handle(answer))
        elif isinstance(command, StartAttempt):
            self._start(command)
        elif isinstance(command, UnbindCall | AbortAttempt):
            process = self.processes.get(command.executor_id)
            if process is not None:
                process.bound.pop(command.call_id, None)
                process.contexts.pop(command.call_id, None)
        elif isinstance(command, ArmRetry):
            self.timers.append(RetryDue(command.call_id, command.attempt_seq))
        elif isinstance(command, ResumeParent):
            self._resume(command)
        elif isinstance(command, EmitResult):
            assert command.task_id not in self.finished, "a result after the end"
            assert command.result.call_id not in self.results, "a second result"
            self.results[command.result.call_id] = command.result
        elif isinstance(command, ReturnCredit):
            self.credits.append((command.task_id, command.batch_id))
        elif isinstance(command, FinishTask):
            assert command.task_id not in self.finished, "a second end"
            self.finished[command.task_id] = command
        else:
            assert isinstance(command, StopProduction)

    def _bind(self, command: BindCall) -> Event:
        process = self.processes.get(command.executor_id)
        takes_place = not command.parent_call_id
        refused = (
            process is None
            or (takes_place and sum(process.bound.values()) >= process.places)
            or (not takes_place and command.parent_call_id not in process.contexts)
        )
        if refused:
            return BindFailed(command.call_id, command.attempt_seq, command.executor_id)
        assert process is not None
        process.bound[command.call_id] = takes_place
        return CallBound(command.call_id, command.attempt_seq, command.executor_id)

    def _start(self, start: StartAttempt) -> None:
        process = self.processes[start.executor_id]
        assert start.call_id not in process.contexts, "started twice"
        self.starts += 1
        level, arg = int(start.function.function_id[1:]), int(start.args[1:-1])
        process.contexts[start.call_id] = Context(start, level, arg, self.program.steps(level, arg))

    def _resume(self, command: ResumeParent) -> None:
        process = self.processes.get(command.executor_id)
        context = process.contexts.get(command.parent_call_id) if process is not None else None
        assert context is not None, "an answer to nobody"
        assert context.start.attempt_seq == command.attempt_seq
        assert context.request_id == command.request_id
        context.request_id = ""
        context.failed = command.error is not None
        self.inbox.append(CallResumed(command.parent_call_id, command.attempt_seq))
