"""Tables held in memory, read from JSONL files at start: ``backends.blockdb.memory``.

io thread. Read-only, so reads are answered at once. Rows stay as the bytes of their line: no number is
decoded and encoded again. An index is built for each set of key columns at the first read that names it;
of several rows with one key the last line counts. Memory is that of the files plus the indexes.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from blockx.backends.keys import check_key_names, encode_key
from blockx.backends.replies import ReadFailedError, named
from blockx.backends.scope import IoReply, IoRequest, KeepsNothing, Reply
from blockx.errors import ErrorKind, UsageError
from blockx.ipc import exact_json

INDEXES_MAX = 16
"""Indexes of one table. Full: a read by one more set of columns is an error that names them."""

_Index = dict[bytes, bytes]


class _Table:
    """Rows of one file, and its indexes by key columns (sorted)."""

    __slots__ = ("fields", "indexes", "name", "rows")

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.rows: list[bytes] = []
        self.fields: set[str] = set()
        self.indexes: dict[tuple[str, ...], _Index] = {}
        try:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    self._add(line.strip(), f"{path}:{number}")
        except OSError as error:
            raise UsageError(
                f"backends.blockdb.memory.{name}: {path}: {error.strerror or error}"
            ) from None

    def _add(self, line: bytes, where: str) -> None:
        if not line:
            return
        try:
            row = exact_json.decode(line)
        except ValueError as error:
            raise UsageError(f"{where}: not a row of table {self.name}: {error}") from None
        if not isinstance(row, dict):
            raise UsageError(f"{where}: a row of table {self.name} must be a JSON object")
        self.fields.update(row)
        self.rows.append(line)

    def index(self, columns: tuple[str, ...]) -> _Index:
        """Rows by the text of their key; rows without one of the columns are not in it."""
        index = self.indexes.get(columns)
        if index is None:
            self._check(columns)
            index = self.indexes[columns] = {}
            for line in self.rows:
                row = exact_json.decode(line)
                assert isinstance(row, dict), "checked when the file was read"
                values = [row.get(column, index) for column in columns]
                if all(isinstance(value, str | int | float | None) for value in values):
                    index[encode_key(self.name, values)] = line
        return index

    def _check(self, columns: tuple[str, ...]) -> None:
        unknown = [column for column in columns if column not in self.fields]
        if unknown and self.rows:
            raise ReadFailedError(
                ErrorKind.IO_ERROR,
                f"no row of table {self.name} has a field {unknown[0]}; there are: "
                f"{named(sorted(self.fields), 'none')}",
            )
        if len(self.indexes) >= INDEXES_MAX:
            raise ReadFailedError(
                ErrorKind.IO_ERROR,
                f"table {self.name} was read by {INDEXES_MAX} different sets of key fields already; "
                f"{', '.join(columns)} would be one more",
            )

    def get(self, key: object) -> bytes:
        columns = check_key_names(self.name, key)
        assert isinstance(key, dict), "checked by check_key_names"
        return self.index(columns).get(
            encode_key(self.name, [key[column] for column in columns]), b"null"
        )


class MemoryTables(KeepsNothing):
    """The backend ``blockdb`` over files in memory."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)
        self._tables: dict[str, _Table] = {}
        self._operations: dict[str, Callable[[_Table, dict[str, object]], bytes]] = {
            "get_row": _get_row,
            "get_rows": _get_rows,
        }

    async def start(self) -> None:
        """Read the files. Raises UsageError naming file and line."""
        for name, path in self._files.items():
            self._tables[name] = _Table(name, path)

    def submit(self, request: IoRequest, reply: Reply) -> None:
        """Answer at once."""
        try:
            reply(IoReply(request, result=self._answer(request)))
        except ReadFailedError as failure:
            reply(IoReply(request, error=failure.error))

    def _answer(self, request: IoRequest) -> bytes:
        operation = self._operations.get(request.operation)
        if operation is None:
            raise ReadFailedError(
                ErrorKind.IO_ERROR,
                f"{request.operation}: tables of backends.blockdb.memory are read-only and have get_row and "
                "get_rows alone; use backends.blockdb.path or .url for a table store",
            )
        try:
            params = exact_json.decode(request.params)
        except ValueError as error:
            raise ReadFailedError(ErrorKind.MALFORMED, f"{request.operation}: {error}") from None
        if not isinstance(params, dict):
            raise ReadFailedError(
                ErrorKind.MALFORMED, f"{request.operation}: its parameters are no object"
            )
        table = self._tables.get(str(params.get("table")))
        if table is None:
            raise ReadFailedError(
                ErrorKind.IO_ERROR,
                f"there is no table {params.get('table')!r}; there are: {named(sorted(self._tables), 'none')}",
            )
        return operation(table, params)

    def cancel(self, call_id: str) -> None:
        """Nothing waits here."""

    async def close(self) -> None:
        """Nothing to close."""


def _get_row(table: _Table, params: dict[str, object]) -> bytes:
    return table.get(params.get("key"))


def _get_rows(table: _Table, params: dict[str, object]) -> bytes:
    keys = params.get("keys")
    if not isinstance(keys, list):
        raise ReadFailedError(ErrorKind.MALFORMED, "get_rows: `keys` is no array")
    return b"[" + b",".join([table.get(key) for key in keys]) + b"]"
