"""Every kind of call list, and how its rows become arguments."""

import json
import sqlite3

import pytest

from blockx.backends.table_access import TableAccess
from blockx.backends.table_files import SqliteFiles
from blockx.config import StreamBuildConfig
from blockx.errors import UsageError
from blockx.jobs.call_list import CallListSource
from blockx.jobs.sources import registry
from blockx.jobs.sources.base import Place
from blockx.jobs.sources.jsonl import identity_of_file

BIG = 2**256 - 1


def read(folder, calls, *, tables=False, **config):
    """Arguments of each call as Python values, or the message of a rejected one."""
    loaded = folder.loaded({"name": "j", "function": "f", "calls": calls}, **config)
    job = loaded.config.jobs[0]
    access = TableAccess(loaded) if tables else None
    source = registry.open_source(job, Place("j", loaded.resolve, access))
    reader = CallListSource(source, "f", folder.view(), StreamBuildConfig(batch_max_rows=3))
    found = []
    try:
        while (batch := reader.next_batch()) is not None:
            everything = sorted([*batch.calls, *batch.rejected], key=lambda call: call.index)
            found += [
                json.loads(call.args) if call.args else call.error.message for call in everything
            ]
    finally:
        reader.close()
    return found


def mistake(folder, calls, **config):
    with pytest.raises(UsageError) as caught:
        read(folder, calls, **config)
    return str(caught.value).replace(f"{folder.path}/", "")


# ---- range and product -----------------------------------------------------------------------------


def test_a_range_of_blocks_includes_both_ends(folder):
    limits = {"from": 0, "to": 25, "step": 10}
    assert read(folder, {"range": limits}) == [[0], [10], [20]]
    args = ["to_block", "block", {"value": "dev"}]
    assert read(folder, {"range": limits, "args": args}) == [
        [9, 0, "dev"],
        [19, 10, "dev"],
        [25, 20, "dev"],
    ]
    assert read(folder, {"range": {"from": 7, "to": 7}}) == [[7]]


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ({"range": {"from": 5, "to": 1}}, "calls.range: expected 0 <= from <= to"),
        ({"range": {"from": 5}}, "job j: range: calls has no to; add it"),
        (
            {"range": {"from": 1, "to": 2, "by": 1}},
            "calls.by: unknown key; known keys: from, to, step",
        ),
        ({"range": {"from": 1, "to": "2"}}, "calls.to: expected a whole number, got '2'"),
        (
            {"range": {"from": 1, "to": 2}, "args": ["blok"]},
            "job j: calls.args: there is no column 'blok'; there are: block, to_block",
        ),
        (
            {"range": {"from": 1, "to": 2}, "args": [{"val": 1}]},
            "expected the name of a column or {value: ...}",
        ),
        (
            {"rang": {}},
            "job j: calls: expected one of the keys csv, range, product, sqlite, table, got rang",
        ),
        ({}, "got nothing"),
    ],
)
def test_a_mistake_in_a_range_is_told_with_its_key(folder, calls, told):
    assert told in mistake(folder, calls)


def test_a_product_has_every_combination_and_the_last_column_turns_fastest(folder):
    columns = {"token": ["0xa", "0xb"], "block": {"from": 1, "to": 2}, "n": [BIG]}
    assert read(folder, {"product": columns}) == [
        [{"token": token, "block": block, "n": BIG}] for token in ("0xa", "0xb") for block in (1, 2)
    ]
    assert read(folder, {"product": columns, "args": ["n", "token"]})[:3] == [
        [BIG, "0xa"],
        [BIG, "0xa"],
        [BIG, "0xb"],
    ]
    assert read(folder, {"product": {"a": [], "b": [1]}}) == []
    assert "calls.product.a: expected a list, or from and to" in mistake(
        folder, {"product": {"a": 1}}
    )


# ---- CSV -------------------------------------------------------------------------------------------


def test_a_csv_file_gives_texts_unless_types_are_declared(folder):
    folder.write("c.csv", f'holder,block,n\n0xA,007,{BIG}\n"a ""b"",\nü",,\n'.encode())
    assert read(folder, "c.csv") == [
        [{"holder": "0xA", "block": "007", "n": str(BIG)}],
        [{"holder": 'a "b",\nü', "block": "", "n": ""}],
    ]
    calls = {"csv": "c.csv", "types": {"block": "int", "n": "int"}, "args": ["n", "block"]}
    assert read(folder, calls) == [[BIG, 7], [None, None]]


