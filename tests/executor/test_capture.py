"""Failure reports and printed output: whatever user code does, the texts are there and bounded."""

# ruff: noqa: T201 - what calls print is the subject

import contextlib
import errno
import gc
import io
import json
import os
import pty
import subprocess
import sys
import weakref
from collections.abc import Iterator
from hashlib import sha256

import pytest

from blockx.errors import CallCancelledError, CallSignal
from blockx.executor.capture import (
    REPORT_BYTES_MAX,
    TAIL_CHARS_MAX,
    CallOutput,
    FailureReport,
    failure_report,
    install,
)
from blockx.executor.loader import Loader, is_user_file
from blockx.functions.entry import resolve_entry


@pytest.fixture
def fail():
    """Run a function's source as a call that fails, and report."""
    loader = Loader()

    def run(source: str, *args: object) -> FailureReport:
        digest = sha256(source.encode()).hexdigest()
        entry = resolve_entry("f", source)
        function = loader.load("t", "f", digest, entry, lambda _id, _digest: source)
        try:
            function.call(*args)
        except CallSignal:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever the function raises is reported
            report = failure_report(error, is_user_file)
            assert_bounded(report)
            return report
        raise AssertionError("it did not fail")

    yield run
    loader.release_task("t")


def assert_bounded(report: FailureReport) -> None:
    size = len(report.message.encode()) + len(report.stack.encode())
    size += sum(len(k.encode()) + len(v.encode()) for k, v in report.local_vars.items())
    assert size <= REPORT_BYTES_MAX
    assert len(report.local_vars) <= 51


def test_a_report_is_the_message_the_users_stack_and_his_variables(fail):
    source = (
        "def helper(x):\n    return 10 / x  # the line\n\ndef _(n):\n    y = [n]\n    helper(n)\n"
    )
    digest = sha256(source.encode()).hexdigest()[:8]
    assert fail(source, 0) == FailureReport(
        message="ZeroDivisionError: division by zero",
        stack="Traceback (most recent call last):\n"
        f'  File "functions/f.py#{digest}", line 6, in _\n'
        "    helper(n)\n"
        f'  File "functions/f.py#{digest}", line 2, in helper\n'
        "    return 10 / x  # the line\n"
        "ZeroDivisionError: division by zero",
        local_vars={"x": "0"},
    )


def test_library_frames_below_the_users_are_shown_and_ours_are_not(fail):
    report = fail('def _():\n    text = "{"\n    return json.loads(text)')
    assert "in _\n    return json.loads(text)\n" in report.stack
    assert f'File "{json.decoder.__file__}", line ' in report.stack
    assert __file__ not in report.stack
    assert report.local_vars == {"text": "'{'"}
    inside = fail("def _():\n    return ChainState('dev', -1)")
    assert "blockx/sdk" not in inside.stack
    assert inside.message == "ValueError: a block height is from 0 to 2**64 - 1, not -1"


def test_a_failure_without_a_user_frame_has_its_message_alone(fail):
    report = fail("def _(a, b): ...", 1)
    text = "TypeError: _() missing 1 required positional argument: 'b'"
    assert report == FailureReport(text, text, {})


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ("KeyError('token')", "KeyError: 'token'"),
        ("KeyError", "KeyError"),
        ("ValueError('a', 2)", "ValueError: ('a', 2)"),
        ("ValueError(['a'])", "ValueError: ['a']"),
        ("ValueError(Decimal('1.10'))", "ValueError: 1.10"),
        ("ValueError('\\ud800')", "ValueError: \\ud800"),
        ("OSError(2, 'gone', 'x')", "FileNotFoundError: [Errno 2] gone: 'x'"),
        ("SystemExit(3)", "SystemExit: 3"),
        ("StopIteration()", "StopIteration"),
        ("ExceptionGroup('many', [ValueError(1)])", "ExceptionGroup: many (1 sub-exception)"),
    ],
)
def test_a_message_begins_with_the_class_and_is_python_s_text(fail, raised, message):
    assert fail(f"def _():\n    raise {raised}").message == message


@pytest.mark.parametrize(
    ("body", "trouble"),
    [
        ("raise RuntimeError('no text for you')", "RuntimeError"),
        ("return 5", "TypeError"),
        ("return self.__str__()", "RecursionError"),
        ("raise SystemExit", "SystemExit"),
        ("raise self", "Quiet"),
    ],
)
def test_a_text_that_cannot_be_made_is_replaced(fail, body, trouble):
    source = (
        f"class Quiet(Exception):\n    def __str__(self):\n        {body}\n"
        "def _():\n    raise Quiet(1)"
    )
    assert fail(source).message == f"Quiet: <no text: {trouble} while it was made>"


