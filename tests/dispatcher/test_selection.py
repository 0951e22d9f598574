"""Which executor: each filter, each step of the score, compensation between two snapshots."""

import random
from typing import Any

import pytest

from blockx.config import DispatcherConfig
from blockx.dispatcher.cache import ResultCache
from blockx.dispatcher.events import CallResumed, CallSuspended
from blockx.dispatcher.model import Call, ExecutorSnapshot, Task
from blockx.dispatcher.selection import BestFirst, ExecutorViews
from tests.builders import function_ref, snapshot, task_spec
from tests.dispatcher.shell import Shell


def views_of(*snapshots: ExecutorSnapshot, **config: Any) -> ExecutorViews:
    views = ExecutorViews(DispatcherConfig(**config), 10_000, random.Random(1))
    for s in snapshots:
        assert views.update(s)
    return views


def chosen(views: ExecutorViews) -> str | None:
    view = views.select()
    return None if view is None else view.executor_id


def a_call(n: int = 0) -> Call:
    task = Task(task_spec(), ResultCache(0))
    return Call(f"t/{n}", n + 1, task, n, function_ref(), b"[]", b"k", 5_000)


@pytest.mark.parametrize(
    "fields",
    [
        {"healthy": False},
        {"usable_contexts": 0},
        {"runnable_count": 128},
        {"memory_bytes": 1_000},
        {"running_call_seq": 5, "scheduler_idle_ms": 10_001},
    ],
    ids=["unhealthy", "no-headroom", "runnable-full", "memory-at-the-mark", "stalled"],
)
def test_an_executor_that_fails_one_filter_gets_nothing(fields: dict[str, Any]) -> None:
    views = views_of(snapshot(**fields), executor_memory_high_watermark=1_000)
    assert chosen(views) is None
    assert views.update(snapshot(heartbeat_seq=2))
    assert chosen(views) == "exec-0"


@pytest.mark.parametrize(
    "fields",
    [
        {"usable_contexts": 1},
        {"runnable_count": 127},
        {"memory_bytes": 999},
        {"running_call_seq": 5, "scheduler_idle_ms": 10_000},
        {"running_call_seq": 0, "scheduler_idle_ms": 99_999},
    ],
    ids=["one-place", "runnable-below", "memory-below", "idle-at-the-limit", "idle-without-call"],
)
def test_an_executor_just_within_the_filters_is_eligible(fields: dict[str, Any]) -> None:
    assert chosen(views_of(snapshot(**fields), executor_memory_high_watermark=1_000)) == "exec-0"


def test_a_memory_mark_of_zero_is_off() -> None:
    assert chosen(views_of(snapshot(memory_bytes=1 << 40))) == "exec-0"


def test_fewer_runnable_calls_win_before_anything_else() -> None:
    busy = snapshot("exec-0", runnable_count=2, usable_contexts=128)
    free = snapshot("exec-1", runnable_count=1, usable_contexts=3)
    assert chosen(views_of(busy, free)) == "exec-1"


def test_fewer_root_calls_win_when_runnable_is_equal() -> None:
    views = views_of(snapshot("exec-0"), snapshot("exec-1", usable_contexts=64))
    views.by_id["exec-0"].inflight = 1
    views.touch(views.by_id["exec-0"])
    assert chosen(views) == "exec-1"


def test_more_headroom_wins_when_both_are_equal() -> None:
    assert chosen(views_of(snapshot("exec-0", usable_contexts=63), snapshot("exec-1"))) == "exec-1"


def test_the_smaller_id_wins_when_all_is_equal() -> None:
    assert chosen(views_of(snapshot("exec-2"), snapshot("exec-10"), snapshot("exec-1"))) == "exec-1"


def test_the_local_limit_of_root_calls_holds_whatever_the_snapshot_says() -> None:
    views = views_of(snapshot(usable_contexts=999), executor_max_inflight=2)
    views.by_id["exec-0"].inflight = 2
    views.touch(views.by_id["exec-0"])
    assert chosen(views) is None


