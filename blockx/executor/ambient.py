"""Settings of the whole process that a call may change and no other call may find changed.

Main thread. The law: between two steps the process is as it was. ``restore`` runs after each step, so what
a call changes lasts until it next waits or ends: the environment, the working folder, the umask, signal
handlers and mask, the interpreter's limits, garbage collection, warning filters, and the attributes of
the modules that everybody uses (``SHARED_MODULES``).

``builtins`` is a special case: our own code, and the libraries', looks names up in it all the time, also
while the call that changed it runs. So user code has a copy (``loader.USER_BUILTINS``), which ``import
builtins`` finds, and what it does to it does not reach ours for a moment.

Comparing all of it after each step would cost 4 us, and module attributes 8 us more. So the ways to change
it take a note: the modules and ``os.environ`` get classes that note assignments, the setting functions
(``NOTED``) are wrapped, and ``restore`` (0.6 us) looks closer only after a note, or when another object has
the place of ``os.environ`` or of a shared module in ``sys.modules``. Once a turn, every millisecond, ``restore_fully``
compares all the same, for changes by other ways (C code, ``posix.chdir``); only what is written into a
module's ``__dict__`` directly goes unnoticed.

Left to others: output streams (``capture``), the alarm and ``time.sleep`` (``interrupts``), the context of
``decimal`` and the numbers of ``random`` (``own_state``). Left alone, they last as long as the process: locale,
resource limits, priorities, and whatever is changed inside an object (a class's attribute, ``sys.path``).
"""

import _signal  # type: ignore[import-not-found]
import builtins
import gc
import importlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import wraps
from operator import itemgetter
from types import ModuleType
from typing import Any, Final

from blockx.executor.loader import USER_BUILTINS
from blockx.executor.own_state import OwnState
from blockx.functions.entry import PRELUDE

SHARED_MODULES: Final = (
    "json", "time", "datetime", "decimal", "math", "random", "re",
    *dict.fromkeys(module for module, _ in PRELUDE.values() if module.startswith("blockx.")),
)  # fmt: skip
"""Modules whose attributes are put back: the ones that have been found patched in the wild, and those that
functions have without an import."""
_HANDLED_SIGNALS: Final = tuple(
    int(number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGVTALRM, signal.SIGPROF)
)
"""Signals whose handler is put back."""

NOTED: Final = (
    (sys, "setrecursionlimit"), (sys, "set_int_max_str_digits"), (sys, "setswitchinterval"),
    (gc, "disable"), (gc, "set_threshold"), (os, "chdir"), (os, "fchdir"), (os, "umask"),
    (signal, "signal"), (signal, "pthread_sigmask"), (signal, "setitimer"), (signal, "alarm"),
    (signal, "siginterrupt"),
)  # fmt: skip
"""Functions that change something here: module and name."""

_get_recursion_limit, _set_recursion_limit = sys.getrecursionlimit, sys.setrecursionlimit
_get_digits, _set_digits = sys.get_int_max_str_digits, sys.set_int_max_str_digits
_get_switch_interval, _set_switch_interval = sys.getswitchinterval, sys.setswitchinterval
_get_trace, _set_trace = sys.gettrace, sys.settrace
_get_profile, _set_profile = sys.getprofile, sys.setprofile
_is_gc_enabled, _enable_gc = gc.isenabled, gc.enable
_gc_callbacks = gc.callbacks
_get_threshold, _set_threshold = gc.get_threshold, gc.set_threshold
_getsignal, _setsignal = _signal.getsignal, _signal.signal
_sigmask = _signal.pthread_sigmask
_getcwd, _chdir, _umask = os.getcwd, os.chdir, os.umask
_putenv, _unsetenv, _tzset = os.putenv, os.unsetenv, time.tzset
for _name in SHARED_MODULES:
    importlib.import_module(_name)
_environ = os.environ
_environ_data: dict[bytes, bytes] = vars(os.environ)["_data"]
_os_names = vars(os)
_modules = sys.modules
_warning_names = vars(warnings)
_filters_mutated: Any = _warning_names["_filters_mutated"]


class _Notes:
    """What user code has touched since it was last put back."""

    settings = False
    """Anything at all."""
    modules = False
    environment = False


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, taking a note."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        _Notes.settings = True
        return function(*arguments, **named)

    return call


class _SharedModule(ModuleType):
    """A module that notes when one of its attributes is set or deleted."""

    def __setattr__(self, name: str, value: object) -> None:
        _Notes.settings = _Notes.modules = True
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        _Notes.settings = _Notes.modules = True
        super().__delattr__(name)


class _Environment(os._Environ[str]):
    """``os.environ``, noting that it was changed; all ways to change it end in these two."""

    def __setitem__(self, name: str, value: str) -> None:
        _Notes.settings = _Notes.environment = True
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        _Notes.settings = _Notes.environment = True
        super().__delitem__(name)


