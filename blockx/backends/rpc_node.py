"""One chain's nodes: questions go in, answers come out; batches, pauses, retries and failover are in here.

io thread only. A ``Question`` is one JSON-RPC request, asked for one or many readers. Rules:

- Questions leave in RPC batches of at most ``batch_max`` members and ``POST_BYTES_MAX`` bytes, at most
  ``posts_max`` posts on their way to one url. With no post on its way they leave at the end of the loop turn;
  otherwise they wait at most ``LINGER_S`` for company.
- A question that may change something (not in ``READ_METHODS``) leaves alone, on a connection of its own (a
  kept one may just be closing), and is never sent twice; only when the connection could not be made, so that
  nothing was sent, it is tried again.
- ``throttled`` and ``unavailable`` are retried here: the url rests (Retry-After, else a pause that doubles),
  another url is used meanwhile. A question is given up ``io_wait_max_ms`` after its first failure, or at its
  first failure when the whole chain has not answered for that long.
- A batch answered by one error is not an answer: the url's batch limit shrinks (to the number in the text if
  there is one, else by half), the members are asked again. A missing or malformed member, an answer too big,
  and any failure of one of our own questions is asked again alone, once.
- "Block unknown" for a block that we know to exist (a node behind a balancer that lags) is asked again
  ``LAG_PAUSES_S`` times.

Invariant: ``done`` of each question is called exactly once, unless it was dropped before it was sent.
"""

import asyncio
import os
import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from blockx.backends.rpc_wire import (
    NULL,
    TOO_BIG,
    Answer,
    NodeError,
    NoJsonError,
    member,
    parse_body,
    read_error,
    shorten,
    shown_url,
    wire_error,
)
from blockx.config import RpcBackendConfig
from blockx.errors import ErrorKind
from blockx.ipc.messages import WireError
from blockx.observability import logger

LINGER_S = 0.002
"""Longest a question waits for company while a post is on its way."""
POST_BYTES_MAX = 1024 * 1024
"""Bytes of one RPC batch (many nodes refuse 2 MB); a single bigger question leaves alone."""
ANSWER_BYTES_MAX = 96 * 1024 * 1024
"""Bytes of one HTTP answer, unpacked. Full: a batch is asked again in halves, a single read fails."""
RESULT_BYTES_MAX = 15 * 1024 * 1024
"""Bytes of one result: it has to fit into a frame of 16 MiB to the executor. Full: that read fails."""
PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 5.0
"""Rest of a failing url: doubles from the first to the longest, with up to 25 % jitter; an answer resets it."""
FAILURES_TOLD = 3
"""Failures of an url in a row after which a line is logged, once until it answers again."""
LAG_PAUSES_S = (0.1, 0.2, 0.4, 0.8)
"""Pauses before a known block is asked for again."""
LIMIT_GROWS_S = 60.0
"""A batch limit that was guessed (not told by the node) doubles again after this long."""
STATED_LIMIT = re.compile(
    r"(?:limit|max(?:imum)?|at most|up to|more than)\D{0,30}(\d{1,6})", re.IGNORECASE
)

RETRIED = (ErrorKind.THROTTLED, ErrorKind.UNAVAILABLE)
"""Kinds that are retried inside the read."""


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


Done = Callable[["Question", bytes | None, WireError | None], None]


@dataclass(slots=True, eq=False)
class Question:
    """One JSON-RPC request and where it stands."""

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
    tries: int = 0
    lags: int = 0
    failed_at: float = 0.0
    """Loop time of the first failure; 0: none yet."""
    avoid: "_Url | None" = None
    """The url that failed it last."""
    sent_at: float = 0.0
    """Loop time at which the post that carries it left; 0: not on its way."""
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


@dataclass(slots=True, eq=False)
class _Url:
    url: str
    shown: str
    limit: int
    """Members of a batch; at most ``batch_max``."""
    limit_stated: bool = False
    limit_since: float = 0.0
    inflight: int = 0
    paused_until: float = 0.0
    failures: int = 0
    failed_at: float = 0.0
    last_error: str = ""
    last_kind: ErrorKind = ErrorKind.UNAVAILABLE


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
    """One HTTP request on its way."""

    url: _Url
    questions: list[Question]
    sent_at: float
    ended_at: float = 0.0
    by_id: dict[bytes, Question] = field(default_factory=dict)


