"""YAML without guesses: what is text stays text, and every mistake has a line and a column."""

import pytest

from blockx import strict_yaml
from blockx.errors import UsageError
from blockx.strict_yaml import parse

BIG = 115792089237316195423570985008687907853269984665640564039457584007913129639935


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing", None),
        ("null", None),
        ("true", True),
        ("false", False),
        ("-0", 0),
        ("17", 17),
        (f"-{BIG}", -BIG),
        ("1.50", 1.5),
        ("1e3", 1000.0),
        ("-2.5E-1", -0.25),
        ("'17'", "17"),
        ('"true"', "true"),
        ("|\n  17\n", "17\n"),
        # What other readers guess at is text.
        *((text, text) for text in ("0x12", "012", "0o7", "1_000", "+1", ".5", "1.", "12:30")),
        *(
            (text, text)
            for text in ("on", "no", "Yes", "True", "NULL", "~", ".inf", ".nan", "2024-01-02")
        ),
        ("[0x1f, [], {}]", ["0x1f", [], {}]),
        ("a: &x {b: 1}\nc: *x", {"a": {"b": 1}, "c": {"b": 1}}),
        ("'1': a", {"1": "a"}),
    ],
)
def test_only_json_is_not_text(text, value):
    parsed = parse(text, "c.yaml").value
    assert parsed == value
    assert type(parsed) is type(value)


def bomb():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\n a: 3", "c.yaml:3:3: not valid YAML: mapping values are not allowed"),
        ("a: 1\na: 2", "c.yaml:2:1: the key 'a' was given before, in line 1"),
        ("a:\n\t- b", "c.yaml:2:1: not valid YAML: found character that cannot start any token"),
        ("a: [1\nb: 2", "c.yaml:2:2: not valid YAML: did not find expected ',' or ']'"),
        ("a: 1\n---\nb: 2", "c.yaml:2:1: not valid YAML: but found another document"),
        ("a: *x", "c.yaml:1:4: not valid YAML: found undefined alias"),
        ("ok: 1\nbad: \x01", "c.yaml:2: not valid YAML: unacceptable character #x0001"),
        ("a: !!int '3'", "c.yaml:1:4: the tag 'tag:yaml.org,2002:int' is not allowed"),
        ("a: !!python/name:os.system x", "c.yaml:1:4: the tag 'tag:yaml.org,2002:python/name:os"),
        ("a: !!str 5", "c.yaml:1:4: the tag 'tag:yaml.org,2002:str' is not allowed"),
        ("a: !!set {b, c}", "c.yaml:1:4: the tag 'tag:yaml.org,2002:set' is not allowed"),
        ("1: a", "c.yaml:1:1: a key must be text; put it in quotes"),
        ("? [a]\n: b", "c.yaml:1:3: a key must be text; put it in quotes"),
        ("a: &x {b: 1}\nc: {<<: *x}", "c.yaml:2:5: merge keys are not supported"),
        ("a: 1e400", "c.yaml:1:4: the number 1e400 is out of range"),
        ("a: " + "9" * 4_301, "c.yaml:1:4: a number of more than 4,300 digits"),
        ("[" * 102 + "]" * 102, "c.yaml:1:102: lists and mappings nested deeper than 100 levels"),
        ("[" * 5_000, "c.yaml:1:1001: not valid YAML: exceeded maximum nesting depth"),
        ("a: &x [*x]", "nested deeper than 100 levels"),
    ],
)
def test_mistakes_are_refused_with_their_place(text, message):
    with pytest.raises(UsageError) as caught:
        parse(text, "c.yaml")
    assert message in str(caught.value)


def test_nested_aliases_cannot_stand_for_billions(monkeypatch):
    monkeypatch.setattr(strict_yaml, "NODES_MAX", 10_000)
    with pytest.raises(UsageError, match="more than 10,000 values, those behind aliases counted"):
        parse(bomb(), "c.yaml")


def test_places_are_those_of_an_editor():
    document = parse("a: 1\njobs:\n  - name: x\n    calls: [1,\n      2]\n", "c.yaml")
    assert document.at(("a",)) == "c.yaml:1:4"
    assert document.at(("jobs", 0, "calls", 1)) == "c.yaml:5:7"
    assert document.at(("jobs", 0, "calls"), key=True) == "c.yaml:4:5"
    # Of what is not there: the nearest that is.
    assert document.at(("jobs", 0, "results")) == "c.yaml:3:5"
    assert document.at(("jobs", 7)) == "c.yaml:3:3"
    assert parse("", "c.yaml").at(("a",)) == "c.yaml"
