"""What stops a call that does not suspend, and what ``time.sleep`` does."""

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from blockx.errors import ErrorKind
from blockx.executor import interrupts
from blockx.ipc import exact_json
from blockx.ipc.messages import CallFailed, CallWaiting

DEADLINE = ErrorKind.DEADLINE_EXCEEDED
SLOW_IMPORT = """
import time
_end = time.perf_counter() + 0.15
while time.perf_counter() < _end:
    pass
WHOLE = True
"""


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "x = 1\n    while True: x = x * 3 % 1000003",
        "import re; re.match('(a+)+$', 'a' * 28 + 'b')",
        "return [i for i in iter(int, 1)]",
        "import time; time.sleep(600)",
        "import time\n    while True: time.sleep(0)",
        "import time\n    while True: time.sleep(0.001)",
    ],
)
def test_a_call_ends_when_its_budget_does(bench, body):
    kind, message = bench.failure(f"def _():\n    {body}", callBudgetMs=40)
    assert kind == DEADLINE
    assert "of its 40 ms budget" in message
    assert bench.output("def _():\n    return 1", callBudgetMs=1_000) == 1


@pytest.mark.parametrize(
    "body",
    [
        # each calls a function before it loops: see the design on back edges before Python 3.13
        "while n:\n        try:\n            len('')\n        except BaseException:\n            pass",
        "while n:\n        try:\n            len('')\n            continue\n        finally:\n            continue",
        "while n:\n        try:\n            time.sleep(0.001)\n        except BaseException:\n            pass",
    ],
)
def test_swallowing_every_signal_does_not_help(bench, body):
    kind, _message = bench.failure(f"import time\ndef _(n):\n    {body}", 1, callBudgetMs=40)
    assert kind == DEADLINE


def test_a_result_after_a_swallowed_signal_is_refused(bench):
    source = """
def loop():
    while True: len('')
def _():
    try:
        loop()
    except BaseException:
        return "got away"
"""
    kind, message = bench.failure(source, callBudgetMs=30)
    assert kind == DEADLINE
    assert "CallDeadlineExceededError" in message


def test_a_result_that_comes_just_too_late_is_refused(bench):
    # The alarm cannot act inside the sort; its result comes after the budget.
    source = "def _(n):\n    return len(sorted(range(n), key=int))"
    assert bench.failure(source, 1_000_000, callBudgetMs=20)[0] == DEADLINE


@pytest.mark.parametrize("method", ["__str__", "__repr__"])
def test_text_of_a_failure_that_runs_for_ever_ends_with_the_budget(bench, method):
    source = f"""
class Endless(Exception):
    def {method}(self):
        while True: len('')
def _():
    trap = Endless()
    raise trap
"""
    kind, message = bench.failure(source, callBudgetMs=60)
    assert kind == "user_error", "the function had raised; only the words ran out of time"
    assert (
        message
        == {
            "__str__": "Endless: <no text: CallDeadlineExceededError while it was made>",
            "__repr__": "Endless",
        }[method]
    )


def test_the_wall_time_of_the_task_ends_a_call_too(bench):
    kind, message = bench.failure("def _():\n    while True: len('')", callDeadlineMs=30)
    assert (kind, "past the end of its task's time" in message) == (DEADLINE, True)


def test_without_a_budget_nothing_is_cut(bench):
    assert bench.output("import time\ndef _():\n    time.sleep(0.05)\n    return 1") == 1


def test_queueing_does_not_count_against_the_budget(bench):
    spin = """
import time
def _(s):
    end = time.perf_counter() + s
    while time.perf_counter() < end: pass
    return 1
"""
    for _ in range(4):
        bench.start(spin, [0.02], callBudgetMs=55)
    sent = bench.run_to_end()
    assert [exact_json.decode(m.payload.output) for m in sent] == [1] * 4
    assert sent[-1].payload.queue_us > 50_000


def test_io_that_used_the_budget_up_ends_the_call_when_it_resumes(bench):
    source = "from blockx_sdk import db\ndef _():\n    try:\n        db.get('t', {'a': 1})\n"
    source += "    except Exception:\n        pass\n    return 1"
    bench.start(source, callBudgetMs=20)
    (waiting,) = bench.run()
    interrupts._real_sleep(0.03)
    bench.resume(waiting, {}, ioUs=25_000)
    (failed,) = bench.run()
    assert failed.payload.error_kind == DEADLINE
    assert failed.payload.io_us == 25_000
    assert "io 25" in failed.payload.error_message
    assert "last in blockdb get_row" in failed.payload.error_message


def test_a_wait_costs_at_most_as_long_as_it_took(bench):
    source = "from blockx_sdk import db\ndef _():\n    db.get('t', {'a': 1})\n    return 1"
    bench.start(source, callBudgetMs=1_000)
    (waiting,) = bench.run()
    bench.resume(waiting, {}, ioUs=10**12)
    (done,) = bench.run()
    assert done.payload.io_us < 1_000_000