def test_properties_of_a_hostile_exception_are_not_asked(fail):
    source = (
        "class Meta(type):\n    __name__ = property(lambda c: 1 / 0)\n"
        "class Bad(Exception, metaclass=Meta):\n"
        "    __cause__ = __context__ = __traceback__ = args = property(lambda s: 1 / 0)\n"
        "    __class__ = property(lambda s: 1 / 0)\n"
        "def _():\n    raise Bad('text')"
    )
    report = fail(source)
    assert report.message == "Bad: text"
    assert "line 7, in _\n    raise Bad('text')\n" in report.stack


def test_constructors_with_more_arguments_and_live_objects_are_no_trouble(fail):
    source = (
        "import threading\nclass Paused(Exception):\n    def __init__(self, pool, why):\n"
        "        super().__init__(why)\n"
        "def _(kind):\n    if kind:\n        raise ValueError(threading.Lock(), lambda: 1)\n"
        "    raise Paused(1, 'pool paused')"
    )
    assert fail(source, 0).message == "Paused: pool paused"
    assert fail(source, 1).message.startswith("ValueError: (<unlocked _thread.lock object at ")


@pytest.mark.parametrize(
    "raised",
    [
        "ValueError('x' * 30_000_000)",
        "ValueError(b'x' * 30_000_000)",
        "ValueError(list(range(1_000_000)))",
        "ValueError(1 << 10_000_000)",
        "KeyError('\\u20ac' * 30_000_000)",
        "type('X' * 100_000, (Exception,), {})('text')",
        "ExceptionGroup('g', [ValueError('y' * 100_000)] * 1_000)",
        "type('B', (Exception,), {'__str__': lambda s: '\\x00' * 10_000_000})()",
    ],
)
def test_megabytes_of_text_are_shortened(fail, raised):
    report = fail(f"def _():\n    raise {raised}")
    assert report.message[:1] in "VKXEB"


def test_a_shortened_text_says_so(fail):
    report = fail("def _(n):\n    raise ValueError('x' * n)", 30_000_000)
    assert report.message.startswith("ValueError: xxxxxxxxxx")
    assert report.message.endswith("x... [shortened, 30000012 characters]")


def test_a_deep_stack_shows_both_ends(fail):
    source = "def down(n):\n    return down(n + 1)\n\ndef _():\n    down(0)"
    report = fail(source)
    assert report.message.startswith("RecursionError: maximum recursion depth exceeded")
    assert report.stack.count("\n    return down(n + 1)") == 19
    assert " frames not shown]\n" in report.stack


def test_long_names_and_lines_are_shortened(fail):
    name = "n" * 10_000
    report = fail(f"def {name}():\n    {name} = '{name}'; raise ValueError\ndef _(): {name}()")
    assert len(report.stack) < 3_000


def test_a_chain_is_shown_oldest_first_and_a_cycle_ends(fail):
    source = (
        "def _(kind):\n"
        "    try:\n        1 / 0\n"
        "    except ZeroDivisionError as error:\n"
        "        if kind == 'loop':\n"
        "            new = ValueError('new')\n            error.__cause__ = new\n"
        "            raise new from error\n"
        "        if kind == 'from':\n            raise ValueError('new') from error\n"
        "        if kind == 'none':\n            raise ValueError('new') from None\n"
        "        raise ValueError('new')\n"
    )
    direct, during, hidden, loop = (fail(source, k).stack for k in ("from", "", "none", "loop"))
    assert (
        "ZeroDivisionError: division by zero\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n" in direct
    )
    assert "\n\nDuring handling of the above exception, another exception occurred:\n\n" in during
    assert "ZeroDivisionError" not in hidden
    assert loop.count("ValueError: new") == 1
    assert [text.endswith("\nValueError: new") for text in (direct, during, hidden, loop)] == [
        True
    ] * 4


