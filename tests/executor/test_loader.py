"""Loading: one module a task, no half-initialised module, nothing kept."""

import gc
import linecache
import pickle
import sys
import traceback
import typing
import weakref
from hashlib import sha256

import pytest
from greenlet import getcurrent, greenlet

from blockx.errors import CallDeadlineExceededError, FunctionCodeFetchError, UsageError
from blockx.executor.capture import failure_report
from blockx.executor.loader import Loader, LoadFailedError, code_cache_entries, is_user_file
from blockx.functions.entry import resolve_entry


class Sources:
    """Plays the bridge: hands out sources, counts, and may let another greenlet run."""

    def __init__(self, *, switching: bool = False) -> None:
        self.by_digest: dict[str, str] = {}
        self.fetched: list[str] = []
        self.switching = switching

    def fetch(self, function_id: str, digest: str) -> str:
        self.fetched.append(function_id)
        if self.switching:
            getcurrent().parent.switch()
        return self.by_digest[digest]

    def load(self, loader, source, *, task="t1", name="f", entry=None, verify=None):
        digest = sha256(source.encode()).hexdigest()
        self.by_digest[digest] = source
        entry = entry or resolve_entry(name, source)
        return loader.load(task, name, digest, entry, self.fetch, verify)


@pytest.fixture
def sources() -> Sources:
    return Sources()


@pytest.fixture
def loader():
    """A loader, and at the end the check that nothing of its tasks is left in the process."""
    modules = set(sys.modules)
    loader = Loader()
    yield loader
    for task in ("t1", "t2"):
        loader.release_task(task)
    assert [name for name in set(sys.modules) - modules if name.startswith("blockx_user")] == []
    assert [name for name in linecache.cache if is_user_file(name)] == []
    assert loader.loaded_count() == 0


def test_a_function_is_fetched_once_and_loaded_once_a_task(loader, sources):
    source = "COUNT = 0\ndef _(n):\n    global COUNT\n    COUNT += n\n    return COUNT"
    first = sources.load(loader, source)
    assert sources.load(loader, source) is first
    second = sources.load(loader, source, task="t2")
    assert [first.call(1), first.call(1), second.call(1)] == [1, 2, 1]
    assert sources.fetched == ["f"]
    assert first.filename == second.filename
    assert first.held_long is False


def test_a_released_task_starts_afresh(loader, sources):
    source = "def _(n, acc=[]):\n    acc.append(n)\n    return len(acc)"
    assert [sources.load(loader, source).call(1) for _ in range(3)] == [1, 2, 3]
    loader.release_task("t1")
    assert sources.load(loader, source).call(1) == 1


def test_equal_sources_of_two_functions_have_their_own_globals_and_file_names(loader, sources):
    source = "SEEN = []\ndef _(n):\n    SEEN.append(n)\n    return SEEN"
    a, b = sources.load(loader, source, name="a"), sources.load(loader, source, name="b")
    assert [a.call(1), b.call(2)] == [[1], [2]]
    assert (a.filename.split("#")[0], b.filename.split("#")[0]) == (
        "functions/a.py",
        "functions/b.py",
    )


def test_the_prelude_is_there_and_the_module_wins(loader, sources):
    plain = 'def _():\n    return json.dumps({"d": str(Decimal("1.10"))}), date(2026, 6, 10)'
    own = "def date(x):\n    return x\njson = 7\ndef _():\n    return json, date(5)"
    assert str(sources.load(loader, plain).call()) == (
        '(\'{"d": "1.10"}\', datetime.date(2026, 6, 10))'
    )
    assert sources.load(loader, own, name="own", entry="_").call() == (7, 5)


def test_dataclasses_pickle_and_type_hints_find_the_module(loader, sources):
    source = (
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n\n"
        "@dataclass\nclass Row:\n    holder: str\n    wei: int\n\n"
        "def _(n):\n    return Row('a', n)\n"
    )
    row = sources.load(loader, source).call(5)
    assert typing.get_type_hints(type(row)) == {"holder": str, "wei": int}
    assert pickle.loads(pickle.dumps(row)) == row


