"""What the runtime does with messages: one outcome a call, stale ones counted, accounts kept."""

import gc
import itertools
import re
import sys
import weakref
from typing import Any

import pytest

from blockx.errors import ErrorKind, InvalidTransitionError
from blockx.executor import interrupts
from blockx.executor.attempt import SHORT_STEP_NS
from blockx.executor.context import ExecContext, ExecState
from blockx.executor.queues import SLEEPERS_IN_A_ROW_MAX
from blockx.executor.tasks import TASKS_LINGERING_MAX
from blockx.functions.entry import is_user_file
from blockx.ipc import exact_json
from blockx.ipc.messages import CallFailed, CallWaiting, WaitKind, decode_main_message

READ = """
from blockx.sdk.provider import get_provider
def _(*keys):
    return [get_provider().read_req("kv", "get", {"key": key}) for key in keys]
"""
SLEEP = "import time\ndef _(seconds, tag):\n    time.sleep(seconds)\n    return tag"


def ids_and_kinds(messages: list[Any]) -> list[tuple[str, str]]:
    return [
        (m.call_id, m.payload.error_kind if isinstance(m, CallFailed) else type(m).__name__)
        for m in messages
    ]


# ---- outcomes ------------------------------------------------------------------------------------


def test_a_call_returns_its_exact_result_and_its_costs(bench):
    message = bench.call("def _(n, m):\n    return {'sum': n + m}", 2**256, 1)
    assert exact_json.decode(message.payload.output) == {"sum": 2**256 + 1}
    payload = message.payload
    assert (message.executor_id, message.call_id, payload.attempt_seq) == ("exec-1", "c1", 1)
    assert payload.body_started
    assert payload.cpu_us > 0
    assert (payload.io_us, payload.subcall_us, payload.sleep_us) == (0, 0, 0)


@pytest.mark.parametrize(("reading_ns", "is_charged"), [(1_000, True), (SHORT_STEP_NS, False)])
def test_a_short_step_is_charged_its_wall_time_and_a_long_one_the_cpu_it_used(
    bench, monkeypatch, reading_ns, is_charged
):
    clock = itertools.count(1, reading_ns).__next__  # so much later at each look
    for module in ("runtime", "attempt", "bridge"):
        monkeypatch.setattr(f"blockx.executor.{module}._monotonic_ns", clock)
    monkeypatch.setattr("blockx.executor.attempt._thread_time_ns", lambda: 0)
    message = bench.call("def _():\n    return 1")
    assert (message.payload.cpu_us > 0) is is_charged


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt('mine')", "KeyboardInterrupt: mine"),
        ("next(iter([]))", "StopIteration"),
        ("import greenlet; raise greenlet.GreenletExit({'a': 1})", "GreenletExit: {'a': 1}"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("_(n)", "RecursionError: maximum recursion depth exceeded"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise BaseException('base')", "BaseException: base"),
        (
            "from blockx.errors import CallDeadlineExceededError as E; raise E('forged')",
            "CallDeadlineExceededError: forged",
        ),
        (
            "from blockx.errors import ReadError; raise ReadError('mine', kind='executor_lost')",
            "ReadError: mine",
        ),
    ],
)
def test_whatever_user_code_raises_is_a_user_error_with_its_name_and_text(
    bench, statement, expected
):
    kind, message = bench.failure(f"def _(n):\n    {statement}", 1)
    assert (kind, message[: len(expected)]) == (ErrorKind.USER_ERROR, expected)
    assert bench.output("def _(n):\n    return n", 7) == 7


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("float('nan')", ["NaN"]),
        ("{'a': {1, 2}}", ["$.a", "set"]),
        ("b'x'", ["bytes"]),
        ("(x for x in [1])", ["generator"]),
        ("Decimal('1.10')", ["Decimal"]),
    ],
)
def test_a_result_without_an_exact_form_is_refused_with_its_path(bench, expression, words):
    kind, message = bench.failure(f"def _():\n    return {expression}")
    assert kind == ErrorKind.OUTPUT_NOT_SERIALIZABLE
    assert all(word in message for word in words), message


def test_a_coroutine_is_refused_and_leaves_no_warning(bench):
    source = "def _():\n    async def later():\n        return 1\n    return later()"
    kind, message = bench.failure(source)
    gc.collect()
    assert (kind, "coroutine" in message) == (ErrorKind.OUTPUT_NOT_SERIALIZABLE, True)


def test_a_result_that_does_not_fit_into_a_frame_fails_its_call_only(bench):
    kind, message = bench.failure("def _(n):\n    return 'x' * n", 17_000_000)
    assert (kind, "17000002 bytes" in message) == (ErrorKind.OUTPUT_TOO_LARGE, True)
    # The result fits by itself, but not with its envelope.
    assert bench.failure("def _(n):\n    return 'x' * n", 16_777_210)[0] == "output_too_large"
    assert len(bench.output("def _(n):\n    return 'x' * n", 16_000_000)) == 16_000_000


