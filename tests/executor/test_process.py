"""A real executor process over a real socket; the test plays main."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockx.ipc import exact_json
from blockx.ipc.heartbeat import (
    BEAT_BLOCK,
    RUNNING_CALL_SEQ,
    SCHEDULER_BLOCK,
    incarnation_number,
)
from blockx.ipc.messages import (
    CallCompleted,
    CallWaiting,
    Heartbeat,
)
from tests.builders import CODE
from tests.executor.processes import TIMEOUT_S, FakeMain, Forked, is_alive, until

pytestmark = pytest.mark.slow


@pytest.fixture
def main(tmp_path: Path) -> Iterator[FakeMain]:
    fake = FakeMain(tmp_path / "s")
    yield fake
    fake.close()


@pytest.fixture
def by_hand(main: FakeMain, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m blockx.executor``, attached."""
    options = ["--executor-id", "exec-7", "--socket-path", str(tmp_path / "s")]
    options += ["--heartbeat-interval", "0.05"]
    process = subprocess.Popen(
        [sys.executable, "-m", "blockx.executor", *options],
        cwd=CODE,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    yield process
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stderr):
        assert stream is not None
        stream.close()


@pytest.fixture
def forked(main: FakeMain, tmp_path: Path) -> Iterator[Forked]:
    made = Forked(tmp_path / "s")
    yield made
    made.close()


def test_an_executor_started_by_hand_attaches_runs_calls_and_beats_by_frames(main, by_hand):
    first = main.accept()
    payload = first.payload
    assert (first.executor_id, payload.pid, payload.has_table) == ("exec-7", by_hand.pid, False)
    assert len(payload.executor_process_instance_id) == 8
    title = Path(f"/proc/{by_hand.pid}/cmdline").read_bytes().rstrip(b"\0")
    assert title == b"blockx: exec-7"
    assert os.getsid(by_hand.pid) == by_hand.pid
    assert main.run("def _(n):\n    return n + 1", 2**256) == 2**256 + 1
    # Beats come when it is idle, and while a call computes.
    assert isinstance(main.next(), Heartbeat)
    main.start("def _():\n    while True: len('')", callBudgetMs=300)
    beat = main.next()
    while isinstance(beat, Heartbeat) and not beat.payload.running_call_seq:
        beat = main.next()
    assert isinstance(beat, Heartbeat)
    assert (beat.payload.running_call_seq, beat.payload.running_call_id) == (2, "c2")
    assert main.outcome() == ("c2", "deadline_exceeded")


def test_it_ends_at_the_end_of_the_connection_even_with_a_thread_left(main, by_hand):
    main.accept()
    source = "import threading, time\n"
    source += "def _():\n    threading.Thread(target=time.sleep, args=(600,)).start()\n    return 1"
    assert main.run(source) == 1
    main.socket.close()
    assert by_hand.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("state", ["idle", "computing", "waiting"])
def test_sigterm_ends_it_at_once_and_cleanly(main, by_hand, state):
    main.accept()
    if state == "computing":
        main.start("def _():\n    while True: len('')")
        main.start("def _():\n    return 1")
        while main.next().payload.running_call_seq != 1:
            pass
    elif state == "waiting":
        main.start("from blockx_sdk import db\ndef _():\n    db.get('t', {'a': 1})")
        while not isinstance(main.next(), CallWaiting):
            pass
    by_hand.send_signal(signal.SIGTERM)
    assert by_hand.wait(TIMEOUT_S) == 0


def test_sigint_is_ignored(main, by_hand):
    main.accept()
    by_hand.send_signal(signal.SIGINT)
    assert main.run("def _():\n    return 1") == 1


def test_an_executor_of_a_run_that_has_ended_meanwhile_says_nothing(tmp_path, capfd):
    late = Forked(tmp_path / "none")
    late.process.join(TIMEOUT_S)
    assert (late.process.exitcode, capfd.readouterr().err) == (1, "")
    late.close()


