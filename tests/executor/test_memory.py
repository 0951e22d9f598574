"""Collections over the mark, and caches of eth_abi that only grow."""

import functools
import sys
from types import ModuleType

import pytest

from blockx.errors import UsageError
from blockx.executor.memory import (
    ABI_LOOK_NS,
    COLLECT_PAUSE_NS,
    AbiCaches,
    Garbage,
    abi_cache_entries,
)
from blockx.executor.vitals import resident_bytes


def test_garbage_is_collected_over_the_mark_and_not_at_once_again():
    garbage = Garbage(100)
    looks = [(99, 0), (100, 1), (500, 2), (500, COLLECT_PAUSE_NS), (500, COLLECT_PAUSE_NS + 1)]
    assert [garbage.is_due(*look) for look in looks] == [False, True, False, False, True]
    assert not Garbage(0).is_due(1 << 40, 1)


def test_a_runtime_over_its_mark_gives_memory_back(new_bench):
    bench = new_bench(memory_mark_bytes=1 << 30, task_linger_ns=1 << 60)
    bench.output("KEEP = [bytearray(b'x') * (64 << 20)]\ndef _(): return 1")
    full = resident_bytes()
    bench.runtime.memory_bytes = 1 << 30
    bench.runtime.run_until_idle()
    assert full - bench.runtime.memory_bytes > 60 << 20


def test_caches_of_eth_abi_are_emptied_when_they_are_too_large(monkeypatch):
    names = {"eth_abi.grammar": ["parse"], "eth_abi.registry": ["get_encoder", "get_decoder"]}
    caches = {n: functools.lru_cache(maxsize=None)(lambda x: x) for g in names.values() for n in g}
    monkeypatch.setitem(sys.modules, "eth_abi", ModuleType("eth_abi"))
    for class_name, (module_name, methods) in zip(
        ("NodeVisitor", "ABIRegistry"), names.items(), strict=True
    ):
        module = ModuleType(module_name)
        setattr(module, class_name, type(class_name, (), {m: caches[m] for m in methods}))
        monkeypatch.setitem(sys.modules, module_name, module)
    for number in range(5):
        caches["parse"](number)
        caches["get_encoder"](number)
    caches["get_encoder"](5)
    trimmed = AbiCaches(5)
    trimmed.trim_if_due(1)
    assert {n: c.cache_info().currsize for n, c in caches.items()} == {
        "parse": 5,
        "get_encoder": 0,
        "get_decoder": 0,
    }
    caches["parse"](6)
    trimmed.trim_if_due(ABI_LOOK_NS)
    assert caches["parse"].cache_info().currsize == 6, "looked at once a second"
    trimmed.trim_if_due(ABI_LOOK_NS + 1)
    assert caches["parse"].cache_info().currsize == 0


def test_an_eth_abi_without_these_caches_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "eth_abi", ModuleType("eth_abi"))
    AbiCaches(0).trim_if_due(1)
    AbiCaches(1).trim_if_due(1)


def test_the_threshold_comes_from_the_environment():
    assert abi_cache_entries({}) == 4_096
    assert abi_cache_entries({"BLOCKX_EXECUTOR_ABI_CACHE_TRIM_THRESHOLD": "7"}) == 7
    with pytest.raises(UsageError, match="'-1': must be a count of entries"):
        abi_cache_entries({"BLOCKX_EXECUTOR_ABI_CACHE_TRIM_THRESHOLD": "-1"})


@pytest.mark.slow
def test_memory_stays_level_over_many_calls_that_print_fail_and_succeed(bench):
    source = """
def _(n):
    print(n)
    if n % 10 == 0:
        raise ValueError({"n": n})
    return {"n": n, "big": list(range(200))}
"""

    def run(calls):
        for first in range(0, calls, 100):
            for number in range(first, first + 100):
                bench.start(source, [number])
            bench.run()

    run(2_000)
    before = resident_bytes()
    run(20_000)
    assert resident_bytes() - before < 3 << 20
