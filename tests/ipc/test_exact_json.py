"""Exact JSON: what goes in comes out digit for digit, and what cannot is refused by name and place."""

import contextlib
import dataclasses
import enum
import gc
import itertools
import json
import math
import uuid
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockx.errors import CallCancelledError
from blockx.ipc import exact_json
from blockx.ipc.exact_json import (
    DEPTH_MAX,
    InexactValueError,
    InvalidJsonError,
    call_line,
    canonical,
    check_spliced,
    decode,
    encode,
    positional,
    raw_elements,
    raw_members,
)

BIG = 2**256


class Price(NamedTuple):
    symbol: str
    wei: int


class Color(enum.Enum):
    RED = "red"
    HUGE = BIG
    NOT = float("nan")


class Level(enum.IntEnum):
    LOW = 1


class Text(enum.StrEnum):
    A = "a"


class MyInt(int):
    def __repr__(self) -> str:
        raise AssertionError("a hook of the user ran")

    __str__ = __index__ = __int__ = __repr__  # type: ignore[assignment]


class MyStr(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise AssertionError("a hook of the user ran")

    __repr__ = encode = __str__  # type: ignore[assignment]


class MyFloat(float):
    def __float__(self) -> float:
        raise AssertionError("a hook of the user ran")

    __repr__ = __str__ = __float__  # type: ignore[assignment]


class MyDict(dict[Any, Any]):
    def __iter__(self) -> Any:
        raise AssertionError("a hook of the user ran")

    items = keys = values = __getitem__ = __len__ = __iter__  # type: ignore[assignment]


class MyList(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("a hook of the user ran")

    __len__ = __getitem__ = __iter__  # type: ignore[assignment]


@dataclasses.dataclass
class Row:
    holder: str
    wei: int

    def __deepcopy__(self, memo: object) -> object:
        raise AssertionError("a hook of the user ran")


@dataclasses.dataclass
class Watched:
    n: int

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("a hook of the user ran")


def never_asked(*_arguments: object) -> Any:
    raise AssertionError("a hook of the user ran")


def test_a_class_is_not_asked_what_it_is() -> None:
    # Made here: pytest asks the classes of a module.
    hooks = dict.fromkeys(("__getattribute__", "__eq__", "__instancecheck__"), never_asked)
    hooked = type("Hooked", (type,), {**hooks, "__hash__": type.__hash__})
    lying = hooked("Lying", (), {})
    pretended = type("Pretended", (), {"__dataclass_fields__": property(never_asked)})
    for kind in (lying, pretended):
        value = object.__new__(kind)
        for inside in (value, [value], {"a": value}, {value: 1}):
            with pytest.raises(InexactValueError, match=r"type (Lying|Pretended)"):
                encode(inside)


def test_the_fields_of_a_dataclass_are_read_without_asking_it() -> None:
    assert encode([Watched(1)]) == b'[{"n":1}]'


@dataclasses.dataclass(slots=True, frozen=True)
class Slotted:
    row: Row
    extra: object = None


_numbers = itertools.count(1)


def number_and_class(value: object) -> str:
    """For test ids: the text of some values here cannot be had, and classes come twice."""
    return f"{next(_numbers)}-{type(value).__name__}"


plain_trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**255), 2**256)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def types_and_values(value: object) -> object:
    """A form in which 1, 1.0 and True differ, and 0.0 and -0.0."""
    if isinstance(value, dict):
        return {key: types_and_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [types_and_values(item) for item in value]
    return (type(value), repr(value))


@settings(max_examples=50)
@given(plain_trees)
def test_every_plain_tree_comes_back_as_it_was_from_one_line(tree: object) -> None:
    data = encode(tree)
    assert types_and_values(decode(data)) == types_and_values(tree)
    assert types_and_values(json.loads(data)) == types_and_values(tree)
    assert not any(byte < 0x20 for byte in data)
    check_spliced(data)


@settings(max_examples=50)
@given(plain_trees)
def test_a_big_integer_beside_it_changes_nothing_in_how_a_value_is_written(tree: object) -> None:
    assert encode([tree, BIG]) == b"[" + encode(tree) + b"," + str(BIG).encode() + b"]"


@pytest.mark.parametrize(
    "number",
    [
        2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, -(2**255), 2**256 - 1, 10**4300 - 1,
        -(10**4299) + 1,
    ],
)  # fmt: skip
def test_integers_of_every_size_keep_all_digits(number: int) -> None:
    assert encode({"n": number}) == b'{"n":%d}' % number
    assert decode(b"%d" % number) == number


@pytest.mark.parametrize(
    "number", [10**4300, -(10**4299), 10**100_000], ids=["4301", "-4300", "huge"]
)
def test_integers_over_4300_characters_are_refused_by_name(number: int) -> None:
    with pytest.raises(InexactValueError) as caught:
        encode({"rows": [1, number]})
    assert str(caught.value) == "$.rows[1]: an integer of more than 4300 digits"
    with pytest.raises(InexactValueError, match="a key is refused: an integer of more than 4300"):
        encode({number: 1})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, (2, 3)), b"[1,[2,3]]"),
        (Price("ETH", BIG), b'["ETH",%d]' % BIG),
        (Price("ETH", 1), b'["ETH",1]'),
        ([Color.RED, Level.LOW, Text.A], b'["red",1,"a"]'),
        (Color.HUGE, b"%d" % BIG),
        ({"a": MyInt(7), "b": MyInt(BIG)}, b'{"a":7,"b":%d}' % BIG),
        ([MyStr("x"), MyFloat(1.5)], b'["x",1.5]'),
        (MyDict(a=MyList([1, None])), b'{"a":[1,null]}'),
        ([MyDict(a=MyList([BIG]))], b'[{"a":[%d]}]' % BIG),
        (OrderedDict(a=1), b'{"a":1}'),
        (Counter("a"), b'{"a":1}'),
        (defaultdict(list, a=[1]), b'{"a":[1]}'),
        (uuid.UUID(int=1), b'"00000000-0000-0000-0000-000000000001"'),
        (Slotted(Row("a", BIG)), b'{"row":{"holder":"a","wei":%d},"extra":null}' % BIG),
        ([Slotted(Row("a", 1), Row("b", 2))],
         b'[{"row":{"holder":"a","wei":1},"extra":{"holder":"b","wei":2}}]'),
        ("a\x00\n\x7f\u2028\U0001f600", '"a\\u0000\\n\x7f\u2028\U0001f600"'.encode()),
        (np.int64(5), b"5"),
        ([np.uint64(2**64 - 1), np.bool_(True), np.float64(0.1), np.str_("s")],
         b'[18446744073709551615,true,0.1,"s"]'),
        (np.float32(0.5), b"0.5"),
        (np.datetime64("2024-01-02"), b'"2024-01-02"'),
    ],
    ids=number_and_class,
)  # fmt: skip
def test_values_that_have_an_exact_form_are_written_in_it(value: object, expected: bytes) -> None:
    assert encode(value) == expected
    # Beside a big integer the other path is taken, with the same answer.
    assert encode([value, BIG]) == b"[" + expected + b",%d]" % BIG


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime(2024, 1, 2, 3, 4, 5), "2024-01-02T03:04:05+00:00"),  # noqa: DTZ001 - naive is the case
        (datetime(2024, 1, 2, 3, 4, 5, 6, UTC), "2024-01-02T03:04:05.000006+00:00"),
        (datetime(2024, 1, 2, 3, tzinfo=timezone(timedelta(hours=5, minutes=30))), "2024-01-02T03:00:00+05:30"),
        (datetime(1890, 1, 1, tzinfo=timezone(timedelta(minutes=53, seconds=28))), "1889-12-31T23:06:32+00:00"),
        (date(2024, 2, 29), "2024-02-29"),
    ],
)  # fmt: skip
def test_times_are_rfc_3339_with_an_offset(value: date, expected: str) -> None:
    assert encode([value]) == b'["%s"]' % expected.encode()
    assert encode({value: BIG}) == b'{"%s":%d}' % (expected.encode(), BIG)