def test_a_frame_that_main_may_not_send_ends_it_with_a_clear_line(main, by_hand):
    main.accept()
    main.socket.sendall(b"\0\0\0\2{}")
    assert by_hand.wait(TIMEOUT_S) == 1
    line = exact_json.decode(by_hand.stderr.read())
    assert line["level"] == "error"
    assert line["executor_id"] == "exec-7"
    assert line["reason"].startswith("PeerProtocolError: not a message of main")


def test_a_socket_that_is_not_there_ends_it_with_a_clear_line(tmp_path):
    options = ["--executor-id", "exec-7", "--socket-path", str(tmp_path / "none")]
    command = [sys.executable, "-m", "blockx.executor", *options]
    answer = subprocess.run(command, cwd=CODE, capture_output=True, timeout=60, check=False)
    assert answer.returncode == 1
    assert b"FileNotFoundError" in answer.stderr


def test_user_code_sees_only_harmless_descriptors_and_its_output_goes_nowhere(main, by_hand):
    main.accept()
    source = """
import os, sys
def _():
    print("to be kept")
    os.write(1, b"to nowhere")
    os.write(2, b"to nowhere")
    kinds = [os.readlink(f"/proc/self/fd/{n}").partition(":")[0] for n in (0, 1, 2)]
    return kinds + [len(os.listdir("/proc/self/fd")) <= 7, sys.stdin.read(), os.getcwd()]
"""
    nowhere = "/dev/null"
    assert main.run(source, debug=True) == [nowhere] * 3 + [True, "", "/"]
    assert main.run("import os\ndef _():\n    return os.environ['BLOCKX_EXECUTOR_RUNTIME']") == "1"


def test_a_forked_child_of_a_call_never_speaks_with_main(main, by_hand):
    main.accept()
    source = "import os\ndef _(n):\n    pid = os.fork()\n    return {'n': n, 'child': pid == 0}"
    assert [main.run(source, n) for n in (1, 2)] == [
        {"n": 1, "child": False},
        {"n": 2, "child": False},
    ]
    source = """
import os, time
from blockx_sdk import db
def _():
    pid = os.fork()
    if pid == 0:
        try:
            db.get("t", {"a": 1})
        except RuntimeError:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    assert main.run(source) == 7


def test_a_forked_child_does_not_even_hold_the_socket(main, by_hand):
    main.accept()
    source = """
import os
def held():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink("/proc/self/fd/" + name).partition(":")[0])
        except OSError:
            pass
    return links.count("socket")
