"""The requests of ``blockdb`` as every table store understands them: what is asked, and what is refused.

io thread. A store hands its requests to ``TableRequests``, which checks them, keeps those that are on their way,
and answers each once; what is left to the store is its SQL. ``asked`` says what a read wants of the store,
``write_of`` what a write does to it; neither changes anything.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from blockx.backends import table_rows
from blockx.backends.keys import check_key_names, key_text, prefix_text
from blockx.backends.replies import ReadFailedError, named
from blockx.backends.scope import IoReply, IoRequest, Reply
from blockx.backends.table_rows import Kind, Moment, TableInfo, Version
from blockx.errors import ErrorKind, UsageError
from blockx.ipc import exact_json
from blockx.ipc.messages import WireError

SCAN_ROWS_MAX = 10_000
"""Rows of one scan or history; a caller that wants more asks on from the last one."""
RESULT_BYTES_MAX = 15 * 1024 * 1024
"""Bytes of one answer: it has to fit into a frame of 16 MiB. Full: that read fails."""
FIRST_READS_MAX = 10_000
"""Tables that are not there but were read, so that their key is declared. Full: the oldest is forgotten."""

_Params = dict[str, bytes]
"""Members of the parameters, each as raw JSON."""


class Pending(msgspec.Struct, eq=False):
    """One request on its way."""

    request: IoRequest
    reply: Reply
    table: str
    params: _Params
    arrived_at: float
    is_read: bool
    """Whether it changes nothing."""
    declared: tuple[str, ...] | None = None
    """Key columns known for the table outside the catalogue."""
    ended: bool = False
    result: bytes | None = None
    error: WireError | None = None
    io_s: float = 0.0


# ---- what a read asks of the store ---------------------------------------------------------------
# One is made for every read, hence structs (see ``scope``).


class Points(msgspec.Struct, gc=False):
    """The rows of some keys, in this order; ``single``: of one, not as an array."""

    keys: list[str]
    single: bool

    def answer(self, rows: Mapping[str, str]) -> bytes:
        """The answer out of the rows that are there, by key."""
        if self.single:
            return rows.get(self.keys[0], "null").encode()
        return f"[{','.join([rows.get(key, 'null') for key in self.keys])}]".encode()


class AsOf(msgspec.Struct, gc=False):
    """The newest version of a key at or before a block or moment."""

    key: str
    at: Moment

    @staticmethod
    def answer(row: str | None) -> bytes:
        """The answer out of what the store found."""
        return b"null" if row is None else row.encode()


class History(msgspec.Struct, gc=False):
    """The versions of a key between two blocks or moments (None: no bound), oldest first."""

    key: str
    first: Moment | None
    last: Moment | None
    limit: int

    @staticmethod
    def answer(info: TableInfo, found: Iterable[tuple[Moment, str]]) -> bytes:
        """The answer out of the versions found."""
        at_name, value_name = (name.encode() for name in info.version_columns)
        return b"[%b]" % b",".join(
            b'{"%b":%b,"%b":%b}' % (at_name, exact_json.encode(at), value_name, row.encode())
            for at, row in found
        )


class Prefix(msgspec.Struct, gc=False):
    """The rows whose key's text begins so: the text of a whole key, or of its first values."""

    text: str
    limit: int

    @staticmethod
    def answer(rows: Iterable[str]) -> bytes:
        """The answer out of the rows found."""
        return f"[{','.join(rows)}]".encode()


Asked = Points | AsOf | History | Prefix


# ---- what a write does to the store --------------------------------------------------------------


class Write(NamedTuple):
    """One request's changes, all or nothing."""

    info: TableInfo
    is_new: bool
    """The table is to be made first."""
    versions: list[Version]
    """Upserted; the last of equal keys stays."""
    deleted: list[str]
    """Keys of rows to delete."""


