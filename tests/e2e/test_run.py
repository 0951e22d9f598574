"""A run from config to rows, with real processes."""

import json
import subprocess
import sys

import pytest

from blockx.errors import ErrorKind
from tests.e2e.conftest import LAUNCHER

pytestmark = pytest.mark.slow

ORDINARY = 'def _(n):\n    return {"n": n}\n'


def test_rows_come_in_list_order_and_the_report_counts_them(product):
    ended = product.write(ORDINARY, [[n] for n in range(500)]).run()
    assert (ended.code, ended.outputs()) == (0, [{"n": n} for n in range(500)])
    assert ended.lines("rows.jsonl") == [{"n": n} for n in range(500)]
    assert ended.lines("failures.jsonl") == []
    job = ended.job()
    assert {
        k: job[k] for k in ("calls", "ok", "failed", "ran", "executed", "retries", "moves", "rows")
    } == {
        "calls": 500,
        "ok": 500,
        "failed": 0,
        "ran": 500,
        "executed": 500,
        "retries": 0,
        "moves": 0,
        "rows": 500,
    }
    assert ended.report()["exit_code"] == 0
    assert product.socket_folders == []


def test_a_failed_call_says_where_and_the_others_go_on(product):
    source = "def helper(x):\n    return 10 / x\n\ndef _(n):\n    return {'v': helper(n)}\n"
    ended = product.write(source, [[0], [5]]).run()
    assert ended.code == 1
    failed, fine = ended.lines()
    assert fine["output"] == {"v": 2.0}
    error = failed["error"]
    assert error["kind"] == ErrorKind.USER_ERROR
    assert error["message"].startswith("ZeroDivisionError")
    assert "line 2" in error["stack"]
    assert "return 10 / x" in error["stack"]
    assert "blockx/executor" not in error["stack"]
    [line] = ended.lines("failures.jsonl")
    assert (line["function"], line["args"]) == ("case", [0])


@pytest.mark.spawn_modes("process", "sandbox")
def test_subcalls_run_once_for_equal_arguments_and_even_when_every_place_is_taken(product):
    source = (
        "def _(p):\n    return {'n': p['n'], 'v': function.call('child', {'n': p['n'] % 3})['v']}\n"
    )
    child = {"child": "def _(p):\n    return {'v': 2 * p['n']}\n"}
    product.write(
        source,
        [{"n": n} for n in range(30)],
        children=child,
        executors=1,
        config="dispatcher: {executor_max_inflight: 2}",
    )
    ended = product.run()
    assert (ended.code, ended.outputs()) == (0, [{"n": n, "v": 2 * (n % 3)} for n in range(30)])
    subcalls = ended.job()["subcalls"]
    assert (subcalls["calls"], subcalls["executed"]) == (30, 3)


def test_sleeping_calls_let_the_others_run(product):
    source = "import time\n\ndef _(n):\n    time.sleep(0.3)\n    return {'n': n}\n"
    ended = product.write(source, [[n] for n in range(64)], executors=1).run()
    assert ended.code == 0
    assert ended.report()["wall_s"] < 64 * 0.3 / 4


@pytest.mark.spawn_modes("process", "sandbox")
def test_a_computing_loop_ends_at_its_budget_alone(product):
    source = "def _(n):\n    while n == 2:\n        pass\n    return {'n': n}\n"
    product.write(
        source, [[n] for n in range(5)], config="dispatcher: {call_deadline_ms: 500}", executors=1
    )
    ended = product.run()
    kinds = [record.get("error", {}).get("kind") for record in ended.lines()]
    assert kinds == [None, None, ErrorKind.DEADLINE_EXCEEDED, None, None]
    assert ended.job()["retries"] == 0


@pytest.mark.spawn_modes("process", "sandbox")
def test_a_call_that_kills_its_process_is_charged_and_its_neighbours_run_again_for_free(product):
    source = "import os\n\ndef _(n):\n    if n == 3:\n        os._exit(9)\n    return {'n': n}\n"
    ended = product.write(source, [[n] for n in range(10)]).run()
    records = ended.lines()
    assert [r["status"] for r in records] == ["ok"] * 3 + ["failed"] + ["ok"] * 6
    assert records[3]["error"]["kind"] == ErrorKind.EXECUTOR_LOST
    assert "exit code 9" in records[3]["error"]["message"]
    assert records[3]["attempts"] == 3
    assert all(r["attempts"] == 1 for r in records if r["status"] == "ok")
    assert ended.report()["executors"]["lost"] == 3


def test_reads_of_a_table_in_memory(product):
    row = {"address": "0xaa", "symbol": "A", "supply": 2**256 - 1}
    (product.folder / "tokens.jsonl").write_text(json.dumps(row) + "\n")
    source = (
        "from blockx_sdk import db\n\n"
        "def _(a):\n    row = db.get('token', {'address': a})\n"
        "    return {'symbol': row and row['symbol'], 'supply': row and row['supply']}\n"
    )
    product.write(
        source, ["0xaa", "0xbb"], config="backends: {blockdb: {memory: {token: tokens.jsonl}}}"
    )
    ended = product.run()
    assert ended.outputs() == [
        {"symbol": "A", "supply": 2**256 - 1},
        {"symbol": None, "supply": None},
    ]