def test_a_long_chain_and_a_large_group_are_bounded(fail):
    chain = (
        "def _(n):\n    try:\n        if n:\n            _(n - 1)\n"
        "    except ValueError as error:\n        raise ValueError(str(n) * 1000) from error\n"
        "    raise ValueError(n)"
    )
    assert fail(chain, 50).stack.count("direct cause") == 3
    group = "def _():\n    raise ExceptionGroup('g', [KeyError(i) for i in range(99)])"
    assert fail(group).stack.endswith(
        "ExceptionGroup: g (99 sub-exceptions)\n"
        + "".join(f"  | KeyError: {i}\n" for i in range(10))
        + "  | ... [99 exceptions]"
    )


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("1 << 255", str(1 << 255)),
        ("1 << 5_000", "<int of 5001 bits>"),
        ("'x' * 1_000", f"{'x' * 200!r}... [1000 characters]"),
        ("b'x' * 1_000", f"{b'x' * 200!r}... [1000 bytes]"),
        ("(1,)", "(1,)"),
        ("set()", "set()"),
        (
            "type('C', (), {'__class__': property(lambda s: 1 / 0), '__repr__': lambda s: 'C'})()",
            "C",
        ),
        ("type('D', (dict,), {'__iter__': None, 'items': None})(a=1)", "{'a': 1}"),
        ("{'a': [1, {2}], 'b': None}", "{'a': [1, {2}], 'b': None}"),
        ("[[[[[1]]]]]", "[[[[...]]]]"),
        ("list(range(100))", "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ... [100 items]]"),
        ("Decimal('1.10')", "Decimal('1.10')"),
        ("'\\ud800'", "'\\ud800'"),
        ("type('R', (), {'__repr__': lambda s: 1 / 0})()", None),
    ],
)
def test_local_variables_are_shortened(fail, expression, shown):
    report = fail(f"def _():\n    v = {expression}\n    raise ValueError")
    if shown is None:
        shown = "<no text: ZeroDivisionError while it was made>"
    assert report.local_vars == {"v": shown}


def test_a_value_that_holds_itself_and_a_billion_laughs_are_no_trouble(fail):
    source = (
        "def _():\n    me = []\n    me.append(me)\n    lol = ['lol'] * 10\n"
        "    for _ in range(30):\n        lol = [lol] * 10\n    raise ValueError(lol)"
    )
    assert fail(source).local_vars["me"] == "[[[[...]]]]"


def test_a_container_that_changes_under_our_hands_is_no_trouble(fail):
    source = (
        "class Sly:\n    def __repr__(self):\n        v.clear()\n        return 'Sly'\n"
        "v = {}\ndef _():\n    d = v\n    v[1] = v[2] = Sly()\n    raise ValueError"
    )
    assert fail(source).local_vars == {"d": "<no text: RuntimeError while it was made>"}


def test_many_variables_are_bounded_and_counted(fail):
    assigned = "\n".join(f"    v{i} = '\\u20ac' * 1000" for i in range(90))
    report = fail(f"def _():\n{assigned}\n    raise ValueError")
    assert report.local_vars["..."] == f"{91 - len(report.local_vars)} more variables"


def test_a_signal_in_a_text_passes(fail):
    source = (
        "import blockx.errors\nclass Slow(Exception):\n    def __str__(self):\n"
        "        raise blockx.errors.CallCancelledError('stop')\n"
        "def _():\n    raise Slow(1)"
    )
    with pytest.raises(CallCancelledError):
        fail(source)


def test_no_frame_outlives_the_report(fail):
    source = (
        "KEPT = []\nclass Big: ...\nBIGS = []\nimport weakref\n"
        "def _():\n    big = Big()\n    BIGS.append(weakref.ref(big))\n"
        "    error = ValueError('kept for ever')\n    KEPT.append(error)\n"
        "    try:\n        raise KeyError('inner')\n"
        "    except KeyError as inner:\n        KEPT.append(inner)\n        raise error\n"
    )
    loader = Loader()
    digest = sha256(source.encode()).hexdigest()
    call = loader.load("t", "f", digest, "_", lambda _id, _digest: source).call
    try:
        call()
    except ValueError as error:
        failure_report(error, is_user_file)
    gc.collect()
    kept = call.__globals__["KEPT"]
    assert [error.__traceback__ for error in kept] == [None, None]
    refs: list[weakref.ref[object]] = call.__globals__["BIGS"]
    assert [ref() for ref in refs] == [None]
    loader.release_task("t")


def test_file_names_may_be_given_instead_of_a_function():
    def crash() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here") as failed:
        crash()
    report = failure_report(failed.value, {__file__})
    assert 'in crash\n    raise ValueError("here")\nValueError: here' in report.stack


def test_patched_standard_functions_do_not_break_a_report(fail):
    source = (
        "import linecache, traceback, builtins\n"
        "linecache.getline = linecache.getlines = linecache.updatecache = None\n"
        "traceback.format_exception = None\n"
        "def _():\n    raise ValueError('here')"
    )
    saved = (linecache_functions := __import__("linecache")).__dict__.copy()
    saved_traceback = __import__("traceback").format_exception
    try:
        report = fail(source)
    finally:
        linecache_functions.__dict__.update(saved)
        __import__("traceback").format_exception = saved_traceback
    assert report.message == "ValueError: here"
    assert ", line 5, in _\n" in report.stack


