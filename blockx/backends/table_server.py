"""The table store over gRPC: what ``blockx table serve`` runs, for the clients of ``proto/blockdb.proto``.

Main thread of its process, one asyncio loop; the store's backend lives on it as on the io thread of a run, so all
rules, limits and messages are those of ``tables``. What arrives is hostile: each piece of JSON is read before it
becomes part of a request. A request whose client has gone is given up; a write that has begun is finished. There is no
authentication: whoever reaches the port may read and write.
"""

import asyncio
import itertools
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from blockx.backends.grpc_peer import DETAIL_CHARS_MAX, KIND_HEADER, check_installed
from blockx.backends.proto import blockdb_pb2 as pb
from blockx.backends.replies import ReadFailedError
from blockx.backends.scope import Backend, IoReply, IoRequest
from blockx.errors import ErrorKind, UsageError
from blockx.ipc import exact_json

SERVICE: Final = "blockx.blockdb.v1.BlockDb"
MESSAGE_BYTES_MAX: Final = 32 * 1024 * 1024
"""Of a request and of an answer, here and at the client: one answer of the store, and what a GetMany has besides."""
REQUESTS_MAX: Final = 1_024
"""Requests at once. Full: a further one is refused with RESOURCE_EXHAUSTED, and its client tries again."""
READS_MAX: Final = 1_000
"""Reads of one GetMany."""
KEYS_MAX: Final = 100_000
"""Keys of one GetMany, and so of one ``get_rows``."""
READS_AT_ONCE: Final = 64
"""Reads of one GetMany that are in memory together; the next ones when these are answered."""
REPLY_BYTES: Final = 8 * 1024 * 1024
"""Bytes of rows at which the answer to a GetMany is full; the client asks for the others again."""
GRACE_S: Final = 5.0
"""For requests on their way, after the signal to stop."""
_STATUSES: Final = {
    ErrorKind.UNAVAILABLE: "UNAVAILABLE",
    ErrorKind.MALFORMED: "INVALID_ARGUMENT",
    ErrorKind.CANCELLED: "CANCELLED",
}
"""Kind -> status; any other is FAILED_PRECONDITION: the table, its key or its file is not as it would have to be."""
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a share of its connections
    # A client that vanished is noticed within 80 s; one that pings once a minute is not sent away.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 30_000),
)
_UPSERTS: Final = {
    pb.KIND_ROWS: "upsert_rows",
    pb.KIND_BLOCK: "upsert_states",
    pb.KIND_TIME: "upsert_rows_at",
}
_HISTORIES: Final = {pb.KIND_BLOCK: "get_history", pb.KIND_TIME: "get_history_at"}


def serve(tables: Backend, host: str, port: int, announce: Callable[[int], None]) -> int:
    """Serve until SIGINT or SIGTERM; the signal's number. ``announce``: called with the port once it is open.

    Raises:
        UsageError: grpcio is missing, the port cannot be had, or the store's file is wrong.
    """
    check_installed("table serve")
    return asyncio.run(_serve(tables, host, port, announce))


async def _serve(tables: Backend, host: str, port: int, announce: Callable[[int], None]) -> int:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, stopped, number)
    await tables.start()
    server = TableServer(tables)
    try:
        announce(await server.start(host, port))
        return await stopped
    finally:
        await server.stop()
        await tables.close()


def _stop(stopped: "asyncio.Future[int]", number: int) -> None:
    if not stopped.done():
        stopped.set_result(number)