def test_the_control_word_cancels_a_computing_call_of_that_attempt_only(row, new_bench):
    bench = new_bench(row=row)
    source = "def _(n):\n    for _ in range(n): len('')\n    while not n: len('')\n    return n"
    control = row._words
    control[65], control[66] = 1, 9  # call 1, another attempt
    assert bench.output(source, 3_000_000) == 3_000_000
    control[65], control[66] = 2, 1
    assert bench.failure(source, 0)[0] == ErrorKind.CANCELLED


# ---- where it may be cut ---------------------------------------------------------------------


def test_an_import_is_never_cut(bench, tmp_path, monkeypatch):
    (tmp_path / "slow_to_import_1.py").write_text(SLOW_IMPORT)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "def _():\n    import slow_to_import_1 as m\n    return m.WHOLE"
    assert bench.failure(source, callBudgetMs=30)[0] == DEADLINE
    assert sys.modules["slow_to_import_1"].WHOLE
    assert bench.output(source) is True


def test_a_library_is_cut_only_late_and_then_the_executor_retires(bench, tmp_path, monkeypatch):
    (tmp_path / "library_that_loops.py").write_text("def spin():\n    while True: len('')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "import library_that_loops\ndef _():\n    library_that_loops.spin()"
    message = bench.call(source, callBudgetMs=30)
    assert message.payload.error_kind == DEADLINE
    assert message.payload.budget_used_ms > 30 + 200
    assert bench.runtime.is_retiring
    assert "library_that_loops" in bench.runtime.retire_reason


@pytest.mark.parametrize(
    ("filename", "at_once", "late"),
    [
        ("functions/f.py#00112233", True, True),
        (exact_json.__file__, True, True),
        (re.__file__, True, True),
        (re._parser.__file__, False, True),
        ("<string>", False, True),
        (interrupts.__file__, False, False),
        (interrupts.__file__.replace("interrupts", "runtime"), False, False),
    ],
)
def test_the_innermost_file_decides_where_a_call_may_be_cut(bench, filename, at_once, late):
    found: dict[str, Any] = {}
    exec(compile("import sys\nframe = sys._getframe()", filename, "exec"), found)
    bench.start()
    context = bench.runtime._contexts["c1"]
    alarm = bench.runtime._alarm
    assert alarm._may_raise(context, found["frame"], 1) is at_once
    assert alarm._may_raise(context, found["frame"], interrupts.ANYWHERE_AFTER_NS) is at_once
    assert alarm._may_raise(context, found["frame"], 1 + interrupts.ANYWHERE_AFTER_NS) is late
    assert bench.runtime.is_retiring is (late and not at_once)


def test_a_tick_in_the_executors_own_code_is_repeated_soon(bench, monkeypatch):
    found: dict[str, Any] = {}
    exec(compile("import sys\nframe = sys._getframe()", interrupts.__file__, "exec"), found)
    bench.start()
    context = bench.runtime.running = bench.runtime._contexts["c1"]
    context.in_user, context.budget_ns, context.step_started_ns = True, 1, time.monotonic_ns() - 2
    armed: list[float] = []
    monkeypatch.setattr(interrupts, "_setitimer", lambda _timer, *times_s: armed.extend(times_s))
    try:
        bench.runtime._alarm._on_alarm(signal.SIGALRM, found["frame"])
    finally:
        bench.runtime.running, context.in_user = None, False
    assert 0 < armed[0] * 1e6 <= interrupts.OWN_FRAME_US[1]
    assert armed[1:] == [interrupts.TICK_NS / 1e9]


def test_a_module_whose_body_swallowed_its_signal_is_not_kept(bench):
    source = """
def loop():
    while True: len('')
try:
    loop()
except BaseException:
    pass
def _():
    return 1
"""
    message = bench.call(source, callBudgetMs=30)
    assert (message.payload.error_kind, message.payload.body_started) == (DEADLINE, False)
    assert bench.runtime._attempts._loader.loaded_count() == 0


def test_user_source_called_by_a_library_is_cut_at_once(bench):
    source = "import functools\ndef add(a, b):\n    while True: len('')\n"
    source += "def _():\n    return functools.reduce(add, [1, 2, 3])"
    assert bench.failure(source, callBudgetMs=30)[0] == DEADLINE
    assert not bench.runtime.is_retiring


@pytest.mark.parametrize(
    "theft",
    [
        "signal.signal(signal.SIGALRM, signal.SIG_IGN)",
        "signal.signal(signal.SIGALRM, lambda *_: None)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])",
        "signal.setitimer(signal.ITIMER_REAL, 0)",
        "signal.setitimer(signal.ITIMER_REAL, 1000, 1000)",
        "signal.alarm(1000)",
    ],
)
def test_a_stolen_alarm_is_back_for_the_next_call_and_after_each_wait(bench, theft):
    assert bench.output(f"import signal\ndef _():\n    {theft}\n    return 1") == 1
    assert bench.failure("def _():\n    while True: len('')", callBudgetMs=30)[0] == DEADLINE
    source = (
        f"import signal, time\ndef _():\n    {theft}\n    time.sleep(0)\n    while True: len('')"
    )
    assert bench.failure(source, callBudgetMs=30)[0] == DEADLINE


def test_no_alarm_stays_armed_while_nothing_runs(bench):
    bench.output("def _():\n    return 1")
    bench.runtime.rest()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


# ---- time.sleep -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "import time\ndef _(s):\n    time.sleep(s)",
        "from time import sleep\ndef _(s):\n    sleep(s)",
        "import time as t\nnap = t.sleep\ndef _(s):\n    nap(s)",
        "from blockx_sdk import sleep\ndef _(s):\n    sleep(s)",
    ],
)
def test_sleeping_calls_sleep_together_however_sleep_was_imported(bench, source):
    for _ in range(50):
        bench.start(source, [0.05])
    start = time.perf_counter()
    sent = bench.run_to_end()
    assert time.perf_counter() - start < 50 * 0.05 / 2
    assert all(50_000 <= m.payload.sleep_us < 60_000 for m in sent)


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("-1", "ValueError: sleep length must be non-negative"),
        ("-0.5", "ValueError: sleep length must be non-negative"),
        ("'1'", "TypeError: 'str' object cannot be interpreted as an integer"),
        ("None", "TypeError: 'NoneType' object cannot be interpreted as an integer"),
        ("float('nan')", "ValueError: Invalid value NaN (not a number)"),
        ("1e300", "OverflowError: timestamp too large to convert to C _PyTime_t"),
    ],
)
def test_a_wrong_length_is_refused_as_usual(bench, argument, error):
    source = f"import time\ndef _():\n    time.sleep({argument})"
    assert bench.failure(source) == (ErrorKind.USER_ERROR, error)


