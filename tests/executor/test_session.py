"""Whole frames in, whole frames out, whatever the socket takes at a time."""

import socket
import threading
from collections.abc import Iterator

import pytest

from blockx.errors import PeerProtocolError
from blockx.executor.session import (
    FRAMES_GATHERED_MAX,
    GATHER_NS,
    OUTBOX_BYTES_MAX,
    UdsSession,
)
from blockx.ipc.frames import FrameDecoder, FrameTooLargeError, encode_frame
from blockx.ipc.messages import (
    CallCompleted,
    CallCompletedPayload,
    CancelCall,
    CancelCallPayload,
    ExecutorMessage,
    HeartbeatAck,
    Raw,
    decode_executor_message,
)


class Pair:
    """A session and the other end of its socket."""

    def __init__(self) -> None:
        ours, self.main = socket.socketpair()
        self.session = UdsSession(ours)
        self.decoder = FrameDecoder()

    def taken(self) -> list[str]:
        """Call ids of the frames that have left so far."""
        self.main.setblocking(False)
        ids = []
        while True:
            try:
                data = self.main.recv(1 << 20)
            except BlockingIOError:
                return ids
            if not data:
                return ids
            ids += [decode_executor_message(f.body).call_id for f in self.decoder.feed(data)]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.session.abandon()
    made.main.close()


def completed(call_id: str, size: int = 1) -> ExecutorMessage:
    output = Raw(b'"' + b"x" * size + b'"')
    return CallCompleted(
        call_id=call_id, payload=CallCompletedPayload(attempt_seq=1, output=output)
    )


def test_frames_gather_until_enough_or_old_enough(pair):
    pair.session.send(completed("a"))
    pair.session.flush_if_due(pair.session._gathered_since_ns + GATHER_NS - 1)
    assert pair.taken() == []
    pair.session.flush_if_due(pair.session._gathered_since_ns + GATHER_NS)
    assert pair.taken() == ["a"]
    for n in range(FRAMES_GATHERED_MAX):
        pair.session.send(completed(str(n)))
    pair.session.flush_if_due(pair.session._gathered_since_ns)
    assert pair.taken() == [str(n) for n in range(FRAMES_GATHERED_MAX)]
    assert pair.session.frames == 0


def test_order_and_frames_stay_whole_over_partial_writes(pair):
    ids = [str(n) for n in range(40)]
    taken: list[str] = []
    for call_id in ids:
        pair.session.send(completed(call_id, 100_000))
        pair.session.flush()
    assert pair.session.frames > 0
    while pair.session.frames:
        taken += pair.taken()
        pair.session.flush()
    assert taken + pair.taken() == ids


def test_a_full_outbox_waits_until_main_has_taken_half_of_it(pair):
    ids = [str(n) for n in range(30)]
    taken: list[str] = []

    def read() -> None:
        decoder = FrameDecoder()
        while len(taken) < len(ids):
            data = pair.main.recv(65536)
            taken.extend(decode_executor_message(f.body).call_id for f in decoder.feed(data))

    reader = threading.Thread(target=read)
    reader.start()
    for call_id in ids:
        pair.session.send(completed(call_id, OUTBOX_BYTES_MAX // 10))
        assert pair.session._outbox_bytes <= OUTBOX_BYTES_MAX
    while pair.session.frames:
        pair.session.wait(1_000)
        pair.session.flush()
    reader.join(20)
    assert taken == ids


def test_a_frame_that_is_too_large_is_not_queued_at_all(pair):
    pair.session.send(completed("a"))
    with pytest.raises(FrameTooLargeError):
        pair.session.send_terminal(completed("b", 17_000_000))
    assert (pair.session.frames, pair.session.terminal_frames) == (1, 0)
    pair.session.flush()
    assert pair.taken() == ["a"]


def test_messages_arrive_in_order_with_their_sidecars(pair):
    cancel = CancelCall(call_id="c", payload=CancelCallPayload(reason="r", attempt_seq=1))
    data = encode_frame(cancel) + encode_frame(HeartbeatAck(), b"side") + encode_frame(cancel)
    pair.main.sendall(data[:-3])
    assert pair.session.receive() == [(cancel, None), (HeartbeatAck(), b"side")]
    pair.main.sendall(data[-3:])
    assert pair.session.receive() == [(cancel, None)]
    assert pair.session.receive() == []
    assert pair.session.is_connected


def test_the_end_of_the_stream_and_a_broken_pipe_are_noticed(pair):
    pair.main.close()
    assert (pair.session.receive(), pair.session.is_connected) == ([], False)
    other = Pair()
    other.main.close()
    other.session.send(completed("a"))
    other.session.flush()
    assert not other.session.is_connected
    other.session.abandon()


@pytest.mark.parametrize("body", [b"{}", b"[]", b'{"messageType":"CallCompleted"}', b"\xff"])
def test_what_main_may_not_send_is_a_protocol_error(pair, body):
    pair.main.sendall(len(body).to_bytes(4, "big") + body)
    with pytest.raises(PeerProtocolError):
        pair.session.receive()


def test_an_abandoned_session_says_nothing_more(pair):
    pair.session.send(completed("a"))
    pair.session.abandon()
    pair.session.flush()
    assert pair.taken() == []
    assert not pair.session.is_connected
