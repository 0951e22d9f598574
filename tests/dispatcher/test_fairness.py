"""Whose turn it is: round robin, max-min between instances, weights, quantum."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.builders import snapshot
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
