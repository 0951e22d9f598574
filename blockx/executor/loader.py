"""From a digest to a callable: compile cache, one module a task, nothing kept after the task.

Runs on the executor's main thread, inside the greenlet of the call that needs the function. Two
things may switch to another call in between: ``fetch`` (the source comes from main) and the body of
the user's module (a read or a sleep at its top level). Hence the law of this file:

- A module becomes visible to other calls only when its body has run to the end. A call that arrives
  earlier runs its own copy of the body; the first copy that is complete is kept and everybody uses
  it. So no call waits for another one's load (they could wait for each other for ever), and one
  that is cancelled or out of budget half-way leaves nothing behind.
- A module belongs to one task: globals, default arguments and classes never reach another task.
- Compiled code is shared by all tasks; source that does not match its digest is refused. ≠ The
  specification caches by digest alone; here also by function id, so that two functions with the
  same text each have their own name in tracebacks.
- ``release_task`` forgets the task's modules: namespaces, ``sys.modules``, ``linecache``.
- An audited function gets the task's ``restricted`` namespace instead of the prelude and all built-ins. Audited and
  open modules of one source are two modules.

What it needs of the standard library is bound at import, before user code can replace it.
"""

import builtins
import importlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.machinery import ModuleSpec
from linecache import cache as _line_cache
from sys import modules as _sys_modules
from types import CodeType, ModuleType
from typing import Any, Final

from blockx.audit.verdict import audit_token
from blockx.errors import FunctionCodeFetchError, UsageError
from blockx.executor.restricted import RestrictedNamespace
from blockx.functions.entry import (
    PRELUDE,
    LoadError,
    compile_source,
    is_user_file,
    source_lines,
    user_file_name,
)

__all__ = ["LoadFailedError", "LoadedFunction", "Loader", "code_cache_entries", "is_user_file"]

CODE_CACHE_ENTRIES: Final = 512
"""Compiled modules kept, least recently used first out. 0: unlimited."""
CODE_CACHE_VARIABLE: Final = "BLOCKX_EXECUTOR_CODE_CACHE_MAX_ENTRIES"

USER_BUILTINS: Final = ModuleType("builtins", builtins.__doc__)
"""The builtins of user code: a copy, so that what it changes there does not reach our own code."""
USER_BUILTINS.__dict__.update(vars(builtins))

Fetch = Callable[[str, str], str]
"""(function_id, digest) -> source text; may switch greenlets. Raises FunctionCodeFetchError."""