def test_source_that_does_not_load_is_a_load_error_before_any_body(bench):
    message = bench.call("x = 1 / 0\ndef _():\n    return 1")
    assert message.payload.error_kind == ErrorKind.LOAD_ERROR
    assert message.payload.error_message == "ZeroDivisionError: division by zero"
    assert not message.payload.body_started
    assert bench.failure("def _(:\n    return 1")[0] == ErrorKind.LOAD_ERROR


def test_arguments_that_are_no_list_are_an_invalid_call(bench):
    start = {"taskId": "t1", "functionId": "f", "entrySelector": "_", "attemptSeq": 1, "callSeq": 9}
    bench.call("def _():\n    return 1")
    digest = next(iter(bench.sources))
    for args in ({"a": 1}, 5):
        payload = {**start, "functionCodeDigest": digest, "args": args}
        bench.runtime.handle_inbound_message(
            {"messageType": "ExecuteCall", "callId": "bad", "payload": payload}
        )
    body = b'{"messageType":"ExecuteCall","callId":"inf","payload":%s}' % exact_json.encode(
        {**start, "functionCodeDigest": digest, "args": []}
    ).replace(b"[]", b"[1e400]")
    bench.runtime.handle_inbound_message(decode_main_message(body))
    assert ids_and_kinds(bench.run()) == [("bad", "invalid_call"), ("inf", "invalid_call")]


def test_a_message_without_its_ids_is_refused_by_name(bench):
    bench.start(taskId="", attemptSeq=0)
    (message,) = bench.run()
    assert message.payload.error_kind == ErrorKind.INVALID_CALL
    assert message.payload.error_message == "ExecuteCall without taskId, attemptSeq"


def test_each_attempt_gets_fresh_arguments_a_clean_context_and_no_leftover_exception(bench):
    source = """
import contextvars, sys
from decimal import getcontext
WHO = contextvars.ContextVar("who", default=None)
def _(p):
    seen = [WHO.get(), getcontext().prec, sys.exc_info()[0] is None, p.get("n", 0)]
    WHO.set(1)
    getcontext().prec = 5
    p["n"] = 1
    if p["fail"]:
        raise ValueError
    return seen
"""
    assert bench.output(source, {"fail": 0}) == [None, 28, True, 0]
    bench.failure(source, {"fail": 1})
    assert bench.output(source, {"fail": 0}) == [None, 28, True, 0]


def test_what_a_call_held_is_free_when_it_has_ended(bench, monkeypatch):
    source = """
class Big:
    pass
def _(fail):
    import weakref
    big = Big()
    PROBES.append(weakref.ref(big))
    if fail:
        raise ValueError(big)
    return 1
"""
    probes: list[weakref.ref[Any]] = []
    source = source.replace("PROBES", "__import__('sys').probes_of_test")
    monkeypatch.setattr(sys, "probes_of_test", probes, raising=False)
    bench.call(source, 0)
    bench.call(source, 1)
    gc.collect()
    assert [probe() for probe in probes] == [None, None]


def test_the_exception_being_handled_survives_a_wait_beside_others(bench):
    source = """
import time, traceback
def _(n):
    try:
        raise LookupError(f"mine {n}")
    except LookupError:
        time.sleep(0.002)
        return f"mine {n}" in traceback.format_exc()
"""
    for n in range(20):
        bench.start(source, [n])
    assert [exact_json.decode(m.payload.output) for m in bench.run_to_end()] == [True] * 20


# ---- waiting, resuming, staleness ---------------------------------------------------------------


def test_a_read_parks_the_call_and_its_answer_resumes_it(bench):
    bench.start(READ, ["a", "b"], callBudgetMs=1_000)
    (first,) = bench.run()
    assert (first.call_id, first.request_id) == ("c1", "req-cafe0001-2")  # 1 asked for the source
    payload = first.payload
    assert (payload.wait_kind, payload.task_id, payload.attempt_seq) == (WaitKind.IO, "t1", 1)
    assert (payload.backend, payload.operation) == ("kv", "get")
    assert exact_json.decode(payload.params) == {"key": "a"}
    assert 0 < payload.budget_left_ms <= 1_000
    bench.resume(first, 2**100)
    (second,) = bench.run()
    assert exact_json.decode(second.payload.params) == {"key": "b"}
    bench.resume(second, None, ioUs=0, queueUs=5)
    (done,) = bench.run()
    assert exact_json.decode(done.payload.output) == [2**100, None]


def test_every_stale_resume_is_dropped_and_counted(bench):
    bench.start(READ, ["a"])
    (waiting,) = bench.run()
    bench.resume(waiting, 1, attemptSeq=2)
    bench.resume(waiting, 1, attemptSeq=0)
    bench.resume(waiting, 1, resumeKind="subcall")
    bench.resume(waiting, 1, request_id="req-0-1")
    bench.resume(waiting, 1, request_id="")
    assert bench.run() == []
    bench.resume(waiting, "right")
    bench.resume(waiting, "twice")
    (done,) = bench.run()
    bench.resume(waiting, "late")
    assert exact_json.decode(done.payload.output) == ["right"]
    assert bench.runtime.counters["stale_resumes"] == 7


