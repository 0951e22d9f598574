"""The backend ``blockdb`` over a table server: ``backends.blockdb.url: grpc://host:port``.

io thread only, over ``grpc_peer``; the messages are those of ``proto/blockdb.proto``, the rules those of the store at
the other end, which answers in the words of ``tables``. Invariants:

- All point reads of one turn of the loop leave as one GetMany, up to its limits; while ``GETS_MAX`` of them are on
  their way, further ones gather. A read that is wrong fails alone.
- Equal reads on their way are one, unless a write of ours was acknowledged in between: a read sees every write that
  was acknowledged to us before it was submitted.
- Nothing is cached. Without ``coalesce`` each read is sent for itself.
- Upserts and deletes are by key, so sending one again is harmless: like reads they are repeated while their
  server is away, at most ``run.io_wait_max_ms``. A write of a call whose attempt has ended is given up.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from blockx.backends.grpc_peer import (
    PASSES,
    GrpcPeer,
    GrpcRefusedError,
    Sent,
    check_installed,
    known_kind,
)
from blockx.backends.proto import blockdb_pb2 as pb
from blockx.backends.replies import ReadFailedError, failed, named
from blockx.backends.scope import IoReply, IoRequest, KeepsNothing, Reply
from blockx.backends.table_server import KEYS_MAX, MESSAGE_BYTES_MAX, READS_MAX, SERVICE
from blockx.errors import ErrorKind
from blockx.ipc import exact_json
from blockx.ipc.messages import WireError

GETS_MAX: Final = 8
"""GetMany on their way at once."""
GET_KEYS_MAX: Final = 10_000
"""Keys of one GetMany; a single larger read goes alone."""
GET_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of the reads of one GetMany; a single larger one goes alone."""
TIMEOUT_S: Final = 30.0
"""Of one attempt: the largest upsert on a slow disk takes several seconds."""
INT64_MAX: Final = 2**63 - 1
BUDGETS_EVERY_S: Final = 0.1
"""Between two looks at the budgets of the calls that wait."""
_PASSES: Final = PASSES | {"DEADLINE_EXCEEDED"}
_KINDS: Final = {
    "get_state": pb.KIND_BLOCK,
    "get_row_at": pb.KIND_TIME,
    "get_history": pb.KIND_BLOCK,
    "get_history_at": pb.KIND_TIME,
    "upsert_rows": pb.KIND_ROWS,
    "upsert_states": pb.KIND_BLOCK,
    "upsert_rows_at": pb.KIND_TIME,
}

_Params = dict[str, bytes]
_monotonic: Final = time.monotonic


class _Reader(msgspec.Struct, eq=False):
    """One call that waits."""

    request: IoRequest
    reply: Reply
    arrived_at: float


class _Question(msgspec.Struct, eq=False):
    """What is sent to the server, and who waits for the answer."""

    operation: str
    table: str
    method: str
    message: Any
    message_bytes: int
    key: tuple[str, bytes] | None
    """What further readers find it by; None: nobody joins."""
    result: Callable[[Sequence[bytes]], bytes]
    """From the rows of the answer to the result."""
    sent: Sent
    readers: list[_Reader]
    exchange: "asyncio.Task[None] | None" = None
    """Unset for reads of a GetMany: others are in it."""