def generator() -> Iterator[int]:
    yield 1


REFUSED = [
    (float("nan"), "NaN is no JSON number"),
    (float("inf"), "Infinity is no JSON number"),
    (-math.inf, "-Infinity is no JSON number"),
    (Color.NOT, "NaN is no JSON number"),
    (MyFloat("nan"), "NaN is no JSON number"),
    (np.float64("nan"), "NaN is no JSON number"),
    (np.float32("inf"), "Infinity is no JSON number"),
    (Decimal("1.10"), "type Decimal has no exact JSON form; return str"),
    (b"\x01", "type bytes has no exact JSON form"),
    (bytearray(b"\x01"), "type bytearray"),
    ({1}, "type set has no exact JSON form"),
    (frozenset({1}), "type frozenset"),
    (time(1, 2), "type time has"),
    (timedelta(1), "type timedelta has"),
    (1j, "type complex"),
    (generator(), "type generator"),
    (range(3), "type range"),
    ({}.keys(), "type dict_keys"),
    (object(), "type object has no exact JSON form"),
    (int, "type type"),
    (np.arange(2), "type ndarray has no exact JSON form; return value.tolist"),
    (np.arange(1), "type ndarray"),
    (np.datetime64(1, "ns"), "type datetime64"),
    (np.datetime64("NaT"), "type datetime64"),
    (np.timedelta64(1, "ns"), "type timedelta64"),
    (np.longdouble("0.1"), "type longdouble"),
    (np.complex128(1), "type complex128"),
    (np.bytes_(b"a"), "type bytes_"),
    ("\ud800", "a lone surrogate"),
    ("a\udc00", "a lone surrogate"),
]


