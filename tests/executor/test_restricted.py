"""The namespace of audited functions, asked without the audit: what is not there cannot be reached by mistake."""

import builtins
import json
import subprocess
import sys
from hashlib import sha256

import pytest

from blockx.audit.tables import ALLOWED_IMPORTS, SAFE_BUILTINS
from blockx.audit.verdict import audit_token
from blockx.executor.loader import Loader, LoadFailedError
from blockx.executor.restricted import RestrictedNamespace
from blockx.functions.entry import PRELUDE


@pytest.fixture
def loader():
    loader = Loader()
    yield loader
    for task in ("t1", "t2"):
        loader.release_task(task)


def load(loader, source, *, task="t1", restricted=True):
    digest = sha256(source.encode()).hexdigest()
    return loader.load(
        task, "f", digest, "_", lambda _name, _digest: source, restricted=restricted
    ).call


def names(loader, task="t1"):
    """The globals of an audited module."""
    return load(loader, "def _(): pass", task=task).__globals__


def every_value():
    """Module, name and value of everything that audited code can import."""
    namespace = RestrictedNamespace()
    for module, listed in ALLOWED_IMPORTS.items():
        facade = namespace._import(module, None, None, tuple(listed))
        for name in listed:
            yield module, name, getattr(facade, name)


VALUES = {f"{module}.{name}": value for module, name, value in every_value()}


def test_built_ins_are_the_safe_ones_and_what_statements_need(loader):
    found = names(loader)["__builtins__"]
    assert set(found) == {*SAFE_BUILTINS, "__import__", "__build_class__"}
    for name in ("open", "eval", "exec", "getattr", "type", "object", "super", "vars", "globals"):
        assert name not in found


def test_each_task_has_its_own(loader):
    first, second = names(loader), names(loader, "t2")
    assert first["__builtins__"] is not second["__builtins__"]
    assert first["json"] is not second["json"]
    assert first["json"].dumps is not second["json"].dumps
    assert load(loader, "def _(): return 2").__globals__["json"] is first["json"]


def test_the_module_holds_nothing_else(loader):
    found = names(loader)
    assert set(found) - {*PRELUDE, "_"} == {
        "__builtins__", "__doc__", "__loader__", "__name__", "__package__", "__spec__",
    }  # fmt: skip
    assert (found["__loader__"], found["__spec__"]) == (None, None)


@pytest.mark.parametrize("module", sorted(ALLOWED_IMPORTS))
def test_a_facade_holds_the_listed_names_and_takes_no_others(module):
    facade = RestrictedNamespace()._import(module, None, None, tuple(ALLOWED_IMPORTS[module]))
    offered = {name for name in dir(facade) if not name.startswith("_")}
    submodules = {
        key.removeprefix(f"{module}.") for key in ALLOWED_IMPORTS if key.startswith(f"{module}.")
    }
    assert offered == {*ALLOWED_IMPORTS[module]} | submodules
    for change in (
        lambda: setattr(facade, next(iter(ALLOWED_IMPORTS[module])), 1),
        lambda: setattr(facade, "more", 1),
        lambda: delattr(facade, next(iter(ALLOWED_IMPORTS[module]))),
    ):
        with pytest.raises(AttributeError, match="cannot be"):
            change()
    assert not hasattr(facade, "__dict__")
    assert not hasattr(facade, "__name__")


SHARED_OBJECTS = {"dataclasses.KW_ONLY", "typing.Annotated", "typing.Literal"}
"""Known by identity, and objects of Python code: an attribute set on them stays, and nothing reads it."""


@pytest.mark.parametrize("name", sorted(VALUES.keys() - SHARED_OBJECTS))
def test_no_shared_object_takes_attributes(name):
    value = VALUES[name]
    if type(value) is type(load):  # a wrapper, made for this task
        assert value.__globals__.keys() == {"__builtins__"}
        assert value.__globals__["__builtins__"] == {}
        return
    with pytest.raises((AttributeError, TypeError)):
        value.left_by_a_call = 1


