"""The adapter over real sockets: attach, reservations, stale frames, death."""

import os
import select
import socket
from dataclasses import replace

import pytest

from blockx.dispatcher.commands import AbortAttempt, BindCall, ResumeParent, StartAttempt
from blockx.dispatcher.events import (
    AttemptCompleted,
    AttemptFailed,
    BindFailed,
    CallBound,
    CallResumed,
    CallSuspended,
    ExecutorLost,
)
from blockx.dispatcher.model import CallError, FunctionRef
from blockx.errors import ErrorKind
from blockx.ipc import messages as m
from blockx.ipc.frames import FrameDecoder, encode_frame
from blockx.ipc.heartbeat import (
    FINISHED_CALLS,
    RUNNING_CALL_SEQ,
    HeartbeatRow,
    SchedulerSample,
    create_table_fd,
    incarnation_number,
)
from blockx.ipc.heartbeat_table import HeartbeatTable
from blockx.transport.adapter import ExecutorAdapter
from blockx.transport.connection import OUTBOX_FRAMES_MAX
from blockx.transport.tracing import TraceSource

FUNCTION = FunctionRef("f", "d" * 64, "_")
WAIT_S = 5


class Loop:
    """A selector that the test turns by hand."""

    def __init__(self):
        self.handlers = {}

    def register(self, fd, on_ready):
        self.handlers[fd] = on_ready

    def want_write(self, fd, wanted):
        pass

    def unregister(self, fd):
        self.handlers.pop(fd, None)

    def turn(self):
        ready, _, _ = select.select(list(self.handlers), [], [], WAIT_S)
        assert ready, "nothing arrived"
        for fd in ready:
            if fd in self.handlers:
                self.handlers[fd](select.EPOLLIN)


class World:
    """The adapter with a fake pool and a listener that records; time stands still unless moved."""

    def __init__(self, tmp_path, *, check_pid=True, spawned_pid=int):
        self.loop, self.events, self.killed, self.io, self.subcalls, self.ended = (
            Loop(),
            [],
            [],
            [],
            [],
            [],
        )
        self.now, self.peers, self.recycled = 1_000, [], []
        self.sources = {"d" * 64: "def _(): pass\n"}
        self.fd = create_table_fd(1)
        self.table = HeartbeatTable(self.fd, 1)
        self.adapter = ExecutorAdapter(
            selector=self.loop,
            pool=self,
            table=self.table,
            executor_max_inflight=4,
            check_pid=check_pid,
            spawned_pid=spawned_pid,
            now_ms=lambda: self.now,
        )
        self.adapter.set_listener(self)
        self.path = tmp_path / "s"
        self.adapter.listen("exec-0", 0, self.path)

    # the pool
    def kill(self, executor_id, pid, reason):
        self.killed.append((executor_id, pid, reason))

    def recycle(self, executor_id, pid, reason):
        self.recycled.append((executor_id, pid, reason))

    def attached(self, executor_id, pid):
        self.attached_pid = pid

    # the listener
    def handle(self, event):
        self.events.append(event)

    def request_io(self, executor_id, message, sidecar):
        self.io.append((executor_id, message.call_id, sidecar))

    def request_subcall(self, executor_id, message):
        self.subcalls.append((executor_id, message.call_id))

    def source_of(self, task_id, digest):
        return self.sources.get(digest)

    def attempt_ended(self, call_id):
        self.ended.append(call_id)

    # a fake executor: this very process
    def connect(self):
        peer = socket.socket(socket.AF_UNIX)
        self.peers.append(peer)
        peer.connect(str(self.path))
        self.loop.turn()
        return peer

    def attach(self, *, has_table=False):
        self.adapter.executor_spawned("exec-0", os.getpid())
        peer = self.connect()
        self.beat(peer, has_table=has_table)
        self.loop.turn()
        return peer

    def beat(self, peer, executor_id="exec-0", incarnation="aa", has_table=False, **fields):
        fields.setdefault("available_contexts", 128)
        payload = m.HeartbeatPayload(
            executor_process_instance_id=incarnation, pid=os.getpid(), has_table=has_table, **fields
        )
        self.send(peer, m.Heartbeat(executor_id=executor_id, payload=payload))

    @staticmethod
    def send(peer, message, sidecar=None):
        peer.sendall(encode_frame(message, sidecar))

    def receive(self, peer):
        """All messages that the executor's end has got, HeartbeatAck left out."""
        self.adapter.flush()
        peer.settimeout(WAIT_S)
        frames = FrameDecoder().feed(peer.recv(1 << 20))
        got = [(m.decode_main_message(f.body), f.sidecar) for f in frames]
        return [
            (message, sidecar)
            for message, sidecar in got
            if not isinstance(message, m.HeartbeatAck)
        ]

    def start(self, call_id="j/0", attempt_seq=1, parent=""):
        bound = self.adapter.bind(BindCall(call_id, attempt_seq, "exec-0", parent))
        assert isinstance(bound, CallBound)
        command = StartAttempt(
            call_id, attempt_seq, "exec-0", "t", FUNCTION, b"[1]", parent, 5_000, 0, 7
        )
        assert self.adapter.start(command) is None

    def completed(self, peer, call_id="j/0", attempt_seq=1, output=b"{}"):
        payload = m.CallCompletedPayload(
            attempt_seq=attempt_seq, output=m.Raw(output), body_started=True
        )
        self.send(peer, m.CallCompleted(executor_id="exec-0", call_id=call_id, payload=payload))

    def close(self):
        self.adapter.close()
        for peer in self.peers:
            peer.close()
        self.table.close()
        os.close(self.fd)


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.close()