class TableServer:
    """The service on one port. ``tables`` is started before it and closed after it by whoever made it."""

    def __init__(self, tables: Backend) -> None:
        self._tables = tables
        self._server: Any = None
        self._numbers = itertools.count(1)

    async def start(self, host: str, port: int) -> int:
        """Open the port (0: any that is free) and return its number. Raises UsageError if it cannot be had."""
        import grpc.aio  # type: ignore[import-untyped, import-not-found, unused-ignore]

        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=REQUESTS_MAX)
        self._server.add_generic_rpc_handlers([self._handlers()])
        try:
            opened: int = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            raise UsageError(
                f"--listen {host}:{port}: the port cannot be had; it is taken by another program, or the host is"
                " no address of this machine"
            ) from None
        await self._server.start()
        return opened

    async def stop(self) -> None:
        """Take no more requests; those on their way have ``GRACE_S``."""
        server, self._server = (
            self._server,
            None,
        )  # it is freed here, and not some time later in any thread
        if server is not None:
            await server.stop(GRACE_S)

    def _handlers(self) -> Any:
        import grpc  # type: ignore[import-untyped, import-not-found, unused-ignore]

        methods: dict[str, tuple[Callable[[Any], Awaitable[Any]], Any]] = {
            "Get": (self._get, pb.GetRequest),
            "GetMany": (self._get_many, pb.GetManyRequest),
            "StateAt": (self._state_at, pb.StateAtRequest),
            "History": (self._history, pb.HistoryRequest),
            "Scan": (self._scan, pb.ScanRequest),
            "Upsert": (self._upsert, pb.UpsertRequest),
            "Delete": (self._delete, pb.DeleteRequest),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                _answering(method),
                request_deserializer=request.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for name, (method, request) in methods.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    # ---- the methods -----------------------------------------------------------------------------

    async def _get(self, request: pb.GetRequest) -> pb.Row:
        members = _members(request, key=_value(request.key))
        return pb.Row(row=await self._ask("get_row", members))

    async def _state_at(self, request: pb.StateAtRequest) -> pb.Row:
        key, at = _value(request.key), _value(request.at)
        if request.kind == pb.KIND_BLOCK:
            return pb.Row(row=await self._ask("get_state", _members(request, key=key, block=at)))
        if request.kind == pb.KIND_TIME:
            return pb.Row(row=await self._ask("get_row_at", _members(request, key=key, at=at)))
        raise _no_versions("StateAt")

    async def _history(self, request: pb.HistoryRequest) -> pb.Rows:
        operation = _HISTORIES.get(request.kind)
        if operation is None:
            raise _no_versions("History")
        members = _members(request, key=_value(request.key))
        for name, bound in (("from", request.first), ("to", request.last)):
            if bound:
                members[name] = _value(bound)
        if request.HasField("limit"):
            members["limit"] = b"%d" % request.limit
        return pb.Rows(rows=exact_json.raw_elements(await self._ask(operation, members)))

    async def _scan(self, request: pb.ScanRequest) -> pb.Rows:
        members = {"table": exact_json.encode(request.table)}
        if request.prefix:
            members["prefix"] = _value(request.prefix)
        if request.HasField("limit"):
            members["limit"] = b"%d" % request.limit
        return pb.Rows(rows=exact_json.raw_elements(await self._ask("scan", members)))

    async def _upsert(self, request: pb.UpsertRequest) -> pb.Written:
        operation = _UPSERTS.get(request.kind)
        if operation is None:
            text = f"Upsert: there is no kind {request.kind}"
            raise ReadFailedError(ErrorKind.MALFORMED, text)
        members = {"table": exact_json.encode(request.table), "rows": _array(request.rows)}
        if request.declared_key:
            members["key"] = exact_json.encode(list(request.declared_key))
        await self._ask(operation, members, write=True)
        return pb.Written()

    async def _delete(self, request: pb.DeleteRequest) -> pb.Written:
        members = {"table": exact_json.encode(request.table), "keys": _array(request.keys)}
        await self._ask("delete_rows", members, write=True)
        return pb.Written()

    async def _get_many(self, request: pb.GetManyRequest) -> pb.GetManyReply:
        keys = sum(len(read.keys) for read in request.reads)
        if len(request.reads) > READS_MAX or keys > KEYS_MAX:
            asked = f"{len(request.reads):,} reads of {keys:,} keys"
            text = f"GetMany: {asked}; the limits are {READS_MAX:,} and {KEYS_MAX:,}"
            raise ReadFailedError(ErrorKind.MALFORMED, text)
        replies: list[pb.KeysReply] = []
        reply_bytes = 0
        for start in range(0, len(request.reads), READS_AT_ONCE):
            some = request.reads[start : start + READS_AT_ONCE]
            for answer in await self._submit([self._keys_read(read) for read in some]):
                if reply_bytes >= REPLY_BYTES:
                    replies.append(pb.KeysReply(again=True))
                    continue
                replies.append(_keys_reply(answer))
                reply_bytes += len(answer.result or b"")
            if reply_bytes >= REPLY_BYTES:
                break
        left = len(request.reads) - len(replies)
        return pb.GetManyReply(replies=[*replies, *[pb.KeysReply(again=True)] * left])

    def _keys_read(self, read: pb.KeysRead) -> "IoRequest | ReadFailedError":
        """One read of a GetMany; what is wrong with it is its own answer."""
        try:
            if len(read.keys) == 1:  # the store answers these together
                return self._request("get_row", _members(read, key=_value(read.keys[0])))
            return self._request("get_rows", _members(read, keys=_array(read.keys)))
        except ReadFailedError as error:
            return error

    # ---- asking the store ------------------------------------------------------------------------

    def _request(
        self, operation: str, members: dict[str, bytes], *, write: bool = False
    ) -> IoRequest:
        number = f"rpc-{next(self._numbers)}"
        params = b"{%b}" % b",".join(
            b'"%b":%b' % (name.encode(), raw) for name, raw in members.items()
        )
        return IoRequest(
            "", "", number, 1, number, "blockdb", operation, params, None, write, "", 0.0
        )

    async def _ask(
        self, operation: str, members: dict[str, bytes], *, write: bool = False
    ) -> bytes:
        """One request's result. Raises ReadFailedError."""
        (reply,) = await self._submit([self._request(operation, members, write=write)])
        if reply.error is not None:
            raise ReadFailedError(ErrorKind(reply.error.kind), reply.error.message)
        return reply.result or b"null"

    async def _submit(self, requests: Sequence["IoRequest | ReadFailedError"]) -> list[IoReply]:
        """Ask together, in one turn of the loop; the replies in the order of the requests."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        replies: dict[str, IoReply] = {}
        asked = [request for request in requests if isinstance(request, IoRequest)]

        def take(reply: IoReply) -> None:
            replies[reply.request.call_id] = reply
            if len(replies) == len(asked) and not answered.done():
                answered.set_result(None)

        for request in asked:
            self._tables.submit(request, take)
        try:
            if asked:
                await answered
        except asyncio.CancelledError:
            for request in asked:
                self._tables.cancel(request.call_id)
            raise
        return [
            replies[request.call_id]
            if isinstance(request, IoRequest)
            else IoReply(_NO_REQUEST, error=request.error)
            for request in requests
        ]


_NO_REQUEST: Final = IoRequest("", "", "", 1, "", "blockdb", "", b"", None, False, "", 0.0)
"""Of replies to what was wrong before it became a request."""


def _answering(method: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """A method as gRPC calls it: a refusal becomes a status, a message, and the kind beside them."""

    async def answer(request: Any, context: Any) -> Any:
        import grpc  # type: ignore[import-untyped, import-not-found, unused-ignore]

        try:
            return await method(request)
        except ReadFailedError as error:
            kind = ErrorKind(error.error.kind)
            status = grpc.StatusCode[_STATUSES.get(kind, "FAILED_PRECONDITION")]
            text = error.error.message[:DETAIL_CHARS_MAX]
            return await context.abort(status, text, ((KIND_HEADER, str(kind)),))

    return answer


def _keys_reply(reply: IoReply) -> pb.KeysReply:
    if reply.error is not None:
        failure = pb.Failure(kind=reply.error.kind, message=reply.error.message)
        return pb.KeysReply(failure=failure)
    result = reply.result or b"null"
    is_array = reply.request.operation == "get_rows"
    return pb.KeysReply(rows=exact_json.raw_elements(result) if is_array else [result])


def _members(request: Any, **members: bytes) -> dict[str, bytes]:
    """Parameters of a read: the table and the declared key of its message, and these."""
    members["table"] = exact_json.encode(request.table)
    if request.declared_key:
        members["declared_key"] = exact_json.encode(list(request.declared_key))
    return members


def _value(raw: bytes) -> bytes:
    """One JSON value, as it stands. Raises ReadFailedError for anything else: it would be spliced."""
    try:
        exact_json.check_spliced(raw)
    except ValueError as error:
        raise ReadFailedError(ErrorKind.MALFORMED, f"a value is no JSON: {error}") from None
    return raw


def _array(values: Sequence[bytes]) -> bytes:
    return b"[%b]" % b",".join(map(_value, values))


def _no_versions(method: str) -> ReadFailedError:
    return ReadFailedError(
        ErrorKind.MALFORMED,
        f"{method}: the kind is KIND_BLOCK or KIND_TIME; KIND_ROWS has no versions",
    )