class GrpcTables(KeepsNothing):
    """The backend; one server."""

    def __init__(
        self,
        target: str,
        io_wait_max_ms: int,
        *,
        tls: bool,
        coalesce: bool = True,
    ) -> None:
        """Raises UsageError without grpcio."""
        check_installed("backends.blockdb.url: grpc://")
        self._reads_a_get = READS_MAX if coalesce else 1
        self._merge = coalesce
        self._peer = GrpcPeer(
            target, tls=tls, message_bytes_max=MESSAGE_BYTES_MAX, io_wait_max_ms=io_wait_max_ms
        )
        self._points: list[_Question] = []
        """Reads that leave with the next GetMany."""
        self._gets: set[asyncio.Task[None]] = set()
        self._get_soon = False
        self._open: dict[tuple[str, bytes], _Question] = {}
        """Reads on their way that further ones may join."""
        self._waiting: dict[str, tuple[_Question, _Reader]] = {}
        """By call."""
        self._writes: set[asyncio.Task[None]] = set()
        self._look: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._makers: dict[str, Callable[[IoRequest, str, _Params], _Question]] = {
            "get_row": self._get_row,
            "get_rows": self._get_rows,
            "get_state": self._version,
            "get_row_at": self._version,
            "get_history": self._history,
            "get_history_at": self._history,
            "scan": self._scan,
            "upsert_rows": self._upsert,
            "upsert_states": self._upsert,
            "upsert_rows_at": self._upsert,
            "delete_rows": self._delete,
        }

    # ---- the contract of a backend ---------------------------------------------------------------

    async def start(self) -> None:
        """Make the channel; it connects at the first request."""
        self._loop = asyncio.get_running_loop()
        await self._peer.start()

    def submit(self, request: IoRequest, reply: Reply) -> None:
        """Take a request; those that cannot be sent are answered at once."""
        try:
            make = self._makers.get(request.operation)
            if make is None:
                there = named([*self._makers], "none")
                text = f"blockdb has no operation {request.operation!r}; there are: {there}"
                raise ReadFailedError(ErrorKind.IO_ERROR, text)
            params = exact_json.raw_members(request.params)
            question = make(request, _text(params.get("table", b"null")), params)
        except ReadFailedError as error:
            reply(IoReply(request, error=error.error))
            return
        except ValueError as error:
            text = f"{request.operation}: its parameters are not understood: {error}"
            reply(failed(request, ErrorKind.MALFORMED, text))
            return
        reader = _Reader(request, reply, _monotonic())
        if question.key is not None and question.key in self._open:
            question = self._open[question.key]
            question.readers.append(reader)
        else:
            question.readers.append(reader)
            self._ask(question)
        self._waiting[request.call_id] = (question, reader)
        if request.budget_left_ms and self._look is None:
            self._look = self._running_loop.call_later(BUDGETS_EVERY_S, self._look_at_budgets)

    def cancel(self, call_id: str) -> None:
        """End the call's request; nobody else waiting for it, its exchange is given up."""
        text = "the call's attempt has ended"
        self._give_up(call_id, ErrorKind.CANCELLED, text)

    async def close(self) -> None:
        """Finish accepted writes, give reads up, close the channel."""
        self._peer.hurry()
        if self._look is not None:
            self._look.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self._peer.close()

    # ---- from parameters to questions ------------------------------------------------------------

    def _get_row(self, request: IoRequest, table: str, params: _Params) -> _Question:
        message = pb.KeysRead(
            table=table,
            keys=[params.get("key", b"null")],
            declared_key=_names(params.get("declared_key")),
        )
        return self._read(request, table, "GetMany", message, _first)

    def _get_rows(self, request: IoRequest, table: str, params: _Params) -> _Question:
        keys = exact_json.raw_elements(params.get("keys", b"null"))
        if len(keys) > KEYS_MAX:
            text = f"get_rows of table {table}: {len(keys):,} keys; at most {KEYS_MAX:,} at once"
            raise ReadFailedError(ErrorKind.IO_ERROR, text)
        message = pb.KeysRead(
            table=table, keys=keys, declared_key=_names(params.get("declared_key"))
        )
        return self._read(request, table, "GetMany", message, _array)

    def _version(self, request: IoRequest, table: str, params: _Params) -> _Question:
        kind = _KINDS[request.operation]
        message = pb.StateAtRequest(
            table=table,
            kind=kind,
            key=params.get("key", b"null"),
            at=params.get("block" if kind == pb.KIND_BLOCK else "at", b"null"),
            declared_key=_names(params.get("declared_key")),
        )
        return self._read(request, table, "StateAt", message, _first)

    def _history(self, request: IoRequest, table: str, params: _Params) -> _Question:
        message = pb.HistoryRequest(
            table=table,
            kind=_KINDS[request.operation],
            key=params.get("key", b"null"),
            first=params.get("from", b""),
            last=params.get("to", b""),
            limit=_limit(params.get("limit")),
            declared_key=_names(params.get("declared_key")),
        )
        return self._read(request, table, "History", message, _array)

    def _scan(self, request: IoRequest, table: str, params: _Params) -> _Question:
        message = pb.ScanRequest(
            table=table,
            prefix=params.get("prefix", b""),
            limit=_limit(params.get("limit")),
        )
        return self._read(request, table, "Scan", message, _array)

    def _upsert(self, request: IoRequest, table: str, params: _Params) -> _Question:
        message = pb.UpsertRequest(
            table=table,
            kind=_KINDS[request.operation],
            rows=exact_json.raw_elements(params.get("rows", b"null")),
            declared_key=_names(params.get("key")),
        )
        return self._question(request, table, "Upsert", message, _nothing, None)

    def _delete(self, request: IoRequest, table: str, params: _Params) -> _Question:
        keys = exact_json.raw_elements(params.get("keys", b"null"))
        message = pb.DeleteRequest(table=table, keys=keys)
        return self._question(request, table, "Delete", message, _nothing, None)

    def _read(
        self,
        request: IoRequest,
        table: str,
        method: str,
        message: Any,
        result: Callable[[Sequence[bytes]], bytes],
    ) -> _Question:
        key = (request.operation, message.SerializeToString()) if self._merge else None
        return self._question(request, table, method, message, result, key)

    @staticmethod
    def _question(
        request: IoRequest,
        table: str,
        method: str,
        message: Any,
        result: Callable[[Sequence[bytes]], bytes],
        key: tuple[str, bytes] | None,
    ) -> _Question:
        return _Question(
            request.operation, table, method, message, message.ByteSize(), key, result, Sent(), []
        )

    # ---- sending ---------------------------------------------------------------------------------

    def _ask(self, question: _Question) -> None:
        if question.key is not None:
            self._open[question.key] = question
        if question.method == "GetMany":
            self._points.append(question)
            self._get_later()
            return
        question.exchange = self._running_loop.create_task(self._exchange(question))
        question.exchange.add_done_callback(partial(self._check_ended, [question]))
        if question.result is _nothing:
            self._writes.add(question.exchange)
            question.exchange.add_done_callback(self._writes.discard)

    async def _exchange(self, question: _Question) -> None:
        """One request with an answer of its own."""
        try:
            data = question.message.SerializeToString()
            answer = await self._send(question.method, data, question.sent)
            rows = _rows_of(question.method, answer)
        except (GrpcRefusedError, ReadFailedError) as error:
            self._end(question, error=self._told(question, error))
        else:
            if question.result is _nothing:
                self._open.clear()  # reads that are on their way may have missed this write
            self._end(question, rows)

    def _get_later(self) -> None:
        if not self._get_soon:
            self._get_soon = True
            self._running_loop.call_soon(self._get)

    def _get(self) -> None:
        """Send what has gathered."""
        self._get_soon = False
        while self._points and len(self._gets) < GETS_MAX:
            group = self._next_group()
            if group:
                task = self._running_loop.create_task(self._get_many(group))
                self._gets.add(task)
                task.add_done_callback(partial(self._got, group))

    def _got(self, group: list[_Question], task: "asyncio.Task[None]") -> None:
        self._gets.discard(task)
        self._check_ended(group, task)
        self._get_later()

    def _check_ended(self, questions: list[_Question], task: "asyncio.Task[None]") -> None:
        """A task that our own bug ended must not leave its calls waiting for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            for question in questions:
                text = f"{question.operation}: {type(error).__name__}: {error}"
                self._end(question, error=WireError(kind=ErrorKind.IO_ERROR, message=text))

    def _next_group(self) -> list[_Question]:
        """Reads of the next GetMany, within its limits; those that nobody waits for any more are left out."""
        group: list[_Question] = []
        taken = keys = size = 0
        for question in self._points:
            keys += len(question.message.keys)
            size += question.message_bytes
            is_over = len(group) == self._reads_a_get or keys > GET_KEYS_MAX or size > GET_BYTES_MAX
            if group and is_over:
                break
            taken += 1
            if question.readers:
                group.append(question)
        del self._points[:taken]
        return group

    async def _get_many(self, group: list[_Question]) -> None:
        data = pb.GetManyRequest(reads=[q.message for q in group]).SerializeToString()
        sent = Sent()
        for question in group:
            question.sent = sent
        try:
            answer = await self._send("GetMany", data, sent)
            replies = _get_many_replies(answer, group)
        except (GrpcRefusedError, ReadFailedError) as error:
            for question in group:
                self._end(question, error=self._told(question, error))
            return
        again = []
        for question, reply in zip(group, replies, strict=True):
            if reply.again:
                again.append(question)
            elif reply.HasField("failure"):
                failed = known_kind(reply.failure.kind) or ErrorKind.IO_ERROR
                self._end(question, error=WireError(kind=failed, message=reply.failure.message))
            else:
                self._end_checked(question, list(reply.rows))
        self._points[:0] = again

    def _end_checked(self, question: _Question, rows: list[bytes]) -> None:
        try:
            _check_rows("GetMany", rows)
        except ReadFailedError as error:
            self._end(question, error=self._told(question, error))
        else:
            self._end(question, rows)

    async def _send(self, method: str, data: bytes, sent: Sent) -> bytes:
        return await self._peer.ask(
            f"/{SERVICE}/{method}", data, sent, timeout_s=TIMEOUT_S, passes=_PASSES
        )

    def _told(self, question: _Question, error: GrpcRefusedError | ReadFailedError) -> WireError:
        """The error for the calls: the store's own words as they are, anything else with where it happened."""
        if isinstance(error, ReadFailedError):
            return error.error
        if error.in_own_words:
            return WireError(kind=error.kind, message=error.detail)
        what = f"{question.operation} of table {question.table}: table server {error}"
        if error.status == "UNIMPLEMENTED":
            what += "; is it a table server of blockx (blockx table serve)?"
        return WireError(kind=error.kind, message=what)

    # ---- the ends --------------------------------------------------------------------------------

    def _end(
        self, question: _Question, rows: Sequence[bytes] = (), error: WireError | None = None
    ) -> None:
        """Answer everyone who waits for it."""
        self._close_to_readers(question)
        result = question.result(rows) if error is None else None
        for reader in question.readers:
            self._answer(question, reader, result, error)
        question.readers = []

    def _answer(
        self, question: _Question, reader: _Reader, result: bytes | None, error: WireError | None
    ) -> None:
        waiting = self._waiting.get(reader.request.call_id)
        if waiting is not None and waiting[1] is reader:
            del self._waiting[reader.request.call_id]
        now = _monotonic()
        io_s = question.sent.overlap_s(reader.arrived_at, now)
        queue_s = max(0.0, now - reader.arrived_at - io_s)
        reader.reply(
            IoReply(
                reader.request,
                result=result,
                error=error,
                io_us=round(io_s * 1e6),
                queue_us=round(queue_s * 1e6),
            )
        )

    def _give_up(self, call_id: str, kind: ErrorKind, why: str) -> None:
        """One call waits no longer; nobody left, the exchange ends too."""
        found = self._waiting.get(call_id)
        if found is None:
            return
        question, reader = found
        question.readers.remove(reader)
        text = f"{question.operation} of table {question.table}: {why}"
        self._answer(question, reader, None, WireError(kind=kind, message=text))
        if not question.readers:
            self._close_to_readers(question)
            if question.exchange is not None:
                question.exchange.cancel()

    def _close_to_readers(self, question: _Question) -> None:
        if question.key is not None and self._open.get(question.key) is question:
            del self._open[question.key]

    def _look_at_budgets(self) -> None:
        now = _monotonic()
        for call_id, (question, reader) in list(self._waiting.items()):
            budget_s = reader.request.budget_left_ms / 1_000
            if budget_s and question.sent.overlap_s(reader.arrived_at, now) >= budget_s:
                self._give_up(call_id, ErrorKind.DEADLINE_EXCEEDED, "the call's budget is used up")
        self._look = (
            self._running_loop.call_later(BUDGETS_EVERY_S, self._look_at_budgets)
            if self._waiting
            else None
        )

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "start() comes first"
        return self._loop


