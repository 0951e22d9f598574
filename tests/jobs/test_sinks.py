"""Each kind of output, read back with a tool that is not ours; and rows that do not fit."""

import csv
import json
import sqlite3

import duckdb
import msgspec
import pytest

from blockx.backends.table_access import TableAccess
from blockx.config import JobConfig
from blockx.errors import UsageError
from blockx.jobs import output_file
from blockx.jobs.run import check_jobs
from blockx.jobs.sinks import groups as groups_module
from blockx.jobs.sinks import registry
from blockx.jobs.sinks.schema import KINDS, schema_of

BIG, LOW = 2**256 - 1, -(2**255)
ROWS = [
    {
        "n": 1,
        "big": BIG,
        "low": LOW,
        "text": 'a "b", ü\u2028\n',
        "none": None,
        "price": 1.5,
        "flag": True,
        "nested": {"a": [BIG, None, "ü"]},
    },
    {"n": -(2**63), "big": 0, "low": 7, "text": "", "flag": False, "nested": [1]},
]
DECLARED = {
    "n": "int64",
    "big": "uint256",
    "low": "int256",
    "text": "text",
    "none": "text",
    "price": "double",
    "flag": "bool",
    "nested": "json",
}
NESTED = f'{{"a":[{BIG},null,"ü"]}}'


def write(folder, fake_dispatch, output, answers=ROWS, *, schema=None, tables=None, **config):
    """Run a job of which call n gives answer n; (run, notices)."""
    folder.write("calls.jsonl", "".join(f"[{n}]\n" for n in range(len(answers))))
    job = {
        "name": "j",
        "function": "f",
        "calls": "calls.jsonl",
        "results": "results.jsonl",
        "output": output,
        "failures": "failures.jsonl",
        "schema": schema or {},
    }
    encoded = [json.dumps(answer).encode() for answer in answers]
    dispatch = fake_dispatch(lambda call: encoded[call.index], order=lambda calls: calls[::-1])
    access = TableAccess(folder.loaded(job, **config)) if tables else None
    run = folder.jobs_run(dispatch, job, tables=access, **config)
    run.run()
    return run


