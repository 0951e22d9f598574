"""Both ends of the table store over gRPC: what leaves together, what is shared, and peers that misbehave."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from blockx.backends import grpc_peer, table_server, tables
from blockx.backends.proto import blockdb_pb2 as pb
from blockx.backends.table_server import SERVICE
from tests.backends.harness import WAIT_S, Io, outcome
from tests.backends.table_service import ServedTables

StartIo = Callable[..., Io]
REQUESTS = {
    "GetMany": pb.GetManyRequest,
    "StateAt": pb.StateAtRequest,
    "Scan": pb.ScanRequest,
    "Upsert": pb.UpsertRequest,
}


def echo_keys(request: pb.GetManyRequest) -> pb.GetManyReply:
    """The row of a key is the key."""
    return pb.GetManyReply(replies=[pb.KeysReply(rows=read.keys) for read in request.reads])


class Scripted:
    """A table server that does as it is told: ``answers`` by method; while ``gate`` is closed it holds everything."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.arrived = threading.Semaphore(0)
        self.gone = threading.Event()
        """Set when a client gives a request up."""
        self.gate = threading.Event()
        self.gate.set()
        self.aborts: list[grpc.StatusCode] = []
        self.answers: dict[str, Any] = {"GetMany": echo_keys, "Upsert": pb.Written()}
        self.server = grpc.server(ThreadPoolExecutor(16))
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {
            name: grpc.unary_unary_rpc_method_handler(self._handler(name, kind))
            for name, kind in REQUESTS.items()
        })])  # fmt: skip
        self.url = f"grpc://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def _handler(self, name: str, kind: Any) -> Callable[[bytes, Any], bytes]:
        def handle(data: bytes, context: Any) -> bytes:
            request = kind.FromString(data)
            self.asked.append(request)
            context.add_callback(lambda: None if context.code() else self.gone.set())
            self.arrived.release()
            if name != "Upsert":
                self.gate.wait(WAIT_S)
            if self.aborts:
                context.abort(self.aborts.pop(0), "as told")
            answer = self.answers[name]
            answer = answer(request) if callable(answer) else answer
            return answer if isinstance(answer, bytes) else answer.SerializeToString()

        return handle

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self.arrived.acquire(timeout=WAIT_S)

    def stop(self) -> None:
        self.gate.set()
        self.server.stop(None).wait()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    monkeypatch.setattr(grpc_peer, "PAUSE_FIRST_S", 0.01)
    scripted = Scripted()
    yield scripted
    scripted.stop()


@pytest.fixture
def store(io: StartIo, server: Scripted) -> Iterator[Io]:
    service = io(blockdb={"url": server.url})
    yield service
    service.stop()


def point(store: Io, n: object, **more: Any) -> Any:
    return store.request("blockdb", "get_row", {"table": "t", "key": {"id": n}}, **more)


# ---- what leaves together ------------------------------------------------------------------------


def test_the_point_reads_of_one_turn_leave_as_one_request_and_equal_ones_once(
    store: Io, server: Scripted
) -> None:
    numbers = [n % 200 for n in range(300)]
    replies = store.ask(*[point(store, n) for n in numbers])
    assert [outcome(reply) for reply in replies] == [{"id": n} for n in numbers]
    [request] = server.asked
    assert [read.keys[0] for read in request.reads] == [b'{"id": %d}' % n for n in range(200)]


def test_without_coalescing_each_read_is_a_request(io: StartIo, server: Scripted) -> None:
    store = io(blockdb={"url": server.url, "coalesce": False})
    store.ask(*[point(store, 1) for _ in range(5)])
    assert [len(request.reads) for request in server.asked] == [1] * 5


def test_one_request_has_at_most_a_thousand_reads(store: Io, server: Scripted) -> None:
    store.ask(*[point(store, n) for n in range(2_500)])
    assert sorted(len(request.reads) for request in server.asked) == [500, 1_000, 1_000]


def test_an_equal_read_joins_the_one_on_its_way(store: Io, server: Scripted) -> None:
    server.answers["Scan"] = pb.Rows(rows=[b'{"id":1}'])
    server.gate.clear()
    reads = [point(store, 1), store.table("scan", "t", prefix={})]
    store.service.submit(reads)
    server.wait_for(2)
    more = [point(store, 1), store.table("scan", "t", prefix={})]
    store.service.submit(more)
    store.ask(
        store.table("upsert_rows", "u", rows=[])
    )  # so the others were taken before the gate opens
    server.gate.set()
    found = [outcome(reply) for reply in store.replies_to(*reads, *more)]
    assert found == [{"id": 1}, [{"id": 1}]] * 2
    assert [type(request).__name__ for request in server.asked].count("ScanRequest") == 1


