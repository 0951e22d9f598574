"""The process that parses hostile sources: frames on stdin, verdicts on stdout, until stdin ends.

Main thread of a process of its own, started by ``client.Auditor``. A source may crash it, or use up its memory or
its time: it dies then, and the one who asked takes that for an answer. Nothing but frames is written to stdout.
"""

import os
import resource
import signal
from typing import Final

import msgspec

from blockx.audit.auditor import audit_bytes
from blockx.audit.verdict import Verdict, refused
from blockx.ipc.frames import FrameDecoder, encode_frame

CPU_LIMIT_S: Final = 5.0
"""CPU time of one audit; then SIGPROF ends the process, in the middle of C code too. Known sources need up to 3 s."""
MEMORY_LIMIT_BYTES: Final = 1024 * 1024 * 1024
"""Address space; more is a MemoryError, hence a refusal. The largest source needs a quarter."""
_READ_BYTES: Final = 64 * 1024


class AuditRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Judge the source in the sidecar."""

    seq: int


class AuditReply(msgspec.Struct, kw_only=True, frozen=True):
    """The answer to the request with the same number."""

    seq: int
    verdict: Verdict


_requests = msgspec.json.Decoder(AuditRequest)


def serve() -> None:
    """Answer requests until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    decoder = FrameDecoder()
    while data := os.read(0, _READ_BYTES):
        for frame in decoder.feed(data):
            seq = _requests.decode(frame.body).seq
            _write(encode_frame(AuditReply(seq=seq, verdict=_judge(frame.sidecar or b""))))


def _judge(data: bytes) -> Verdict:
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        return audit_bytes(data)
    except (MemoryError, RecursionError):
        return refused("source", "too large to judge; split the function")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
