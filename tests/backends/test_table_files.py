"""Tables from and to JSONL, and SQL over the store; each of the table stores."""

from collections.abc import Callable
from pathlib import Path

import pytest

from blockx.backends.table_files import SqliteFiles
from blockx.errors import UsageError
from tests.backends.conftest import StorePlace
from tests.backends.harness import Io, outcome

StartIo = Callable[..., Io]


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: str) -> Path:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(line + "\n" for line in lines))
        return file

    return write


BIG = str(2**256 - 1)


@pytest.mark.parametrize(
    ("kind", "key", "lines"),
    [
        ("table", ["id"], ['{"id":1,"n":BIG,"f":1.0}'.replace("BIG", BIG), '{"id":2}']),
        (
            "block",
            None,
            [
                '{"key":{"p":"a"},"block":4,"state":{"fee":BIG}}'.replace("BIG", BIG),
                '{"key":{"p":"a"},"block":9,"state":{"fee":1}}',
            ],
        ),
        (
            "time",
            None,
            ['{"key":{"p":1},"at":5,"row":{"v":1}}', '{"key":{"p":1},"at":10.5,"row":{}}'],
        ),
        ("time", ["p"], ['{"key":{"p":1},"at":"2024-01-01T00:00:00.000000Z","row":{"v":1}}']),
    ],
    ids=["table", "block", "time as number", "time as text"],
)
def test_what_is_loaded_is_dumped_digit_for_digit(
    place: StorePlace, rows: Callable[..., Path], kind: str, key: list[str] | None, lines: list[str]
) -> None:
    assert place.files.load("t", rows(*lines), kind, key) == len(lines)
    assert [line.decode() for line in place.files.dump("t")] == lines


def test_loading_again_upserts(place: StorePlace, rows: Callable[..., Path]) -> None:
    place.files.load("t", rows('{"id":1,"v":1}', '{"id":2,"v":1}'), "table", ["id"])
    assert place.files.load("t", rows('{"id":2,"v":2}', "", '{"id":3,"v":2}')) == 2
    assert list(place.files.dump("t")) == [b'{"id":1,"v":1}', b'{"id":2,"v":2}', b'{"id":3,"v":2}']


def test_an_empty_file_loads_nothing(place: StorePlace, rows: Callable[..., Path]) -> None:
    assert place.files.load("t", rows(), "table", ["id"]) == 0


STATE = '{"key":{"p":1},"block":1,"state":{}}'
MOMENT = '{"key":{"p":1},"at":1,"row":{}}'


@pytest.mark.parametrize(
    ("kind", "key", "lines", "message"),
    [
        ("table", None, ['{"id":1}'], "table t is new: name its key columns with --key a,b"),
        (
            "table",
            ["id"],
            ['{"id":1}', '{"no":1}'],
            ":2: table t: a row lacks id, which belongs to its key id; nothing was loaded",
        ),
        ("table", ["id"], ['{"id":1}', "{"], "rows.jsonl:2: "),
        ("table", ["id"], ['{"id":1,"x":1e400}'], "rows.jsonl:1: a number is out of range"),
        (
            "block",
            None,
            ['{"key":{"p":1},"state":{}}'],
            "rows.jsonl:1: table t: a line lacks 'block'; nothing was loaded",
        ),
        (
            "block",
            None,
            [STATE.replace("{}", "[]")],
            "rows.jsonl:1: table t: 'state' must be an object; nothing was loaded",
        ),
        (
            "block",
            None,
            [STATE, STATE.replace("p", "q")],
            "rows.jsonl:2: table t has the key p; the key given has q; nothing was loaded",
        ),
        (
            "time",
            None,
            [MOMENT, MOMENT.replace('"at":1', '"at":"2024-01-01"')],
            "rows.jsonl:2: table t has numbers as `at`, not RFC 3339 texts; nothing was loaded",
        ),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_loaded(
    place: StorePlace,
    rows: Callable[..., Path],
    kind: str,
    key: list[str] | None,
    lines: list[str],
    message: str,
) -> None:
    with pytest.raises(UsageError) as caught:
        place.files.load("t", rows(*lines), kind, key)
    assert message in str(caught.value)
    with pytest.raises(UsageError, match="has no table 't'; there are: none"):
        list(place.files.dump("t"))


def test_files_that_are_not_there_are_named(place: StorePlace, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.jsonl: No such file or directory"):
        place.files.load("t", tmp_path / "no.jsonl", "table", ["id"])
    missing = {
        "sqlite": "there is no table store; `table load` makes one",
        "postgres": "/postgres has no table 't'; there are: none",
    }
    files = SqliteFiles(tmp_path / "no.sqlite") if place.kind == "sqlite" else place.files
    with pytest.raises(UsageError, match=missing[place.kind]):
        list(files.dump("t"))


def test_sql_reads_the_store_and_cannot_change_it(
    place: StorePlace, rows: Callable[..., Path]
) -> None:
    place.files.load("t", rows('{"id":1}', '{"id":2}'), "table", ["id"])
    columns, found = place.files.query("SELECT key, row FROM t ORDER BY key")
    assert (columns, list(found)) == (["key", "row"], [("[1]", '{"id":1}'), ("[2]", '{"id":2}')])
    refusals = {
        "sqlite": [
            ("DELETE FROM t", "attempt to write a readonly database"),
            ("SELECT * FROM missing", "no such table: missing"),
            ("SELECT 1; SELECT 2", "You can only execute one statement at a time"),
        ],
        "postgres": [
            ("DELETE FROM t", "cannot execute DELETE in a read-only transaction"),
            ("SELECT * FROM missing", 'relation "missing" does not exist'),
            ("SELECT 1; SELECT 2", "cannot insert multiple commands into a prepared statement"),
        ],
    }
    for sql, why in refusals[place.kind]:
        with pytest.raises(UsageError, match=why):
            place.files.query(sql)
    assert len(list(place.files.dump("t"))) == 2


def test_a_time_table_answers_as_of_a_moment(
    io: StartIo, place: StorePlace, rows: Callable[..., Path]
) -> None:
    lines = [
        '{"key":{"p":1},"at":"2024-01-01T00:00:00Z","row":{"v":1}}',
        '{"key":{"p":1},"at":"2024-01-02T01:00:00+01:00","row":{"v":2}}',
    ]
    place.files.load("t", rows(*lines), "time")
    service = io(blockdb=place.blockdb)
    moments = ["2023-12-31T23:59:59Z", "2024-01-01", "2024-01-01T23:59:59.999999Z", "2024-01-02"]
    replies = service.ask(
        *[service.table("get_row_at", "t", key={"p": 1}, at=at) for at in [*moments, 5]]
    )
    assert [outcome(reply) for reply in replies] == [
        None,
        {"v": 1},
        {"v": 1},
        {"v": 2},
        ("io_error", "table t has RFC 3339 texts as `at`, not numbers"),
    ]
