"""Which calls are traced, and the context that they get."""

import re

import pytest

from blockx.errors import UsageError
from blockx.transport.tracing import TraceSource

CALLS = [f"job/{n}" for n in range(2_000)]
ON = {"BLOCKX_OTEL_SPAN_FILE": "spans.jsonl"}


@pytest.mark.parametrize(
    "environ",
    [{}, {"OTEL_TRACES_SAMPLER_ARG": "0.5", "BLOCKX_OTEL_UDS_EVENTS": "1"}, dict.fromkeys(ON, "")],
)
def test_without_a_place_for_spans_nothing_is_traced(environ):
    assert TraceSource.from_environment(environ) is None


@pytest.mark.parametrize("environ", [ON, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}])
def test_with_one_every_call_is(environ):
    traces = TraceSource.from_environment(environ)
    assert traces is not None
    contexts = {traces.root(call) for call in CALLS}
    assert len(contexts) == len(CALLS)
    assert all(re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", text or "") for text in contexts)


def test_the_ratio_is_the_share_and_the_id_decides_which():
    def sampled(ratio, key):
        traces = TraceSource(ratio, key)
        return {call for call in CALLS if traces.root(call)}

    quarter = sampled(0.25, b"one run")
    assert 0.2 < len(quarter) / len(CALLS) < 0.3
    assert quarter == sampled(0.25, b"another")
    assert quarter < sampled(0.5, b"one run")
    assert (sampled(0, b""), sampled(1, b"")) == (set(), set(CALLS))


def test_attempts_of_a_call_share_their_context_and_runs_do_not():
    traces = TraceSource(1, b"one run")
    assert traces.root("job/1") == traces.root("job/1")
    assert traces.root("job/1") != TraceSource(1, b"another").root("job/1")


@pytest.mark.parametrize("text", ["half", "-0.1", "1.1", "nan"])
def test_a_wrong_ratio_is_named(text):
    with pytest.raises(UsageError, match=re.escape(f"OTEL_TRACES_SAMPLER_ARG={text!r}")):
        TraceSource.from_environment({**ON, "OTEL_TRACES_SAMPLER_ARG": text})


def test_a_wrong_ratio_is_no_matter_while_nothing_is_traced():
    assert TraceSource.from_environment({"OTEL_TRACES_SAMPLER_ARG": "half"}) is None