def test_all_types_of_csv_fields(folder):
    folder.write("c.csv", "i;f;b;j\n-5;1e3;TRUE;[1, null]\n;;;\n1.5;x;2;{\n")
    types = {"i": "int", "f": "float", "b": "bool", "j": "json"}
    calls = {"csv": "c.csv", "types": types, "args": ["i", "f", "b", "j"], "delimiter": ";"}
    good, empty, bad = read(folder, calls)
    assert good == [-5, 1000.0, True, [1, None]]
    assert empty == [None] * 4
    assert bad == "c.csv:4: column i: '1.5' is no whole number"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            "a,b\n1\n2,3\n",
            ["c.csv:2: 1 fields, but the first line names 2", [{"a": "2", "b": "3"}]],
        ),
        ('a\n"x"y\nz\n', ["c.csv:2: no CSV: ',' expected after '\"'", [{"a": "z"}]]),
        (b"a\n\xff\n", ["c.csv:2: column a: "]),
        ("\ufeffa\n1\n\n2\n", [[{"a": "1"}], [{"a": "2"}]]),
        ("a\n", []),
    ],
)
def test_a_bad_row_harms_nobody_but_itself(folder, content, told):
    folder.write("c.csv", content)
    found = read(folder, "c.csv")
    assert len(found) == len(told)
    for one, expected in zip(found, told, strict=True):
        assert one == expected or (isinstance(one, str) and one.startswith(expected))


@pytest.mark.parametrize(
    ("content", "calls", "told"),
    [
        ("", "c.csv", "c.csv: no columns; name them in the first line"),
        ("a,a\n", "c.csv", "c.csv: two columns 'a'"),
        ("a\n", {"csv": "c.csv", "types": {"b": "int"}}, "c.csv has no column 'b'; its columns: a"),
        ("a\n", {"csv": "c.csv", "types": {"a": "number"}}, "calls.types.a: expected text, int"),
        ("a\n", {"csv": "c.csv", "delimiter": "tab"}, "calls.delimiter: expected one character"),
        ("a\n", {"csv": "none.csv"}, "none.csv: the call list cannot be opened"),
    ],
)
def test_a_wrong_csv_is_the_users_mistake(folder, content, calls, told):
    folder.write("c.csv", content)
    assert told in mistake(folder, calls)


# ---- SQLite and tables -----------------------------------------------------------------------------


def test_rows_of_a_query_become_calls(folder):
    with sqlite3.connect(folder.path / "d.sqlite") as db:
        db.execute("CREATE TABLE t(a INTEGER, b TEXT, c REAL, d BLOB)")
        db.executemany(
            "INSERT INTO t VALUES(?, ?, ?, ?)",
            [
                (2**63 - 1, "ü", 1.5, b"\x00\xff"),
                (None, str(BIG), float("inf"), None),
                (1, "", 2.0, None),
            ],
        )
    db.close()
    calls = {"sqlite": "d.sqlite", "query": "SELECT a, b, c, d FROM t"}
    first, second, third = read(folder, calls)
    assert first == [{"a": 2**63 - 1, "b": "ü", "c": 1.5, "d": "0x00ff"}]
    assert second == "d.sqlite, row 2: inf is no JSON number"
    assert third == [{"a": 1, "b": "", "c": 2.0, "d": None}]
    assert read(folder, {**calls, "query": "SELECT count(*) AS n FROM t", "args": ["n"]}) == [[3]]


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ({"sqlite": "none.sqlite", "query": "SELECT 1"}, "none.sqlite"),
        ({"sqlite": "d.sqlite", "query": "SELECT x FROM"}, "calls.query: d.sqlite: "),
        ({"sqlite": "d.sqlite", "query": "SELECT 1 AS a, 2 AS a"}, "it has two columns 'a'"),
        ({"sqlite": "d.sqlite", "query": "CREATE TABLE x(a)"}, "readonly"),
        ({"sqlite": "d.sqlite"}, "calls has no query; add it"),
    ],
)
def test_a_wrong_query_is_the_users_mistake(folder, calls, told):
    sqlite3.connect(folder.path / "d.sqlite").close()
    folder.write("d.sqlite", b"")
    assert told in mistake(folder, calls)