@pytest.mark.parametrize("schema", [None, DECLARED])
def test_csv_is_read_back_by_the_csv_module(folder, fake_dispatch, schema):
    write(folder, fake_dispatch, "rows.csv", schema=schema)
    with (folder.path / "rows.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, strict=True))
    assert rows == [
        {
            "n": "1",
            "big": str(BIG),
            "low": str(LOW),
            "text": 'a "b", ü\u2028\n',
            "none": "",
            "price": "1.5",
            "flag": "true",
            "nested": NESTED,
        },
        {
            "n": str(-(2**63)),
            "big": "0",
            "low": "7",
            "text": "",
            "none": "",
            "price": "",
            "flag": "false",
            "nested": "[1]",
        },
    ]
    # The empty text is quoted and null is not.
    assert ',"",,,false,[1]\n' in folder.read("rows.csv")


@pytest.mark.parametrize("schema", [None, DECLARED])
def test_sqlite_is_read_back_by_sqlite3(folder, fake_dispatch, schema):
    write(folder, fake_dispatch, "rows.sqlite", schema=schema)
    with sqlite3.connect(folder.path / "rows.sqlite") as db:
        rows = db.execute(
            "SELECT n, big, low, text, none, price, flag, nested FROM rows"
        ).fetchall()
        kinds = db.execute("SELECT typeof(n), typeof(big), typeof(price) FROM rows").fetchall()
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
    assert rows == [
        (1, str(BIG), str(LOW), 'a "b", ü\u2028\n', None, 1.5, 1, NESTED),
        (-(2**63), "0", "7", "", None, None, 0, "[1]"),
    ]
    assert kinds == [("integer", "text", "real"), ("integer", "text", "null")]


@pytest.mark.slow
@pytest.mark.parametrize("schema", [None, DECLARED])
def test_parquet_is_read_back_by_duckdb(folder, fake_dispatch, schema):
    write(folder, fake_dispatch, "rows.parquet", schema=schema)
    with duckdb.connect() as db:
        file = str(folder.path / "rows.parquet")
        rows = db.execute("SELECT * FROM read_parquet(?)", [file]).fetchall()
        columns = db.execute("DESCRIBE SELECT * FROM read_parquet(?)", [file]).fetchall()
        total = db.execute("SELECT sum(big::BIGNUM) FROM read_parquet(?)", [file]).fetchone()
    assert rows == [
        (1, str(BIG), str(LOW), 'a "b", ü\u2028\n', None, 1.5, True, NESTED),
        (-(2**63), "0", "7", "", None, None, False, "[1]"),
    ]
    assert [(name, kind) for name, kind, *_ in columns] == [
        ("n", "BIGINT"),
        ("big", "VARCHAR"),
        ("low", "VARCHAR"),
        ("text", "VARCHAR"),
        ("none", "VARCHAR"),
        ("price", "DOUBLE"),
        ("flag", "BOOLEAN"),
        ("nested", "VARCHAR"),
    ]
    assert str(total[0]) == str(BIG)
    assert folder.files() == ["calls.jsonl", "failures.jsonl", "results.jsonl", "rows.parquet"]


@pytest.mark.slow
def test_parquet_keeps_list_order_and_strange_texts(folder, fake_dispatch):
    texts = ["\x00", "\\u0000", "'; DROP", "\U0001f600", "[1]", "null", "1e999"]
    answers = [{"i": n, "it's": texts[n % len(texts)]} for n in range(5_000)]
    write(folder, fake_dispatch, "ro'ws.parquet", answers)
    with duckdb.connect() as db:
        rows = db.execute(
            "SELECT * FROM read_parquet(?)", [str(folder.path / "ro'ws.parquet")]
        ).fetchall()
    assert rows == [tuple(answer.values()) for answer in answers]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request):
    """Each kind of table store."""
    is_file = request.param == "sqlite"
    return {"path": "t.sqlite"} if is_file else request.getfixturevalue("postgres").settings()


def test_rows_of_a_job_are_upserted_into_a_table_at_its_end(folder, fake_dispatch, store):
    config = {"backends": {"blockdb": {**store, "tables": {"t": {"key": ["n"]}}}}}
    answers = [
        {"n": 1, "v": BIG},
        [{"n": 2, "v": "ü"}, {"v": 1}, {"n": [], "v": 2}],
        {"n": 1, "v": None},
    ]
    run = write(folder, fake_dispatch, "table:t", answers, tables=True, **config)
    rows = TableAccess(folder.loaded(**config)).rows("t")
    assert [row.decode() for row in rows] == ['{"n":1,"v":null}', '{"n":2,"v":"ü"}']
    assert (run.reports[0].rows, run.reports[0].rows_refused) == (3, 2)
    [failure] = [json.loads(line) for line in folder.read("failures.jsonl").splitlines()]
    assert failure["args"] == [1]
    assert failure["error"]["message"] == (
        "row 1, field n: it belongs to the key of table t, and is missing"
    )


def test_a_stopped_job_has_changed_no_table(folder, fake_dispatch, store):
    config = {"backends": {"blockdb": {**store, "tables": {"t": {"key": ["n"]}}}}}
    run = write(folder, fake_dispatch, "table:t", [{"n": 1}, [1, 2]], tables=True, **config)
    assert run.reports[0].complete
    again = write(folder, fake_dispatch, "table:none", [{"n": 1}], tables=True, **config)
    assert again.reports[0].error == (
        "output table:none: its key is not known; declare it in backends.blockdb.tables.none.key"
    )