def kinds(events):
    return [type(event) for event in events]


def test_the_first_heartbeat_attaches_and_is_acknowledged(world):
    peer = world.attach()
    world.adapter.flush()
    frames = FrameDecoder().feed(peer.recv(1 << 16))
    assert [type(m.decode_main_message(f.body)) for f in frames] == [m.HeartbeatAck]
    snapshot = world.adapter.snapshots()[0]
    assert (snapshot.executor_id, snapshot.healthy, snapshot.usable_contexts) == ("exec-0", True, 4)
    assert world.attached_pid == os.getpid()


def test_the_audit_of_a_function_travels_with_its_calls(world):
    peer = world.attach()
    world.adapter.bind(BindCall("j/0", 1, "exec-0", ""))
    audited = replace(FUNCTION, audit="1:dd")
    world.adapter.start(StartAttempt("j/0", 1, "exec-0", "t", audited, b"[1]", "", 5_000, 0, 7))
    world.adapter.flush()
    frames = FrameDecoder().feed(peer.recv(1 << 16))
    payload = m.decode_main_message(frames[-1].body).payload
    assert (payload.audit, payload.function_code_digest) == ("1:dd", "d" * 64)


def test_a_connection_is_parked_until_the_spawner_reports_its_pid(world):
    peer = world.connect()
    world.beat(peer)
    world.loop.turn()
    assert world.adapter.snapshots() == []
    world.adapter.executor_spawned("exec-0", os.getpid())
    assert len(world.adapter.snapshots()) == 1


def test_a_parked_connection_of_a_foreign_process_is_closed_after_its_time(world):
    world.adapter.executor_spawned("exec-0", os.getpid() + 1)
    peer = world.connect()
    world.beat(peer)
    world.loop.turn()
    world.now += 5_001
    world.adapter.drop_parked()
    assert peer.recv(1) == b""
    assert world.adapter.counters["connections_refused"] == 1


@pytest.mark.parametrize("first", ["foreign id", "no heartbeat", "garbage"])
def test_a_connection_that_begins_wrongly_is_refused(world, first):
    world.adapter.executor_spawned("exec-0", os.getpid())
    peer = world.connect()
    if first == "foreign id":
        world.beat(peer, executor_id="exec-9")
    elif first == "no heartbeat":
        world.completed(peer)
    else:
        peer.sendall(b"\xff" * 8)
    world.loop.turn()
    assert peer.recv(1) == b""
    assert world.adapter.snapshots() == []


@pytest.mark.parametrize("when", ["accepted", "parked", "not accepted yet"])
def test_a_connection_of_a_process_that_has_ended_does_not_take_the_slot(world, when):
    if when != "parked":
        world.adapter.executor_spawned("exec-0", os.getpid())
    if when == "not accepted yet":
        peer = socket.socket(socket.AF_UNIX)
        world.peers.append(peer)
        peer.connect(str(world.path))
    else:
        peer = world.connect()
    world.beat(peer)
    if when == "parked":
        world.loop.turn()
    world.adapter.executor_exited("exec-0", os.getpid(), -9, None)
    if when == "not accepted yet":
        world.loop.turn()
        world.loop.turn()
        world.now += 5_001
        world.adapter.drop_parked()
    assert world.adapter.counters == {"connections_refused": 1}
    assert world.adapter.snapshots() == []


