"""What an audited module finds around it: built-ins of its own, and facades where others find modules.

Executor, main thread. One ``RestrictedNamespace`` a task; the loader fills the module of each audited function from it.
What it holds is data of the audit (``audit.tables``): what the audit accepts is what is here, by the same table.

- ``__builtins__`` is a dictionary of the task: ``SAFE_BUILTINS``, and what import and class statements need.
- An import yields a *facade*: a slot object that holds the listed names of one module and takes no others. Never
  the module itself, whose other attributes lead everywhere (``json.codecs.builtins``).
- A function in a facade is a wrapper, made for this task, whose globals are empty.
- A class is handed out as it is, since results and ``except`` go by identity, but first made *immutable*: an attribute
  stored through a parameter (``def f(c): c.x = …`` with ``f(Counter)``) is nothing the audit can see, and would
  reach every other task of the process. So is the class behind an alias of ``typing``, which passes stores on, and
  every exception class, since ``__exit__`` is given the class of whatever is raised.
- C code imports what it needs by the ``__import__`` of its caller: ``strptime`` asks us for ``_strptime``. It takes the
  module from ``sys.modules`` afterwards, so we let it look there and hand out nothing.

This is hygiene between tasks of one process, not a boundary: attributes with underscores lead out of every facade, and
only the audit stands before them. The boundary is the sandbox of the process.

Tried and left: a subclass of each class for each task (``json.loads`` raises the real ``JSONDecodeError``, and
``Counter() + Counter()`` is a real ``Counter``); comparing all classes at the end of a task (another task may run
before that); modules with fewer attributes (``from json import decoder`` finds ``json.decoder`` in ``sys.modules``
by the module's name).
"""

import _strptime  # type: ignore[import-not-found]  # noqa: F401 - loaded for ``datetime.strptime``
import builtins
import ctypes
import dataclasses
import functools
import importlib
import time  # noqa: F401 - loaded for ``datetime.strftime``
from collections.abc import Callable, Mapping, Sequence
from sys import modules as _sys_modules
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NoReturn

from blockx.audit.tables import ALLOWED_IMPORTS, SAFE_BUILTINS
from blockx.functions.entry import PRELUDE

_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType, MethodType)
_IMMUTABLE_TYPE: Final = 1 << 8
"""``Py_TPFLAGS_IMMUTABLETYPE``: the interpreter itself then refuses to set an attribute of the class."""
_FLAGS_OFFSET: Final = 21 * ctypes.sizeof(ctypes.c_void_p)
"""Of ``tp_flags`` in ``PyTypeObject``: the same from Python 3.8 to 3.14, and compared before it is written."""
_GENERATED_CODE_NEEDS: Final = {"type": type, "super": super, "object": object}
"""What the methods that ``dataclass`` writes look up in their built-ins, beside the safe ones."""
_FLAGS_PLACE: Final = {
    **dict.fromkeys(("findall", "finditer", "fullmatch", "match", "search"), 2),
    "compile": 1,
    "split": 3,
    "sub": 4,
    "subn": 4,
}
"""Functions of ``re`` that compile, and the place of their argument ``flags``."""


class _Facade:
    """Base of the facades; each module has a subclass whose slots are the names it offers."""

    __slots__ = ()

    def __setattr__(self, name: str, _value: object) -> NoReturn:
        raise AttributeError(f"{self!r}: its attributes cannot be set ({name!r})")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self!r}: its attributes cannot be deleted ({name!r})")

    def __repr__(self) -> str:
        return f"<audited module {type(self).__name__!r}>"