SHARED_CLASSES = """
import base64, json
from blockx.executor.restricted import RestrictedNamespace

facade = RestrictedNamespace()._import("typing", None, None, ("Counter",))
reached = [facade.Counter, facade.Mapping, facade.Deque]
for function, argument in ((base64.b64decode, b"a"), (json.loads, "{"), (int, "x")):
    try:
        function(argument)
    except ValueError as error:
        reached.append(type(error))  # as ``__exit__`` gets it
for kind in reached:
    try:
        kind.left_by_a_call = 1
    except TypeError:
        continue
    raise SystemExit(f"{kind} can be changed")
"""


def test_classes_behind_aliases_and_of_errors_cannot_be_changed_either():
    """In a process of its own, where no other test has asked for these classes by name."""
    ended = subprocess.run(
        [sys.executable, "-c", SHARED_CLASSES], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


FLAGS = """
import re
class Zero:
    def __hash__(self): return hash(0)
    def __eq__(self, other): return True
    def __and__(self, other): return 0
    __rand__ = __and__
    def __or__(self, other): return re.I | other
    __ror__ = __or__
def _(name):
    calls = {
        "compile": lambda: re.compile("zq", Zero()), "search": lambda: re.search("zq", "", Zero()),
        "split": lambda: re.split("zq", "", flags=Zero()), "sub": lambda: re.sub("zq", "", "", 0, Zero()),
    }
    calls[name]()
"""


@pytest.mark.parametrize("name", ["compile", "search", "split", "sub"])
def test_no_pattern_is_left_for_others_under_flags_that_it_lies_about(loader, name):
    with pytest.raises(TypeError, match=f"re.{name}: flags must be an int, not Zero"):
        load(loader, FLAGS)(name)
    other = load(loader, "import re\ndef _():\n    return re.match('zq', 'ZQ')", task="t2")
    assert other() is None


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("datetime.strptime('2024-02-03', '%Y-%m-%d').day", 3),
        ("datetime(2024, 2, 3).strftime('%Y/%m')", "2024/02"),
        ("f'{date(2024, 2, 3):%d.%m.}'", "03.02."),
        ("date(2024, 2, 3).timetuple().tm_yday", 34),
        ("date.today() > date(2024, 1, 1)", True),
        ("[format(d, '%j') for d in map(date.fromordinal, (1, 2))]", ["001", "002"]),
    ],
)
def test_c_code_finds_the_modules_that_it_needs(loader, expression, expected):
    assert load(loader, f"def _():\n    return {expression}")() == expected


def test_c_code_loads_nothing_and_nobody_gets_a_module_that_way(loader):
    importer = names(loader)["__builtins__"]["__import__"]
    assert importer("time", {}, {}, []) is None
    with pytest.raises(ImportError, match="cannot import antigravity"):
        importer("antigravity", {}, {}, [])


REFUSED = {
    "import os": "cannot import os; they can import .*json",
    "from json import decoder": "cannot import decoder from json; it offers them JSONDecodeError",
    "from collections.abc import Mapping, sys": "cannot import sys",
    "from . import x": r"cannot import \.",
    "import blockx.executor": "cannot import blockx.executor",
    "from blockx import sdk": "it offers them capability, errors, function, http",
    "import blockx.sdk.provider": "cannot import",
    "from blockx_sdk import get_provider": "cannot import get_provider",
}


@pytest.mark.parametrize("statement", REFUSED)
def test_other_imports_fail_with_what_there_is(loader, statement):
    with pytest.raises(LoadFailedError) as failed:
        load(loader, f"{statement}\ndef _(): pass")
    assert isinstance(failed.value.error, ImportError)
    failed.match("ImportError")
    with pytest.raises(ImportError, match=REFUSED[statement]):
        raise failed.value.error


