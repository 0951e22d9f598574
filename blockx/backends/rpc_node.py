"""One chain's nodes: questions go in, answers come out; batches, pauses, retries and failover are in here.

io thread only. A ``Question`` is one JSON-RPC request, asked for one or many readers. Rules:

- Questions leave in RPC batches of at most ``batch_max`` members and ``POST_BYTES_MAX`` bytes, within the
  limits of the url that ``rpc_urls`` chose. With no post on its way they leave at the end of the loop turn;
  otherwise fewer than ``LINGER_BELOW`` wait for company: at most ``LINGER_S``, and only while more keeps coming.
- A question that may change something (not in ``READ_METHODS``) leaves alone, on a connection of its own (a
  kept one may just be closing), and is never sent twice; only when the connection could not be made, so that
  nothing was sent, it is tried again.
- ``throttled`` and ``unavailable`` are retried here: the url rests (Retry-After, else a pause that doubles),
  another one is used meanwhile. A question is given up ``io_wait_max_ms`` after its first failure, or at its
  first failure when the whole chain has not answered for that long.
- A batch answered by one error is not an answer: the url's batch limit shrinks (to the number in the text if
  there is one, else by half), the members are asked again. A missing or malformed member, an answer too big,
  and any failure of one of our own questions is asked again alone, once.
- With ``multicall_max``, calls that may ride (``Question.ride``) leave in groups, each one member of a batch.
  What fails, a group or a call inside it, is asked again singly; after a group that failed as a whole for
  itself, groups are half as large.
- "Block unknown" for a block that we know to exist (a node behind a balancer that lags) is asked again
  ``LAG_PAUSES_S`` times.

Invariant: ``done`` of each question is called exactly once, unless it was dropped before it was sent.
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from blockx.backends.http_client import HttpAnswer, HttpTrouble
from blockx.backends.rpc_multicall import CALLDATA_BYTES_MAX, Ride, group_params, group_results
from blockx.backends.rpc_urls import PAUSE_MAX_S, Allowance, ChainUrls, NodeUrl, UrlHealth
from blockx.backends.rpc_wire import (
    NULL,
    TOO_BIG,
    Answer,
    NodeError,
    NoJsonError,
    member,
    parse_body,
    question_body,
    read_error,
    shorten,
    wire_error,
)
from blockx.config import RpcBackendConfig
from blockx.errors import TOO_MUCH, ErrorKind
from blockx.ipc.messages import WireError
from blockx.redact import redact_url

LINGER_S = 0.002
"""Longest a question waits for company while a post is on its way."""
LINGER_STEP_S = 0.001
"""If nothing came for so long, nothing is waited for."""
LINGER_BELOW = 32
"""So many leave at once: a post costs about 150 us here and there, so more company would save each of them less
than 5 us of work, for a millisecond more of waiting."""
POST_BYTES_MAX = 1024 * 1024
"""Bytes of one RPC batch (many nodes refuse 2 MB); a single bigger question leaves alone."""
ANSWER_BYTES_MAX = 96 * 1024 * 1024
"""Bytes of one HTTP answer, unpacked. Full: a batch is asked again in halves, a single read fails."""
RESULT_BYTES_MAX = 15 * 1024 * 1024
"""Bytes of one result: it has to fit into a frame of 16 MiB to the executor. Full: that read fails."""
LAG_PAUSES_S = (0.1, 0.2, 0.4, 0.8)
"""Pauses before a known block is asked for again."""
STATED_LIMIT = re.compile(
    r"(?:limit|max(?:imum)?|at most|up to|more than)\D{0,30}(\d{1,6})", re.IGNORECASE
)

RETRIED = (ErrorKind.THROTTLED, ErrorKind.UNAVAILABLE)
"""Kinds that are retried inside the read."""
_OF_THE_BLOCK: Final = (ErrorKind.BLOCK_UNKNOWN, ErrorKind.STATE_PRUNED)
"""Kinds that say nothing of the size of a group."""

monotonic: Final = time.monotonic
"""The clock of all times here. Not the loop's: uvloop's stands still within a turn and counts milliseconds."""


@dataclass(slots=True)
class Counters:
    """What one task asked of one chain."""

    requests: int = 0
    """JSON-RPC requests sent, repeats and our own questions included."""
    posts: int = 0
    """HTTP requests that carried at least one of them."""
    merged: int = 0
    """Reads that joined an identical one in flight."""
    cache_hits: int = 0
    retries: int = 0
    """Requests that were sent again."""
    multicalled: int = 0
    """Calls that left with others in one request."""


Done = Callable[["Question", bytes | None, WireError | None], None]


class Question(msgspec.Struct, eq=False, kw_only=True):
    """One JSON-RPC request and where it stands. (A struct: 0.4 us to make, a dataclass 2.)"""

    method: str
    body: bytes
    what: str
    """For messages: method and block."""
    counters: Counters
    done: Done
    is_read: bool = True
    own: bool = False
    """Asked by us (a hash, a height): what fails in a batch is asked again alone."""
    block_known: bool = False
    """The block it names was seen on a node."""
    alone: bool = False
    """Must leave as a single request."""
    asked_alone: bool = False
    """The one repeat alone is used up."""
    ride: Ride | None = None
    """How it leaves with others as one call; None: singly."""
    tries: int = 0
    lags: int = 0
    failed_at: float = 0.0
    """When it failed first; 0: it has not yet."""
    avoid: NodeUrl | None = None
    """The url that failed it last."""
    sent_at: float = 0.0
    """When the post that carries it left; 0: not on its way."""
    flown_s: float = 0.0
    """Time spent in earlier posts."""
    created_at: float = 0.0
    queued_at: float = 0.0
    dropped: bool = False
    """Nobody waits for it any more: it is skipped when its turn comes."""
    ended: bool = False
    """``done`` was called."""

    def flown(self, now: float) -> float:
        """Seconds on the way so far."""
        return self.flown_s + (now - self.sent_at if self.sent_at else 0.0)


class _Group(msgspec.Struct, eq=False):
    """Calls that leave as one request."""

    riders: list[Question]
    calldata_bytes: int

    @property
    def body(self) -> bytes:
        """The request, as ``Question.body``."""
        rides = [rider.ride for rider in self.riders if rider.ride is not None]
        return question_body("eth_call", group_params(rides))

    def count(self) -> None:
        """It is sent: one request of each task that has a call in it."""
        tasks = {}
        for rider in self.riders:
            rider.counters.multicalled += 1
            tasks[id(rider.counters)] = rider.counters
        for counters in tasks.values():
            counters.requests += 1


_Member = Question | _Group
"""One JSON-RPC request of a post."""


@dataclass(slots=True)
class _Failure:
    """A whole post that failed."""

    kind: ErrorKind
    text: str
    pause_s: float | None = None
    """What the node asked for (Retry-After)."""
    never_sent: bool = False
    too_big: bool = False
    """The answer, or the request, was too big: fewer members may pass."""


@dataclass(slots=True)
class _Post:
    """One HTTP request on its way. The members have the ids from ``first_id`` on, in their order."""

    url: NodeUrl
    members: list[_Member]
    questions: list[Question]
    """Those of all members."""
    sent_at: float
    first_id: int
    ended_at: float = 0.0


@dataclass(slots=True)
class NodeLink:
    """Sends the questions of one chain to its nodes."""

    chain: str
    config: RpcBackendConfig
    io_wait_max_s: float
    posts: Allowance
    """Of all chains together."""
    on_sent: Callable[[Sequence[Question], float], None]
    """Called when questions leave together (their clocks of charged time start), with the time. The sequence
    is emptied when they are no longer on their way."""
    _urls: ChainUrls = field(init=False)
    _queue: deque[Question] = field(default_factory=deque)
    _timer: asyncio.TimerHandle | None = None
    _timer_at: float = 0.0
    _soon: bool = False
    _looked_at: float = 0.0
    _looked_length: int = 0
    _ids: int = 1
    _group_max: int = field(init=False)
    """Calls of one group."""
    _down_since: float = 0.0
    """Since when no url has given an answer; 0: the last post was answered."""
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._urls = ChainUrls(self.chain, self.config, ANSWER_BYTES_MAX, self.posts)
        self._group_max = self.config.multicall_max

    def health(self) -> Sequence[UrlHealth]:
        """How each url fares."""
        return self._urls.health(monotonic())

    # ---- asking ----------------------------------------------------------------------------------

    def ask(self, question: Question, now: float) -> None:
        """Queue a question; ``question.done`` is called once. Our own questions go first."""
        question.created_at = question.queued_at = now
        if not question.is_read:
            question.alone = True
        if question.own:
            self._queue.appendleft(question)
        else:
            self._queue.append(question)
        if not self._soon:
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush_in(self, delay_s: float, now: float) -> None:
        when = now + delay_s
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer_at = when
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._flush()

    def _flush(self) -> None:
        """Send what can leave now; arm the timer for the rest."""
        self._soon = False
        queue, now = self._queue, monotonic()
        while queue and not self._is_closed:
            head = queue[0]
            if head.dropped:
                queue.popleft()
                continue
            url = self._urls.choose(now, head.avoid)
            if url is None:
                self._wait_for_a_url(now)
                return
            if not url.has_slot:
                return  # the end of a post flushes again
            if self._lingers(url, now):
                self._flush_in(LINGER_STEP_S, now)
                return
            room = url.room(now, len(queue))
            if not room:
                self._flush_in(url.ready_at(now, len(queue)) - now, now)
                return
            self._send(url, self._take(room), now)

    def _lingers(self, url: NodeUrl, now: float) -> bool:
        """Whether the head should wait for company: not for long, and only while more keeps coming."""
        # Our own questions and writes are at the head or alone: company would not help them.
        head, length = self._queue[0], len(self._queue)
        if not url.inflight or head.alone or head.own or length >= min(url.limit, LINGER_BELOW):
            return False
        if now - head.queued_at >= LINGER_S - 0.0001:  # timers may fire a hair early
            return False
        if now - self._looked_at < LINGER_STEP_S - 0.0001:
            return True
        came = length > self._looked_length or now - self._looked_at > LINGER_S
        self._looked_at, self._looked_length = now, length
        return came

    def _wait_for_a_url(self, now: float) -> None:
        wakes = self._urls.wakes_at()
        if wakes == float("inf"):
            return  # a probe is on its way; its end flushes again
        patience = max(self.io_wait_max_s, 1.25 * PAUSE_MAX_S)  # our own pauses always end in a try
        if wakes - now > patience:  # a Retry-After beyond it
            url = min(self._urls.all, key=lambda url: url.paused_until)
            for question in self._take_all():
                self._give_up(question, _Failure(url.last_kind, url.last_error), url)
            return
        self._flush_in(max(0.0, wakes - now), now)

    def _take_all(self) -> list[Question]:
        taken = [question for question in self._queue if not question.dropped]
        self._queue.clear()
        return taken

    def _take(self, room: int) -> list[_Member]:
        """Members of the next post from the head of the queue; the head itself is not dropped."""
        queue, size = self._queue, 0
        taken: list[_Member] = []
        groups: dict[bytes, _Group] = {}
        while queue:
            head = queue[0]
            if head.dropped:
                queue.popleft()
                continue
            ride = head.ride if self._group_max > 1 else None
            group = self._group_for(ride, groups) if ride is not None else None
            size += len(head.body) + 40 if ride is None else 2 * ride.calldata_bytes
            is_full = size > POST_BYTES_MAX or (group is None and len(taken) >= room)
            if taken and (is_full or head.alone):
                break
            queue.popleft()
            if ride is None:
                taken.append(head)
            elif group is None:
                groups[ride.block] = group = _Group([head], ride.calldata_bytes)
                taken.append(group)
            else:
                group.riders.append(head)
                group.calldata_bytes += ride.calldata_bytes
            if head.alone:
                break
        if groups:
            return [_simplest(member) for member in taken]
        return taken

    def _group_for(self, ride: Ride, groups: dict[bytes, _Group]) -> _Group | None:
        """The group of this post with room for one more call."""
        group = groups.get(ride.block)
        if group is None or len(group.riders) >= self._group_max:
            return None
        return group if group.calldata_bytes + ride.calldata_bytes <= CALLDATA_BYTES_MAX else None

    def _send(self, url: NodeUrl, members: list[_Member], now: float) -> None:
        tasks: dict[int, Counters] = {}
        questions: list[Question] = []
        for entry in members:
            if isinstance(entry, _Group):
                questions += entry.riders
                entry.count()
            else:
                questions.append(entry)
                entry.counters.requests += 1
        for question in questions:
            counters = question.counters
            if question.tries:
                counters.retries += 1
            question.tries += 1
            question.sent_at = now
            tasks[id(counters)] = counters
        for counters in tasks.values():
            counters.posts += 1
        self.on_sent(questions, now)
        url.sent(len(members))
        first_id = self._ids
        self._ids += len(members)
        bodies = [member(id_, entry.body) for id_, entry in enumerate(members, first_id)]
        body = bodies[0] if len(bodies) == 1 else b"[%b]" % b",".join(bodies)
        post = _Post(url, members, questions, now, first_id)
        url.client.post(body, partial(self._post_ended, post), may_repeat=questions[0].is_read)

    # ---- one post --------------------------------------------------------------------------------

    def _post_ended(self, post: _Post, outcome: HttpAnswer | HttpTrouble) -> None:
        url = post.url
        url.inflight -= 1
        now = post.ended_at = monotonic()
        for question in post.questions:
            question.flown_s += now - question.sent_at
            question.sent_at = 0.0
        try:
            read = _read_outcome(outcome)
            if isinstance(read, _Failure):
                self._post_failed(post, read)
            else:
                self._down_since = 0.0
                self._post_answered(post, read)
        except Exception as error:
            # Our bug; the readers of this post must not wait for ever because of it.
            for question in post.questions:
                text = self._say(question, f"{type(error).__name__}: {error}", url)
                self._end(question, None, WireError(kind=ErrorKind.IO_ERROR, message=text))
            raise
        finally:
            post.questions.clear()
            self._flush_soon()

    # ---- what came back --------------------------------------------------------------------------

    def _post_answered(self, post: _Post, outcome: Answer | list[Answer]) -> None:
        if len(post.members) == 1:
            self._single_answered(post, outcome)
        elif not isinstance(outcome, list):
            self._batch_refused(post, outcome)
        elif len(outcome) == 1 and outcome[0].failed:  # geth: an error for the first member only
            self._batch_refused(post, outcome[0])
        else:
            self._batch_answered(post, outcome)

    def _single_answered(self, post: _Post, outcome: Answer | list[Answer]) -> None:
        asked = post.members[0]
        if isinstance(outcome, list) and len(outcome) == 1:
            outcome = outcome[0]
        if isinstance(outcome, list):
            self._malformed(post, asked, f"{len(outcome)} answers to one request")
        elif _number(outcome.id) == post.first_id or outcome.failed:  # an error's id may be null
            self._member_answered(post, asked, outcome)
        else:
            self._malformed(post, asked, "JSON that is no answer to the request")

    def _batch_answered(self, post: _Post, answers: list[Answer]) -> None:
        waiting: list[_Member | None] = list(post.members)
        first_id, size = post.first_id, len(waiting)
        served = False
        for answer in answers:
            index = _number(answer.id) - first_id
            asked = waiting[index] if 0 <= index < size else None
            if asked is None:  # one that nobody asked for, or once more
                continue
            waiting[index] = None
            result = bytes(answer.result)
            odd = (
                not result or result == NULL or len(result) > RESULT_BYTES_MAX or len(answer.error)
            )
            if odd or isinstance(asked, _Group):
                self._member_answered(post, asked, answer)
                continue
            if not served:  # the usual case, here and not in ``_member_answered``: it is hot
                served = True
                self._url_answered(post)
            self._end(asked, result, None)
        for asked in waiting:
            if asked is not None:
                self._malformed(post, asked, "the batch's answer left it out")

    def _batch_refused(self, post: _Post, answer: Answer) -> None:
        """The whole batch was answered by one error, or by something else."""
        error = NodeError(0, "one object for a batch", None)
        if answer.failed:
            error = read_error(bytes(answer.error))
        kind = error.kind()
        if kind in RETRIED:
            self._post_failed(post, _Failure(kind, error.text))
            return
        self._url_answered(post)
        self._lower_limit(post, error.text)
        self._requeue(post.questions)

    def _lower_limit(self, post: _Post, text: str) -> None:
        stated = STATED_LIMIT.search(text)
        number = int(stated.group(1)) if stated else 0
        self._urls.lower_limit(post.url, len(post.members), number, post.ended_at)

    def _member_answered(self, post: _Post, asked: _Member, answer: Answer) -> None:
        if isinstance(asked, _Group):
            self._group_answered(post, asked, answer)
            return
        question = asked
        if answer.failed:
            self._member_failed(post, question, read_error(bytes(answer.error)))
            return
        self._url_answered(post)
        result = bytes(answer.result)
        if not result:
            text = "an answer with neither a result nor an error, or one that is no UTF-8"
            self._malformed(post, question, text)
        elif len(result) > RESULT_BYTES_MAX:
            text = f"a result of {len(result)} bytes, more than {RESULT_BYTES_MAX}; {TOO_MUCH}"
            error = WireError(kind=ErrorKind.IO_ERROR, message=self._say(question, text, post.url))
            self._end(question, None, error)
        elif result == NULL and question.own and not question.asked_alone:
            self._ask_alone(question)
        elif result == NULL and question.block_known and self._lag_again(post, question):
            return
        else:
            self._end(question, result, None)

    def _member_failed(self, post: _Post, question: Question, error: NodeError) -> None:
        kind = error.kind()
        if kind in RETRIED:
            failure = _Failure(kind, error.text)
            self._rest(post, failure)
            self._retry_later(post, question, failure)
            return
        self._url_answered(post)
        if (
            kind is ErrorKind.BLOCK_UNKNOWN
            and question.block_known
            and self._lag_again(post, question)
        ):
            return
        failed = wire_error(error, question.what, f"chain {self.chain}, node {post.url.shown}")
        too_big = kind is ErrorKind.IO_ERROR and TOO_BIG.search(error.text)
        if question.own or (too_big and len(post.members) > 1):
            self._repeat_alone_or(question, failed)
        else:
            self._end(question, None, failed)

    def _group_answered(self, post: _Post, group: _Group, answer: Answer) -> None:
        if answer.failed:
            error = read_error(bytes(answer.error))
            kind = error.kind()
            if kind in RETRIED:
                failure = _Failure(kind, error.text)
                self._rest(post, failure)
                for rider in group.riders:
                    self._retry_later(post, rider, failure)
                return
            self._url_answered(post)
            self._dissolve(group, shrink=kind not in _OF_THE_BLOCK)
            return
        self._url_answered(post)
        results = group_results(bytes(answer.result), len(group.riders))
        if results is None:
            self._dissolve(group, shrink=True)
            return
        failed = []
        for rider, result in zip(group.riders, results, strict=True):
            if result is None or len(result) > RESULT_BYTES_MAX:
                rider.ride = None
                failed.append(rider)
            else:
                self._end(rider, result, None)
        if failed:
            self._requeue(failed)

    def _dissolve(self, group: _Group, *, shrink: bool) -> None:
        """Ask the calls of a group again singly; ``shrink``: it may have been too much for one request."""
        if shrink:
            self._group_max = min(self._group_max, max(1, len(group.riders) // 2))
        for rider in group.riders:
            rider.ride = None
        self._requeue(group.riders)

    def _malformed(self, post: _Post, asked: _Member, text: str) -> None:
        if isinstance(asked, _Group):
            self._dissolve(asked, shrink=True)
            return
        question = asked
        error = WireError(kind=ErrorKind.MALFORMED, message=self._say(question, text, post.url))
        self._repeat_alone_or(question, error)

    def _repeat_alone_or(self, question: Question, error: WireError) -> None:
        """Ask once more as a single request, or end with the error."""
        if question.is_read and not question.asked_alone:
            self._ask_alone(question)
        else:
            self._end(question, None, error)

    def _ask_alone(self, question: Question) -> None:
        question.alone = question.asked_alone = True
        self._requeue([question])

    def _lag_again(self, post: _Post, question: Question) -> bool:
        """Ask again a little later, rather another url; False: often enough."""
        if question.lags >= len(LAG_PAUSES_S):
            return False
        pause = LAG_PAUSES_S[question.lags]
        question.lags += 1
        question.avoid = post.url
        asyncio.get_running_loop().call_later(pause, self._requeue, [question])
        return True

    # ---- failures of a post ----------------------------------------------------------------------

    def _post_failed(self, post: _Post, failure: _Failure) -> None:
        if failure.too_big and len(post.members) > 1:
            self._lower_limit(post, "")
            self._requeue(post.questions)
            return
        if failure.kind is ErrorKind.UNAVAILABLE and not self._down_since:
            self._down_since = post.ended_at
        if failure.kind in RETRIED or len(self._urls.all) > 1:
            self._rest(post, failure)
        for asked in post.members:
            if not isinstance(asked, _Group):
                self._retry_later(post, asked, failure)
            elif failure.kind in RETRIED:
                for rider in asked.riders:
                    self._retry_later(post, rider, failure)
            else:
                self._dissolve(asked, shrink=failure.too_big)

    def _rest(self, post: _Post, failure: _Failure) -> None:
        self._urls.failed(
            post.url,
            failure.kind,
            failure.text,
            sent_at=post.sent_at,
            now=post.ended_at,
            asked_pause_s=failure.pause_s,
        )

    def _url_answered(self, post: _Post) -> None:
        self._urls.answered(post.url, post.ended_at, post.ended_at - post.sent_at)

    def _retry_later(self, post: _Post, question: Question, failure: _Failure) -> None:
        """Queue it again if its kind, its patience and its nature permit; else it ends."""
        now = post.ended_at
        question.failed_at = question.failed_at or now
        question.avoid = post.url
        if failure.kind is not ErrorKind.THROTTLED:
            question.ride = None  # perhaps it was the group that took too long
        since = min(question.failed_at, self._down_since or question.failed_at)
        wakes = max(now, min(url.paused_until for url in self._urls.all))
        # An url that refuses it otherwise (a wrong token): each of the others gets one chance.
        untried = question.tries < len(self._urls.all)
        patient = wakes <= since + self.io_wait_max_s if failure.kind in RETRIED else untried
        if patient and (question.is_read or failure.never_sent):
            self._requeue([question])
        else:
            self._give_up(question, failure, post.url)

    def _give_up(self, question: Question, failure: _Failure, url: NodeUrl) -> None:
        waited_s = monotonic() - question.created_at
        text = f"{failure.text}; given up after {waited_s:.1f} s and {question.tries} tries"
        if not question.is_read and question.tries and not failure.never_sent:
            text = f"{failure.text}; not sent again, since it may have been executed"
        elif len(self._urls.all) > 1:
            text += f" on {len(self._urls.all)} urls"
        error = WireError(kind=failure.kind, message=self._say(question, text, url))
        self._end(question, None, error)

    def _requeue(self, questions: list[Question]) -> None:
        self._queue.extendleft(reversed(questions))
        self._flush_soon()

    def _end(self, question: Question, result: bytes | None, error: WireError | None) -> None:
        if not question.ended:
            question.ended = True
            if error is not None:
                error.message = self._urls.secrets.cut(error.message)
            question.done(question, result, error)

    def _say(self, question: Question, text: str, url: NodeUrl) -> str:
        return f"{question.what}: node {url.shown} (chain {self.chain}): {text}"

    # ---- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up what is on its way and close the connections."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._urls.close()


def _simplest(asked: _Member) -> _Member:
    """A group of one call is that call."""
    if isinstance(asked, _Group) and len(asked.riders) == 1:
        return asked.riders[0]
    return asked


def _read_outcome(outcome: HttpAnswer | HttpTrouble) -> Answer | list[Answer] | _Failure:
    """Every way in which a post can fail becomes a ``_Failure``."""
    if isinstance(outcome, HttpAnswer):
        return _read_answer(outcome.status, outcome.headers, outcome.body)
    kind = ErrorKind.IO_ERROR if outcome.too_big else ErrorKind.UNAVAILABLE
    text = f"{outcome.text}; {TOO_MUCH}" if outcome.too_big else outcome.text
    return _Failure(kind, text, never_sent=outcome.never_sent, too_big=outcome.too_big)


def _read_answer(status: int, headers: Any, body: bytes) -> Answer | list[Answer] | _Failure:
    if status in (429, 408, 502, 503, 504):
        kind = ErrorKind.THROTTLED if status == 429 else ErrorKind.UNAVAILABLE
        return _Failure(kind, f"HTTP {status}{_page(body)}", _retry_after(headers))
    if status == 413:
        return _Failure(ErrorKind.IO_ERROR, "HTTP 413: the request is too big", too_big=True)
    if 300 <= status < 400:
        to = redact_url(headers.get("location", ""))
        return _Failure(ErrorKind.IO_ERROR, f"HTTP {status}: it redirects to {to}; use that url")
    try:
        answer = parse_body(body)
    except NoJsonError as error:
        if 400 <= status < 500:
            return _Failure(ErrorKind.IO_ERROR, f"HTTP {status}{_page(body)}")
        return _Failure(ErrorKind.UNAVAILABLE, f"HTTP {status} with {error}", _retry_after(headers))
    return answer


def _page(body: bytes) -> str:
    text = shorten(re.sub(rb"<[^>]*>", b" ", body[:2_000]).decode("utf-8", "replace"), 120)
    return f": {text}" if text else ""


def _retry_after(headers: Any) -> float | None:
    """Seconds of a Retry-After header; None if there is none, or it is a date (then our own pause holds)."""
    text = headers.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        return None


def _number(id_: Any) -> int:
    """An answer's id as the number that was sent: some nodes send it back as text. -1: none of ours."""
    if type(id_) is int:
        return id_
    return int(id_) if type(id_) is str and id_.isdecimal() and len(id_) < 20 else -1
