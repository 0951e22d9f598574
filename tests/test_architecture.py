"""The shape of the program: who may import whom, what stays pure, where state is written.

Every module is parsed, never run. The table below is the one of ``blockx/__init__.py``, as data.
"""

import ast
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockx.dispatcher.commands import Command
from blockx.dispatcher.events import Event

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "blockx").rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(), path) for name, path in MODULES.items()}

COMMON = {"errors", "config", "observability", "redact"}
RECORDS = {"dispatcher.model", "dispatcher.events", "dispatcher.commands"}
LAYERS: dict[str, set[str]] = {
    "": {"sdk"},  # the package itself: blockx.capability
    "errors": set(),
    "strict_yaml": {"errors"},
    "redact": set(),
    "config": {"errors", "strict_yaml", "redact"},
    "observability": {"errors", "config"},
    "ipc": {"errors"},
    "sdk": {"errors"},
    "functions": {"errors"},
    "audit": {"errors", "ipc", "functions"},
    "function": {"errors", "sdk"},
    "http": {"errors", "sdk", "ipc"},
    "dispatcher": {"errors", "config"},
    "supervisor": COMMON | {"ipc"},
    "backends": COMMON | {"ipc"},
    "executor": {"errors", "config", "ipc", "sdk", "function", "functions", "http", "audit"},
    "transport": COMMON | RECORDS | {"ipc"},
    "jobs": COMMON | RECORDS | {"ipc", "functions"},
    "actor": COMMON | {"dispatcher", "ipc", "functions"},
    "progress": COMMON | {"jobs"},
}
"""Package or module -> what it may import from blockx besides itself."""
ANYTHING = {"cli", "cli_cache", "cli_call", "cli_table", "app", "local", "__main__"}
BOTH_PROCESS_KINDS = {"app", "local"}
"""Only these see the executor and main's packages at once."""

MAIN_ONLY = {"aiohttp", "grpc", "loguru", "numpy", "rich", "uvloop"}
"""Libraries that must not be loaded in an executor: they cost it memory and start-up time."""
IN_EXECUTORS = {"audit", "dispatcher", "executor", "function", "functions", "http", "ipc", "sdk"}

DISPATCHER_LIBRARIES = {
    "collections", "dataclasses", "enum", "heapq", "itertools", "math", "msgspec", "random", "typing",
}  # fmt: skip
"""No clock, thread, socket or log. ``random`` for the type: a seeded generator is handed in; ``msgspec`` for
its structs alone."""
IPC_LIBRARIES = {
    "collections", "dataclasses", "datetime", "decimal", "enum", "functools", "gc", "itertools", "math",
    "msgspec", "operator", "orjson", "re", "struct", "types", "typing", "uuid",
}  # fmt: skip
HEARTBEAT_LIBRARIES = IPC_LIBRARIES | {
    "array", "ctypes", "fcntl", "mmap", "numpy", "os", "threading", "time",
}  # fmt: skip
"""The table is shared memory, not a socket: its two modules map it, seal it and read the clock."""

STATE_WRITERS = {
    "blockx.dispatcher.transitions",
    "blockx.supervisor.slots",
    "blockx.executor.context",
}
SWITCHERS = {"blockx.executor.runtime", "blockx.executor.bridge", "blockx.executor.lane"}


