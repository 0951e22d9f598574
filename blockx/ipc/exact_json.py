"""Exact JSON: user values to bytes and back without losing a digit.

The only module that runs orjson or msgspec.json on user data. Pure: no I/O, no clock, no state but
one warning hook; any thread of main or of an executor. ``encode`` may run code of the user (a
property of his Enum, his ``tzinfo``), so an executor calls it inside the call's guarded time;
signals (``CallSignal``) pass through unharmed.

Law, from the design, section 3:

- An integer keeps every digit, a text every character; a number with point or exponent is a double.
  Decoding is msgspec's (orjson would make floats of integers beyond 64 bits). Encoding is orjson's
  first; what it refuses is walked here, which gives either bytes or the path of what is refused.
- What has no exact JSON form is refused by name, never rounded, shortened or guessed at.
- What ``encode`` writes is one line of UTF-8; ``decode`` reads it back, ``check_spliced`` takes it.
- Subclasses of dict, list, tuple, str, int and float are read through their base class; methods
  that they override are not asked.

Limits: ``DEPTH_MAX``, ``NODES_MAX``, ``TEXT_CHARS_MAX``, ``INTEGER_CHARS_MAX``; bytes are limited by ``frames``.
"""

import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, date, datetime
from gc import get_referents, is_tracked
from itertools import chain, filterfalse
from typing import Any, Final
from uuid import UUID

import msgspec
import orjson

DEPTH_MAX: Final = 250
"""Levels of lists and objects in a value that is written; deeper is refused. orjson stops at 254."""

NODES_MAX: Final = 5_000_000
"""Members of all lists and objects in a value that is written. More is refused: a small structure
that holds the same list many times over would otherwise fill the memory."""

TEXT_CHARS_MAX: Final = 64 * 1024 * 1024
"""Characters of all texts and keys in a value that is written, four times a frame. More is refused before it is
written: one long text in 100,000 places would otherwise fill the memory."""
SHARED_FROM: Final = 1_000
"""Containers of one level, but the second, from which on it is asked whether some are in several places: 50 ns each.
Fifteen lists within each other, each holding the next one twice, are 32,768 lists otherwise."""
FEW_MEMBERS: Final = 16
"""So few objects of so few members are not measured: they are at most 256 times what their function holds anyway."""

INTEGER_CHARS_MAX: Final = 4_300
"""Longest integer, its sign counted; Python's own limit for reading one. Longer is refused."""

_INTEGER_ABOVE: Final = 10**INTEGER_CHARS_MAX
_INTEGER_BELOW: Final = -(10 ** (INTEGER_CHARS_MAX - 1))
_REDUCTIONS_MAX: Final = 10
"""Steps from a foreign value to a plain one; an Enum whose value is itself must end somewhere."""
_NAME_CHARS_MAX: Final = 80
_PLAIN_FIELD: Final = vars(dataclasses)["_FIELD"]
"""What marks a field that is neither a ``ClassVar`` nor an ``InitVar``."""
_TAB, _NEW_LINE, _RETURN = b"\t\n\r"
"""As numbers: Python looks for a number in bytes ten times as fast as for bytes, since it tries each of these
as a number first, and makes an exception of the failure."""
_PATH_STEPS_MAX: Final = 20
"""Steps of a path that a message shows; of a longer one the first and the last ten."""

_OPTIONS: Final = (
    orjson.OPT_PASSTHROUGH_DATACLASS
    | orjson.OPT_PASSTHROUGH_DATETIME
    | orjson.OPT_PASSTHROUGH_SUBCLASS
)
_dumps = orjson.dumps
_decode = msgspec.json.Decoder().decode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _CallLine(msgspec.Struct, gc=False):
    """What of a line of a call list is not skipped."""

    function: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    args: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decode_call_line = msgspec.json.Decoder(_CallLine).decode


