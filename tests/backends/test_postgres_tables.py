"""The table store in PostgreSQL: what only a server does. What both stores do is in ``test_tables``."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import asyncpg
import pytest

from blockx.backends import postgres_store, table_requests
from blockx.backends.postgres_place import PostgresPlace
from blockx.errors import UsageError
from tests.backends.harness import Io, outcome
from tests.postgres import PASSWORD, PostgresServer

pytestmark = pytest.mark.postgres
StartIo = Callable[..., Io]
WAIT_S = 20


@pytest.fixture
def settings(postgres: PostgresServer) -> dict[str, Any]:
    return postgres.settings()


@pytest.fixture
def store(io: StartIo, settings: dict[str, Any]) -> Io:
    return io(blockdb=settings)


@pytest.fixture
def dead(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """The server, which a test may kill; it runs again afterwards."""
    yield postgres
    postgres.kill()
    postgres.start()


def ask(store: Io, operation: str, table: str, **params: Any) -> Any:
    return outcome(store.one(store.table(operation, table, **params)))


def until(condition: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, f"never: {what}"
        time.sleep(0.005)


def backend(store: Io) -> Any:
    return store.service._backends_now["blockdb"]


# ---- what a person with psql sees ----------------------------------------------------------------


def test_rows_are_open_to_sql_and_exact_there(
    store: Io, postgres: PostgresServer, settings: dict[str, Any]
) -> None:
    big = 2**256 - 1
    ask(store, "upsert_rows", "balances", rows=[{"who": "a", "wei": big}], key=["who"])
    rows = [{"key": {"k": 1}, "at": at, "row": {}} for at in (5.5, 7)]
    ask(store, "upsert_rows_at", "prices", rows=rows)
    schema = settings["schema"]
    with postgres.session() as session:
        [(total,)] = session.run(f"SELECT sum((row->>'wei')::numeric) FROM {schema}.balances")
        assert int(total) == big
        [(newest,)] = session.run(f"SELECT max(at) FROM {schema}.prices")
        assert newest == 7
        tables = session.run(f"SELECT name, kind FROM {schema}.blockx_tables ORDER BY name")
    assert tables == [("balances", "table"), ("prices", "time")]


@pytest.mark.parametrize("at", [5, 5.0, -(2**63) + 1, 2.0**63, 1e300, 5e-324, -0.1])
def test_a_number_as_moment_comes_back_as_what_it_was(store: Io, at: float) -> None:
    ask(store, "upsert_rows_at", "t", rows=[{"key": {"k": 1}, "at": at, "row": {}}])
    reply = store.one(store.table("get_history_at", "t", key={"k": 1}, **{"from": at, "to": at}))
    [version] = outcome(reply)
    assert (version["at"], type(version["at"])) == (at, type(at))


def test_names_that_mean_something_to_postgresql_are_just_names(store: Io) -> None:
    for name in ("pg_class", "t", "t_pkey", "Select", "a.b-c", "blocks"):
        ask(store, "upsert_rows", name, rows=[{"id": name}], key=["id"])
        assert ask(store, "get_row", name, key={"id": name}) == {"id": name}


def test_a_name_that_postgresql_would_cut_is_refused(store: Io) -> None:
    name = "t" * 60
    assert ask(store, "upsert_rows", name, rows=[{"id": 1}], key=["id"]) == (
        "io_error",
        f"table {name}: in PostgreSQL a table's name has at most 59 characters",
    )


# ---- many at once --------------------------------------------------------------------------------


def test_the_reads_of_a_turn_are_one_statement_for_each_table_and_sort(
    store: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def spied(name: str) -> None:
        original = getattr(postgres_store, name)

        async def spy(db: Any, place: Any, info: Any, asked: Any) -> Any:
            sent.append(len(asked))
            return await original(db, place, info, asked)

        monkeypatch.setattr(postgres_store, name, spy)

    states = [{"key": {"k": n}, "block": n, "state": {"n": n}} for n in range(300)]
    ask(store, "upsert_states", "s", rows=states)
    ask(store, "upsert_rows", "t", rows=[{"id": n} for n in range(300)], key=["id"])
    spied("get_many")
    spied("get_versions")
    reads = [store.table("get_row", "t", key={"id": n}) for n in range(300)]
    reads += [store.table("get_state", "s", key={"k": n}, block=999) for n in range(300)]
    answers = [outcome(reply) for reply in store.ask(*reads)]
    assert answers == [{"id": n} for n in range(300)] + [{"n": n} for n in range(300)]
    assert sent == [300, 300]


def test_no_more_connections_than_allowed_are_open(
    io: StartIo, postgres: PostgresServer, settings: dict[str, Any]
) -> None:
    store = io(blockdb={**settings, "connections_max": 2, "coalesce": False})
    ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    store.ask(*[store.table("get_row", "t", key={"id": 1}) for _ in range(100)])
    with postgres.session() as session:
        [(count,)] = session.run(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'blockx'"
        )
    assert count == 2


def test_two_writers_may_make_a_table_at_the_same_time(
    io: StartIo, settings: dict[str, Any]
) -> None:
    stores = [io(blockdb=settings) for _ in range(2)]
    writes = [
        [store.table("upsert_rows", f"t{n}", rows=[{"id": i}], key=["id"]) for n in range(20)]
        for i, store in enumerate(stores)
    ]
    for store, some in zip(stores, writes, strict=True):
        store.service.submit(some)
    for store, some in zip(stores, writes, strict=True):
        assert [outcome(reply) for reply in store.replies_to(*some)] == [None] * 20
    rows = [ask(stores[0], "get_rows", f"t{n}", keys=[{"id": 0}, {"id": 1}]) for n in range(20)]
    assert rows == [[{"id": 0}, {"id": 1}]] * 20


def test_what_the_database_refuses_of_a_group_fails_alone(
    store: Io, postgres: PostgresServer, settings: dict[str, Any]
) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 0}], key=["id"])
    with postgres.session() as session:
        session.run(f"CREATE TABLE {settings['schema']}.taken(mine int)")
    replies = store.ask(
        store.table("upsert_rows", "t", rows=[{"id": 1}]),
        store.table("upsert_rows", "taken", rows=[{"id": 1}], key=["id"]),
        store.table("upsert_rows", "new", rows=[{"id": 1}], key=["id"]),
    )
    kinds = [reply.error and reply.error.kind for reply in replies]
    assert kinds == [None, "io_error", None]
    assert replies[1].error is not None
    assert replies[1].error.message.endswith('relation "taken" already exists')
    rows = [ask(store, "get_row", name, key={"id": 1}) for name in ("t", "taken", "new")]
    assert rows == [{"id": 1}, None, {"id": 1}]


def test_rows_that_no_answer_can_hold_are_not_fetched(
    store: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (postgres_store, table_requests):
        monkeypatch.setattr(module, "RESULT_BYTES_MAX", 1_000)
    rows = [{"id": n, "text": "x" * 100} for n in range(100)]
    ask(store, "upsert_rows", "t", rows=rows, key=["id"])
    fetched: list[int] = []
    original = postgres_store.scan

    async def spy(*given: Any) -> list[str]:
        texts = await original(*given)
        fetched.append(len(texts))
        return texts

    monkeypatch.setattr(postgres_store, "scan", spy)
    assert len(ask(store, "scan", "t", prefix={}, limit=5)) == 5
    kind, message = ask(store, "scan", "t", prefix={})
    assert (kind, "ask for fewer rows at once" in message) == ("io_error", True)
    assert (fetched[0], fetched[1] < 12) == (5, True)


# ---- a server that is slow or gone ---------------------------------------------------------------


@pytest.mark.slow
def test_reads_and_writes_wait_while_the_server_restarts(store: Io, dead: PostgresServer) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": n} for n in range(50)], key=["id"])
    reads = [store.table("get_row", "t", key={"id": n}) for n in range(50)]
    store.service.submit(reads[:25])
    dead.kill()
    write = store.table("upsert_rows", "t", rows=[{"id": 50}])
    store.service.submit([*reads[25:], write])
    until(lambda: backend(store)._pause_s, "the backend has noticed")
    dead.start()
    replies = store.replies_to(*reads, write)
    assert [outcome(reply) for reply in replies] == [{"id": n} for n in range(50)] + [None]
    assert ask(store, "get_row", "t", key={"id": 50}) == {"id": 50}


@pytest.mark.slow
def test_a_server_that_is_gone_is_waited_for_and_then_unavailable(
    io: StartIo, settings: dict[str, Any], dead: PostgresServer
) -> None:
    store = io(blockdb=settings, run={"io_wait_max_ms": 50})
    dead.kill()
    for operation, params in [("get_row", {"key": {"id": 1}}), ("upsert_rows", {"rows": []})]:
        kind, message = ask(store, operation, "t", **params)
        assert kind == "unavailable"
        assert message.startswith(f"table store postgresql://{dead.folder}/postgres: ")
        assert PASSWORD not in message


@pytest.mark.slow
def test_a_run_starts_before_its_database(
    io: StartIo, settings: dict[str, Any], dead: PostgresServer
) -> None:
    dead.kill()
    store = io(blockdb=settings)
    write = store.table("upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    store.service.submit([write])
    until(lambda: backend(store)._pause_s, "the backend has noticed")
    dead.start()
    assert outcome(store.replies_to(write)[0]) is None


@pytest.mark.slow
def test_a_server_that_is_gone_does_not_hold_up_the_end(store: Io, dead: PostgresServer) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    dead.kill()
    requests = [
        store.table("get_row", "t", key={"id": 1}),
        store.table("upsert_rows", "t", rows=[{"id": 2}]),
    ]
    store.service.submit(requests)
    until(lambda: backend(store)._pause_s, "the backend has noticed")
    store.stop()
    assert not store.service._thread.is_alive()  # type: ignore[union-attr]


def test_a_read_ends_with_its_budget_and_its_neighbours_wait_on(
    store: Io, postgres: PostgresServer, settings: dict[str, Any]
) -> None:
    ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    short = store.table("get_row", "t", key={"id": 1})
    short.budget_left_ms = 20.0
    patient = store.table("get_row", "t", key={"id": 1})
    with postgres.session() as session:
        session.run("BEGIN")
        session.run(f"LOCK TABLE {settings['schema']}.t")
        store.service.submit([short, patient])
        [reply] = store.replies_to(short)
        assert outcome(reply) == (
            "deadline_exceeded",
            "get_row of table t: no answer within the 20 ms that were left of the call's budget",
        )
        assert reply.io_us >= 20_000
        session.run("COMMIT")
    assert outcome(store.replies_to(patient)[0]) == {"id": 1}


@pytest.mark.slow
def test_a_statement_that_takes_too_long_is_sent_again(
    io: StartIo, postgres: PostgresServer, settings: dict[str, Any]
) -> None:
    store = io(blockdb={**settings, "timeout_ms": 50})
    ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"])
    read = store.table("get_row", "t", key={"id": 1})
    write = store.table("upsert_rows", "t", rows=[{"id": 2}])
    with postgres.session() as session:
        session.run("BEGIN")
        session.run(f"LOCK TABLE {settings['schema']}.t")
        store.service.submit([read, write])
        until(lambda: backend(store)._pause_s, "a statement was given up")
        session.run("COMMIT")
    assert [outcome(reply) for reply in store.replies_to(read, write)] == [{"id": 1}, None]


def test_a_table_that_somebody_drops_fails_its_reads_and_nothing_else(
    store: Io, postgres: PostgresServer, settings: dict[str, Any]
) -> None:
    for name in ("t", "u"):
        ask(store, "upsert_rows", name, rows=[{"id": 1}], key=["id"])
    with postgres.session() as session:
        session.run(f"DROP TABLE {settings['schema']}.t")
        session.run(f"DELETE FROM {settings['schema']}.blockx_tables WHERE name = 't'")
    kind, message = ask(store, "get_row", "t", key={"id": 1})
    assert (kind, message.endswith('.t" does not exist')) == ("io_error", True)
    assert ask(store, "get_row", "t", key={"id": 1}) is None
    assert ask(store, "get_row", "u", key={"id": 1}) == {"id": 1}


# ---- what stops the start ------------------------------------------------------------------------


def refused(io: StartIo, settings: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        io(blockdb=settings)
    assert PASSWORD not in str(caught.value)
    return str(caught.value)


def test_a_wrong_password_stops_the_start_and_is_not_shown(
    io: StartIo, postgres: PostgresServer
) -> None:
    wrong = {"url": postgres.url.replace(PASSWORD, f"{PASSWORD}-not")}
    assert refused(io, wrong) == (
        f"backends.blockdb.url: table store postgresql://{postgres.folder}/postgres: user or password is "
        'refused: password authentication failed for user "blockx"'
    )


def test_the_password_may_be_in_the_environment(
    io: StartIo, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    store = io(blockdb={**settings, "url": settings["url"].replace(f":{PASSWORD}", "")})
    assert ask(store, "upsert_rows", "t", rows=[{"id": 1}], key=["id"]) is None


def test_a_database_that_does_not_exist_stops_the_start(
    io: StartIo, postgres: PostgresServer
) -> None:
    text = refused(io, {"url": postgres.url.replace("/postgres?", "/nowhere?")})
    assert text.endswith('/nowhere: database "nowhere" does not exist')


@pytest.mark.parametrize("parameter", ["sslmode=maybe", "port=x"])
def test_a_parameter_that_is_not_understood_stops_the_start(
    io: StartIo, postgres: PostgresServer, parameter: str
) -> None:
    text = refused(io, {"url": f"{postgres.url}&{parameter}"})
    assert text.endswith("backends.blockdb.url is not understood; check its parameters")


def test_somebody_elses_catalogue_is_left_alone(
    io: StartIo, postgres: PostgresServer, settings: dict[str, Any]
) -> None:
    with postgres.session() as session:
        session.run(f"CREATE SCHEMA {settings['schema']}")
        session.run(f"CREATE TABLE {settings['schema']}.blockx_tables(mine int)")
    assert "is not the catalogue of this version of blockx" in refused(io, settings)


def test_without_asyncpg_the_start_says_what_to_install(
    io: StartIo, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    assert refused(io, settings) == (
        "backends.blockdb.url needs the package asyncpg: pip install 'blockx[postgres]'"
    )


# ---- what errors mean ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (asyncpg.TooManyConnectionsError("x"), "throttled", "the server has no connection left"),
        (asyncpg.CannotConnectNowError("x"), "unavailable", "the server is starting or stopping"),
        (asyncpg.AdminShutdownError("x"), "unavailable", "the server is stopping"),
        (asyncpg.CrashShutdownError("x"), "unavailable", "the server has crashed"),
        (asyncpg.ConnectionDoesNotExistError("x"), "unavailable", "the connection was lost"),
        (asyncpg.QueryCanceledError("x"), "unavailable", "a statement took more than 1500 ms"),
        (asyncpg.DeadlockDetectedError("x"), "unavailable", "another transaction was in the way"),
        (asyncpg.LockNotAvailableError("x"), "unavailable", "a lock is held"),
        (asyncpg.InterfaceError("connection is closed"), "unavailable", "connection is closed"),
        (ConnectionRefusedError(111, "refused"), "unavailable", "refused"),
        (TimeoutError(), "unavailable", "no answer within 1.5 s"),
        (asyncpg.DiskFullError("x"), "io_error", "the disk is full"),
        (asyncpg.ReadOnlySQLTransactionError("x"), "io_error", "only reading is possible: x"),
        (asyncpg.InvalidPasswordError("no"), "io_error", "user or password is refused: no"),
        (asyncpg.InsufficientPrivilegeError("no"), "io_error", "the user may not do that: no"),
        (asyncpg.ClientConfigurationError("secret"), "io_error", "is not understood"),
        (asyncpg.DataError("x"), "io_error", "x"),
        (asyncpg.UndefinedColumnError("x"), "io_error", "x"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_of_the_database_has_its_class(error: Exception, kind: str, text: str) -> None:
    place = PostgresPlace("postgresql://u:secret@h:1/d", "blockx", 4, 1.5)
    failure = postgres_store.explain(error, place)
    assert failure.error.kind == kind
    assert failure.error.message.startswith("table store postgresql://h:1/d: ")
    assert text in failure.error.message
    assert "secret" not in failure.error.message + repr(place)