# ---- parameters: what has no place in a message is refused here, all other rules are the store's --


def _text(raw: bytes) -> str:
    text = exact_json.decode(raw)
    if not isinstance(text, str):
        raise ValueError("`table` is no text")
    return text


def _names(raw: bytes | None) -> list[str] | None:
    names = None if raw is None else exact_json.decode(raw)
    if names is None or (isinstance(names, list) and all(isinstance(n, str) for n in names)):
        return names
    raise ValueError("a key is declared as a list of field names")


def _limit(raw: bytes | None) -> int | None:
    limit = None if raw is None else exact_json.decode(raw)
    if limit is None:
        return None
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise ValueError("`limit` is no whole number")
    return max(-1, min(limit, INT64_MAX))


# ---- answers -------------------------------------------------------------------------------------


def _first(rows: Sequence[bytes]) -> bytes:
    return rows[0]


def _array(rows: Sequence[bytes]) -> bytes:
    return b"[%b]" % b",".join(rows)


def _nothing(_rows: Sequence[bytes]) -> bytes:
    return b"null"


_ANSWERS: Final[dict[str, Any]] = {
    "StateAt": pb.Row,
    "History": pb.Rows,
    "Scan": pb.Rows,
    "Upsert": pb.Written,
    "Delete": pb.Written,
}


