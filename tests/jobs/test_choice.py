"""Which calls run: the expression of ``--where`` and the flags beside it."""

import pytest

from blockx.errors import UsageError
from blockx.jobs.choice import Choice, Where

CALLS = [(0, "f", None), (1, "a/b", True), (150, "f", False)]


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("index<100", [True, True, False]),
        ("1 <= index < 150", [False, True, False]),
        ("100>index and not function=='f'", [False, True, False]),
        ("function=='a/b' or index==150", [False, True, True]),
        ("function==f", [True, False, True]),
        ("status==failed", [False, False, True]),
        ("status!=new and (index==1 or index==0)", [False, True, False]),
        ("'g' > function", [True, True, True]),
    ],
)
def test_an_expression_holds_or_not(text, holds):
    assert [Where(text).holds(*call) for call in CALLS] == holds


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("index", "index is no comparison"),
        ("index < ", "invalid syntax"),
        ("index=1", "invalid syntax"),
        ("__import__('os').system('x') == 0", "no whole number and no text"),
        ("index == 1.5", "1.5 is no whole number"),
        ("index == True", "True is no whole number"),
        ("index == 'a'", "compares a number with a text"),
        ("index in (1, 2)", "no whole number and no text"),
        ("function is f", "compare with == != < <= > >="),
        ("index+1 == 2", "index + 1 is no whole number"),
        ("(" * 500 + "index==1" + ")" * 500, "--where"),
        ("index==1 or " * 200 + "index==1", "longer than 2,000 characters"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_part_that_is_wrong(text, reason):
    with pytest.raises(UsageError) as caught:
        Where(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (Choice(), [True, False, False]),
        (Choice(retry_failed=True), [True, False, True]),
        (Choice(only_failed=True), [False, False, True]),
        (Choice(where=Where("index<100")), [True, False, False]),
        (Choice(where=Where("index>100"), retry_failed=True), [False, False, True]),
        (Choice(where=Where("status==ok")), [False, True, False]),
        (Choice(where=Where("status!=new"), only_failed=True), [False, False, True]),
    ],
)
def test_finished_calls_run_again_only_if_a_flag_says_so(choice, wanted):
    assert [choice.wants(*call) for call in CALLS] == wanted
