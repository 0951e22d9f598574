"""Jobs that survive: signals, kills, a full disk, and the flags of the command line, from outside."""

import http.server
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.e2e.conftest import LAUNCHER
from tests.e2e.sources import STORE, TALLY

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COUNTED = (
    "import time\n" + TALLY + "\n"
    "def _(n):\n    tally()\n    time.sleep(0.01)\n    return {'n': n}\n"
)
FEW_AT_ONCE = "dispatcher: {executor_max_inflight: 4}\n"
CONFIG = FEW_AT_ONCE + STORE


def write(product, calls=400, **options):
    return product.write(COUNTED, [[n] for n in range(calls)], config=CONFIG, **options)


def stop_after(product, bodies, number):
    """Run until so many bodies have started, then send a signal."""
    process = product.start()
    product.until(lambda: product.bodies() >= bodies, "bodies started")
    process.send_signal(number)
    return product.finish(process)


@pytest.mark.parametrize(
    ("number", "code", "why"),
    [
        (signal.SIGINT, 130, "stopped by SIGINT"),
        (signal.SIGTERM, 143, "stopped by SIGTERM"),
        (signal.SIGKILL, -9, "killed"),
    ],
)
def test_a_run_that_was_ended_is_resumed_by_the_same_command(product, number, code, why):
    write(product)
    ended = stop_after(product, 100, number)
    assert ended.code == code
    assert not (product.folder / "results.jsonl").exists()
    again = product.run()
    assert (again.code, again.outputs()) == (0, [{"n": n} for n in range(400)])
    assert (
        f"({why}); to begin anew: python blockx.py --config config.yaml --job case --fresh"
        in again.text
    )
    assert again.job()["resumed"] >= 90 if number != signal.SIGKILL else again.job()["resumed"] > 0
    # What ran when it was killed, and what had ended within the last 20 ms, runs again; no more.
    assert product.bodies() - 400 <= 100
    numbers = again.report()
    skipped = product.run()
    assert "job case: finished, all calls are ok" in skipped.text
    assert skipped.report()["jobs"] == numbers["jobs"]
    assert product.bodies() - 400 <= 100


def test_a_killed_run_loses_only_the_last_moments(product):
    """One call at a time: all but the last few are in the journal, whenever main is killed."""
    write(product, executors=1, job=", max_inflight: 1")
    stop_after(product, 60, signal.SIGKILL)
    started = product.bodies()
    again = product.run("--config", "config.yaml", "--limit", "1")
    assert again.job()["resumed"] >= started - 12


def test_kills_at_random_moments_lose_and_double_nothing(product):
    """Ten of the kills of ``perf/kill_test.py``; a hundred take minutes."""
    command = [
        sys.executable,
        str(ROOT / "perf" / "kill_test.py"),
        "--kills",
        "10",
        "--calls",
        "500",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no difference" in done.stdout


def test_a_full_disk_ends_the_job_clearly_and_it_resumes_once_there_is_room(product):
    source = "import time\n\ndef _(n):\n    time.sleep(0.01)\n    return {'n': n}\n"
    product.write(source, [[n] for n in range(300)], config=FEW_AT_ONCE)
    # Writes beyond 20 kB of a file fail, as they would on a full disk. Python ignores SIGXFSZ.
    script = f"ulimit -f 40; exec {sys.executable} {LAUNCHER} --config config.yaml"
    process = subprocess.Popen(
        ["sh", "-c", script],
        cwd=product.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(product.folder.parent / "t"), **product.environment},
    )
    product.started.append(process)
    ended = product.finish(process)
    assert ended.code == 1, ended.text
    assert "results.jsonl.journal: cannot be written: File too large" in ended.text
    assert "free the disk or name another file, then run again" in ended.text
    assert not (product.folder / "results.jsonl").exists()
    assert not list(product.folder.glob("*.partial"))
    again = product.run()
    assert (again.code, again.outputs()) == (0, [{"n": n} for n in range(300)])
    assert again.job()["resumed"] > 20


def test_failed_calls_are_merged_into_the_results(product):
    source = (
        "from blockx_sdk import db\n\ndef _(n):\n    if n == 3 and db.get('mended', {'n': n}) is None:\n"
        "        raise ValueError(n)\n    return {'n': n}\n"
    )
    mended = product.folder / "mended.jsonl"
    mended.write_text('{"n": 2}\n')
    product.write(
        source,
        [[n] for n in range(10)],
        config="backends: {blockdb: {memory: {mended: mended.jsonl}}}",
    )
    assert product.run().code == 1
    mended.write_text('{"n": 3}\n')
    ended = product.run("--config", "config.yaml", "--retry-failed")
    assert (ended.code, ended.outputs()) == (0, [{"n": n} for n in range(10)])
    assert (ended.job()["calls"], ended.job()["resumed"], ended.job()["executed"]) == (10, 9, 10)
    assert ended.lines("failures.jsonl") == []


def test_a_function_that_a_call_reached_is_named_when_it_has_changed(product):
    child = {"child": "def _(n):\n    return n\n"}
    source = COUNTED.replace("{'n': n}", "{'n': function.call('child', n)}")
    product.write(
        "from blockx import function\n" + source,
        [[n] for n in range(400)],
        config=CONFIG,
        children=child,
    )
    stop_after(product, 100, signal.SIGINT)
    (product.folder / "functions" / "child.py").write_text("def _(n):\n    return -n\n")
    refused = product.run()
    assert refused.code == 1
    assert "but function child has changed; to keep them" in refused.text
    assert not (product.folder / "results.jsonl").exists()
    ended = product.run("--config", "config.yaml", "--resume-anyway")
    outputs = [row["n"] for row in ended.outputs()]
    assert [abs(n) for n in outputs] == list(range(400))
    assert 0 < sum(n < 0 for n in outputs) < 400