def test_a_newer_attempt_replaces_the_old_one_without_a_terminal_message(bench):
    bench.start(READ, ["a"], call_id="c")
    (old,) = bench.run()
    bench.start(READ, ["a"], call_id="c", attemptSeq=2)
    (new,) = bench.run()
    assert new.payload.attempt_seq == 2
    bench.resume(old, "of the old one")
    bench.resume(new, "of the new one")
    (done,) = bench.run()
    assert (done.payload.attempt_seq, exact_json.decode(done.payload.output)) == (
        2,
        ["of the new one"],
    )
    assert bench.runtime.inflight_count() == 0
    assert bench.runtime.counters["stale_resumes"] == 1


def test_a_replaced_attempt_stays_silent_even_if_it_swallows_its_signal(bench):
    source = "def _():\n    try:\n        r()\n    except BaseException:\n        return 1"
    source = "from blockx_sdk import sleep\n" + source.replace("r()", "sleep(600)")
    bench.start(source, [], call_id="c")
    assert bench.run() == []
    bench.start("def _():\n    return 2", [], call_id="c", attemptSeq=2)
    (done,) = bench.run()
    assert (done.payload.attempt_seq, exact_json.decode(done.payload.output)) == (2, 2)


def test_an_execute_call_of_an_old_or_equal_attempt_is_dropped_and_counted(bench):
    bench.start(READ, ["a"], call_id="c", attemptSeq=2)
    (waiting,) = bench.run()
    bench.start(READ, ["a"], call_id="c", attemptSeq=1)
    bench.start(READ, ["a"], call_id="c", attemptSeq=2)
    assert bench.run() == []
    bench.resume(waiting, 1)
    assert ids_and_kinds(bench.run()) == [("c", "CallCompleted")]
    assert bench.runtime.counters["stale_executes"] == 2


# ---- cancelling --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("cancelled", "cancelled"),
        ("", "cancelled"),
        ("task_cancelled", "task_cancelled"),
        ("call_timeout", "deadline_exceeded"),
    ],
)
def test_a_waiting_call_is_cancelled_where_it_waits(bench, reason, kind):
    bench.start(READ, ["a"])
    bench.run()
    bench.cancel("c1", reason=reason)
    (failed,) = bench.run()
    assert (failed.payload.error_kind, failed.payload.body_started) == (kind, True)


def test_a_call_that_never_started_is_cancelled_without_running(bench):
    bench.start(READ, ["a"])
    bench.cancel("c1")
    (failed,) = bench.run()
    assert (failed.payload.error_kind, failed.payload.body_started) == ("cancelled", False)


def test_a_sleeping_call_is_cancelled_and_its_heap_entry_does_no_harm(new_bench):
    bench = new_bench(executor_max_inflight=0)
    for n in range(200):
        bench.start(SLEEP, [600, n])
    assert bench.run() == []
    for n in range(1, 201):
        bench.cancel(f"c{n}")
    assert {kind for _id, kind in ids_and_kinds(bench.run())} == {"cancelled"}
    assert bench.runtime._queue.sleepers_count() <= 130
    assert bench.output(SLEEP, 0.001, "x") == "x"


def test_the_end_of_a_cancelled_sleep_wakes_nobody(bench):
    bench.start(SLEEP, [0.01, 1])
    assert bench.run() == []
    bench.cancel("c1")
    assert ids_and_kinds(bench.run()) == [("c1", "cancelled")]
    while bench.runtime._queue.sleepers_count():
        assert bench.run() == []


def test_stale_cancels_are_dropped_and_counted(bench):
    bench.start(READ, ["a"], attemptSeq=2)
    (waiting,) = bench.run()
    bench.cancel("c1", attempt_seq=1)
    bench.cancel("unknown")
    bench.resume(waiting, 1)
    assert ids_and_kinds(bench.run()) == [("c1", "CallCompleted")]
    bench.cancel("c1", attempt_seq=2)
    assert bench.runtime.counters["stale_cancels"] == 3


def test_a_cancelled_call_may_clean_up_but_cannot_wait_again(bench):
    source = (
        READ
        + """
def _(log):
    try:
        get_provider().read_req("kv", "get", {})
    finally:
        try:
            get_provider().read_req("kv", "again", {})
        except BaseException as error:
            raise ValueError(type(error).__name__)
"""
    )
    bench.start(source, [1])
    (waiting,) = bench.run()
    assert waiting.payload.operation == "get"
    bench.cancel("c1")
    (failed,) = bench.run()
    assert failed.payload.error_kind == "cancelled"
    assert "swallowed it" in failed.payload.error_message
    assert "ValueError: CallCancelledError" in failed.payload.error_stack