def test_a_second_connection_cannot_take_an_attached_slot(world):
    world.attach()
    second = world.connect()
    world.beat(second)
    world.loop.turn()
    assert second.recv(1) == b""
    assert len(world.adapter.snapshots()) == 1


def test_a_completed_call_frees_its_place_before_the_event_is_handed_on(world):
    peer = world.attach()
    world.start()
    free_at_event = []
    world.handle = lambda event: free_at_event.append(
        isinstance(world.adapter.bind(BindCall("j/0", 2, "exec-0", "")), CallBound)
    )
    world.adapter.set_listener(world)
    world.completed(peer)
    world.loop.turn()
    assert free_at_event == [True]


def test_a_terminal_frame_of_another_attempt_is_counted_and_dropped(world):
    peer = world.attach()
    world.start(attempt_seq=2)
    world.completed(peer, attempt_seq=1)
    world.loop.turn()
    assert world.events == []
    assert world.adapter.counters["stale_terminal_frames"] == 1
    world.completed(peer, attempt_seq=2, output=b'{"v":1}')
    world.loop.turn()
    assert [(type(e), e.output) for e in world.events] == [(AttemptCompleted, b'{"v":1}')]


def test_a_cancelled_call_keeps_its_place_until_its_terminal_frame_and_says_nothing(world):
    peer = world.attach()
    world.start()
    world.adapter.abort(AbortAttempt("j/0", 1, "exec-0", 7, "test"))
    assert world.adapter.snapshots()[0].usable_contexts == 3
    got = world.receive(peer)
    assert [type(message) for message, _ in got] == [m.ExecuteCall, m.CancelCall]
    world.completed(peer)
    world.loop.turn()
    assert world.events == []
    assert world.adapter.snapshots()[0].usable_contexts == 4


def test_a_subcall_needs_a_live_reservation_of_its_parent(world):
    world.attach()
    assert isinstance(world.adapter.bind(BindCall("j/0/sub-1", 1, "exec-0", "j/0")), BindFailed)
    world.start()
    assert isinstance(world.adapter.bind(BindCall("j/0/sub-1", 1, "exec-0", "j/0")), CallBound)
    world.adapter.abort(AbortAttempt("j/0", 1, "exec-0", 7, "test"))
    assert isinstance(world.adapter.bind(BindCall("j/0/sub-2", 1, "exec-0", "j/0")), BindFailed)


def waiting(kind, call_id="j/0", request_id="req-aa-1", trace=None, **fields):
    payload = m.CallWaitingPayload(wait_kind=kind, task_id="t", attempt_seq=1, **fields)
    return m.CallWaiting(
        executor_id="exec-0", call_id=call_id, request_id=request_id, payload=payload, trace=trace
    )


def test_an_io_wait_suspends_and_its_answer_resumes_once_it_is_flushed(world):
    peer = world.attach()
    world.start()
    world.receive(peer)
    world.send(peer, waiting(m.WaitKind.IO, backend="rpc"), b"side")
    world.loop.turn()
    assert world.events == [CallSuspended("j/0", 1)]
    assert world.io == [("exec-0", "j/0", b"side")]
    answer = m.ResumeCallPayload(resume_kind=m.WaitKind.IO, attempt_seq=1, result=m.Raw(b"5"))
    world.adapter.resume_io("exec-0", "j/0", "req-aa-1", answer, None)
    assert world.events == [CallSuspended("j/0", 1)]
    [(message, _)] = world.receive(peer)
    assert bytes(message.payload.result) == b"5"
    assert world.events[-1] == CallResumed("j/0", 1)


def test_an_answer_to_another_request_is_counted_and_dropped(world):
    peer = world.attach()
    world.start()
    world.send(peer, waiting(m.WaitKind.IO))
    world.loop.turn()
    answer = m.ResumeCallPayload(resume_kind=m.WaitKind.IO, attempt_seq=1)
    world.adapter.resume_io("exec-0", "j/0", "req-aa-2", answer, None)
    assert world.adapter.counters["stale_resumes"] == 1


