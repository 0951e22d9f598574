"""``blockx table load | dump | query`` as a user runs them, over each kind of store."""

import json

import pytest

pytestmark = pytest.mark.slow

BIG = 2**256 - 1


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def config(request):
    settings = {"path": "data/store.sqlite"}
    if request.param == "postgres":
        settings = request.getfixturevalue("postgres").settings()
    return f"backends: {json.dumps({'blockdb': settings})}"


@pytest.fixture
def store(product, config):
    product.write("def _(n):\n    return None\n", [], config=config)
    return product


def load(product, name, rows, *options):
    (product.folder / "rows.in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return product.run("table", "load", name, "rows.in", "--config", "config.yaml", *options)


def test_what_was_loaded_is_dumped_digit_for_digit_and_queried_with_sql(store):
    rows = [{"token": "0xa", "supply": BIG}, {"token": "0xb", "supply": -(2**255)}]
    loaded = load(store, "token", rows, "--key", "token")
    assert (loaded.code, "2 rows" in loaded.text) == (0, True)
    dumped = store.run("table", "dump", "token")
    assert [json.loads(line) for line in dumped.text.splitlines()] == rows
    catalogue = store.run("table", "query", "SELECT name, kind FROM blockx_tables")
    assert json.loads(catalogue.text) == {"name": "token", "kind": "table"}
    again = load(store, "token", [{"token": "0xa", "supply": 1}])
    assert again.code == 0
    assert f'"supply": {BIG}' not in store.run("table", "dump", "token").text


def test_states_by_block_are_loaded_and_read_by_a_function(store, config):
    rows = [
        {"key": {"pool": "p"}, "block": b, "state": {"fee": f}} for b, f in ((4, 30), (100, 25))
    ]
    assert load(store, "terms", rows, "--kind", "block").code == 0
    source = "def _(block):\n    return BlockTable('terms').get_state({'pool': 'p'}, block)\n"
    store.write(source, [[3], [4], [99], [100], [10**9]], config=config)
    ended = store.run()
    assert ended.outputs() == [None, {"fee": 30}, {"fee": 30}, {"fee": 25}, {"fee": 25}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("dump", "nowhere"), "has no table 'nowhere'"),
        (("query", "SELEC 1"), ""),
        (("load", "t", "missing.jsonl", "--key", "a"), "missing.jsonl"),
    ],
)
def test_a_mistake_gets_a_message_and_exit_code_2(store, arguments, expected):
    ended = store.run("table", *arguments)
    assert ended.code == 2
    assert expected in ended.text or "there is no table store" in ended.text
    assert "Traceback" not in ended.text


def test_a_line_that_is_no_row_names_its_place_and_loads_nothing(store):
    ended = load(store, "token", [{"token": "0xa"}, 5], "--key", "token")
    assert ended.code == 2
    assert "rows.in:2" in ended.text
    assert "0xa" not in store.run("table", "dump", "token").text


def test_without_a_store_the_verb_says_what_to_set(product):
    product.write("def _(n):\n    return None\n", [])
    ended = product.run("table", "dump", "token")
    assert (ended.code, "backends.blockdb.path" in ended.text) == (2, True)


def test_a_call_sees_what_it_wrote_and_the_next_run_sees_it_too(store, config):
    source = (
        "from blockdb import Table\n\n"
        "def _(n):\n"
        "    table = Table('seen', key=['n'])\n"
        "    before = table.get_row({'n': n})\n"
        "    table.upsert_rows([{'n': n, 'big': 2**256 - n}])\n"
        "    return {'before': before, 'after': table.get_row({'n': n})}\n"
    )
    store.write(source, [[n] for n in range(50)], config=config)
    first = store.run().outputs()
    assert first == [{"before": None, "after": {"n": n, "big": 2**256 - n}} for n in range(50)]
    second = store.run("--config", "config.yaml", "--fresh").outputs()
    assert second == [{"before": row["after"], "after": row["after"]} for row in first]


def test_a_query_makes_no_file_and_shows_only_what_is_exact(product):
    product.write(
        "def _(n):\n    return None\n", [], config="backends: {blockdb: {path: data/store.sqlite}}"
    )
    assert load(product, "t", [{"k": 1}], "--key", "k").code == 0
    attached = product.run("table", "query", "ATTACH 'other.sqlite' AS o")
    assert (attached.code, (product.folder / "other.sqlite").exists()) == (2, False)
    infinite = product.run("table", "query", "SELECT 1e999 AS x")
    assert (infinite.code, "$.x" in infinite.text) == (2, True), infinite.text
    assert "Traceback" not in infinite.text


def test_a_table_that_functions_read_from_memory_is_not_loaded_into_the_store(product):
    blockdb = "{path: data/store.sqlite, memory: {t: rows.in}}"
    (product.folder / "rows.in").write_text('{"k": 1}\n')
    product.write("def _(n):\n    return None\n", [], config=f"backends: {{blockdb: {blockdb}}}")
    ended = load(product, "t", [{"k": 1}], "--key", "k")
    assert (ended.code, "the table t is held in memory" in ended.text) == (2, True), ended.text
