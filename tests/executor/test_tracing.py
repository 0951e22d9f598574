"""Spans of attempts: what is noted, what a line says, what is dropped."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockx.executor import tracing
from blockx.executor.log import Log
from blockx.executor.tracing import (
    EVENTS_MAX,
    RING_SPANS_MAX,
    Settings,
    SpanDraft,
    SpanFile,
    Tracer,
    start_tracer,
)
from blockx.ipc.messages import CallWaiting

TRACE = f"00-{'a1' * 16}-{'b2' * 8}-01"
ASKS = "from blockx import function\ndef _(n):\n    return function.call('g', n)\n"


class Lines:
    """An exporter that keeps what it gets."""

    def __init__(self, answer: str = "") -> None:
        self.spans: list[SpanDraft] = []
        self.answer = answer

    def export(self, spans: Any) -> str:
        self.spans += spans
        return self.answer


class Logged:
    """A log whose lines can be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        self.log = Log(self._descriptor, "exec-1", {})

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def close(self) -> None:
        os.close(self._descriptor)


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Logged]:
    made = Logged(tmp_path / "log")
    yield made
    made.close()


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def tracer(lines: Lines) -> Iterator[Tracer]:
    made = Tracer("exec-1", [lines], Log(2, "exec-1", {}), has_events=True)
    made.start()
    yield made
    made.close()


def traced(bench: Any, trace: str | None, source: str, args: Any = (), **fields: Any) -> None:
    """Start a call as main does, with a context in its envelope."""
    submit = bench.runtime.submit_call

    def with_trace(message: Any, sidecar: bytes | None = None) -> None:
        message.trace = trace
        submit(message, sidecar)

    handlers = bench.runtime._handlers
    kept = dict(handlers)
    handlers.update({kind: with_trace for kind in handlers if kind.__name__ == "ExecuteCall"})
    try:
        bench.start(source, args, **fields)
    finally:
        handlers.update(kept)


def test_a_span_has_the_outcome_and_the_costs_of_its_attempt(new_bench, tracer, lines):
    bench = new_bench(tracer=tracer)
    traced(bench, TRACE, "import time\ndef _():\n    time.sleep(0.005)\n    return 1")
    traced(bench, TRACE, "def _():\n    return {}['gone']", attemptSeq=3)
    ended = bench.run_to_end()
    tracer.close()
    spans = {span.attributes["call_id"]: span for span in lines.spans}
    assert {call: (span.outcome, span.message) for call, span in spans.items()} == {
        "c1": ("completed", ""),
        "c2": ("user_error", "KeyError: 'gone'"),
    }
    for message in ended:
        attributes = dict(spans[message.call_id].attributes)
        expected = {
            "task_id": "t1",
            "call_id": message.call_id,
            "parent_call_id": "",
            "attempt": message.payload.attempt_seq,
            "executor_id": "exec-1",
            "outcome": spans[message.call_id].outcome,
            "cpu_us": message.payload.cpu_us,
            "io_us": 0,
            "subcall_us": 0,
            "sleep_us": message.payload.sleep_us,
            "queue_us": message.payload.queue_us,
        }
        assert attributes == expected
    assert spans["c1"].end_ns - spans["c1"].start_ns >= 5_000_000
    assert {span.trace_id for span in spans.values()} == {int("a1" * 16, 16)}
    assert [span.parent_id for span in spans.values()] == [0, 0]


def test_what_a_call_asks_for_carries_its_span_and_a_subcall_is_a_child_of_it(
    new_bench, tracer, lines
):
    bench = new_bench(tracer=tracer)
    traced(bench, TRACE, ASKS, [1])
    [asked] = bench.run()
    assert isinstance(asked, CallWaiting)
    assert asked.trace is not None
    traced(bench, asked.trace, "def _(n):\n    return n", [1], parentCallId="c1")
    bench.run()
    bench.resume(asked, 1)
    bench.run()
    tracer.close()
    child, parent = lines.spans
    assert asked.trace == f"00-{parent.trace_id:032x}-{parent.span_id:016x}-01"
    assert (child.trace_id, child.parent_id) == (parent.trace_id, parent.span_id)
    # Two fetches of source by the parent's load come first.
    assert [what for what, _, _ in parent.events or ()] == [
        "receive ExecuteCall",
        *["send CallWaiting", "receive ResumeCall"] * 2,
        "send CallCompleted",
    ]
    assert (parent.events or [])[3][1] == asked.request_id


@pytest.mark.parametrize(
    "trace",
    [None, "", "x", TRACE[:-1] + "0", TRACE.upper(), TRACE + "\n", TRACE.replace("00-", "01-")],
)
def test_without_a_valid_sampled_context_there_is_no_span(new_bench, tracer, lines, trace):
    bench = new_bench(tracer=tracer)
    traced(bench, trace, ASKS, [1])
    [asked] = bench.run()
    assert asked.trace is None
    bench.resume(asked, 1)
    bench.run()
    tracer.close()
    assert lines.spans == []


def test_without_a_tracer_a_context_is_passed_by(new_bench):
    bench = new_bench()
    traced(bench, TRACE, ASKS, [1])
    [asked] = bench.run()
    assert asked.trace is None


@pytest.mark.parametrize("is_started", [True, False])
def test_a_replaced_attempt_says_so(new_bench, tracer, lines, is_started):
    bench = new_bench(tracer=tracer)
    traced(bench, TRACE, ASKS, [1], call_id="c1")
    if is_started:
        bench.run()
    traced(bench, TRACE, "def _(n):\n    return n", [1], call_id="c1", attemptSeq=2)
    bench.run()
    tracer.close()
    assert sorted((span.attributes["attempt"], span.outcome) for span in lines.spans) == [
        (1, "replaced"),
        (2, "completed"),
    ]