@pytest.mark.parametrize(("value", "text"), REFUSED, ids=number_and_class)
def test_values_without_an_exact_form_are_refused_with_their_path(value: object, text: str) -> None:
    places: list[tuple[str, Callable[[Any], object]]] = [
        ("$", lambda v: v),
        ("$.rows[3].price", lambda v: {"rows": [1, "a", None, {"ok": 1, "price": v}]}),
        ("$.rows[3].price", lambda v: {"big": BIG, "rows": [1, 2, BIG, {"price": v}]}),
        ("$[1][0]", lambda v: [None, (v,)]),
        ("$.row.wei", lambda v: Slotted(Row("a", 1), 0) and {"row": Row("a", v)}),
    ]
    for path, place in places:
        with pytest.raises(InexactValueError) as caught:
            encode(place(value))
        assert caught.value.path == path
        assert text in caught.value.reason
        assert str(caught.value) == f"{path}: {caught.value.reason}"


async def coroutine() -> None:
    pass


def test_a_coroutine_is_refused_with_what_to_do() -> None:
    running = coroutine()
    with pytest.raises(InexactValueError, match=r"type coroutine.*no async def"):
        encode({"x": running})
    running.close()


def test_null_and_the_word_null_are_no_nan() -> None:
    assert (
        encode({"a": None, "b": "null", "c": [1.5, None]})
        == b'{"a":null,"b":"null","c":[1.5,null]}'
    )
    assert encode([Row("null", 1), None]) == b'[{"holder":"null","wei":1},null]'


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (1, "1"), (-1, "-1"), (BIG, str(BIG)), (1.5, "1.5"), (True, "true"), (False, "false"),
        (None, "null"), (MyStr("k"), "k"), (MyInt(3), "3"), (Color.RED, "red"), (Level.LOW, "1"),
        (uuid.UUID(int=2), "00000000-0000-0000-0000-000000000002"), (np.int64(9), "9"), ("é", "é"),
    ],
    ids=number_and_class,
)  # fmt: skip
def test_keys_become_the_text_that_json_would_show(key: object, text: str) -> None:
    assert decode(encode({key: 1})) == {text: 1}
    assert decode(encode({"a": {key: BIG}})) == {"a": {text: BIG}}