# ---- admission and sub-calls ------------------------------------------------------------------


def test_a_root_call_over_the_limit_is_refused_free_of_charge(new_bench):
    bench = new_bench(executor_max_inflight=2)
    for _ in range(3):
        bench.start(READ, ["a"])
    refused, *waiting = bench.run()
    assert ids_and_kinds([refused]) == [("c3", "executor_capacity_exhausted")]
    assert refused.payload.retryable
    assert [w.call_id for w in waiting] == ["c1", "c2"]
    bench.resume(waiting[0], 1)
    bench.run()
    bench.start(READ, ["a"])
    assert ids_and_kinds(bench.run()) == [("c4", "CallWaiting")]


def test_without_a_limit_nothing_is_refused(new_bench):
    bench = new_bench(executor_max_inflight=0)
    for _ in range(300):
        bench.start(READ, ["a"])
    assert {kind for _id, kind in ids_and_kinds(bench.run())} == {"CallWaiting"}
    assert bench.runtime.build_heartbeat().payload.available_contexts == 1 << 30


PARENT = """
from blockx import function
def _(*args):
    return {"child": function.call("kid", *args)}
"""


def test_a_sub_call_passes_the_limit_and_its_result_reaches_the_parent(new_bench):
    bench = new_bench(executor_max_inflight=1)
    bench.start(PARENT, [1, 2**70], call_id="p", callBudgetMs=5_000)
    (waiting,) = bench.run()
    payload = waiting.payload
    assert (payload.wait_kind, payload.function_id) == (WaitKind.SUBCALL, "kid")
    assert exact_json.decode(payload.args) == [1, 2**70]
    assert 4_000 < payload.granted_budget_ms <= 5_000
    bench.start("def _(a, b):\n    return a + b", [1, 2**70], call_id="p/sub-0", parentCallId="p")
    (child,) = bench.run()
    assert (child.call_id, exact_json.decode(child.payload.output)) == ("p/sub-0", 1 + 2**70)
    bench.resume(waiting, 1 + 2**70, budgetUsedMs=0.01)
    (done,) = bench.run()
    assert exact_json.decode(done.payload.output) == {"child": 1 + 2**70}
    assert done.payload.subcall_us == 10


def test_a_sub_call_without_its_parent_is_refused(bench):
    bench.start("def _():\n    return 1", parentCallId="gone")
    assert ids_and_kinds(bench.run()) == [("c1", "subcall_parent_not_resident")]


def test_sub_call_arguments_without_an_exact_form_fail_in_the_parent_at_once(bench):
    kind, message = bench.failure(PARENT.replace("*args)}", "{'x': {1}})}"))
    assert (kind, "set" in message, "$[0].x" in message) == ("user_error", True, True)


@pytest.mark.parametrize(
    ("wire_kind", "class_name", "kind"),
    [
        ("user_error", "SubcallFailedError", "subcall_failed"),
        ("deadline_exceeded", "SubcallFailedError", "subcall_failed"),
        ("subcall_cycle", "SubcallCycleDetectedError", "subcall_cycle"),
        ("subcall_depth_exceeded", "SubcallDepthExceededError", "subcall_depth_exceeded"),
    ],
)
def test_a_failed_sub_call_raises_its_class_and_ends_an_uncaring_parent(
    bench, wire_kind, class_name, kind
):
    error = {"kind": wire_kind, "message": "no luck"}
    caring = PARENT.replace("return", "try:\n        return").rstrip() + (
        "\n    except Exception as e:\n        return [type(e).__name__, e.kind, str(e)]"
    )
    for source in (PARENT, caring):
        bench.start(source)
        (waiting,) = bench.run()
        bench.resume(waiting, error=error)
        (ended,) = bench.run()
        if source == PARENT:
            assert ended.payload.error_kind == kind
            assert ended.payload.error_message == f"{class_name}: kid: no luck"
        else:
            expected = [class_name, wire_kind, "kid: no luck"]
            assert exact_json.decode(ended.payload.output) == expected


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        ({"kind": "io_error", "message": "node says no"}, "io_error", "ReadError: node says no"),
        ({"kind": "unavailable", "message": "x"}, "unavailable", "ReadError: x"),
        ({"kind": "executor_lost", "message": "x"}, "io_error", "ReadError: x"),
        ({"kind": "no such kind", "message": "x"}, "io_error", "ReadError: x"),
        ({"kind": "reverted", "message": "why", "data": "0x01"}, "reverted", "RevertedError: why"),
    ],
)
def test_a_failed_read_ends_an_uncaring_call_with_its_kind(bench, error, kind, text):
    bench.start(READ, ["a"])
    (waiting,) = bench.run()
    bench.resume(waiting, error=error)
    (failed,) = bench.run()
    assert (failed.payload.error_kind, failed.payload.error_message) == (kind, text)


