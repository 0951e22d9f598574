"""Signals, kills and what is left behind."""

import signal

import pytest

from tests.e2e.sources import STORE, TALLY

pytestmark = [pytest.mark.slow, pytest.mark.spawn_modes("process", "sandbox", "oci")]

SLOW = (
    "import time\n" + TALLY + "\ndef _(n):\n    tally()\n    time.sleep(%s)\n    return {'n': n}\n"
)
FEW_AT_ONCE = "dispatcher: {executor_max_inflight: 4}\n"


def start_slow(product, seconds, calls=400, config=""):
    product.write(SLOW % seconds, [[n] for n in range(calls)], config=config + STORE)
    process = product.start()
    product.until(lambda: product.bodies() > 4, "bodies started")
    return process


def left_under_final_names(product):
    return [
        n
        for n in ("results.jsonl", "rows.jsonl", "failures.jsonl")
        if (product.folder / n).exists()
    ]


def test_sigint_ends_the_run_after_the_running_calls_and_leaves_nothing(product):
    process = start_slow(product, 0.05, config=FEW_AT_ONCE)
    process.send_signal(signal.SIGINT)
    ended = product.finish(process)
    assert ended.code == 130
    assert "Traceback" not in ended.text
    assert left_under_final_names(product) == []
    assert product.bodies() < 400
    assert product.socket_folders == []


def test_sigterm_has_its_own_exit_code(product):
    process = start_slow(product, 0.05, config=FEW_AT_ONCE)
    process.send_signal(signal.SIGTERM)
    assert product.finish(process).code == 143


def test_a_second_sigint_does_not_wait_for_running_calls(product):
    process = start_slow(product, 30)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    ended = product.finish(process)
    assert ended.code == 130
    assert left_under_final_names(product) == []


def test_a_killed_main_takes_its_executors_along_and_the_next_start_works(product):
    process = start_slow(product, 0.05, config=FEW_AT_ONCE)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    product.until(lambda: not product.executors(), "executors gone")
    assert left_under_final_names(product) == []
    ended = product.run()
    assert (ended.code, ended.outputs()) == (0, [{"n": n} for n in range(400)])
    assert product.socket_folders == []


def test_killed_executors_are_replaced_and_every_call_ends_once(product):
    process = start_slow(product, 0.05, config="dispatcher: {executor_max_inflight: 8}\n")
    for _ in range(2):
        started = product.bodies()
        executors = product.executors()
        assert executors
        executors[0].kill()
        product.until(
            lambda started=started: product.bodies() > started + 20, "progress after the kill"
        )
    ended = product.finish(process)
    assert (ended.code, ended.outputs()) == (0, [{"n": n} for n in range(400)])
    assert all(record["attempts"] == 1 for record in ended.lines())