def test_source_goes_back_at_once_without_a_suspension(world):
    peer = world.attach()
    world.start()
    world.receive(peer)
    world.send(peer, waiting(m.WaitKind.FUNCTION_CODE, function_code_digest="d" * 64))
    world.loop.turn()
    [(message, sidecar)] = world.receive(peer)
    assert (message.payload.error, sidecar) == (None, b"def _(): pass\n")
    world.send(
        peer, waiting(m.WaitKind.FUNCTION_CODE, request_id="req-aa-2", function_code_digest="0")
    )
    world.loop.turn()
    [(message, sidecar)] = world.receive(peer)
    assert (message.payload.error.kind, sidecar) == ("code_fetch_failed", None)
    assert world.events == []


def test_a_subcall_answer_that_failed_carries_its_kind(world):
    peer = world.attach()
    world.start()
    world.receive(peer)
    world.send(peer, waiting(m.WaitKind.SUBCALL, function_id="g"))
    world.loop.turn()
    assert world.subcalls == [("exec-0", "j/0")]
    error = CallError(ErrorKind.SUBCALL_FAILED, "function g failed")
    world.adapter.resume_parent(
        ResumeParent("j/0", 1, "req-aa-1", "exec-0", None, error, False, 1.5)
    )
    [(message, _)] = world.receive(peer)
    assert (message.payload.error.kind, message.payload.budget_used_ms) == ("subcall_failed", 1.5)


def test_two_pending_requests_of_one_call_break_the_protocol(world):
    peer = world.attach()
    world.start()
    world.send(peer, waiting(m.WaitKind.IO))
    world.send(peer, waiting(m.WaitKind.IO, request_id="req-aa-2"))
    world.loop.turn()
    assert [(e, pid) for e, pid, _ in world.killed] == [("exec-0", os.getpid())]


@pytest.mark.parametrize("output", [b'{"a":\n1}', b'"\xff"', b"[1"])
def test_an_output_that_is_no_clean_json_closes_that_connection(world, output):
    peer = world.attach()
    world.start()
    payload = (
        b'{"messageType":"CallCompleted","callId":"j/0","payload":{"attemptSeq":1,"output":'
        + output
        + b"}}"
    )
    peer.sendall(len(payload).to_bytes(4, "big") + payload)
    world.loop.turn()
    assert world.killed
    assert world.events == []


def test_a_dead_executor_is_lost_only_when_it_has_been_reaped_and_its_last_words_count(world):
    peer = world.attach()
    world.start("j/0")
    world.start("j/1")
    world.completed(peer, "j/0")
    peer.close()
    world.adapter.executor_exited("exec-0", os.getpid(), -11, None)
    assert kinds(world.events) == [AttemptCompleted, ExecutorLost]
    lost = world.events[-1]
    assert (lost.kind, lost.free_of_charge) == (ErrorKind.EXECUTOR_LOST, False)
    assert "signal 11" in lost.detail
    assert world.adapter.snapshots() == []


def test_end_of_file_asks_for_the_kill_after_a_while_and_waits_for_the_exit(world):
    peer = world.attach()
    world.start()
    peer.close()
    world.loop.turn()
    world.now += 299
    world.adapter.replace_drained()
    assert world.killed == [], "most likely it is dead already and will be reaped"
    world.now += 1
    world.adapter.replace_drained()
    assert [entry[0] for entry in world.killed] == ["exec-0"]
    assert world.events == []
    world.adapter.executor_exited("exec-0", os.getpid(), -9, None)
    assert kinds(world.events) == [ExecutorLost]
    assert world.events[0].free_of_charge


def test_a_kill_of_ours_is_charged_with_its_kind(world):
    world.attach()
    world.start()
    executor = next(iter(world.adapter.attached_executors()))
    world.adapter.kill(executor, "a call held it", ErrorKind.EXECUTOR_WEDGED)
    assert not world.adapter.snapshots()[0].healthy
    world.adapter.executor_exited("exec-0", os.getpid(), -9, None)
    lost = world.events[-1]
    assert (lost.kind, lost.detail, lost.free_of_charge) == (
        ErrorKind.EXECUTOR_WEDGED,
        "a call held it",
        False,
    )