# ---- rows that do not fit --------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["rows.csv", "rows.sqlite"])
def test_a_row_that_does_not_fit_is_named_and_goes_to_failures(folder, fake_dispatch, output):
    answers = [
        {"i": 0, "v": 1},
        [{"i": 1, "v": 2}, {"i": 1, "v": "text"}, {"i": 1, "v": 2**64}, {"i": 1, "v": 3}],
        {"i": 2, "v": True},
        {"i": 3, "w": 1},
        {"i": 4, "v": None},
    ]
    schema = {"i": "int64", "v": "int64"}
    run = write(folder, fake_dispatch, output, answers, schema=schema)
    [report] = run.reports
    assert (report.complete, report.is_right) == (True, False)
    assert (report.rows, report.rows_refused, report.calls.failed) == (4, 4, 0)
    failures = [json.loads(line) for line in folder.read("failures.jsonl").splitlines()]
    assert [(f["args"], f["call_id"], f["error"]["message"]) for f in failures] == [
        ([1], "j/1", 'row 1, field v: "text" does not fit into the column\'s kind int64'),
        ([2], "j/2", "row 0, field v: true does not fit into the column's kind int64"),
        ([3], "j/3", "row 0, field w: it is not in the job's schema"),
    ]
    assert {f["error"]["kind"] for f in failures} == {"row_refused"}
    assert folder.notices()[-1] == (
        f"job j: 4 rows do not fit into {output} and are left out, their calls stand in failures; first:"
        ' call j/1, row 1, field v: "text" does not fit into the column\'s kind int64'
    )
    # It is a call list: the same calls, and no others, come out of it.
    again = {"name": "again", "calls": "failures.jsonl", "results": "again.jsonl"}
    assert folder.jobs_run(fake_dispatch(lambda call: call.args), again).run() == 0
    outputs = [json.loads(line)["output"] for line in folder.read("again.jsonl").splitlines()]
    assert outputs == [[1], [2], [3]]


def test_an_inferred_column_does_not_bend_for_later_rows(folder, fake_dispatch, monkeypatch):
    monkeypatch.setattr(groups_module, "SAMPLE_ROWS", 2)
    answers = [{"v": 1}, {"v": 2}, {"v": 2**70}, {"v": 3, "late": 1}, {"v": 4}]
    run = write(folder, fake_dispatch, "rows.csv", answers)
    assert folder.read("rows.csv") == "v\n1\n2\n4\n"
    assert run.reports[0].rows_refused == 2
    messages = [
        json.loads(line)["error"]["message"] for line in folder.read("failures.jsonl").splitlines()
    ]
    assert messages == [
        f"row 0, field v: {2**70} does not fit into the column's kind int64, inferred from the first rows;"
        " declare another in the job's schema",
        "row 0, field late: the first rows did not have it; declare the columns in the job's schema",
    ]


def test_failures_stay_in_list_order_beside_rows_that_do_not_fit(folder, fake_dispatch):
    from blockx.dispatcher.model import CallError
    from blockx.errors import ErrorKind

    folder.write("calls.jsonl", "".join(f"[{n}]\n" for n in range(6)))
    job = {
        "name": "j",
        "function": "f",
        "calls": "calls.jsonl",
        "output": "rows.csv",
        "failures": "failures.jsonl",
        "schema": {"v": "text"},
    }

    def answer(call):
        if call.index % 2:
            return CallError(ErrorKind.USER_ERROR, "no")
        return b'{"v":1}' if call.index == 2 else b'{"v":"x"}'

    for memory in (0, 1 << 20):
        dispatch = fake_dispatch(answer, order=lambda calls: calls[::-1])
        run = folder.jobs_run(
            dispatch,
            {**job, "name": f"j{memory}"},
            run={"reorder_memory_bytes": memory},
            stream_build={"batch_max_rows": 3},
        )
        run.run()
        lines = [json.loads(line) for line in folder.read("failures.jsonl").splitlines()]
        assert [line["args"] for line in lines] == [[1], [2], [3], [5]]
        assert folder.read("rows.csv") == "v\nx\nx\n"


@pytest.mark.parametrize("output", ["rows.csv", "rows.sqlite", "rows.parquet"])
@pytest.mark.slow
def test_a_job_without_rows_leaves_a_valid_file(folder, fake_dispatch, output):
    for answers, schema in (([], None), ([None], {"a": "int64"})):
        run = write(folder, fake_dispatch, output, answers, schema=schema)
        assert run.reports[0].is_right
        assert (folder.path / output).exists()


