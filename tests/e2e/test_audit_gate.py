"""``functions.mode: restricted``: what the audit refuses does not run, whichever way it is reached."""

import pytest

from blockx.errors import ErrorKind

RESTRICTED = "functions: {path: functions, mode: restricted}"
OFFENDING = "import os\n\ndef _(n):\n    return os.getpid() and n\n"

pytestmark = pytest.mark.slow


def test_accepted_functions_run_and_call_each_other(product):
    source = "def _(n):\n    return function.call('child', n) + 1\n"
    children = {"child": "def _(n):\n    return n * 2\n"}
    ended = product.write(source, [[1], [2]], config=RESTRICTED, children=children).run()
    assert (ended.code, ended.outputs()) == (0, [3, 5])


def test_a_refused_function_fails_its_calls_with_the_finding(product):
    ended = product.write(OFFENDING, [[1], [2]], config=RESTRICTED).run()
    assert ended.code == 1
    for line in ended.lines():
        assert line["error"]["kind"] == ErrorKind.LOAD_ERROR
        assert "functions/case.py, line 1, column 8: import of os" in line["error"]["message"]


def test_a_refused_function_cannot_be_reached_by_a_sub_call(product):
    source = "def _(n):\n    return function.call('child', n)\n"
    ended = product.write(source, [[1]], config=RESTRICTED, children={"child": OFFENDING}).run()
    assert ended.code == 1
    (line,) = ended.lines()
    assert "import of os" in line["error"]["message"]


def test_a_function_that_formats_its_way_out_fails_to_load(product):
    source = 'def _(x):\n    return {"s": "{0.__class__.__mro__}".format(x)}\n'
    ended = product.write(source, [[1]], config=RESTRICTED).run()
    (line,) = ended.lines()
    assert line["error"]["kind"] == ErrorKind.LOAD_ERROR


def test_open_mode_asks_no_audit(product):
    ended = product.write(OFFENDING, [[1]]).run()
    assert (ended.code, ended.outputs()) == (0, [1])