class TableRequests:
    """Those on their way to one store; owner of what is known of its tables."""

    def __init__(self, declared: Mapping[str, list[str]], now: Callable[[], float]) -> None:
        """``declared``: table -> key columns, from the configuration; ``now``: seconds."""
        self.catalogue: dict[str, TableInfo] = {}
        """The tables of the store, as the store last read them."""
        self._declared = {name: tuple(columns) for name, columns in declared.items()}
        self._first_read: dict[str, tuple[str, ...]] = {}
        self._pending: dict[str, Pending] = {}
        self._now = now

    def check_declared(self, shown: str) -> None:
        """Raises UsageError if the configuration declares another key than a table of the store has."""
        for name, columns in self._declared.items():
            info = self.catalogue.get(name)
            if info is not None and sorted(info.key) != sorted(columns):
                raise UsageError(
                    f"backends.blockdb.tables.{name}: its key in {shown} is "
                    f"{', '.join(info.key)}, not {', '.join(columns)}"
                )

    def take(self, request: IoRequest, reply: Reply) -> Pending | None:
        """A request to work on; None: it is wrong, and answered."""
        try:
            pending = self._accepted(request, reply)
        except (ReadFailedError, ValueError) as error:
            reply(IoReply(request, error=as_wire_error(request, error)))
            return None
        self._pending[request.call_id] = pending
        return pending

    def _accepted(self, request: IoRequest, reply: Reply) -> Pending:
        params = _params_of(request)
        table = exact_json.decode(params.get("table", b"null"))
        if not isinstance(table, str) or table not in self.catalogue:
            table = table_rows.check_name(table)
        is_read = request.operation in _READS
        pending = Pending(request, reply, table, params, self._now(), is_read)
        if is_read:
            pending.declared = self._declared_for(table, params.get("declared_key"))
        elif request.operation in _WRITES:
            pending.declared = self._declared_for(table, params.get("key"))
        else:
            there = named([*_READS, *_WRITES], "none")
            text = f"blockdb has no operation {request.operation!r}; there are: {there}"
            raise ReadFailedError(ErrorKind.IO_ERROR, text)
        return pending

    def cancel(self, call_id: str) -> None:
        """End the call's request, if one is on its way."""
        pending = self._pending.get(call_id)
        if pending is not None:
            text = f"{pending.request.operation}: the call's attempt has ended"
            pending.error = WireError(kind=ErrorKind.CANCELLED, message=text)
            self.end(pending)

    def end(self, pending: Pending) -> None:
        """Reply with the result or error that it has; later calls do nothing."""
        if pending.ended:
            return
        pending.ended = True
        call_id = pending.request.call_id
        if self._pending.get(call_id) is pending:
            del self._pending[call_id]
        if pending.result is not None and len(pending.result) > RESULT_BYTES_MAX:
            pending.error = _too_long(pending)
        failed = pending.error is not None
        waited_s = self._now() - pending.arrived_at - pending.io_s
        pending.reply(
            IoReply(
                pending.request,
                result=None if failed else pending.result,
                error=pending.error,
                io_us=round(pending.io_s * 1e6),
                queue_us=max(0, round(waited_s * 1e6)),
            )
        )

    def _declared_for(self, table: str, raw: bytes | None) -> tuple[str, ...] | None:
        """Key columns that the request or the configuration names; both must agree."""
        configured = self._declared.get(table)
        if raw is None:
            return configured
        names = exact_json.decode(raw)
        if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
            text = f"table {table}: a key is declared as a list of field names"
            raise ReadFailedError(ErrorKind.IO_ERROR, text)
        if configured is not None and sorted(configured) != sorted(names):
            raise ReadFailedError(
                ErrorKind.IO_ERROR,
                f"table {table}: the function declares the key {', '.join(names)}, config.yaml "
                f"(backends.blockdb.tables.{table}.key) {', '.join(configured)}",
            )
        return tuple(names)

    # ---- reads -----------------------------------------------------------------------------------

    def asked(self, pending: Pending) -> tuple[TableInfo, Asked] | None:
        """What a read wants of the store; None: its table is not there, ``pending`` has its result.

        Raises:
            ReadFailedError, ValueError: it is wrong.
        """
        operation = pending.request.operation
        info, asked = _READS[operation](self, pending)
        if info.name in self.catalogue:
            return info, asked
        is_list = isinstance(asked, History | Prefix)
        pending.result = b"[]" if is_list else b"null"
        if isinstance(asked, Points):
            pending.result = asked.answer({})
        return None

    def _get_row(self, pending: Pending) -> tuple[TableInfo, Asked]:
        key = exact_json.decode(pending.params.get("key", b"null"))
        info = self._info(pending, Kind.TABLE, key)
        return info, Points([key_text(info.name, info.key, key).decode()], single=True)

    def _get_rows(self, pending: Pending) -> tuple[TableInfo, Asked]:
        keys = exact_json.decode(pending.params.get("keys", b"null"))
        if not isinstance(keys, list):
            raise ReadFailedError(ErrorKind.MALFORMED, "get_rows: `keys` is no array")
        if not keys:
            info = self.catalogue.get(pending.table)
            return info or TableInfo(pending.table, Kind.TABLE, (), ""), Points([], single=False)
        infos = [self._info(pending, Kind.TABLE, key) for key in keys]
        texts = [key_text(i.name, i.key, key) for i, key in zip(infos, keys, strict=True)]
        return infos[0], Points([text.decode() for text in texts], single=False)

    def _scan(self, pending: Pending) -> tuple[TableInfo, Asked]:
        prefix = exact_json.decode(pending.params.get("prefix", b"null"))
        info = self.catalogue.get(pending.table)
        if info is None:  # its key is not known, so nothing can be said against the prefix
            return TableInfo(pending.table, Kind.TABLE, (), ""), Prefix("[]", 1)
        table_rows.check_kind(info, Kind.TABLE)
        text = prefix_text(info.name, info.key, prefix)
        return info, Prefix(text.decode(), _limit(pending))

    def _get_history(self, pending: Pending) -> tuple[TableInfo, Asked]:
        return self._history(pending, Kind.BLOCK, table_rows.check_block)

    def _get_history_at(self, pending: Pending) -> tuple[TableInfo, Asked]:
        return self._history(pending, Kind.TIME, table_rows.moment)

    def _history(
        self, pending: Pending, kind: Kind, check: Callable[[str, object], Moment]
    ) -> tuple[TableInfo, Asked]:
        key = exact_json.decode(pending.params.get("key", b"null"))
        info = self._info(pending, kind, key)
        text = key_text(info.name, info.key, key)
        bounds = [
            check(info.name, exact_json.decode(pending.params[name]))
            if pending.params.get(name, b"null") != b"null"
            else None
            for name in ("from", "to")
        ]
        for bound in bounds:
            if info.clock and bound is not None:
                table_rows.check_clock(info, bound)
        return info, History(text.decode(), bounds[0], bounds[1], _limit(pending))

    def _get_state(self, pending: Pending) -> tuple[TableInfo, Asked]:
        block = exact_json.decode(pending.params.get("block", b"null"))
        return self._as_of(pending, Kind.BLOCK, table_rows.check_block(pending.table, block))

    def _get_row_at(self, pending: Pending) -> tuple[TableInfo, Asked]:
        at = exact_json.decode(pending.params.get("at", b"null"))
        return self._as_of(pending, Kind.TIME, table_rows.moment(pending.table, at))

    def _as_of(self, pending: Pending, kind: Kind, at: Moment) -> tuple[TableInfo, Asked]:
        key = exact_json.decode(pending.params.get("key", b"null"))
        info = self._info(pending, kind, key)
        text = key_text(info.name, info.key, key)
        if info.clock:
            table_rows.check_clock(info, at)
        return info, AsOf(text.decode(), at)

    def _info(self, pending: Pending, kind: Kind, key: object) -> TableInfo:
        """The table, or what it will be: the first read of an unknown one declares its key."""
        info = self.catalogue.get(pending.table)
        if info is not None:
            table_rows.check_kind(info, kind)
            table_rows.check_declared(info, pending.declared)
            return info
        columns = pending.declared or self._first_read.get(pending.table)
        if columns is None:
            columns = check_key_names(pending.table, key)
            if len(self._first_read) >= FIRST_READS_MAX:
                del self._first_read[next(iter(self._first_read))]
            self._first_read[pending.table] = columns
        return TableInfo(pending.table, kind, columns, "")

    # ---- writes ----------------------------------------------------------------------------------

    def declare_as_read(self, pending: Pending) -> None:
        """Before a write begins: a read may have declared the key of its table meanwhile."""
        pending.declared = pending.declared or self._first_read.get(pending.table)

    def write_of(self, pending: Pending, catalogue: Mapping[str, TableInfo]) -> Write | None:
        """What a write does to a store with these tables; None: nothing. Any thread.

        Raises:
            ReadFailedError, ValueError: it is wrong.
        """
        return _WRITES[pending.request.operation](pending, catalogue)