def test_a_caught_revert_shows_reason_and_data(bench):
    source = (
        READ
        + """
def _():
    try:
        get_provider().read_req("rpc", "eth_call", {})
    except Exception as e:
        return [e.kind, e.reason, e.data.hex(), e.retryable]
"""
    )
    bench.start(source)
    (waiting,) = bench.run()
    bench.resume(
        waiting, error={"kind": "reverted", "message": "m", "reason": "r", "data": "0xff01"}
    )
    (done,) = bench.run()
    assert exact_json.decode(done.payload.output) == ["reverted", "r", "ff01", False]


def test_writes_and_capabilities_say_what_they_are(bench):
    source = (
        READ
        + """
def _():
    p = get_provider()
    p.write_req("kv", "put", {"v": 1})
    p.capability_req("cap", "do", {}, cache_key="k")
    return p.read_req("kv", "get", {}, cache_key="r")
"""
    )
    bench.start(source)
    seen = []
    for _ in range(3):
        (waiting,) = bench.run()
        seen.append((waiting.payload.backend, waiting.payload.write, waiting.payload.cache_key))
        bench.resume(waiting, 1)
    assert seen == [("kv", True, ""), ("cap", False, "k"), ("kv", False, "r")]


def test_a_request_too_large_for_a_frame_fails_in_the_function(bench):
    kind, message = bench.failure(READ, "x" * 17_000_000)
    assert (kind, message.startswith("ValueError: kv get: the request is too large")) == (
        "user_error",
        True,
    )


def test_an_answer_in_a_sidecar_is_bytes(bench):
    bench.start(READ.replace("return", "return repr(").rstrip() + ")", ["a"])
    (waiting,) = bench.run()
    message = {
        "messageType": "ResumeCall",
        "callId": "c1",
        "requestId": waiting.request_id,
        "payload": {"resumeKind": "io", "attemptSeq": 1},
    }
    bench.runtime.handle_inbound_message(message, b"\x00\xff")
    (done,) = bench.run()
    assert exact_json.decode(done.payload.output) == "[b'\\x00\\xff']"


STUB = """
from blockx.errors import GrpcError
from blockx.sdk.channel import BridgeChannel

def _():
    price = BridgeChannel("prices").unary_unary("/p.Prices/Price", str.encode, bytes.decode)
    try:
        return price("ETH", timeout=1.5, metadata=[("k", "v")])
    except GrpcError as error:
        return [error.kind, error.status, error.detail]
"""


def sidecar_of_request(bench: Any, source: str) -> bytes:
    """The raw bytes beside the first request of a call, which is still to be drained."""
    bench.start(source)
    (fetch,) = fetches(bench)
    bench.resume(fetch, bench.sources[fetch.payload.function_code_digest])
    bench.runtime.run_until_idle()
    return bench.runtime.channel.sidecars[-1]


def test_the_messages_of_a_stub_travel_beside_the_parameters(bench):
    assert sidecar_of_request(bench, STUB) == b"ETH"
    (waiting,) = bench.runtime.drain_outbox()
    assert (waiting.payload.backend, waiting.payload.operation) == ("prices", "/p.Prices/Price")
    params = {"timeout_ms": 1_500, "metadata": [["k", "v"]]}
    assert exact_json.decode(waiting.payload.params) == params


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("read_req(5, 'get', {})", "a backend is text, not int"),
        ("write_req('kv', None, {})", "an operation is text, not NoneType"),
        ("read_req('kv', 'get', {}, cache_key=[1])", "a cache key is text, not list"),
        ("subcall(len, [])", "the id of a function is text, not builtin_function_or_method"),
        ("capability_req('c', 'o', {}, sidecar=1)", "memoryview: a bytes-like object is required, not 'int'"),
    ],
)  # fmt: skip
def test_what_a_request_cannot_carry_is_refused_by_name(bench, statement, error):
    source = (
        f"from blockx.sdk.provider import get_provider\ndef _():\n    get_provider().{statement}"
    )
    assert bench.failure(source) == (ErrorKind.USER_ERROR, f"TypeError: {error}")


def test_raw_bytes_may_be_any_buffer(bench):
    source = (
        "from blockx.sdk.provider import get_provider\nfrom array import array\ndef _():\n"
        "    get_provider().capability_req('c', 'o', {}, sidecar=array('B', b'raw'))"
    )
    assert sidecar_of_request(bench, source) == b"raw"


def test_the_stack_of_a_failed_read_shows_the_lines_of_its_user_only(bench):
    bench.start(READ, ["a"])
    (waiting,) = bench.run()
    bench.resume(waiting, error={"kind": "io_error", "message": "m"})
    (failed,) = bench.run()
    files = re.findall(r'File "(.*?)"', failed.payload.error_stack)
    assert {is_user_file(file) for file in files} == {True}