def test_a_dry_run_writes_nothing_and_says_what_a_run_would_do(product):
    source = (
        "from blockdb import Table\n\ndef _(n):\n    if n % 2:\n"
        "        Table('t', key=['n']).upsert_rows([{'n': n}])\n    return {'n': n}\n"
    )
    product.write(
        source, [[n] for n in range(50)], config="backends: {blockdb: {path: store.sqlite}}"
    )
    before = sorted(path.name for path in product.folder.iterdir())
    ended = product.run("--config", "config.yaml", "--dry-run")
    assert ended.code == 1
    assert "job case: new, 50 calls (case 50), 0 of them finished, 50 would run" in ended.text
    assert "a sample of 20 calls: 10 ok, 10 failed; no call asked a node" in ended.text
    assert sorted(path.name for path in product.folder.iterdir()) == before


@pytest.mark.spawn_modes("process")  # its function tells by a file, since a dry run writes none
def test_a_dry_run_reads_what_is_known_to_be_a_read_and_refuses_the_rest(product):
    source = (
        "import json\nfrom blockx import capability, http\nfrom blockx.errors import ReadError\n\n"
        "def asked(ask):\n    try:\n        return ask()\n"
        "    except ReadError as error:\n        return str(error)\n\n"
        "def _(url, seen):\n"
        "    got = [asked(lambda: http.get(url).status), asked(lambda: http.post(url).status)]\n"
        "    got += [asked(lambda: capability(name).ask('/p.S/M')) for name in ('free', 'plain')]\n"
        "    open(seen, 'w').write(json.dumps(got))\n"
    )
    methods = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            methods.append(self.command)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        grpc = "kind: grpc, options: {target: '127.0.0.1:9'}"  # nobody listens there
        product.write(
            source,
            [[url, str(product.folder / "seen")]],
            config="run: {io_wait_max_ms: 0}\nbackends: {http: {hosts: [127.0.0.1]}, capabilities: "
            f"{{free: {{{grpc}, reads_only: true}}, plain: {{{grpc}}}}}}}",
        )
        ended = product.run("--config", "config.yaml", "--dry-run")
        server.shutdown()
    assert "a sample of 1 calls: 1 ok, 0 failed" in ended.text, ended.text
    got, posted, free, plain = json.loads((product.folder / "seen").read_text())
    assert (got, methods) == (204, ["GET"])
    assert "POST: a dry run only reads" in posted
    assert "UNAVAILABLE" in free
    assert "a dry run only reads; backends.capabilities.plain.reads_only: true" in plain


def test_jobs_side_by_side_share_the_executors(product):
    """Each waits for the other's first call: in turn they would never end."""
    source = (
        "import time\nfrom blockdb import Table\n\ndef _(mine, other):\n    seen = Table('seen', key=['who'])\n"
        "    seen.upsert_rows([{'who': mine}])\n    while seen.get_row({'who': other}) is None:\n"
        "        time.sleep(0.01)\n    return {'mine': mine}\n"
    )
    product.write(source, [])
    (product.folder / "config.yaml").write_text(
        f"{STORE}\nworker: {{executor_count: 2}}\nparallel: true\nreport: report.json\njobs:\n"
        "  - {name: a, function: case, calls: [[here, there]], results: a.jsonl}\n"
        "  - {name: b, function: case, calls: [[there, here]], results: b.jsonl}\n"
    )
    ended = product.run()
    assert ended.code == 0, ended.text
    assert [job["name"] for job in ended.report()["jobs"]] == ["a", "b"]


def test_sources_and_sinks_from_end_to_end(product):
    product.write("def _(token, block):\n    return {'token': token, 'n': 2**255 + block}\n", [])
    (product.folder / "tokens.csv").write_text("token,block\n0xa,7\n0xb,8\n")
    (product.folder / "config.yaml").write_text(
        "worker: {executor_count: 1}\nreport: report.json\n"
        "backends: {blockdb: {path: store.sqlite, tables: {out: {key: [token]}}}}\njobs:\n"
        "  - {name: one, function: case, calls: {csv: tokens.csv, types: {block: int}, args: [token, block]},\n"
        "     output: one.sqlite}\n"
        "  - {name: two, function: case, output: 'table:out',\n"
        "     calls: {sqlite: one.sqlite, query: 'SELECT token, 1 AS block FROM rows ORDER BY token',\n"
        "             args: [token, block]}}\n"
        "  - {name: three, function: case, calls: {table: out, args: [token, {value: 2}]}, output: three.csv}\n"
    )
    ended = product.run()
    assert ended.code == 0, ended.text
    with sqlite3.connect(product.folder / "one.sqlite") as db:
        assert db.execute("SELECT * FROM rows").fetchall() == [
            ("0xa", str(2**255 + 7)),
            ("0xb", str(2**255 + 8)),
        ]
    db.close()
    assert (product.folder / "three.csv").read_text() == (
        f"token,n\n0xa,{2**255 + 2}\n0xb,{2**255 + 2}\n"
    )
    with sqlite3.connect(product.folder / "store.sqlite") as db:
        rows = [json.loads(row) for (row,) in db.execute('SELECT row FROM "out" ORDER BY key')]
    db.close()
    assert rows == [{"token": t, "n": 2**255 + 1} for t in ("0xa", "0xb")]
