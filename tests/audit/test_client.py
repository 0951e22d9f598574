"""The daemon and the one who asks: verdicts, and what a source does that kills its judge."""

import os
import select
import subprocess
import sys
import threading
from hashlib import sha256

import pytest

from blockx.audit import client as client_module
from blockx.audit.client import Auditor, auditor_of
from blockx.audit.tables import RULES_VERSION
from blockx.audit.verdict import audit_token
from blockx.errors import UsageError

HONEST = b"def _(p):\n    return p\n"
KILLER = """\
import os, signal
from blockx.audit import daemon

judge = daemon.audit_bytes
daemon.CPU_LIMIT_S = 0.05

def audit_bytes(data):
    if b"crash" in data: os.kill(os.getpid(), signal.SIGSEGV)
    if b"leave" in data: os._exit(3)
    if b"compute" in data: sum(iter(int, 1))
    if b"wait" in data: signal.pause()
    if b"noise" in data: os.write(1, b"no frame at all")
    if b"environment" in data: data = f"import {'_'.join(sorted(os.environ))}".encode()
    if b"memory" in data: raise MemoryError
    return judge(data)

daemon.audit_bytes = audit_bytes
daemon.serve()
"""
"""The daemon, with a parser that some sources kill."""

pytestmark = pytest.mark.slow


@pytest.fixture
def killable():
    with Auditor([sys.executable, "-c", KILLER], wall_limit_s=30) as auditor:
        yield auditor


def test_one_daemon_answers_and_each_source_is_judged_once():
    with Auditor() as auditor:
        assert auditor.audit(HONEST).accepted
        refused = auditor.audit(b"import os")
        assert [finding.rule for finding in refused.findings] == ["import"]
        assert auditor.audit(b"import os") is refused
        assert auditor.starts == 1


def test_no_daemon_is_started_before_the_first_question():
    with Auditor() as auditor:
        pass
    assert auditor.starts == 0


def test_a_closed_auditor_leaves_no_process_and_starts_again_when_asked():
    with Auditor() as auditor:
        auditor.audit(HONEST)
        process = auditor._process
        auditor.close()
        assert process.returncode == 0
        assert not auditor.audit(b"import os").accepted
        assert auditor.starts == 2


@pytest.mark.parametrize(
    ("word", "story"),
    [
        ("crash", "SIGSEGV"),
        ("leave", "code 3"),
        ("compute", "CPU time"),
        ("noise", "the audit"),
        ("memory", "too large"),
    ],
)
def test_a_source_that_kills_its_judge_is_refused_and_the_next_one_judged(killable, word, story):
    (finding,) = killable.audit(word.encode()).findings
    assert finding.rule == "source"
    assert story in finding.message
    assert killable.audit(HONEST).accepted
    starts = killable.starts
    assert not killable.audit(word.encode()).accepted  # remembered: it kills only once
    assert killable.starts == starts


def test_a_daemon_that_does_not_answer_is_killed():
    with Auditor([sys.executable, "-c", KILLER], wall_limit_s=1) as auditor:
        (finding,) = auditor.audit(b"wait").findings
        assert "more than 1 s" in finding.message


def test_a_daemon_that_never_reads_is_killed():
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with Auditor(command, wall_limit_s=0.5) as auditor:
        assert not auditor.audit(b"#" * 200_000).accepted


def test_a_daemon_that_cannot_start_is_a_mistake_of_the_installation():
    with Auditor(["/no/such/program"]) as auditor, pytest.raises(UsageError, match="cannot start"):
        auditor.audit(HONEST)


def test_the_daemon_sees_nothing_of_our_environment(killable, monkeypatch):
    monkeypatch.setenv("NODE_URL_WITH_KEY", "secret")
    (finding,) = killable.audit(b"environment").findings
    assert "PYTHONPATH" in finding.message
    assert "NODE_URL" not in finding.message


def test_the_daemon_ends_with_the_process_that_asked():
    code = (
        "import sys; from blockx.audit.client import Auditor; a = Auditor(); a.audit(b'x = 1');"
        "sys.stdout.write(str(a._process.pid)); sys.stdout.flush(); __import__('os')._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    try:
        pidfd = os.pidfd_open(int(done.stdout))
    except ProcessLookupError:
        return  # it has ended already
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(30_000), "it lives on"
    finally:
        os.close(pidfd)


def test_questions_of_several_threads_get_their_own_answers():
    answers = {}
    with Auditor() as auditor:

        def ask(n):
            for m in range(10):
                (finding,) = auditor.audit(f"import os{n}x{m}".encode()).findings
                answers[n, m] = f"os{n}x{m}," in finding.message

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == 40
    assert all(answers.values())


def test_old_verdicts_are_forgotten(monkeypatch):
    monkeypatch.setattr(client_module, "VERDICTS_MAX", 2)
    with Auditor() as auditor:
        first = auditor.audit(b"import os")
        for n in range(2):
            auditor.audit(f"x = {n}".encode())
        assert auditor.audit(b"import os") is not first


def test_a_judged_source_has_a_token_or_a_refusal_with_places():
    with Auditor() as auditor:
        token, refusal = auditor.judge("a/b", HONEST.decode())
        assert (token, refusal) == (f"{RULES_VERSION}:{sha256(HONEST).hexdigest()}", None)
        token, refusal = auditor.judge("a/b", "x = 1\nimport os, sys, re, io, gc, ssl\n")
    assert token == ""
    assert refusal.startswith(
        "LoadError: refused by the audit: functions/a/b.py, line 2, column 8: "
    )
    assert "[import]" in refusal
    assert refusal.endswith("; 2 more: blockx audit shows them")


def test_a_token_holds_the_version_of_the_rules():
    assert audit_token("d" * 64) == f"{RULES_VERSION}:{'d' * 64}"


def test_only_the_restricted_mode_has_an_auditor():
    with auditor_of("open") as auditor:
        assert auditor is None
    with auditor_of("restricted") as auditor:
        assert isinstance(auditor, Auditor)
