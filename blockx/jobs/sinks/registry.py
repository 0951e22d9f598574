"""Which sink a job's ``output`` means: ``PREFIX:target``, or a file by its suffix.

Jobs thread, or the main thread for a check. Sinks of other distributions are found by their entry point in the
group ``blockx.sinks``: its name is a suffix with its dot (``.arrow``) or a prefix (``kafka``), its object an
``Opener``. ``.jsonl`` is no sink: its rows are spliced into the file as the bytes that they are.
"""

from functools import cache
from importlib.metadata import entry_points

from blockx.jobs.sinks.base import Opener
from blockx.jobs.sinks.csv_file import CsvSink
from blockx.jobs.sinks.parquet_file import ParquetSink
from blockx.jobs.sinks.sqlite_file import SqliteSink
from blockx.jobs.sinks.table_upsert import TableSink

GROUP = "blockx.sinks"
LINES_SUFFIX = ".jsonl"
_OPENERS: dict[str, Opener] = {
    ".csv": CsvSink,
    ".sqlite": SqliteSink,
    ".parquet": ParquetSink,
    "table": TableSink,
}


def kind_of(output: str) -> str:
    """What an output is called in the registry; empty if it is none."""
    prefix, colon, _target = output.partition(":")
    if colon and prefix in _openers():
        return prefix
    if output.endswith(LINES_SUFFIX):
        return LINES_SUFFIX
    return next((key for key in _openers() if key[:1] == "." and output.endswith(key)), "")


def is_file(output: str) -> bool:
    """Whether it has a place in the file system."""
    return kind_of(output)[:1] in ("", ".")


def opener_of(output: str) -> Opener:
    """What makes a sink for an output that is one."""
    return _openers()[kind_of(output)]


def known_kinds() -> str:
    """For messages."""
    names = (f"{key}:NAME" if key[:1] != "." else key for key in _openers())
    return " ".join([LINES_SUFFIX, *names])


@cache
def _openers() -> dict[str, Opener]:
    """Ours win over foreign ones of the same name."""
    return {**{point.name: point.load() for point in entry_points(group=GROUP)}, **_OPENERS}
