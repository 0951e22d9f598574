"""The audit gate of an executor: without a fitting audit, nothing is loaded in restricted mode."""

from hashlib import sha256

import pytest

from blockx.audit.tables import RULES_VERSION
from blockx.audit.verdict import audit_token
from blockx.errors import ErrorKind
from blockx.ipc.messages import CallCompleted

SOURCE = "def _(n): return n"
DIGEST = sha256(SOURCE.encode()).hexdigest()


@pytest.fixture
def restricted(new_bench):
    return new_bench(requires_audit=True)


def test_a_function_with_its_audit_runs(restricted):
    ended = restricted.call(SOURCE, 7, audit=audit_token(DIGEST))
    assert isinstance(ended, CallCompleted)


@pytest.mark.parametrize(
    ("audit", "found"),
    [
        ("", "no audit"),
        (audit_token("0" * 64), "another source"),
        (f"{RULES_VERSION + 1}:{DIGEST}", "other rules"),
        (DIGEST, "other rules"),
        ("x" * 10_000, "other rules"),
    ],
)
def test_a_function_without_a_fitting_audit_is_not_loaded(restricted, audit, found):
    failed = restricted.call(SOURCE, 7, audit=audit)
    assert failed.payload.error_kind == ErrorKind.LOAD_ERROR
    assert found in failed.payload.error_message
    assert len(failed.payload.error_message) < 500
    assert not failed.payload.body_started


def test_a_second_call_is_asked_for_its_audit_too(restricted):
    assert isinstance(restricted.call(SOURCE, 7, audit=audit_token(DIGEST)), CallCompleted)
    assert restricted.call(SOURCE, 7).payload.error_kind == ErrorKind.LOAD_ERROR


def test_open_mode_needs_no_audit_but_a_wrong_one_is_refused(bench):
    assert isinstance(bench.call(SOURCE, 7), CallCompleted)
    assert bench.call(SOURCE, 7, audit="1:x").payload.error_kind == ErrorKind.LOAD_ERROR
