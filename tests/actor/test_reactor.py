"""The epoll loop: inbox, timers, sockets, bounded turns."""

import os
import socket
import threading

import pytest

from blockx.actor.reactor import Reactor


@pytest.fixture
def reactor():
    reactor = Reactor()
    yield reactor
    reactor.close()


def run(reactor, on_item=lambda item: None, on_turn_end=lambda: None):
    """Run on a thread of its own; returns it."""
    thread = threading.Thread(target=reactor.run, args=(on_item, on_turn_end))
    thread.start()
    return thread


def test_items_of_many_threads_are_all_handled_in_the_order_of_their_thread(reactor):
    got, done = [], threading.Event()

    def on_item(item):
        got.append(item)
        if len(got) == 4_000:
            done.set()

    actor = run(reactor, on_item)
    posters = [
        threading.Thread(target=lambda k=k: [reactor.post((k, n)) for n in range(1_000)])
        for k in range(4)
    ]
    for poster in posters:
        poster.start()
    assert done.wait(10)
    reactor.stop()
    actor.join(10)
    for k in range(4):
        assert [n for kk, n in got if kk == k] == list(range(1_000))


def test_timers_fire_in_the_order_of_their_time_and_not_before(reactor):
    got = []

    def on_item(item):
        got.append(item)
        if item == "late":
            reactor.stop()

    reactor.call_later(20, "late")
    reactor.call_later(0, "early")
    reactor.run(on_item, lambda: None)
    assert got == ["early", "late"]


def test_an_item_posted_by_a_handler_waits_for_the_next_turn(reactor):
    got, turns = [], []

    def on_item(item):
        got.append((len(turns), item))
        if item == "first":
            reactor.post("second")
        else:
            reactor.stop()

    reactor.post("first")
    reactor.run(on_item, lambda: turns.append(None))
    assert got == [(0, "first"), (1, "second")]


def test_a_readable_socket_calls_its_handler_and_a_forgotten_one_does_not(reactor):
    ours, theirs = socket.socketpair()
    got = []

    def on_ready(_mask):
        got.append(ours.recv(10))
        reactor.unregister(ours.fileno())
        theirs.send(b"y")
        reactor.stop()

    reactor.register(ours.fileno(), on_ready)
    theirs.send(b"x")
    reactor.run(lambda item: None, lambda: None)
    assert got == [b"x"]
    ours.close()
    theirs.close()


def test_a_writable_socket_is_told_only_when_wanted(reactor):
    ours, theirs = socket.socketpair()
    masks = []

    def on_ready(mask):
        masks.append(mask)
        reactor.want_write(ours.fileno(), False)
        reactor.stop()

    reactor.register(ours.fileno(), on_ready)
    reactor.want_write(ours.fileno(), True)
    reactor.run(lambda item: None, lambda: None)
    assert len(masks) == 1
    ours.close()
    theirs.close()


def test_a_post_after_the_end_is_dropped_without_touching_a_foreign_descriptor(reactor):
    reactor.close()
    fd = os.eventfd(0)
    reactor.post("late")
    os.set_blocking(fd, False)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(fd)
    os.close(fd)
    reactor.__init__()  # for the fixture's close