@pytest.mark.parametrize(
    ("value", "path", "reason"),
    [
        ({1: "a", "1": "b"}, "$", 'two keys become the same text "1"'),
        ({"x": {True: 1, "true": 2}}, "$.x", 'two keys become the same text "true"'),
        (
            {(1, 2): 1},
            "$",
            "a key is refused: a value of type tuple is no text; use a text as the key",
        ),
        ({"x": {b"k": 1}}, "$.x", "a key is refused: a value of type bytes has no exact JSON form"),
        ({float("nan"): 1}, "$", "a key is refused: NaN is no JSON number"),
        ({"\ud800": 1}, "$", "a key is refused: a text with a lone surrogate"),
        ({"a b": {"c\n": {"d": {1}}}}, '$["a b"]["c\\\\n"].d', "a value of type set"),
    ],
)
def test_keys_without_one_text_are_refused(value: object, path: str, reason: str) -> None:
    with pytest.raises(InexactValueError) as caught:
        encode(value)
    assert caught.value.path == path
    assert caught.value.reason.startswith(reason)


def nested(levels: int, innermost: object) -> object:
    value = innermost
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("innermost", [[], {}, {"a": 1}, {"a": BIG}, [BIG], Price("a", 1)])
def test_250_levels_are_written_and_251_are_refused_whatever_is_inside(innermost: object) -> None:
    data = encode(nested(DEPTH_MAX - 1, innermost))
    check_spliced(data)
    assert encode(decode(data)) == data
    with pytest.raises(InexactValueError, match=r"^\$(\[0\]){10}\.\.\.(\[0\]){10}: nested deeper"):
        encode(nested(DEPTH_MAX, innermost))


WRAPPERS: dict[str, Callable[[Any], object]] = {
    "list": lambda value: [value],
    "tuple": lambda value: (value,),
    "dict": lambda value: {"k": value},
    "dataclass": lambda value: Row("a", value),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_value_200000_levels_deep_is_refused(kind: str) -> None:
    value: object = 1
    for _ in range(200_000):
        value = WRAPPERS[kind](value)
    with pytest.raises(InexactValueError, match="nested deeper than 250 levels"):
        encode(value)


def test_cycles_are_refused_by_name() -> None:
    ring: list[Any] = [1]
    ring.append({"again": ring})
    row = Row("a", 1)
    row.wei = [row]  # type: ignore[assignment]
    own: MyDict = MyDict()
    dict.__setitem__(own, "x", own)
    for value, path in [(ring, "$[1].again"), (row, "$.wei[0]"), (own, "$.x")]:
        with pytest.raises(InexactValueError) as caught:
            encode(value)
        assert (caught.value.path, caught.value.reason) == (path, "a cycle: it contains itself")


def test_one_list_at_two_places_is_no_cycle() -> None:
    shared = [1]
    assert encode({"a": shared, "b": shared, "c": BIG}) == b'{"a":[1],"b":[1],"c":%d}' % BIG


def test_small_structures_that_would_fill_the_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact_json, "NODES_MAX", 50_000)  # 5,000,000 take 0.1 s to count
    wide: object = [0] * 1000
    for _ in range(4):
        wide = [wide] * 1000
    with pytest.raises(InexactValueError, match=r"^\$: more than 5000000 values"):
        encode(wide)
    with pytest.raises(InexactValueError, match="more than 5000000 values"):
        encode([Row("a", wide)])  # type: ignore[arg-type]