class Ambient:
    """Remembers the settings at its construction; ``restore`` puts them back."""

    __slots__ = (
        "_cwd", "_digits", "_environment", "_filter_list", "_filters", "_functions", "_gc_callbacks", "_handlers",
        "_mask", "_named", "_own_state", "_profile", "_recursion_limit", "_saved", "_shared", "_start_modules",
        "_switch_interval", "_threshold", "_trace", "_umask",
    )  # fmt: skip

    def __init__(self) -> None:
        self._recursion_limit = _get_recursion_limit()
        self._digits = _get_digits()
        self._switch_interval = _get_switch_interval()
        self._trace = _get_trace()
        self._profile = _get_profile()
        self._threshold = _get_threshold()
        self._cwd = _getcwd()
        self._umask = _umask(0)
        _umask(self._umask)
        self._environment = dict(_environ_data)
        self._handlers = list(map(_getsignal, _HANDLED_SIGNALS))
        self._mask = _sigmask(signal.SIG_BLOCK, ()) - {signal.SIGALRM}
        self._filter_list: list[Any] = _warning_names["filters"]
        self._filters = list(self._filter_list)
        self._gc_callbacks = list(_gc_callbacks)
        self._own_state = OwnState()
        _modules["builtins"] = USER_BUILTINS
        self._start_modules = dict(_modules)
        self._named = itemgetter("builtins", *SHARED_MODULES)
        self._shared: tuple[ModuleType, ...] = self._named(_modules)
        self._saved = [dict(vars(module)) for module in self._shared]
        for module in self._shared:
            module.__class__ = _SharedModule
        _environ.__class__ = _Environment
        self._functions = [(owner, name, getattr(owner, name)) for owner, name in NOTED]
        for owner, name, function in self._functions:
            setattr(owner, name, _noted(function))
        os.supports_fd.add(os.chdir)
        _Notes.settings = _Notes.modules = _Notes.environment = False

    def restore(self) -> bool:
        """Put back what the last step changed; whether it may have changed anything."""
        try:
            if (
                _Notes.settings
                or _get_trace() is not self._trace
                or _get_profile() is not self._profile
                or _warning_names["filters"] is not self._filter_list  # within ``catch_warnings``
                or self._filter_list != self._filters
                or _os_names["environ"] is not _environ
                or self._named(_modules) != self._shared
            ):
                self.restore_fully()
                return True
        except KeyError:  # one of the names is gone
            self.restore_fully()
            return True
        return False

    def restore_fully(self) -> None:
        """Compare everything. May run ``__eq__`` of what a call left as a handler or filter."""
        _Notes.settings = False
        self._restore_interpreter()
        if _Notes.environment or _os_names.get("environ") is not _environ:
            self._restore_environment()
        _umask(self._umask)
        self._restore_folder()
        _sigmask(signal.SIG_SETMASK, self._mask)
        if list(map(_getsignal, _HANDLED_SIGNALS)) != self._handlers:
            for number, handler in zip(_HANDLED_SIGNALS, self._handlers, strict=True):
                _setsignal(number, handler)
        if _warning_names.get("filters") is not self._filter_list:
            _warning_names["filters"] = self._filter_list
            _filters_mutated()
        if self._filter_list != self._filters:
            self._filter_list[:] = self._filters
            _filters_mutated()
        try:
            replaced = self._named(_modules) != self._shared
        except KeyError:
            replaced = True
        if replaced:
            self._restore_module_table()
        if _Notes.modules:
            self._restore_attributes()
        _Notes.settings = False

    def close(self) -> None:
        """Give the modules back (tests; a process simply ends)."""
        _modules["builtins"] = builtins
        for module in self._shared:
            module.__class__ = ModuleType
        _environ.__class__ = os._Environ
        self._own_state.close()
        os.supports_fd.discard(os.chdir)
        for owner, name, function in self._functions:
            setattr(owner, name, function)

    def _restore_interpreter(self) -> None:
        if _get_recursion_limit() != self._recursion_limit:
            _set_recursion_limit(self._recursion_limit)
        if _get_digits() != self._digits:
            _set_digits(self._digits)
        if _get_switch_interval() != self._switch_interval:
            _set_switch_interval(self._switch_interval)
        if _get_trace() is not self._trace:
            _set_trace(self._trace)
        if _get_profile() is not self._profile:
            _set_profile(self._profile)
        if not _is_gc_enabled():
            _enable_gc()
        if _gc_callbacks != self._gc_callbacks:
            _gc_callbacks[:] = self._gc_callbacks
        if _get_threshold() != self._threshold:
            _set_threshold(*self._threshold)

    def _restore_environment(self) -> None:
        _os_names["environ"] = _environ
        for name in _environ_data.keys() - self._environment.keys():
            _unsetenv(name)
        for name, value in self._environment.items():
            if _environ_data.get(name) != value:
                _putenv(name, value)
        had_zone = _environ_data.get(b"TZ")
        _environ_data.clear()
        _environ_data.update(self._environment)
        _Notes.environment = False
        if had_zone != self._environment.get(b"TZ"):
            _tzset()

    def _restore_folder(self) -> None:
        try:
            if _getcwd() == self._cwd:
                return
        except OSError:  # it was removed
            pass
        _chdir(self._cwd)

    def _restore_module_table(self) -> None:
        """Modules of the start that are missing, and shared ones that are others by now."""
        for name, module in self._start_modules.items():
            _modules.setdefault(name, module)
        _modules["builtins"] = USER_BUILTINS
        for name in SHARED_MODULES:
            _modules[name] = self._start_modules[name]

    def _restore_attributes(self) -> None:
        for module, saved in zip(self._shared, self._saved, strict=True):
            if type(module) is not _SharedModule:
                module.__class__ = _SharedModule
            names = vars(module)
            for name in [name for name in names if name not in saved]:
                if issubclass(type(names[name]), ModuleType):
                    saved[name] = names[name]  # a part of a package, imported now
                else:
                    del names[name]
            for name, value in saved.items():
                if name not in names or names[name] is not value:
                    names[name] = value
        _Notes.modules = False
