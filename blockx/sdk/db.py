"""``blockx_sdk.db``: one row of a table by its key, without an object in between."""

from collections.abc import Mapping
from typing import Any

from blockx.sdk.blockdb import Table


def get(table: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """The newest row of ``table`` with this key; None: there is none. Raises ReadError."""
    return Table(table).get_row(key)