def test_calls_bound_since_the_sample_are_added_and_a_new_sample_knows_them() -> None:
    views = views_of(snapshot("exec-0"), snapshot("exec-1", runnable_count=1))
    views.by_id["exec-0"].load += 2
    views.touch(views.by_id["exec-0"])
    assert chosen(views) == "exec-1"
    views.update(snapshot("exec-0", heartbeat_seq=1))
    assert chosen(views) == "exec-1", "the same sample again knows nothing new"
    views.update(snapshot("exec-0", heartbeat_seq=2))
    assert chosen(views) == "exec-0"


def test_aborted_calls_take_their_place_until_the_next_snapshot() -> None:
    views = views_of(snapshot(usable_contexts=1))
    views.by_id["exec-0"].draining = 1
    views.touch(views.by_id["exec-0"])
    assert chosen(views) is None
    views.update(snapshot(usable_contexts=1))
    assert chosen(views) == "exec-0"


def test_an_executor_that_turned_a_call_away_waits_for_its_next_snapshot() -> None:
    views = views_of(snapshot())
    views.refuse(views.by_id["exec-0"])
    assert chosen(views) is None
    views.update(snapshot())
    assert chosen(views) == "exec-0"


def test_a_sampled_scan_takes_the_best_of_a_few_and_reaches_everyone() -> None:
    views = views_of(
        *[snapshot(f"exec-{n}", runnable_count=n % 5) for n in range(8)],
        executor_selection_sample_size=2,
    )
    picks = [chosen(views) for _ in range(200)]
    best_of_two_neighbours = {"exec-0", "exec-1", "exec-2", "exec-3", "exec-5", "exec-6"}
    assert set(picks) == best_of_two_neighbours


def test_a_new_incarnation_starts_with_fresh_counts_and_the_old_one_keeps_its_calls() -> None:
    views = views_of(snapshot())
    old = views.by_id["exec-0"]
    call = a_call()
    old.calls[call.call_id] = call
    old.inflight = old.load = 1
    assert views.update(snapshot(incarnation_id="p1"))
    new = views.by_id["exec-0"]
    assert (new.inflight, new.load, list(new.calls)) == (0, 0, [])
    assert not views.update(snapshot(incarnation_id="p0")), "a snapshot of the dead one is stale"
    assert views.by_id["exec-0"] is new
    assert views.lose("exec-0", "p0") is old
    assert views.lose("exec-0", "p0") is None
    assert chosen(views) == "exec-0"


def test_a_lost_incarnation_stays_lost_and_its_successor_is_welcome() -> None:
    views = views_of(snapshot())
    assert views.lose("exec-0", "p0") is not None
    assert not views.update(snapshot(incarnation_id="p0", heartbeat_seq=9))
    assert chosen(views) is None
    assert views.update(snapshot(incarnation_id="p1"))
    assert chosen(views) == "exec-0"


def test_calls_spread_evenly_between_two_snapshots(shell: Any) -> None:
    s: Shell = shell(executors=3)
    s.submit(6)
    spread = [start.executor_id for start in s.started.values()]
    assert spread == ["exec-0", "exec-1", "exec-2", "exec-0", "exec-1", "exec-2"]


def test_a_suspended_call_is_not_runnable_and_a_resumed_one_is(shell: Any) -> None:
    s: Shell = shell()
    s.submit(2)
    view = s.core.state.views.by_id["exec-0"]
    assert view.load == 2
    s.post(CallSuspended("t/0", 1))
    assert view.load == 1
    s.post(CallResumed("t/0", 1))
    assert view.load == 2


def test_a_call_that_ends_while_suspended_is_not_taken_off_twice(shell: Any) -> None:
    s: Shell = shell()
    s.submit(2)
    s.post(CallSuspended("t/0", 1))
    s.complete("t/0")
    assert s.core.state.views.by_id["exec-0"].load == 1


def test_what_a_fresh_sample_knew_already_does_not_make_the_load_negative(shell: Any) -> None:
    s: Shell = shell()
    s.submit(2)
    s.snapshots(snapshot(heartbeat_seq=2, runnable_count=0))
    s.post(CallSuspended("t/0", 1))
    s.complete("t/1")
    assert s.core.state.views.by_id["exec-0"].load == 0