def test_tracebacks_show_the_users_lines(loader, sources):
    source = "def helper(x):\n    return 10 / x  # the line to show\n\ndef _(n):\n    helper(n)\n"
    function = sources.load(loader, source)
    with pytest.raises(ZeroDivisionError) as failed:
        function.call(0)
    text = "".join(traceback.format_exception(failed.value))
    assert f'File "{function.filename}", line 2, in helper' in text
    assert "return 10 / x  # the line to show" in text


def test_lines_survive_a_user_who_clears_linecache(loader, sources):
    source = "import linecache\ndef _():\n    linecache.clearcache()\n    return 1 / 0  # here"
    with pytest.raises(ZeroDivisionError) as failed:
        sources.load(loader, source).call()
    assert "1 / 0  # here" in failure_report(failed.value, is_user_file).stack


def test_a_source_that_is_not_the_digest_is_refused(loader):
    with pytest.raises(FunctionCodeFetchError, match="is not the pinned one") as refused:
        loader.load("t1", "f", "0" * 64, "_", lambda _id, _digest: "def _(): ...")
    assert refused.value.retryable
    with pytest.raises(FunctionCodeFetchError, match="no UTF-8 text"):
        loader.load("t1", "f", "0" * 64, "_", lambda _id, _digest: "'\ud800'")


def test_a_body_that_raises_is_a_load_error_with_its_line_and_is_run_again(loader, sources):
    source = "import json\nLIMIT = int('many')\ndef _(): ...\n"
    for _ in range(2):
        with pytest.raises(LoadFailedError) as failed:
            sources.load(loader, source)
        report = failure_report(failed.value, is_user_file)
        assert report.message == "ValueError: invalid literal for int() with base 10: 'many'"
        assert "line 2, in <module>\n    LIMIT = int('many')\n" in report.stack
        assert report.local_vars == {}
    assert sources.fetched == ["f"]


@pytest.mark.parametrize("body", ["raise SystemExit(3)", "raise KeyboardInterrupt"])
def test_a_body_that_wants_to_end_the_process_is_a_load_error(loader, sources, body):
    with pytest.raises(LoadFailedError, match='while the module of function "f" was loaded'):
        sources.load(loader, f"{body}\ndef _(): ...")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def _(): ...\ndel _", "nothing"),
        ("def _(): ...\n_ = 5", "an object of type int"),
    ],
)
def test_an_entry_that_did_not_stay_a_function_is_a_load_error(loader, sources, source, found):
    with pytest.raises(LoadFailedError) as failed:
        sources.load(loader, source)
    assert failure_report(failed.value, is_user_file).message == (
        f'LoadError: after the module of function "f" had run, `_` was {found}; '
        "its entry must stay a function"
    )


def test_a_source_that_does_not_compile_here_is_a_load_error(loader, sources):
    with pytest.raises(LoadFailedError) as failed:
        sources.load(loader, "def _(:", entry="_")
    report = failure_report(failed.value, is_user_file)
    text = "SyntaxError: invalid syntax (functions/f.py, line 1, column 7): def _(:"
    assert report == (text, text, {})


def test_signals_pass_through_a_body_and_leave_no_module(loader, sources):
    source = "import blockx.errors\nraise blockx.errors.CallDeadlineExceededError('5 ms')\n"
    with pytest.raises(CallDeadlineExceededError):
        sources.load(loader, source, entry="_")
    assert loader.loaded_count() == 0


def test_a_body_that_swallowed_a_signal_is_not_kept(loader, sources):
    def told_to_stop() -> None:
        raise CallDeadlineExceededError("swallowed")

    source = "def _():\n    return 1"
    with pytest.raises(CallDeadlineExceededError):
        sources.load(loader, source, verify=told_to_stop)
    assert loader.loaded_count() == 0
    assert sources.load(loader, source, verify=lambda: None).call() == 1


