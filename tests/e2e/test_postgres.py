"""Jobs over tables in PostgreSQL, as a user runs them."""

import json

import pytest

from tests.postgres import PASSWORD

pytestmark = [pytest.mark.slow, pytest.mark.postgres]
BIG = 2**256 - 1


@pytest.fixture
def settings(postgres):
    return postgres.settings()


@pytest.fixture
def config(settings):
    tables = {"out": {"key": ["n"]}}
    return f"backends: {json.dumps({'blockdb': {**settings, 'tables': tables}})}"


READER = """
from blockdb import BlockTable, Table

def _(row):
    n = row["n"]
    fee = BlockTable("fees").get_state({"pool": "p"}, n)
    neighbours = Table("numbers").get_rows([{"n": n - 1}, {"n": n + 1}])
    return {"n": n, "big": row["big"], "fee": fee and fee["fee"], "sides": [r and r["n"] for r in neighbours]}
"""


def test_a_job_reads_its_calls_and_tables_and_writes_its_rows_in_the_database(
    product, postgres, settings, config
):
    job = ", output: 'table:out'"
    product.write(READER, [], config=config)
    text = (product.folder / "config.yaml").read_text().replace(", output: rows.jsonl", job)
    text = text.replace("calls: calls.jsonl", "calls: {table: numbers}")
    (product.folder / "config.yaml").write_text(text)
    numbers = [{"n": n, "big": BIG - n} for n in range(300)]
    (product.folder / "in.jsonl").write_text("".join(json.dumps(n) + "\n" for n in numbers))
    assert product.run("table", "load", "numbers", "in.jsonl", "--key", "n").code == 0
    fees = [{"key": {"pool": "p"}, "block": b, "state": {"fee": b}} for b in (10, 100)]
    (product.folder / "in.jsonl").write_text("".join(json.dumps(fee) + "\n" for fee in fees))
    assert product.run("table", "load", "fees", "in.jsonl", "--kind", "block").code == 0
    ended = product.run()
    assert ended.code == 0, ended.text
    dumped = product.run("table", "dump", "out").text.splitlines()
    assert sorted([json.loads(line) for line in dumped], key=lambda row: row["n"]) == [
        {
            "n": n,
            "big": BIG - n,
            "fee": None if n < 10 else 10 if n < 100 else 100,
            "sides": [n - 1 if n else None, n + 1 if n < 299 else None],
        }
        for n in range(300)
    ]
    with postgres.session() as session:
        sql = f"SELECT max((row->>'big')::numeric) FROM {settings['schema']}.out"
        assert int(session.run(sql)[0][0]) == BIG


READS_ON = """
import pathlib, time
from blockdb import Table

def _(n):
    for i in range(20):
        assert Table("t").get_row({"n": n})["v"] == n
        pathlib.Path("BEGUN").touch()
        time.sleep(0.02)
    Table("t").upsert_rows([{"n": n, "v": -n}])
    return n
"""


@pytest.mark.spawn_modes("process")  # its function tells by a file that it has begun
def test_a_database_that_crashes_and_comes_back_costs_no_call(product, postgres, config):
    begun = product.folder / "begun"
    product.write(READS_ON.replace("BEGUN", str(begun)), [[n] for n in range(200)], config=config)
    rows = "".join(f'{{"n":{n},"v":{n}}}\n' for n in range(200))
    (product.folder / "in.jsonl").write_text(rows)
    assert product.run("table", "load", "t", "in.jsonl", "--key", "n").code == 0
    process = product.start()
    product.until(begun.exists, "a call has read")
    postgres.kill()
    postgres.start()
    ended = product.finish(process)
    assert (ended.code, ended.outputs()) == (0, list(range(200))), ended.text
    dumped = [json.loads(line) for line in product.run("table", "dump", "t").text.splitlines()]
    assert sorted(row["v"] for row in dumped) == list(range(-199, 1))


SEARCHES_ITSELF = r"""
import re
from blockdb import Table

def _(n):
    Table("t", key=["n"]).get_row({"n": n})
    secret = re.compile(b"the-[p]assw0rd")  # not the word itself, which would find itself
    found = []
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            place, rights = line.split()[:2]
            if rights.startswith("rw"):
                begin, end = (int(part, 16) for part in place.split("-"))
                memory.seek(begin)
                try:
                    found += secret.findall(memory.read(end - begin))
                except OSError:  # a page that only the kernel reads
                    pass
    return len(found)
"""


@pytest.mark.spawn_modes("process")  # elsewhere it cannot look into itself: there is no /proc
def test_the_password_is_in_no_executor_and_in_nothing_that_is_shown(product, settings, config):
    product.write(SEARCHES_ITSELF, [[1]], config=f"{config}\nlog: {{level: debug}}")
    texts = [product.run("check").text]
    ended = product.run()
    assert ended.outputs() == [0], ended.text
    texts.append(ended.text)
    wrong = (product.folder / "config.yaml").read_text().replace(PASSWORD, f"{PASSWORD}-not")
    (product.folder / "config.yaml").write_text(wrong)
    for arguments in ([], ["table", "dump", "t"]):
        refused = product.run(*arguments, *([] if arguments else ["--fresh"]))
        assert (refused.code, "user or password is refused" in refused.text) == (2, True)
        texts.append(refused.text)
    left = [path for path in product.folder.rglob("*") if path.is_file()]
    texts += [p.read_bytes().decode(errors="replace") for p in left if p.name != "config.yaml"]
    assert [text for text in texts if PASSWORD in text] == []