class InexactValueError(ValueError):
    """A value has no exact JSON form. ``path`` says which (``$.rows[3].price``), ``reason`` why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class TooLargeValueError(InexactValueError):
    """A value has more than ``TEXT_CHARS_MAX`` characters of text."""


class InvalidJsonError(ValueError):
    """Bytes that are no JSON, or JSON that cannot be read exactly; the text says what is wrong."""


class _Refusal(TypeError):  # noqa: N818 - carries a reason up to where the path is known
    """Inside this module: a value is refused, path not known yet."""


# ---- encode -----------------------------------------------------------------------------------


def encode(value: object) -> bytes:
    """The JSON of a user's value on one line. 0.2 us for a small row, 3 us with a uint256 in it.

    Lists from tuples and named tuples; values from Enums and from subclasses of int, str and float;
    items from numpy scalars; objects from dataclasses; text from UUIDs and, in RFC 3339, from
    ``datetime`` (naive: taken as UTC) and ``date``. Keys become the text that JSON would show.

    Raises:
        InexactValueError: NaN or infinity, Decimal, bytes, set, time, timedelta, generator,
            coroutine, any other class, a lone surrogate, two keys that become one text, a cycle,
            or a limit.
        TooLargeValueError: the limit of text.
    """
    try:
        if _is_level(value) and not _is_bounded(value, DEPTH_MAX - 1):
            return _encode_slowly(value)
        data = _dumps(value, _reduce, _OPTIONS)
    except TypeError as error:
        cause = error.__cause__
        if cause is not None and not isinstance(cause, Exception):
            raise cause from None  # a signal raised in _reduce, which orjson turned into this
        return _encode_slowly(value)
    # orjson writes NaN and infinities as null: where null stands, one of them may have been meant.
    # (``find``: ``in`` first tries to take the bytes for a number, 0.1 us.)
    if data.find(b"null") >= 0 and _may_hold_nan(value):
        return _encode_slowly(value)
    return data


def set_dataclass_warning(warn: Callable[[str], None] | None) -> None:
    """``warn(class name)`` is called the next time a dataclass is encoded, then never again."""
    global _dataclass_warning  # noqa: PLW0603 - once a process is what is wanted
    _dataclass_warning = warn


_dataclass_warning: Callable[[str], None] | None = None


def _is_bounded(value: object, levels: int, *, is_decoded: bool = False) -> bool:
    """Whether orjson may walk a value: at most ``levels`` levels, no Enum.

    Level by level, so that a list 200,000 deep costs 250 steps. Only what the garbage collector
    tracks is looked into, so an innermost object of plain members is no level: leaving those out
    makes this several times cheaper than the encoding itself. (It gives up tracking tuples of plain
    members too, and tuples of these; they are looked into.) ``is_decoded``: it comes from ``decode``,
    so that no part of it is in two places, and its texts were in the bytes.

    Raises:
        InexactValueError: more than ``NODES_MAX`` members.
        TooLargeValueError: more than ``TEXT_CHARS_MAX`` characters.
        _Refusal: a dataclass cannot be read.
    """
    level: list[Any] = [value]
    members = chars = 0
    while level and levels:
        levels -= 1
        below: list[object] = []
        for item in level:
            kind = type(item)
            # The usual ones are here: a call for each would be half of what encoding a read costs.
            if kind is list or kind is tuple:
                children = item
            elif kind is dict:
                children = item.values()
            else:
                children = _children(item)
                if children is None:
                    return False
            members += len(children)
            if members > NODES_MAX:
                # Said at once: the walk that finds paths would take seconds to come so far.
                raise InexactValueError("$", _TOO_MANY)
            if is_decoded:
                below.extend(filter(is_tracked, children))
            elif members <= FEW_MEMBERS:
                below.extend(filter(_is_level, children))
            else:
                kinds = set(map(type, children))
                chars += _text_chars(item, children, kinds)
                _check_chars(chars)
                below.extend(_levels_of(children, kinds))
        is_asked = len(level) > 1 and len(below) >= SHARED_FROM and not is_decoded
        if is_asked and _is_shared(below):
            return _is_bounded_shared(below, levels, members, chars)
        level = below
    return not level


def _is_shared(level: list[object]) -> bool:
    return len(set(map(id, level))) < len(level)


def _check_chars(chars: int) -> None:
    if chars > TEXT_CHARS_MAX:
        raise TooLargeValueError("$", _TOO_LONG)


def _is_bounded_shared(level: list[Any], levels: int, members: int, chars: int) -> bool:
    """``_is_bounded`` from a level on that holds a container in several places, with what was counted above it.

    Each is looked into once a level, and what it holds counted as often as it is there.
    """
    items = {id(item): item for item in level}
    times = Counter(map(id, level))
    while items and levels:
        levels -= 1
        below: dict[int, Any] = {}
        below_times: Counter[int] = Counter()
        for key, item in items.items():
            children = _children(item)
            if children is None:
                return False
            kinds = set(map(type, children))
            members += len(children) * times[key]
            chars += _text_chars(item, children, kinds) * times[key]
            if members > NODES_MAX:
                raise InexactValueError("$", _TOO_MANY)
            _check_chars(chars)
            for child in _levels_of(children, kinds):
                below[id(child)] = child
                below_times[id(child)] += times[key]
        items, times = below, below_times
    return not items


def _is_level(child: object) -> bool:
    """Whether a member of a small container is looked into."""
    kind = type(child)
    return is_tracked(child) or kind is tuple or (kind is dict and len(child) > FEW_MEMBERS)  # type: ignore[arg-type]


def _levels_of(children: Collection[object], kinds: set[type]) -> list[object]:
    """The members of a large container that are looked into. ``kinds``: their types."""
    found = list(filter(is_tracked, children))
    if tuple in kinds:
        found += [child for child in children if type(child) is tuple and not is_tracked(child)]
    return found


def _text_chars(item: object, children: Collection[object], kinds: set[type]) -> int:
    """Characters of the texts that are written for a container, those of innermost objects included.

    ``kinds``: the types of its children. 0.2 us for each small row of a long list, more than encoding it.
    """
    if issubclass(type(item), str):
        return str.__len__(item)  # type: ignore[arg-type]
    chars = 0
    inner: list[Any] = []
    if str in kinds:
        chars += sum([len(text) for text in children if type(text) is str])
    if dict in kinds:
        inner = [child for child in filterfalse(is_tracked, children) if type(child) is dict]
        chars += sum([len(text) for text in get_referents(*inner) if type(text) is str])
    if issubclass(type(item), dict):
        inner.append(list(dict.keys(item)))  # type: ignore[arg-type]
    try:
        return chars + sum(map(str.__len__, chain.from_iterable(inner)))
    except TypeError:  # a key that is no text: the walk will count
        return chars


def _children(item: Any) -> Collection[object] | None:
    """What another container holds, read without asking an overridden method; () of anything else.

    None for an Enum: orjson 3.13 crashes the process when the user's ``value`` property raises.
    """
    kind = type(item)
    if issubclass(kind, enum.Enum):
        return None
    if issubclass(kind, dict):
        return list(dict.values(item))
    if issubclass(kind, list):
        return list(list.__iter__(item))
    if issubclass(kind, tuple):
        return list(tuple.__iter__(item))
    if _declared_fields(kind) is not None:
        return _children(_reduce(item))
    return ()


def _may_hold_nan(value: object) -> bool:
    """False if there is certainly no NaN or infinity: all values are plain, all floats finite."""
    waiting: list[Any] = [value]
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if kind is dict:
            waiting.extend(item.values())
        elif kind is list or kind is tuple:
            waiting.extend(item)
        elif kind is float:
            if not math.isfinite(item):
                return True
        elif kind not in _PLAIN_LEAVES:
            return True
    return False


_ALWAYS_PLAIN: Final = frozenset({bool, type(None)})
_PLAIN_LEAVES: Final = frozenset({str, int, bool, type(None)})


def _encode_slowly(value: object) -> bytes:
    """Build a plain copy that orjson takes, big integers as fragments, or say what is refused."""
    return _dumps(_Walk().plain(value))


class _Walk:
    """One walk over one value. Recursion is bounded by ``DEPTH_MAX``."""

    __slots__ = ("_chars", "_members", "_open", "_path")

    def __init__(self) -> None:
        self._path: list[str | int] = []
        self._open: set[int] = set()
        """Identities of the containers on the path: meeting one again is a cycle."""
        self._members = self._chars = 0

    def plain(self, value: object) -> object:
        """A copy of ``value`` made of what orjson takes without asking."""
        origin = value
        for _ in range(_REDUCTIONS_MAX):
            convert = _CONVERTERS.get(type(value))
            if convert is not None:
                return convert(self, value, origin)
            try:
                value = _reduce(value)
            except _Refusal as refusal:
                raise self._refused(str(refusal)) from None
        raise self._refused(
            f"a value of type {_name(type(origin))} is no plain value inside either"
        )

    def _scalar(self, value: object, _origin: object) -> object:
        return value

    def _text(self, value: str, _origin: object) -> str:
        if not _is_unicode(value):
            raise self._refused(_LONE_SURROGATE)
        self._count(len(value))
        return value

    def _integer(self, value: int, _origin: object) -> object:
        if -0x8000_0000_0000_0000 <= value <= 0xFFFF_FFFF_FFFF_FFFF:
            return value
        try:
            text = _integer_text(value)
        except _Refusal as refusal:
            raise self._refused(str(refusal)) from None
        self._count(len(text))
        return orjson.Fragment(text)

    def _float(self, value: float, _origin: object) -> float:
        if not math.isfinite(value):
            raise self._refused(_not_finite(value))
        return value

    def _list(self, value: list[Any] | tuple[Any, ...], origin: object) -> list[object]:
        self._enter(origin, len(value))
        path, plain, out = self._path, self.plain, []
        path.append(0)
        for index, item in enumerate(value):
            kind = type(item)
            if kind in _ALWAYS_PLAIN:
                out.append(item)
            elif kind is str and item.isascii():
                self._count(len(item))
                out.append(item)
            else:
                path[-1] = index
                out.append(plain(item))
        path.pop()
        self._open.discard(id(origin))
        return out

    def _dict(self, value: dict[object, Any], origin: object) -> dict[str, object]:
        self._enter(origin, len(value))
        path, plain = self._path, self.plain
        out: dict[str, object] = {}
        for key, item in value.items():
            text = key if type(key) is str and key.isascii() else self._key(key)
            if text in out:
                raise self._refused(f"two keys become the same text {_shown(text)}")
            self._count(len(text))
            kind = type(item)
            if kind in _ALWAYS_PLAIN:
                out[text] = item
            elif kind is str and item.isascii():
                self._count(len(item))
                out[text] = item
            else:
                path.append(text)
                out[text] = plain(item)
                path.pop()
        self._open.discard(id(origin))
        return out

    def _enter(self, origin: object, members: int) -> None:
        if id(origin) in self._open:
            raise self._refused("a cycle: it contains itself")
        if len(self._path) >= DEPTH_MAX:
            raise self._refused(f"nested deeper than {DEPTH_MAX} levels")
        self._members += members
        if self._members > NODES_MAX:
            raise self._refused(_TOO_MANY)
        self._open.add(id(origin))

    def _count(self, chars: int) -> None:
        self._chars += chars
        if self._chars > TEXT_CHARS_MAX:
            raise TooLargeValueError("$", _TOO_LONG)

    def _key(self, key: object) -> str:
        """The text that stands for a key."""
        try:
            return _key_text(key)
        except _Refusal as refusal:
            raise self._refused(f"a key is refused: {refusal}") from None

    def _refused(self, reason: str) -> InexactValueError:
        steps = [f"[{step}]" if type(step) is int else _member(str(step)) for step in self._path]
        if len(steps) > _PATH_STEPS_MAX:
            steps[_PATH_STEPS_MAX // 2 : -_PATH_STEPS_MAX // 2] = ["..."]
        return InexactValueError("$" + "".join(steps), reason)


_CONVERTERS: Final[dict[type, Callable[[_Walk, Any, object], object]]] = {
    type(None): _Walk._scalar,
    bool: _Walk._scalar,
    str: _Walk._text,
    int: _Walk._integer,
    float: _Walk._float,
    list: _Walk._list,
    tuple: _Walk._list,
    dict: _Walk._dict,
}
"""By exact type; everything else is reduced first."""


# ---- from foreign values to plain ones --------------------------------------------------------


def _reduce(value: object) -> object:
    """One step from a foreign value towards a plain one. Also orjson's ``default``.

    Raises:
        _Refusal: it has no exact JSON form, or code of the user failed while it was read.
    """
    kind = type(value)
    try:
        return _reducer(kind)(value)
    except _Refusal:
        raise
    except Exception as error:  # noqa: BLE001 - user code: an Enum's property, a tzinfo, a descriptor
        reason = f"a value of type {_name(kind)} cannot be read: {_name(type(error))}"
        raise _Refusal(reason) from None


def _reducer(kind: type) -> Callable[[Any], object]:
    """What makes one step from a value of this class."""
    # issubclass of the class, not isinstance: the latter believes a __class__ property of the user.
    for base, reducer in _REDUCERS:
        if issubclass(kind, base):
            return reducer
    names = map(_class_name, _class_bases(kind))
    if "generic" in names and _class_module(kind) == "numpy":
        return _numpy_item
    if _declared_fields(kind) is not None:
        return _dataclass_dict
    raise _Refusal(_why_refused(kind))


def _datetime_text(value: datetime) -> str:
    """RFC 3339, always with an offset, as in ``2024-01-02T03:04:05+00:00``. Naive: taken as UTC."""
    offset = datetime.utcoffset(value)
    if offset is None:
        return datetime.isoformat(value) + "+00:00"
    if offset.total_seconds() % 60:  # as in zones' early years; RFC 3339 has whole minutes only
        return datetime.isoformat(datetime.astimezone(value, UTC))
    return datetime.isoformat(value)


def _numpy_item(value: Any) -> object:
    """The Python value of a numpy scalar, if it says the same. numpy is not imported for it."""
    kind, item = type(value), value.item()
    # Of a time in nanoseconds the item is a bare count.
    is_time = any(_class_name(b) in ("datetime64", "timedelta64") for b in _class_bases(kind))
    if type(item) not in _NUMPY_ITEMS or (is_time and type(item) is int):
        raise _Refusal(_why_refused(kind))
    return item


_NUMPY_ITEMS: Final = frozenset({bool, int, float, str, date, datetime})


def _dataclass_dict(value: Any) -> dict[str, object]:
    """Field names and values: ``dataclasses.asdict`` without its copying, so without user hooks."""
    global _dataclass_warning
    warn, _dataclass_warning = _dataclass_warning, None
    if warn is not None:
        warn(_name(type(value)))
    fields = _declared_fields(type(value)) or {}
    names = [name for name, field in fields.items() if field._field_type is _PLAIN_FIELD]
    return {name: object.__getattribute__(value, name) for name in names}


def _declared_fields(kind: type) -> dict[str, Any] | None:
    """The fields of a dataclass, pseudo-fields included; None: it is none.

    As ``dataclasses.fields`` finds them, but without asking attributes of a class, whose metaclass may be the user's.
    """
    for base in _class_bases(kind):
        found = _class_names(base).get("__dataclass_fields__")
        if found is not None:
            is_genuine = type(found) is dict and all(
                type(field) is dataclasses.Field for field in found.values()
            )
            return found if is_genuine else None
    return None


_REDUCERS: Final[tuple[tuple[type, Callable[[Any], object]], ...]] = (
    (enum.Enum, lambda value: value.value),
    (datetime, _datetime_text),
    (date, date.isoformat),
    (int, int.__index__),
    (str, str.__str__),
    (float, float.__float__),
    (dict, lambda value: dict(dict.items(value))),
    (list, lambda value: list(list.__iter__(value))),
    (tuple, lambda value: list(tuple.__iter__(value))),
    (UUID, UUID.__str__),
)
"""In this order: an Enum may be an int too, a datetime is a date."""


def _key_text(key: Any) -> str:
    """The text that JSON would show for a key.

    Raises:
        _Refusal: lists, objects, times and whatever is no value either.
    """
    for _ in range(_REDUCTIONS_MAX):
        kind = type(key)
        if kind is str:
            if not _is_unicode(key):
                raise _Refusal(_LONE_SURROGATE)
            return str(key)
        if kind is int:
            return _integer_text(key).decode()
        if kind is float and not math.isfinite(key):
            raise _Refusal(_not_finite(key))
        if kind is float or kind is bool or key is None:
            return _dumps(key).decode()
        if issubclass(kind, tuple) or _declared_fields(kind) is not None:
            raise _Refusal(f"a value of type {_name(kind)} is no text; use a text as the key")
        key = _reduce(key)
    raise _Refusal("it is no plain value inside either")


def _integer_text(value: int) -> bytes:
    if not _INTEGER_BELOW < value < _INTEGER_ABOVE:
        raise _Refusal(f"an integer of more than {INTEGER_CHARS_MAX} digits")
    try:
        return int.__repr__(value).encode()
    except ValueError:  # sys.set_int_max_str_digits below our own limit
        raise _Refusal("an integer with more digits than this process may write") from None


def _is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: no lone surrogate in it."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- words for people -------------------------------------------------------------------------


def _not_finite(value: float) -> str:
    name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return f"{name} is no JSON number; return None or a text instead"


_TOO_MANY: Final = f"more than {NODES_MAX} values (a list in itself has no end of them)"
_TOO_LONG: Final = f"more than {TEXT_CHARS_MAX:,} characters of text"
_LONE_SURROGATE: Final = "a text with a lone surrogate, which UTF-8 cannot hold"
_HINTS: Final = {
    "Decimal": "return str(value), or an int in the smallest unit: readers would make a float of it",
    "bytes": "return '0x' + value.hex() or value.decode()",
    "bytearray": "return '0x' + value.hex() or value.decode()",
    "memoryview": "return '0x' + value.hex()",
    "set": "it has no order; return sorted(value)",
    "frozenset": "it has no order; return sorted(value)",
    "time": "return value.isoformat()",
    "timedelta": "return value.total_seconds()",
    "complex": "return its real and imaginary part",
    "generator": "return list(value)",
    "range": "return list(value)",
    "coroutine": "functions are plain synchronous Python: no async def, no await",
    "async_generator": "functions are plain synchronous Python: no async def, no await",
    "ndarray": "return value.tolist()",
}


def _why_refused(kind: type) -> str:
    name = _name(kind)
    hint = _HINTS.get(name, "return numbers, texts, lists and dicts")
    return f"a value of type {name} has no exact JSON form; {hint}"


_class_name: Final[Callable[[type], str]] = vars(type)["__name__"].__get__
_class_module: Final[Callable[[type], object]] = vars(type)["__module__"].__get__
_class_names: Final[Callable[[type], Mapping[str, Any]]] = vars(type)["__dict__"].__get__
_class_bases: Final[Callable[[type], tuple[type, ...]]] = vars(type)["__mro__"].__get__
"""Of the class itself: its metaclass may be the user's, with a ``__name__`` of its own."""


