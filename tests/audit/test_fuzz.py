"""Whatever the text, the answer is a verdict; whatever was accepted compiles, to code that reaches nothing refused."""

import ast
import builtins
import dis
import random
from types import CodeType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockx.audit import tables
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


ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR"}
NAMES = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF"}
STORES = {"STORE_NAME", "STORE_GLOBAL", "STORE_FAST", "STORE_DEREF"}
MADE_BY_THE_COMPILER = {
    "__annotations__", "__classcell__", "__doc__", "__firstlineno__", "__module__", "__name__", "__qualname__",
    "__static_attributes__",
}  # fmt: skip
"""Names in the code of class statements and of annotations that no source has written."""


def check_code(code):
    """The same question to the compiler's output, which knows nothing of our trees and scopes."""
    safe = tables.SAFE_BUILTINS.keys() | MADE_BY_THE_COMPILER
    for step in dis.get_instructions(code):
        name = step.argval
        if step.opname in ATTRIBUTES:
            assert not name.startswith("_")
            assert name not in tables.REFUSED_ATTRIBUTES
        elif step.opname == "IMPORT_NAME":
            assert name in tables.ALLOWED_IMPORTS
        elif step.opname in NAMES:
            assert not hasattr(builtins, name) or name in safe
        if step.opname in NAMES | STORES and name.startswith("__") and name.strip("_"):
            known = MADE_BY_THE_COMPILER | tables.DEFINABLE_METHODS | {"__slots__"}
            assert name in known
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            check_code(constant)


def test_the_check_of_code_sees_what_a_source_reaches():
    for source in ("import os", "p._x", "eval", "p.format", "def f():\n  eval", "__x = 1"):
        with pytest.raises(AssertionError):
            check_code(compile_source("f", source, "functions/f.py#0"))


def check(source):
    verdict = audit_source(source)
    if verdict.accepted:
        check_code(compile_source("f", source, "functions/f.py#0"))
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


@pytest.mark.parametrize("source", ACCEPTED, ids=range(len(ACCEPTED)))
def test_honest_code_reaches_nothing_refused(source):
    check(source)
