"""The same input gives the same rows: four jobs on a real node, with everything shared and nothing shared.

The jobs in ``jobs/`` are of the kind users run; the right answers come from the ledger that the test
chain keeps while it is made, not from the node.
"""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from tests.chain.devchain import at
from tests.chain.fixtures import chain

__all__ = ["chain"]

JOBS = Path(__file__).parent / "jobs"
NAMES = sorted(path.name for path in JOBS.iterdir())

SHARED = {
    "worker": {"executor_count": 2},
    "dispatcher": {"share_results": True},
    "rpc": {},
    "blockdb": {"coalesce": True},
}
ALONE = {
    "worker": {"executor_count": 1},
    "dispatcher": {"share_results": False, "executor_max_inflight": 3},
    "rpc": {"batch_max": 1, "merge_reads": False, "read_cache_bytes": 0},
    "blockdb": {"coalesce": False},
}
MANY = {
    "worker": {"executor_count": 8},
    "dispatcher": {"share_results": True, "call_cache_max_bytes": 0},
    "rpc": {"batch_max": 7, "merge_reads": True, "read_cache_bytes": 0},
    "blockdb": {"coalesce": True},
}

pytestmark = pytest.mark.slow


def module_of(name):
    spec = importlib.util.spec_from_file_location("job_calls", JOBS / name / "calls.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_job(product, name, node, switches):
    """Run one job in a folder of its own with these switches; what it left."""
    module, folder = module_of(name), product.folder
    calls = list(module.calls(node.facts))
    shutil.copytree(JOBS / name / "functions", folder / "functions")
    (folder / "calls.jsonl").write_text("".join(json.dumps(call) + "\n" for call in calls))
    config = {
        "worker": switches["worker"],
        "dispatcher": switches["dispatcher"],
        "backends": {
            "rpc": {"dev": {"urls": [node.url], **switches["rpc"]}},
            "blockdb": {"path": "store.sqlite", **switches["blockdb"]},
        },
        "jobs": [
            {
                "name": "case",
                "function": calls[0]["function"],
                "calls": "calls.jsonl",
                "results": "results.jsonl",
                "output": "rows.jsonl",
            }
        ],
        "report": "report.json",
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    for table, rows in getattr(module, "tables", lambda _: {})(node.facts).items():
        (folder / f"{table}.in").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert product.run("table", "load", table, f"{table}.in", "--kind", "block").code == 0
    ended = product.run()
    assert ended.code == 0, ended.text
    return ended


@pytest.mark.parametrize("switches", [SHARED, ALONE, MANY], ids=["shared", "alone", "many"])
@pytest.mark.parametrize("name", NAMES)
def test_a_job_gives_the_ledgers_rows_whatever_is_shared(product, chain, name, switches):
    ended = run_job(product, name, chain, switches)
    want = list(module_of(name).expected(chain.facts, at))
    assert ended.outputs() == want
    rows = [row for out in want for row in (out if isinstance(out, list) else [out]) if row]
    assert ended.lines("rows.jsonl") == rows
    if switches is ALONE:
        assert ended.job()["cached"] + ended.job()["singleflight"] == 0
        assert ended.job()["executed"] == len(want)
