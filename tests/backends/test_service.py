"""The io thread: grouping, unknown names, failing backends, order, the end."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blockx.backends import service as service_module
from blockx.backends.scope import IoReply, IoRequest, Reply
from tests.backends.harness import Io, outcome

StartIo = Callable[..., Io]

pytestmark = pytest.mark.usefixtures("loop_kind")


class Echo:
    """A backend that answers with the parameters; ``fail`` makes it raise, ``hold`` makes it keep quiet."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.story: list[str] = []
        self.closed = False
        self.loop = ""

    async def start(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]

    def submit(self, request: IoRequest, reply: Reply) -> None:
        self.threads.add(threading.current_thread().name)
        self.story.append(f"submit {request.call_id}")
        if request.operation == "fail":
            raise RuntimeError("broken")
        if request.operation != "hold":
            reply(IoReply(request, result=request.params))
        if request.operation == "twice":
            reply(IoReply(request, result=b"0"))

    def cancel(self, call_id: str) -> None:
        self.story.append(f"cancel {call_id}")
        if call_id == "bad":
            raise RuntimeError("broken")

    def task_ended(self, task_id: str) -> None:
        self.story.append(f"ended {task_id}")

    def statistics(self, task_id: str) -> dict[str, dict[str, int]]:
        return {"section": {"numbers": len(self.story)}}

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def service(tmp_path: Path, echo: Echo) -> Iterator[Io]:
    started = Io(tmp_path, {}, {"echo": echo})
    yield started
    started.stop()


def test_the_loop_is_uvloops_where_it_is_installed(service: Io, echo: Echo, loop_kind: str) -> None:
    assert echo.loop == loop_kind


def test_replies_of_one_turn_come_as_one_group_on_the_io_thread(service: Io, echo: Echo) -> None:
    requests = [service.request("echo", "x", n) for n in range(100)]
    assert [outcome(reply) for reply in service.ask(*requests)] == list(range(100))
    assert service.groups == [100]
    assert echo.threads == {"io"}
    service.stop()


def test_an_unknown_backend_is_an_error_that_says_what_to_do(service: Io) -> None:
    replies = service.ask(*[service.request(name, "x", 0) for name in ("rpc", "blockdb", "other")])
    assert [outcome(reply) for reply in replies] == [
        (
            "io_error",
            "backend 'rpc' is not configured; add a chain with its urls under backends.rpc to "
            "config.yaml (configured: echo)",
        ),
        (
            "io_error",
            "backend 'blockdb' is not configured; add backends.blockdb.path (a SQLite file) or .url (PostgreSQL) to "
            "config.yaml (configured: echo)",
        ),
        ("io_error", "backend 'other' is not configured (configured: echo)"),
    ]
    service.stop()


def test_a_backend_that_raises_loses_no_request(service: Io) -> None:
    replies = service.ask(service.request("echo", "fail", 0), service.request("echo", "x", 1))
    assert [outcome(reply) for reply in replies] == [
        ("io_error", "backend echo failed on fail: RuntimeError: broken"),
        1,
    ]
    service.stop()


def test_a_second_reply_to_one_request_is_dropped_and_counted(service: Io) -> None:
    service.ask(service.request("echo", "twice", 1))
    assert service.groups == [1]
    assert service.service.dropped_replies == 1
    service.stop()


def test_what_is_handed_in_is_handled_in_order(service: Io, echo: Echo) -> None:
    service.service.submit([service.request("echo", "hold", 0, call="a")])
    service.service.cancel(["a", "b"])
    service.service.task_ended("t@1")
    service.ask(service.request("echo", "x", 0, call="a"))
    assert echo.story == ["submit a", "cancel a", "cancel b", "ended t@1", "submit a"]
    assert service.service.statistics("t@1") == {"echo": {"section": {"numbers": 5}}}
    service.stop()


def test_an_action_that_raises_does_not_stop_the_next(service: Io, echo: Echo) -> None:
    service.ask(service.request("echo", "x", 0, call="first"))
    loop, hold = service.service._loop, threading.Event()
    assert loop is not None
    loop.set_exception_handler(lambda *_: None)
    loop.call_soon_threadsafe(hold.wait)
    service.service.cancel(["bad"])
    request = service.request("echo", "x", 0, call="a")
    service.service.submit([request])
    hold.set()
    service.replies_to(request)
    assert echo.story == ["submit first", "cancel bad", "submit a"]
    service.stop()


def test_many_threads_may_submit_at_once(service: Io) -> None:
    requests = [[service.request("echo", "x", n) for n in range(50)] for _ in range(8)]
    threads = [threading.Thread(target=service.service.submit, args=(part,)) for part in requests]
    for thread in threads:
        thread.start()
    assert len(service.replies_to(*[r for part in requests for r in part])) == 400
    for thread in threads:
        thread.join()
    service.stop()


def test_above_the_bound_a_request_is_answered_at_once(
    service: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "WAITING_REQUESTS_MAX", 2)
    held = [service.request("echo", "hold", 0) for _ in range(2)]
    service.service.submit(held)
    reply = service.one(service.request("echo", "x", 0))
    assert outcome(reply) == (
        "unavailable",
        "more than 2 requests are waiting for backends",
    )
    service.stop()


def test_stop_closes_the_backends_and_ends_the_thread(service: Io, echo: Echo) -> None:
    service.stop()
    service.stop()
    assert echo.closed
    assert "io" not in {thread.name for thread in threading.enumerate()}
    service.service.submit([service.request("echo", "x", 0)])  # late: no error, no reply
