"""The verb ``cache``: what the disk cache of reads holds, and how to empty it.

Main thread; thin over ``backends.read_cache``. Numbers go to stdout, what was done to stderr.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from blockx.config import LoadedConfig, ReadCacheConfig
from blockx.errors import UsageError

Verbs = Any
"""What ``add_subparsers`` returns; argparse has no public name for it."""


def add_parser(verbs: Verbs) -> None:
    """Declare ``cache stats | clear``."""
    what = "the disk cache of node reads (backends.read_cache)"
    cache = verbs.add_parser("cache", help=what, description=what, allow_abbrev=False)
    actions = cache.add_subparsers(dest="action", metavar="{stats,clear}", required=True)
    for action, text in (("stats", "show what it holds"), ("clear", "delete all of it")):
        parser = actions.add_parser(action, help=text, description=text, allow_abbrev=False)
        parser.add_argument(
            "--config", default="config.yaml", metavar="FILE", help="default: %(default)s"
        )


def add_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--no-cache`` of a run."""
    parser.add_argument(
        "--no-cache", action="store_true", help="neither use nor fill the disk cache of reads"
    )


def without_cache(loaded: LoadedConfig) -> LoadedConfig:
    """The configuration of a run with ``--no-cache``."""
    backends = msgspec.structs.replace(loaded.config.backends, read_cache=ReadCacheConfig())
    config = msgspec.structs.replace(loaded.config, backends=backends)
    return msgspec.structs.replace(loaded, config=config)


def run(options: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Carry out one action; 0, or UsageError for whatever the user can mend."""
    cache = loaded.config.backends.read_cache
    if not cache.path:
        raise UsageError(
            f"{loaded.file}: backends.read_cache.path is not set: there is no disk cache;"
            " name a file, for example data/read_cache.sqlite"
        )
    path = loaded.resolve(cache.path)
    if options.action == "clear":
        _clear(path)
    else:
        _show(path, cache.max_bytes)
    return 0


def _clear(path: Path) -> None:
    from blockx.backends import read_cache  # here: checking the command line does without SQLite

    entries = read_cache.numbers(path).entries if path.exists() else 0
    try:
        read_cache.remove(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be deleted: {error.strerror}") from None
    sys.stderr.write(f"{path}: {entries:,} answers deleted\n")


def _show(path: Path, max_bytes: int) -> None:
    from blockx.backends import read_cache

    numbers = read_cache.numbers(path)
    lines = [
        f"{path}",
        f"{numbers.entries:,} answers, {numbers.bytes:,} of at most {max_bytes:,} bytes"
        f" ({numbers.file_bytes:,} on disk)",
    ]
    lines += [
        f"chain {chain_id}, genesis {genesis}: {entries:,} answers, {size:,} bytes"
        for chain_id, genesis, entries, size in numbers.chains
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
