"""Five functions that will not stop, beside 200 that wait well-behaved, in one executor."""

import time
from pathlib import Path
from typing import Any

import pytest

from blockx.ipc import exact_json
from blockx.ipc.messages import (
    CallCompleted,
    CallFailed,
    CallWaiting,
    Raw,
    ResumeCall,
    ResumeCallPayload,
    WaitKind,
)
from tests.executor.processes import FakeMain, Forked

pytestmark = pytest.mark.slow

BUDGET_MS = 1_500
STUBBORN = {
    "loop": "def _():\n    while True: pass",
    "swallow": """
def work():
    return sum(range(50))
def _():
    while True:
        try:
            while True: work()
        except BaseException:
            work()
""",
    "sleep": "import time\ndef _():\n    time.sleep(1e9)",
    "regex": "import re\ndef _():\n    return re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "finally": """
def work():
    return sum(range(50))
def _():
    try:
        work()
        return 1
    finally:
        while True: work()
""",
}
PATIENT = "from blockx_sdk import rpc\ndef _(n):\n    return [n, rpc.call('eth_getBalance', [n])]"


@pytest.fixture
def main(tmp_path: Path):
    fake = FakeMain(tmp_path / "s")
    yield fake
    fake.close()


@pytest.fixture
def executor(main: FakeMain, tmp_path: Path):
    made = Forked(tmp_path / "s", executor_max_inflight=300)
    main.accept()
    yield made
    made.close()


def test_all_five_end_within_their_budget_and_a_second_and_nobody_else_pays(main, executor):
    waiting: list[CallWaiting] = []
    for number in range(200):
        main.start(PATIENT, number, callBudgetMs=BUDGET_MS)
    while len(waiting) < 200:
        message = main.next()
        assert isinstance(message, CallWaiting), message
        waiting.append(message)
    started_s = time.monotonic()
    names = {main.start(source, callBudgetMs=BUDGET_MS): name for name, source in STUBBORN.items()}
    ended: dict[str, tuple[str, float, float]] = {}
    while len(ended) < len(STUBBORN):
        message = main.next()
        assert isinstance(message, CallFailed), message
        payload = message.payload
        ended[names[message.call_id]] = (
            payload.error_kind,
            payload.budget_used_ms,
            payload.queue_us,
        )
    wall_s = time.monotonic() - started_s
    # They take turns, so the last one ends when all have used their budgets; each is told alone.
    assert {name: kind for name, (kind, _, _) in ended.items()} == dict.fromkeys(
        STUBBORN, "deadline_exceeded"
    )
    used = {name: used_ms for name, (_, used_ms, _) in ended.items()}
    assert {name: ms for name, ms in used.items() if ms > BUDGET_MS + 1_000} == {}
    assert wall_s < len(STUBBORN) * (BUDGET_MS / 1_000 + 1)
    outcomes = [answer(main, message) for message in waiting]
    assert outcomes == [[n, "0x5"] for n in range(200)]
    assert executor.process.is_alive()
    assert executor.row().attached == 1, "nothing was cut inside a library"


def answer(main: FakeMain, waiting: CallWaiting) -> Any:
    """Resume a waiting call; its result, after the check that it was charged for its wait alone."""
    payload = ResumeCallPayload(
        resume_kind=WaitKind.IO,
        attempt_seq=1,
        result=Raw(b'"0x5"'),
        io_us=3_000,
    )
    main.send(ResumeCall(call_id=waiting.call_id, request_id=waiting.request_id, payload=payload))
    message = main.next()
    assert isinstance(message, CallCompleted), message
    assert message.payload.io_us == 3_000
    assert message.payload.budget_used_ms < 500, "waiting beside the others is queueing"
    return exact_json.decode(message.payload.output)


FIRST_IMPORTS = {
    "numpy": "import numpy\nimport numpy.linalg\ndef _():\n    return int(numpy.linalg.det(numpy.eye(3)))",
    "sqlite": (
        "import sqlite3, ssl, lzma, ctypes.util\ndef _():\n"
        "    return sqlite3.connect(':memory:').execute('select 1').fetchone()[0]"
    ),
    "protobuf": (
        "def _():\n    import email.message, http.client, xml.etree.ElementTree, concurrent.futures\n"
        "    from google.protobuf import struct_pb2\n    struct_pb2.Struct().update({'a': 1})\n    return 1"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST_IMPORTS)
def test_first_imports_that_run_out_of_budget_leave_no_broken_module(main, tmp_path, name):
    """Cut at many moments, each in a fresh process; the next call of the same process imports again."""
    outcomes = []
    for budget_ms in (1, 2, 4, 7, 11, 16, 23, 33, 47, 68, 97, 140):
        executor = Forked(tmp_path / "s")
        try:
            main.decoder, main.received = type(main.decoder)(), []
            main.accept()
            outcomes.append(main.run(FIRST_IMPORTS[name], callBudgetMs=budget_ms))
            assert main.run(FIRST_IMPORTS[name], callBudgetMs=20_000) == 1
            assert executor.row().attached == 1
        finally:
            main.socket.close()
            executor.close()
    assert set(outcomes) <= {"deadline_exceeded", 1}
    assert outcomes[0] == "deadline_exceeded"