def test_several_jobs_run_one_after_the_other_on_the_same_executors(product):
    product.write(ORDINARY, [[1]])
    config = (product.folder / "config.yaml").read_text()
    config = config.replace(
        "report:",
        "  - {name: second, function: case, calls: [[2], [3]], results: second.jsonl}\nreport:",
    )
    (product.folder / "config.yaml").write_text(config)
    ended = product.run()
    assert [r["call_id"] for r in ended.lines("second.jsonl")] == ["second/0", "second/1"]
    assert [job["name"] for job in ended.report()["jobs"]] == ["case", "second"]
    only = product.run("--config", "config.yaml", "--job", "second", "--fresh")
    assert [job["name"] for job in only.report()["jobs"]] == ["second"]


def test_an_empty_list_is_ordinary(product):
    ended = product.write(ORDINARY, []).run()
    assert (ended.code, ended.lines(), ended.job()["calls"]) == (0, [], 0)


def test_a_malformed_line_fails_its_call_and_loses_no_other(product):
    product.write(ORDINARY, [[0], [1]])
    with (product.folder / "calls.jsonl").open("a") as calls:
        calls.write('{"args": [2}\n{"args": [3], "function": "nowhere"}\n[4]\n')
    ended = product.run()
    records = ended.lines()
    assert ended.code == 1
    assert [r["status"] for r in records] == ["ok", "ok", "failed", "failed", "ok"]
    assert records[2]["error"]["kind"] == ErrorKind.INVALID_CALL
    assert "calls.jsonl:3" in records[2]["error"]["message"]
    assert records[3]["error"]["kind"] == ErrorKind.FUNCTION_NOT_FOUND


def test_a_function_that_does_not_compile_fails_its_calls_as_load_error(product):
    product.write(
        ORDINARY, [[0], {"function": "broken", "args": [1]}], children={"broken": "def _(:\n"}
    )
    ended = product.run()
    assert ended.code == 1
    fine, broken = ended.lines()
    assert fine["status"] == "ok"
    assert broken["error"]["kind"] == ErrorKind.LOAD_ERROR
    assert "line 1" in broken["error"]["message"]


BAD_CONFIGS = {
    "missing file": (None, "config.yaml"),
    "no yaml": ("jobs: [", "config.yaml:"),
    "unknown key": ("jobs: []\nworker: {executor_counts: 3}\n", "executor_count"),
    "wrong type": ("jobs: []\nworker: {executor_count: many}\n", "executor_count"),
    "no such function": ("jobs: [{name: a, function: nowhere, calls: [[1]]}]\n", "nowhere"),
    "no call list": ("jobs: [{name: a, function: case, calls: missing.jsonl}]\n", "missing.jsonl"),
    "unwritable output": (
        "jobs: [{name: a, function: case, calls: [[1]], results: /proc/nowhere/r.jsonl}]\n",
        "/proc/nowhere",
    ),
    "two jobs of one name": (
        "jobs: [{name: a, function: case, calls: []}, {name: a, function: case, calls: []}]\n",
        "a",
    ),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configuration_ends_with_2_before_anything_runs(product, name):
    text, expected = BAD_CONFIGS[name]
    product.write("TALLY = open('ran', 'w')\n" + ORDINARY, [[1]])
    if text is None:
        (product.folder / "config.yaml").unlink()
    else:
        (product.folder / "config.yaml").write_text(text)
    ended = product.run()
    assert ended.code == 2, ended.text
    assert expected in ended.text
    assert "Traceback" not in ended.text
    assert not (product.folder / "ran").exists()


def test_check_says_what_does_not_compile_and_runs_nothing(product):
    product.write(ORDINARY, [[1]], children={"broken": "def _(:\n"})
    ended = product.run("check", "--config", "config.yaml")
    assert ended.code == 2
    assert "broken" in ended.text
    (product.folder / "functions" / "broken.py").unlink()
    fine = product.run("check", "--config", "config.yaml")
    assert fine.code == 0
    assert "executor_count" in fine.text
    assert not (product.folder / "results.jsonl").exists()


def test_uint256_comes_out_digit_for_digit_everywhere(product):
    big, low = 2**256 - 1, -(2**255)
    source = "def _(n, low):\n    back = function.call('child', n)\n    return {'n': n, 'low': low, 'back': back}\n"
    child = {"child": "def _(n):\n    return n - 1\n"}
    ended = product.write(source, [[big, low]], children=child).run()
    assert f'"n":{big},"low":{low},"back":{big - 1}' in (product.folder / "rows.jsonl").read_text()
    assert json.loads((product.folder / "rows.jsonl").read_text()) == {
        "n": big,
        "low": low,
        "back": big - 1,
    }
    assert ended.code == 0


def test_the_last_lines_say_why_calls_failed(product):
    source = "def _(n):\n    if n:\n        raise ValueError(f'no\\n {n}')\n    return {'n': n}\n"
    product.write(source, [[0], [7], [8], {"args": [1], "function": "none"}], executors=1)
    ended = product.run()
    assert ended.code == 1
    assert "case: 2 failed with user_error; the first, case/1: ValueError: no 7\n" in ended.text
    assert "case: 1 failed with function_not_found; the first, case/3: no function" in ended.text
    dry = product.run("--config", "config.yaml", "--fresh", "--dry-run")
    assert "case: 2 failed with user_error; the first, case/1: ValueError: no 7\n" in dry.text


@pytest.mark.parametrize("verb", ["run", "call"])
def test_a_full_standard_output_is_told_and_is_no_bug(product, verb):
    product.write("def _(n):\n    return {'n': n}\n", [[0]])
    arguments = {"run": ["--config", "config.yaml"], "call": ["call", "case", "0"]}[verb]
    command = [sys.executable, str(LAUNCHER), *arguments]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, cwd=product.folder, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert "cannot be written" in done.stderr
    assert done.returncode == {"run": 0, "call": 2}[verb], done.stderr