# --- printed output -----------------------------------------------------------------------------


class Printing:
    """An installed capture, and the output of the call that runs now."""

    def __init__(self) -> None:
        self.now: CallOutput | None = None
        self.capture = install(lambda: self.now)


@contextlib.contextmanager
def printing() -> Iterator[Printing]:
    """Within a test only: pytest puts its own streams back between set-up and test."""
    streams = sys.stdout, sys.stderr
    try:
        yield Printing()
    finally:
        sys.stdout, sys.stderr = streams


def test_each_call_gets_what_it_printed_in_order():
    first, second = CallOutput(), CallOutput()
    with printing() as outputs:
        for text, output in (("a", first), ("b", second), ("c", first)):
            outputs.now = output
            print(text)
            print(text.upper(), file=sys.stderr, end=";")
        outputs.now = None
        print("between calls: nobody's")
    assert [first.text(), second.text()] == ["a\nA;c\nC;", "b\nB;"]


def test_streams_behave_as_files_do():
    output = CallOutput()
    with printing() as outputs:
        outputs.now = output
        assert sys.stdout.write("caf\u00e9 \ud800 ") == 7
        sys.stdout.writelines(["x", "y"])
        sys.stdout.buffer.write(b" bytes \xff ")
        sys.stdout.flush()
        answers = sys.stdout.isatty(), sys.stdout.writable(), sys.stdout.encoding
        with pytest.raises(TypeError, match="must be str, not bytes"):
            sys.stdout.write(b"bytes")
        with pytest.raises(io.UnsupportedOperation):
            sys.stdout.fileno()
        with contextlib.redirect_stdout(io.StringIO()) as own:
            print("mine")
    assert answers == (False, True, "utf-8")
    assert own.getvalue() == "mine\n"
    assert output.text() == "caf\u00e9 \\ud800 xy bytes \ufffd "


def test_closing_or_replacing_the_streams_does_not_reach_the_next_call():
    first, second = CallOutput(), CallOutput()
    with printing() as outputs:
        outputs.now = first
        sys.stdout.close()
        sys.stdout.buffer.close()
        print("still open")
        sys.stdout = None
        del sys.stderr
        outputs.capture.restore()
        outputs.now = second
        print("out")
        print("err", file=sys.stderr)
    assert [first.text(), second.text()] == ["still open\n", "out\nerr\n"]


def test_the_tail_is_bounded_and_says_what_was_dropped():
    output = CallOutput()
    for number in range(100_000):
        output.append(f"{number:06}\n")
        assert output._chars <= 2 * TAIL_CHARS_MAX
    lines = output.text().split("\n")
    assert lines[0] == f"[{700_000 - TAIL_CHARS_MAX} characters before this were dropped]"
    assert lines[-2] == "099999"
    assert sum(len(line) + 1 for line in lines[1:]) - 1 == TAIL_CHARS_MAX


def test_one_huge_text_and_endless_empty_ones_are_bounded():
    output = CallOutput()
    output.append("x" * 10_000_000 + "end")
    for _ in range(100_000):
        output.append("")
        assert len(output._parts) <= TAIL_CHARS_MAX
    assert output.text().endswith("xend")
    assert len(output.text()) < TAIL_CHARS_MAX + 100


def test_a_debug_call_keeps_everything_it_reasonably_printed():
    output = CallOutput(debug=True)
    text = "line\n" * 100_000
    output.append(text)
    assert output.text() == text


def test_descriptors_of_user_code_lead_nowhere_and_ours_stays_private():
    program = (
        "import os, sys\nfrom blockx.executor.capture import silence_descriptors\n"
        "log = silence_descriptors()\n"
        "os.write(1, b'user'); os.write(2, b'user'); os.system('echo user; echo user >&2')\n"
        "print('user', flush=True)\n"
        "os.write(log, b'ours')\n"
        "os.system(f'echo forged >&{log} 2>/dev/null')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == (b"", b"ours")


@pytest.mark.slow
def test_a_terminal_can_be_written_by_the_log_and_not_be_read():
    main, terminal = pty.openpty()
    script = (
        "import os, sys\nfrom blockx.executor.capture import silence_descriptors\n"
        "log = silence_descriptors()\nos.write(log, b'a line')\n"
        "try:\n    os.read(log, 1)\nexcept OSError as error:\n    os._exit(error.errno)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], stderr=terminal, check=False, timeout=30)
    assert (done.returncode, os.read(main, 100)) == (errno.EBADF, b"a line")
    os.close(main)
    os.close(terminal)
