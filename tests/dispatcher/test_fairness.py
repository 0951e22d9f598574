"""Whose turn it is: round robin, max-min between instances by calls and by cost, weights, quantum."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from blockx.dispatcher.core import ADMISSIONS_MAX
from blockx.dispatcher.events import (
    AttemptCompleted,
    CallBound,
    CallCancelled,
    CallsSubmitted,
    ExecutorLost,
    SnapshotUpdated,
    StreamBatchSubmitted,
)
from blockx.dispatcher.model import Costs
from blockx.errors import ErrorKind
from tests.builders import call_spec, dispatcher_core, dummy, snapshot, task_spec
from tests.dispatcher.shell import Shell


def place_by_place(s: Shell, jobs: dict[str, dict[str, Any]], places: int) -> list[str]:
    """Submit 50 calls for each job while nothing can run, then open the places; who started."""
    for job, fields in jobs.items():
        s.submit(50, job, **fields)
    s.snapshots(snapshot(usable_contexts=places))
    return [call_id.split("/")[0] for call_id in s.started]


def test_tasks_take_turns(shell: Callable[..., Shell]) -> None:
    s = shell(executors=0)
    assert place_by_place(s, {"a": {}, "b": {}, "c": {}}, 7) == list("abcabca")


def test_without_fairness_an_instance_with_more_tasks_gets_more(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=0)
    jobs = {"a": {"instance_id": "x"}, "b": {"instance_id": "x"}, "c": {"instance_id": "y"}}
    assert place_by_place(s, jobs, 6) == list("abcabc")


def test_with_fairness_instances_get_equal_places_whatever_their_tasks(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=0, instance_fairness="calls")
    jobs = {"a": {"instance_id": "x"}, "b": {"instance_id": "x"}, "c": {"instance_id": "y"}}
    assert place_by_place(s, jobs, 8) == list("acbcacbc")


@pytest.mark.parametrize("weight", [1, 2, 3])
def test_places_are_shared_by_weight(shell: Callable[..., Shell], weight: int) -> None:
    s = shell(executors=0, instance_fairness="calls")
    started = place_by_place(s, {"a": {"weight": weight}, "b": {}}, 4 * (weight + 1))
    assert (started.count("a"), started.count("b")) == (4 * weight, 4)


def test_a_quantum_serves_one_instance_several_times_in_a_row(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=0, instance_fairness="calls", instance_fairness_quantum=3)
    assert place_by_place(s, {"a": {}, "b": {}}, 12) == list("aaabbbaaabbb")


def test_a_late_instance_catches_up_first(shell: Callable[..., Shell]) -> None:
    s = shell(executors=0, instance_fairness="calls")
    place_by_place(s, {"a": {}}, 4)
    s.submit(50, "b")
    s.snapshots(snapshot(usable_contexts=8))
    assert [i for i in s.started if i.startswith("b")] == ["b/0", "b/1", "b/2", "b/3"]


def test_a_tie_goes_to_the_instance_that_waited_longest(shell: Callable[..., Shell]) -> None:
    s = shell(executors=0, instance_fairness="calls")
    assert place_by_place(s, {"a": {}, "b": {}}, 1) == ["a"]
    order = []
    for _ in range(4):
        order.append(list(s.started)[-1])
        s.complete(order[-1])
    assert order == ["a/0", "b/0", "a/1", "b/1"]


def test_an_instance_that_has_nothing_to_run_does_not_hold_the_others_up(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=0, instance_fairness="calls", task_max_inflight_calls=2)
    assert place_by_place(s, {"a": {}, "b": {}}, 10) == list("abab")


def test_a_task_at_its_window_comes_back_when_a_call_ends(shell: Callable[..., Shell]) -> None:
    s = shell(task_max_inflight_calls=1)
    s.submit(2, "a")
    s.submit(2, "b")
    assert s.names(s.complete("a/0")) == ["EmitResult a/0", "StartAttempt a/1"]


def test_instances_are_forgotten_with_their_last_task(shell: Callable[..., Shell]) -> None:
    s = shell(instance_fairness="calls")
    s.submit(1, "a")
    s.submit(1, "b")
    s.complete("a/0")
    assert list(s.core.state.turns.instances) == ["b"]


# By cost -------------------------------------------------------------------------------------------


def shares_by_cost(
    s: Shell, costs_us: dict[str, int], places: int, rounds: int, **tasks: dict[str, Any]
) -> dict[str, int]:
    """Keep ``places`` places busy; each round ends the oldest call. Microseconds used by job."""
    s.is_checked = False
    for job in costs_us:
        s.submit(2 * rounds, job, **tasks.get(job, {}))
    s.snapshots(snapshot(usable_contexts=places))
    used = dict.fromkeys(costs_us, 0)
    running = deque(s.started)
    for _ in range(rounds):
        call_id = running.popleft()
        job = call_id.split("/")[0]
        used[job] += costs_us[job]
        before = len(s.started)
        s.complete(call_id, costs=Costs(cpu_us=costs_us[job] // 2, io_us=costs_us[job] // 2))
        running.extend(list(s.started)[before:])
    return used


def test_by_cost_instances_get_equal_time_however_long_their_calls(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=0, instance_fairness="cost")
    used = shares_by_cost(s, {"short": 1_000, "long": 50_000}, places=8, rounds=400)
    assert used["short"] == pytest.approx(used["long"], rel=0.35)


def test_by_calls_the_instance_with_longer_calls_gets_more_time(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=0, instance_fairness="calls")
    used = shares_by_cost(s, {"short": 1_000, "long": 50_000}, places=8, rounds=400)
    assert used["long"] == 50 * used["short"]


def test_by_cost_time_is_shared_by_weight(shell: Callable[..., Shell]) -> None:
    s = shell(executors=0, instance_fairness="cost")
    used = shares_by_cost(
        s, {"a": 1_000, "b": 1_000}, places=4, rounds=800, a={"weight": 3}, b={"weight": 1}
    )
    assert used["a"] == pytest.approx(3 * used["b"], rel=0.1)


def clocks(s: Shell) -> dict[str, float]:
    return {name: i.used_us for name, i in s.core.state.turns.instances.items()}


def test_by_cost_subcalls_are_paid_by_the_instance_of_their_root(
    shell: Callable[..., Shell],
) -> None:
    s = shell(instance_fairness="cost")
    s.submit(2, "a")
    s.call_function("a/0")
    s.complete(
        "a/0/sub-1", costs=Costs(cpu_us=700, io_us=300, subcall_us=9, sleep_us=9, queue_us=9)
    )
    assert clocks(s) == {"a": 1_000.0}
    assert s.core.state.turns.instances["a"].mean_us == 1_000.0
    s.complete("a/0", costs=Costs(cpu_us=16_000))
    assert clocks(s) == {"a": 17_000.0}
    assert s.core.state.turns.instances["a"].mean_us == 2_000.0  # (17,000 - 1,000) / 16 more


def test_by_cost_an_attempt_without_a_report_is_charged_at_the_mean(
    shell: Callable[..., Shell],
) -> None:
    s = shell(instance_fairness="cost")
    s.submit(3, "a")
    s.post(dummy(ExecutorLost))
    assert clocks(s) == {"a": 3_000.0}
    s.snapshots(snapshot(incarnation_id="p1"))
    s.post(CallCancelled("a/0", 0))
    assert clocks(s) == {"a": 4_000.0}


def test_by_cost_a_failed_attempt_costs_what_it_used(shell: Callable[..., Shell]) -> None:
    s = shell(instance_fairness="cost")
    s.submit(2, "a")
    s.fail("a/0", ErrorKind.USER_ERROR, costs=Costs(io_us=500))
    assert clocks(s) == {"a": 500.0}


def test_by_cost_nobody_saves_up_time_while_it_has_no_work(shell: Callable[..., Shell]) -> None:
    s = shell(executors=0, instance_fairness="cost")
    shares_by_cost(s, {"a": 1_000}, places=1, rounds=100)
    s.submit(50, "b")
    assert clocks(s)["b"] >= 99_000.0
    started = []
    for _ in range(10):
        started.append(list(s.started)[-1])
        s.complete(started[-1], costs=Costs(cpu_us=1_000))
    assert 4 <= sum(call_id.startswith("b") for call_id in started) <= 6


def test_by_cost_calls_in_flight_count_before_they_have_ended(shell: Callable[..., Shell]) -> None:
    s = shell(executors=0, instance_fairness="cost")
    assert place_by_place(s, {"a": {}, "b": {}}, 6) == list("ababab")


def test_the_weight_of_an_instance_is_the_largest_of_its_tasks_that_run(
    shell: Callable[..., Shell],
) -> None:
    s = shell(instance_fairness="calls")
    s.submit(1, "a", instance_id="x", weight=5)
    s.submit(1, "b", instance_id="x", weight=2)
    assert s.core.state.turns.instances["x"].weight == 5
    s.complete("a/0")
    assert s.core.state.turns.instances["x"].weight == 2


# Long runs -----------------------------------------------------------------------------------------


def test_one_dispatch_admits_a_bounded_number_of_calls_and_says_that_there_are_more() -> None:
    core = dispatcher_core()
    core.handle(SnapshotUpdated([snapshot()], 0))
    cached = [call_spec(n, b"[0]") for n in range(ADMISSIONS_MAX + 100)]
    core.handle(CallsSubmitted(task_spec(), cached[:1], 0))
    core.dispatch(0)
    core.handle(CallBound("t/0", 1, "exec-0"))
    core.state.tasks["t@1"].production_open = True
    core.handle(dummy(AttemptCompleted, call_id="t/0"))
    core.handle(StreamBatchSubmitted("t@1", 0, cached[1:], 0))
    assert len(core.dispatch(0)) == ADMISSIONS_MAX
    assert core.has_more
    assert len(core.dispatch(0)) == 99
    assert not core.has_more
