"""The configuration is checked as a whole, before anything runs, and every mistake has its place."""

import ast
import re
from pathlib import Path

import pytest

from blockx import config as config_module
from blockx.config import ENVIRONMENT, Config, describe, load_config
from blockx.errors import UsageError
from blockx.redact import redact_database_url


def load(tmp_path, text, environ=None):
    (tmp_path / "c.yaml").write_text(text)
    return load_config(tmp_path / "c.yaml", environ or {})


def mistakes(tmp_path, text, environ=None):
    """The lines of the message, without the folder."""
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text, environ)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def job(more="", name="j"):
    return f"{{name: {name}, function: f, calls: c.jsonl{more}}}"


@pytest.mark.parametrize("text", ["", "# all defaults\n", "{}", "\ufeffjobs: []"])
def test_an_empty_file_is_all_defaults(tmp_path, text):
    loaded = load(tmp_path, text)
    assert loaded.config == Config()
    assert (loaded.file, loaded.folder) == (tmp_path / "c.yaml", tmp_path)


def test_values_keep_what_was_written(tmp_path):
    big = 2**256 - 1
    config = load(tmp_path, f"jobs: [{{name: j, calls: [0x12, {big}, 1e3, on, null]}}]").config
    assert config.jobs[0].calls == ["0x12", big, 1000.0, "on", None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "dispatcher:\n  call_deadline: 5",
            "c.yaml:2:3: unknown key dispatcher.call_deadline;"
            " did you mean dispatcher.call_deadline_ms?",
        ),
        (
            "run: {x: 1}",
            "c.yaml:1:7: unknown key run.x;"
            " known keys: grace_ms, io_wait_max_ms, journal, reorder_memory_bytes",
        ),
        (
            "worker: {executor_count: 0}",
            "c.yaml:1:26: worker.executor_count: expected a whole number from 1 to 256, got 0",
        ),
        (
            "worker: {executor_count: 012}",
            "c.yaml:1:26: worker.executor_count: expected a whole number from 1 to 256,"
            " got the text '012'",
        ),
        (
            "worker: {executor_count: 2.0}",
            "c.yaml:1:26: worker.executor_count: expected a whole number from 1 to 256, got 2.0",
        ),
        (
            "worker: {executor_count: true}",
            "c.yaml:1:26: worker.executor_count: expected a whole number from 1 to 256, got true",
        ),
        (
            "dispatcher: {share_results: yes}",
            "c.yaml:1:29: dispatcher.share_results: expected true or false, got the text 'yes'",
        ),
        (
            f"run: {{grace_ms: {10**30}}}",
            "c.yaml:1:17: run.grace_ms: expected a whole number from 0 to 31536000000,"
            f" got {10**30}",
        ),
        (
            "worker: {attach: pol}",
            "c.yaml:1:18: worker.attach: expected pool or same_uid, got the text 'pol'",
        ),
        ("worker: [1]", "c.yaml:1:9: worker: expected keys with values, got a list of 1"),
        ("worker:", "c.yaml:1:8: worker: expected keys with values, got nothing"),
        ("[1]", "c.yaml:1:1: the file: expected keys with values, got a list of 1"),
        ("jobs: {}", "c.yaml:1:7: jobs: expected a list, got keys with values"),
        ("jobs:\n  - calls: c", "c.yaml:2:5: jobs[0] has no name; add it"),
        (
            "jobs: [{name: a/b, calls: c}]",
            "c.yaml:1:15: jobs[0].name: expected a name without spaces, / and @,"
            " got the text 'a/b'",
        ),
        (
            "jobs: [{name: a, calls: 5}]",
            "c.yaml:1:25: jobs[0].calls: expected the name of a file or a list of calls, got 5",
        ),
        (
            "jobs: [{name: a, calls: c, call_deadline_ms: x}]",
            "c.yaml:1:46: jobs[0].call_deadline_ms: expected a whole number from 0 to 31536000000,"
            " got the text 'x'",
        ),
        (
            "backends: {rpc: {dev: {urls: []}}}",
            "c.yaml:1:30: backends.rpc.dev.urls: expected a list of 1 to 32 entries,"
            " got a list of 0",
        ),
        (
            "backends: {rpc: {dev: {urls: [http://a, 3]}}}",
            "c.yaml:1:41: backends.rpc.dev.urls[1]: expected text, got 3",
        ),
        (
            "backends: {blockdb: {memory: {t: [x]}}}",
            "c.yaml:1:34: backends.blockdb.memory.t: expected text, got a list of 1",
        ),
        (
            "backends: {blockdb: {tables: {t: {}}}}",
            "c.yaml:1:34: backends.blockdb.tables.t has no key; add it",
        ),
        ("log: {level: 'x", "c.yaml:1:16: not valid YAML: found unexpected end of stream"),
    ],
)
def test_a_value_of_the_wrong_shape_is_refused(tmp_path, text, message):
    found = mistakes(tmp_path, text)
    assert len(found) == 1
    assert found[0].startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "worker: {heartbeat_timeout_ms: 10000}",
            "c.yaml:1:32: worker.heartbeat_timeout_ms: 10000 ms would call an executor lost before"
            " it counts as stuck (10000 ms, see dispatcher.scheduler_stall_timeout_ms);"
            " use more, or 0",
        ),
        (
            "worker: {heartbeat_timeout_ms: 1000}\ndispatcher: {call_deadline_ms: 0}",
            "c.yaml:1:32: worker.heartbeat_timeout_ms: 1000 ms is not longer than one"
            " worker.heartbeat_interval_ms (1000 ms); use several intervals, or 0",
        ),
        (
            f"jobs: [{job(', call_deadline_ms: 9000')}]",
            "c.yaml:1:65: jobs[0].call_deadline_ms: calls may run 9000 ms, but an executor counts"
            " as stuck after 10000 ms; set dispatcher.scheduler_stall_timeout_ms to more than 10000",
        ),
        (
            f"jobs: [{job(', call_deadline_ms: 0')}]",
            "c.yaml:1:65: jobs[0].call_deadline_ms: calls may run without limit, but an executor"
            " counts as stuck after 10000 ms, derived from dispatcher.call_deadline_ms;"
            " set dispatcher.scheduler_stall_timeout_ms to the time you mean",
        ),
        (
            "backends: {blockdb: {path: a, memory: {t: b}, tables: {t: {key: [k]}}}}",
            "c.yaml:1:56: the table t is held in memory; it needs no key here",
        ),
        (
            "backends: {blockdb: {path: a, url: 'grpc://h:1'}}",
            "c.yaml:1:28: backends.blockdb.path: there is a backends.blockdb.url too; name one store",
        ),
        *[
            (
                f"backends: {{blockdb: {{url: '{url}'}}}}",
                "c.yaml:1:27: backends.blockdb.url: expected grpc://host:port or grpcs://host:port",
            )
            for url in (
                "grpc://h",
                "grpc://:1",
                "grpc://h:x",
                "grpc://u@h:1",
                "grpc://h:1/p",
                "grpc://[h:1",
            )
        ],
        (
            "backends: {blockdb: {url: 'grpc://h:1', tables: {t: {key: [k]}}}}",
            "c.yaml:1:41: backends.blockdb.tables: keys are declared in the configuration of the table server",
        ),
        (
            f"backends: {{blockdb: {{url: 'grpc://h:1'}}}}\njobs: [{job(', output: table:t')}]",
            "c.yaml:2:55: jobs[0].output: table:t needs backends.blockdb.path; tables of a table server are"
            " written by functions (upsert_rows)",
        ),
        (
            f"backends: {{blockdb: {{url: 'grpc://h:1'}}}}\njobs: [{job().replace('c.jsonl', '{table: t}')}]",
            "c.yaml:2:38: jobs[0].calls: {table: t} needs backends.blockdb.path; where the table server has its"
            " file, `blockx table dump t` writes a list",
        ),
        (
            "backends: {rpc: {dev: {urls: ['ftp://x']}}}",
            "c.yaml:1:31: backends.rpc.dev.urls[0]: expected an http:// or https:// url with a host",
        ),
        (
            "backends: {rpc: {dev: {urls: ['http://x:port']}}}",
            "c.yaml:1:31: backends.rpc.dev.urls[0]: expected an http:// or https:// url with a host",
        ),
        (
            f"jobs:\n  - {job()}\n  - {job()}",
            "c.yaml:3:12: jobs[0] has the name 'j' too; names must differ",
        ),
        (
            f"jobs: [{job(', after: [x]')}]",
            "c.yaml:1:54: jobs[0].after: there is no job 'x'",
        ),
        (
            f"jobs: [{job(', after: [j]')}]",
            "c.yaml:1:54: jobs[0].after: j would wait for itself",
        ),
        (
            f"jobs: [{job(', results: o.jsonl, output: ./o.jsonl')}]",
            "c.yaml:1:73: jobs[0].output: ./o.jsonl is jobs[0].results already; name another file",
        ),
        (
            f"jobs: [{job(', results: r.jsonl')}, {job(', results: x/../r.jsonl', name='k')}]",
            "c.yaml:1:114: jobs[1].results: x/../r.jsonl is jobs[0].results already;"
            " name another file",
        ),
        (
            f"jobs: [{job(', failures: c.jsonl')}]",
            "c.yaml:1:57: jobs[0].failures: c.jsonl is the call list of job j already;"
            " name another file",
        ),
        (
            f"jobs: [{job()}, {job(', results: c.jsonl', name='k').replace('c.jsonl,', 'd.jsonl,')}]",
            "c.yaml:1:96: jobs[1].results: c.jsonl is the call list of job j already;"
            " name another file",
        ),
        (
            "report: c.yaml",
            "c.yaml:1:9: report: c.yaml is the configuration itself already; name another file",
        ),
        (
            "backends: {blockdb: {memory: {t: t.jsonl}}}\nreport: t.jsonl",
            "c.yaml:2:9: report: t.jsonl is the table t already; name another file",
        ),
        (
            "backends: {blockdb: {path: t.sqlite}}\nreport: t.sqlite",
            "c.yaml:2:9: report: t.sqlite is the table store already; name another file",
        ),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(tmp_path, text, message):
    assert mistakes(tmp_path, text) == [message]