def test_a_status_of_grpc_is_an_error_with_status_and_detail(bench):
    bench.start(STUB)
    (waiting,) = bench.run()
    error = {"kind": "io_error", "message": "m", "reason": "gone", "status": "NOT_FOUND"}
    bench.resume(waiting, error=error)
    (done,) = bench.run()
    assert exact_json.decode(done.payload.output) == ["io_error", "NOT_FOUND", "gone"]


# ---- source fetches -----------------------------------------------------------------------------


def fetches(bench: Any) -> list[Any]:
    bench.runtime.run_until_idle()
    return bench.runtime.drain_outbox()


def test_calls_that_miss_the_same_source_share_one_request(bench):
    source = "def _(n):\n    return n"
    for n in range(3):
        bench.start(source, [n])
    (fetch,) = fetches(bench)
    assert (fetch.call_id, fetch.payload.wait_kind) == ("c1", WaitKind.FUNCTION_CODE)
    follower = CallWaiting(call_id="c2", payload=fetch.payload)
    bench.resume(follower, "x = 1", request_id="")
    assert bench.runtime.counters["stale_resumes"] == 1
    bench.resume(fetch, source)
    assert [exact_json.decode(m.payload.output) for m in bench.run()] == [0, 1, 2]


def test_when_the_call_that_fetches_is_cancelled_another_one_asks_for_all(bench):
    source = "def _(n):\n    return n"
    for n in range(4):
        bench.start(source, [n])
    (fetch,) = fetches(bench)
    bench.cancel("c3")
    bench.cancel("c1")
    sent = fetches(bench)
    assert [m.call_id for m in sent if isinstance(m, CallFailed)] == ["c1", "c3"]
    (again,) = [m for m in sent if isinstance(m, CallWaiting)]
    assert again.call_id == "c2"
    bench.resume(fetch, source)  # the answer to the cancelled one
    assert bench.runtime.counters["stale_resumes"] == 1
    bench.resume(again, source)
    assert [exact_json.decode(m.payload.output) for m in bench.run()] == [1, 3]


def test_a_call_that_was_cancelled_while_it_shared_a_fetch_is_not_woken_by_its_answer(bench):
    source = "def _(n):\n    return n"
    for n in range(3):
        bench.start(source, [n])
    (fetch,) = fetches(bench)
    bench.cancel("c2")
    assert ids_and_kinds(bench.run()) == [("c2", "cancelled")]
    bench.resume(fetch, source)
    assert [exact_json.decode(m.payload.output) for m in bench.run()] == [0, 2]


def test_a_failed_fetch_fails_all_that_shared_it_as_code_fetch_failed(bench):
    for n in range(2):
        bench.start("def _(n):\n    return n", [n])
    (fetch,) = fetches(bench)
    bench.resume(fetch, error={"kind": "code_fetch_failed", "message": "gone", "retryable": True})
    failed = fetches(bench)
    assert ids_and_kinds(failed) == [("c1", "code_fetch_failed"), ("c2", "code_fetch_failed")]
    assert all(m.payload.retryable and not m.payload.body_started for m in failed)


def test_the_source_may_come_as_a_sidecar(bench):
    source = "def _():\n    return 'é'"
    bench.start(source)
    (fetch,) = fetches(bench)
    message = {
        "messageType": "ResumeCall",
        "callId": "c1",
        "requestId": fetch.request_id,
        "payload": {"resumeKind": "function_code", "attemptSeq": 1},
    }
    bench.runtime.handle_inbound_message(message, source.encode())
    (done,) = bench.run()
    assert exact_json.decode(done.payload.output) == "é"


# ---- order ---------------------------------------------------------------------------------------


def test_sleepers_that_are_due_go_first_but_yield_after_a_while(bench):
    runnable = "def _(n):\n    return n"
    bench.call(SLEEP, 0.001, 0)
    bench.call(runnable, 0)
    for n in range(SLEEPERS_IN_A_ROW_MAX + 10):
        bench.start(SLEEP, [0.1, n], call_id=f"s{n}")
    assert bench.run() == []
    while bench.runtime._queue.sleepers_count():
        bench.runtime._turn()
    for n in range(2):
        bench.start(runnable, [n], call_id=f"r{n}")
    order = [m.call_id for m in bench.run()]
    assert order.index("r0") == SLEEPERS_IN_A_ROW_MAX
    assert order.index("r1") == SLEEPERS_IN_A_ROW_MAX + 1 + 10


def test_a_zero_sleep_lets_all_other_calls_run_first(bench):
    source = "import time\ndef _(n):\n    time.sleep(0)\n    return n"
    bench.call(source, 0)
    bench.call("def _(n):\n    return n", 0)
    bench.start(source, [1])
    bench.start("def _(n):\n    return n", [2])
    assert [exact_json.decode(m.payload.output) for m in bench.run()] == [2, 1]


