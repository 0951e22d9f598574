"""DispatcherCore: one event in, a list of commands out. The Sans-IO heart of the main process.

Law: no clock, thread, socket or log; time comes with the events, chance from the generator handed in.
Only the actor thread calls it. Handlers read top to bottom: fence (drop what is stale, counted),
account, move, order. The caller performs the commands of one answer in list order, before the next event.

After each group of events the caller asks ``dispatch`` (admission, as far as it goes) and then ``flush``
(ends of tasks; nothing else converges them). The answers to bind orders come back as events, so the
caller repeats both until nothing is left to perform.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from blockx.config import DispatcherConfig
from blockx.dispatcher import outcomes, singleflight, subcalls, transitions
from blockx.dispatcher.admission import TurnOrder
from blockx.dispatcher.cache import ResultCache
from blockx.dispatcher.commands import (
    ArmRetry,
    Command,
    FinishTask,
    ReturnCredit,
    StartAttempt,
    StopProduction,
)
from blockx.dispatcher.events import (
    AttemptCompleted,
    AttemptFailed,
    BindFailed,
    CallBound,
    CallCancelled,
    CallResumed,
    CallsSubmitted,
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
    TaskRemoved,
)
from blockx.dispatcher.model import (
    Call,
    CallCounts,
    CallError,
    CallSpec,
    CallState,
    ExecutorView,
    Task,
    TaskEnd,
    TaskSpec,
    Via,
    root_of,
)
from blockx.dispatcher.selection import ExecutorViews
from blockx.dispatcher.state import CoreState, Move
from blockx.errors import MOVES_MAX, ErrorKind

READY, RUNNING, WAITING, DONE = (
    CallState.READY,
    CallState.RUNNING,
    CallState.WAITING,
    CallState.DONE,
)

ADMISSIONS_MAX = 1_024
"""Admissions of one ``dispatch``: 3 to 6 ms of work. Full: it sets ``has_more`` and returns, so that a
long run of cached calls holds up neither sockets nor timers."""
SUSPICION_MAX = 2
"""Executors that died under a call; from here on its last permitted attempt runs alone."""


class DispatcherCore:
    """The global scheduler of this main process.

    ``stall_timeout_ms``: an executor whose running call held it longer gets no more calls. 0: never.
    ``task_slots``: tasks that take part at once; further ones wait.
    """

    __slots__ = ("_handlers", "has_more", "state")

    def __init__(
        self,
        config: DispatcherConfig,
        *,
        stall_timeout_ms: int,
        rng: random.Random,
        task_slots: int = 32,
    ) -> None:
        self.state = CoreState(
            config=config,
            rng=rng,
            views=ExecutorViews(config, stall_timeout_ms, rng),
            turns=TurnOrder(config, task_slots),
        )
        self.has_more = False
        """The last ``dispatch`` stopped at ``ADMISSIONS_MAX``: ask again in the next turn of the loop."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            CallsSubmitted: self._on_calls_submitted,
            StreamOpened: self._on_stream_opened,
            StreamBatchSubmitted: self._on_stream_batch_submitted,
            ProductionEnded: self._on_production_ended,
            CallBound: self._on_call_bound,
            BindFailed: self._on_bind_failed,
            CallSuspended: self._on_call_suspended,
            CallResumed: self._on_call_resumed,
            AttemptCompleted: self._on_attempt_completed,
            AttemptFailed: self._on_attempt_failed,
            SubcallRequested: self._on_subcall_requested,
            SnapshotUpdated: self._on_snapshot_updated,
            ExecutorLost: self._on_executor_lost,
            RetryDue: self._on_retry_due,
            TaskCancelled: self._on_task_cancelled,
            CallCancelled: self._on_call_cancelled,
            TaskRemoved: self._on_task_removed,
        }

    # What the shell asks -----------------------------------------------------------------------

    def handle(self, event: Event) -> list[Command]:
        """Apply one event."""
        state = self.state
        self._handlers[type(event)](event)
        if state.promoted:
            subcalls.start_promoted(state)
        commands, state.out = state.out, []
        return commands

    def dispatch(self, now_ms: int) -> list[Command]:
        """Admit calls as far as executors, windows and slots allow; at most ``ADMISSIONS_MAX``."""
        state = self.state
        if 0 < state.first_deadline_ms <= now_ms:
            self._stop_overdue(now_ms)
        if state.quarantine or state.views.reserved is not None:
            self._place_quarantined()
        turns = state.turns
        self.has_more = False
        for _ in range(ADMISSIONS_MAX):
            task = turns.next_task()
            if task is None or not self._admit_next(task):
                break
            turns.end_turn(task)
        else:
            self.has_more = True
        return state.take()

    def flush(self) -> list[Command]:
        """Converge tasks: stop production, drain, give back credits, finish; in this order for each."""
        state = self.state
        while state.dirty:
            for task in list(state.dirty.values()):
                self._converge(task)
                state.dirty.pop(task.spec.task_id, None)
        if state.promoted:
            subcalls.start_promoted(state)
        return state.take()

    def tick(self, now_ms: int) -> list[Command]:
        """Stop the tasks whose deadline has passed, and flush."""
        if 0 < self.state.first_deadline_ms <= now_ms:
            self._stop_overdue(now_ms)
        return self.flush()

    @property
    def counters(self) -> dict[str, int]:
        """Stale input, by name."""
        return self.state.counters

    def gauges(self, task_id: str) -> tuple[int, int, int]:
        """(ready, running, waiting) root calls of a task; zeros for one that is not known."""
        task = self.state.tasks.get(task_id)
        if task is None:
            return 0, 0, 0
        return len(task.live) - task.inflight, task.inflight - task.waiting, task.waiting

    def story(self, call_id: str) -> list[Move]:
        """The remembered moves of a call, oldest first: (call id, cause, from, to)."""
        return self.state.story.of(call_id)

    # Production --------------------------------------------------------------------------------

    def _on_calls_submitted(self, event: CallsSubmitted) -> None:
        task = self._open(event.task)
        self._add(task, event.calls, -1)
        task.production_open = False

    def _on_stream_opened(self, event: StreamOpened) -> None:
        self._open(event.task)

    def _on_stream_batch_submitted(self, event: StreamBatchSubmitted) -> None:
        task = self.state.tasks.get(event.task_id)
        if task is None or task.finished:
            self.state.count("stale_stream_batch_submitted")
            return
        assert task.production_open, (
            f"stream batch {event.batch_id} after the end of {event.task_id}"
        )
        if event.calls:
            task.open_batches[event.batch_id] = len(event.calls)
        else:
            task.settled_batches.append(event.batch_id)
        self._add(task, event.calls, event.batch_id)

    def _on_production_ended(self, event: ProductionEnded) -> None:
        task = self.state.tasks.get(event.task_id)
        if task is None or not task.production_open:
            self.state.count("stale_production_ended")
            return
        task.production_open = False
        self.state.dirty[event.task_id] = task

    def _open(self, spec: TaskSpec) -> Task:
        state = self.state
        assert spec.task_id not in state.tasks, f"task {spec.task_id} is open already"
        cache_bytes = state.config.call_cache_max_bytes if state.config.share_results else 0
        task = Task(spec, ResultCache(cache_bytes))
        state.tasks[spec.task_id] = task
        state.turns.add(task)
        if spec.deadline_ms and not 0 < state.first_deadline_ms <= spec.deadline_ms:
            state.first_deadline_ms = spec.deadline_ms
        return task

    def _add(self, task: Task, specs: Sequence[CallSpec], batch_id: int) -> None:
        """Register root calls. A task that stops takes them too: each gets its one result in the flush."""
        state = self.state
        calls, live, ready = state.calls, task.live, task.ready
        prefix = task.spec.job_name + "/"
        budget_ms = task.spec.call_budget_ms
        seq = state.call_seq
        for spec in specs:
            seq += 1
            call_id = prefix + str(spec.index)
            call = Call(
                call_id,
                seq,
                task,
                spec.index,
                spec.function,
                spec.args,
                spec.key,
                budget_ms,
                batch_id,
            )
            assert call_id not in calls, f"call {call_id} is there already"
            calls[call_id] = live[call_id] = call
            ready.append(call)
        state.call_seq = seq
        state.turns.wake(task)
        state.dirty[task.spec.task_id] = task

    # Admission ---------------------------------------------------------------------------------

    def _admit_next(self, task: Task) -> bool:
        """One step with the call at the head of a task; False: no executor is eligible.

        Shared results come first: they need no executor. Then the executor is chosen, and the call
        leads its key; equal calls right behind it follow in the same pass.
        """
        state = self.state
        ready = task.ready
        call = ready[0]
        share = state.config.share_results
        if share and self._answer_from_others(call):
            ready.popleft()
            return True
        if self._is_suspect(call):
            ready.popleft()
            if share:
                task.flights[call.key] = call
            call.quarantined = True
            state.quarantine.append(call)
            self._place_quarantined()
            return True
        view = state.views.select()
        if view is None:
            return False
        ready.popleft()
        if share:
            key = call.key
            task.flights[key] = call
            transitions.bind(state, call, view, "")
            while ready and ready[0].key == key:
                singleflight.follow(ready.popleft(), call)
        else:
            transitions.bind(state, call, view, "")
        return True

    def _answer_from_others(self, call: Call) -> bool:
        """Cache hit, or follower of an equal call; False: it has to run."""
        task = call.task
        output = task.cache.get(call.key)
        if output is not None:
            transitions.move(call, DONE, "cached", self.state.story)
            outcomes.settle(self.state, call, output, None, Via.CACHED)
            return True
        leader = task.flights.get(call.key)
        if leader is None or leader is call:
            return False
        singleflight.follow(call, leader)
        return True

    @staticmethod
    def _is_suspect(call: Call) -> bool:
        return call.suspicion >= SUSPICION_MAX and call.attempts == call.task.spec.attempts_max - 1

    def _place_quarantined(self) -> None:
        """Give the first suspected call an executor of its own: reserve one, wait until it is empty.

        One at a time, so that suspected calls of one job cannot reserve every executor; the others of
        the queue wait, everyone else goes on elsewhere. With a single executor all wait until it is
        empty: that ends, since it gets nothing new.
        """
        state = self.state
        queue, views = state.quarantine, state.views
        while queue and not self._waits_in_quarantine(queue[0]):
            queue.popleft()
        if not queue:
            if views.reserved is not None and not _is_in_use(views.reserved):
                views.unreserve()
            return
        call = queue[0]
        if call.task.inflight >= state.config.task_max_inflight_calls:
            return
        view = views.reserve()
        if view is None or view.calls or view.draining or view.residue:
            return  # it is not empty yet
        if not view.fit or view.refused:
            return
        queue.popleft()
        transitions.bind(state, call, view, "")

    def _waits_in_quarantine(self, call: Call) -> bool:
        """Whether it still needs an executor of its own; if it does not, it waits elsewhere now.

        It was drained; or its task stops, and it waits for that; or an equal sub-call has taken the lead
        meanwhile, and it follows that one or has its output already.
        """
        if call.state is not READY:
            return False
        if call.task.end is not None:
            call.quarantined = False
            outcomes.make_ready(self.state, call)
            return False
        if self.state.config.share_results and self._answer_from_others(call):
            call.quarantined = False
            return False
        return True

    # Attempts ----------------------------------------------------------------------------------

    def _on_call_bound(self, event: CallBound) -> None:
        state = self.state
        call = state.attempt(event.call_id, event.attempt_seq, "stale_call_bound")
        if call is None:
            return
        assert call.view is not None
        if call.started or call.view.executor_id != event.executor_id:
            state.count("stale_call_bound")
            return
        call.started = True
        spec = call.task.spec
        state.out.append(
            StartAttempt(
                call.call_id,
                call.attempt_seq,
                event.executor_id,
                spec.task_id,
                call.function,
                call.args,
                call.parent.call_id if call.parent is not None else "",
                call.budget_ms,
                spec.deadline_ms,
                call.call_seq,
            )
        )

    def _on_bind_failed(self, event: BindFailed) -> None:
        """No place after all: roll the attempt back, free of charge.

        A root call is retried through the timer, with no delay: the answer to ``BindCall`` comes in the
        same turn of the loop, and going straight to ready would bind again within it, for ever.
        """
        state = self.state
        call = state.attempt(event.call_id, event.attempt_seq, "stale_bind_failed")
        if call is None:
            return
        view = call.view
        assert view is not None
        if call.started or view.executor_id != event.executor_id:
            state.count("stale_bind_failed")
            return
        outcomes.end_attempt(state, call, READY, "bind failed")
        if call.parent is not None:
            call.attempts -= 1
            state.parked[call.call_id] = call
            return
        state.views.refuse(view)
        error = CallError(
            ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED,
            f"no executor had a place for it {MOVES_MAX} times",
        )
        if outcomes.use_move(state, call, error):
            outcomes.hand_over_lead(state, call)
            call.backing_off = True
            state.out.append(ArmRetry(call.call_id, call.attempt_seq, 0))

    def _on_call_suspended(self, event: CallSuspended) -> None:
        call = self.state.attempt(event.call_id, event.attempt_seq, "stale_call_suspended")
        if call is None:
            return
        if call.state is not RUNNING or not call.started:
            self.state.count("stale_call_suspended")
            return
        transitions.suspend(self.state, call)

    def _on_call_resumed(self, event: CallResumed) -> None:
        call = self.state.attempt(event.call_id, event.attempt_seq, "stale_call_resumed")
        if call is None:
            return
        if call.state is not WAITING:
            self.state.count("stale_call_resumed")
            return
        transitions.resume(self.state, call)

    def _on_attempt_completed(self, event: AttemptCompleted) -> None:
        state = self.state
        call = state.attempt(event.call_id, event.attempt_seq, "stale_attempt_completed")
        if call is None:
            return
        outcomes.account_attempt(state, call, event)
        outcomes.end_attempt(state, call, DONE, "completed")
        call.task.cache.put(call.key, event.output)
        outcomes.settle(state, call, event.output, None)

    def _on_attempt_failed(self, event: AttemptFailed) -> None:
        state = self.state
        call = state.attempt(event.call_id, event.attempt_seq, "stale_attempt_failed")
        if call is None:
            return
        outcomes.account_attempt(state, call, event)
        view = call.view
        outcomes.end_attempt(state, call, READY, "attempt failed")
        if event.error.kind is ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED:
            assert view is not None
            state.views.refuse(view)
        outcomes.retry_or_settle(state, call, event.error)

    def _on_retry_due(self, event: RetryDue) -> None:
        call = self.state.calls.get(event.call_id)
        if call is None or not call.backing_off or call.attempt_seq != event.attempt_seq:
            self.state.count("stale_retry_due")
            return
        call.backing_off = False
        outcomes.make_ready(self.state, call)

    def _on_subcall_requested(self, event: SubcallRequested) -> None:
        state = self.state
        parent = state.attempt(event.parent_call_id, event.attempt_seq, "stale_subcall_requested")
        if parent is None:
            return
        assert parent.view is not None
        if not parent.started or parent.view.executor_id != event.executor_id:
            state.count("stale_subcall_requested")
            return
        subcalls.request(state, parent, event)

    # Executors ---------------------------------------------------------------------------------

    def _on_snapshot_updated(self, event: SnapshotUpdated) -> None:
        state = self.state
        for snapshot in event.snapshots:
            if not state.views.update(snapshot):
                state.count("stale_snapshot_updated")
        subcalls.start_parked(state)

    def _on_executor_lost(self, event: ExecutorLost) -> None:
        """Exact blame: the root of the running call is charged, all others there move free.

        First everything leaves the dead executor, then each root is dealt with, the blamed one last:
        no decision sees a half-emptied executor. Free movers keep their order at the front.
        """
        state = self.state
        view = state.views.lose(event.executor_id, event.incarnation_id)
        if view is None:
            state.count("stale_executor_lost")
            return
        bound = list(view.calls.values())
        running = None
        if event.running_call_seq:
            running = next((c for c in bound if c.call_seq == event.running_call_seq), None)
        blamed = None
        if running is not None:
            running.body_started = True
            blamed = root_of(running)
        roots = [call for call in bound if call.parent is None]
        roots.sort(key=_newest_first)
        for root in roots:
            state.turns.charge_estimate(root.task)
            outcomes.end_attempt(state, root, READY, "executor lost", abort=False)
        is_charged = blamed is not None and not self._is_free_death(blamed, event)
        move = outcomes.move_bystander if is_charged else outcomes.move_free
        for root in roots:
            if root is not blamed:
                move(state, root, _bystander_error(event))
        if running is not None and blamed is not None:
            self._charge(blamed, running, event)

    @staticmethod
    def _is_free_death(root: Call, event: ExecutorLost) -> bool:
        return event.free_of_charge and root.free_deaths == 0

    def _charge(self, root: Call, running: Call, event: ExecutorLost) -> None:
        under = (
            "" if running is root else f", called by {root.function.function_id} ({root.call_id})"
        )
        error = CallError(
            event.kind,
            f"{event.executor_id} ended while function {running.function.function_id} "
            f"({running.call_id}) ran{under}: {event.detail}",
        )
        if self._is_free_death(root, event):
            root.free_deaths = 1
            outcomes.move_free(self.state, root, error)
            return
        root.suspicion += 1
        outcomes.retry_or_settle(self.state, root, error)

    # Ends of tasks -----------------------------------------------------------------------------

    def _on_task_cancelled(self, event: TaskCancelled) -> None:
        task = self.state.tasks.get(event.task_id)
        if task is None or task.finished:
            self.state.count("stale_task_cancelled")
            return
        self._cancel(task, abort=not event.drain)

    def _on_call_cancelled(self, event: CallCancelled) -> None:
        """End one call at once, in flight or waiting; who followed it is led by the next one."""
        state = self.state
        call = state.calls.get(event.call_id)
        if call is None:
            state.count("stale_call_cancelled")
            return
        error = CallError(ErrorKind.CANCELLED, "the call was cancelled")
        if call.view is not None:
            outcomes.abort_attempt(state, call, error.kind.value)
            outcomes.settle(state, call, None, error)
            return
        waits_elsewhere = (
            call.parent is not None
            or call.backing_off
            or call.quarantined
            or singleflight.leader_of(call) is not None
        )
        if not waits_elsewhere:
            call.task.ready.remove(call)
        outcomes.leave_ready(state, call)
        outcomes.finish_ready(state, call, None, error, "cancelled")

    def _on_task_removed(self, event: TaskRemoved) -> None:
        """Forget a task; one that has not ended is cancelled at once and forgotten when it has."""
        task = self.state.tasks.get(event.task_id)
        if task is None:
            self.state.count("stale_task_removed")
            return
        if task.finished:
            del self.state.tasks[event.task_id]
            return
        task.remove_when_finished = True
        task.production_open = False
        self._cancel(task, abort=True)

    def _cancel(self, task: Task, *, abort: bool) -> None:
        error = CallError(ErrorKind.TASK_CANCELLED, "the task was cancelled")
        outcomes.stop_task(self.state, task, TaskEnd.CANCELLED, error, error, abort=abort)

    def _stop_overdue(self, now_ms: int) -> None:
        state = self.state
        state.first_deadline_ms = 0
        for task in state.tasks.values():
            deadline_ms = task.spec.deadline_ms
            if deadline_ms == 0 or task.finished:
                continue
            if deadline_ms <= now_ms:
                error = CallError(
                    ErrorKind.DEADLINE_EXCEEDED,
                    "the task did not end by its deadline (deadline_ms of the job)",
                )
                outcomes.stop_task(state, task, TaskEnd.CANCELLED, error, error, abort=True)
            elif not 0 < state.first_deadline_ms <= deadline_ms:
                state.first_deadline_ms = deadline_ms

    def _converge(self, task: Task) -> None:
        """Stop -> drain -> settled -> converge, as far as the task is."""
        if task.finished:
            return
        out = self.state.out
        task_id = task.spec.task_id
        if task.stop_error is not None:
            self._drain(task, task.stop_error)
        if task.settled_batches:
            out.extend([ReturnCredit(task_id, batch_id) for batch_id in task.settled_batches])
            task.settled_batches.clear()
        if task.production_open or task.live:
            return
        self._finish(task)

    def _drain(self, task: Task, stop_error: CallError) -> None:
        """A stopping task: no more production; abort what must not end; end what will not run.

        What is READY waits until nothing is in flight (spec: drainCancelledCalls), so that followers
        still share the outcome of a leader that may end.
        """
        state = self.state
        if task.production_open and not task.stop_told:
            task.stop_told = True
            state.out.append(StopProduction(task.spec.task_id, stop_error.kind.value))
        if task.abort_error is not None and task.inflight:
            for call in list(task.live.values()):
                if call.view is not None:
                    outcomes.abort_attempt(state, call, task.abort_error.kind.value)
                    outcomes.settle(state, call, None, task.abort_error)
        if task.inflight or not task.live:
            return
        for leader in task.flights.values():
            singleflight.disband(leader)
        task.flights.clear()
        task.ready.clear()
        for call in list(task.live.values()):
            outcomes.leave_ready(state, call)
            outcomes.finish_ready(state, call, None, stop_error, "task stopped")

    def _finish(self, task: Task) -> None:
        state = self.state
        task.finished = True
        task.cache.clear()
        state.turns.remove(task)
        end = task.end or TaskEnd.COMPLETED
        counts, subcall_counts = _copy(task.counts), _copy(task.subcalls)
        task_id = task.spec.task_id
        state.out.append(FinishTask(task_id, end, task.end_error, counts, subcall_counts))
        if task.remove_when_finished:
            del state.tasks[task_id]


def _is_in_use(reserved: ExecutorView) -> bool:
    """Whether a suspected call runs there; others may, from before it was reserved."""
    return any(call.quarantined for call in reserved.calls.values())


def _newest_first(call: Call) -> int:
    return -call.call_seq


def _bystander_error(event: ExecutorLost) -> CallError:
    """What a call fails with that was moved too often; until then it is only a cause."""
    return CallError(
        ErrorKind.EXECUTOR_LOST,
        f"moved {MOVES_MAX} times since its executors died, and nobody knows of what; the last was "
        f"{event.executor_id}: {event.detail}",
    )


def _copy(counts: CallCounts) -> CallCounts:
    return CallCounts(
        counts.calls,
        counts.ok,
        counts.failed,
        counts.ran,
        counts.cached,
        counts.singleflight,
        counts.not_run,
        counts.executed,
        counts.retries,
        counts.moves,
    )
