"""Whatever the text, the answer is a verdict; whatever was accepted, compiles."""

import ast
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockx.audit.auditor import audit_bytes, audit_source
from blockx.functions.entry import compile_source
from tests.audit.samples import ACCEPTED, REFUSED

SAMPLES = [
    s for s in [*ACCEPTED, *(s for rows in REFUSED.values() for s in rows)] if len(s) < 4_000
]
SHALLOW = [s for s in SAMPLES if s not in REFUSED["source"]]
PIECES = [
    *"()[]{}.,:;=@*'\"\\\n\r\t #_",
    *(
        "json",
        "Table",
        "__class__",
        "def f(x):",
        "class A:",
        "lambda",
        "import ",
        "from ",
        " as ",
        "match x:",
    ),
    *(
        "case ",
        "global x",
        "for x in ",
        "except* ",
        "async ",
        "f'{",
        ":=",
        "type X = ",
        "[T]",
        "\0",
        "\u202e",
    ),
]


def check(source):
    verdict = audit_source(source)
    if verdict.accepted:
        compile_source("f", source, "functions/f.py#0")
    for finding in verdict.findings:
        assert finding.message.isprintable()


@given(st.text())
def test_any_text_gets_a_verdict(source):
    check(source)


@given(st.binary())
def test_any_bytes_get_a_verdict(data):
    audit_bytes(data)


@given(st.sampled_from(SAMPLES), st.data())
@settings(max_examples=400)
def test_a_mutated_sample_gets_a_verdict(source, data):
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(source)))
        stop = data.draw(st.integers(start, min(len(source), start + 12)))
        piece = data.draw(st.sampled_from(PIECES))
        source = source[:start] + piece + source[stop:]
    check(source)


@pytest.mark.parametrize("seed", range(40))
def test_spliced_trees_get_a_verdict(seed):
    """Statements of several samples in one source: names of one meet scopes of another."""
    rng = random.Random(seed)
    statements = []
    while len(statements) < 6:
        try:
            statements += ast.parse(rng.choice(SHALLOW).removeprefix("\ufeff")).body[:3]
        except SyntaxError:
            continue  # of a newer Python
    rng.shuffle(statements)
    check(ast.unparse(ast.Module(statements, [])))