class LoadFailedError(LoadError):
    """The module could not be made ready: it does not compile, or its body raised (``error``).

    The call ends as ``load_error``; ``capture.failure_report`` shows the user's lines.
    """

    def __init__(self, message: str, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.error = error


@dataclass(slots=True, eq=False)
class LoadedFunction:
    """A function of one task, ready to be called."""

    call: Callable[..., Any]
    """The entry; takes the call's positional arguments."""
    filename: str
    """Of its code, as in tracebacks."""
    held_long: bool = False
    """Set by the runtime once the function held the executor for long without a switch."""


@dataclass(slots=True, eq=False)
class _Compiled:
    code: CodeType
    filename: str
    source: str


@dataclass(slots=True, eq=False)
class _TaskModules:
    """What a task has in this process, so that all of it can be forgotten."""

    modules: dict[str, ModuleType] = field(default_factory=dict)
    """Name in ``sys.modules`` -> module, complete or with its body running."""
    filenames: set[str] = field(default_factory=set)
    """Whatever may have lines in ``linecache``: failed loads too, their tracebacks read it."""
    keys: list[tuple[str, str, str, bool]] = field(default_factory=list)
    restricted: RestrictedNamespace | None = None
    """For its audited functions, made for the first of them."""


class _SourceLoader:
    """The module's ``__loader__``: lets ``linecache`` and ``inspect`` find the user's lines."""

    __slots__ = ("_source",)

    def __init__(self, source: str) -> None:
        self._source = source

    def get_source(self, _name: str) -> str:
        return self._source.removeprefix("\ufeff")


def code_cache_entries(environ: Mapping[str, str]) -> int:
    """The cache size from the environment. Raises UsageError for anything but a count."""
    text = environ.get(CODE_CACHE_VARIABLE, str(CODE_CACHE_ENTRIES))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(
            f"{CODE_CACHE_VARIABLE}={text[:50]!r}: must be a count of modules; 0: unlimited"
        )
    return int(text)


class Loader:
    """Loads functions for the calls of this process. Main thread only."""

    def __init__(
        self, code_cache_entries: int = CODE_CACHE_ENTRIES, *, requires_audit: bool = False
    ) -> None:
        self._requires_audit = requires_audit
        self._code_cache_entries = code_cache_entries
        self._compiled: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()
        self._loaded: dict[tuple[str, str, str, bool], LoadedFunction] = {}
        self._tasks: dict[str, _TaskModules] = {}
        self._sequence = 0
        self._prelude = _resolve_prelude()

    def check_audit(self, function_id: str, digest: str, audit: str) -> None:
        """The audit gate: an audit that came with a call must be of this source and of our rules.

        Raises:
            LoadFailedError: it is not, or there is none in restricted mode.
        """
        if (self._requires_audit or audit) and audit != audit_token(digest):
            found = (
                f"an audit of other rules or another source ({audit[:80]!r})"
                if audit
                else "no audit"
            )
            raise LoadFailedError(
                f'LoadError: function "{function_id}" came with {found}; in restricted mode main sends one '
                "with every call, so main and its executors are of different versions"
            )

    def load(
        self,
        task_id: str,
        function_id: str,
        digest: str,
        entry: str,
        fetch: Fetch,
        verify: Callable[[], None] | None = None,
        *,
        restricted: bool = False,
    ) -> LoadedFunction:
        """The function of this task, loaded at its first call; ``restricted``: it was audited.

        Call it inside the call's greenlet and its guarded time: the first load runs user code.
        ``verify`` is called when the body has run and raises if the call was told to stop
        meanwhile, so that a body that swallowed a signal is not kept.

        Raises:
            LoadFailedError: the source does not compile, its body raised, or it has no such entry.
            FunctionCodeFetchError: the source could not be had, or is not what the digest says.
            CallSignal: from ``fetch``, from the body, or from ``verify``.
        """
        key = (task_id, function_id, digest, restricted)
        loaded = self._loaded.get(key)
        if loaded is not None:
            return loaded
        compiled = self._compile(function_id, digest, fetch)
        # ``fetch`` may have let another call of the task run, which loaded the function meanwhile.
        loaded = self._loaded.get(key)
        if loaded is not None:
            return loaded
        return self._load(key, entry, compiled, verify)

    def release_task(self, task_id: str) -> None:
        """Forget everything of a task whose last call has ended; nothing to do is fine."""
        task = self._tasks.pop(task_id, None)
        if task is None:
            return
        for key in task.keys:
            del self._loaded[key]
        for name, module in task.modules.items():
            _forget(name, module)
        for filename in task.filenames:
            if not any(filename in other.filenames for other in self._tasks.values()):
                _line_cache.pop(filename, None)

    def loaded_count(self) -> int:
        """Functions ready to be called, over all tasks."""
        return len(self._loaded)

    def _load(
        self,
        key: tuple[str, str, str, bool],
        entry: str,
        compiled: _Compiled,
        verify: Callable[[], None] | None,
    ) -> LoadedFunction:
        task_id, function_id, _digest, restricted = key
        task = self._tasks.setdefault(task_id, _TaskModules())
        namespace = task.restricted
        if restricted and namespace is None:
            namespace = task.restricted = RestrictedNamespace()
        name, module = self._new_module(function_id, compiled, namespace if restricted else None)
        task.modules[name] = module
        task.filenames.add(compiled.filename)
        try:
            call = _run_body(module, function_id, compiled.code, entry)
            if verify is not None:
                verify()
        except BaseException:
            # Its namespace is left to the garbage collector: the failure report reads it first.
            del task.modules[name]
            _sys_modules.pop(name, None)
            raise
        complete = self._loaded.get(key)
        if complete is not None:  # the body had switched, and another copy was complete first
            del task.modules[name]
            _forget(name, module)
            return complete
        task.keys.append(key)
        loaded = self._loaded[key] = LoadedFunction(call, compiled.filename)
        return loaded

    def _compile(self, function_id: str, digest: str, fetch: Fetch) -> _Compiled:
        key = (function_id, digest)
        compiled = self._compiled.get(key)
        if compiled is not None:
            self._compiled.move_to_end(key)
            return compiled
        source = fetch(function_id, digest)
        compiled = self._compiled.get(key)  # another call may have compiled it meanwhile
        if compiled is None:
            _check_digest(function_id, digest, source)
            compiled = self._compiled[key] = _compile(function_id, digest, source)
            if 0 < self._code_cache_entries < len(self._compiled):
                self._compiled.popitem(last=False)
        return compiled

    def _new_module(
        self, function_id: str, compiled: _Compiled, namespace: RestrictedNamespace | None
    ) -> tuple[str, ModuleType]:
        """A real module in ``sys.modules``: dataclasses with text annotations, pickle and
        ``typing.get_type_hints`` look the module of a class up by its name."""
        self._sequence += 1
        name = f"blockx_user_{self._sequence}_{function_id.rpartition('/')[2]}"
        module = ModuleType(name)
        _sys_modules[name] = module
        if namespace is not None:
            # No loader, whose methods have our globals: the lines for tracebacks are left here.
            lines = source_lines(compiled.source)
            _line_cache[compiled.filename] = (len(lines), None, lines, compiled.filename)
            namespace.fill(module.__dict__)
            return name, module
        loader: Any = _SourceLoader(compiled.source)
        module.__loader__ = loader
        module.__spec__ = ModuleSpec(name, loader, origin=compiled.filename)
        module.__file__ = compiled.filename
        module.__dict__.update(self._prelude)
        module.__dict__["__builtins__"] = USER_BUILTINS.__dict__
        return name, module


def _resolve_prelude() -> dict[str, Any]:
    """The prelude's objects; once a process, before any user code runs."""
    namespace: dict[str, Any] = {}
    for name, (module_name, attribute) in PRELUDE.items():
        module = importlib.import_module(module_name)
        namespace[name] = getattr(module, attribute) if attribute else module
    return namespace


def _check_digest(function_id: str, digest: str, source: str) -> None:
    try:
        found = sha256(source.encode()).hexdigest()
    except UnicodeEncodeError:
        found = "no UTF-8 text"
    if found != digest:
        raise FunctionCodeFetchError(
            f'the source fetched for function "{function_id}" is not the pinned one: '
            f"SHA-256 {found}, expected {digest}"
        )


def _compile(function_id: str, digest: str, source: str) -> _Compiled:
    filename = user_file_name(function_id, digest)
    try:
        code = compile_source(function_id, source, filename)
    except LoadError as error:
        raise LoadFailedError(str(error)) from None
    return _Compiled(code, filename, source)


def _run_body(
    module: ModuleType, function_id: str, code: CodeType, entry: str
) -> Callable[..., Any]:
    """Run the module's top level and pick its entry. Signals pass through unchanged."""
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        name = type(error).__name__
        raise LoadFailedError(
            f'{name} while the module of function "{function_id}" was loaded', error
        ) from error
    call: Callable[..., Any] | None = module.__dict__.get(entry)
    if not callable(call):
        found = "nothing" if call is None else f"an object of type {type(call).__name__}"
        raise LoadFailedError(
            f'LoadError: after the module of function "{function_id}" had run, '
            f"`{entry}` was {found}; its entry must stay a function"
        )
    return call


def _forget(name: str, module: ModuleType) -> None:
    """Remove a module and empty its namespace: its functions hold each other in cycles through it,
    and what they hold must go now and not when the garbage collector comes by."""
    _sys_modules.pop(name, None)
    module.__dict__.clear()