def test_the_slow_walk_counts_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_json, "NODES_MAX", 10)
    assert encode([Level.LOW] * 10) == b"[1,1,1,1,1,1,1,1,1,1]"
    with pytest.raises(InexactValueError, match="more than"):
        encode({"a": Level.LOW, "b": {str(i): i for i in range(10)}})


def test_an_enum_with_a_property_that_fails_neither_crashes_nor_hides_the_path() -> None:
    class Broken(enum.Enum):
        A = 1

        @property
        def value(self) -> object:
            raise KeyError("no")

    class Endless(enum.Enum):
        A = 1

        @property
        def value(self) -> object:
            return self

    for wrap in (list, tuple):
        with pytest.raises(
            InexactValueError, match=r"^\$\[0\]: a value of type Broken cannot be read: KeyErr"
        ):
            encode(wrap([Broken.A]))
    with pytest.raises(
        InexactValueError, match=r"^\$.e: a value of type Endless is no plain value inside"
    ):
        encode({"e": Endless.A})


def test_a_dataclass_that_lacks_a_field_is_refused() -> None:
    row = Row("a", 1)
    del row.wei
    with pytest.raises(
        InexactValueError, match=r"^\$: a value of type Row cannot be read: AttributeError"
    ):
        encode(row)


class Signalling(tzinfo):
    """Is asked while a signal arrives, once."""

    has_come = False

    def utcoffset(self, _moment: datetime | None) -> timedelta:
        if self.has_come:
            return timedelta(0)
        self.has_come = True
        raise CallCancelledError


@pytest.mark.parametrize("beside", [1, BIG])
def test_a_signal_that_arrives_while_encoding_passes_through(beside: int) -> None:
    with pytest.raises(CallCancelledError):
        encode([beside, datetime(2024, 1, 1, tzinfo=Signalling())])


def test_a_class_that_lies_about_itself_is_seen_through() -> None:
    class Liar:
        __class__ = dict  # type: ignore[assignment]

    with pytest.raises(InexactValueError, match="type Liar has no exact JSON form"):
        encode([Liar()])


def test_the_dataclass_warning_comes_once() -> None:
    said: list[str] = []
    exact_json.set_dataclass_warning(said.append)
    encode([Row("a", 1), Row("b", 2)])
    encode(Row("c", BIG))
    assert said == ["Row"]


def test_namedtuples_made_at_run_time_are_lists() -> None:
    pair = namedtuple("pair", "a b")
    assert encode({"p": pair(1, b=pair(2, 3))}) == b'{"p":[1,[2,3]]}'


# ---- decode, canonical, check_spliced ----


MALFORMED = [
    b"", b" ", b"nul", b"NaN", b"Infinity", b"-", b"01", b"1.", b".5", b"+1", b"0x10", b"1 2", b"[1,]",
    b"{1:2}", b"'a'", b'"\x01"', b'"a\nb"', b'"\\x"', b'"\\ud800"', b'"\\udc00a"', b'"\xff"',
    b'"\xed\xa0\x80"', b'"\xc0\x80"', b'{"\xff":1}', b"\xef\xbb\xbf1", b"[" * 200_000, b"{}{}",
]  # fmt: skip
OUT_OF_RANGE = [
    b"1e400",
    b"-1e400",
    b"1" + b"0" * 310 + b".0",
    b"1" * 4301,
    b'{"a":[%s]}' % (b"9" * 4301),
]


@pytest.mark.parametrize("data", MALFORMED + OUT_OF_RANGE)
def test_what_is_no_json_is_refused_everywhere(data: bytes) -> None:
    for read in (decode, canonical, check_spliced):
        with pytest.raises(InvalidJsonError):
            read(data)


@pytest.mark.parametrize("data", OUT_OF_RANGE)
def test_numbers_out_of_range_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(InvalidJsonError, match="a number is out of range"):
        decode(data)


