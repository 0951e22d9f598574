"""From named columns to the arguments of a call: the key ``args`` that all sources with columns share.

Without ``args`` a call gets one argument, a dict of all columns. ``args: [block, holder, {value: 7}]`` gives it
positional ones: a text is the name of a column, ``{value: X}`` is X itself, for every call. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blockx.errors import UsageError
from blockx.ipc import exact_json
from blockx.jobs.sources.base import Place

Template = Callable[[Mapping[str, bytes]], bytes]
"""From column -> exact JSON to a line of a call list."""


def template(args: Sequence[Any] | None, columns: Sequence[str] | None, place: Place) -> Template:
    """What makes a line of a row. ``columns``: if they are known before the first row.

    Raises:
        UsageError: ``args`` names no column, or is not understood.
    """
    if args is None:
        return _one_dict
    parts = [_part(entry, columns, place) for entry in args]

    def positional(row: Mapping[str, bytes]) -> bytes:
        values = [row.get(name, b"null") if name is not None else value for name, value in parts]
        return b'{"args":[%b]}' % b",".join(values)

    return positional


def _one_dict(row: Mapping[str, bytes]) -> bytes:
    members = [exact_json.encode(name) + b":" + value for name, value in row.items()]
    return b'{"args":[{%b}]}' % b",".join(members)


def _part(entry: object, columns: Sequence[str] | None, place: Place) -> tuple[str | None, bytes]:
    if isinstance(entry, dict) and list(entry) == ["value"]:
        return None, exact_json.encode(entry["value"])
    if not isinstance(entry, str):
        raise UsageError(
            f"{place.where('args')}: expected the name of a column or {{value: ...}}, got {entry!r}"
        )
    if columns is not None and entry not in columns:
        raise UsageError(
            f"{place.where('args')}: there is no column {entry!r}; there are: {', '.join(columns)}"
        )
    return entry, b""
