"""The corpus: attacks on sandboxes by kind, and honest functions; see its fields ``note`` and ``cite``."""

import json
from pathlib import Path

import pytest

from blockx.audit.auditor import audit_source

SAMPLES = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "corpus.jsonl").read_text().splitlines()
]
JUDGED = [sample for sample in SAMPLES if sample["expect"] != "contained"]
"""Of the others the audit may say either: what they do is the business of the running executor."""


def test_the_corpus_is_whole():
    assert len(SAMPLES) == 144
    assert {sample["expect"] for sample in SAMPLES} == {"reject", "contained", "ok"}


@pytest.mark.parametrize("sample", JUDGED, ids=[sample["id"] for sample in JUDGED])
def test_attacks_are_refused_and_honest_functions_accepted(sample):
    verdict = audit_source(sample["source"])
    assert verdict.accepted == (sample["expect"] == "ok"), verdict.findings


@pytest.mark.parametrize("sample", SAMPLES, ids=[sample["id"] for sample in SAMPLES])
def test_every_sample_gets_a_verdict_with_places_and_messages(sample):
    for finding in audit_source(sample["source"]).findings:
        assert finding.line >= 0
        assert finding.column >= 0
        assert "; " in finding.message or ": " in finding.message