def test_a_read_after_an_acknowledged_write_is_asked_anew(store: Io, server: Scripted) -> None:
    server.gate.clear()
    first = point(store, 1)
    store.service.submit([first])
    server.wait_for(1)
    store.one(store.table("upsert_rows", "t", rows=[{"id": 1}]))
    second = point(store, 1)
    store.service.submit([second])
    server.wait_for(2)  # the write and the second read
    server.gate.set()
    store.replies_to(first, second)
    names = [type(request).__name__ for request in server.asked]
    assert names == ["GetManyRequest", "UpsertRequest", "GetManyRequest"]


def test_what_a_full_answer_leaves_out_is_asked_for_again(store: Io, server: Scripted) -> None:
    def half(request: pb.GetManyRequest) -> pb.GetManyReply:
        reply = echo_keys(request)
        for left_out in reply.replies[(len(reply.replies) + 1) // 2 :]:
            left_out.CopyFrom(pb.KeysReply(again=True))
        return reply

    server.answers["GetMany"] = half
    replies = store.ask(*[point(store, n) for n in range(4)])
    assert [outcome(reply)["id"] for reply in replies] == [0, 1, 2, 3]
    assert [len(request.reads) for request in server.asked] == [4, 2, 1]


# ---- cancellation and budgets --------------------------------------------------------------------


@pytest.mark.parametrize("method", ["scan", "get_row"])
def test_a_cancelled_read_ends_alone(store: Io, server: Scripted, method: str) -> None:
    server.answers["Scan"] = pb.Rows(rows=[b'{"id":1}'])
    server.gate.clear()
    params = {"prefix": {}} if method == "scan" else {"key": {"id": 1}}
    first, second = store.table(method, "t", **params), store.table(method, "t", **params)
    store.service.submit([first, second])
    server.wait_for(1)
    store.service.cancel([first.call_id])
    assert outcome(store.replies_to(first)[0])[0] == "cancelled"
    server.gate.set()
    assert outcome(store.replies_to(second)[0]) in ({"id": 1}, [{"id": 1}])


def test_a_request_that_nobody_waits_for_is_given_up_at_the_server(
    store: Io, server: Scripted
) -> None:
    server.gate.clear()
    read = store.table("scan", "t", prefix={})
    store.service.submit([read])
    server.wait_for(1)
    store.service.cancel([read.call_id])
    store.replies_to(read)
    assert server.gone.wait(WAIT_S)


def test_a_read_that_is_cancelled_before_it_leaves_does_not_leave(
    store: Io, server: Scripted
) -> None:
    first, second = point(store, 1), point(store, 2)

    def submit_and_cancel() -> None:
        store.service._accept([first, second])
        store.service._cancel([first.call_id])

    store.service._post(submit_and_cancel)
    found = [outcome(reply) for reply in store.replies_to(first, second)]
    text = "get_row of table t: the call's attempt has ended"
    assert found == [("cancelled", text), {"id": 2}]
    [request] = server.asked
    assert [read.keys[0] for read in request.reads] == [b'{"id": 2}']


def test_a_write_whose_client_has_gone_is_not_started(
    io: StartIo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "WRITER_BUSY_MS", 1)
    path = tmp_path / "store.sqlite"
    served = ServedTables(path)
    store = io(blockdb={"url": served.url})
    store.one(store.table("upsert_rows", "t", rows=[{"id": 0}], key=["id"]))
    submit, cancel = served.tables.submit, served.tables.cancel
    submitted, cancelled = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(served.tables, "submit", lambda *a: (submit(*a), submitted.release()))
    monkeypatch.setattr(served.tables, "cancel", lambda *a: (cancel(*a), cancelled.set()))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(
            "BEGIN IMMEDIATE"
        )  # the writer waits with the first write, the second is behind it
        writes = [store.table("upsert_rows", "t", rows=[{"id": n}]) for n in (1, 2)]
        for write in writes:
            store.service.submit([write])
            assert submitted.acquire(timeout=WAIT_S)
        store.service.cancel([writes[1].call_id])
        assert cancelled.wait(WAIT_S)
        other.execute("COMMIT")
    kinds = [reply.error and reply.error.kind for reply in store.replies_to(*writes)]
    assert kinds == [None, "cancelled"]
    rows = store.one(store.table("scan", "t", prefix={}))
    assert outcome(rows) == [{"id": 0}, {"id": 1}]
    store.stop()
    served.stop()


def test_a_calls_budget_ends_its_read(store: Io, server: Scripted) -> None:
    server.gate.clear()
    reply = store.one(point(store, 1, budget_ms=30))
    assert outcome(reply) == (
        "deadline_exceeded",
        "get_row of table t: the call's budget is used up",
    )
    assert reply.io_us >= 30_000


# ---- peers that are away, or wrong ---------------------------------------------------------------


@pytest.mark.parametrize("status", ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"])
def test_what_passes_is_waited_out(store: Io, server: Scripted, status: str) -> None:
    server.aborts = [grpc.StatusCode[status]] * 2
    assert outcome(store.one(point(store, 1))) == {"id": 1}
    server.aborts = [grpc.StatusCode[status]]
    assert outcome(store.one(store.table("upsert_rows", "t", rows=[{"id": 1}]))) is None


def test_a_server_that_is_not_there_is_unavailable(io: StartIo) -> None:
    store = io(blockdb={"url": "grpc://127.0.0.1:1"}, run={"io_wait_max_ms": 0})
    kind, message = outcome(store.one(point(store, 1)))
    assert kind == "unavailable"
    where = "get_row of table t: table server 127.0.0.1:1 /blockx.blockdb.v1.BlockDb/GetMany: "
    assert message.startswith(f"{where}UNAVAILABLE: ")


def test_a_server_that_comes_back_answers_what_waits(
    io: StartIo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_peer, "PAUSE_FIRST_S", 0.01)
    path = tmp_path / "store.sqlite"
    served = ServedTables(path)
    store = io(blockdb={"url": served.url})
    row = {"id": 1, "v": 2**256 - 1}
    store.one(store.table("upsert_rows", "t", rows=[row], key=["id"]))
    served.stop()
    read, write = point(store, 1), store.table("upsert_rows", "t", rows=[{"id": 2}])
    store.service.submit([read, write])
    again = ServedTables(path, served.port)
    assert [outcome(reply) for reply in store.replies_to(read, write)] == [row, None]
    store.stop()
    again.stop()


def test_another_service_is_told_as_such(io: StartIo, server: Scripted) -> None:
    store = io(blockdb={"url": server.url})
    kind, message = outcome(store.one(store.table("delete_rows", "t", keys=[{"id": 1}])))
    assert kind == "io_error"
    assert message.endswith("; is it a table server of blockx (blockx table serve)?")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"\xff\xff", "arsing"),
        (pb.GetManyReply(), "it does not fit the reads that were asked for"),
        (pb.GetManyReply(replies=[pb.KeysReply()]), "it does not fit the reads that were asked for"),
        (pb.GetManyReply(replies=[pb.KeysReply(again=True)]), "it does not fit the reads that were asked for"),
        (pb.GetManyReply(replies=[pb.KeysReply(rows=[b'{"a":1},{"b":2}'])]), "JSON is malformed"),
        (pb.GetManyReply(replies=[pb.KeysReply(rows=[b'{"a":\n1}'])]), "a line break or a tab"),
    ],
    ids=["no message", "no reply", "no row", "nothing read", "two values", "two lines"],
)  # fmt: skip
def test_a_wrong_answer_fails_the_read_clearly(
    store: Io, server: Scripted, answer: Any, why: str
) -> None:
    server.answers["GetMany"] = answer
    kind, message = outcome(store.one(point(store, 1)))
    assert kind == "malformed"
    assert message.startswith("the table server's answer to GetMany is not understood: ")
    assert why in message