def test_a_length_may_be_anything_that_is_a_whole_number(bench):
    source = (
        "import time\nclass Two:\n    __index__ = lambda self: 2\ndef _():\n    time.sleep(Two())"
    )
    bench.start(source)
    bench.run()
    assert 1 < bench.runtime.next_scheduler_delay() <= 2


def test_outside_of_a_call_and_in_threads_sleep_blocks_as_usual(bench):
    start = time.perf_counter()
    time.sleep(0.02)
    assert time.perf_counter() - start >= 0.02
    source = """
import threading, time
def _():
    thread = threading.Thread(target=time.sleep, args=(0.02,))
    start = time.perf_counter()
    thread.start()
    thread.join()
    return time.perf_counter() - start >= 0.02
"""
    assert bench.output(source) is True


def test_an_executor_imports_nothing_that_only_main_needs():
    probe = (
        "import sys, blockx.executor.preload as p\n"
        "heavy = {'numpy', 'loguru', 'aiohttp', 'rich', 'asyncio', 'yaml'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=os.getcwd()
    )
    assert answer.stdout.strip() == "[]"


PART_LIMITS = {
    "cpuLimitMs": ("def _():\n    while True: pass", "40 ms of CPU"),
    "sleepLimitMs": ("import time\ndef _():\n    time.sleep(0.02)\n    time.sleep(60)", "40 ms of sleep"),
    "ioLimitMs": ("from blockx_sdk import rpc\ndef _():\n    rpc.call('x', [])", "40 ms of IO"),
    "subcallLimitMs": (
        "from blockx import function\ndef _():\n    function.call('f', 1)",
        "40 ms of sub-calls",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PART_LIMITS)
def test_a_part_of_the_budget_may_have_a_limit_of_its_own(bench, name):
    source, text = PART_LIMITS[name]
    bench.start(source, callBudgetMs=60_000, **{name: 40})
    sent = bench.run_to_end() if name in ("cpuLimitMs", "sleepLimitMs") else bench.run()
    if isinstance(sent[0], CallWaiting):
        assert 0 < sent[0].payload.budget_left_ms <= 40
        interrupts._real_sleep(0.05)
        cost = {"ioUs": 45_000} if name == "ioLimitMs" else {"budgetUsedMs": 45.0}
        bench.resume(sent[0], 1, **cost)
        sent = bench.run()
    [message] = sent
    assert isinstance(message, CallFailed)
    assert message.payload.error_kind == "deadline_exceeded"
    assert f"{text} (dispatcher.call_limits)" in message.payload.error_message


def test_a_limit_of_one_part_does_not_stop_the_others(bench):
    source = "import time\ndef _():\n    time.sleep(0.05)\n    return 1"
    limits = {"cpuLimitMs": 40, "ioLimitMs": 1, "subcallLimitMs": 1}
    assert bench.output(source, callBudgetMs=60_000, **limits) == 1


def test_a_blocked_call_does_not_use_up_its_cpu(bench):
    source = "import threading\ndef _():\n    threading.Event().wait(0.08)\n    return 1"
    assert bench.output(source, cpuLimitMs=40) == 1
