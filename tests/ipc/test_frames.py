"""Frames: the same frames come out however the bytes were cut, and nothing hostile gets far."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from blockx.errors import PeerProtocolError
from blockx.ipc import frames, messages
from blockx.ipc.frames import FRAME_BYTES_MAX, Frame, FrameDecoder, FrameTooLargeError, encode_frame


def completed(output: bytes = b"null", call_id: str = "job/1") -> messages.CallCompleted:
    payload = messages.CallCompletedPayload(attempt_seq=1, output=Raw(output))
    return messages.CallCompleted(executor_id="exec-0", call_id=call_id, payload=payload)


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def in_chunks(data: bytes, chunk_bytes: int) -> list[bytes]:
    return [data[i : i + chunk_bytes] for i in range(0, len(data), chunk_bytes)]


def test_a_message_comes_out_of_its_frame_as_it_went_in() -> None:
    message = completed(b'{"value":115792089237316195423570985008687907853269984665640564039457}')
    [frame] = FrameDecoder().feed(encode_frame(message))
    assert frame.sidecar is None
    assert messages.decode_executor_message(frame.body) == message


@pytest.mark.parametrize("sidecar", [b"", b"x", b"BXB1", bytes(range(256)) * 10])
def test_a_sidecar_comes_out_of_its_frame_as_it_went_in(sidecar: bytes) -> None:
    message = completed()
    frames_out = FrameDecoder().feed(encode_frame(message, sidecar))
    assert frames_out == [Frame(messages.encode_message(message), sidecar)]


def test_the_bytes_of_a_frame_are_those_of_the_specification() -> None:
    json = messages.encode_message(completed())
    assert encode_frame(completed()) == framed(json)
    with_sidecar = b"BXB1" + struct.pack(">I", len(json)) + json + b"raw"
    assert encode_frame(completed(), b"raw") == framed(with_sidecar)


@pytest.mark.parametrize("chunk_bytes", range(1, 40))
def test_every_chunk_size_gives_the_same_frames(chunk_bytes: int) -> None:
    bodies = [b"{}", b'{"a":1}', b"x" * 100]
    stream = b"".join(map(framed, bodies)) + encode_frame(completed(), b"sidecar")
    decoder = FrameDecoder()
    found = [f for chunk in in_chunks(stream, chunk_bytes) for f in decoder.feed(chunk)]
    decoder.eof()
    last = Frame(messages.encode_message(completed()), b"sidecar")
    assert found == [*(Frame(body, None) for body in bodies), last]


@given(
    bodies=st.lists(
        st.tuples(st.binary(min_size=1, max_size=40), st.none() | st.binary()), max_size=8
    ),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_any_chunking_gives_the_same_frames(
    bodies: list[tuple[bytes, bytes | None]], cuts: list[int]
) -> None:
    stream, expected = b"", []
    for text, sidecar in bodies:
        json = b"{" + text
        expected.append(Frame(json, sidecar))
        if sidecar is not None:
            json = b"BXB1" + struct.pack(">I", len(json)) + json + sidecar
        stream += framed(json)
    decoder, found, position = FrameDecoder(), [], 0
    for cut in [*sorted(cuts), len(stream)]:
        found += decoder.feed(stream[position:cut])
        position = max(position, cut)
    decoder.eof()
    assert found == expected


def test_a_frame_of_the_limit_passes_and_one_byte_more_is_refused_by_the_encoder() -> None:
    overhead = len(messages.encode_message(completed(b'""')))
    longest = completed(b'"' + b"x" * (FRAME_BYTES_MAX - overhead) + b'"')
    [frame] = FrameDecoder().feed(encode_frame(longest))
    assert len(frame.body) == FRAME_BYTES_MAX
    with pytest.raises(FrameTooLargeError) as caught:
        encode_frame(completed(b'"' + b"x" * (FRAME_BYTES_MAX - overhead + 1) + b'"'))
    assert (caught.value.frame_bytes, caught.value.limit_bytes) == (
        FRAME_BYTES_MAX + 1,
        FRAME_BYTES_MAX,
    )
    json_bytes = len(messages.encode_message(completed()))
    fitting = bytes(FRAME_BYTES_MAX - json_bytes - 8)
    assert len(encode_frame(completed(), fitting)) == FRAME_BYTES_MAX + 4
    with pytest.raises(FrameTooLargeError, match="16777217 bytes; the limit is 16777216 bytes"):
        encode_frame(completed(), fitting + b"x")


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (struct.pack(">I", 0), "a frame of 0 bytes"),
        (struct.pack(">I", FRAME_BYTES_MAX + 1), "a frame of 16777217 bytes"),
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
        (b"GET / HTTP/1.1\r\n", "a frame of 1195725856 bytes"),
    ],
)
def test_a_length_out_of_range_is_refused_before_anything_is_kept(header: bytes, text: str) -> None:
    for first, rest in [(b"", header), (header[:3], header[3:])]:
        decoder = FrameDecoder()
        assert decoder.feed(first) == []
        with pytest.raises(PeerProtocolError, match=text):
            decoder.feed(rest)
        # The stream has no boundaries any more: a good frame cannot follow.
        with pytest.raises(PeerProtocolError, match=text):
            decoder.feed(framed(b"{}"))


@pytest.mark.parametrize(
    "body",
    [
        b"BXB1",
        b"BXB1\0\0\0",
        b"BXB1\0\0\0\0",
        b"BXB1\0\0\0\0{}",
        b"BXB1\0\0\0\3{}",
        b"BXB1\xff\xff\xff\xff{}",
    ],
)
def test_a_sidecar_header_that_does_not_fit_its_body_is_refused(body: bytes) -> None:
    with pytest.raises(PeerProtocolError, match="sidecar"):
        FrameDecoder().feed(framed(body))


@pytest.mark.parametrize("kept", range(1, 13))
def test_a_stream_that_ends_inside_a_frame_is_refused(kept: int) -> None:
    decoder = FrameDecoder()
    assert decoder.feed(framed(b'{"a": 123}')[:kept]) == []
    with pytest.raises(PeerProtocolError, match=f"inside a frame, after {kept} bytes"):
        decoder.eof()


def test_a_long_frame_in_small_pieces_is_looked_at_once_and_held_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, unpack = [], frames._unpack_length

    def look(data: bytes, position: int) -> tuple[int, ...]:
        looked.append(len(data))
        return unpack(data, position)

    monkeypatch.setattr(frames, "_unpack_length", look)
    body, decoder = b"x" * 200_000, FrameDecoder()
    found = [f for chunk in in_chunks(framed(body), 7) for f in decoder.feed(chunk)]
    assert found == [Frame(body, None)]
    assert looked == [7, 200_004]


def test_received_parts_do_not_keep_alive_what_arrived_with_them() -> None:
    [small, _large] = FrameDecoder().feed(framed(b"{}") + framed(b"x" * 1000))
    assert type(small.body) is bytes
    assert frames.SIDECAR_MAGIC not in small.body
