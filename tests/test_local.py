"""The provider outside an executor: the same code in a script, on the configured backends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from blockx import function, local
from blockx.config import load_config
from blockx.errors import (
    ReadError,
    SubcallFailedError,
    UsageError,
)
from blockx.sdk.provider import reset_provider, set_provider

ROOT = Path(__file__).parents[1]
FUNCTIONS = {
    "double": "def _(n):\n    return 2 * n\n",
    "sum_of": "def _(a, b):\n    return function.call('double', a) + function.call('double', b)\n",
    "fails": "def _(n):\n    raise ValueError('no ' + str(n))\n",
    "again": "def _(n):\n    return function.call('again', n)\n",
    "deeper": "def _(n):\n    return function.call('deeper', n + 1)\n",
    "broken": "def _(:\n",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "functions").mkdir()
    for name, source in FUNCTIONS.items():
        (tmp_path / "functions" / f"{name}.py").write_text(source)
    (tmp_path / "config.yaml").write_text("backends: {blockdb: {path: store.sqlite}}\n")
    return tmp_path


@pytest.fixture
def provider(folder):
    provider = local.LocalProvider(load_config(folder / "config.yaml", {}))
    token = set_provider(provider)
    yield provider
    reset_provider(token)
    provider.close()


@pytest.mark.usefixtures("provider")
def test_a_row_that_was_written_is_read_back_exactly():
    import blockdb

    table = blockdb.Table("t", key=["k"])
    table.upsert_rows([{"k": 1, "v": 2**256 - 1}])
    assert table.get_row({"k": 1}) == {"k": 1, "v": 2**256 - 1}


@pytest.mark.usefixtures("provider")
def test_a_read_that_fails_raises_what_it_raises_in_an_executor():
    from blockx_sdk import rpc

    with pytest.raises(ReadError, match="rpc"):
        rpc.call("eth_blockNumber")


@pytest.mark.usefixtures("provider")
def test_functions_of_the_folder_call_each_other():
    assert function.call("sum_of", 2**200, 1) == 2 * (2**200 + 1)


@pytest.mark.usefixtures("provider")
@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("fails", SubcallFailedError, "ValueError: no 1"),
        ("again", SubcallFailedError, "same arguments"),
        ("deeper", SubcallFailedError, "deep"),
        ("broken", SubcallFailedError, "broken"),
        ("doubl", SubcallFailedError, "did you mean double"),
    ],
)
def test_a_function_that_fails_raises_a_clear_error(name, error, text):
    with pytest.raises(error, match=text):
        function.call(name, 1)


def test_without_a_configuration_the_error_says_how_to_name_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="BLOCKX_CONFIG"):
        local.provider()


@pytest.mark.slow
def test_a_plain_script_finds_the_configuration_and_ends_by_itself(folder):
    script = (
        "from blockdb import Table\n"
        "table = Table('t', key=['k'])\n"
        "table.upsert_rows([{'k': 1, 'v': 5}])\n"
        "print(table.get_row({'k': 1}))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "BLOCKX_CONFIG": "config.yaml"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert json.loads(ran.stdout.replace("'", '"')) == {"k": 1, "v": 5}


@pytest.mark.slow
def test_in_restricted_mode_only_audited_functions_are_called(folder):
    (folder / "functions" / "opens.py").write_text("def _(name):\n    return open(name).read()\n")
    with (folder / "config.yaml").open("a") as file:
        file.write("functions: {path: functions, mode: restricted}\n")
    provider = local.LocalProvider(load_config(folder / "config.yaml", {}))
    try:
        assert provider.subcall("double", [2]) == 4
        with pytest.raises(SubcallFailedError, match=r"refused by the audit: .*built-in open"):
            provider.subcall("opens", ["config.yaml"])
    finally:
        provider.close()
