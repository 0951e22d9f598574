"""``Auditor``: verdicts from the daemon, remembered by source and rules; a daemon that dies is started again.

Any thread, one audit at a time; whoever asks waits, so the actor thread never asks. The daemon starts with the first
question, sees nothing of our environment, and ends with ``close`` or with this process.
"""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from blockx.audit.daemon import AuditReply, AuditRequest
from blockx.audit.verdict import Verdict, audit_token, refusal, refused
from blockx.errors import PeerProtocolError, UsageError
from blockx.functions.entry import USER_FILE_PREFIX
from blockx.ipc.frames import FrameDecoder, encode_frame

WALL_LIMIT_S: Final = 60.0
"""Until an answer; the daemon's own limit of CPU time comes first, unless the machine stands still."""
VERDICTS_MAX: Final = 20_000
"""Remembered verdicts, the longest unused first out."""
STOP_S: Final = 2.0
"""The daemon gets this long to end at the end of its stdin."""
COMMAND: Final = (sys.executable, "-P", "-m", "blockx.audit", "--daemon")
_READ_BYTES: Final = 64 * 1024

_replies = msgspec.json.Decoder(AuditReply)


class Auditor:
    """See the module's law."""

    def __init__(
        self, command: Sequence[str] = COMMAND, wall_limit_s: float = WALL_LIMIT_S
    ) -> None:
        self._command = command
        self._wall_limit_s = wall_limit_s
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._decoder = FrameDecoder()
        self._seq = 0
        self.starts = 0
        """Daemons started so far; more than one: sources have killed the others."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def audit(self, data: bytes) -> Verdict:
        """The verdict on one source, as its file holds it. Raises UsageError: no daemon can be started."""
        token = audit_token(sha256(data).hexdigest())
        with self._lock:
            verdict = self._verdicts.get(token)
            if verdict is None:
                verdict = self._verdicts[token] = self._ask(data)
                if len(self._verdicts) > VERDICTS_MAX:
                    self._verdicts.popitem(last=False)
            else:
                self._verdicts.move_to_end(token)
            return verdict

    def judge(self, function_id: str, source: str) -> tuple[str, str | None]:
        """``functions.view.Judge``: the token of an accepted source, or why it is refused."""
        data = source.encode()
        verdict = self.audit(data)
        if verdict.accepted:
            return audit_token(sha256(data).hexdigest()), None
        return "", refusal(f"{USER_FILE_PREFIX}{function_id}.py", verdict)

    def close(self) -> None:
        """End the daemon; a later question starts another one."""
        with self._lock:
            self._stop(STOP_S)

    def _ask(self, data: bytes) -> Verdict:
        self._seq += 1
        deadline_s = time.monotonic() + self._wall_limit_s
        try:
            return self._exchange(data, deadline_s)
        except TimeoutError:
            self._stop(0.0)
            return refused("source", f"the audit took more than {self._wall_limit_s:g} s; {_SPLIT}")
        except (OSError, PeerProtocolError, msgspec.MsgspecError):
            return refused("source", f"{_story(self._stop(STOP_S))}; {_SPLIT}")

    def _exchange(self, data: bytes, deadline_s: float) -> Verdict:
        channel = self._channel()
        channel.settimeout(_left_s(deadline_s))
        channel.sendall(encode_frame(AuditRequest(seq=self._seq), data))
        while True:
            channel.settimeout(_left_s(deadline_s))
            received = channel.recv(_READ_BYTES)
            if not received:
                raise PeerProtocolError("the audit has ended")
            for frame in self._decoder.feed(received):
                reply = _replies.decode(frame.body)
                if reply.seq != self._seq:
                    raise PeerProtocolError("an answer to another question")
                return reply.verdict

    def _channel(self) -> socket.socket:
        """The socket that is the daemon's stdin and stdout; starts one if there is none."""
        if self._socket is not None:
            return self._socket
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env={"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONNOUSERSITE": "1"},
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise UsageError(f"the audit cannot start: {error}") from None
        finally:
            theirs.close()
        self.starts += 1
        self._decoder = FrameDecoder()
        self._socket = ours
        return ours

    def _stop(self, grace_s: float) -> int:
        """End the daemon, whatever it does; its exit code."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        process, self._process = self._process, None
        if process is None:
            return 0
        try:
            return process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def auditor_of(mode: str) -> AbstractContextManager[Auditor | None]:
    """For ``functions.mode``: an auditor, ended with the block; None in open mode."""
    return Auditor() if mode == "restricted" else nullcontext()


_SPLIT: Final = "it is no honest source, or it must be split"


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _story(exit_code: int) -> str:
    """Why the daemon died of a source."""
    if exit_code == -signal.SIGPROF:
        return "the audit used up its CPU time"
    if exit_code < 0:
        return f"the audit was ended by {signal.Signals(-exit_code).name}"
    return f"the audit ended with code {exit_code}"
