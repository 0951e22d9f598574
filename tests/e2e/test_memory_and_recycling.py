"""Executors that fill memory are killed for it, or replaced: the right call is charged, or nobody."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.spawn_modes("process", "sandbox", "oci")]

MIB = 1024 * 1024


def limits(limit_mib, *, more=""):
    return f"executor_memory_limit_bytes: {limit_mib * MIB}{more}"


def write(product, source, calls, worker, *, executors=2, config=""):
    product.write(source, calls, executors=executors, config=config)
    path = product.folder / "config.yaml"
    path.write_text(path.read_text().replace("worker: {", f"worker: {{{worker}, ", 1))
    return product


def test_a_call_that_fills_memory_is_charged_and_its_neighbours_are_not(product):
    source = """
import time
def _(n):
    if n == 5:
        kept = []
        while True:
            kept.append(bytearray(8 << 20))
            kept[-1][::4096] = b"x" * len(kept[-1][::4096])
    time.sleep(0.5)
    return n
"""
    ended = write(product, source, range(40), limits(400)).run()
    failed = [record for record in ended.lines() if record["status"] == "failed"]
    assert [(r["index"], r["error"]["kind"], r["attempts"]) for r in failed] == [
        (5, "memory_exceeded", 3)
    ]
    assert "its limit is 400 MiB" in failed[0]["error"]["message"]
    assert {r["attempts"] for r in ended.lines() if r["index"] != 5} == {1}
    assert ended.report()["executors"]["reasons"]["killed"] == {"out of memory": 3}


def test_what_many_calls_have_filled_together_is_nobodys_fault(product):
    source = """
import time
KEEP = []
def _(n):
    KEEP.append(bytearray(b"x") * (2 << 20))
    time.sleep(0.002)
    return n
"""
    worker = limits(300, more=f", executor_recycle_memory_bytes: {299 * MIB}")
    ended = write(product, source, range(400), worker).run()
    assert ended.outputs() == list(range(400))
    assert {record["attempts"] for record in ended.lines()} == {1}
    assert ended.report()["executors"]["killed"] >= 1


def test_executors_are_replaced_after_their_number_of_calls_and_no_call_fails_or_moves(product):
    source = """
import os, time
from blockx import function
LIFE = os.urandom(8).hex()  # of this process: in a container all have the same number
def _(n):
    time.sleep(0.02)
    return [n, function.call("child", n), LIFE]
"""
    worker = "executor_recycle_calls: 300"
    config = "dispatcher: {task_max_inflight_calls: 40}"
    write(product, source, range(2_000), worker, config=config)
    (product.folder / "functions" / "child.py").write_text("def _(n): return n * 2")
    ended = product.run()
    assert [output[:2] for output in ended.outputs()] == [[n, n * 2] for n in range(2_000)]
    assert {record["attempts"] for record in ended.lines()} == {1}
    executors = ended.report()["executors"]
    assert executors["recycled"] >= 4
    assert executors["lost"] == executors["killed"] == 0
    assert len({output[2] for output in ended.outputs()}) >= 5