def test_shared_lists_are_looked_into_once_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_into: list[object] = []
    text_chars = exact_json._text_chars
    monkeypatch.setattr(
        exact_json, "_text_chars", lambda *a: (looked_into.append(a[0]), text_chars(*a))[1]
    )
    small, large = ["a"], ["a"]
    for _ in range(14):
        small = [small, small]
    for _ in range(200):
        large = [large, large]
    assert encode(small).count(b'"a"') == 1 << 14
    for refused in (large, [{"rows": large}], [large, Decimal(1)]):
        with pytest.raises(InexactValueError, match="more than 5000000 values"):
            encode(refused)
    text: Any = ["a" * 1_000_000]
    for _ in range(12):
        text = [text, text]
    with pytest.raises(exact_json.TooLargeValueError):
        encode(text)
    assert len(looked_into) < 20_000


def test_json_nested_too_deep_is_refused_by_name() -> None:
    deep = b"[" * 50_000 + b"]" * 50_000  # Python 3.13 reads some 10,000 levels
    for read in (decode, canonical, check_spliced):
        with pytest.raises(InvalidJsonError, match="nested too deep"):
            read(deep)
    with pytest.raises(InvalidJsonError, match="nested deeper than 250 levels"):
        check_spliced(b"[" * 251 + b"]" * 251)
    check_spliced(b"[" * 250 + b"]" * 250)


def test_what_would_break_a_line_is_not_spliced() -> None:
    for space in (b"\n", b"\r", b"\t"):
        assert decode(b"[1," + space + b"2]") == [1, 2]
        with pytest.raises(InvalidJsonError, match="a line break or a tab"):
            check_spliced(b"[1," + space + b"2]")
    check_spliced(b'[1, "a\\nb"]')


def test_a_spliced_value_of_too_many_members_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = b"[" + b",".join([b"[]"] * 300) + b"]"
    check_spliced(raw)
    monkeypatch.setattr(exact_json, "NODES_MAX", 299)
    with pytest.raises(InvalidJsonError, match="more than"):
        check_spliced(raw)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"args": [1.50, "\\u00e9"] , "note": {"args": 2}}', (None, b'[1.50, "\\u00e9"]')),
        (b'{"function":"f","args":null}', (b'"f"', b"null")),
        (b'{"args":1,"args":2}', (None, b"2")),
        (b"{}", (None, None)),
    ],
)
def test_a_call_line_is_cut_and_what_else_it_holds_is_skipped(
    line: bytes, found: tuple[bytes | None, bytes | None]
) -> None:
    assert call_line(line) == found


@given(st.binary(max_size=30))
def test_no_bytes_raise_anything_but_the_one_error(data: bytes) -> None:
    for read in (decode, canonical, check_spliced, raw_members, raw_elements, call_line):
        with contextlib.suppress(InvalidJsonError):
            read(data)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"a":1,"b":2}', b' { "b" : 2,\n"a" : 1 } '),
        (b'["\\u0041\\/"]', b'["A/"]'),
        (b'[{"x":{"b":[],"a":null}}]', b'[{"x":{"a":null,"b":[]}}]'),
        (b"1e2", b"100.0"),
        (b"-0", b"0"),
    ],
)
def test_equal_arguments_have_one_canonical_form(one: bytes, other: bytes) -> None:
    assert canonical(one) == canonical(other)


def test_arguments_that_are_not_equal_have_different_canonical_forms() -> None:
    different = [
        b"1", b"1.0", b"true", b'"1"', b"[1]", b"0", b"0.0", b"-0.0", b"false", b"null", b"[]", b"{}", b'""',
        b"%d" % 2**64, b"%d" % (2**64 + 1), b"%d.0" % 2**64, b"[1,2]", b"[2,1]", b"[[1],2]",
    ]  # fmt: skip
    assert len({canonical(data) for data in different}) == len(different)