@dataclass(slots=True)
class NodeLink:
    """Sends the questions of one chain to its nodes."""

    chain: str
    config: RpcBackendConfig
    io_wait_max_s: float
    on_sent: Callable[[Question], None]
    """Called when a question leaves (its clock of charged time starts)."""
    _urls: list[_Url] = field(default_factory=list)
    _queue: deque[Question] = field(default_factory=deque)
    _timer: asyncio.TimerHandle | None = None
    _timer_at: float = 0.0
    _soon: bool = False
    _ids: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _session: Any = None
    _fresh: Any = None
    _down_since: float = 0.0
    """Since when no url has given an answer; 0: the last post was answered."""
    _closing: bool = False
    _random: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._urls = [_Url(url, shown_url(url), self.config.batch_max) for url in self.config.urls]

    # ---- asking ----------------------------------------------------------------------------------

    def ask(self, question: Question) -> None:
        """Queue a question; ``question.done`` is called once. Our own questions go first."""
        now = asyncio.get_running_loop().time()
        question.created_at = question.queued_at = now
        question.alone = question.alone or not question.is_read
        if question.own:
            self._queue.appendleft(question)
        else:
            self._queue.append(question)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush_at(self, when: float) -> None:
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer_at = when
        self._timer = asyncio.get_running_loop().call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._flush()

    def _flush(self) -> None:
        """Send what can leave now; arm the timer for the rest."""
        self._soon = False
        queue, now = self._queue, asyncio.get_running_loop().time()
        while queue and not self._closing:
            head = queue[0]
            if head.dropped:
                queue.popleft()
                continue
            url = self._choose(now, head.avoid)
            if url is None:
                self._wait_for_a_url(now)
                return
            if url.inflight >= self.config.posts_max:
                return  # the end of a post flushes again
            if self._lingers(url, now):
                self._flush_at(head.queued_at + LINGER_S)
                return
            self._send(url, self._take(url), now)

    def _lingers(self, url: _Url, now: float) -> bool:
        # Our own questions and writes are at the head or alone: company would not help them.
        head = self._queue[0]
        if not url.inflight or head.alone or head.own or len(self._queue) >= url.limit:
            return False
        return now - head.queued_at < LINGER_S - 0.0001  # timers may fire a hair early

    def _choose(self, now: float, avoid: _Url | None) -> _Url | None:
        """The first url that does not rest, rather another than ``avoid``; None: all rest."""
        awake = [url for url in self._urls if url.paused_until <= now]
        if not awake:
            return None
        return next((url for url in awake if url is not avoid), awake[0])

    def _wait_for_a_url(self, now: float) -> None:
        wakes = min(url.paused_until for url in self._urls)
        patience = max(self.io_wait_max_s, 1.25 * PAUSE_MAX_S)  # our own pauses always end in a try
        if wakes - now > patience:  # a Retry-After beyond it
            url = min(self._urls, key=lambda url: url.paused_until)
            for question in self._take_all():
                self._give_up(question, _Failure(url.last_kind, url.last_error), url)
            return
        self._flush_at(wakes)

    def _take_all(self) -> list[Question]:
        taken = [question for question in self._queue if not question.dropped]
        self._queue.clear()
        return taken

    def _take(self, url: _Url) -> list[Question]:
        """Members of the next post from the head of the queue; the head itself is not dropped."""
        queue = self._queue
        taken = [queue.popleft()]
        if taken[0].alone:
            return taken
        size = len(taken[0].body)
        while queue and len(taken) < url.limit:
            head = queue[0]
            size += len(head.body) + 40
            if head.alone or size > POST_BYTES_MAX:
                break
            queue.popleft()
            if not head.dropped:
                taken.append(head)
        return taken

    def _send(self, url: _Url, questions: list[Question], now: float) -> None:
        tasks: dict[int, Counters] = {}
        for question in questions:
            counters = question.counters
            counters.requests += 1
            counters.retries += question.tries > 0
            question.tries += 1
            question.sent_at = now
            tasks[id(counters)] = counters
            self.on_sent(question)
        for counters in tasks.values():
            counters.posts += 1
        url.inflight += 1
        post = asyncio.get_running_loop().create_task(self._run_post(_Post(url, questions, now)))
        self._tasks.add(post)
        post.add_done_callback(self._tasks.discard)

    # ---- one post --------------------------------------------------------------------------------

    async def _run_post(self, post: _Post) -> None:
        loop, url = asyncio.get_running_loop(), post.url
        try:
            outcome = await self._exchange(url, self._body(post), is_read=post.questions[0].is_read)
        finally:
            url.inflight -= 1
            now = post.ended_at = loop.time()
            for question in post.questions:
                question.flown_s += now - question.sent_at
                question.sent_at = 0.0
        try:
            if isinstance(outcome, _Failure):
                self._post_failed(post, outcome)
            else:
                self._down_since = 0.0
                self._post_answered(post, outcome)
        except Exception as error:
            # Our bug; the readers of this post must not wait for ever because of it.
            for question in post.questions:
                text = self._say(question, f"{type(error).__name__}: {error}", url)
                self._end(question, None, WireError(kind=ErrorKind.IO_ERROR, message=text))
            raise
        finally:
            self._flush_soon()

    def _body(self, post: _Post) -> bytes:
        members = []
        for question in post.questions:
            self._ids += 1
            post.by_id[b"%d" % self._ids] = question
            members.append(member(self._ids, question.body))
        return members[0] if len(members) == 1 else b"[" + b",".join(members) + b"]"

    async def _exchange(
        self, url: _Url, body: bytes, *, is_read: bool
    ) -> Answer | list[Answer] | _Failure:
        """One HTTP request; every way in which it can fail becomes a ``_Failure``."""
        import aiohttp  # late: 0.2 s, and many runs read no node

        if self._session is None:
            self._open()
        session = self._session if is_read else self._fresh
        try:
            async with session.post(url.url, data=body, allow_redirects=False) as response:
                received = await _read_bounded(response)
        except TimeoutError:
            text = f"no answer within {self.config.timeout_ms} ms"
            return _Failure(ErrorKind.UNAVAILABLE, text)
        except aiohttp.ClientConnectorError as error:
            text = f"cannot connect: {_reason(error.os_error)}"
            return _Failure(ErrorKind.UNAVAILABLE, text, never_sent=True)
        except aiohttp.ClientPayloadError:
            return _Failure(ErrorKind.UNAVAILABLE, "the answer was cut short or badly compressed")
        except (aiohttp.ClientError, OSError) as error:
            text = shorten(str(error) or type(error).__name__, 200)
            return _Failure(ErrorKind.UNAVAILABLE, f"the connection broke: {text}")
        if received is None:
            text = f"an answer of more than {ANSWER_BYTES_MAX} bytes"
            return _Failure(ErrorKind.IO_ERROR, text, too_big=True)
        return _read_answer(response.status, response.headers, received)

    # ---- what came back --------------------------------------------------------------------------

    def _post_answered(self, post: _Post, outcome: Answer | list[Answer]) -> None:
        if len(post.questions) == 1:
            self._single_answered(post, outcome)
        elif not isinstance(outcome, list):
            self._batch_refused(post, outcome)
        elif len(outcome) == 1 and outcome[0].failed:  # geth: an error for the first member only
            self._batch_refused(post, outcome[0])
        else:
            self._batch_answered(post, outcome)

    def _single_answered(self, post: _Post, outcome: Answer | list[Answer]) -> None:
        question = post.questions[0]
        if isinstance(outcome, list) and len(outcome) == 1:
            outcome = outcome[0]
        if isinstance(outcome, list):
            self._malformed(post, question, f"{len(outcome)} answers to one request")
        elif _id_of(outcome) in post.by_id or outcome.failed:  # an error's id may be null
            self._member_answered(post, question, outcome)
        else:
            self._malformed(post, question, "JSON that is no answer to the request")

    def _batch_answered(self, post: _Post, answers: list[Answer]) -> None:
        for answer in answers:
            question = post.by_id.pop(_id_of(answer), None)
            if question is not None:
                self._member_answered(post, question, answer)
        for question in post.by_id.values():
            self._malformed(post, question, "the batch's answer left it out")

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
        url, size = post.url, len(post.questions)
        stated = STATED_LIMIT.search(text)
        number = int(stated.group(1)) if stated else 0
        url.limit_stated = 0 < number < size
        url.limit = min(url.limit, number if url.limit_stated else max(1, size // 2))
        url.limit_since = post.ended_at

    def _member_answered(self, post: _Post, question: Question, answer: Answer) -> None:
        if answer.failed:
            self._member_failed(post, question, read_error(bytes(answer.error)))
            return
        self._url_answered(post)
        result = bytes(answer.result)
        if not result:
            text = "an answer with neither a result nor an error, or one that is no UTF-8"
            self._malformed(post, question, text)
        elif len(result) > RESULT_BYTES_MAX:
            text = f"a result of {len(result)} bytes, more than {RESULT_BYTES_MAX}; ask for less"
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
        if question.own or (too_big and len(post.questions) > 1):
            self._repeat_alone_or(question, failed)
        else:
            self._end(question, None, failed)

    def _malformed(self, post: _Post, question: Question, text: str) -> None:
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
        if failure.too_big and len(post.questions) > 1:
            self._lower_limit(post, "")
            self._requeue(post.questions)
            return
        if failure.kind is ErrorKind.UNAVAILABLE and not self._down_since:
            self._down_since = post.ended_at
        if failure.kind in RETRIED or len(self._urls) > 1:
            self._rest(post, failure)
        for question in post.questions:
            self._retry_later(post, question, failure)

    def _rest(self, post: _Post, failure: _Failure) -> None:
        """Let a failing url rest; posts that left before its last failure do not count again."""
        url, now = post.url, post.ended_at
        url.last_error, url.last_kind = failure.text, failure.kind
        if post.sent_at >= url.failed_at:
            url.failures += 1
            url.failed_at = now
            if url.failures == FAILURES_TOLD:
                logger.warning(
                    "node does not serve, its reads wait",
                    chain=self.chain,
                    node=url.shown,
                    error=failure.text,
                )
        pause = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** min(url.failures - 1, 10))
        pause *= 1 + self._random.random() / 4
        if failure.pause_s is not None:
            pause = max(pause, failure.pause_s)
        url.paused_until = max(url.paused_until, now + pause)

    def _url_answered(self, post: _Post) -> None:
        url, now = post.url, post.ended_at
        url.failures = 0
        guessed = url.limit < self.config.batch_max and not url.limit_stated
        if guessed and now - url.limit_since > LIMIT_GROWS_S:
            url.limit, url.limit_since = min(url.limit * 2, self.config.batch_max), now

    def _retry_later(self, post: _Post, question: Question, failure: _Failure) -> None:
        """Queue it again if its kind, its patience and its nature permit; else it ends."""
        now = post.ended_at
        question.failed_at = question.failed_at or now
        question.avoid = post.url
        since = min(question.failed_at, self._down_since or question.failed_at)
        wakes = max(now, min(url.paused_until for url in self._urls))
        # An url that refuses it otherwise (a wrong token): each of the others gets one chance.
        untried = question.tries < len(self._urls)
        patient = wakes <= since + self.io_wait_max_s if failure.kind in RETRIED else untried
        if patient and (question.is_read or failure.never_sent):
            self._requeue([question])
        else:
            self._give_up(question, failure, post.url)

    def _give_up(self, question: Question, failure: _Failure, url: _Url) -> None:
        waited_s = asyncio.get_running_loop().time() - question.created_at
        text = f"{failure.text}; given up after {waited_s:.1f} s and {question.tries} tries"
        if not question.is_read and question.tries and not failure.never_sent:
            text = f"{failure.text}; not sent again, since it may have been executed"
        elif len(self._urls) > 1:
            text += f" on {len(self._urls)} urls"
        error = WireError(kind=failure.kind, message=self._say(question, text, url))
        self._end(question, None, error)

    def _requeue(self, questions: list[Question]) -> None:
        self._queue.extendleft(reversed(questions))
        self._flush_soon()

    def _end(self, question: Question, result: bytes | None, error: WireError | None) -> None:
        if not question.ended:
            question.ended = True
            question.done(question, result, error)

    def _say(self, question: Question, text: str, url: _Url) -> str:
        return f"{question.what}: node {url.shown} (chain {self.chain}): {text}"

    # ---- life ------------------------------------------------------------------------------------

    def _open(self) -> None:
        import aiohttp  # late, as above

        def session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
            return aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=self.config.timeout_ms / 1_000),
                headers={"content-type": "application/json", "accept": "application/json"},
                cookie_jar=aiohttp.DummyCookieJar(),
            )

        self._session = session(aiohttp.TCPConnector(limit=0, keepalive_timeout=30))
        self._fresh = session(aiohttp.TCPConnector(limit=0, force_close=True))

    async def close(self) -> None:
        """Give up what is on its way and close the connections."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for post in list(self._tasks):
            post.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for session in (self._session, self._fresh):
            if session is not None:
                await session.close()


async def _read_bounded(response: Any) -> bytes | None:
    """The unpacked body; None: more than ``ANSWER_BYTES_MAX``."""
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > ANSWER_BYTES_MAX:
            return None
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _read_answer(status: int, headers: Any, body: bytes) -> Answer | list[Answer] | _Failure:
    if status in (429, 408, 502, 503, 504):
        kind = ErrorKind.THROTTLED if status == 429 else ErrorKind.UNAVAILABLE
        return _Failure(kind, f"HTTP {status}{_page(body)}", _retry_after(headers))
    if status == 413:
        return _Failure(ErrorKind.IO_ERROR, "HTTP 413: the request is too big", too_big=True)
    if 300 <= status < 400:
        to = shown_url(headers.get("location", ""))
        return _Failure(ErrorKind.IO_ERROR, f"HTTP {status}: it redirects to {to}; use that url")
    try:
        answer = parse_body(body)
    except NoJsonError as error:
        if 400 <= status < 500:
            return _Failure(ErrorKind.IO_ERROR, f"HTTP {status}{_page(body)}")
        return _Failure(ErrorKind.UNAVAILABLE, f"HTTP {status} with {error}", _retry_after(headers))
    return answer


def _reason(error: OSError) -> str:
    """The system's words; asyncio's own text for a refused connection only repeats the address."""
    known = error.errno is not None and error.errno > 0
    return os.strerror(error.errno or 0) if known else (error.strerror or str(error))


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


def _id_of(answer: Answer) -> bytes:
    """The id as digits: some nodes send it back as text."""
    return bytes(answer.id).strip(b'"')
