"""The entry rule, and what is said of a source that cannot become a function."""

import warnings

import pytest

from blockx.functions.entry import (
    PRELUDE,
    LoadError,
    compile_source,
    is_user_file,
    resolve_entry,
    source_lines,
    user_file_name,
)


@pytest.mark.parametrize(
    ("source", "entry"),
    [
        ("def _(p): ...\ndef balance_of(p): ...", "balance_of"),
        ("def first(): ...\ndef _(p): ...", "_"),
        ("def some(): ...\ndef other(): ...\n_ = other", "_"),
        ("def some(): ...\n_: object = some", "_"),
        ("_ = lambda p: p", "_"),
        ("def _hidden(): ...\ndef shown(): ...\ndef later(): ...", "shown"),
        ("async def _(n): ...", "_"),
        ("@staticmethod\ndef _(n): ...", "_"),
        ("_ = 5\ndef some(): ...", "some"),
        ("for _ in (): ...\ndef some(): ...", "some"),
        ("\ufeffdef _(p): ...", "_"),
        ("from __future__ import annotations\r\ndef _(p: x): ...\r\n", "_"),
    ],
)
def test_the_entry_is_the_namesake_then_underscore_then_the_first_public_def(source, entry):
    assert resolve_entry("erc20/balance_of", source) == entry


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "",
            'LoadError: function "a/f" has no entry: write a top-level `def _(...)`'
            " or `def f(...)`",
        ),
        (
            "if True:\n    def f(): ...\nclass X: ...\ndef _private(): ...",
            'LoadError: function "a/f" has no entry: write a top-level `def _(...)`'
            " or `def f(...)`",
        ),
        (
            "x = 1\ndef _(:\n  ...",
            "SyntaxError: invalid syntax (functions/a/f.py, line 2, column 7): def _(:",
        ),
        (
            "def _():\n    x = '\0'\n",
            "SyntaxError: a NUL byte (functions/a/f.py, line 2); remove it",
        ),
        (
            "# -*- coding: latin-1 -*-\ndef _(): ...",
            "SyntaxError: the encoding latin-1 is declared (functions/a/f.py, line 1); "
            "function sources are UTF-8: save it as UTF-8 and remove the declaration",
        ),
    ],
)
def test_a_source_without_entry_or_syntax_is_refused_with_place_and_text(source, text):
    with pytest.raises(LoadError) as refused:
        resolve_entry("a/f", source)
    assert str(refused.value) == text


@pytest.mark.parametrize(
    "source",
    [
        "x = " + "(" * 5_000 + "1" + ")" * 5_000,
        "x = " + "-" * 100_000 + "1",
        "x = " + "+".join(["1"] * 100_000),
        "x = y" + ".a" * 100_000,
        "x = " + "[" * 100_000,
        "x = '\ud800'",
        "x = " + "9" * 5_000,
    ],
)
def test_hostile_sources_are_refused_and_nothing_worse(source):
    with pytest.raises(LoadError, match=r"functions/f\.py"):
        resolve_entry("f", source)


def test_errors_that_only_the_compiler_sees_are_load_errors():
    with pytest.raises(LoadError) as refused:
        compile_source("f", "def _(): ...\nreturn 5", "functions/f.py#0")
    assert str(refused.value) == (
        "SyntaxError: 'return' outside function (functions/f.py, line 2, column 1)"
    )


def test_warnings_about_user_source_are_not_ours_to_print():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        compile_source("f", "def _(): return '\\d' is 5", "functions/f.py#0")
        resolve_entry("f", "def _(): return '\\d' is 5")
    assert seen == []


def test_our_own_future_imports_do_not_leak_into_user_code():
    code = compile_source("f", "x: undefined_name = 1", "functions/f.py#0")
    with pytest.raises(NameError):
        exec(code, {})


def test_file_names_are_readable_unique_by_digest_and_recognised():
    name = user_file_name("erc20/balance_of", "0123456789abcdef")
    assert name == "functions/erc20/balance_of.py#01234567"
    assert is_user_file(name)
    assert not is_user_file("/usr/lib/python3/functions/json.py")
    assert not is_user_file("<string>")


def test_only_newlines_end_a_line_of_source():
    assert source_lines("a = '\u2028'\r\nb\x0c = 2\nc") == ["a = '\u2028'\n", "b\x0c = 2\n", "c"]


def test_the_prelude_has_the_names_of_the_specification():
    wanted = {"json", "Decimal", "datetime", "date", "function", "ChainState"}
    assert wanted | {"Table", "BlockTable", "TimeTable", "Block"} <= PRELUDE.keys()