def imports_of(module: str) -> Iterator[str]:
    """Full names of everything a module imports, inside functions too."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


def part_of(module: str) -> str:
    """``blockx.ipc.frames`` -> ``ipc``: the row of the table that a module belongs to."""
    return module.split(".")[1] if "." in module else ""


def is_allowed(module: str, imported: str) -> bool:
    part, inner = part_of(module), imported.removeprefix("blockx.")
    if inner == "blockx" or part in ANYTHING or part_of(imported) == part:
        return True
    return inner in LAYERS[part] or part_of(imported) in LAYERS[part]


def lines_with(kind: type[ast.AST], module: str) -> Iterator[typing.Any]:
    return (node for node in ast.walk(TREES[module]) if isinstance(node, kind))


def test_every_part_of_the_package_is_in_the_layer_table():
    assert {part_of(module) for module in MODULES} - LAYERS.keys() - ANYTHING == set()


@pytest.mark.parametrize("module", list(MODULES))
def test_imports_go_down_the_layers_only(module: str):
    ours = {name for name in imports_of(module) if name.split(".")[0] == "blockx"}
    assert [name for name in sorted(ours) if not is_allowed(module, name)] == []


def test_only_the_assembly_sees_executor_and_main_together():
    seeing = {part_of(m) for m in MODULES for name in imports_of(m) if part_of(name) == "executor"}
    assert seeing - BOTH_PROCESS_KINDS <= {"executor"}


def test_only_the_orchestrator_imports_the_core():
    users = {m for m in MODULES if "blockx.dispatcher.core" in set(imports_of(m))}
    outside = {module for module in users if part_of(module) != "dispatcher"}
    assert outside <= {"blockx.actor.orchestrator", "blockx.app", "blockx.local"}


@pytest.mark.parametrize("module", list(MODULES))
def test_executors_load_no_library_of_main(module: str):
    if part_of(module) in IN_EXECUTORS and module != "blockx.ipc.heartbeat_table":
        assert MAIN_ONLY & {name.split(".")[0] for name in imports_of(module)} == set()


@pytest.mark.parametrize("module", list(MODULES))
def test_the_core_and_the_protocol_are_pure(module: str):
    libraries = {name.split(".")[0] for name in imports_of(module)} - {"blockx", "__future__"}
    if part_of(module) == "dispatcher":
        assert libraries - DISPATCHER_LIBRARIES == set()
    elif module.startswith("blockx.ipc.heartbeat"):
        assert libraries - HEARTBEAT_LIBRARIES == set()
    elif part_of(module) == "ipc":
        assert libraries - IPC_LIBRARIES == set()


def test_one_module_owns_the_json_of_user_data():
    users = {module for module in MODULES if "orjson" in set(imports_of(module))}
    # The preload list only has it loaded before the forkserver forks; it calls nothing of it.
    assert users - {"blockx.executor.preload"} == {"blockx.ipc.exact_json"}


def state_writes(tree: ast.AST) -> Iterator[int]:
    """Lines that assign to an attribute named ``state``."""
    for node in ast.walk(tree):
        is_state = isinstance(node, ast.Attribute) and node.attr == "state"
        if is_state and not isinstance(node.ctx, ast.Load):
            yield node.lineno


@pytest.mark.parametrize("module", list(MODULES))
def test_state_is_written_by_its_owner_only(module: str):
    built = {
        line
        for method in lines_with(ast.FunctionDef, module)
        if method.name == "__init__"  # the first value of a field of one's own is no transition
        for line in state_writes(method)
    }
    assert module in STATE_WRITERS or set(state_writes(TREES[module])) - built == set()


@pytest.mark.parametrize("module", list(MODULES))
def test_greenlets_are_switched_by_their_owners_only(module: str):
    calls = [call for call in lines_with(ast.Call, module) if isinstance(call.func, ast.Attribute)]
    switches = [call.lineno for call in calls if call.func.attr in ("switch", "throw")]
    assert module in SWITCHERS or switches == []


@pytest.mark.parametrize("module", list(MODULES))
def test_nothing_is_printed_past_the_log_and_the_command_line(module: str):
    calls = [call for call in lines_with(ast.Call, module) if isinstance(call.func, ast.Name)]
    assert [call.lineno for call in calls if call.func.id == "print"] == []


@pytest.mark.parametrize("module", list(MODULES))
def test_every_module_opens_with_its_law(module: str):
    assert ast.get_docstring(TREES[module]), f"{MODULES[module]} has no docstring"


def tables_of(module: str) -> list[set[str]]:
    """The keys of each dict in a module whose keys are names, such as a table of handlers."""
    tables = []
    for node in lines_with(ast.Dict, module):
        keys = [ast.unparse(key).split(".")[-1] for key in node.keys if key is not None]
        tables.append(set(keys))
    return tables


def test_every_event_has_a_handler():
    assert {event.__name__ for event in typing.get_args(Event)} in tables_of(
        "blockx.dispatcher.core"
    )


def test_every_command_has_an_effect():
    names = {command.__name__ for command in typing.get_args(Command)}
    assert names in tables_of("blockx.actor.effects")


def test_blockx_is_the_package_and_not_the_launcher_beside_it():
    assert "blockx.py" in {path.name for path in ROOT.iterdir()}
    script = "import blockx; print(blockx.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(ROOT / "blockx" / "__init__.py")
