"""The source and the sink that CONTRIBUTING.md shows work as they stand there."""

import json
import re
from pathlib import Path

from blockx.jobs.sinks import registry as sinks
from blockx.jobs.sources import registry as sources

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


class Point:
    """An entry point of another distribution."""

    def __init__(self, name, target):
        self.name, self._target = name, target

    def load(self):
        return self._target


def example(name):
    [code] = [
        code
        for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
        if f"class {name}" in code
    ]
    names = {}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    return names[name]


def test_the_examples_run(folder, fake_dispatch, monkeypatch):
    points = {
        sources.GROUP: [Point("words", example("WordSource"))],
        sinks.GROUP: [Point(".tsv", example("TsvSink"))],
    }
    for registry in (sources, sinks):
        monkeypatch.setattr(registry, "entry_points", lambda group: points[group])
        registry._openers.cache_clear()
    folder.write("names.txt", "ann\nbob\n")
    job = {
        "name": "j",
        "function": "f",
        "calls": {"words": "names.txt"},
        "output": "rows.tsv",
        "failures": "failures.jsonl",
    }
    dispatch = fake_dispatch(lambda call: json.dumps({"who": json.loads(call.args)[0]}).encode())
    try:
        assert folder.jobs_run(dispatch, job).run() == 0
    finally:
        for registry in (sources, sinks):
            registry._openers.cache_clear()
    assert folder.read("rows.tsv") == "ann\nbob\n"