@settings(max_examples=50)
@given(plain_trees, plain_trees)
def test_canonical_forms_are_equal_exactly_when_the_values_are(one: object, other: object) -> None:
    same = types_and_values(one) == types_and_values(other)
    assert (canonical(encode(one)) == canonical(encode(other))) is same
    form = canonical(encode(one))
    assert canonical(form) == form
    assert types_and_values(decode(form)) == types_and_values(one)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"[1, 2]", b"[1, 2]"), (b" \n[]\t", b"[]"), (b'{"a":1}', b'[{"a":1}]'), (b" null ", b"[null]"),
        (b'"[1]"', b'["[1]"]'), (b"[[1,2]]", b"[[1,2]]"), (b"%d" % BIG, b"[%d]" % BIG),
    ],
)  # fmt: skip
def test_arguments_become_a_list(raw: bytes, expected: bytes) -> None:
    assert positional(raw) == expected


def test_parts_are_cut_out_as_they_stand() -> None:
    assert raw_members(b'{"a": [1.0, 2], "b":{"c" : 1e2}}') == {
        "a": b"[1.0, 2]",
        "b": b'{"c" : 1e2}',
    }
    assert raw_elements(b'[1.0, "\\u0041",[ ] ]') == [b"1.0", b'"\\u0041"', b"[ ]"]
    for data in (b"[]", b"1", b"{", b""):
        with pytest.raises(InvalidJsonError):
            raw_members(data)
    for data in (b"{}", b"1", b"[", b""):
        with pytest.raises(InvalidJsonError):
            raw_elements(data)


def test_encoding_leaves_nothing_behind() -> None:
    encode([Row("a", BIG), {1: 2}])
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(100):
        encode([Row("a", BIG), {1: 2}])
        with pytest.raises(InexactValueError):
            encode([{1}])
    gc.collect()
    assert len(gc.get_objects()) - before < 50


class _Text(str):
    """Counts as a text, and is looked into like an object."""

    __slots__ = ()


TEXT = "x" * (1 << 20)
SHARED = {
    "in a list": [TEXT] * 1_000,
    "in one object": {f"k{n}": TEXT for n in range(1_000)},
    "in one object of a list": [{f"k{n}": TEXT for n in range(1_000)}],
    "in many objects": [{"a": TEXT} for _ in range(1_000)],
    "as a key": [{TEXT: n} for n in range(1_000)],
    "as a key of objects inside": [{TEXT: [n]} for n in range(1_000)],
    "of a class of its own": [_Text(TEXT)] * 1_000,
    "in tuples": [(TEXT,) for _ in range(1_000)],
    "beside what needs the walk": [[TEXT, 1 << 100] for _ in range(1_000)],
    "as keys in the walk": [{TEXT: 1 << 100} for _ in range(1_000)],
}


@pytest.mark.parametrize("name", SHARED)
def test_a_long_text_in_many_places_is_refused_before_it_is_written(name):
    gc.collect()  # it gives up tracking what holds plain values
    with pytest.raises(exact_json.TooLargeValueError, match="67,108,864 characters"):
        exact_json.encode(SHARED[name])


def test_long_integers_in_many_places_are_refused(monkeypatch):
    monkeypatch.setattr(exact_json, "TEXT_CHARS_MAX", 100_000)
    with pytest.raises(exact_json.TooLargeValueError):
        exact_json.encode([10**4_000] * 100)


@pytest.mark.parametrize("place", ["alone", "in a list", "in an object"])
def test_tuples_that_the_collector_does_not_track_are_counted(monkeypatch, place):
    monkeypatch.setattr(exact_json, "NODES_MAX", 10_000)
    shared = ("lol",)
    for _ in range(40):
        shared = (shared, shared)
    gc.collect()
    with pytest.raises(exact_json.InexactValueError, match="values"):
        exact_json.encode(
            {"alone": shared, "in a list": [shared], "in an object": {"a": [shared]}}[place]
        )


def test_a_text_that_fits_is_written_whatever_it_shares():
    rows = [{"a": TEXT[:1_000], "b": n} for n in range(1_000)]
    assert exact_json.decode(exact_json.encode(rows)) == rows