def test_an_old_incarnation_without_calls_is_forgotten_at_once() -> None:
    views = views_of(snapshot())
    views.update(snapshot(incarnation_id="p1"))
    assert len(views.all_views()) == 1
    assert views.lose("exec-0", "p0") is None


def test_a_reserved_executor_that_is_ill_and_empty_gives_way_to_another() -> None:
    views = views_of(snapshot("exec-0"), snapshot("exec-1"))
    assert views.reserve() is views.by_id["exec-0"]
    views.update(snapshot("exec-0", healthy=False))
    assert views.reserve() is views.by_id["exec-1"]
    assert not views.by_id["exec-0"].reserved


def test_an_executor_that_turned_a_call_away_stays_closed_when_its_reservation_ends() -> None:
    views = views_of(snapshot())
    reserved = views.reserve()
    assert reserved is not None
    views.refuse(reserved)
    views.unreserve()
    assert chosen(views) is None


def plain_choice(views: ExecutorViews, config: DispatcherConfig) -> str | None:
    """Filter and score over all executors, as the specification has it."""
    eligible = [
        (v.load, v.inflight, -(v.usable - v.inflight - v.draining), v.executor_id)
        for v in views.by_id.values()
        if v.fit
        and not v.refused
        and not v.reserved
        and v.load < config.executor_max_runnable
        and v.inflight < config.executor_max_inflight
        and v.usable - v.inflight - v.draining > 0
    ]
    return min(eligible)[3] if eligible else None


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_that_of_filter_and_score_over_all_executors(seed: int) -> None:
    rng = random.Random(seed)
    config = DispatcherConfig(
        executor_max_inflight=rng.choice([3, 128]), executor_max_runnable=rng.choice([4, 128])
    )
    views = ExecutorViews(config, 10_000, random.Random(1))
    samples = 0
    for _ in range(600):
        executor_id = f"exec-{rng.randrange(9)}"
        view = views.by_id.get(executor_id)
        what = rng.randrange(8)
        if what < 2 or view is None:
            samples += 1
            view_incarnation = "p0" if view is None else view.incarnation_id
            fields = {
                "incarnation_id": f"p{samples}" if rng.random() < 0.1 else view_incarnation,
                "healthy": rng.random() < 0.9,
                "usable_contexts": rng.randrange(6),
                "runnable_count": rng.randrange(5),
                "heartbeat_seq": samples,
            }
            views.update(snapshot(executor_id, **fields))
        elif what < 6:
            field = rng.choice(["load", "inflight", "draining"])
            setattr(view, field, max(0, getattr(view, field) + rng.choice([-1, 1])))
            views.touch(view)
        elif what == 6:
            rng.choice([views.reserve, views.unreserve, lambda v=view: views.refuse(v)])()
        else:
            views.lose(executor_id, view.incarnation_id)
        assert chosen(views) == plain_choice(views, config)


def test_a_sampled_choice_is_eligible_and_the_best_of_its_sample() -> None:
    config = DispatcherConfig(executor_selection_sample_size=3)
    views = ExecutorViews(config, 10_000, random.Random(5))
    rng = random.Random(6)
    for n in range(300):
        executor_id = f"exec-{rng.randrange(6)}"
        views.update(snapshot(executor_id, heartbeat_seq=n, usable_contexts=rng.randrange(2)))
        eligible = {v.executor_id for v in views.by_id.values() if v.usable and v.open}
        assert (chosen(views) in eligible) if eligible else chosen(views) is None


def test_the_heap_of_the_ranking_stays_small() -> None:
    views = views_of(snapshot("exec-0"), snapshot("exec-1"))
    for n in range(1_000):
        view = views.by_id[f"exec-{n % 2}"]
        view.load = n % 7
        views.touch(view)
        views.select()
    assert len(views._ranking._heap) <= 2 * BestFirst.STALE_RATIO_MAX
