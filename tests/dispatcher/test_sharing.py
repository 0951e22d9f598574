"""Equal calls run once: result cache and singleflight."""

from collections.abc import Callable

import pytest

from blockx.dispatcher.cache import CACHE_ENTRY_BYTES, ResultCache
from blockx.dispatcher.commands import FinishTask, StartAttempt
from blockx.dispatcher.events import RetryDue
from blockx.dispatcher.model import CallCounts, CallSpec, Via
from blockx.errors import FOLLOWERS_SHARE, RETRY_POLICIES, ErrorKind
from tests.builders import call_spec, error, snapshot
from tests.dispatcher.shell import Shell

NOT_SHARED = [k for k in ErrorKind if k not in FOLLOWERS_SHARE and not RETRY_POLICIES[k].retryable]


def equal(count: int, start: int = 0) -> list[CallSpec]:
    return [call_spec(index, b"[1]") for index in range(start, start + count)]


def test_equal_calls_in_flight_run_once_and_share_the_output(shell: Callable[..., Shell]) -> None:
    s = shell()
    assert s.names(s.submit(equal(3))) == ["StartAttempt t/0"]
    commands = s.complete("t/0", b"42")
    assert s.names(commands) == [
        "EmitResult t/0",
        "EmitResult t/1",
        "EmitResult t/2",
        "FinishTask t@1",
    ]
    assert [(r.output, r.via, r.attempts) for r in s.results.values()] == [
        (b"42", Via.RAN, 1),
        (b"42", Via.SINGLEFLIGHT, 0),
        (b"42", Via.SINGLEFLIGHT, 0),
    ]
    finish = commands[-1]
    assert isinstance(finish, FinishTask)
    assert finish.calls == CallCounts(calls=3, ok=3, ran=1, singleflight=2, executed=1)


def test_a_call_equal_to_a_finished_one_is_answered_from_the_cache(
    shell: Callable[..., Shell],
) -> None:
    s = shell(task_max_inflight_calls=1)
    s.submit([call_spec(0, b"[1]"), call_spec(1, b"[2]"), call_spec(2, b"[1]")])
    s.complete("t/0", b"42")
    finish = s.complete("t/1")[-1]
    assert (s.results["t/2"].output, s.results["t/2"].via) == (b"42", Via.CACHED)
    assert isinstance(finish, FinishTask)
    assert finish.calls == CallCounts(calls=3, ok=3, ran=2, cached=1, executed=2)