def test_a_function_known_as_long_has_finished_neighbours_sent_before_it_runs(bench):
    slow = "import time\nend = time.thread_time\ndef _(s):\n    t = end() + s\n    while end() < t: pass"
    bench.call(slow, 0.006)
    flushed: list[int] = []
    channel = bench.runtime.channel
    channel.flush = lambda: flushed.append(len(channel.sent))  # type: ignore[method-assign]
    bench.start("def _():\n    return 1")
    bench.run()
    flushed.clear()
    bench.start("def _():\n    return 1")
    bench.start(slow, [0])
    channel.terminal_frames = 1
    bench.runtime.run_until_idle()
    assert flushed == [1, 2]  # before the slow one; when idle


# ---- what main sees -------------------------------------------------------------------------------


def test_the_row_names_the_running_call_while_it_runs_and_only_then(row, new_bench, monkeypatch):
    seen: list[Any] = []

    bench = new_bench(row=row, executor_max_inflight=5)
    running_between: list[int] = []
    bench.runtime.channel.flush_if_due = lambda _now: running_between.append(row._words[8])
    look = lambda: seen.append(row._words[:22].tolist())  # noqa: E731
    monkeypatch.setattr(sys, "row_of_test", look, raising=False)
    bench.start("import sys\ndef _():\n    sys.row_of_test()", attemptSeq=3)
    bench.run()
    (words,) = seen
    assert words[0] % 2 == 0
    assert words[8] == 1  # call_seq
    assert words[10] == 3  # attempt_seq
    assert words[5:7] == [1, 4]  # inflight, available
    assert words[11:18] == [0, 1, 0, 0, 0, 0, 0]  # calls by state
    assert running_between == [0, 0]  # after the step that fetched the source, and the last one
    after = row._words[:22].tolist()
    assert (after[8], after[5], after[11:18], after[20]) == (0, 0, [0] * 7, 1)


def test_a_heartbeat_frame_counts_calls_by_state(bench):
    bench.start(READ, ["a"])
    bench.start(SLEEP, [600, 0])
    bench.run()
    bench.start(READ, ["a"])
    payload = bench.runtime.build_heartbeat().payload
    assert payload.call_state_counts == {
        "RUNNABLE": 1,
        "RUNNING": 0,
        "WAITING_IO": 1,
        "WAITING_SUBCALL": 0,
        "WAITING_FUNCTION_CODE": 0,
        "WAITING_SLEEP": 1,
        "DONE": 0,
    }
    assert (payload.runnable_count, payload.inflight_count) == (1, 3)
    assert payload.available_contexts == 125
    assert payload.executor_process_instance_id == "cafe0001"
    assert payload.memory_bytes > 1_000_000


def test_without_a_row_heartbeats_are_sent_when_they_are_due(new_bench):
    bench = new_bench(heartbeat_interval_ms=10)
    runtime = bench.runtime
    while not (sent := bench.run()):
        assert 0 <= runtime.next_scheduler_delay() <= 0.01
    assert [type(m).__name__ for m in sent] == ["Heartbeat"]


@pytest.mark.parametrize(
    ("change", "look", "expected"),
    [
        ("sys.setrecursionlimit(5_000)", "sys.getrecursionlimit()", sys.getrecursionlimit()),
        ("sys.set_int_max_str_digits(0)", "sys.get_int_max_str_digits()", 4300),
        ("gc.disable()", "gc.isenabled()", True),
        ("sys.settrace(lambda *_: None)", "sys.gettrace() is None", sys.gettrace() is None),
        ("sys.setprofile(lambda *_: None)", "sys.getprofile() is None", True),
    ],
)
def test_the_next_call_does_not_find_the_process_changed(bench, change, look, expected):
    bench.output(f"import gc, sys\ndef _():\n    {change}")
    assert bench.output(f"import gc, sys\ndef _():\n    return {look}") == expected


def test_the_row_of_a_retiring_executor_says_so(row, new_bench):
    bench = new_bench(row=row)
    bench.runtime.handle_inbound_message({"messageType": "HeartbeatAck"})
    bench.output("def _():\n    return 1")
    assert row._words[3] == 1
    bench.runtime.retire("test")
    bench.run()
    assert (row._words[3], row._words[6]) == (0, 0)


def test_a_retiring_executor_refuses_roots_and_is_finished_when_it_is_empty(bench):
    bench.start(PARENT, call_id="p")
    (waiting,) = bench.run()
    bench.runtime.retire("test")
    assert bench.runtime.build_heartbeat().payload.available_contexts == 0
    bench.start("def _():\n    return 1", call_id="r")
    bench.start("def _():\n    return 1", call_id="p/sub-0", parentCallId="p")
    assert ids_and_kinds(bench.run()) == [
        ("r", "executor_capacity_exhausted"),
        ("p/sub-0", "CallCompleted"),
    ]
    assert not bench.runtime.is_finished
    bench.resume(waiting, 1)
    bench.run()
    assert bench.runtime.is_finished


