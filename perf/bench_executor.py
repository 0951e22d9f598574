"""What does a call cost inside an executor, and what does a suspended one weigh?

    python perf/bench_executor.py [--calls 20000] [--suspended 10000] [--reps 5] [--profile]

One runtime of an executor with everything a real one has (heartbeat row, alarm, output capture, a
socket with real frames), driven from the same process, so that only its own time is measured: the
other end writes the frames before the clock starts and reads the answers after it has stopped.

Times are CPU time of the main thread, since the machine may be busy with other things.

noop       ``def _(p): return {"block": p["block"], "ok": True}``: us a call, reading and sending included
read       a call that waits for one read: us a call, both of its steps
sleep      a call that sleeps 0 s once: us a call
suspended  KB of resident memory a call that waits for a read, with all of them waiting at once
"""

import argparse
import cProfile
import gc
import hashlib
import os
import platform
import pstats
import socket
import statistics
import sys
import time
from typing import Any

from harness import code

sys.path.insert(0, str(code()))

from blockx.executor import ambient, capture
from blockx.executor.loader import Loader
from blockx.executor.memory import GC_OBJECTS
from blockx.executor.runtime import ExecutorRuntime
from blockx.executor.session import UdsSession
from blockx.executor.vitals import Vitals
from blockx.ipc.frames import FrameDecoder, encode_frame
from blockx.ipc.heartbeat import HeartbeatRow, create_table_fd
from blockx.ipc.messages import (
    CallCompleted,
    CallWaiting,
    ExecuteCall,
    ExecuteCallPayload,
    Raw,
    ResumeCall,
    ResumeCallPayload,
    WaitKind,
    decode_executor_message,
)

OUT = sys.stdout
"""Bound here: a runtime takes ``sys.stdout`` over."""
GROUP = 256
"""Frames written at once; together they fit into the buffer of a socket."""
BUFFER_BYTES = 4 * 1024 * 1024
READ = (
    "from blockx_sdk import rpc\n\n\ndef _(p):\n    return rpc.call('eth_chainId', [p['block']])\n"
)
FUNCTIONS = {
    "noop": "def _(p):\n    return {'block': p['block'], 'ok': True}\n",
    "read": READ,
    "sleep": "import time\n\n\ndef _(p):\n    time.sleep(0)\n    return p['block']\n",
}


class Bench:
    """Main's side of one runtime, on the other end of a socket pair."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        ours.setblocking(False)
        self._socket, self._decoder, self._call_seq = ours, FrameDecoder(), 0
        gc.set_threshold(GC_OBJECTS, *gc.get_threshold()[1:])
        descriptor = create_table_fd(1)
        self.runtime = ExecutorRuntime(
            "exec-0",
            Loader(),
            UdsSession(theirs),
            HeartbeatRow(descriptor, 0),
            incarnation_id="bench",
            executor_max_inflight=0,
            capture=capture.install,
        )
        os.close(descriptor)
        self.run_ns = 0

    def execute(self, source: str) -> bytes:
        """The frame of one new call."""
        self._call_seq += 1
        payload = ExecuteCallPayload(
            task_id="bench@1",
            function_id="f",
            function_code_digest=hashlib.sha256(source.encode()).hexdigest(),
            entry_selector="_",
            args=Raw(b'[{"block":%d}]' % self._call_seq),
            attempt_seq=1,
            call_seq=self._call_seq,
            call_budget_ms=5_000,
        )
        return encode_frame(ExecuteCall(call_id=f"bench/{self._call_seq}", payload=payload))

    def turn(self, frames: list[bytes]) -> list[Any]:
        """Hand frames over, let the runtime run until it is idle (timed), return what it sent."""
        self._socket.sendall(b"".join(frames))
        start_ns = time.thread_time_ns()
        self.runtime.run_until_idle()
        self.run_ns += time.thread_time_ns() - start_ns
        sent: list[Any] = []
        while True:
            try:
                data = self._socket.recv(BUFFER_BYTES)
            except BlockingIOError:
                return sent
            for body, _sidecar in self._decoder.feed(data):
                sent.append(decode_executor_message(bytes(body)))

    def answer(self, waiting: CallWaiting, source: str) -> bytes:
        """The frame that answers a request."""
        payload = ResumeCallPayload(
            resume_kind=waiting.payload.wait_kind, attempt_seq=1, result=Raw(b'"0x1"')
        )
        is_fetch = waiting.payload.wait_kind is WaitKind.FUNCTION_CODE
        frame = ResumeCall(call_id=waiting.call_id, request_id=waiting.request_id, payload=payload)
        return encode_frame(frame, source.encode() if is_fetch else None)

    def run(self, source: str, calls: int) -> int:
        """Run calls to their end, a group at a time; how many completed."""
        completed = 0
        for start in range(0, calls, GROUP):
            frames = [self.execute(source) for _ in range(min(GROUP, calls - start))]
            while frames:
                sent = self.turn(frames)
                frames = [self.answer(m, source) for m in sent if isinstance(m, CallWaiting)]
                completed += sum(isinstance(m, CallCompleted) for m in sent)
        return completed

    def us_a_call(self, source: str, calls: int) -> float:
        """Time inside the runtime, for each call."""
        self.run_ns = 0
        completed = self.run(source, calls)
        assert completed == calls, f"{completed} of {calls} calls completed"
        return self.run_ns / calls / 1_000

    def suspend(self, source: str, calls: int) -> list[CallWaiting]:
        """Start calls that wait for a read; their requests."""
        waiting: list[CallWaiting] = []
        for _ in range(0, calls, GROUP):
            waiting += self.turn([self.execute(source) for _ in range(GROUP)])
        return waiting


def kilobytes_suspended(calls: int) -> float:
    """Resident memory a suspended call."""
    bench, vitals = Bench(), Vitals()
    bench.run(READ, GROUP)
    gc.collect()
    before = vitals.sample().memory_bytes
    waiting = bench.suspend(READ, calls)
    grown = vitals.sample().memory_bytes - before
    resident = bench.runtime.inflight_count()
    assert resident == len(waiting) >= calls, f"{resident} resident, {len(waiting)} waiting"
    for start in range(0, len(waiting), GROUP):
        bench.turn([bench.answer(m, READ) for m in waiting[start : start + GROUP]])
    assert bench.runtime.inflight_count() == 0
    bench.runtime.close()
    return grown / resident / 1_024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--suspended", type=int, default=10_000)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="where the time of noop goes")
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        file=OUT,
    )
    if options.profile:
        bench = Bench()
        bench.run(FUNCTIONS["noop"], GROUP)
        ambient._get_profile = lambda: None  # or it would end the profile after one step
        profile = cProfile.Profile()
        profile.runcall(bench.run, FUNCTIONS["noop"], options.calls)
        pstats.Stats(profile, stream=OUT).sort_stats("tottime").print_stats(25)
        return
    weight = kilobytes_suspended(options.suspended)
    for name, source in FUNCTIONS.items():
        bench = Bench()
        bench.run(source, GROUP)
        times = [bench.us_a_call(source, options.calls) for _ in range(options.reps)]
        bench.runtime.close()
        print(
            f"{name:10} {statistics.median(times):6.2f} us a call (best {min(times):.2f})", file=OUT
        )
    print(f"suspended  {weight:6.2f} KB a call, {options.suspended} waiting at once", file=OUT)


if __name__ == "__main__":
    main()