def test_a_death_at_the_limit_of_the_control_group_is_charged(world):
    world.attach()
    world.start()
    world.adapter.executor_exited("exec-0", os.getpid(), -9, None, True)
    lost = world.events[-1]
    assert (lost.kind, lost.free_of_charge) == (ErrorKind.MEMORY_EXCEEDED, False)
    assert "worker.executor_memory_limit_bytes" in lost.detail


def test_a_process_in_a_pid_namespace_attaches_as_the_one_that_was_spawned(tmp_path):
    made = World(tmp_path, spawned_pid=lambda pid: pid + 1_000_000)
    spawned = os.getpid() + 1_000_000
    made.adapter.executor_spawned("exec-0", spawned)
    made.beat(made.connect())
    made.loop.turn()
    (executor,) = made.adapter.attached_executors()
    assert (executor.pid, executor.work_pid) == (spawned, os.getpid())
    assert made.attached_pid == spawned
    made.adapter.executor_exited("exec-0", spawned, 0, None)
    assert kinds(made.events) == [ExecutorLost]
    made.close()


def test_another_user_than_the_one_of_the_slot_is_refused(world, tmp_path):
    path = tmp_path / "theirs"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    sock.bind(str(path))
    sock.listen()
    world.adapter.serve("exec-1", 0, sock, path, uid=os.getuid() + 1)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
        world.loop.turn()
        assert peer.recv(1) == b""
    assert world.adapter.counters["connections_refused"] == 1


def test_the_exit_of_an_older_process_of_the_slot_changes_nothing(world):
    world.attach()
    world.adapter.executor_exited("exec-0", os.getpid() + 1, 1, None)
    assert len(world.adapter.snapshots()) == 1


def test_a_full_outbox_fails_the_attempt_free_of_charge(world):
    world.attach()
    for n in range(OUTBOX_FRAMES_MAX - 1):  # the acknowledgement of the heartbeat waits there too
        world.start(f"j/{n}")
    world.adapter.bind(BindCall("j/x", 1, "exec-0", ""))
    failed = world.adapter.start(
        StartAttempt("j/x", 1, "exec-0", "t", FUNCTION, b"[]", "", 0, 0, 8)
    )
    assert isinstance(failed, AttemptFailed)
    assert failed.error.kind is ErrorKind.EXECUTOR_CAPACITY_EXHAUSTED


def test_arguments_over_the_frame_limit_fail_their_call_alone(world):
    world.attach()
    world.adapter.bind(BindCall("j/0", 1, "exec-0", ""))
    args = b'["' + b"x" * (17 << 20) + b'"]'
    failed = world.adapter.start(StartAttempt("j/0", 1, "exec-0", "t", FUNCTION, args, "", 0, 0, 8))
    assert failed.error.kind is ErrorKind.INVALID_CALL


def test_the_heartbeat_row_names_the_call_that_ran_when_its_process_died(world):
    world.attach(has_table=True)
    world.start()
    sample = scheduler_sample(world, incarnation=incarnation_number("aa"), running_call_seq=7)
    world.adapter.executor_exited("exec-0", os.getpid(), 9, sample)
    lost = world.events[-1]
    assert (lost.running_call_seq, lost.free_of_charge, lost.detail) == (
        7,
        False,
        "its process ended with exit code 9",
    )


def test_an_executor_that_retires_offers_no_places(world):
    world.attach(has_table=True)
    assert world.adapter.snapshots()[0].usable_contexts == 4
    row = HeartbeatRow(world.fd, 0)
    row.scheduler[FINISHED_CALLS] = 1
    row.write_scheduler()
    assert world.adapter.snapshots()[0].usable_contexts == 0
    row.close()


def test_an_executor_that_has_room_and_says_that_it_has_none_gets_no_root_calls(world):
    peer = world.attach()
    world.beat(peer, available_contexts=0, inflight_count=3)
    world.loop.turn()
    snapshot = world.adapter.snapshots()[0]
    assert (snapshot.healthy, snapshot.usable_contexts) == (True, 0)
    world.beat(peer, available_contexts=0, inflight_count=4)
    world.loop.turn()
    assert world.adapter.snapshots()[0].usable_contexts == 4, "it is full, main knows that itself"


