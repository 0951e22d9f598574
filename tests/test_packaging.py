"""Lock files, project metadata and the commands of the README agree with each other."""

import re
import tomllib
from pathlib import Path

import pytest

import blockx

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINE = re.compile(r'([A-Za-z0-9._-]+)==([0-9][^\s;]*)(; python_version < "3\.\d+")?')


def locked(name: str) -> dict[str, str]:
    """Package (in lower case) -> version; fails on any other kind of line."""
    lines = (ROOT / name).read_text().splitlines()
    matches = [LINE.fullmatch(line) for line in lines]
    assert [line for line, match in zip(lines, matches, strict=True) if match is None] == []
    return {normal(match[1]): match[2] for match in matches if match}


def normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def named(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[><=\[ ]", requirement)[0]) for requirement in requirements}


def test_the_version_is_the_same_inside_and_outside():
    assert PROJECT["version"] == blockx.__version__


def test_the_lock_file_holds_every_dependency():
    assert named(PROJECT["dependencies"]) - locked("requirements.lock").keys() == set()


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("requirements-test.lock", ["test"]),
        ("requirements-dev.lock", ["test", "lint", "compile"]),
        ("requirements-peers.lock", ["test", "lint", "peers"]),
    ],
)
def test_a_larger_lock_file_holds_the_packages_of_its_extras(lock: str, extras: list[str]):
    wanted = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    assert named(wanted) - locked(lock).keys() == set()


@pytest.mark.parametrize(
    "larger", ["requirements-test.lock", "requirements-dev.lock", "requirements-peers.lock"]
)
def test_all_lock_files_name_the_same_versions(larger: str):
    assert locked("requirements.lock").items() - locked(larger).items() == set()


def test_commands_named_in_the_documents_exist():
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text()))
    for document in ("README.md", "CONTRIBUTING.md", "perf/README.md"):
        named_there = set(re.findall(r"\bmake ([a-z]+)", (ROOT / document).read_text()))
        assert named_there - targets == set(), document


def test_the_licence_of_the_data_is_beside_it():
    text = (ROOT / "data" / "LICENSE-MIT.txt").read_text()
    assert "Evgeny Medvedev" in text
    assert "ethereum-lists" in text
    assert {"logs.jsonl", "tokens.jsonl"} <= set(
        re.findall(r"(\w+\.jsonl)`", (ROOT / "data" / "SOURCES.md").read_text())
    )