def _elements(pending: Pending, name: str) -> list[bytes]:
    return exact_json.raw_elements(pending.params.get(name, b"null"))


def _upsert_rows(pending: Pending, catalogue: Mapping[str, TableInfo]) -> Write:
    info = _table_of(pending, catalogue, Kind.TABLE, pending.declared)
    rows = _elements(pending, "rows")
    versions = [table_rows.row_version(info.name, info.key, row) for row in rows]
    return Write(info, info.name not in catalogue, versions, [])


def _upsert_states(pending: Pending, catalogue: Mapping[str, TableInfo]) -> Write:
    rows = _elements(pending, "rows")
    fields = table_rows.key_fields(pending.table, rows[0]) if rows else None
    info = _table_of(pending, catalogue, Kind.BLOCK, pending.declared or fields)
    versions = [table_rows.state_version(info.name, info.key, row) for row in rows]
    return Write(info, info.name not in catalogue, versions, [])


def _upsert_rows_at(pending: Pending, catalogue: Mapping[str, TableInfo]) -> Write | None:
    rows = _elements(pending, "rows")
    if not rows:
        return None
    columns = pending.declared or table_rows.key_fields(pending.table, rows[0])
    first = table_rows.time_version(pending.table, columns, rows[0])
    info = _table_of(pending, catalogue, Kind.TIME, columns, table_rows.clock_of(first.at))
    versions = [table_rows.time_version(info.name, info.key, row) for row in rows]
    for version in versions:
        table_rows.check_clock(info, version.at)
    return Write(info, info.name not in catalogue, versions, [])