def test_a_question_said_twice_is_asked_once(world):
    peer = world.attach()
    world.start()
    world.send(peer, waiting(m.WaitKind.IO))
    world.send(peer, waiting(m.WaitKind.IO))
    world.loop.turn()
    assert (len(world.io), world.killed) == (1, [])
    payload = m.ResumeCallPayload(resume_kind=m.WaitKind.IO, attempt_seq=1)
    world.adapter.resume_io("exec-0", "j/0", "req-aa-1", payload, None)
    world.send(peer, waiting(m.WaitKind.IO))
    world.loop.turn()
    assert len(world.io) == 1
    assert world.adapter.counters == {"stale_waiting_frames": 2}


def test_an_answer_to_a_cancelled_call_is_counted_and_not_sent(world):
    peer = world.attach()
    world.start()
    world.send(peer, waiting(m.WaitKind.IO))
    world.loop.turn()
    world.adapter.abort(AbortAttempt("j/0", 1, "exec-0", 7, "cancelled"))
    world.adapter.flush()
    world.receive(peer)
    payload = m.ResumeCallPayload(resume_kind=m.WaitKind.IO, attempt_seq=1)
    world.adapter.resume_io("exec-0", "j/0", "req-aa-1", payload, None)
    assert world.adapter.counters == {"stale_resumes": 1}
    assert not world.adapter.has_unsent


def test_nothing_more_is_started_for_a_call_cancelled_on_an_executor_that_is_going(world):
    peer = world.attach()
    world.start()
    world.send(peer, waiting(m.WaitKind.IO))
    world.loop.turn()
    world.adapter.flush()
    peer.close()
    world.loop.turn()
    world.adapter.abort(AbortAttempt("j/0", 1, "exec-0", 7, "cancelled"))
    assert world.ended == ["j/0"]
    assert not world.adapter.has_unsent


def test_when_a_call_ends_without_its_answer_nothing_more_is_started_for_it(world):
    peer = world.attach()
    world.start()
    world.send(peer, waiting(m.WaitKind.IO))
    world.completed(peer)
    world.loop.turn()
    assert world.ended == ["j/0"]


def test_the_row_of_another_incarnation_blames_nobody(world):
    world.attach(has_table=True)
    world.start()
    sample = scheduler_sample(world, incarnation=12345, running_call_seq=7)
    world.adapter.executor_exited("exec-0", os.getpid(), 9, sample)
    assert world.events[-1].running_call_seq == 0


def scheduler_sample(world, **fields):
    """A sample as the executor's own row would give it."""
    return SchedulerSample._make([0] * len(SchedulerSample._fields))._replace(**fields)


def test_a_cancelled_call_that_computes_gets_the_control_word(world):
    world.attach(has_table=True)
    world.start()
    row = HeartbeatRow(world.fd, 0)
    row.scheduler[RUNNING_CALL_SEQ] = 7
    row.write_scheduler()
    world.adapter.abort(AbortAttempt("j/0", 1, "exec-0", 7, "test"))
    assert row.is_cancelled(7, 1)
    world.now += 1_500
    assert [draining for _, draining in world.adapter.press_cancellations()] == [1_500]
    row.close()


def traced(world, trace):
    """Contexts of a call, and of the one that it asks for with ``trace``."""
    peer = world.attach()
    world.start()
    world.send(peer, waiting(m.WaitKind.SUBCALL, trace=trace))
    world.loop.turn()
    world.start("j/0/sub-1", parent="j/0")
    (root, _), (child, _) = world.receive(peer)
    return root.trace, child.trace


SPAN = f"00-{'a' * 32}-{'b' * 16}-01"


def test_without_tracing_no_frame_has_a_context_whatever_the_executor_says(world):
    assert traced(world, SPAN) == (None, None)


def test_a_root_call_has_a_context_of_its_own_and_a_subcall_that_of_its_parents_span(world):
    world.adapter.traces = TraceSource(1, b"key")
    assert traced(world, SPAN) == (world.adapter.traces.root("j/0"), SPAN)


@pytest.mark.parametrize("trace", [None, "x" * 5_000])
def test_a_subcall_has_no_context_if_its_parent_named_none(world, trace):
    world.adapter.traces = TraceSource(1, b"key")
    assert traced(world, trace)[1] is None


class Recording:
    """A recorder that keeps what a replay would need."""

    def __init__(self):
        self.seen = []

    def asked(self, message, sidecar):
        payload = message.payload
        self.seen.append(
            ("asked", message.call_id, payload.wait_kind.value, payload.operation, sidecar)
        )

    def answered(self, call_id, request_id, payload, sidecar):
        self.seen.append(("answered", call_id, request_id, bytes(payload.result), sidecar))


