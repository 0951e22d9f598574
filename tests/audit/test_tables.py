"""The tables are true: what they list exists, what they refuse is not listed, and they hold together."""

import ast
import builtins
import importlib

import pytest

from blockx.audit import tables
from blockx.functions.entry import PRELUDE


@pytest.mark.parametrize("module", sorted(tables.ALLOWED_IMPORTS))
def test_every_allowed_name_exists(module):
    path = module.replace(
        "blockx_sdk.", "blockx.sdk."
    )  # attributes of blockx_sdk, no modules of it
    found = importlib.import_module(path)
    for name in tables.ALLOWED_IMPORTS[module]:
        if f"{module}.{name}" in tables.ALLOWED_IMPORTS:
            continue  # a module again, with a row of its own
        assert hasattr(found, name), name


def test_every_safe_builtin_exists():
    assert [name for name in tables.SAFE_BUILTINS if not hasattr(builtins, name)] == []


def test_no_refused_builtin_is_safe():
    assert tables.SAFE_BUILTINS.keys() & tables.NAMES_INSTEAD.keys() == set()


def test_no_allowed_name_is_private():
    names = [n for module in tables.ALLOWED_IMPORTS.values() for n in module]
    assert [name for name in names if name.startswith("_")] == []


def test_every_entry_has_its_reason():
    rows = [*tables.ALLOWED_IMPORTS.values(), tables.SAFE_BUILTINS]
    assert all(reason for row in rows for reason in row.values())


def test_the_prelude_has_a_path_for_every_name():
    assert tables.PRELUDE_PATHS.keys() == PRELUDE.keys()
    for name, path in tables.PRELUDE_PATHS.items():
        module, attribute = PRELUDE[name]
        prelude = importlib.import_module(module)
        allowed, _dot, last = path.rpartition(".")
        if not attribute:
            assert path in tables.ALLOWED_IMPORTS
            assert importlib.import_module(path) is prelude
        else:
            assert last in tables.ALLOWED_IMPORTS[allowed]
            assert getattr(importlib.import_module(allowed), last) is getattr(prelude, attribute)


def test_bases_decorators_and_sdk_classes_are_allowed_names():
    paths = tables.EXCEPTIONS | tables.RECORD_BASES | tables.SDK_CLASSES | tables.DECORATORS
    for path in paths:
        module, _dot, name = path.rpartition(".")
        assert name in (tables.ALLOWED_IMPORTS[module] if module else tables.SAFE_BUILTINS)


def test_exceptions_are_classes_of_ordinary_errors():
    for path in tables.EXCEPTIONS:
        module, _dot, name = path.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module or "builtins"), name), Exception)


def test_the_listed_syntax_exists():
    assert [name for name in tables.SYNTAX if not hasattr(ast, name)] == []
    assert tables.SYNTAX.isdisjoint(tables.SYNTAX_INSTEAD)


def test_the_tables_cannot_be_changed():
    with pytest.raises(TypeError):
        tables.ALLOWED_IMPORTS["os"] = {}
    with pytest.raises(TypeError):
        tables.SAFE_BUILTINS["eval"] = ""