def _name(kind: type) -> str:
    return _class_name(kind)[:_NAME_CHARS_MAX]


def _member(key: str) -> str:
    """A step of a path: ``.price``, or ``["a b"]`` for what is no name."""
    return f".{key}" if key.isidentifier() and len(key) <= _NAME_CHARS_MAX else f"[{_shown(key)}]"


def _shown(text: str) -> str:
    """A text in quotes, shortened, without characters that spoil a terminal."""
    short = text if len(text) <= _NAME_CHARS_MAX else text[:_NAME_CHARS_MAX] + "..."
    return _dumps(ascii(short)[1:-1]).decode()


# ---- decode -----------------------------------------------------------------------------------


def decode(data: bytes | bytearray | memoryview | str) -> object:
    """The value of a JSON text, every digit of it. A key given twice: the last one counts.

    Raises:
        InvalidJsonError: no JSON, more than one value, nested deeper than the stack allows (about
            900 levels, from Python 3.13 on 10,000), or a number out of range: ``1e400``, or an integer of over
            4,300 digits.
    """
    try:
        return _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _invalid(error) from None


def canonical(data: bytes | memoryview) -> bytes:
    """One form for equal values, for cache keys: members sorted, no spaces, shortest escapes.

    ``1``, ``1.0`` and ``true`` are three; ``{"a":1,"b":2}`` and ``{"b":2,"a":1}`` are one. 0.3 us.

    Raises:
        InvalidJsonError: as ``decode``.
    """
    try:
        return _encode_sorted(_decode(data))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _invalid(error) from None