def test_a_later_job_may_read_what_an_earlier_one_writes(tmp_path):
    first = job(", failures: f.jsonl")
    load(tmp_path, f"jobs: [{first}, {{name: again, calls: f.jsonl}}]")


def test_all_mistakes_are_told_at_once_and_many_are_counted(tmp_path):
    text = "\n".join(f"- {{name: j{n}, calls: c, x: 1}}" for n in range(25))
    found = mistakes(tmp_path, f"jobs:\n{text}")
    assert len(found) == 21
    assert found[19].startswith("c.yaml:21:25: unknown key jobs[19].x; ")
    assert found[20] == "and 5 more mistakes"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _path: None, "c.yaml: no such file; name the configuration with --config"),
        (lambda path: path.mkdir(), "c.yaml: cannot be read: Is a directory"),
        (
            lambda path: path.write_bytes(b"a: 1\nb: \xff"),
            "c.yaml:2: not UTF-8 text: invalid start byte; save the file as UTF-8",
        ),
        (
            lambda path: path.write_bytes(b"#" * (16 * 1024 * 1024 + 1)),
            "c.yaml: larger than 16,777,216 bytes; put long call lists into a file of their own",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_told(tmp_path, make, message):
    make(tmp_path / "c.yaml")
    with pytest.raises(UsageError) as caught:
        load_config(tmp_path / "c.yaml", {})
    assert str(caught.value) == f"{tmp_path}/{message}"


# ---- the environment --------------------------------------------------------------------------------


def test_every_variable_that_the_structs_name_overrides_its_key():
    """The docstrings below the fields are the reference; the table must say the same."""
    named = {}
    for node in ast.parse(Path(config_module.__file__).read_text()).body:
        if isinstance(node, ast.ClassDef):
            for before, after in zip(node.body, node.body[1:], strict=False):
                text = ast.unparse(after).replace("\\n", " ")
                if found := re.search(r"Environment:\s+([A-Z_]+)", text):
                    assert isinstance(before, ast.AnnAssign)
                    named[found[1]] = ast.unparse(before.target)
    assert named == {name: key for name, (_section, key) in ENVIRONMENT.items()}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("EXECUTOR_COUNT", "3", 3),
        ("EXECUTOR_SPAWN_MODE", "process", "process"),
        ("CALL_RETRY_MAX_ATTEMPTS", " 5 ", 5),
        ("EXECUTOR_SELECTION_SAMPLE_SIZE", "2", 2),
        ("CALL_DEADLINE_MS", "0", 0),
        ("SCHEDULER_STALL_TIMEOUT_MS", "60000", 60_000),
        ("DISPATCH_INSTANCE_FAIRNESS", "true", "calls"),
        ("DISPATCH_INSTANCE_FAIRNESS", "calls", "calls"),
        ("DISPATCH_INSTANCE_FAIRNESS", "False", "off"),
        ("DISPATCH_INSTANCE_FAIRNESS_QUANTUM", "8", 8),
        ("MAX_COLLECTED_OUTPUT_BYTES", "1000", 1_000),
        ("EXECUTOR_TASK_SLOTS", "7", 7),
        ("BLOCKX_LOG_LEVEL", "debug", "debug"),
    ],
)
def test_the_environment_wins_over_the_file(tmp_path, name, text, value):
    section, key = ENVIRONMENT[name]
    config = load(tmp_path, "worker: {executor_count: 2}", {name: text, "UNRELATED": "x"}).config
    assert getattr(getattr(config, section), key) == value


