"""What must hold between two events: one named check for each invariant.

Used by tests after every event, by the simulation, and by debug runs; never on the path of a production
run (each check is linear in the calls in memory). A check that fails is our bug; its message names the
call and tells its story. They read the core, they never change it.
"""

from blockx.dispatcher.core import DispatcherCore
from blockx.dispatcher.model import Call, CallCounts, CallState, Task, root_of
from blockx.dispatcher.singleflight import leader_of, needs_place
from blockx.dispatcher.state import CoreState
from blockx.errors import MOVES_MAX

BOUND = (CallState.RUNNING, CallState.WAITING)


def assert_all(core: DispatcherCore) -> None:
    """Run every check."""
    for check in CHECKS:
        check(core.state)


def a_call_is_bound_exactly_if_running_or_waiting(state: CoreState) -> None:
    for call in state.calls.values():
        assert (call.view is not None) == (call.state in BOUND), _told(state, call)


def no_finished_call_stays_in_memory(state: CoreState) -> None:
    for call in state.calls.values():
        assert call.state is not CallState.DONE, _told(state, call)


def views_and_calls_agree(state: CoreState) -> None:
    bound = {c.call_id: c.view for c in state.calls.values() if c.view is not None}
    seen = {c.call_id: v for v in state.views.all_views() for c in v.calls.values()}
    assert bound == seen
    for view in state.views.all_views():
        roots = [c for c in view.calls.values() if c.parent is None]
        assert view.inflight == len(roots), view.executor_id
        assert view.load >= 0, view.executor_id


def ranks_of_untouched_views_are_current(state: CoreState) -> None:
    for view in state.views.by_id.values():
        assert view.touched or view.rank == state.views.rank(view), view.executor_id


def tasks_and_calls_agree(state: CoreState) -> None:
    roots = {c.call_id: c for c in state.calls.values() if c.parent is None}
    live = {c.call_id: c for t in state.tasks.values() for c in t.live.values()}
    assert roots == live
    for task in state.tasks.values():
        bound = [c for c in task.live.values() if c.view is not None]
        waiting = [c for c in bound if c.state is CallState.WAITING]
        assert task.inflight == len(bound), task.spec.task_id
        assert task.waiting == len(waiting), task.spec.task_id


def instances_count_the_calls_of_their_tasks(state: CoreState) -> None:
    expected = dict.fromkeys(state.turns.instances, 0)
    for task in state.tasks.values():
        if task.instance is not None:
            expected[task.instance.instance_id] += task.inflight
    assert {k: v.inflight for k, v in state.turns.instances.items()} == expected


def no_task_is_over_its_window(state: CoreState) -> None:
    for task in state.tasks.values():
        assert task.inflight <= state.config.task_max_inflight_calls, task.spec.task_id


def no_more_tasks_take_part_than_there_are_slots(state: CoreState) -> None:
    active = [t for t in state.tasks.values() if t.instance is not None]
    assert len(active) == state.turns.active_count <= state.turns.slots_max


def a_ready_root_call_waits_in_exactly_one_place(state: CoreState) -> None:
    queued: dict[str, int] = {}
    for task in state.tasks.values():
        for call in task.ready:
            queued[call.call_id] = queued.get(call.call_id, 0) + 1
    for call in state.quarantine:
        if call.quarantined and call.state is CallState.READY:
            queued[call.call_id] = queued.get(call.call_id, 0) + 1
    for call in state.calls.values():
        if call.parent is not None:
            continue
        if call.quarantined and call.state is CallState.READY:
            assert call in state.quarantine, _told(state, call)
        places = queued.pop(call.call_id, 0) + call.backing_off + (leader_of(call) is not None)
        assert places == (call.state is CallState.READY), _told(state, call)
    assert not queued, "calls in a queue that are not in memory"


def a_ready_subcall_is_parked_or_follows(state: CoreState) -> None:
    for call in state.calls.values():
        if call.parent is not None:
            places = (call.call_id in state.parked) + (leader_of(call) is not None)
            assert places == (call.state is CallState.READY), _told(state, call)
    assert not state.promoted
    assert all(call_id in state.calls for call_id in state.parked)


def a_task_with_work_and_room_has_a_turn(state: CoreState) -> None:
    for task in state.tasks.values():
        if task.instance is None or task.finished:
            assert not task.has_turn, task.spec.task_id
            continue
        assert task.has_turn == (task in task.instance.turns), task.spec.task_id
        room = task.inflight < state.config.task_max_inflight_calls
        if task.ready and room and task.end is None:
            assert task.has_turn, task.spec.task_id


def leaders_and_followers_agree(state: CoreState) -> None:
    for task in state.tasks.values():
        for key, lead in task.flights.items():
            assert state.calls.get(lead.call_id) is lead, _told(state, lead)
            assert lead.key == key, _told(state, lead)
            assert leader_of(lead) is None, _told(state, lead)
    for call in state.calls.values():
        leader = leader_of(call)
        if leader is not None:
            assert call.task.flights.get(call.key) is leader, _told(state, call)
            assert call.state is CallState.READY, _told(state, call)
        if call.flight is not None:
            flight = call.flight
            followers = flight.roots if call.parent is None else flight.subcalls
            assert (call.call_id in followers) == (leader is not None), _told(state, call)


