"""Frames: messages as bytes on a socket, and bytes from a socket as frames.

Pure: bytes in, frames out; no sockets, no clock, no thread. Used by main and by executors.

A frame is a body behind its length as uint32, big-endian. A body is one JSON message, or, with raw
bytes beside it (the sidecar), ``BXB1``, the length of the JSON as uint32, the JSON, the sidecar.

Invariants: a decoder never holds more than one unfinished frame plus what one ``feed`` brought; the
frames that come out are the same however the bytes were cut; a length is checked before the bytes
behind it are kept. Source: the specification, "UDS protocol".
"""

import struct
from functools import partial
from typing import Final, NamedTuple

import msgspec

from blockx.errors import PeerProtocolError
from blockx.ipc.messages import encode_message

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
"""Longest body. To encode more raises FrameTooLargeError, to receive more is a protocol error."""

SIDECAR_MAGIC: Final = b"BXB1"

_LENGTH = struct.Struct(">I")
_SIDECAR_HEADER = struct.Struct(">4sI")
_LENGTH_AND_SIDECAR_HEADER = struct.Struct(">I4sI")
_LENGTH_BYTES = _LENGTH.size
_SIDECAR_HEADER_BYTES = _SIDECAR_HEADER.size

_pack_length = _LENGTH.pack
_unpack_length = _LENGTH.unpack_from


class FrameTooLargeError(ValueError):
    """A message does not fit into a frame. ``frame_bytes`` and ``limit_bytes`` say by how much."""

    def __init__(self, frame_bytes: int) -> None:
        super().__init__(f"a frame of {frame_bytes} bytes; the limit is {FRAME_BYTES_MAX} bytes")
        self.frame_bytes = frame_bytes
        self.limit_bytes = FRAME_BYTES_MAX


class Frame(NamedTuple):
    """A received frame: the JSON of its message, not decoded yet, and its sidecar if it has one."""

    body: bytes
    sidecar: bytes | None


_new_frame: Final = partial(tuple.__new__, Frame)
"""A ``Frame`` of a pair, past the constructor of named tuples, which takes three times as long."""


def encode_frame(message: msgspec.Struct, sidecar: bytes | None = None) -> bytes:
    """The bytes of one frame. An empty sidecar is a sidecar; None is none.

    Raises:
        FrameTooLargeError: the body is over ``FRAME_BYTES_MAX``; nothing was sent, the caller
            fails the call or the read that it belongs to.
    """
    json = encode_message(message)
    if sidecar is None:
        body_bytes = len(json)
        if body_bytes > FRAME_BYTES_MAX:
            raise FrameTooLargeError(body_bytes)
        return _pack_length(body_bytes) + json
    body_bytes = _SIDECAR_HEADER_BYTES + len(json) + len(sidecar)
    if body_bytes > FRAME_BYTES_MAX:
        raise FrameTooLargeError(body_bytes)
    head = _LENGTH_AND_SIDECAR_HEADER.pack(body_bytes, SIDECAR_MAGIC, len(json))
    return b"".join((head, json, sidecar))


class FrameDecoder:
    """Cuts the byte stream of one connection into frames. One decoder a connection, one thread.

    What arrives is hostile: after a PeerProtocolError the stream has no frame boundaries any more,
    so the connection must be closed; the decoder raises again if it is fed.
    """

    __slots__ = ("_failure", "_needed_bytes", "_pending")

    def __init__(self) -> None:
        # A bytearray and not a list of chunks: a peer that sends single bytes would make a list of
        # 16 million objects; appending here costs amortised O(1) for a byte and holds it once.
        self._pending = bytearray()
        self._needed_bytes = _LENGTH_BYTES
        """Pending bytes below this number cannot complete anything, so they are not looked at."""
        self._failure = ""

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes of the stream; return the frames that are complete now, in order.

        Frames before a broken one in the same ``data`` are dropped with it: the connection ends.

        Raises:
            PeerProtocolError: a length of 0 or over ``FRAME_BYTES_MAX``, or a sidecar header
                that does not fit its body.
        """
        if self._pending:
            self._pending += data
            if len(self._pending) < self._needed_bytes:
                return []
            data = bytes(self._pending)
            self._pending.clear()
        if self._failure:
            raise PeerProtocolError(self._failure)
        try:
            return self._cut(data)
        except PeerProtocolError as error:
            self._failure = str(error)
            raise

    def eof(self) -> None:
        """The stream has ended.

        Raises:
            PeerProtocolError: it ended inside a frame.
        """
        if self._pending:
            raise PeerProtocolError(
                f"the connection ended inside a frame, after {len(self._pending)} bytes of it"
            )

    def _cut(self, data: bytes) -> list[Frame]:
        frames: list[Frame] = []
        position, end = 0, len(data)
        needed_bytes = _LENGTH_BYTES
        while position + _LENGTH_BYTES <= end:
            (body_bytes,) = _unpack_length(data, position)
            if not 0 < body_bytes <= FRAME_BYTES_MAX:
                raise PeerProtocolError(
                    f"a frame of {body_bytes} bytes; allowed are 1 to {FRAME_BYTES_MAX}"
                )
            start = position + _LENGTH_BYTES
            stop = start + body_bytes
            if stop > end:
                needed_bytes = _LENGTH_BYTES + body_bytes
                break
            # Slices are copied, not viewed: a raw value kept for long must not keep alive
            # everything that arrived with it.
            body = data[start:stop]
            frames.append(
                _split_sidecar(body) if body[:4] == SIDECAR_MAGIC else _new_frame((body, None))
            )
            position = stop
        if position < end:
            self._pending += memoryview(data)[position:]
        self._needed_bytes = needed_bytes
        return frames


def _split_sidecar(body: bytes) -> Frame:
    """Cut a body that begins with the magic."""
    if len(body) < _SIDECAR_HEADER_BYTES:
        raise PeerProtocolError(f"a sidecar header of {len(body)} bytes instead of 8")
    json_bytes = _SIDECAR_HEADER.unpack_from(body)[1]
    json_stop = _SIDECAR_HEADER_BYTES + json_bytes
    if json_bytes == 0 or json_stop > len(body):
        raise PeerProtocolError(
            f"a JSON part of {json_bytes} bytes in a body of {len(body)} bytes with a sidecar"
        )
    return Frame(body[_SIDECAR_HEADER_BYTES:json_stop], body[json_stop:])