def test_an_unknown_kind_of_failure_is_an_io_error(store: Io, server: Scripted) -> None:
    failure = pb.Failure(kind="executor_lost_", message="why")
    server.answers["GetMany"] = pb.GetManyReply(replies=[pb.KeysReply(failure=failure)])
    assert outcome(store.one(point(store, 1))) == ("io_error", "why")


@pytest.mark.parametrize("params", [{"table": 5}, {"table": "t", "limit": "x"}])
def test_parameters_without_a_place_in_a_message_are_refused(
    store: Io, server: Scripted, params: Any
) -> None:
    kind, message = outcome(store.one(store.request("blockdb", "scan", params)))
    assert kind == "malformed"
    assert message.startswith("scan: its parameters are not understood: ")


# ---- the server, asked by anybody ----------------------------------------------------------------


@pytest.fixture
def anybody(tmp_path: Path) -> Iterator[Callable[[str, Any, Any], Any]]:
    """Ask a real server over a plain channel: ``anybody(method, request, type of the answer)``."""
    served = ServedTables(tmp_path / "store.sqlite")
    with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:

        def ask(method: str, request: Any, answer: Any) -> Any:
            call = channel.unary_unary(f"/{SERVICE}/{method}")
            return answer.FromString(call(request.SerializeToString(), timeout=WAIT_S))

        yield ask
    served.stop()


