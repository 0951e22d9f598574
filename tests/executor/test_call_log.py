"""Lines of the log about single calls: output folded, limited and rare; steps that block, by their line."""

import json
import os
import threading

import pytest

from blockx.executor import capture
from blockx.executor.call_log import LINES_A_SECOND_MAX, CallLog, fold
from blockx.executor.log import Log


class Lines:
    """A log that is read back."""

    def __init__(self, **environ):
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.log = Log(self.writer, "exec-1", environ)

    def take(self):
        try:
            return os.read(self.reader, 1 << 20).decode().splitlines()
        except BlockingIOError:
            return []

    def fields(self):
        return [json.loads(line) for line in self.take()]


@pytest.fixture
def lines():
    made = []

    def make(**environ):
        made.append(Lines(**environ))
        return made[-1]

    yield make
    for one in made:
        os.close(one.reader)
        os.close(one.writer)


@pytest.fixture
def logged(lines, new_bench):
    """A bench whose calls are logged at INFO, and its lines."""

    def make(level="info", **environ):
        found = lines(BLOCKX_LOG_LEVEL=level, **environ)
        return new_bench(call_log=CallLog(found.log), capture=capture.install), found

    return make


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("a\n", "a"),
        ("a\na\na\nb\na\n", "a [3 times]\nb\na"),
        ("row 1\nrow 2\nrow 2\n", "row 1\nrow 2 [2 times]"),
        ("\n\n\nx", " [3 times]\nx"),
    ],
)
def test_identical_lines_become_one_with_a_count(text, expected):
    assert fold(text) == expected


def test_output_is_logged_once_with_the_fields_of_its_call(logged):
    bench, found = logged()
    bench.call("def _(n):\n    print('hello'); print('hello')\n    return n", 1)
    [line] = found.fields()
    assert {k: line[k] for k in ("level", "message", "executor_id", "output")} == {
        "level": "info",
        "message": "call output",
        "executor_id": "exec-1",
        "output": "hello [2 times]",
    }
    assert [line[k] for k in ("task_id", "call_id", "function_id", "attempt")] == [
        "t1",
        "c1",
        "f",
        1,
    ]


def test_what_calls_print_alike_is_told_once_and_counted(logged):
    bench, found = logged()
    source = "def _(text):\n    print(text)"
    for text in ["same"] * 5 + ["row 1", "row 2"]:
        bench.call(source, text)
    told = [(line["output"], line.get("repeated_before")) for line in found.fields()]
    assert told == [("same", None), ("row 1", 4), ("row 2", None)]


def test_no_more_than_some_lines_a_second(logged, monkeypatch):
    bench, found = logged()
    now_ns = [1_000_000_000]
    monkeypatch.setattr("blockx.executor.call_log._monotonic_ns", lambda: now_ns[0])
    for number in range(LINES_A_SECOND_MAX + 7):
        bench.call("def _(n):\n    print(n)", number)
    assert len(found.fields()) == LINES_A_SECOND_MAX
    now_ns[0] += 1_000_000_000
    bench.call("def _(n):\n    print(n)", "later")
    [line] = found.fields()
    assert (line["output"], line["calls_not_shown"]) == ("later", 7)


@pytest.mark.parametrize("case", ["level", "debug call", "silent call"])
def test_nothing_is_logged_below_the_level_of_debug_calls_and_of_silent_ones(logged, case):
    bench, found = logged("warning" if case == "level" else "info")
    text = "" if case == "silent call" else "print('x')"
    message = bench.call(f"def _():\n    {text or 'pass'}", debug=case == "debug call")
    assert found.take() == []
    assert message.payload.output_tail == ("x\n" if text else "")


def test_lines_may_be_text(lines):
    found = lines(BLOCKX_LOG_FORMAT="text", BLOCKX_LOG_LEVEL="info")
    found.log.info("call output", output="two\nlines", call_id="j/1")
    [line] = found.take()
    assert line[12:].split(" pid=")[0] == " INFO    call output executor_id=exec-1"
    assert line.endswith(r" output='two\nlines' call_id=j/1")


@pytest.mark.slow
def test_a_step_that_blocks_is_reported_once_with_its_line(logged):
    bench, found = logged("warning")
    source = "import threading\ndef wait(s):\n    threading.Event().wait(s)\ndef _(s):\n    wait(s)"
    for seconds in (0.26, 0.26, 0.01):
        bench.call(source, seconds)
    [line] = found.fields()
    assert line["place"].endswith(", line 3, in wait")
    assert line["place"].startswith("functions/f.py")
    assert line["call_id"] == "c1"
    assert line["held_ms"] >= 250 > 60 > line["cpu_ms"]


@pytest.mark.slow
def test_a_step_that_computes_is_not_reported_even_beside_another_busy_thread(logged):
    bench, found = logged("warning")
    end = threading.Event()

    def spin():
        while not end.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        source = "import time\ndef _(s):\n    t = time.thread_time() + s\n    while time.thread_time() < t: pass"
        bench.call(source, 0.25)
    finally:
        end.set()
        thread.join()
    assert found.take() == []
