"""The verb ``table``: load, dump, query and serve the table store of a configuration.

Main thread; thin over ``backends.table_files`` and ``backends.table_server``. Rows go to stdout as JSON lines,
exact to the digit; what was done and what is wrong to stderr. Tables held in memory are no store and are refused.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockx.config import LoadedConfig, is_table_server
from blockx.errors import UsageError
from blockx.ipc import exact_json

LOOPBACK = "127.0.0.1"
OWN_HOSTS = (LOOPBACK, "localhost", "[::1]")
PORT = 50_051
SIGNALLED = 128
"""Exit code of a program that a signal ended: this and the signal's number."""

if TYPE_CHECKING:
    from blockx.backends.table_files import TableFiles

Verbs = Any
"""What ``add_subparsers`` returns; argparse has no public name for it."""


def add_parser(verbs: Verbs) -> None:
    """Declare ``table load | dump | query | serve``."""
    table = verbs.add_parser(
        "table",
        help="load, dump, query and serve tables of the table store",
        description="Tables of the store: backends.blockdb.path (SQLite) or .url (PostgreSQL).",
        allow_abbrev=False,
    )
    actions = table.add_subparsers(dest="action", metavar="{load,dump,query,serve}", required=True)
    load = _action(actions, "load", "upsert the lines of a file; all of them or none")
    load.add_argument("name", metavar="NAME", help="the table; made if it is new")
    load.add_argument("rows", metavar="ROWS.jsonl", help="a row a line, see --kind")
    load.add_argument(
        "--kind",
        choices=("table", "block", "time"),
        default="table",
        help='table: a line is a row (default); block: {"key": {...}, "block": n, "state": {...}};'
        ' time: {"key": {...}, "at": moment, "row": {...}}',
    )
    load.add_argument("--key", metavar="A,B", help="key columns of a new table")
    dump = _action(actions, "dump", "write a table to stdout in the form that load takes")
    dump.add_argument("name", metavar="NAME")
    query = _action(actions, "query", "run one SQL statement that only reads; rows as JSON lines")
    query.add_argument("sql", metavar="SQL")
    serve = _action(actions, "serve", "serve the store over gRPC until SIGINT or SIGTERM")
    serve.add_argument(
        "--listen",
        type=_address,
        default=(LOOPBACK, PORT),
        metavar="HOST:PORT",
        help=f"port 0: any that is free; default: {LOOPBACK}:{PORT}",
    )


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return host, int(port)


def _action(actions: Verbs, name: str, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=what, description=what, allow_abbrev=False
    )
    parser.add_argument(
        "--config", default="config.yaml", metavar="FILE", help="default: %(default)s"
    )
    return parser


def run(options: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Carry out one action; its exit code, or UsageError for whatever the user can mend."""
    # Imported here: checking the command line does without databases.
    from blockx.backends.table_access import files_of

    actions: dict[str, Callable[[argparse.Namespace, TableFiles], None]] = {
        "load": _load,
        "dump": _dump,
        "query": _query,
    }
    store = files_of(loaded)
    if is_table_server(loaded.config.backends.blockdb.url):
        raise UsageError(
            f"{loaded.file}: backends.blockdb.url is a table server; `blockx table` works where it has its store"
        )
    if store is None:
        raise UsageError(
            f"{loaded.file}: there is no table store: name a file as backends.blockdb.path, for example"
            " data/blockdb.sqlite, or a PostgreSQL database as backends.blockdb.url"
        )
    memory = loaded.config.backends.blockdb.memory
    if options.action == "load" and options.name in memory:
        raise UsageError(
            f"{loaded.file}: the table {options.name} is held in memory: functions read {memory[options.name]},"
            " and would not see the store's; take it out of backends.blockdb.memory, or change that file"
        )
    if options.action == "serve":
        return _serve(options, loaded, store.shown)
    actions[options.action](options, store)
    return 0


def _serve(options: argparse.Namespace, loaded: LoadedConfig, shown: str) -> int:
    # Imported here: it brings in gRPC and all backends.
    from blockx.backends import service, table_server

    host, port = options.listen
    tables = service.build_tables(loaded)
    assert tables is not None, "run() has found a store"

    def announce(opened: int) -> None:
        open_to_all = "" if host in OWN_HOSTS else "; whoever reaches the port may read and write"
        sys.stderr.write(f"serving {shown} at grpc://{host}:{opened}{open_to_all}\n")
        sys.stderr.flush()

    return SIGNALLED + table_server.serve(tables, host, port, announce)


def _load(options: argparse.Namespace, store: "TableFiles") -> None:
    key = [column.strip() for column in options.key.split(",")] if options.key else None
    count = store.load(options.name, Path(options.rows), options.kind, key)
    sys.stderr.write(f"{options.name}: {count:,} rows loaded into {store.shown}\n")


def _dump(options: argparse.Namespace, store: "TableFiles") -> None:
    for line in store.dump(options.name):
        sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _query(options: argparse.Namespace, store: "TableFiles") -> None:
    columns, rows = store.query(options.sql)
    for row in rows:
        record = {
            column: "0x" + value.hex() if isinstance(value, bytes) else value
            for column, value in zip(columns, row, strict=True)
        }
        try:
            line = exact_json.encode(record)
        except exact_json.InexactValueError as error:
            raise UsageError(
                f"a row has no exact JSON form: {error.path}; cast that column to text in the statement"
            ) from None
        sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()