def test_a_disk_that_is_full_at_the_end_leaves_no_output(folder, fake_dispatch, monkeypatch):
    fsync = output_file.os.fsync

    def full(fd):
        import os

        if "rows.sqlite" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(output_file.os, "fsync", full)
    run = write(folder, fake_dispatch, "rows.sqlite")
    assert "rows.sqlite: cannot be written: No space left on device" in run.reports[0].error
    assert folder.files() == ["calls.jsonl"]
    monkeypatch.undo()
    again = write(folder, fake_dispatch, "rows.sqlite")
    assert again.reports[0].resumed == 2
    assert folder.files() == ["calls.jsonl", "failures.jsonl", "results.jsonl", "rows.sqlite"]


# ---- columns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None, 2**63 - 1], "int64"),
        ([1, 2**63], "uint256"),
        ([-1, 2**63], "uint256"),
        ([1, -(2**63) - 1], "int256"),
        ([1, 1.5], "double"),
        ([2**60, 1.5], "json"),
        ([True, None], "bool"),
        ([True, 1], "json"),
        (["a", None], "text"),
        (["a", 1], "json"),
        ([[1], {"a": 1}], "json"),
        ([None], "text"),
    ],
)
def test_the_kind_of_a_column_is_the_narrowest_that_loses_nothing(values, kind):
    schema = schema_of({}, [{"v": value} for value in values])
    assert schema.kinds == {"v": kind}


def test_declared_kinds_are_those_of_the_configuration():
    for kind in KINDS:
        made = msgspec.convert({"name": "j", "calls": [], "schema": {"a": kind}}, JobConfig)
        assert made.schema == {"a": kind}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": "j", "calls": [], "schema": {"a": "decimal"}}, JobConfig)


# ---- what can be known before a run ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "mistake"),
    [
        (
            {"output": "o.xls"},
            "job j: output o.xls: there is no such kind of output; known: .jsonl .csv .sqlite .parquet"
            " table:NAME",
        ),
        (
            {"output": "o.jsonl", "schema": {"a": "text"}},
            "job j: schema: o.jsonl holds rows as they are; columns are for .csv .sqlite .parquet table:NAME",
        ),
    ],
)
def test_an_output_of_no_kind_is_a_mistake(folder, job, mistake):
    loaded = folder.loaded({"name": "j", "function": "f", "calls": [], **job})
    with pytest.raises(UsageError) as caught:
        check_jobs(loaded, loaded.config.jobs, folder.view())
    assert str(caught.value) == mistake


def test_a_sink_of_another_distribution_is_found_by_its_entry_point(
    folder, fake_dispatch, monkeypatch
):
    taken = []

    class ListSink:
        def __init__(self, place):
            taken.append(("open", place.target))

        def add(self, row):
            taken.append(row)

        def flush_to_disk(self):
            taken.append("flush")

        def rename(self):
            taken.append("rename")

        def discard(self):
            """Nothing is left."""

    class Point:
        name = "list"

        def load(self):
            return ListSink

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()])
    registry._openers.cache_clear()
    try:
        assert (
            write(folder, fake_dispatch, "list:there", [{"a": BIG}, {"a": 2}]).reports[0].is_right
        )
    finally:
        registry._openers.cache_clear()
    assert taken == [("open", "there"), {"a": BIG}, {"a": 2}, "flush", "rename"]


def test_groups_may_be_cut_anywhere():
    class Rows(list):
        def add(self, row):
            self.append(row)

        def flush_to_disk(self):
            """Nothing to do."""

    data = b"".join(
        groups_module.group_of(b'"j/%d"' % n, b'"f"', b"[]", b'[{"n":%d}]' % n) for n in range(4)
    )
    data = data.replace(b'R{"call_id":"j/2"', b'Ffailed\nR{"call_id":"j/2"')
    for size in (1, 7, len(data)):
        taken, failures = Rows(), []
        writer = groups_module.GroupWriter(lambda _sample, taken=taken: taken, failures.append)
        for start in range(0, len(data), size):
            writer.feed(data[start : start + size])
        writer.flush_to_disk()
        assert taken == [{"n": n} for n in range(4)]
        assert failures == [b"failed\n"]