def draft(parent_id: int = 0, *, failed: bool = False) -> SpanDraft:
    span = SpanDraft(0xA1, 0xB2, parent_id, 1_000_000_000, True)
    span.event("send CallWaiting", "req-1", 1_500_000_000)
    span.name, span.end_ns = "balances", 2_000_123_000
    span.outcome, span.message = ("user_error", "KeyError: 7") if failed else ("completed", "")
    span.attributes = {"call_id": "c1", "attempt": 1}
    return span


RESOURCE = {"service.name": "blockx", "service.instance.id": "exec-1"}
EPOCH_NS = 1_700_000_000_000_000_000


def test_a_line_of_the_file_says_it_all(tmp_path):
    path = tmp_path / "spans.jsonl"
    file = SpanFile(str(path), RESOURCE, EPOCH_NS)
    assert (file.export([draft(0xC3, failed=True)]), file.export([draft()])) == ("", "")
    failed, fine = map(json.loads, path.read_text().splitlines())
    assert failed == {
        "name": "balances",
        "context": {
            "trace_id": "0x000000000000000000000000000000a1",
            "span_id": "0x00000000000000b2",
            "trace_state": "[]",
        },
        "kind": "SpanKind.INTERNAL",
        "parent_id": "0x00000000000000c3",
        "start_time": "2023-11-14T22:13:21.000000Z",
        "end_time": "2023-11-14T22:13:22.000123Z",
        "status": {"status_code": "ERROR", "description": "KeyError: 7"},
        "attributes": {"call_id": "c1", "attempt": 1},
        "events": [
            {
                "name": "send CallWaiting",
                "timestamp": "2023-11-14T22:13:21.500000Z",
                "attributes": {"request_id": "req-1"},
            }
        ],
        "links": [],
        "resource": {"attributes": RESOURCE, "schema_url": ""},
    }
    assert (fine["parent_id"], fine["status"]) == (None, {"status_code": "UNSET"})


@pytest.mark.slow
@pytest.mark.parametrize(("parent_id", "failed"), [(0, False), (0xC3, True)])
def test_a_line_has_the_form_of_the_sdks_own(tmp_path, monkeypatch, parent_id, failed):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    span = draft(parent_id, failed=failed)
    ours = SpanFile(str(tmp_path / "spans.jsonl"), RESOURCE, EPOCH_NS)._line(span)
    theirs = json.loads(tracing._collector(RESOURCE, EPOCH_NS)._convert(span).to_json())
    assert ours["resource"]["attributes"].items() <= theirs["resource"]["attributes"].items()
    del ours["resource"]["attributes"], theirs["resource"]["attributes"]
    assert ours == theirs


def test_a_file_that_cannot_be_written_is_told_and_nothing_else_happens(tmp_path, logged):
    tracer = Tracer("exec-1", [SpanFile(str(tmp_path), RESOURCE, 0)], logged.log, has_events=False)
    tracer._ring.extend([draft(), draft()])
    tracer.start()
    tracer.close()
    [line] = logged.lines()
    assert (line["message"], line["spans"], line["reason"]) == (
        "spans dropped",
        2,
        f"{tmp_path}: Is a directory",
    )


def test_a_full_ring_drops_the_oldest_and_says_how_many(new_bench, lines, logged):
    tracer = Tracer("exec-1", [lines], logged.log, has_events=False)
    oldest = draft()
    tracer._ring.extend([oldest, *[draft()] * (RING_SPANS_MAX - 1)])
    bench = new_bench(tracer=tracer)
    traced(bench, TRACE, "def _():\n    return 1")
    bench.run()
    tracer.start()
    tracer.close()
    assert len(lines.spans) == RING_SPANS_MAX
    assert oldest not in lines.spans
    [line] = logged.lines()
    assert (line["spans"], line["reason"]) == (1, "more than can be exported")


def test_events_of_a_span_are_limited_and_only_kept_when_wanted():
    eager, plain = SpanDraft(1, 1, 0, 0, True), SpanDraft(1, 1, 0, 0, False)
    for n in range(EVENTS_MAX + 5):
        eager.event("send CallWaiting", f"r{n}", n)
        plain.event("send CallWaiting", f"r{n}", n)
    assert (len(eager.events or ()), plain.events) == (EVENTS_MAX, None)


def test_the_helper_thread_takes_no_signals(tracer):
    [thread] = [thread for thread in threading.enumerate() if thread.name == "spans"]
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    assert blocked >> 13 & 1, "SIGALRM"


def test_settings_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    read = Settings.from_environment
    assert read({}) is None
    assert read({"BLOCKX_OTEL_UDS_EVENTS": "1", "BLOCKX_OTEL_SPAN_FILE": ""}) is None
    file = {"BLOCKX_OTEL_SPAN_FILE": "s.jsonl"}
    assert read(file) == Settings(str(tmp_path / "s.jsonl"), "", False)
    assert read({**file, "BLOCKX_OTEL_UDS_EVENTS": "1"}) == Settings(
        str(tmp_path / "s.jsonl"), "", True
    )
    assert read({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1"}) == Settings("", "http://h:1", False)


def test_without_settings_there_is_no_tracer_and_no_thread(logged):
    assert start_tracer(None, "exec-1", logged.log) is None
    assert "spans" not in [thread.name for thread in threading.enumerate()]


def test_a_collector_without_the_library_is_left_out_with_a_word(monkeypatch, logged):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert start_tracer(Settings("", "http://127.0.0.1:9", False), "exec-1", logged.log) is None
    [line] = logged.lines()
    assert "pip install 'blockx[otel]'" in line["message"]
