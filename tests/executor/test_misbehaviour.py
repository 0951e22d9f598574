"""User code that misbehaves in a real executor: its own call has a clear outcome, the next ones work."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from blockx.ipc.messages import CallCompleted, CallFailed
from tests.executor.processes import FakeMain, Forked, is_alive, until

pytestmark = pytest.mark.slow

QUICK = "import json\ndef _(n):\n    return json.loads(json.dumps(n)) + 1"


@pytest.fixture
def main(tmp_path: Path):
    fake = FakeMain(tmp_path / "s")
    yield fake
    fake.close()


@pytest.fixture
def executor(main: FakeMain, tmp_path: Path):
    made = Forked(tmp_path / "s")
    main.accept()
    yield made
    made.close()


def outcome(main: FakeMain, source: str, *args: Any, budget_ms: int = 0) -> tuple[str, Any]:
    """(kind or "ok", message or result) of one call."""
    main.start(source, *args, callBudgetMs=budget_ms)
    while True:
        message = main.next()
        if isinstance(message, CallFailed):
            return message.payload.error_kind, message.payload.error_message
        if isinstance(message, CallCompleted):
            return "ok", bytes(message.payload.output).decode()


CASES = {
    # name: (source, kind, a part of the message or the result)
    "exit with a text": ("def _():\n    raise SystemExit('bye')", "user_error", "SystemExit: bye"),
    "quit": ("def _():\n    exit(3)", "user_error", "SystemExit: 3"),
    "a greenlet's exit": (
        "import greenlet\ndef _():\n    raise greenlet.GreenletExit('x')",
        "user_error", "GreenletExit: x",
    ),
    "an interrupt": ("def _():\n    raise KeyboardInterrupt", "user_error", "KeyboardInterrupt"),
    "its own SIGINT": ("import os, signal\ndef _():\n    os.kill(os.getpid(), signal.SIGINT)", "ok", "null"),
    "a throwing generator": (
        "def gen():\n    raise StopIteration(5)\n    yield\ndef _():\n    return next(gen())",
        "user_error", "RuntimeError: generator raised StopIteration",
    ),
    "a generator as a result": ("def _():\n    return (n for n in [1])", "output_not_serializable", "generator"),
    "endless recursion": ("def _():\n    return _()", "user_error", "RecursionError"),
    "recursion in a repr": (
        "class A:\n    def __repr__(self):\n        return repr(self)\n"
        "def _():\n    a = A()\n    raise ValueError(a)",
        "user_error", "ValueError: <no text: RecursionError",
    ),
    "a huge message": ("def _():\n    raise ValueError('x' * 10**8)", "user_error", "shortened, 1000000"),
    "a huge local": (
        "def _():\n    a = list(range(10**6)); b = '\\u20ac' * 10**7\n    1 / 0",
        "user_error", "ZeroDivisionError",
    ),
    "closed descriptors": (
        "import os\ndef _():\n    os.closerange(0, 10_000)\n    for n in range(100):\n"
        "        try: os.close(n)\n        except OSError: pass\n    return 1",
        "ok", "1",
    ),
    "closed streams": ("import sys\ndef _():\n    sys.stdout.close(); sys.stderr.close(); print(1)", "ok", "null"),
    "printed gigabytes": ("def _():\n    for _ in range(2_000): print('x' * 500_000)", "ok", "null"),
    "profiling timer": (
        "import signal\ndef _():\n    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)\n"
        "    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)",
        "ok", "null",
    ),
    "an alarm of its own": (
        "import signal\ndef hit(*_):\n    raise ValueError('mine')\n"
        "def _():\n    signal.signal(signal.SIGALRM, hit); signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
        "    while True: pass",
        "user_error", "ValueError: mine",
    ),
    "all signals blocked": (
        "import signal\ndef _():\n    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
        "ok", "null",
    ),
    "a thread that never ends": (
        "import threading, time\ndef body():\n    while True: time.sleep(1)\n"
        "def _():\n    threading.Thread(target=body).start()",
        "ok", "null",
    ),
    "a thread that forks": (
        "import threading, os\ndef body():\n    pid = os.fork()\n    if not pid: os._exit(0)\n"
        "    os.waitpid(pid, 0)\ndef _():\n    t = threading.Thread(target=body); t.start(); t.join()",
        "ok", "null",
    ),
    "a failing thread": (
        "import threading\ndef _():\n    t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
        "ok", "null",
    ),
    "multiprocessing": (
        "import multiprocessing\ndef square(n): return n * n\n"
        "def _():\n    with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "        return pool.map(square, [1, 2, 3])",
        "ok", "[1,4,9]",
    ),
    "a child that is told to end": (
        "import os, signal\ndef _():\n    r, w = os.pipe()\n    pid = os.fork()\n    if pid == 0:\n"
        "        os.write(w, b'.')\n        while True: signal.pause()\n"
        "    os.read(r, 1)\n    os.kill(pid, signal.SIGTERM)\n"
        "    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])",
        "ok", "-15",
    ),
    "an exit handler": ("import atexit\ndef _():\n    atexit.register(lambda: open('/nowhere/x'))", "ok", "null"),
    "asyncio": (
        "import asyncio\nasync def main():\n    await asyncio.sleep(0.001)\n    return 7\n"
        "def _():\n    return asyncio.run(main())",
        "ok", "7",
    ),
    "a frozen process": ("import gc\ndef _():\n    gc.freeze(); gc.set_debug(0); gc.disable()", "ok", "null"),
    "a limit on files": (
        "import resource, tempfile\ndef _():\n    held = []\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (99, 999))\n"
        "    while True: held.append(tempfile.TemporaryFile())",
        "user_error", "OSError",
    ),
    "memory that is not there": ("def _():\n    return bytearray(1 << 60)", "user_error", "MemoryError"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_ends_as_its_own_outcome_and_the_next_calls_work(main, executor, name):
    source, kind, text = CASES[name]
    found = outcome(main, source, budget_ms=15_000)
    assert found[0] == kind, found
    assert text in found[1]
    assert outcome(main, QUICK, 41, budget_ms=5_000) == ("ok", "42")
    loop = "def _():\n    while True: pass"
    assert outcome(main, loop, budget_ms=60)[0] == "deadline_exceeded"
    assert outcome(main, QUICK, 1) == ("ok", "2")
    assert executor.process.is_alive()


DEATHS = {
    "os._exit": ("import os\ndef _():\n    os._exit(5)", 5),
    "abort": ("import os\ndef _():\n    os.abort()", -signal.SIGABRT),
    "kill": ("import os\ndef _():\n    os.kill(os.getpid(), 9)", -signal.SIGKILL),
    "the group": ("import os\ndef _():\n    os.killpg(0, 9)", -signal.SIGKILL),
    "a bad address": ("import ctypes\ndef _():\n    ctypes.string_at(1)", -signal.SIGSEGV),
    "faulthandler": (
        "import faulthandler\ndef _():\n    faulthandler._sigsegv()",
        -signal.SIGSEGV,
    ),
}
if sys.version_info < (3, 12):  # from 3.12 on the interpreter counts C recursion: a RecursionError
    DEATHS["a bottomless stack"] = (
        "import sys, re\ndef _():\n    sys.setrecursionlimit(10**9)\n    a = []\n"
        "    for _ in range(10**6): a = [a]\n    return hash(str(a) + repr(f()))\n"
        "def f():\n    return type('A', (), {'__repr__': lambda s: repr(f())})()",
        None,
    )


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_leaves_the_number_of_the_call_that_ran(main, executor, name):
    source, code = DEATHS[name]
    main.start("import time\ndef _():\n    time.sleep(60)")
    main.start(source)
    with pytest.raises((EOFError, ConnectionResetError)):
        main.next()
    executor.process.join(20)
    assert executor.row().running_call_seq == 2
    if code is not None:
        assert executor.process.exitcode == code


def test_event_loops_of_suspended_calls_do_not_meet(main, executor):
    source = """
