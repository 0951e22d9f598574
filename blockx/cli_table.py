"""The verb ``table``: load, dump, query and serve the embedded store of a configuration.

Main thread; thin over ``backends.table_files`` and ``backends.table_server``. Rows go to stdout as JSON
lines, exact to the digit; what was done and what is wrong to stderr. A store held in memory has no file and is refused.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blockx.config import LoadedConfig
from blockx.errors import UsageError
from blockx.ipc import exact_json

LOOPBACK = "127.0.0.1"
OWN_HOSTS = (LOOPBACK, "localhost", "[::1]")
PORT = 50_051
SIGNALLED = 128
"""Exit code of a program that a signal ended: this and the signal's number."""

Verbs = Any
"""What ``add_subparsers`` returns; argparse has no public name for it."""


def add_parser(verbs: Verbs) -> None:
    """Declare ``table load | dump | query | serve``."""
    table = verbs.add_parser(
        "table",
        help="load, dump, query and serve tables of the embedded store",
        description="Tables of the embedded store (backends.blockdb.path).",
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
    actions: dict[str, Callable[[argparse.Namespace, Path], None]] = {
        "load": _load,
        "dump": _dump,
        "query": _query,
    }
    blockdb = loaded.config.backends.blockdb
    if not blockdb.path:
        raise UsageError(
            f"{loaded.file}: backends.blockdb.path is not set: there is no embedded store;"
            " name a file, for example data/blockdb.sqlite"
        )
    if options.action == "serve":
        return _serve(options, loaded)
    actions[options.action](options, loaded.resolve(blockdb.path))
    return 0


def _serve(options: argparse.Namespace, loaded: LoadedConfig) -> int:
    # Imported here: it brings in gRPC and all backends.
    from blockx.backends import service, table_server

    host, port = options.listen
    tables = service.build_tables(loaded)
    assert tables is not None, "run() has seen a path"

    def announce(opened: int) -> None:
        open_to_all = "" if host in OWN_HOSTS else "; whoever reaches the port may read and write"
        store = loaded.resolve(loaded.config.backends.blockdb.path)
        sys.stderr.write(f"serving {store} at grpc://{host}:{opened}{open_to_all}\n")
        sys.stderr.flush()

    return SIGNALLED + table_server.serve(tables, host, port, announce)


def _load(options: argparse.Namespace, store: Path) -> None:
    # Imported here: checking the command line does without SQLite.
    from blockx.backends import table_files

    key = [column.strip() for column in options.key.split(",")] if options.key else None
    count = table_files.load(store, options.name, Path(options.rows), options.kind, key)
    sys.stderr.write(f"{options.name}: {count:,} rows loaded into {store}\n")


def _dump(options: argparse.Namespace, store: Path) -> None:
    from blockx.backends import table_files

    for line in table_files.dump(store, options.name):
        sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _query(options: argparse.Namespace, store: Path) -> None:
    from blockx.backends import table_files

    columns, rows = table_files.query(store, options.sql)
    for row in rows:
        record = {
            column: "0x" + value.hex() if isinstance(value, bytes) else value
            for column, value in zip(columns, row, strict=True)
        }
        sys.stdout.buffer.write(exact_json.encode(record) + b"\n")
    sys.stdout.buffer.flush()
