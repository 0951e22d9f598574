"""What a call changes in the process is gone when it waits, and when it ends; nobody else finds it."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blockx.executor import descriptors
from blockx.ipc.messages import CallCompleted
from tests.executor.conftest import output_of

CHANGES = {
    # name: (what a call does, an expression that the others look at)
    "environment": ("os.environ['PATH'] = 'x'; os.environ['NEW'] = '1'", "sorted(os.environ.items())"),
    "no environment": ("os.environ.clear()", "os.getenv('PATH')"),
    "another environment": ("os.environ = {}", "os.environ.get('PATH')"),
    "environment of C": ("os.environ.pop('PATH')", "sorted(subprocess.check_output('/usr/bin/env').splitlines())"),
    "time zone": ("os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()", "time.localtime(0).tm_hour, time.tzname"),
    "folder": ("os.chdir('/usr')", "os.getcwd()"),
    "removed folder": ("d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)", "os.getcwd()"),
    "umask": ("os.umask(0o777)", "[os.umask(0o22), os.umask(0o22)][0]"),
    "handlers": (
        "[signal.signal(n, signal.SIG_DFL) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGPROF)]",
        "[signal.getsignal(n) == signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGINT)]",
    ),
    "mask": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
        "sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    ),
    "recursion limit": ("sys.setrecursionlimit(9_000)", "sys.getrecursionlimit()"),
    "digits": ("sys.set_int_max_str_digits(0)", "sys.get_int_max_str_digits()"),
    "switch interval": ("sys.setswitchinterval(5)", "sys.getswitchinterval()"),
    "collection": ("gc.disable()", "gc.isenabled()"),
    "collection threshold": ("gc.set_threshold(1, 1, 1)", "gc.get_threshold()"),
    "tracing": ("sys.settrace(lambda *_: None)", "sys.gettrace() is None"),
    "profiling": ("sys.setprofile(lambda *_: None)", "sys.getprofile() is None"),
    "warnings": ("warnings.simplefilter('error')", "warnings.filters[0][0]"),
    "another list of warnings": (
        "warnings.catch_warnings().__enter__(); warnings.simplefilter('error')", "warnings.filters[0][0]",
    ),
    "json": ("json.dumps = None; json.JSONDecodeError = 5", "json.dumps({'a': 1}), json.JSONDecodeError.__name__"),
    "deleted json": ("del json.loads", "json.loads('[1]')"),
    "json in the table": ("sys.modules['json'] = None", "__import__('json').dumps([1])"),
    "time": ("time.monotonic = lambda: 0; time.time = None", "time.monotonic() > 0 and time.time() > 0"),
    "sleep": ("time.sleep = print", "time.sleep(0)"),
    "datetime": (
        "datetime_module.datetime = None; datetime_module.new = 1",
        "datetime_module.datetime(2026, 1, 2).year, hasattr(datetime_module, 'new')",
    ),
    "decimal": ("decimal.Decimal = float", "str(decimal.Decimal('0.1') + 1)"),
    "math": ("math.pi = 3", "math.pi"),
    "builtins": ("builtins.len = builtins.print = None", "len('four'), print.__name__"),
    "new builtin": ("builtins.leak = 1", "hasattr(builtins, 'leak')"),
    "deleted builtin": ("del builtins.isinstance", "isinstance(1, int)"),
    "import": ("builtins.__import__ = None", "__import__('colorsys').__name__"),
    "sdk": ("function.call = print", "function.call.__module__"),
    "compares wildly": ("json.dumps = Wild()", "json.dumps(1)"),
}  # fmt: skip
PREFIX = """
import builtins, datetime as datetime_module, decimal, gc, json, math, os, signal, subprocess, sys
import tempfile, time, warnings
sleep = time.sleep
class Wild:
    def __eq__(self, other):
        raise SystemExit("wild")
"""


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_call_changes_no_other_call_finds(bench, name):
    change, look = CHANGES[name]
    looker = f"{PREFIX}\ndef _(n):\n    sleep(n)\n    return [repr(({look})), repr(({look}))]"
    before = bench.output(looker, 0)
    bench.start(looker, [0.01])  # it waits meanwhile
    changer = f"{PREFIX}\ndef _(n):\n    {change}\n    sleep(n)\n    {change}\n    return 'changed'"
    bench.start(changer, [0.005])
    bench.start(changer, [0])
    bench.start(looker, [0])  # it starts after
    sent = bench.run_to_end()
    found = [output_of(m) for m in sent if isinstance(m, CallCompleted)]
    assert [f for f in found if f != "changed"] == [before, before], sent


def test_parts_of_a_package_that_a_call_imports_stay(bench):
    source = "import json, time\nimport json.tool\ndef _():\n    time.sleep(0)\n    return json.tool.__name__"
    assert [bench.output(source) for _ in range(2)] == ["json.tool", "json.tool"]


def test_builtins_of_the_framework_are_never_those_of_user_code(bench):
    source = """
import builtins, time
from blockx_sdk import sleep
def _():
    for name in ("len", "max", "min", "int", "isinstance", "type", "issubclass", "getattr", "dict"):
        setattr(builtins, name, None)
    sleep(0.001)
    raise ValueError("still told")
"""
    assert bench.failure(source) == ("user_error", "ValueError: still told")


def test_a_runtime_that_is_closed_gives_everything_back(bench):
    environ_class = type(os.environ)
    bench.runtime.close()
    assert type(os.environ) is not environ_class
    assert {type(sys.modules[name]).__name__ for name in ("json", "time", "builtins")} == {"module"}
    assert sys.modules["builtins"].__dict__ is vars(__import__("builtins"))
    assert time.sleep.__class__.__name__ == "builtin_function_or_method"


@pytest.fixture
def ours(tmp_path: Path):
    descriptor = os.open(tmp_path / "ours", os.O_CREAT)
    descriptors.protect({descriptor})
    yield descriptor
    descriptors.unprotect()
    os.close(descriptor)


def test_our_descriptors_stay_open_whatever_is_closed(ours, tmp_path):
    others = [os.open(tmp_path / "x", os.O_CREAT) for _ in range(3)]
    with pytest.raises(OSError) as refused:  # noqa: PT011 - the number is looked at
        os.close(ours)
    os.closerange(min(ours, *others), max(ours, *others) + 1)
    assert refused.value.errno == errno.EBADF
    assert os.fstat(ours)
    assert [Path(f"/proc/self/fd/{fd}").exists() for fd in others] == [False, False, False]
    with pytest.raises(TypeError):
        os.close("3")  # type: ignore[arg-type]


def test_what_is_not_ours_is_closed_as_usual(ours, tmp_path):
    with (
        open(tmp_path / "x", "w") as file,
        subprocess.Popen(["true"], stdout=subprocess.PIPE) as child,
    ):
        assert child.communicate()[0] == b""
        copy = os.dup(file.fileno())
        os.close(copy)
        assert not Path(f"/proc/self/fd/{copy}").exists()