def _():
    pid = os.fork()
    if pid == 0:
        os._exit(held())
    return [held(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
"""
    assert main.run(source) == [1, 0]


def test_a_forked_child_runs_no_other_call(main, by_hand, tmp_path):
    main.accept()
    spin = "import time\ndef _(s):\n    t = time.perf_counter() + s\n    while time.perf_counter() < t: pass"
    fork = "import os\ndef _(n):\n    pid = n and os.fork()\n    if pid: os.waitpid(pid, 0)"
    write = "def _(path):\n    with open(path, 'a') as file:\n        file.write('x')"
    assert [main.run(spin, 0), main.run(fork, 0), main.run(write, "/dev/null")] == [None] * 3
    path = str(tmp_path / "written")
    main.start(spin, 0.2)
    main.start(fork, 1)
    main.start(write, path)
    assert [main.outcome()[1] for _ in range(3)] == [None] * 3
    assert Path(path).read_text() == "x"


def test_what_a_call_prints_comes_with_its_outcome_whatever_others_did_to_stdout(main, by_hand):
    main.accept()
    thief = "import sys, io\ndef _():\n    sys.stdout.close()\n    sys.stdout = io.StringIO()"
    assert main.run(thief) is None
    main.start("import sys\ndef _():\n    print('one')\n    sys.stderr.write('two')")
    message = main.next()
    while not isinstance(message, CallCompleted):
        message = main.next()
    assert message.payload.output_tail == "one\ntwo"


def test_children_of_a_call_die_with_the_executor(main, by_hand):
    main.accept()
    source = "import os, time\ndef _():\n    pid = os.fork()\n"
    source += "    while pid == 0: time.sleep(1)\n    return pid"
    child = main.run(source)
    assert is_alive(child)
    by_hand.kill()
    until(lambda: not is_alive(child))


def test_a_forkserver_child_shows_itself_in_its_row(main, forked):
    first = main.accept()
    assert first.payload.has_table
    source = """
import os
def _():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink("/proc/self/fd/" + name).partition(":")[0])
        except OSError:
            pass
    return [link for link in links if link != "/dev/null"]
"""
    links = main.run(source)
    # The others are the log and its own statm.
    assert (len(links), links.count("socket")) == (3, 1)
    until(lambda: bool(forked.row().attached))
    sample = forked.row()
    incarnation = incarnation_number(first.payload.executor_process_instance_id)
    assert (sample.incarnation, sample.pid) == (incarnation, forked.process.pid)
    assert (sample.running_call_seq, sample.inflight, sample.finished_calls) == (0, 0, 1)
    assert sample.available_contexts == 8
    until(lambda: forked.table.beat(1) is not None)
    assert forked.table.beat(1).memory_bytes > 1_000_000
    beat_ns = forked.table.beat(1).beat_ns
    until(lambda: forked.table.beat(1).beat_ns > beat_ns)
    assert (SCHEDULER_BLOCK, BEAT_BLOCK, RUNNING_CALL_SEQ) == (0, 32, 8)


@pytest.mark.parametrize(
    "death",
    ["import os; os._exit(9)", "import ctypes; ctypes.string_at(0)", "import os; os.abort()"],
)
def test_a_call_that_kills_its_process_leaves_its_number_in_the_row(main, forked, death):
    main.accept()
    assert main.run("def _():\n    return 1") == 1
    main.start("from blockx_sdk import db\ndef _():\n    db.get('t', {'a': 1})", attemptSeq=4)
    while not isinstance(main.next(), CallWaiting):
        pass
    main.start(f"def _():\n    {death}", attemptSeq=5)
    with pytest.raises((EOFError, ConnectionResetError)):
        main.outcome()
    forked.process.join(TIMEOUT_S)
    sample = forked.row()
    assert (sample.running_call_seq, sample.running_attempt_seq) == (3, 5)


ENDLESS = "def _(n):\n    while n: len('')"


def test_the_control_word_ends_a_computing_call_and_its_neighbours_go_on(main, forked):
    main.accept()
    nap = "import time\ndef _(s):\n    time.sleep(s)\n    return 'neighbour'"
    assert [main.run(ENDLESS, 0), main.run(nap, 0)] == [None, "neighbour"]
    main.start(nap, 0.5)
    main.start(ENDLESS, 1, attemptSeq=3)
    until(lambda: forked.row().running_call_seq == 4)
    forked.table.request_cancel(1, 4, 3)
    assert main.outcome() == ("c4", "cancelled")
    assert main.outcome() == ("c3", "neighbour")


def test_a_finished_call_is_sent_while_the_next_one_computes(main, forked):
    main.accept()
    quick = "def _():\n    return 1"
    assert [main.run(ENDLESS, 0), main.run(quick)] == [None, 1]
    main.start(quick)
    main.start(ENDLESS, 1)
    assert main.outcome() == ("c3", 1)
    until(lambda: forked.row().running_call_seq == 4)


def test_it_dies_with_its_parent(main, tmp_path):
    options = ["--executor-id", "exec-7", "--socket-path", str(tmp_path / "s")]
    script = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-m', 'blockx.executor', *{options}])\ninput()"
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=CODE, stdin=subprocess.PIPE)
    first = main.accept()
    parent.kill()
    parent.wait()
    assert parent.stdin is not None
    parent.stdin.close()
    until(lambda: not is_alive(first.payload.pid))
