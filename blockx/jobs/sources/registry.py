"""Which source a job's ``calls`` means: by what kind of value it is, by suffix, or by its first key.

Jobs thread, or the main thread for a check. Sources of other distributions are found by their entry point in
the group ``blockx.sources``: its name is the key below ``calls`` that stands for it, its object an ``Opener``.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from blockx.config import JobConfig
from blockx.errors import UsageError
from blockx.jobs.sources.base import Identity, Opener, Place, Source, identity_of_spec
from blockx.jobs.sources.block_range import open_range
from blockx.jobs.sources.csv_file import open_csv
from blockx.jobs.sources.jsonl import (
    InlineSource,
    JsonlSource,
    identity_of_file,
    identity_of_inline,
)
from blockx.jobs.sources.product import open_product
from blockx.jobs.sources.sqlite_query import open_sqlite
from blockx.jobs.sources.table_rows import open_table

GROUP = "blockx.sources"
_OPENERS: dict[str, Opener] = {
    "csv": open_csv,
    "range": open_range,
    "product": open_product,
    "sqlite": open_sqlite,
    "table": open_table,
}
_FROM_SPEC = ("range", "product")
"""Sources whose calls stand in the configuration itself."""


def open_source(job: JobConfig, place: Place) -> Source:
    """Open the call list of a job.

    Raises:
        UsageError: a key is wrong, or a file cannot be opened.
    """
    calls = job.calls
    if isinstance(calls, list):
        return InlineSource(job.name, calls)
    if isinstance(calls, str) and not calls.endswith(".csv"):
        return JsonlSource(place.resolve(calls))
    spec = {"csv": calls} if isinstance(calls, str) else calls
    return _opener(spec, place)(spec, place)


def identify(job: JobConfig, place: Place) -> Identity:
    """What is known of a call list before it is read line by line. Raises UsageError."""
    calls = job.calls
    if isinstance(calls, list):
        return identity_of_inline(calls)
    if isinstance(calls, str):
        return identity_of_file(place.resolve(calls), count_lines=not calls.endswith(".csv"))
    if any(key in calls for key in _FROM_SPEC):
        return identity_of_spec(calls)
    if "csv" in calls:
        content = identity_of_file(place.resolve(str(calls["csv"])), count_lines=False).fingerprint
        return Identity(identity_of_spec([calls, content]).fingerprint if content else "")
    return Identity("")


def describe(job: JobConfig) -> str:
    """What the calls are, in a few words, for the first line of a run."""
    calls = job.calls
    if isinstance(calls, str):
        return calls
    if isinstance(calls, list):
        return f"{len(calls):,} calls in the configuration"
    key = next(iter(calls), "nothing")
    value = calls.get(key)
    return f"{key} {value}" if isinstance(value, str) else key


def _opener(spec: Mapping[str, Any], place: Place) -> Opener:
    known = _openers()
    found = [key for key in spec if key in known]
    if len(found) != 1:
        raise UsageError(
            f"job {place.job_name}: calls: expected one of the keys {', '.join(known)},"
            f" got {', '.join(map(str, spec)) or 'nothing'}"
        )
    return known[found[0]]


@cache
def _openers() -> dict[str, Opener]:
    """Ours win over foreign ones of the same name."""
    return {**{point.name: point.load() for point in entry_points(group=GROUP)}, **_OPENERS}
