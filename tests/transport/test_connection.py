"""One socket, main's end: coalescing, partial writes, acknowledgements, hostile input."""

import socket

import pytest

from blockx.dispatcher.events import CallResumed
from blockx.errors import PeerProtocolError
from blockx.ipc.frames import FrameDecoder, encode_frame
from blockx.ipc.messages import CancelCall, CancelCallPayload
from blockx.transport.connection import OUTBOX_FRAMES_MAX, ExecutorConnection


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connection = ExecutorConnection(ours, peer_pid=1)
    yield connection, theirs
    connection.close()
    theirs.close()


def cancel(call_id: str) -> bytes:
    payload = CancelCallPayload(reason="test", attempt_seq=1)
    return encode_frame(CancelCall(call_id=call_id, payload=payload))


def test_queued_frames_leave_whole_and_in_order(pair):
    connection, theirs = pair
    for n in range(200):
        connection.queue(cancel(f"c{n}"))
    assert connection.flush() == []
    frames = FrameDecoder().feed(theirs.recv(1 << 20))
    assert len(frames) == 200
    assert b'"c0"' in bytes(frames[0].body)
    assert b'"c199"' in bytes(frames[-1].body)


def test_an_acknowledgement_comes_only_after_the_last_byte_has_left(pair):
    connection, theirs = pair
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    big = encode_frame(
        CancelCall(call_id="x" * 300_000, payload=CancelCallPayload(reason="", attempt_seq=1))
    )
    resumed = CallResumed("c1", 1)
    connection.queue(big, resumed)
    assert connection.flush() == []
    assert connection.wants_write
    received, acknowledged = 0, []
    while not acknowledged:
        received += len(theirs.recv(1 << 16))
        acknowledged = connection.flush()
    while received < len(big):
        received += len(theirs.recv(1 << 16))
    assert acknowledged == [resumed]
    assert received == len(big)
    assert not connection.wants_write


def test_the_outbox_says_when_it_is_full(pair):
    connection, _theirs = pair
    for n in range(OUTBOX_FRAMES_MAX):
        assert not connection.outbox_is_full
        connection.queue(cancel(f"c{n}"))
    assert connection.outbox_is_full


def test_a_closed_peer_is_told_from_silence(pair):
    connection, theirs = pair
    assert connection.receive() == ((), True)
    theirs.close()
    assert connection.receive() == ((), False)


def test_bytes_that_are_no_frame_are_a_protocol_error(pair):
    connection, theirs = pair
    theirs.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(PeerProtocolError):
        connection.receive()
