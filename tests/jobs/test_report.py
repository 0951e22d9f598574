"""report.json and the table say the same numbers."""

import json

import pytest

from blockx.dispatcher.model import CallCounts
from blockx.jobs.output_file import JobFailedError
from blockx.jobs.report import (
    JobReport,
    RunReport,
    add_counts,
    plain_table,
    summary_lines,
    table_lines,
)

CALLS = CallCounts(
    calls=1_320,
    ok=1_300,
    failed=20,
    ran=1_000,
    cached=200,
    singleflight=100,
    not_run=20,
    executed=1_003,
    retries=2,
    moves=1,
)
SUBCALLS = CallCounts(calls=40, ok=40, ran=2, cached=38, executed=2)
EXECUTORS = {"restarts": 1, "lost": 1, "killed": 0, "recycled": 0, "reasons": {"lost": {"x": 1}}}


def report(**job):
    fields = {"name": "j", "calls": CALLS, "subcalls": SUBCALLS, "rows": 1_200, "complete": True}
    jobs = [JobReport(**{**fields, "rpc": {"dev": {"requests": 3, "cache_hits": 1}}, **job})]
    return RunReport(jobs, 2.0, 1, EXECUTORS)


def test_report_json_has_the_names_of_the_design(tmp_path):
    report().write(tmp_path / "out" / "report.json")
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == {
        "jobs": [
            {
                "name": "j",
                "calls": 1320,
                "ok": 1300,
                "failed": 20,
                "ran": 1000,
                "cached": 200,
                "singleflight": 100,
                "not_run": 20,
                "executed": 1003,
                "retries": 2,
                "moves": 1,
                "rows": 1200,
                "subcalls": {
                    "calls": 40,
                    "ok": 40,
                    "failed": 0,
                    "ran": 2,
                    "cached": 38,
                    "singleflight": 0,
                    "not_run": 0,
                    "executed": 2,
                    "retries": 0,
                    "moves": 0,
                },
                "rpc": {"dev": {"requests": 3, "cache_hits": 1}},
            }
        ],
        "executors": EXECUTORS,
        "wall_s": 2.0,
        "exit_code": 1,
    }
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["report.json"]


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "report.json").mkdir()
    with pytest.raises(JobFailedError, match=r"report\.json: cannot be written: Is a directory"):
        report().write(tmp_path / "report.json")
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_the_table_is_plain_columns():
    assert plain_table(table_lines(report())) == (
        "job          calls     ok  failed    ran  cached  shared  not run  retries  moves   rows  calls/s\n"
        "j            1,320  1,300      20  1,000     200     100       20        2      1  1,200      660\n"
        "  sub-calls     40     40       0      2      38       0        0        0      0"
    )


def test_the_summary_names_reads_executors_and_a_job_that_failed():
    assert summary_lines(report(error="disk full", complete=False)) == [
        "j: dev: 3 requests, 1 cache hits",
        "j: failed: disk full",
        "executors: 1 restarts, 1 lost",
        "wall time 2.0 s, exit code 1",
    ]


def test_counts_add_up_field_by_field():
    assert add_counts(CALLS, SUBCALLS) == CallCounts(
        calls=1_360,
        ok=1_340,
        failed=20,
        ran=1_002,
        cached=238,
        singleflight=100,
        not_run=20,
        executed=1_005,
        retries=2,
        moves=1,
    )
