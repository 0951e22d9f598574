"""The floor of the design: what its unavoidable parts cost on this machine, and what blockx costs beside them.

    python perf/floor.py [--reps 5]

A no-op call is at least: an ExecuteCall frame encoded in main, sent, cut and decoded in the executor; a greenlet
switched in and out; its answer encoded there, sent, cut and decoded in main. A read is at least one more frame in
each direction and two more switches. The parts are measured alone, with the product's own codec and rows (and, for
scale, with nothing but bytes), as CPU time of this process; the sums below them are what a result of the other
scripts can be read as a share of.
"""

import argparse
import os
import select
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable

import greenlet
from harness import code, machine

sys.path.insert(0, str(code()))

from blockx.ipc.frames import FrameDecoder, encode_frame
from blockx.ipc.heartbeat import HeartbeatRow, create_table_fd
from blockx.ipc.messages import (
    CallCompleted,
    CallCompletedPayload,
    ExecuteCall,
    ExecuteCallPayload,
    Raw,
    decode_executor_message,
    decode_main_message,
)

GROUP = 64
"""Frames in one send, as both ends gather them under load."""

EXECUTE = ExecuteCall(
    call_id="measured/4711",
    payload=ExecuteCallPayload(
        task_id="measured@0123456789",
        function_id="noop",
        function_code_digest="d" * 64,
        entry_selector="_",
        args=Raw(b'[{"block":17000000}]'),
        attempt_seq=1,
        call_seq=4711,
        call_budget_ms=5_000,
    ),
)
COMPLETED = CallCompleted(
    call_id="measured/4711",
    payload=CallCompletedPayload(
        attempt_seq=1, output=Raw(b'{"block":17000000,"ok":true}'), body_started=True, cpu_us=12
    ),
)
ONE, DONE = encode_frame(EXECUTE), encode_frame(COMPLETED)


def encode_main(count: int) -> None:
    for _ in range(count):
        encode_frame(EXECUTE)


def decode_main(count: int) -> None:
    decoder, data = FrameDecoder(), DONE * GROUP
    for _ in range(count // GROUP):
        for body, _sidecar in decoder.feed(data):
            decode_executor_message(body)


def encode_executor(count: int) -> None:
    for _ in range(count):
        encode_frame(COMPLETED)


def decode_executor(count: int) -> None:
    decoder, data = FrameDecoder(), ONE * GROUP
    for _ in range(count // GROUP):
        for body, _sidecar in decoder.feed(data):
            decode_main_message(body)


def socket_group(count: int) -> None:
    """One frame of each kind, in groups: sent and received, both ends here, with the epoll of one."""
    ours, theirs = socket.socketpair()
    poll = select.epoll()
    poll.register(ours, select.EPOLLIN)
    there, back = ONE * GROUP, DONE * GROUP
    for _ in range(count // GROUP):
        ours.sendall(there)
        theirs.recv(1 << 18)
        theirs.sendall(back)
        poll.poll()
        ours.recv(1 << 18)
    poll.close()
    ours.close()
    theirs.close()


def switches(count: int) -> None:
    """Into a parked greenlet and back."""
    hub = greenlet.getcurrent()

    def park() -> None:
        while True:
            hub.switch()

    parked = greenlet.greenlet(park)
    for _ in range(count):
        parked.switch()


def timer(count: int) -> None:
    """Armed and disarmed, as for a call whose budget ends within a tick."""
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    for _ in range(count):
        signal.setitimer(signal.ITIMER_REAL, 5.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def row_write(count: int) -> None:
    """The scheduler block of the heartbeat row, published."""
    descriptor = create_table_fd(1)
    row = HeartbeatRow(descriptor, 0)
    os.close(descriptor)
    for _ in range(count):
        row.write_scheduler()
    row.close()


def thread_clock(count: int) -> None:
    for _ in range(count):
        time.thread_time_ns()


PARTS: dict[str, Callable[[int], None]] = {
    "encode ExecuteCall (main)": encode_main,
    "cut and decode ExecuteCall (executor)": decode_executor,
    "encode CallCompleted (executor)": encode_executor,
    "cut and decode CallCompleted (main)": decode_main,
    f"socket, both frames, {GROUP} a send": socket_group,
    "greenlet switch there and back": switches,
    "publish the heartbeat row": row_write,
    "read the thread's CPU clock": thread_clock,
    "timer armed and disarmed": timer,
}
NOOP = (0, 1, 2, 3, 4, 5, 7)
"""Parts of a no-op call: its row is published once a group, its budget needs no timer of its own."""


def cost_us(part: Callable[[int], None], count: int) -> float:
    """CPU time of one, in microseconds."""
    start_ns = time.process_time_ns()
    part(count)
    return (time.process_time_ns() - start_ns) / count / 1_000


def measure(reps: int, count: int = 20_480) -> dict[str, float]:
    """The median cost of each part, in microseconds of CPU."""
    return {
        name: statistics.median(cost_us(part, count) for _ in range(reps))
        for name, part in PARTS.items()
    }


def floor_us(costs: dict[str, float]) -> float:
    """CPU of a no-op call in all processes together, if it were nothing but these parts."""
    values = list(costs.values())
    return sum(values[part] for part in NOOP)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--reps", type=int, default=5, help="repetitions (default 5)")
    options = parser.parse_args()
    print(machine())
    costs = measure(options.reps)
    print(f"\n{'part':42}{'us of CPU':>10}")
    for name, cost in costs.items():
        print(f"{name:42}{cost:>10.2f}")
    total = floor_us(costs)
    print(
        f"\nA no-op call of nothing else: {total:.1f} us in all processes together, "
        f"{os.cpu_count() or 1} cores could do {(os.cpu_count() or 1) * 1e6 / total:,.0f} calls/s."
    )


if __name__ == "__main__":
    main()
