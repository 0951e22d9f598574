"""A world: the whole of main's actor side, real, in a simulated machine; all of it from one seed.

Real: ``DispatcherCore``, ``Orchestrator``, ``Effects``, ``Watchdog``, ``ExecutorAdapter`` with its frames, and the
slot machine. Simulated: time, sockets, processes, the node, the jobs. There is no thread and no clock: what
happens is a heap of moments, and everything drawn comes from the world's generator, so the same seed makes
the same history to the last frame.

Two phases: first with faults (which kinds, and how often, is drawn for each world: a few at high rates find
more than all at low ones), then without; in peace everything must come to its end within ``PEACE_MS``. All
invariants of the core hold after each event, those between core, adapter and executors after each turn.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blockx.actor.memory_guard import MemoryGuard, MemoryLimits
from blockx.actor.orchestrator import Orchestrator, _TaskEntry
from blockx.actor.watchdog import Watchdog
from blockx.config import DispatcherConfig
from blockx.dispatcher.commands import Command
from blockx.dispatcher.core import DispatcherCore
from blockx.dispatcher.events import CallCancelled, Event, TaskRemoved
from blockx.dispatcher.invariants import assert_all
from blockx.dispatcher.model import CallState, FailurePolicy, TaskEnd, TaskSpec, Via
from blockx.errors import FOLLOWERS_SHARE, ErrorKind
from blockx.ipc.messages import ExecuteCall
from blockx.transport.adapter import ExecutorAdapter
from tests.sim.executor import ACTIONS, Process
from tests.sim.jobs import Job, Node, WholeListJob
from tests.sim.pool import SimPool, SimTable
from tests.sim.program import LEVELS, Program, level_of
from tests.sim.sockets import Fds, MemoryListener, MemorySocket, SimReactor

PEACE_MS = 600_000
"""Simulated time within which everything ends once there are no more faults."""
TURNS_MAX = 60_000
"""Turns of one world; more: it makes no progress."""
STALL_MS = 3_000
HEARTBEAT_TIMEOUT_MS = 5_000
DRAINING_MS_MAX = 1_600
"""Longest that a cancelled call holds its place: 1,000 ms until it is killed, seen by a tick of 500 ms."""

FAULTS = (
    *ACTIONS, "wedge", "refuse", "lose_cancel", "lose_frame", "say_twice", "start_fails", "answer_twice",
    "impatient",
)  # fmt: skip
INFRASTRUCTURE = frozenset(
    {
        ErrorKind.EXECUTOR_LOST,
        ErrorKind.EXECUTOR_WEDGED,
        ErrorKind.CODE_FETCH_FAILED,
        ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED,
        ErrorKind.RESUME_SEND_FAILED,
    }
)
"""What a call may end with, instead of its own outcome, in a world with faults."""


class CheckedCore:
    """The real core, with its invariants checked after each event; no subclass, since it may be compiled."""

    def __init__(self, core: DispatcherCore) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def handle(self, event: Event) -> list[Command]:
        commands = self._core.handle(event)
        assert_all(self._core)
        return commands


class PlentyOfMemory:
    """The machine of a simulated world: never short of memory."""

    total_bytes = 1 << 40

    def available_bytes(self) -> int:
        """All of it."""
        return self.total_bytes

    def resident_bytes(self, _pid: int) -> int:
        """Next to nothing."""
        return 1


class World:
    """See the module's docstring; ``run`` is the whole of it."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.seed = seed
        self.now_ms = rng.randrange(1 << 40)
        self._moments: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self.is_peace = False
        self.counts: Counter[str] = Counter()
        self.bodies: Counter[str] = Counter()
        self.resident: dict[str, tuple[Process, int]] = {}
        self._draw_faults()
        self._draw_pace()
        config = self.config = self._draw_config()
        self.inflight_max = config.executor_max_inflight
        self.program = Program(
            seed,
            args=rng.choice((2, 6, 30)),
            has_cycles=rng.random() < 0.3,
            fail_rate=rng.choice((0.0, 0.1, 0.4)),
            max_depth=config.max_subcall_depth,
        )
        self._build(config)
        self.jobs = self._draw_jobs()

    # Drawing ------------------------------------------------------------------------------------

    def _draw_faults(self) -> None:
        rng = self.rng
        kinds = rng.sample(FAULTS, rng.choice((0, 1, 2, 3, len(FAULTS))))
        self.rates = {kind: rng.choice((0.01, 0.05, 0.2)) for kind in kinds}
        self.cancel_tasks = rng.random() < 0.25
        self.cancel_calls = rng.random() < 0.25
        self.recycles = rng.random() < 0.2

    def _draw_pace(self) -> None:
        rng = self.rng
        self._step_max = rng.choice((1, 5, 200))
        self._io_max = rng.choice((2, 50, 3_000))
        self._hop_max = rng.choice((1, 3, 20))
        self._buffer_bytes = rng.choice((200, 4_000, 1 << 20))

    def _draw_config(self) -> DispatcherConfig:
        rng = self.rng
        return DispatcherConfig(
            executor_max_inflight=rng.choice((1, 3, 128)),
            executor_max_runnable=rng.choice((2, 128)),
            executor_selection_sample_size=rng.choice((0, 0, 2)),
            task_max_inflight_calls=rng.choice((1, 4, 1_024)),
            instance_fairness=rng.choice(("off", "calls", "cost")),
            instance_fairness_quantum=rng.choice((0, 3)),
            max_subcall_depth=rng.choice((1, 8, 8)),
            share_results=rng.random() < 0.8,
            call_cache_max_bytes=rng.choice((0, 1_000, 1 << 20)),
            max_collected_output_bytes=rng.choice((0, 0, 0, 0, 30)),
        )

    def _build(self, config: DispatcherConfig) -> None:
        rng = self.rng
        self.fds = Fds()
        self.reactor = SimReactor(self.after)
        self.pool = SimPool(self, rng.choice((1, 2, 4)))
        core = DispatcherCore(
            config,
            stall_timeout_ms=STALL_MS,
            rng=random.Random(rng.randrange(1 << 30)),
            task_slots=rng.choice((1, 2, 32)),
        )
        self.core = CheckedCore(core)
        self.adapter = ExecutorAdapter(
            selector=self.reactor,
            pool=self.pool,
            table=SimTable(self.pool.processes),
            executor_max_inflight=config.executor_max_inflight,
            check_pid=True,
            now_ms=self.clock,
            outbox_frames_max=rng.choice((2, 256)),
        )
        self.listeners: dict[str, MemoryListener] = {}
        for index, slot in enumerate(self.pool.slots):
            listener = MemoryListener(self.fds.next())
            self.listeners[slot.executor_id] = self.reactor.files[listener.fd] = listener
            self.adapter.serve(slot.executor_id, index, listener, Path("/nowhere"))
        self.node = Node(self)
        self.orchestrator = Orchestrator(
            reactor=self.reactor,
            core=self.core,
            adapter=self.adapter,
            io=self.node,
            watchdog=Watchdog(
                self.adapter,
                stall_timeout_ms=STALL_MS,
                heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
                process_cpu_ms=lambda _pid: 0,
            ),
            # No limit in reach: what the guard does to executors the world does by itself.
            memory_guard=MemoryGuard(
                self.adapter,
                PlentyOfMemory(),
                MemoryLimits(limit_bytes=1 << 60, recycle_bytes=1 << 60, recycle_calls=0),
                self.clock,
            ),
            now_ms=self.clock,
        )

    def _draw_jobs(self) -> list[Job]:
        rng = self.rng
        jobs = []
        for number in range(rng.choice((1, 2, 5))):
            name = f"j{number}"
            calls = [
                self.program.spec(index, rng.randrange(LEVELS), rng.randrange(self.program.args))
                for index in range(rng.choice((0, 3, 12, 25)))
            ]
            spec = TaskSpec(
                task_id=f"{name}@1",
                job_name=name,
                instance_id=f"i{number % 3}",
                weight=rng.choice((1, 3)),
                failure_policy=rng.choice((*[FailurePolicy.CONTINUE] * 6, *FailurePolicy)),
                failure_ratio_max=0.3,
                failure_calls_min=4,
                attempts_max=rng.choice((1, 3)),
                base_backoff_ms=rng.choice((0, 200)),
                deadline_ms=self.now_ms + rng.choice((300, 5_000)) if rng.random() < 0.1 else 0,
            )
            kind = WholeListJob if rng.random() < 0.1 else Job
            jobs.append(kind(self, spec, calls))
        return jobs

    # What the parts of the world use -------------------------------------------------------------

    def clock(self) -> int:
        return self.now_ms

    def after(self, delay_ms: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._moments, (self.now_ms + delay_ms, self.next_number(), action))

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def count(self, name: str) -> None:
        self.counts[name] += 1

    def hop_ms(self) -> int:
        return self.rng.randrange(self._hop_max + 1)

    def step_ms(self) -> int:
        return self.rng.randrange(self._step_max + 1)

    def io_ms(self) -> int:
        return self.rng.randrange(self._io_max + 1)

    def fault(self, kind: str) -> bool:
        """Whether this fault happens here and now."""
        rate = 0.0 if self.is_peace else self.rates.get(kind, 0.0)
        if rate and self.rng.random() < rate:
            self.counts[kind] += 1
            return True
        return False

    def fault_in(self, process: Process) -> None:
        """A fault of a process as a whole, before one of its steps."""
        for kind, action in ACTIONS.items():
            if process.is_alive and self.fault(kind):
                action(process)

    def connect(self, executor_id: str, pid: int) -> MemorySocket:
        sock = MemorySocket(self.fds.next(), pid, self._buffer_bytes)
        self.reactor.files[sock.fd] = sock
        self.listeners[executor_id].backlog.append(sock)
        return sock

    def entry_of(self, job: Job) -> _TaskEntry:
        """What the orchestrator would keep of a task that was opened by ``OpenTask``."""
        from tests.sim.program import View

        return _TaskEntry(View(), job, {})

    def attempt_arrived(self, process: Process, order: ExecuteCall) -> None:
        """An executor was told to run a call: no other living one may still run it."""
        call_id, attempt_seq = order.call_id, order.payload.attempt_seq
        before = self.resident.get(call_id)
        if before is not None:
            other, older_seq = before
            assert attempt_seq > older_seq, f"{call_id} was started twice"
            still = other.is_alive and call_id in other.contexts
            assert not still, f"{call_id} runs twice"
        self.resident[call_id] = (process, attempt_seq)

    def body_started(self, order: ExecuteCall) -> None:
        self.bodies[order.call_id] += 1

    # Running ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Both phases, then the comparison with the plain model."""
        self.orchestrator.run()
        self.pool.start()
        for job in self.jobs:
            self.after(self.rng.choice((0, 0, 500)), job.start)
        self._plan_cancellations()
        war_ms = self.rng.choice((200, 3_000, 20_000)) if self.rates or self.recycles else 0
        self._run_until(self.now_ms + war_ms)
        self.is_peace = True
        self._run_until(self.now_ms + PEACE_MS)
        self._check_end()

    def _plan_cancellations(self) -> None:
        rng = self.rng
        if self.cancel_tasks:
            for job in self.jobs:
                delay_ms, drain = rng.choice((0, 20, 300, 3_000)), rng.random() < 0.4
                action = (
                    (lambda job=job: self.reactor.post(TaskRemoved(job.task_id)))
                    if rng.random() < 0.1
                    else (lambda job=job, drain=drain: job.cancel(drain=drain))
                )
                self.after(delay_ms, action)
        if self.cancel_calls:
            for _ in range(10):
                self.after(rng.randrange(2_000), self._cancel_some_call)
        if self.recycles:
            for _ in range(3):
                self.after(rng.randrange(5_000), self._recycle_some_slot)

    def _cancel_some_call(self) -> None:
        calls = list(self.core.state.calls)
        if calls:
            self.reactor.post(CallCancelled(self.rng.choice(calls), self.now_ms))

    def _recycle_some_slot(self) -> None:
        self.pool.recycle(self.rng.randrange(len(self.pool.slots)))

    def _run_until(self, end_ms: int) -> None:
        moments, reactor = self._moments, self.reactor
        while moments and moments[0][0] <= end_ms and not self.is_over:
            self.now_ms = moments[0][0]
            while moments and moments[0][0] == self.now_ms:
                heapq.heappop(moments)[2]()
            while reactor.inbox or reactor.ready():
                self.counts["turns"] += 1
                assert self.counts["turns"] < TURNS_MAX, "no progress"
                reactor.turn(self._order)
                self._check_turn()
        if not self.is_over:
            self.now_ms = max(self.now_ms, end_ms) if not moments else self.now_ms

    def _order(self, fds: list[int]) -> list[int]:
        self.rng.shuffle(fds)
        return fds

    @property
    def is_over(self) -> bool:
        """All jobs have ended, were removed, and nothing is left to clean up."""
        return (
            self.is_peace
            and not self.core.state.tasks
            and all(job.finish for job in self.jobs)
            and not self.reactor.inbox
            and not any(e.reservations for e in self.adapter.attached_executors())
        )

    # Checks -------------------------------------------------------------------------------------

    def _check_turn(self) -> None:
        """Core and adapter agree on who is where; cancelled calls leave in time."""
        assert_all(self.core)
        assert not self.core.has_more
        self.node.check_open()
        views = self.core.state.views
        for executor in self.adapter.attached_executors():
            view = views.by_id.get(executor.executor_id)
            live = {
                call_id: r.attempt_seq
                for call_id, r in executor.reservations.items()
                if not r.draining_since_ms
            }
            bound = {}
            if view is not None and view.incarnation_id == executor.incarnation_id:
                bound = {call_id: call.attempt_seq for call_id, call in view.calls.items()}
            assert live == bound, f"{executor.executor_id}: {live} is not {bound}"
            roots = sum(r.is_root for r in executor.reservations.values())
            assert roots <= self.inflight_max, "more root calls than places"
            alone = view is not None and any(call.quarantined for call in view.calls.values())
            assert not alone or roots == 1, "a suspected call has company"
            draining = [
                r for r in executor.reservations.values() if r.draining_since_ms and r.is_root
            ]
            assert executor.draining_roots == len(draining)
            for reservation in executor.reservations.values():
                since_ms = reservation.draining_since_ms
                late = since_ms and self.now_ms - since_ms > DRAINING_MS_MAX
                assert not late or executor.lost_because, "a cancelled call keeps its place"

    def _check_end(self) -> None:
        left = {c.call_id: c.state for c in self.core.state.calls.values()}
        assert self.is_over, f"no end: {left}, {[j.task_id for j in self.jobs if not j.finish]}"
        state = self.core.state
        assert not state.calls
        assert not state.parked
        assert not [c for c in state.quarantine if c.state is not CallState.DONE]
        assert not any(view.calls or view.reserved for view in state.views.all_views())
        assert not state.turns.instances
        for job in self.jobs:
            job.check_end()
            for call_id, result in job.results.items():
                self._check_result(job, call_id, result)

    def _check_result(self, job: Job, call_id: str, result: Any) -> None:
        spec = job.calls[call_id]
        level, arg = level_of(spec.function.function_id), int(spec.args[1:-1])
        if result.via is Via.SINGLEFLIGHT and result.error is not None:
            # A shared output can be the one too many, too.
            may_share = {*FOLLOWERS_SHARE, ErrorKind.OUTPUT_BYTES_EXCEEDED}
            assert result.error.kind in may_share, f"{call_id} shared {result.error.kind}"
        assert result.via is not Via.NOT_RUN or result.error is not None, call_id
        if result.error is None:
            assert result.output == self.program.output(level, arg), call_id
            assert not self.program.is_exact or self.program.outcome(level, arg) == result.output
            return
        allowed = self._allowed_failures(job)
        if result.error.kind in allowed:
            return
        if self.program.is_exact:
            assert result.error.kind == self.program.outcome(level, arg), call_id

    def _allowed_failures(self, job: Job) -> set[ErrorKind]:
        """Failures that are not the function's own but come of what happens in this world."""
        allowed: set[ErrorKind] = set()
        if self.rates or self.recycles:
            # A sub-call that met a fault fails its parent.
            allowed |= INFRASTRUCTURE | {ErrorKind.SUBCALL_FAILED}
        if "impatient" in self.rates:
            allowed |= {ErrorKind.DEADLINE_EXCEEDED}
        if self.cancel_calls:
            allowed |= {ErrorKind.CANCELLED, ErrorKind.SUBCALL_FAILED, *INFRASTRUCTURE}
        if job.spec.deadline_ms:
            allowed |= {ErrorKind.DEADLINE_EXCEEDED}
        assert job.finish is not None
        if self.cancel_tasks:
            allowed |= {ErrorKind.TASK_CANCELLED}
        if job.finish.end is TaskEnd.STOPPED:
            allowed |= {ErrorKind.CANCELLED}
        if self.config.max_collected_output_bytes:
            allowed |= {ErrorKind.OUTPUT_BYTES_EXCEEDED}
        if any(j.cancelled_ms or j.spec.deadline_ms for j in self.jobs):
            allowed |= INFRASTRUCTURE  # an executor that a cancelled call held was killed
        return allowed
