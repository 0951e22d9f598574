"""Keys of table rows: one text form, and the rules about key columns.

Pure; used by the tables in memory and in SQLite. A key is a JSON object of scalar values. Its text form is
the JSON array of the values in the order of the table's key columns, so that equal keys are equal text, and
``1``, ``1.0``, ``true`` and ``"1"`` are four keys.
"""

from collections.abc import Sequence

from blockx.backends.replies import ReadFailedError
from blockx.errors import ErrorKind
from blockx.ipc import exact_json

_SCALARS = (str, int, float, bool, type(None))


def key_text(table: str, columns: Sequence[str], values: object) -> bytes:
    """The text form of a key.

    Raises:
        ReadFailedError: the fields are not the key columns of the table, or a value is an object or array.
    """
    if not isinstance(values, dict) or len(values) != len(columns):
        raise _other_fields(table, columns, values)
    try:
        ordered = [values[column] for column in columns]
    except KeyError:
        raise _other_fields(table, columns, values) from None
    return encode_key(table, ordered)


def prefix_text(table: str, columns: Sequence[str], values: object) -> bytes:
    """The text form of the first values of a key, for a scan; ``[]`` for all keys.

    Raises:
        ReadFailedError: the fields are not the first key columns of the table, or a value is no scalar.
    """
    given = {} if values is None else values
    first = columns[: len(given)] if isinstance(given, dict) else ()
    if not isinstance(given, dict) or set(given) != set(first):
        shown = ", ".join(map(str, given)) if isinstance(given, dict) else _json_type(given)
        raise ReadFailedError(
            ErrorKind.IO_ERROR,
            f"table {table} has the key {', '.join(columns)}; a scan names its first columns, not {shown}",
        )
    return encode_key(table, [given[column] for column in first])


def encode_key(table: str, ordered: list[object]) -> bytes:
    """Key values, in the order of the columns, as text. Raises ReadFailedError for a value that is no scalar."""
    for value in ordered:
        if not isinstance(value, _SCALARS):
            raise ReadFailedError(
                ErrorKind.IO_ERROR,
                f"table {table}: a key value is text, a number, true, false or null, not {_json_type(value)}",
            )
    return exact_json.encode(ordered)


def check_key_names(table: str, key: object) -> tuple[str, ...]:
    """The field names of a key given as an object, sorted. Raises ReadFailedError for anything else."""
    if not isinstance(key, dict) or not key:
        raise ReadFailedError(
            ErrorKind.IO_ERROR,
            f"table {table}: a key is an object with at least one field, not {_json_type(key)}",
        )
    return tuple(sorted(key))


def _other_fields(table: str, columns: Sequence[str], values: object) -> ReadFailedError:
    given = (
        ", ".join(map(str, values)) if isinstance(values, dict) and values else _json_type(values)
    )
    return ReadFailedError(
        ErrorKind.IO_ERROR,
        f"table {table} has the key {', '.join(columns)}; the key given has {given}",
    )


def _json_type(value: object) -> str:
    names = {
        dict: "an object",
        list: "an array",
        str: "text",
        bool: "a truth value",
        type(None): "null",
    }
    return names.get(type(value), "a number")