def no_subcall_waits_for_a_call_that_needs_a_place(state: CoreState) -> None:
    for call in state.calls.values():
        leader = leader_of(call)
        if call.parent is not None and leader is not None:
            assert not needs_place(leader), _told(state, call)


def waits_form_no_circle(state: CoreState) -> None:
    for start in state.calls.values():
        seen = {id(root_of(start))}
        waits_for = leader_of(_lowest(root_of(start)))
        while waits_for is not None:
            root = root_of(waits_for)
            assert id(root) not in seen, _told(state, start)
            seen.add(id(root))
            waits_for = leader_of(_lowest(root))


def a_subcall_is_its_bound_parents_only_child(state: CoreState) -> None:
    for call in state.calls.values():
        if call.child is not None:
            assert state.calls.get(call.child.call_id) is call.child, _told(state, call)
        parent = call.parent
        if parent is None:
            continue
        assert parent.child is call, _told(state, call)
        assert parent.view is not None, _told(state, call)
        assert call.view is None or call.view is parent.view, _told(state, call)
        assert call.depth == parent.depth + 1 <= state.config.max_subcall_depth


def attempts_and_moves_are_within_their_limits(state: CoreState) -> None:
    for call in state.calls.values():
        attempts_max = call.task.spec.attempts_max if call.parent is None else 1
        assert 0 <= call.attempts <= attempts_max, _told(state, call)
        assert 0 <= call.bystander_moves <= call.moves, _told(state, call)
        assert call.moves - call.bystander_moves <= MOVES_MAX, _told(state, call)
        assert call.attempts <= call.attempt_seq, _told(state, call)


def stream_batches_count_their_live_calls(state: CoreState) -> None:
    for task in state.tasks.values():
        counted: dict[int, int] = {}
        for call in task.live.values():
            if call.batch_id >= 0:
                counted[call.batch_id] = counted.get(call.batch_id, 0) + 1
        assert task.open_batches == counted, task.spec.task_id


def counts_add_up(state: CoreState) -> None:
    for task in state.tasks.values():
        for counts in (task.counts, task.subcalls):
            _assert_adds_up(task, counts)


def the_cache_is_within_its_limit(state: CoreState) -> None:
    for task in state.tasks.values():
        cache = task.cache
        assert cache.counted_bytes() == cache.bytes_used <= cache.bytes_max, task.spec.task_id


def at_most_one_executor_is_reserved_and_holds_one_root(state: CoreState) -> None:
    reserved = [v for v in state.views.all_views() if v.reserved]
    assert reserved == ([] if state.views.reserved is None else [state.views.reserved])
    for view in reserved:
        assert not view.open, view.executor_id
        alone = [c for c in view.calls.values() if c.parent is None and c.quarantined]
        assert not alone or view.inflight == 1, view.executor_id


def a_finished_task_holds_nothing(state: CoreState) -> None:
    for task in state.tasks.values():
        if task.finished:
            assert task.instance is None, task.spec.task_id
            assert not task.live, task.spec.task_id
            assert not task.ready, task.spec.task_id
            assert not task.flights, task.spec.task_id
            assert not task.open_batches, task.spec.task_id
            assert not task.settled_batches, task.spec.task_id
            assert len(task.cache) == 0, task.spec.task_id
            assert not task.production_open, task.spec.task_id


CHECKS = (
    a_call_is_bound_exactly_if_running_or_waiting,
    no_finished_call_stays_in_memory,
    views_and_calls_agree,
    ranks_of_untouched_views_are_current,
    tasks_and_calls_agree,
    instances_count_the_calls_of_their_tasks,
    no_task_is_over_its_window,
    no_more_tasks_take_part_than_there_are_slots,
    a_ready_root_call_waits_in_exactly_one_place,
    a_ready_subcall_is_parked_or_follows,
    a_task_with_work_and_room_has_a_turn,
    leaders_and_followers_agree,
    no_subcall_waits_for_a_call_that_needs_a_place,
    waits_form_no_circle,
    a_subcall_is_its_bound_parents_only_child,
    attempts_and_moves_are_within_their_limits,
    stream_batches_count_their_live_calls,
    counts_add_up,
    the_cache_is_within_its_limit,
    at_most_one_executor_is_reserved_and_holds_one_root,
    a_finished_task_holds_nothing,
)


def _lowest(root: Call) -> Call:
    call = root
    while call.child is not None:
        call = call.child
    return call


def _assert_adds_up(task: Task, counts: CallCounts) -> None:
    assert counts.calls == counts.ok + counts.failed, task.spec.task_id
    ways = counts.ran + counts.cached + counts.singleflight + counts.not_run
    assert counts.calls == ways, task.spec.task_id


def _told(state: CoreState, call: Call) -> str:
    return f"{call.call_id} is {call.state.name}: {state.story.of(call.call_id)}"
