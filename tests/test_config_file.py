"""``config.yaml`` is the reference, too: it shows every key with its default and a comment."""

import ast
import re
import typing
from pathlib import Path

import msgspec
import pytest
import yaml

from blockx import config as config_module
from blockx.config import (
    AdmissionConfig,
    Config,
    DispatcherConfig,
    FunctionsConfig,
    JobConfig,
    LogConfig,
    RpcBackendConfig,
    RpcUrlConfig,
    RunConfig,
    StreamBuildConfig,
    TableConfig,
    WorkerConfig,
    load_config,
)

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "config.yaml").read_text()
KEY_LINE = re.compile(r"^ *(?:- )?([a-z_]+): *(.*)$")


def complete_text() -> str:
    """The file with its switched-off keys switched on."""
    shown = re.sub(r'(?m)^( *)# ( *(?:[a-z_]+|"[^"]+"):.*)$', r"\1\2", TEXT)
    return re.sub(r"(?m)^( *)(rpc|tables|per_url|capabilities): \{\}", r"\1\2:", shown)


@pytest.fixture(scope="module")
def tree() -> dict[str, typing.Any]:
    return yaml.safe_load(complete_text())


def struct_in(annotation: object) -> type[msgspec.Struct] | None:
    """The section that a field holds, directly or as the values of a list or mapping."""
    arguments = typing.get_args(annotation)
    inner = arguments[-1] if typing.get_origin(annotation) in (dict, list) else annotation
    return inner if isinstance(inner, type) and issubclass(inner, msgspec.Struct) else None


def missing_and_unknown(struct: type[msgspec.Struct], node: dict, path: str) -> list[str]:
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    problems = [f"{path}{name}" for name in fields.keys() ^ node.keys()]
    for name in fields.keys() & node.keys():
        section = struct_in(fields[name])
        if section is None:
            continue
        many = typing.get_origin(fields[name]) in (dict, list)
        value = node[name]
        inner = list(value.values() if isinstance(value, dict) else value) if many else [value]
        if not inner:
            problems.append(f"{path}{name}: no example")
        for child in inner:
            problems += missing_and_unknown(section, child, f"{path}{name}.")
    return problems


def test_every_key_of_the_structs_is_shown_and_no_other(tree):
    assert missing_and_unknown(Config, tree, "") == []


def test_what_the_main_job_does_not_need_has_its_default(tree):
    shown = msgspec.convert(tree, Config)
    assert shown.worker == WorkerConfig(executor_count=2)
    assert shown.dispatcher == DispatcherConfig()
    assert shown.admission == AdmissionConfig()
    assert shown.stream_build == StreamBuildConfig()
    assert shown.functions == FunctionsConfig()
    assert shown.run == RunConfig()
    assert shown.log == LogConfig()
    url = "http://127.0.0.1:8545"
    assert shown.backends.rpc == {
        "dev": RpcBackendConfig(urls=[url], per_url={url: RpcUrlConfig()})
    }
    assert shown.backends.blockdb.tables == {"balances": TableConfig(key=["token", "holder"])}
    job = shown.jobs[0]
    assert job == JobConfig(
        name=job.name,
        function=job.function,
        calls=job.calls,
        results=job.results,
        output=job.output,
        failures=job.failures,
        call_deadline_ms=5_000,
        after=[],
    )


def test_every_key_with_a_value_has_a_comment():
    lines = [line for line in complete_text().splitlines() if KEY_LINE.match(line)]
    values = [line for line in lines if KEY_LINE.match(line)[2].split("#")[0].strip()]
    assert len(values) > 50
    assert [line for line in values if " # " not in line] == []


def variables_in_the_structs() -> dict[str, str]:
    """Key -> environment variable, as the docstrings below the fields say."""
    found = {}
    for node in ast.parse(Path(config_module.__file__).read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                variable = re.search(r"Environment:\s+([A-Z_]+)", ast.literal_eval(text.value))
                if variable:
                    found[ast.unparse(field.target)] = variable[1]
    return found


def test_every_environment_variable_is_named_at_its_key():
    wanted = variables_in_the_structs()
    assert len(wanted) >= 11
    lines = {KEY_LINE.match(line)[1]: line for line in TEXT.splitlines() if KEY_LINE.match(line)}
    assert [key for key, name in wanted.items() if not lines[key].endswith(f"; {name}")] == []


def test_the_file_loads_as_it_is_and_its_inputs_exist():
    loaded = load_config(ROOT / "config.yaml", {})
    job = loaded.config.jobs[0]
    inputs = [job.calls, f"functions/{job.function}.py", loaded.config.functions.path]
    inputs += loaded.config.backends.blockdb.memory.values()
    assert [path for path in inputs if not loaded.resolve(path).exists()] == []