def _delete_rows(pending: Pending, catalogue: Mapping[str, TableInfo]) -> Write | None:
    keys = [exact_json.decode(raw) for raw in _elements(pending, "keys")]
    info = catalogue.get(pending.table)
    if info is None:
        return None
    table_rows.check_kind(info, Kind.TABLE)
    texts = [key_text(info.name, info.key, key).decode() for key in keys]
    return Write(info, is_new=False, versions=[], deleted=texts)


def _table_of(
    pending: Pending,
    catalogue: Mapping[str, TableInfo],
    kind: Kind,
    columns: tuple[str, ...] | None,
    clock: str = "",
) -> TableInfo:
    """The table in the catalogue, or the new one if its key is known."""
    info = catalogue.get(pending.table)
    if info is not None:
        table_rows.check_kind(info, kind)
        table_rows.check_declared(info, pending.declared)
        return info
    name = pending.table
    if columns is None:
        raise ReadFailedError(
            ErrorKind.IO_ERROR,
            f"table {name} is new and its key is not known: write Table({name!r}, key=[…]), or "
            f"backends.blockdb.tables.{name}.key in config.yaml, or load it with --key",
        )
    table_rows.check_new_name(catalogue, name)
    return TableInfo(name, kind, columns, clock)


_READS: Final[dict[str, Callable[[TableRequests, Pending], tuple[TableInfo, Asked]]]] = {
    "get_row": TableRequests._get_row,
    "get_rows": TableRequests._get_rows,
    "get_state": TableRequests._get_state,
    "get_row_at": TableRequests._get_row_at,
    "get_history": TableRequests._get_history,
    "get_history_at": TableRequests._get_history_at,
    "scan": TableRequests._scan,
}
_WRITES: Final[dict[str, Callable[[Pending, Mapping[str, TableInfo]], Write | None]]] = {
    "upsert_rows": _upsert_rows,
    "upsert_states": _upsert_states,
    "upsert_rows_at": _upsert_rows_at,
    "delete_rows": _delete_rows,
}


# ---- small things --------------------------------------------------------------------------------


def _params_of(request: IoRequest) -> _Params:
    try:
        return exact_json.raw_members(request.params)
    except ValueError as error:
        text = f"{request.operation}: its parameters are not understood: {error}"
        raise ReadFailedError(ErrorKind.MALFORMED, text) from None


def _limit(pending: Pending) -> int:
    limit = exact_json.decode(pending.params.get("limit", b"null"))
    if limit is None:
        return SCAN_ROWS_MAX
    if isinstance(limit, int) and not isinstance(limit, bool) and 1 <= limit <= SCAN_ROWS_MAX:
        return limit
    text = (
        f"{pending.request.operation} of table {pending.table}: the limit is a whole number from 1 to "
        f"{SCAN_ROWS_MAX}, not {str(limit)[:40]}"
    )
    raise ReadFailedError(ErrorKind.IO_ERROR, text)


def as_wire_error(request: IoRequest, error: ReadFailedError | ValueError) -> WireError:
    """The error of a request that is wrong."""
    if isinstance(error, ReadFailedError):
        return error.error
    text = f"{request.operation}: its parameters are not understood: {error}"
    return WireError(kind=ErrorKind.MALFORMED, message=text)


def _too_long(pending: Pending) -> WireError:
    text = (
        f"{pending.request.operation} of table {pending.table}: an answer of more than "
        f"{RESULT_BYTES_MAX} bytes; ask for fewer rows at once"
    )
    return WireError(kind=ErrorKind.IO_ERROR, message=text)
