"""What runs when nobody called it: destructors, finalizers, hooks of the encoder and of the failure report."""

import sys
import time

import pytest

from blockx.ipc.messages import CallCompleted, CallFailed

# What a destructor raises, a signal too, is ignored by Python; pytest would make a failure of it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

BUDGET_MS = 150
DEADLINE = "deadline_exceeded"
LOOP = "\n        while True:\n            pass\n"
NEIGHBOUR = "def _(n):\n    return n + 1"


HOOKS = {
    "a destructor of a result": ("__del__", "return [Hook()]"),
    "a destructor of an argument": ("__del__", "args.append(Hook())"),
    "a destructor of an error": ("__del__", "raise ValueError(Hook())"),
    "a destructor of a local variable": ("__del__", "hook = Hook()\n    raise ValueError"),
    "an error's text": ("__str__", "raise Hook()"),
    "an error's class": ("__class__", "raise Hook()"),
    "a local's repr": ("__repr__", "hook = Hook()\n    raise ValueError"),
    "a result's class": ("__class__", "return Hook()"),
    "a context variable": (
        "__del__",
        "import contextvars\n    contextvars.ContextVar('v').set(Hook())",
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_never_ends_is_cut_within_the_budget_of_its_call(bench, name):
    hook, body = HOOKS[name]
    decorated = "    @property\n" if hook == "__class__" else ""
    source = (
        f"class Hook(Exception):\n{decorated}    def {hook}(self):{LOOP}"
        f"def _(*args):\n    args = list(args)\n    {body}\n    return 1\n"
    )
    started_s = time.monotonic()
    bench.start(source, [1], callBudgetMs=BUDGET_MS)
    bench.start(NEIGHBOUR, [1])
    sent = bench.run_to_end()
    assert time.monotonic() - started_s < 20
    by_id = {message.call_id: message for message in sent}
    assert isinstance(by_id["c1"], CallFailed | CallCompleted)
    assert isinstance(by_id["c2"], CallCompleted)


META = """
class Meta(type):
    @property
    def __name__(cls):
        while True:
            pass
class Named(Exception, metaclass=Meta):
    def __str__(self):
        while True:
            pass
def _():
    raise Named()
"""


def test_a_name_that_a_metaclass_makes_up_is_not_asked_for(bench):
    kind, message = bench.failure(META, callBudgetMs=BUDGET_MS)
    assert (kind, message.split(":")[0]) == ("user_error", "Named")


CYCLE = """
import blockx_test_log as LOG
from blockx_sdk import rpc
import time
class Late:
    def __del__(self):
        LOG.append("started")
        try:
            {use}
        except RuntimeError as error:
            LOG.append("refused")
def leave():
    late = Late()
    late.me = late
def _():
    leave()
    {then}
    return 1
"""


@pytest.fixture
def log(monkeypatch):
    seen: list[str] = []
    monkeypatch.setitem(sys.modules, "blockx_test_log", seen)
    return seen


USES = {"read": "rpc.call('eth_chainId')", "sub-call": "function.call('g')"}


@pytest.mark.parametrize("use", USES)
def test_a_destructor_in_a_collection_asks_for_nothing(bench, log, use):
    """It would be charged to whoever runs, and switch greenlets in the middle of the collector's work."""
    source = CYCLE.format(use=USES[use], then="import gc; gc.collect()")
    assert bench.output(source) == 1
    assert log == ["started", "refused"]


def test_a_destructor_in_a_collection_does_not_suspend(bench, log):
    source = CYCLE.format(
        use="time.sleep(0.001); LOG.append('slept')", then="import gc; gc.collect()"
    )
    assert bench.output(source) == 1
    assert log == ["started", "slept"]


def test_a_real_sleep_in_a_destructor_ends_with_the_budget(bench, log):
    source = CYCLE.format(use="time.sleep(3600)", then="import gc; gc.collect()")
    assert bench.failure(source, callBudgetMs=BUDGET_MS)[0] == DEADLINE


@pytest.mark.parametrize(
    "body", ["return Hook()", "raise Hook()", "hook = Hook(); raise ValueError"]
)
def test_hooks_after_the_function_ask_for_nothing(bench, log, body):
    source = f"""
import blockx_test_log as LOG
from blockx_sdk import rpc
class Hook(Exception):
    def ask(self, *_):
        try:
            rpc.call("eth_chainId")
        except RuntimeError:
            LOG.append("refused")
        return "asked"
    __str__ = __repr__ = __del__ = ask
def _():
    {body}
"""
    bench.call(source)
    assert set(log) == {"refused"}


def test_code_that_runs_when_a_task_is_released_is_cut(new_bench, monkeypatch):
    monkeypatch.setattr("blockx.executor.late_code.LATE_MS", 100)
    bench = new_bench(task_linger_ns=0)
    source = f"class Hook:\n    def __del__(self):{LOOP}KEPT = Hook()\ndef _():\n    return 1\n"
    assert bench.output(source) == 1
    assert bench.output(NEIGHBOUR, 1, taskId="t2") == 2  # the first turn releases the first task


def test_while_it_runs_the_row_names_a_call_that_nobody_has(row, new_bench, log):
    bench = new_bench(row=row, task_linger_ns=0)
    bench_row = "import blockx_test_row as ROW, blockx_test_log as LOG\n"
    sys.modules["blockx_test_row"] = row  # type: ignore[assignment]
    try:
        source = (
            f"{bench_row}class Hook:\n    def __del__(self, row=ROW, log=LOG):\n"
            "        log.append(row.scheduler[8])\n"
            "KEPT = Hook()\ndef _():\n    return 1\n"
        )
        assert bench.output(source) == 1
        bench.output(NEIGHBOUR, 1, taskId="t2")
    finally:
        del sys.modules["blockx_test_row"]
    assert log == [1 << 61]
    assert row.scheduler[8] == 0


PARAMETERS = {
    "operation": "capability('c').ask(Sly.VALUE)",
    "a method": "rpc.call(Sly('eth_chainId'))",
    "a function": "function.call(Sly('g'))",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_goes_on_the_wire_runs_no_code_of_the_user_there(bench, name):
    """There is no alarm while a request is sent."""
    source = f"""
from blockx import capability
from blockx_sdk import rpc
class Sly(str):
    def __str__(self):
        while True:
            pass
    __hash__ = __format__ = __eq__ = encode = __str__
class Value:
    def __getattr__(self, name):
        while True:
            pass
Sly.VALUE = Value()
def _():
    {PARAMETERS[name]}
"""
    bench.start(source, callBudgetMs=BUDGET_MS)
    sent = bench.run()
    if isinstance(sent[0], CallFailed):
        assert sent[0].payload.error_kind in (DEADLINE, "user_error")
    else:
        assert (sent[0].payload.operation or sent[0].payload.function_id) in ("eth_chainId", "g")
        bench.cancel("c1")
        bench.run()
