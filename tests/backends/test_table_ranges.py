"""Scans, histories and rows by time, in each of the table stores."""

from typing import Any

import pytest

from blockx.backends import table_requests
from tests.backends.harness import Io, outcome


def ask(store: Io, operation: str, table: str, **params: Any) -> Any:
    return outcome(store.one(store.table(operation, table, **params)))


# ---- scan ----------------------------------------------------------------------------------------

ROWS = [
    {"a": a, "b": b, "n": 2**200}
    for a, b in [("x", 1), ("x", 10), ("x", 2), ("x,", 1), ("xy", 1), ("y", 1), ('x"', 1)]
]


def pairs(rows: Any) -> list[tuple[Any, Any]]:
    return [(row["a"], row["b"]) for row in rows]


def test_a_scan_finds_the_rows_of_a_prefix_and_no_others(store: Io) -> None:
    ask(store, "upsert_rows", "t", rows=ROWS, key=["a", "b"])
    found = ask(store, "scan", "t", prefix={"a": "x"})
    assert pairs(found) == [("x", 10), ("x", 1), ("x", 2)], "in the order of the text of the keys"
    assert found[0]["n"] == 2**200
    assert pairs(ask(store, "scan", "t", prefix={"b": 1, "a": "x"})) == [("x", 1)]
    assert pairs(ask(store, "scan", "t", prefix={"a": "z"})) == []
    assert len(ask(store, "scan", "t", prefix={})) == len(ROWS)
    assert pairs(ask(store, "scan", "t", prefix={}, limit=2)) == [("x", 10), ("x", 1)]


def test_a_number_is_no_prefix_of_a_longer_one(store: Io) -> None:
    rows = [{"n": n} for n in (1, 10, 1.5, -1, True, "1", 2**80)]
    ask(store, "upsert_rows", "t", rows=rows, key=["n"])
    assert ask(store, "scan", "t", prefix={"n": 1}) == [{"n": 1}]


def test_an_unknown_table_has_nothing_to_scan(store: Io) -> None:
    assert ask(store, "scan", "t", prefix={"a": 1}) == []


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"prefix": {"b": 1}}, "table t has the key a, b; a scan names its first columns, not b"),
        ({"prefix": {"a": 1, "c": 2}}, "table t has the key a, b; a scan names its first columns, not a, c"),
        ({"prefix": [1]}, "table t has the key a, b; a scan names its first columns, not an array"),
        ({"prefix": {}, "limit": 0}, "scan of table t: the limit is a whole number from 1 to 10000, not 0"),
        ({"prefix": {}, "limit": 10_001}, "scan of table t: the limit is a whole number from 1 to 10000, not 10001"),
    ],
)  # fmt: skip
def test_a_wrong_scan_is_refused(store: Io, params: Any, text: str) -> None:
    ask(store, "upsert_rows", "t", rows=ROWS, key=["a", "b"])
    assert ask(store, "scan", "t", **params) == ("io_error", text)


# ---- histories -----------------------------------------------------------------------------------


def test_a_history_has_the_versions_between_two_blocks_oldest_first(store: Io) -> None:
    states = [
        {"key": {"k": k}, "block": block, "state": {"v": 2**100 + block}}
        for k in ("a", "b")
        for block in (30, 10, 20)
    ]
    ask(store, "upsert_states", "s", rows=states)
    whole = [{"block": n, "state": {"v": 2**100 + n}} for n in (10, 20, 30)]
    assert ask(store, "get_history", "s", key={"k": "a"}) == whole
    assert ask(store, "get_history", "s", key={"k": "a"}, **{"from": 11, "to": 20}) == whole[1:2]
    assert ask(store, "get_history", "s", key={"k": "a"}, to=20) == whole[:2]
    assert ask(store, "get_history", "s", key={"k": "a"}, limit=1) == whole[:1]
    assert ask(store, "get_history", "s", key={"k": "z"}) == []
    assert ask(store, "get_history", "other", key={"k": "z"}) == []