def check_spliced(raw: bytes) -> None:
    """Check a raw value of an executor before it goes, as it is, into a file or another message.

    What passes is exactly one JSON value in valid UTF-8 on one line, with numbers that ``decode``
    takes, within ``DEPTH_MAX`` and ``NODES_MAX``. The value is built and dropped: 0.3 us for a row,
    2.5 ns a byte for big ones. A check of the syntax alone would be four times as fast, but leaves
    UTF-8 and the ranges of numbers unchecked.

    Raises:
        InvalidJsonError: it is not that.
    """
    value = decode(raw)
    # In strings msgspec takes no control character; between tokens JSON allows these three.
    if _NEW_LINE in raw or _RETURN in raw or _TAB in raw:
        raise InvalidJsonError("a line break or a tab between the parts of a value")
    # Few bytes or few brackets: it can be neither deep nor big.
    if len(raw) <= DEPTH_MAX or raw.count(b"[") + raw.count(b"{") <= DEPTH_MAX:
        return
    try:
        is_bounded = _is_bounded(value, DEPTH_MAX, is_decoded=True)
    except InexactValueError as error:
        raise InvalidJsonError(error.reason) from None
    if not is_bounded:
        raise InvalidJsonError(f"nested deeper than {DEPTH_MAX} levels")