import asyncio, time
async def main(n):
    time.sleep(0.05 if n else 0.01)
    assert asyncio.get_running_loop().n == n
    return n
def _(n):
    async def body():
        asyncio.get_running_loop().n = n
        return await main(n)
    return asyncio.run(body())
"""
    for number in range(3):
        main.start(source, number)
    assert sorted(main.outcome() for _ in range(3)) == [("c1", 0), ("c2", 1), ("c3", 2)]


@pytest.mark.parametrize("detached", [False, True])
def test_a_child_process_of_a_call_may_work_and_be_waited_for(main, executor, detached):
    source = f"""
import subprocess
def _():
    child = subprocess.Popen(["sh", "-c", "echo $((6 * 7))"], stdout=-1, start_new_session={detached})
    return [child.communicate()[0].decode(), child.returncode]
"""
    assert outcome(main, source) == ("ok", '["42\\n",0]')


def test_what_is_printed_by_children_and_c_code_leads_nowhere(main, executor):
    source = """
import os, ctypes
def _():
    os.system("echo leak; echo leak >&2")
    ctypes.CDLL(None).puts(b"leak")
"""
    assert outcome(main, source)[0] == "ok"


def test_a_deep_stack_of_one_call_does_not_count_for_another(main, executor):
    deep = """
import time
def f(n):
    if n:
        return f(n - 1)
    time.sleep(0.05)
    return 1
def _():
    return f(800)
"""
    for _ in range(6):
        main.start(deep)
    assert sorted(main.outcome()[1] for _ in range(6)) == [1] * 6


def test_sigterm_ends_an_executor_whose_handler_was_stolen(main, executor):
    source = "import signal\ndef _():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    assert outcome(main, source)[0] == "ok"
    os.kill(executor.process.pid, signal.SIGTERM)
    until(lambda: not is_alive(executor.process.pid))
