"""Spans of a run, in a file and at a collector; and nothing at all when nobody asks for them."""

import http.server
import threading

import pytest

pytestmark = pytest.mark.slow

PARENT = (
    "def _(n):\n"
    "    if n == 2:\n"
    "        raise ValueError('two')\n"
    "    return {'v': function.call('child', n)}\n"
)
CHILD = {"child": "import time\ndef _(n):\n    time.sleep(0.01)\n    return n + 1\n"}
LOADED = (
    "import sys, threading\n"
    "def _():\n"
    "    names = sorted(name for name in sys.modules if name.startswith('opentelemetry'))\n"
    "    threads = sorted(thread.name for thread in threading.enumerate())\n"
    "    return {'names': names, 'threads': threads}\n"
)


@pytest.mark.spawn_modes("process", "sandbox")
def test_subcalls_are_children_of_their_callers_span_and_failures_have_error_status(product):
    product.write(PARENT, [[n] for n in range(4)], children=CHILD)
    product.environment |= {"BLOCKX_OTEL_SPAN_FILE": "spans.jsonl"}
    ended = product.run()
    assert ended.code == 1
    spans = {line["attributes"]["call_id"]: line for line in ended.lines("spans.jsonl")}
    roots = {call: line for call, line in spans.items() if line["parent_id"] is None}
    assert sorted(roots) == [f"case/{n}" for n in range(4)]
    assert len({line["context"]["trace_id"] for line in roots.values()}) == 4
    children = {
        line["attributes"]["parent_call_id"]: line
        for line in spans.values()
        if line["name"] == "child"
    }
    assert sorted(children) == ["case/0", "case/1", "case/3"]
    for parent, child in children.items():
        assert child["parent_id"] == roots[parent]["context"]["span_id"]
        assert child["context"]["trace_id"] == roots[parent]["context"]["trace_id"]
        assert roots[parent]["start_time"] <= child["start_time"]
        assert child["end_time"] <= roots[parent]["end_time"]
        assert child["attributes"]["sleep_us"] >= 10_000
    failed = {"status_code": "ERROR", "description": "ValueError: two"}
    assert {call: line["status"] for call, line in roots.items()} == {
        **{call: {"status_code": "UNSET"} for call in roots},
        "case/2": failed,
    }
    assert roots["case/2"]["attributes"]["outcome"] == "user_error"
    assert [line["events"] for line in spans.values()] == [[]] * 7


def test_only_the_calls_that_the_ratio_takes_have_spans(product):
    product.write("def _(n):\n    return {'n': n}\n", [[n] for n in range(200)])
    product.environment |= {
        "BLOCKX_OTEL_SPAN_FILE": "spans.jsonl",
        "OTEL_TRACES_SAMPLER_ARG": "0.2",
    }
    ended = product.run()
    assert ended.code == 0
    assert 10 < len(ended.lines("spans.jsonl")) < 80


def test_a_wrong_ratio_ends_the_run_before_it_starts(product):
    product.write("def _(n):\n    return {'n': n}\n", [[1]])
    product.environment |= {"BLOCKX_OTEL_SPAN_FILE": "s.jsonl", "OTEL_TRACES_SAMPLER_ARG": "most"}
    ended = product.run()
    assert ended.code == 2
    assert "OTEL_TRACES_SAMPLER_ARG='most'" in ended.text


def test_when_nothing_is_set_an_executor_loads_nothing_and_has_no_thread_for_it(product):
    product.environment |= {"OTEL_TRACES_SAMPLER_ARG": "1", "BLOCKX_OTEL_UDS_EVENTS": "1"}
    ended = product.write(LOADED, [[]]).run()
    assert (ended.code, ended.outputs()) == (
        0,
        [{"names": [], "threads": ["MainThread", "heartbeat"]}],
    )


def test_the_file_needs_no_library(product):
    product.environment |= {"BLOCKX_OTEL_SPAN_FILE": "spans.jsonl"}
    ended = product.write(LOADED, [[]]).run()
    assert (ended.code, ended.outputs()) == (
        0,
        [{"names": [], "threads": ["MainThread", "heartbeat", "spans"]}],
    )
    assert len(ended.lines("spans.jsonl")) == 1


class _Collector(http.server.BaseHTTPRequestHandler):
    """Takes what it is sent."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.taken.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as server:
        server.taken = []
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.spawn_modes("process")
def test_a_collector_gets_the_same_spans(product, collector):
    # Here, since only this test needs the extra otel.
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

    product.write(PARENT, [[n] for n in range(4)], children=CHILD)
    product.environment |= {
        "BLOCKX_OTEL_SPAN_FILE": "spans.jsonl",
        "BLOCKX_OTEL_UDS_EVENTS": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
    }
    ended = product.run()
    assert (ended.code, {path for path, _ in collector.taken}) == (1, {"/v1/traces"})
    sent = {}
    for _, body in collector.taken:
        for resource in service.ExportTraceServiceRequest.FromString(body).resource_spans:
            [of_service] = [
                pair.value.string_value
                for pair in resource.resource.attributes
                if pair.key == "service.name"
            ]
            for span in [span for scope in resource.scope_spans for span in scope.spans]:
                sent[f"0x{span.span_id.hex()}"] = (
                    of_service,
                    span.name,
                    f"0x{span.trace_id.hex()}",
                    f"0x{span.parent_span_id.hex()}" if span.parent_span_id else None,
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    [event.name for event in span.events],
                )
    assert sent == {
        line["context"]["span_id"]: (
            "blockx",
            line["name"],
            line["context"]["trace_id"],
            line["parent_id"],
            line["status"]["status_code"] == "ERROR",
            [event["name"] for event in line["events"]],
        )
        for line in ended.lines("spans.jsonl")
    }
    assert len(sent) == 7


def test_a_collector_that_is_not_there_changes_no_call(product):
    product.write("def _(n):\n    return {'n': n}\n", [[n] for n in range(20)])
    product.environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    ended = product.run()
    assert (ended.code, ended.outputs()) == (0, [{"n": n} for n in range(20)])