def _invalid(error: Exception) -> InvalidJsonError:
    if isinstance(error, RecursionError):
        return InvalidJsonError("JSON nested too deep to be read")
    if isinstance(error, msgspec.ValidationError):  # untyped decoding has no other reason for it
        return InvalidJsonError(
            f"a number is out of range: {error} (a double, or an integer of at most"
            f" {INTEGER_CHARS_MAX} digits)"
        )
    return InvalidJsonError(str(error))


# ---- raw parts --------------------------------------------------------------------------------


def positional(raw: bytes) -> bytes:
    """Arguments as the list that wire, cache key and journal hold: X that is no array is [X]."""
    raw = raw.strip(b" \t\n\r")
    return raw if raw[:1] == b"[" else b"[" + raw + b"]"


def raw_members(data: bytes) -> dict[str, bytes]:
    """The members of a JSON object, each as the bytes that stand there, insides not checked.

    Raises:
        InvalidJsonError: no JSON object.
    """
    try:
        return {key: bytes(raw) for key, raw in _decode_members(data).items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidJsonError(str(error)) from None


def call_line(data: bytes) -> tuple[bytes | None, bytes | None]:
    """``function`` and ``args`` of a JSON object as the bytes that stand there, insides not checked; None: it
    has none. Other members are skipped. 0.3 us a line less than ``raw_members``.

    Raises:
        InvalidJsonError: no JSON object.
    """
    try:
        line = _decode_call_line(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidJsonError(str(error)) from None
    function, args = line.function, line.args
    return (
        None if function is msgspec.UNSET else bytes(function),
        None if args is msgspec.UNSET else bytes(args),
    )


def raw_elements(data: bytes) -> list[bytes]:
    """The elements of a JSON array, each as the bytes that stand there, insides not checked.

    Raises:
        InvalidJsonError: no JSON array.
    """
    try:
        return list(map(bytes, _decode_elements(data)))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidJsonError(str(error)) from None