def test_rows_of_a_table_become_calls_in_key_order(folder):
    folder.write("rows.jsonl", f'{{"k": 2, "v": {BIG}}}\n{{"k": 1}}\n')
    SqliteFiles(folder.path / "s.sqlite").load("t", folder.path / "rows.jsonl", "table", ["k"])
    backends = {"blockdb": {"path": "s.sqlite", "memory": {"m": "rows.jsonl"}}}
    assert read(folder, {"table": "t"}, tables=True, backends=backends) == [
        [{"k": 1}],
        [{"k": 2, "v": BIG}],
    ]
    assert read(folder, {"table": "t", "args": ["v"]}, tables=True, backends=backends) == [
        [None],
        [BIG],
    ]
    assert read(folder, {"table": "m", "args": ["k"]}, tables=True, backends=backends) == [[2], [1]]
    told = mistake(folder, {"table": "x"}, tables=True, backends=backends)
    assert "no table 'x'; there are: " in told
    assert "there is no table store" in mistake(folder, {"table": "t"})


# ---- what tells one list from another --------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "count"),
    [(b"", 0), (b"1\n2", 2), (b"1\n\n \t\r\n2\n\n", 2), (b"\n\n", 0), (b"1\r\n2\r\n", 2)],
)
def test_calls_of_a_file_are_counted_without_reading_them_one_by_one(folder, content, count):
    file = folder.write("c", content)
    identity = identity_of_file(file)
    assert (identity.count, len(identity.fingerprint)) == (count, 64)


def test_a_list_is_the_same_as_long_as_nothing_of_it_changes(folder):
    def identity(calls):
        loaded = folder.loaded({"name": "j", "function": "f", "calls": calls})
        return registry.identify(loaded.config.jobs[0], Place("j", loaded.resolve)).fingerprint

    folder.write("c.csv", "a\n1\n")
    lists = [
        "c.csv",
        {"csv": "c.csv", "types": {"a": "int"}},
        {"range": {"from": 0, "to": 5}},
        {"range": {"from": 0, "to": 6}},
        {"product": {"a": [1]}},
        [[1], [2]],
        [[1], [3]],
    ]
    first = [identity(calls) for calls in lists]
    assert len(set(first)) == len(lists)
    assert [identity(calls) for calls in lists] == first
    folder.write("c.csv", "a\n2\n")
    assert [identity(calls) for calls in lists[:2]] != first[:2]
    assert identity({"sqlite": "d", "query": "q"}) == ""


@pytest.mark.slow
def test_a_job_over_a_query_resumes_if_its_finished_rows_are_the_same(folder, fake_dispatch):
    def fill(values):
        with sqlite3.connect(folder.path / "d.sqlite") as db:
            db.execute("DROP TABLE IF EXISTS t")
            db.execute("CREATE TABLE t(a)")
            db.executemany("INSERT INTO t VALUES(?)", [(value,) for value in values])
        db.close()

    job = {
        "name": "j",
        "function": "f",
        "calls": {"sqlite": "d.sqlite", "query": "SELECT a FROM t", "args": ["a"]},
        "results": "r.jsonl",
    }
    limit = folder.jobs_run
    from blockx.jobs.choice import Choice

    fill([1, 2, 3])
    limit(fake_dispatch(lambda call: call.args), job, choice=Choice(limit=2)).run()
    fill([1, 9, 3])
    assert limit(fake_dispatch(lambda call: call.args), job).run() == 1
    assert "the call list has changed, first at d.sqlite, row 2" in folder.notices()[-1]
    fill([1, 2, 4])
    assert limit(fake_dispatch(lambda call: call.args), job).run() == 0
    assert [json.loads(line)["output"] for line in folder.read("r.jsonl").splitlines()] == [
        [1],
        [2],
        [4],
    ]
    limit(fake_dispatch(lambda call: call.args), job).run()
    assert folder.notices()[-1].startswith("job j: finished, ")
    fill([1, 2, 5])
    limit(fake_dispatch(lambda call: call.args), job).run()
    assert "job j: new (since the finished run the call list has changed), " in folder.notices()[-2]


def test_a_source_of_another_distribution_is_found_by_its_entry_point(folder, monkeypatch):
    class Letters:
        name = "letters"

        def __init__(self, spec, place):
            self.letters = spec["letters"]

        def lines(self):
            for number, letter in enumerate(self.letters):
                yield number, json.dumps(letter).encode(), ""

        def place(self, number):
            return f"letter {number}"

        def close(self):
            """Nothing is open."""

    class Point:
        name = "letters"

        def load(self):
            return Letters

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()])
    registry._openers.cache_clear()
    try:
        assert read(folder, {"letters": "abc"}) == [["a"], ["b"], ["c"]]
    finally:
        registry._openers.cache_clear()