def test_modules_stay_a_while_after_the_last_call_of_their_task(new_bench):
    source = "COUNT = []\ndef _():\n    COUNT.append(1)\n    return len(COUNT)"
    bench = new_bench()
    assert [bench.output(source), bench.output(source)] == [1, 2]
    at_once = new_bench(task_linger_ns=0)
    assert at_once.output(source) == 1
    at_once.run()
    assert at_once.output(source) == 1


def test_modules_of_a_task_are_not_released_under_a_call_that_came_in_between(new_bench):
    bench = new_bench(task_linger_ns=20_000_000)
    bench.output("def _():\n    return 1")
    bench.start(READ, ["a", "b"])
    (waiting,) = bench.run()
    interrupts._real_sleep(0.03)
    bench.run()
    bench.resume(waiting, 1)
    (waiting,) = bench.run()
    bench.resume(waiting, 2)
    assert [exact_json.decode(m.payload.output) for m in bench.run()] == [[1, 2]]


def test_no_more_than_a_few_tasks_linger(bench):
    for n in range(TASKS_LINGERING_MAX + 10):
        bench.call("def _():\n    return 1", taskId=f"t{n}")
    bench.run()
    assert bench.runtime._attempts._loader.loaded_count() == TASKS_LINGERING_MAX


# ---- guards ---------------------------------------------------------------------------------------


def test_sdk_calls_work_only_in_the_running_call_itself(bench):
    source = (
        READ
        + """
import threading
from greenlet import greenlet
def attempt(log):
    try:
        log.append(PROVIDER.read_req("kv", "get", {}))
    except RuntimeError as error:
        log.append(str(error)[:29])
def _():
    global PROVIDER
    PROVIDER = get_provider()
    log = []
    thread = threading.Thread(target=attempt, args=(log,))
    thread.start()
    thread.join()
    greenlet(attempt).switch(log)
    return log
"""
    )
    assert bench.output(source) == ["reads, writes, sub-calls and "] * 2


def test_a_finalizer_after_the_end_of_its_call_cannot_use_the_sdk(bench):
    source = (
        READ
        + """
import blockx_test_log as LOG
PROVIDER = get_provider()
class Late:
    def __del__(self):
        try:
            PROVIDER.read_req("kv", "get", {})
        except RuntimeError:
            LOG.append("refused")
def _():
    late = Late()
    late.me = late
"""
    )
    log: list[str] = []
    sys.modules["blockx_test_log"] = log  # type: ignore[assignment]
    try:
        bench.call(source)
        gc.collect()
    finally:
        del sys.modules["blockx_test_log"]
    assert log == ["refused"]
    assert bench.run() == []


def test_a_finalizer_at_the_very_end_of_its_call_cannot_use_the_sdk(bench):
    source = (
        READ
        + """
import blockx_test_log as LOG
PROVIDER = get_provider()
class Row(dict):
    def __del__(self):
        try:
            PROVIDER.read_req("kv", "get", {})
        except RuntimeError:
            LOG.append("refused")
def _():
    return Row(a=1)
"""
    )
    log: list[str] = []
    sys.modules["blockx_test_log"] = log  # type: ignore[assignment]
    try:
        assert bench.output(source) == {"a": 1}
    finally:
        del sys.modules["blockx_test_log"]
    assert log == ["refused"]


def test_a_function_that_switches_to_the_hub_by_itself_only_yields(bench):
    source = """
from greenlet import getcurrent
def _(n):
    getcurrent().parent.switch()
    return n
"""
    bench.start(source, [1])
    bench.start("def _(n):\n    return n", [2])
    assert sorted(exact_json.decode(m.payload.output) for m in bench.run()) == [1, 2]


def test_an_illegal_state_change_is_our_bug_and_changes_nothing():
    message = decode_main_message(
        exact_json.encode(
            {
                "messageType": "ExecuteCall",
                "callId": "c",
                "payload": {
                    "taskId": "t",
                    "functionId": "f",
                    "functionCodeDigest": "d",
                    "entrySelector": "_",
                    "args": [],
                    "attemptSeq": 1,
                    "callSeq": 1,
                },
            }
        )
    )
    legal = {
        ExecState.RUNNABLE: {ExecState.RUNNING, ExecState.DONE},
        ExecState.RUNNING: set(ExecState) - {ExecState.RUNNABLE, ExecState.RUNNING},
        ExecState.DONE: set(),
    }
    for state in ExecState:
        for to in ExecState:
            counts = [0] * 7
            context = ExecContext(message, counts, 0)
            counts[0], counts[state], context.state = 0, 1, state
            if to in legal.get(state, {ExecState.RUNNING, ExecState.DONE}):
                context.move(to)
                assert (context.state, counts[to], sum(counts)) == (to, 1, 1)
            else:
                with pytest.raises(InvalidTransitionError):
                    context.move(to)
                assert (context.state, counts[state]) == (state, 1)