def test_nothing_is_shared_between_tasks(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(equal(1), "a")
    s.complete("a/0")
    assert s.names(s.submit(equal(1), "b")) == ["StartAttempt b/0"]


def test_without_sharing_equal_calls_run_each_for_itself(shell: Callable[..., Shell]) -> None:
    s = shell(share_results=False)
    assert s.names(s.submit(equal(2))) == ["StartAttempt t/0", "StartAttempt t/1"]
    s.complete("t/0")
    s.complete("t/1")
    assert [r.via for r in s.results.values()] == [Via.RAN, Via.RAN]
    assert len(s.core.state.tasks["t@1"].cache) == 0


def test_without_a_cache_calls_in_flight_are_still_shared(shell: Callable[..., Shell]) -> None:
    s = shell(call_cache_max_bytes=0, task_max_inflight_calls=1)
    s.submit([*equal(2), call_spec(2, b"[2]"), call_spec(3, b"[1]")])
    s.complete("t/0")
    assert s.results["t/1"].via is Via.SINGLEFLIGHT
    assert s.names(s.complete("t/2")) == ["EmitResult t/2", "StartAttempt t/3"]


@pytest.mark.parametrize("kind", sorted(FOLLOWERS_SHARE))
def test_followers_share_a_failure_of_the_function_itself(
    shell: Callable[..., Shell], kind: ErrorKind
) -> None:
    s = shell()
    s.submit(equal(2))
    s.fail("t/0", kind)
    assert (s.results["t/1"].error, s.results["t/1"].via) == (error(kind), Via.SINGLEFLIGHT)


@pytest.mark.parametrize("kind", NOT_SHARED)
def test_on_any_other_failure_the_next_follower_leads(
    shell: Callable[..., Shell], kind: ErrorKind
) -> None:
    s = shell()
    s.submit(equal(3))
    assert s.names(s.fail("t/0", kind)) == ["EmitResult t/0", "StartAttempt t/1"]
    s.complete("t/1", b"42")
    assert [(i, r.output, r.via) for i, r in s.results.items()] == [
        ("t/0", None, Via.RAN),
        ("t/1", b"42", Via.RAN),
        ("t/2", b"42", Via.SINGLEFLIGHT),
    ]


def test_a_new_leader_goes_to_the_front_of_its_task(shell: Callable[..., Shell]) -> None:
    s = shell(task_max_inflight_calls=1)
    s.submit([*equal(2), call_spec(2)])
    assert s.names(s.fail("t/0", ErrorKind.IO_ERROR)) == ["EmitResult t/0", "StartAttempt t/1"]


def test_failures_are_not_cached(shell: Callable[..., Shell]) -> None:
    s = shell(task_max_inflight_calls=1)
    s.submit([call_spec(0, b"[1]"), call_spec(1, b"[2]"), call_spec(2, b"[1]")])
    s.fail("t/0", ErrorKind.USER_ERROR)
    assert s.names(s.complete("t/1")) == ["EmitResult t/1", "StartAttempt t/2"]


def test_followers_wait_while_their_leader_is_retried(shell: Callable[..., Shell]) -> None:
    s = shell()
    s.submit(equal(2))
    assert s.names(s.fail("t/0", ErrorKind.EXECUTOR_LOST)) == ["ArmRetry t/0"]
    [start] = s.post(RetryDue("t/0", 1))
    assert isinstance(start, StartAttempt)
    assert start.call_id == "t/0"
    s.complete("t/0")
    assert [r.via for r in s.results.values()] == [Via.RAN, Via.SINGLEFLIGHT]


def test_head_of_line_calls_follow_even_when_the_house_is_full(
    shell: Callable[..., Shell],
) -> None:
    s = shell(executors=0)
    s.snapshots(snapshot(usable_contexts=1))
    s.submit(equal(100))
    assert len(s.core.state.tasks["t@1"].ready) == 0


def test_a_thousand_followers_of_leaders_that_fail_are_led_one_by_one(
    shell: Callable[..., Shell],
) -> None:
    s = shell()
    s.submit(equal(50))
    for n in range(50):
        s.fail(f"t/{n}", ErrorKind.DEADLINE_EXCEEDED)
    assert len(s.results) == 50
    assert {r.via for r in s.results.values()} == {Via.RAN}


def test_the_least_recently_used_output_leaves_a_full_cache() -> None:
    cache = ResultCache(2 * (CACHE_ENTRY_BYTES + 2))
    cache.put(b"a", b"1")
    cache.put(b"b", b"2")
    assert cache.get(b"a") == b"1"
    cache.put(b"c", b"3")
    assert (cache.get(b"a"), cache.get(b"b"), cache.get(b"c")) == (b"1", None, b"3")
    assert cache.bytes_used == cache.counted_bytes() == cache.bytes_max


def test_an_output_that_alone_is_over_the_limit_is_not_kept() -> None:
    cache = ResultCache(CACHE_ENTRY_BYTES + 10)
    cache.put(b"a", b"x" * 9)
    cache.put(b"b", b"x" * 10)
    assert (cache.get(b"a"), cache.get(b"b")) == (b"x" * 9, None)


def test_putting_a_key_again_changes_nothing() -> None:
    cache = ResultCache(10_000)
    cache.put(b"a", b"1")
    cache.put(b"a", b"22")
    assert cache.get(b"a") == b"1"
    assert cache.bytes_used == cache.counted_bytes()
