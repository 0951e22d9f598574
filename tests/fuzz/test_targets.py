"""The fuzz targets over random bytes, near-valid ones, and what the fuzzer found before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import SEEDS, TARGETS

REMEMBERED: dict[str, list[bytes]] = {
    "json_text": [
        b"1e400",
        b"[1]\n2",
        b'{"a":1,"a":2}',
        b"\xff",
        b"[" * 2_000,
        b"-0",
        b"1" * 5_000,
    ],
}
"""Inputs that broke a target once, or stand for a kind that could."""

FRAME = SEEDS[0]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A valid frame and its JSON with some bytes changed, removed or doubled."""
    data = bytearray(
        draw(st.sampled_from([FRAME, FRAME + SEEDS[1], FRAME[4:], FRAME[12:-3], SEEDS[1][4:]]))
    )
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=200)
@given(data=st.binary(max_size=200) | damaged() | st.text().map(str.encode))
def test_any_bytes_are_refused_clearly_or_taken_exactly(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.parametrize(
    ("name", "data"), [(name, data) for name, inputs in REMEMBERED.items() for data in inputs]
)
def test_what_was_found_before_stays_mended(name: str, data: bytes) -> None:
    TARGETS[name](data)