def test_the_recorder_sees_every_read_and_subcall_with_its_answer_and_no_source(world):
    recording = world.adapter.recorder = Recording()
    peer = world.attach()
    world.start()
    world.send(peer, waiting(m.WaitKind.FUNCTION_CODE, function_code_digest="d" * 64))
    world.loop.turn()
    world.send(peer, waiting(m.WaitKind.IO, request_id="req-aa-2", operation="get_row"), b"q")
    world.loop.turn()
    answer = m.ResumeCallPayload(resume_kind=m.WaitKind.IO, attempt_seq=1, result=m.Raw(b"5"))
    world.adapter.resume_io("exec-0", "j/0", "req-aa-1", answer, None)  # stale
    world.adapter.resume_io("exec-0", "j/0", "req-aa-2", answer, b"a")
    world.send(peer, waiting(m.WaitKind.SUBCALL, request_id="req-aa-3"))
    world.loop.turn()
    world.adapter.resume_parent(ResumeParent("j/0", 1, "req-aa-3", "exec-0", b"{}", None, False, 0))
    assert recording.seen == [
        ("asked", "j/0", "io", "get_row", b"q"),
        ("answered", "j/0", "req-aa-2", b"5", b"a"),
        ("asked", "j/0", "subcall", "", None),
        ("answered", "j/0", "req-aa-3", b"{}", None),
    ]


def test_a_retired_executor_is_replaced_once_when_its_last_call_has_left(world):
    peer = world.attach()
    world.start()
    [executor] = world.adapter.attached_executors()
    world.adapter.retire(executor, "too large")
    world.adapter.retire(executor, "another reason")
    snapshot = world.adapter.snapshots()[0]
    assert (snapshot.healthy, snapshot.usable_contexts) == (True, 0)
    assert isinstance(world.adapter.bind(BindCall("j/0/sub-1", 1, "exec-0", "j/0")), CallBound)
    world.adapter.unbind("j/0/sub-1", "exec-0")
    world.adapter.replace_drained()
    assert world.recycled == []
    world.completed(peer)
    world.loop.turn()
    world.adapter.replace_drained()
    world.adapter.replace_drained()
    assert world.recycled == [("exec-0", os.getpid(), "too large")]
    assert isinstance(world.adapter.bind(BindCall("j/1", 1, "exec-0", "")), BindFailed)
    peer.close()
    world.loop.turn()
    assert world.killed == [], "its end is what we asked for"
    world.adapter.executor_exited("exec-0", os.getpid(), 0, None)
    assert [event.detail for event in world.events[1:]] == ["replaced: too large"]


def test_a_full_executor_gets_no_calls_until_it_has_room_again(world):
    world.attach()
    [executor] = world.adapter.attached_executors()
    executor.is_full = True
    assert world.adapter.snapshots()[0].usable_contexts == 0
    executor.is_full = False
    assert world.adapter.snapshots()[0].usable_contexts == 4


@pytest.mark.parametrize("blamed", [0, 41])
def test_for_memory_the_call_that_the_guard_named_is_blamed_and_not_the_one_that_ran_at_the_end(
    world, blamed
):
    world.attach(has_table=True)
    world.start()
    row = HeartbeatRow(world.fd, 0)
    row.scheduler[1] = incarnation_number("aa")
    row.scheduler[RUNNING_CALL_SEQ] = 7
    row.write_scheduler()
    [executor] = world.adapter.attached_executors()
    world.adapter.kill_for_memory(executor, "it used too much", blamed)
    world.adapter.kill_for_memory(executor, "again", 5)
    assert world.killed == [("exec-0", os.getpid(), "out of memory")]
    assert not world.adapter.snapshots()[0].healthy
    last = world.table.scheduler(0)
    assert world.adapter.row_sample(executor) == last
    world.adapter.executor_exited("exec-0", os.getpid(), -9, last)
    [lost] = world.events
    assert (lost.kind, lost.detail, lost.running_call_seq, lost.free_of_charge) == (
        ErrorKind.MEMORY_EXCEEDED,
        "it used too much",
        blamed,
        False,
    )
    row.close()
