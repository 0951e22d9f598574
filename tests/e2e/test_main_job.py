"""The job of ``make run`` and the example of the README, through the launcher as a user would."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TRANSFERS = Path(__file__).parent / "data" / "token_transfers_17173049.jsonl"

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(product) -> Path:
    """The job's files, copied: a test leaves nothing in the repository."""
    shutil.copy(ROOT / "config.yaml", product.folder)
    for name in ("functions", "data"):
        leave_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, product.folder / name, ignore=leave_out)
    return product.folder


def run(product, *arguments: str) -> None:
    ended = product.run(*arguments)
    assert ended.code == 0, ended.text


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def transfer_of(row: dict[str, Any]) -> tuple[object, ...]:
    fields = row["fields"]
    value = fields["value"] if row["standard"] == "erc20" else fields["token_id"]
    return row["log_index"], row["address"], fields["from"], fields["to"], value


@pytest.mark.spawn_modes("process", "sandbox")
def test_the_main_job_decodes_every_transfer_of_the_block_digit_for_digit(product, folder: Path):
    run(product, "--config", "config.yaml")
    rows = lines_of(folder / "out" / "rows.jsonl")
    want = [
        (t["log_index"], t["token_address"], t["from_address"], t["to_address"], int(t["value"]))
        for t in lines_of(TRANSFERS)
    ]
    assert [row["log_index"] for row in rows] == list(range(271))
    got = [transfer_of(row) for row in rows if row["event"] == "Transfer"]
    assert got == sorted(want)
    assert sum(value >= 2**63 for *_, value in got) == 36


def test_the_main_job_names_tokens_that_are_listed_and_leaves_the_others_empty(
    product, folder: Path
):
    run(product, "--config", "config.yaml")
    rows = lines_of(folder / "out" / "rows.jsonl")
    first, swap = rows[0], rows[3]
    assert (first["symbol"], first["decimals"], first["amount"]) == (
        "WETH",
        18,
        "7.056176614974947328",
    )
    assert (swap["event"], swap["symbol"], swap["name"], swap["decimals"], swap["amount"]) == (
        "Swap",
        None,
        None,
        None,
        None,
    )
    assert swap["fields"]["amount0_out"] == 150188698577042438264952193024


def test_the_report_of_the_main_job_counts_a_token_once(product, folder: Path):
    run(product, "--config", "config.yaml")
    report = json.loads((folder / "out" / "report.json").read_text())
    job = report["jobs"][0]
    assert [job[key] for key in ("name", "calls", "ok", "failed", "ran", "rows")] == [
        "decode_block",
        271,
        271,
        0,
        271,
        271,
    ]
    subcalls = job["subcalls"]
    assert (subcalls["calls"], subcalls["ran"]) == (271, 95)
    assert subcalls["cached"] + subcalls["singleflight"] == 271 - 95
    assert report["exit_code"] == 0


def test_the_main_job_keeps_token_metadata_in_the_embedded_store(product, folder: Path):
    run(product, "--config", "config.yaml")
    query = "SELECT count(*) AS tokens, sum(row LIKE '%USDC%') AS usdc FROM token_meta"
    kept = product.run("table", "query", query, "--config", "config.yaml")
    assert json.loads(kept.text) == {"tokens": 95, "usdc": 1}


def test_the_example_of_the_readme_works_as_written(product, folder: Path):
    text = (ROOT / "README.md").read_text()
    source, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    config, *_ = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (folder / "functions" / "big_transfer.py").write_text(source)
    (folder / "big.yaml").write_text(config)
    run(product, "check", "--config", "big.yaml")
    run(product, "--config", "big.yaml")
    assert len(lines_of(folder / "out" / "big_results.jsonl")) == 271
    rows = lines_of(folder / "out" / "big_rows.jsonl")
    assert rows != []
    assert all(int(row["amount"].split(".")[0]) >= 1_000 for row in rows)
    assert {row["token"] for row in rows} <= {"USDC", "USDT", "DAI", "WETH", "LPT", "WBTC"} | {
        "LINK (Chainlink)"
    }