def test_every_form_of_import_works(loader):
    source = (
        "from __future__ import annotations\nimport json as j, collections.abc, blockx.errors\n"
        "import blockx_sdk.rpc as r\nfrom blockx import function, http, capability\n"
        "from blockx_sdk import db, rpc, sleep\nfrom math import pi as PI\n"
        "def _():\n    return [isinstance({}, collections.abc.Mapping), j.dumps(1), PI > 3, r is rpc,\n"
        "        blockx.errors.ReadError.kind is None, function is blockx.function]\n"
    )
    assert load(loader, source)()[:4] == [True, "1", True, True]


DATACLASS = """
from __future__ import annotations
from dataclasses import KW_ONLY, FrozenInstanceError, InitVar, asdict, dataclass, field, replace
import typing

@dataclass(frozen=True, order=True)
class Row:
    who: str
    extra: InitVar[int] = 4
    kinds: typing.ClassVar[list] = []
    _: KW_ONLY
    tags: list = field(default_factory=list)
    def __post_init__(self, extra):
        self.tags.append(extra)

@dataclass(slots=True)
class Plain:
    n: int = 1

def _():
    row = Row("a")
    try:
        row.who = "b"
        changed = True
    except FrozenInstanceError:
        changed = False
    return [asdict(row), changed, row < Row("b"), repr(Plain()), Plain(2) == Plain(2), hash(Row) != 0]
"""


def test_dataclasses_work_and_their_generated_methods_reach_nothing_else(loader):
    entry = load(loader, DATACLASS)
    assert entry() == [{"who": "a", "tags": [4]}, False, True, "Plain(n=1)", True, True]
    found = entry.__globals__["Row"].__setattr__.__globals__["__builtins__"]
    assert "open" not in found


def test_types_of_typing_and_collections_work(loader):
    source = (
        "from collections import Counter, namedtuple\nfrom typing import NamedTuple, TypedDict\nimport re\n"
        "class A(NamedTuple):\n    x: int\n    y: str = 'b'\nclass T(TypedDict):\n    x: int\n"
        "P = namedtuple('P', 'a b')\n"
        "def _():\n    both = Counter('ab') + Counter('b')\n"
        "    return [A(1), T(x=1), P(1, 2), isinstance(both, Counter), re.sub('A', '', 'aBa', flags=re.I)]\n"
    )
    assert load(loader, source)() == [(1, "b"), {"x": 1}, (1, 2), True, "B"]


def test_errors_are_caught_by_the_real_classes(loader):
    source = (
        "from json import JSONDecodeError\nfrom decimal import InvalidOperation\nimport re\ndef _(what):\n"
        "    try:\n        if what == 'json':\n            json.loads('{')\n"
        "        if what == 're':\n            re.compile('(')\n        Decimal('x')\n"
        "    except JSONDecodeError:\n        return 'json'\n    except InvalidOperation:\n"
        "        return 'decimal'\n    except re.error:\n        return 're'\n"
    )
    entry = load(loader, source)
    assert [entry(what) for what in ("json", "decimal", "re")] == ["json", "decimal", "re"]


def test_tracebacks_show_the_lines_of_an_audited_function(bench):
    source = "def _(n):\n    return 1 / n  # the line to show\n"
    digest = sha256(source.encode()).hexdigest()
    bench.start(source, [0], audit=audit_token(digest))
    (message,) = bench.run_to_end()
    assert "the line to show" in message.payload.error_stack


def test_an_audited_and_an_open_call_of_one_source_have_two_modules(loader):
    source = "def _():\n    return json"
    assert load(loader, source, restricted=False)() is json
    assert load(loader, source)() is not json
    assert (
        load(loader, source, restricted=False).__globals__["__builtins__"]["open"] is builtins.open
    )


def test_print_is_the_output_of_the_call(loader, capsys):
    load(loader, "def _():\n    print('seen')")()
    assert capsys.readouterr().out == "seen\n"