class RestrictedNamespace:
    """The names of the audited modules of one task."""

    __slots__ = ("_builtins", "_facades", "_prelude")

    def __init__(self) -> None:
        _seal_exceptions()
        self._facades: dict[str, _Facade] = {}
        self._builtins: dict[str, Any] = {name: getattr(builtins, name) for name in SAFE_BUILTINS}
        self._builtins["__build_class__"] = builtins.__build_class__
        self._builtins["__import__"] = _wrapper(self._import, "__import__")
        self._prelude = {name: self._of_prelude(*place) for name, place in PRELUDE.items()}

    def fill(self, names: dict[str, Any]) -> None:
        """Put everything into the globals of a new module."""
        names.update(self._prelude)
        names["__builtins__"] = self._builtins

    def _import(
        self,
        name: str,
        _globals: object = None,
        _locals: object = None,
        wanted: Sequence[str] | None = None,
        level: int = 0,
    ) -> _Facade | None:
        """What an import statement calls. Raises ImportError, with what could be imported instead."""
        if type(wanted) is list and name in _sys_modules:
            return None  # C code (a statement gives a tuple or None): see the module's law
        offered = {} if level else _offered(name)
        if not offered:
            raise ImportError(
                f"audited functions cannot import {'.' * level}{name}; "
                f"they can import {', '.join(sorted(ALLOWED_IMPORTS))}"
            )
        for one in wanted or ():
            if one not in offered:
                raise ImportError(
                    f"audited functions cannot import {one} from {name}; "
                    f"it offers them {', '.join(sorted(offered))}"
                )
        return self._facade(name if wanted else name.partition(".")[0])

    def _facade(self, module_name: str) -> _Facade:
        facade = self._facades.get(module_name)
        if facade is None:
            names = _offered(module_name)
            kind = type(module_name, (_Facade,), {"__slots__": tuple(names)})
            facade = self._facades[module_name] = kind()
            for name in names:
                vars(kind)[name].__set__(facade, self._value(module_name, name))
        return facade

    def _of_prelude(self, module_name: str, attribute: str) -> object:
        if not attribute:
            return self._facade(module_name)
        return self._shown(getattr(_real_module(module_name), attribute))

    def _value(self, module_name: str, name: str) -> object:
        if f"{module_name}.{name}" in ALLOWED_IMPORTS:
            return self._facade(f"{module_name}.{name}")
        if module_name == "__future__":
            return None  # the compiler has read it; nothing uses the value
        if module_name == "re" and name in _FLAGS_PLACE:
            return _wrapper(_with_plain_flags(name), name)
        return self._shown(getattr(_real_module(module_name), name))

    def _shown(self, value: Any) -> object:
        """What a task gets for a value of a real module."""
        if value is dataclasses.dataclass:
            return _wrapper(self._dataclass, "dataclass")
        if isinstance(value, _FUNCTIONS):
            return _wrapper(value, value.__name__)
        aliased = getattr(value, "__origin__", None)  # of ``typing.Counter``
        if isinstance(aliased, type):
            _make_immutable(aliased)
        if isinstance(value, type):
            _make_immutable(value)
        elif isinstance(value, int) and type(value) is not bool:
            return int(value)  # flags of `re` are objects of an Enum, whose attributes could be set
        return value

    def _dataclass(self, kind: type | None = None, /, **options: Any) -> Any:
        """``dataclass``, whose generated methods find built-ins that audited source does not have.

        They look them up in the class's module, and get a stand-in for it; the class itself stays as it is. The
        stand-in has the real modules too, by whose identity annotations such as ``typing.ClassVar`` are known.
        """
        if kind is None:
            return _wrapper(lambda made: self._dataclass(made, **options), "dataclass")
        name = kind.__module__
        module = _sys_modules[name]
        stand_in = ModuleType(name)
        for global_name, value in vars(module).items():
            is_facade = issubclass(type(value), _Facade)
            real = _real_module(type(value).__name__) if is_facade else value
            vars(stand_in)[global_name] = real
        vars(stand_in)["__builtins__"] = {**self._builtins, **_GENERATED_CODE_NEEDS}
        _sys_modules[name] = stand_in
        try:
            return dataclasses.dataclass(kind, **options)
        finally:
            _sys_modules[name] = module


def _offered(module_name: str) -> Mapping[str, str]:
    """Names of a module for audited code, its listed submodules among them; empty: none."""
    listed = ALLOWED_IMPORTS.get(module_name, {})
    beginning = f"{module_name}."
    inner = [key.removeprefix(beginning) for key in ALLOWED_IMPORTS if key.startswith(beginning)]
    return {**listed, **dict.fromkeys(inner, "")}


def _real_module(name: str) -> ModuleType:
    """A module by the name that users know: ``blockx_sdk.db`` is an attribute, ``collections.abc`` a file."""
    parent, _, last = name.rpartition(".")
    inner = getattr(importlib.import_module(parent), last, None) if parent else None
    return inner if isinstance(inner, ModuleType) else importlib.import_module(name)


def _with_plain_flags(name: str) -> Callable[..., Any]:
    """A function of ``re`` that takes no flags but an int.

    It keeps what it compiled for all tasks, by the equality of pattern and flags: an object that says that it equals 0
    would leave its own pattern for everybody.
    """
    function = getattr(_real_module("re"), name)
    place = _FLAGS_PLACE[name]

    def call(*args: Any, **named: Any) -> Any:
        flags = named.get("flags", args[place] if len(args) > place else 0)
        if type(flags) is not int:
            raise TypeError(f"re.{name}: flags must be an int, not {type(flags).__name__}")
        return function(*args, **named)

    return call


def _wrapper(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that calls another one, with empty globals and attributes of its own."""

    def call(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    wrapper = FunctionType(call.__code__, {"__builtins__": {}}, name, None, call.__closure__)
    wrapper.__qualname__ = name
    # `class Row(NamedTuple)`: typing's function stands among the bases and says what the real ones are.
    bases: Callable[[tuple[object, ...]], tuple[type, ...]] | None
    bases = getattr(function, "__mro_entries__", None)
    if bases is not None:
        real_bases = bases((function,))
        vars(wrapper)["__mro_entries__"] = lambda _bases: real_bases
    return wrapper


@functools.cache
def _seal_exceptions() -> None:
    """Make every exception class of the host immutable; once a process, before it runs audited code."""
    for name in ALLOWED_IMPORTS:
        _real_module(name)
    pending: list[type] = [BaseException]
    while pending:
        kind = pending.pop()
        _make_immutable(kind)
        pending += type.__subclasses__(kind)


def _make_immutable(kind: type) -> None:
    """Have the interpreter refuse changes of a class from now on, as it does for built-in ones."""
    if kind.__flags__ & _IMMUTABLE_TYPE:
        return
    flags = ctypes.c_ulong.from_address(id(kind) + _FLAGS_OFFSET)
    assert flags.value == kind.__flags__, "this Python keeps the flags of a class somewhere else"
    flags.value |= _IMMUTABLE_TYPE