@pytest.mark.parametrize(
    "moments",
    [
        (9, 20.5, 100),
        ("2020-01-01T00:00:00Z", "2020-01-02T03:00:00+01:00", "2021-01-01T00:00:00Z"),
    ],
)
def test_rows_by_time_are_written_and_read(store: Io, moments: tuple[Any, ...]) -> None:
    rows = [{"key": {"k": 1}, "at": at, "row": {"n": n}} for n, at in enumerate(moments)]
    assert ask(store, "upsert_rows_at", "t", rows=rows[::-1]) is None
    assert ask(store, "get_row_at", "t", key={"k": 1}, at=moments[1]) == {"n": 1}
    found = ask(store, "get_history_at", "t", key={"k": 1}, **{"from": moments[1]})
    assert [version["row"] for version in found] == [{"n": 1}, {"n": 2}]
    if not isinstance(moments[0], str):
        assert [version["at"] for version in found] == [20.5, 100]


def test_an_upsert_by_time_replaces_the_row_of_its_moment(store: Io) -> None:
    for value in (1, 2):
        rows = [{"key": {"k": 1}, "at": 5, "row": {"n": value}}]
        ask(store, "upsert_rows_at", "t", rows=rows)
    assert ask(store, "get_history_at", "t", key={"k": 1}) == [{"at": 5, "row": {"n": 2}}]


def test_numbers_and_texts_as_moments_do_not_mix(store: Io) -> None:
    ask(store, "upsert_rows_at", "t", rows=[{"key": {"k": 1}, "at": 5, "row": {}}])
    text = {"key": {"k": 1}, "at": "2020-01-01T00:00:00Z", "row": {}}
    for params in ({"rows": [text]}, {"rows": [{**text, "at": 6}, text]}):
        kind, message = ask(store, "upsert_rows_at", "t", **params)
        assert (kind, message) == ("io_error", "table t has numbers as `at`, not RFC 3339 texts")
    kind, _ = ask(store, "get_history_at", "t", key={"k": 1}, to="2020-01-01T00:00:00Z")
    assert kind == "io_error"
    assert len(ask(store, "get_history_at", "t", key={"k": 1})) == 1


def test_a_table_is_read_as_the_kind_that_it_is(store: Io) -> None:
    ask(store, "upsert_rows", "t", rows=ROWS, key=["a", "b"])
    message = ask(store, "get_history", "t", key={"a": 1, "b": 1})
    assert message == ("io_error", "table t is a Table, not a BlockTable")


# ---- many at once --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8, 9, 64, 65, 300])
def test_point_reads_of_a_turn_are_answered_together_and_each_with_its_own(
    store: Io, count: int
) -> None:
    rows = [{"id": n, "v": 2**70 + n} for n in range(0, count, 2)]
    ask(store, "upsert_rows", "t", rows=rows, key=["id"])
    ask(store, "upsert_rows", "u", rows=[{"id": 0, "v": "u"}], key=["id"])
    requests = [store.table("get_row", "t", key={"id": n}) for n in range(count)]
    requests += [
        store.table("get_row", "u", key={"id": 0}),
        store.table("get_row", "t", key={"other": 0}),
        store.table("get_row", "t", key={"id": 0}),
    ]
    answers = [outcome(reply) for reply in store.ask(*requests)]
    even = [{"id": n, "v": 2**70 + n} if n % 2 == 0 else None for n in range(count)]
    assert answers[:count] == even
    assert answers[count] == {"id": 0, "v": "u"}
    assert answers[count + 1][0] == "io_error"
    assert answers[count + 2] == even[0]


def test_an_answer_too_long_for_a_frame_fails_that_read_alone(
    store: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_requests, "RESULT_BYTES_MAX", 100)
    rows = [{"id": 1, "v": "x" * 200}, {"id": 2}]
    ask(store, "upsert_rows", "t", rows=rows, key=["id"])
    long, short = store.ask(*[store.table("get_row", "t", key={"id": n}) for n in (1, 2)])
    assert (outcome(long)[0], outcome(short)) == ("io_error", {"id": 2})