def test_an_empty_variable_is_not_set(tmp_path):
    assert (
        load(
            tmp_path, "worker: {executor_count: 2}", {"EXECUTOR_COUNT": ""}
        ).config.worker.executor_count
        == 2
    )


@pytest.mark.parametrize("text", ["0", "x", "1.5", "9" * 30, "true"])
def test_a_variable_with_a_wrong_value_is_named(tmp_path, text):
    assert mistakes(tmp_path, "", {"EXECUTOR_COUNT": text}) == [
        "environment variable EXECUTOR_COUNT (overrides worker.executor_count):"
        f" expected a whole number from 1 to 256, got the text '{text}'"
    ]


def test_limits_are_checked_against_each_other_after_the_environment(tmp_path):
    text = "worker: {heartbeat_timeout_ms: 11000}"
    load(tmp_path, text)
    [message] = mistakes(tmp_path, text, {"CALL_DEADLINE_MS": "60000"})
    assert "11000 ms would call an executor lost before it counts as stuck (65000 ms" in message


# ---- showing it -------------------------------------------------------------------------------------


def test_the_effective_configuration_is_itself_a_configuration(tmp_path):
    environ = {"CALL_DEADLINE_MS": "7000"}
    loaded = load(
        tmp_path, f"backends: {{rpc: {{dev: {{urls: ['http://a:1']}}}}}}\njobs: [{job()}]", environ
    )
    text = describe(loaded, environ)
    assert text.splitlines()[:4] == [
        f"# effective configuration of {tmp_path}/c.yaml",
        "# an executor counts as stuck after: 12000 ms",
        "# an executor counts as lost after: 17000 ms of silence",
        "# dispatcher.call_deadline_ms comes from CALL_DEADLINE_MS",
    ]
    assert load(tmp_path, text).config == loaded.config


