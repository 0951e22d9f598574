"""``blockx call``: one call from the command line, its result on stdout, what went wrong on stderr."""

import pytest

pytestmark = pytest.mark.slow

SOURCE = (
    "from blockx import function\n\n"
    "def _(n, name='nobody'):\n"
    "    print('asked for', name)\n"
    "    if n == 0:\n        raise ValueError('no zero')\n"
    "    if n < 0:\n        while True: pass\n"
    "    return {'wei': function.call('double', n), 'name': name}\n"
)


@pytest.fixture
def folder(product):
    double = "def _(n):\n    return n * 2\n"
    return product.write(
        SOURCE, [], children={"double": double}, config="dispatcher: {call_deadline_ms: 300}"
    )


def test_a_call_prints_its_result_digit_for_digit_and_leaves_nothing_behind(folder):
    before = sorted(path.name for path in folder.folder.iterdir())
    ended = folder.run("call", "case", str(2**255), '"vitalik"')
    assert ended.code == 0, ended.text
    assert f'{{"wei":{2**256},"name":"vitalik"}}\n' in ended.text
    assert "attempts 1" in ended.text
    assert sorted(path.name for path in folder.folder.iterdir()) == before


def test_a_call_that_fails_shows_source_output_and_variables(folder):
    ended = folder.run("call", "case", "0")
    assert ended.code == 1
    for text in ("user_error: ValueError: no zero", "line 6, in _", "asked for nobody", "n = 0"):
        assert text in ended.text


def test_a_call_is_under_the_limits_of_a_job(folder):
    ended = folder.run("call", "case", "-1")
    assert (ended.code, ended.text.startswith("deadline_exceeded: ")) == (1, True), ended.text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("case", "vitalik"), "a text needs quotes of its own: '\"vitalik\"'"),
        (("cases", "1"), "no function 'cases'; did you mean case?"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(folder, arguments, text):
    ended = folder.run("call", *arguments)
    assert ended.code == 2
    assert text in ended.text
