"""Tables held in memory."""

from collections.abc import Callable
from pathlib import Path

import pytest

from blockx.errors import UsageError
from tests.backends.harness import Io, outcome

StartIo = Callable[..., Io]
ROWS = (
    f'{{"address": "0xa", "symbol": "A", "supply": {2**256 - 1}}}\n'
    "\n"
    '{"address": "0xb", "symbol": "B", "chain": 1}\n'
    '{"address": "0xb", "symbol": "B2", "chain": 1}\n'
)


@pytest.fixture
def tables(io: StartIo, tmp_path: Path) -> Io:
    (tmp_path / "tokens.jsonl").write_text(ROWS)
    return io(blockdb={"memory": {"tokens": "tokens.jsonl"}})


def test_a_row_comes_by_any_set_of_key_fields_exact_and_the_last_of_equal_keys(tables: Io) -> None:
    keys = [
        {"address": "0xa"},
        {"address": "0xb"},
        {"chain": 1, "address": "0xb"},
        {"chain": 1.0},
        {"address": "0xc"},
    ]
    replies = tables.ask(*[tables.table("get_row", "tokens", key=key) for key in keys])
    rows = [outcome(reply) for reply in replies]
    assert rows == [
        {"address": "0xa", "symbol": "A", "supply": 2**256 - 1},
        {"address": "0xb", "symbol": "B2", "chain": 1},
        {"address": "0xb", "symbol": "B2", "chain": 1},
        None,
        None,
    ]
    assert str(2**256 - 1).encode() in (replies[0].result or b"")


def test_many_rows_come_in_the_order_of_their_keys(tables: Io) -> None:
    keys = [{"symbol": "B2"}, {"symbol": "x"}, {"symbol": "A"}]
    rows = outcome(tables.one(tables.table("get_rows", "tokens", keys=keys)))
    assert [row and row["address"] for row in rows] == ["0xb", None, "0xa"]


@pytest.mark.parametrize(
    ("operation", "table", "params", "message"),
    [
        ("get_row", "tokenz", {"key": {"a": 1}}, "there is no table 'tokenz'; there are: tokens"),
        (
            "get_row",
            "tokens",
            {"key": {"adress": "0xa"}},
            "no row of table tokens has a field adress; there are: address, chain, supply, symbol",
        ),
        (
            "get_row",
            "tokens",
            {"key": {"address": {}}},
            "table tokens: a key value is text, a number, true, false or null, not an object",
        ),
        (
            "get_row",
            "tokens",
            {"key": {}},
            "table tokens: a key is an object with at least one field, not an object",
        ),
        (
            "upsert_rows",
            "tokens",
            {"rows": []},
            "upsert_rows: tables of backends.blockdb.memory are read-only and have get_row and "
            "get_rows alone; use backends.blockdb.path or .url for a table store",
        ),
    ],
)
def test_what_cannot_be_answered_says_why(
    tables: Io, operation: str, table: str, params: dict[str, object], message: str
) -> None:
    reply = tables.one(tables.table(operation, table, **params))
    assert outcome(reply) == ("io_error", message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": \n', "rows.jsonl:2: not a row of table t: "),
        ('{"a": 1}\n[1]\n', "rows.jsonl:2: a row of table t must be a JSON object"),
        (None, "rows.jsonl: No such file or directory"),
    ],
)
def test_a_bad_file_stops_the_start_with_its_place(
    io: StartIo, tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(UsageError) as caught:
        io(blockdb={"memory": {"t": "rows.jsonl"}})
    assert message in str(caught.value)


def test_tables_in_memory_and_in_the_store_live_side_by_side(io: StartIo, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"k": 1, "v": "memory"}\n')
    service = io(blockdb={"path": "x.sqlite", "memory": {"t": "rows.jsonl"}})
    write = service.table("upsert_rows", table="u", key=["k"], rows=[{"k": 1, "v": "store"}])
    assert outcome(service.one(write)) is None
    reads = [service.table("get_row", table=name, key={"k": 1}) for name in ("t", "u")]
    assert [outcome(service.one(read)) for read in reads] == [
        {"k": 1, "v": "memory"},
        {"k": 1, "v": "store"},
    ]
    refused = service.table("upsert_rows", table="t", key=["k"], rows=[{"k": 2}])
    assert "read-only" in str(outcome(service.one(refused)))