def test_every_method_keeps_digits_and_types(anybody: Any) -> None:
    big = b'{"id":1.0,"wei":115792089237316195423570985008687907853269984665640564039457584007913129639935}'
    rows = [big, b'{"id":1,"v":true}']
    anybody("Upsert", pb.UpsertRequest(table="t", rows=rows, declared_key=["id"]), pb.Written)
    state = b'{"key":{"p":"x"},"block":7,"state":{"v":1e0}}'
    upsert = pb.UpsertRequest(table="s", kind=pb.KIND_BLOCK, rows=[state])
    anybody("Upsert", upsert, pb.Written)
    get = pb.GetRequest(table="t", key=b'{"id":1.0}')
    assert anybody("Get", get, pb.Row).row == big
    assert anybody("Scan", pb.ScanRequest(table="t"), pb.Rows).rows == rows
    at = pb.StateAtRequest(table="s", kind=pb.KIND_BLOCK, key=b'{"p":"x"}', at=b"9")
    assert anybody("StateAt", at, pb.Row).row == b'{"v":1e0}'
    history = pb.HistoryRequest(table="s", kind=pb.KIND_BLOCK, key=b'{"p":"x"}')
    assert anybody("History", history, pb.Rows).rows == [b'{"block":7,"state":{"v":1e0}}']
    anybody("Delete", pb.DeleteRequest(table="t", keys=[b'{"id":1}']), pb.Written)
    assert anybody("Scan", pb.ScanRequest(table="t"), pb.Rows).rows == [big]


def test_reads_of_one_request_are_answered_each_for_itself(anybody: Any) -> None:
    row = b'{"id":1}'
    anybody("Upsert", pb.UpsertRequest(table="t", rows=[row], declared_key=["id"]), pb.Written)
    keys = [[row], [b"no json"], [row, b'{"id":2}'], []]
    reads = [pb.KeysRead(table="t", keys=some) for some in keys]
    reply = anybody("GetMany", pb.GetManyRequest(reads=reads), pb.GetManyReply)
    assert [list(one.rows) for one in reply.replies] == [[row], [], [row, b"null"], []]
    assert [one.failure.kind for one in reply.replies] == ["", "malformed", "", ""]


def test_an_answer_that_is_full_says_so(anybody: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_server, "REPLY_BYTES", 20)
    rows = [b'{"id":%d}' % n for n in range(150)]
    anybody("Upsert", pb.UpsertRequest(table="t", rows=rows, declared_key=["id"]), pb.Written)
    reads = [pb.KeysRead(table="t", keys=[row]) for row in rows]
    reply = anybody("GetMany", pb.GetManyRequest(reads=reads), pb.GetManyReply)
    assert [list(one.rows) for one in reply.replies[:3]] == [[row] for row in rows[:3]]
    assert [one.again for one in reply.replies] == [False] * 3 + [True] * 147


SPLICED = b'{"id":1},"declared_key":["v"]'


@pytest.mark.parametrize(
    ("method", "request_", "status", "kind"),
    [
        ("Get", pb.GetRequest(table="t", key=SPLICED), "INVALID_ARGUMENT", "malformed"),
        ("Delete", pb.DeleteRequest(table="t", keys=[SPLICED]), "INVALID_ARGUMENT", "malformed"),
        ("Scan", pb.ScanRequest(table="t", prefix=SPLICED), "INVALID_ARGUMENT", "malformed"),
        ("StateAt", pb.StateAtRequest(table="t"), "INVALID_ARGUMENT", "malformed"),
        ("StateAt", pb.StateAtRequest(table="t", key=b"{}", at=b"1"), "INVALID_ARGUMENT", "malformed"),
        ("History", pb.HistoryRequest(table="t", key=b"{}"), "INVALID_ARGUMENT", "malformed"),
        ("Upsert", pb.UpsertRequest(table="t", kind=9), "INVALID_ARGUMENT", "malformed"),
        ("Upsert", pb.UpsertRequest(table="t", rows=[b"{}"]), "FAILED_PRECONDITION", "io_error"),
        ("GetMany", pb.GetManyRequest(reads=[pb.KeysRead()] * 1_001), "INVALID_ARGUMENT", "malformed"),
    ],
    ids=["key", "keys", "prefix", "no key", "rows have no state", "nor history", "no kind", "no table", "too many"],
)  # fmt: skip
def test_a_wrong_request_is_refused_with_status_and_kind(
    anybody: Any, method: str, request_: Any, status: str, kind: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        anybody(method, request_, pb.Row)
    assert caught.value.code().name == status
    assert ("blockx-kind", kind) in caught.value.trailing_metadata()


@pytest.mark.slow
def test_reads_whose_rows_do_not_fit_into_one_message_are_all_answered(
    io: StartIo, tmp_path: Path
) -> None:
    served = ServedTables(tmp_path / "store.sqlite")
    store = io(blockdb={"url": served.url})
    for n in range(40):
        row = {"id": n, "text": "x" * 1_000_000}
        store.one(store.table("upsert_rows", "t", rows=[row], key=["id"]))
    replies = store.ask(*[point(store, n) for n in range(40)])
    assert [outcome(reply)["id"] for reply in replies] == list(range(40))
    store.stop()
    served.stop()
