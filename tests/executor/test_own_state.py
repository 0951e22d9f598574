"""Each call has its own numbers of ``random`` and its own context of ``decimal``, in every mode."""

import decimal
import random

import pytest

from tests.executor.conftest import Bench

THIRD = "def _(*_):\n    return str(Decimal(1) / Decimal(3))"
PRECISIONS = {
    "the context": "decimal.getcontext().prec = 2",
    "a context of its own": "decimal.setcontext(decimal.Context(prec=2))",
    "what new contexts are made from": "decimal.DefaultContext.prec = 2",
    "a shared context": "decimal.setcontext(decimal.BasicContext)",
    "traps": "decimal.DefaultContext.traps[decimal.Inexact] = True",
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_precision_that_a_call_sets_is_its_own(bench, name):
    source = f"import decimal\nfrom blockx_sdk import sleep\ndef _():\n    {PRECISIONS[name]}\n    sleep(0)\n"
    before = bench.output(THIRD)
    bench.output(source)
    bench.start(source)
    bench.start(THIRD)
    outputs = [message.payload.output for message in bench.run_to_end()]
    assert b'"%s"' % before.encode() in [bytes(output) for output in outputs]


def test_a_call_that_seeds_draws_the_same_numbers_across_its_waits(bench):
    source = (
        "import random\nfrom random import random as draw\nfrom blockx_sdk import sleep\n"
        "def _(seed):\n    random.seed(seed)\n    first = draw()\n    sleep(0)\n    return [first, draw()]\n"
    )
    expected = random.Random(1)
    bench.start(source, [1])
    bench.start(source, [2])
    found = [bench_message.payload.output for bench_message in bench.run_to_end()]
    numbers = f"[{expected.random()!r},{expected.random()!r}]".encode()
    assert numbers in [bytes(output) for output in found]


def test_a_seed_makes_no_other_call_predictable(bench):
    source = "import random\ndef _(seed):\n    if seed:\n        random.seed(seed)\n    return random.random()"
    seeded = bench.output(source, 1)
    assert bench.output(source, 1) == seeded
    others = {bench.output(source, 0) for _ in range(3)}
    assert len(others - {seeded}) == 3


def test_the_modules_are_given_back():
    before = [random.random, random.seed, decimal.DefaultContext]
    bench = Bench()
    assert random.random is not before[0]
    bench.runtime.close()
    assert [random.random, random.seed, decimal.DefaultContext] == before