def test_calls_that_wait_for_one_source_share_the_module_that_is_ready_first(loader):
    sources, ran, loaded = Sources(switching=True), [], []
    sys.modules["test_loader_ran"] = ran  # type: ignore[assignment]
    source = "import test_loader_ran\ntest_loader_ran.append(1)\ndef _(): ..."
    calls = [greenlet(lambda: loaded.append(sources.load(loader, source))) for _ in range(3)]
    for call in [*calls, *calls]:
        call.switch()
    del sys.modules["test_loader_ran"]
    assert loaded[0] is loaded[1] is loaded[2]
    assert len(ran) == 1


def test_a_body_that_waits_is_never_seen_half_done(loader, sources):
    """The first call's body waits; a second one runs its own copy; the first complete one is used."""
    source = (
        "from greenlet import getcurrent\nREADY = False\n"
        "getcurrent().parent.switch()\nREADY = True\ndef _():\n    return READY"
    )
    loaded = []
    slow, fast = (
        greenlet(lambda: loaded.append(sources.load(loader, source, entry="_"))) for _ in range(2)
    )
    slow.switch()
    fast.switch()
    assert loaded == []
    fast.switch()
    assert loaded[0].call() is True
    slow.switch()
    assert loaded[1] is loaded[0]
    assert loader.loaded_count() == 1


def test_a_call_that_is_cancelled_in_a_waiting_body_leaves_nothing(loader, sources):
    source = "from greenlet import getcurrent\ngetcurrent().parent.switch()\ndef _(): ..."
    call = greenlet(lambda: sources.load(loader, source, entry="_"))
    call.switch()
    with pytest.raises(CallDeadlineExceededError):
        call.throw(CallDeadlineExceededError("now"))
    assert [name for name in sys.modules if name.startswith("blockx_user")] == []


def test_release_frees_what_the_module_held_at_once(loader, sources):
    source = (
        "class Big: ...\nBIG = Big()\n"
        "def helper():\n    return BIG\n\ndef _():\n    return helper()"
    )
    big = weakref.ref(sources.load(loader, source).call())
    gc.disable()
    try:
        loader.release_task("t1")
        assert big() is None
    finally:
        gc.enable()
    loader.release_task("t1")
    loader.release_task("never seen")


def test_lines_of_a_file_stay_while_another_task_uses_it(loader, sources):
    source = "def _():\n    return 1 / 0  # here"
    first, second = (sources.load(loader, source, task=task) for task in ("t1", "t2"))
    for function, task in ((first, "t1"), (second, "t2")):
        with pytest.raises(ZeroDivisionError) as failed:
            function.call()
        assert "# here" in failure_report(failed.value, is_user_file).stack
        loader.release_task(task)
        assert (first.filename in linecache.cache) == (task == "t1")


def test_a_function_that_breaks_sys_modules_breaks_only_itself(loader, sources):
    source = "import sys\nsys.modules.pop(__name__)\ndel __name__, __file__\ndef _(): return 1"
    assert sources.load(loader, source).call() == 1


@pytest.mark.parametrize(("entries", "fetched"), [(2, 4), (3, 3), (0, 3)])
def test_the_compile_cache_drops_the_least_recently_used(sources, entries, fetched):
    loader = Loader(entries)
    for task, name in enumerate(["a", "b", "a", "c", "a", "b"]):
        sources.load(loader, "def _(): ...", task=str(task), name=name)
    assert len(sources.fetched) == fetched
    for task in range(6):
        loader.release_task(str(task))


@pytest.mark.parametrize(
    ("environ", "entries"), [({}, 512), ({"BLOCKX_EXECUTOR_CODE_CACHE_MAX_ENTRIES": "0"}, 0)]
)
def test_the_cache_size_comes_from_the_environment(environ, entries):
    assert code_cache_entries(environ) == entries


@pytest.mark.parametrize("text", ["", "-1", "many", "1.5", "9" * 30])
def test_a_cache_size_that_is_no_count_is_refused(text):
    with pytest.raises(UsageError, match="BLOCKX_EXECUTOR_CODE_CACHE_MAX_ENTRIES"):
        code_cache_entries({"BLOCKX_EXECUTOR_CODE_CACHE_MAX_ENTRIES": text})