def _rows_of(method: str, answer: bytes) -> list[bytes]:
    """The rows of an answer. Raises ReadFailedError if it is none that the server may give."""
    message = _parsed(method, _ANSWERS[method], answer)
    if isinstance(message, pb.Written):
        return []
    rows = [message.row] if isinstance(message, pb.Row) else list(message.rows)
    _check_rows(method, rows)
    return rows


def _get_many_replies(answer: bytes, group: list[_Question]) -> list[pb.KeysReply]:
    """One reply for each read. Raises ReadFailedError if the answer does not fit the question."""
    message = _parsed("GetMany", pb.GetManyReply, answer)
    replies: list[pb.KeysReply] = list(message.replies)
    fits = len(replies) == len(group) and not replies[0].again
    for question, reply in zip(group, replies, strict=False):
        if not reply.again and not reply.HasField("failure"):
            fits = fits and len(reply.rows) == len(question.message.keys)
    if not fits:
        raise _wrong_answer("GetMany", "it does not fit the reads that were asked for")
    return replies


def _check_rows(method: str, rows: Sequence[bytes]) -> None:
    """They become part of a message to an executor. Raises ReadFailedError."""
    try:
        for row in rows:
            exact_json.check_spliced(row)
    except ValueError as error:
        raise _wrong_answer(method, str(error)) from None


def _parsed(method: str, kind: Any, answer: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(answer)
    except DecodeError as error:
        raise _wrong_answer(method, str(error)) from None


def _wrong_answer(method: str, why: str) -> ReadFailedError:
    text = f"the table server's answer to {method} is not understood: {why}"
    return ReadFailedError(ErrorKind.MALFORMED, text)
