"""Each rule against sources that it must refuse, and honest neighbours of these."""

import sys

import pytest

from blockx.audit.auditor import audit_source
from blockx.audit.verdict import FINDINGS_MAX
from tests.audit.samples import ACCEPTED, REFUSED, REFUSED_ON_NEW_PYTHONS


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        pytest.param(rule, source, id=f"{rule}-{n}")
        for rule, sources in REFUSED.items()
        for n, source in enumerate(sources)
    ],
)
def test_the_rule_refuses(rule, source):
    verdict = audit_source(source)
    assert rule in {finding.rule for finding in verdict.findings}


@pytest.mark.parametrize("source", ACCEPTED, ids=range(len(ACCEPTED)))
def test_honest_code_is_accepted(source):
    assert audit_source(source).findings == ()


@pytest.mark.parametrize("source", REFUSED_ON_NEW_PYTHONS)
def test_syntax_newer_than_the_tables_is_refused(source):
    verdict = audit_source(source)
    expected = {"source"} if sys.version_info < (3, 12) or "t'" in source else {"syntax"}
    assert expected <= {finding.rule for finding in verdict.findings}


@pytest.mark.parametrize(
    ("source", "place", "parts"),
    [
        ("x = 1\n\nimport os\n", (3, 8), ["import of os", "arguments"]),
        ("import time", (1, 8), ["import of time", "`from blockx_sdk import sleep`"]),
        ("def _(p):\n    return json.codecs", (2, 12), ["json.codecs", "dumps, loads"]),
        ("def _(p):\n    return eval(p)", (2, 12), ["built-in eval", "write the code itself"]),
        ("def _(p):\n    return foo", (2, 12), ["foo is not defined", "define or import it"]),
        ("def _(p):\n    return re", (2, 12), ["re is not defined", "write `import re`"]),
        ("def _(p):\n    return p._x", (2, 12), ["attribute _x", "`x`"]),
        ("def _(p):\n    return '{}'.format(p)", (2, 12), ["attribute format", "f-string"]),
        ("def f(*, __x): pass", (1, 10), ["name __x", "write `x`"]),
        ("x = 1\n__name__", (2, 1), ["name __name__", "leave it out"]),
        ("class A:\n  def __del__(s): pass", (2, 3), ["__del__", "__init__, __repr__"]),
        ("json.dumps = 1", (1, 1), ["store into json", "your own"]),
        ("x = [Table]", (1, 6), ["class blockdb.Table", "pass the object"]),
        ("class A(dict): pass", (1, 9), ["base of class A", "attribute"]),
        ("@print\ndef f(): pass", (1, 2), ["decorator of f", "dataclass"]),
        ("def _(p):\n  try: p\n  except* ValueError: p", (2, 3), ["TryStar", "`except`"]),
        ("match 1:\n case int(real=x): x", (2, 7), ["attribute real", "in the body"]),
        ("'\u4f60\u597d'; eval", (1, 7), ["built-in eval"]),
        ("x = (\n", (1, 5), ["SyntaxError", "mend it"]),
        ("# a\nx = '\u202e'", (2, 6), ["U+202E", "remove it"]),
    ],
)
def test_a_finding_says_where_what_and_what_instead(source, place, parts):
    finding = audit_source(source).findings[0]
    assert (finding.line, finding.column) == place
    for part in parts:
        assert part in finding.message


def test_findings_are_in_the_order_of_the_text_and_limited():
    verdict = audit_source("\n".join(f"import os{n}" for n in range(200)))
    assert [finding.line for finding in verdict.findings] == list(range(1, FINDINGS_MAX + 1))


def test_a_long_name_is_shortened_in_messages():
    (finding,) = audit_source(f"def _(p):\n    return p._{'x' * 10_000}").findings
    assert len(finding.message) < 400


def test_the_report_names_what_a_function_reaches():
    source = (
        "from blockx_sdk import db, rpc\nimport math as m\nfrom decimal import Decimal as D\n"
        "def _(p):\n"
        "    Table('a'), TimeTable(name='b'), db.get('c', {}), BlockTable(p)\n"
        "    ChainState('dev', 1), rpc.call('m', [], 'main'), rpc.call('m'), rpc.call('m', chain='x')\n"
        "    return function.call('f', 1), function.call('g/h'), function.call(p)\n"
    )
    report = audit_source(source).report
    assert report.imports == ("blockx_sdk.db", "blockx_sdk.rpc", "decimal.Decimal", "math")
    assert report.tables == ("a", "b", "c")
    assert report.chains == ("dev", "main", "x")
    assert report.functions == ("f", "g/h")
    assert report.computed == ("functions", "tables")


def test_a_name_of_the_functions_own_is_not_reported():
    source = "def Table(name):\n    return name\n\ndef _(p):\n    return Table('a')"
    assert audit_source(source).report.tables == (
        "a",
    )  # it may be the prelude's, as far as we know
    source = "def _(Table):\n    return Table('a')"
    assert audit_source(source).report.tables == ()