def test_no_credentials_are_shown(tmp_path):
    url = "https://user:secret@node.example:8545/v3/0123456789abcdef?key=hidden"
    text = describe(load(tmp_path, f"backends: {{rpc: {{dev: {{urls: ['{url}']}}}}}}"), {})
    assert "https://node.example:8545/***\n" in text
    assert not [word for word in ("user", "secret", "0123456789", "hidden") if f"{word}" in text]


DATABASE = "postgresql://user:secret@db.example:5432/rows"


def test_the_password_of_a_database_is_not_shown(tmp_path):
    url = f"{DATABASE}?password=hidden&sslmode=require"
    text = describe(load(tmp_path, f"backends: {{blockdb: {{url: '{url}'}}}}"), {})
    assert "url: postgresql://db.example:5432/rows\n" in text
    assert not [word for word in ("user", "secret", "hidden") if word in text]
    assert redact_database_url("postgresql:///rows?host=/run/pg") == "postgresql:///run/pg/rows"


URL_EXPECTED = (
    "c.yaml:1:27: backends.blockdb.url: expected grpc://host:port or postgresql://user@host:port/database;"
    " write special characters of a password as %40 (for @), %2F (/), %3A (:), %23 (#)"
)


@pytest.mark.parametrize(
    "url",
    [
        "h:1",
        "mysql://u:secret@h/d",
        "postgresql://u:secret@h:port/d",
        "postgresql://u:se:cret@h/d",
        "postgresql://u:se@cret@h/d",
        "postgresql://u:se/cret@h/d",
        "postgresql://u:se#cret@h/d",
        "postgresql://u:secret@[h/d",
    ],
)
def test_a_wrong_url_of_a_database_is_refused_and_not_shown(tmp_path, url):
    text = f"backends: {{blockdb: {{url: '{url}'}}}}"
    assert mistakes(tmp_path, text) == [URL_EXPECTED]


@pytest.mark.parametrize(
    "url",
    [
        DATABASE,
        "postgres://h/d",
        "postgresql:///d?host=/run/postgresql",
        "postgresql://u:a%40b@h1:5432,h2:5433/d?target_session_attrs=primary",
        "postgresql://u@[::1]:5432/d",
    ],
)
def test_urls_of_databases_are_taken(tmp_path, url):
    text = f"backends: {{blockdb: {{url: '{url}'}}}}"
    assert load(tmp_path, text).config.backends.blockdb.url == url


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            f"{{path: '{DATABASE}'}}",
            "c.yaml:1:28: backends.blockdb.path: this is an url; its key is backends.blockdb.url",
        ),
        (
            f"{{path: a.sqlite, url: '{DATABASE}'}}",
            "c.yaml:1:28: backends.blockdb.path: there is a backends.blockdb.url too; name one store",
        ),
        (
            f"'{DATABASE}'",
            "c.yaml:1:21: backends.blockdb: expected keys with values, got the text"
            " 'postgresql://db.example:5432/***'",
        ),
        (
            "{schema: 'a b'}",
            "c.yaml:1:30: backends.blockdb.schema: expected a name of small letters, digits and _, got the text"
            " 'a b'",
        ),
    ],
)
def test_a_store_in_the_wrong_place_is_told_without_its_password(tmp_path, settings, message):
    assert mistakes(tmp_path, f"backends: {{blockdb: {settings}}}") == [message]
