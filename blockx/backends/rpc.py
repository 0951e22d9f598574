"""The backend ``rpc``: reads of node RPC for parked calls; pinned, merged, cached, within each call's budget.

io thread only. A request's operation is a JSON-RPC method; its parameters are ``{"chain", "block", "params"}``:
``block`` null is a plain request with the parameters as given; otherwise it is a state read, and the block
(pinned by ``rpc_pins``) is put among the parameters. Sending is ``rpc_node``'s, the wire is ``rpc_wire``'s.

- *Merging*: identical reads on their way are one question. None is joined across a request that may have
  changed something, neither before nor after it, so a call sees what it sent itself.
- *Cache*: answers of reads at a pinned block, a task each, least recently used first out; never null. Those
  at final blocks are also kept on disk between runs, if that is configured (``read_cache``).
- *Time*: a reader is charged (``io_us``) while the post that carries its question is on its way, from when it
  joined; everything else is ``queue_us``. A reader whose budget is used up by that ends with
  ``deadline_exceeded``; the question goes on for the others.

Nothing is asked of a node before the first read.
"""

import asyncio
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec

from blockx.backends.answer_cache import AnswerCache
from blockx.backends.read_cache import ReadCache
from blockx.backends.replies import ReadFailedError, named
from blockx.backends.rpc_disk import TaskDisk
from blockx.backends.rpc_multicall import Presence, ride_of
from blockx.backends.rpc_node import Counters, NodeLink, Question, monotonic
from blockx.backends.rpc_pins import AskOwn, BlockRef, OnPins, OwnAnswer, TaskPins
from blockx.backends.rpc_urls import POSTS_BURST_S, Allowance, UrlHealth
from blockx.backends.rpc_wire import (
    NULL,
    READ_METHODS,
    Params,
    Pin,
    decode_params,
    place_block,
    question_body,
)
from blockx.backends.scope import IoReply, IoRequest, Reply
from blockx.config import RpcBackendConfig
from blockx.errors import ErrorKind, UsageError
from blockx.ipc.messages import WireError
from blockx.redact import redact_text

TASKS_COUNTED_MAX = 1_024
"""Tasks whose counters are kept. Full: those of the oldest task go."""
_NO_PIN = Pin.NONE


class _Reader(msgspec.Struct, eq=False):
    """One parked call's request."""

    request: IoRequest
    reply: Reply
    task: "_ChainTask"
    arrived_at: float
    question: "_SharedQuestion | None" = None
    """None until its block is known, and for a cache hit."""
    flown_before: float = 0.0
    """What the question had flown when this reader joined: others' time."""
    ended: bool = False

    def charged(self, now: float) -> float:
        """Seconds of IO time so far."""
        return self.question.flown(now) - self.flown_before if self.question is not None else 0.0


class _SharedQuestion(Question, eq=False, kw_only=True):
    """A question and who waits for its answer."""

    chain: "_Chain"
    readers: list[_Reader] = msgspec.field(default_factory=list)
    cache: AnswerCache | None = None
    """Where the answer is kept; None: nowhere."""
    disk: TaskDisk | None = None
    """Where it is looked for before the node is asked, and kept under ``disk_key``."""
    disk_key: bytes = b""
    key: bytes
    """For merging and the task's cache: what it asks."""
    verified: tuple[TaskPins, BlockRef] | None = None
    """The node was told a height alone: the answer counts if that is still this block."""


ChainPins = Callable[[str, dict[str, Any]], None]
"""Takes a chain and new pins of it."""


class _ChainTask:
    """What one task has on one chain."""

    __slots__ = ("ask", "cache", "counters", "disk", "pins")

    def __init__(
        self,
        chain: "_Chain",
        counters: Counters,
        on_pins: OnPins | None,
        disk: ReadCache | None,
    ) -> None:
        self.counters = counters
        cache_bytes = chain.config.read_cache_bytes
        self.cache = AnswerCache(cache_bytes) if cache_bytes else None
        self.ask = self._ask_own(chain)
        self.pins = TaskPins(chain.name, self.ask, on_pins)
        self.disk = TaskDisk(disk, self.ask, self.pins) if disk is not None else None

    def _ask_own(self, chain: "_Chain") -> AskOwn:
        def ask(method: str, params: bytes, what: str, answer: OwnAnswer) -> None:
            chain.link.ask(
                Question(
                    method=method,
                    body=question_body(method, params),
                    what=what,
                    counters=self.counters,
                    done=lambda _question, result, error: answer(result, error),
                    own=True,
                ),
                monotonic(),
            )

        return ask


class _Chain:
    """One chain: its link and its reads on their way."""

    __slots__ = ("config", "inflight", "link", "multicall", "name", "tasks")

    def __init__(self, name: str, config: RpcBackendConfig, link: NodeLink) -> None:
        self.name = name
        self.config = config
        self.link = link
        self.tasks: dict[str, _ChainTask] = {}
        self.inflight: dict[bytes, _SharedQuestion] = {}
        """Questions that further readers may join, by their key."""
        self.multicall = Presence() if config.multicall_max > 1 else None


class RpcBackend:
    """The backend over the chains of ``backends.rpc``."""

    def __init__(
        self,
        chains: Mapping[str, RpcBackendConfig],
        io_wait_max_ms: int,
        disk: ReadCache | None = None,
        posts_per_s: int = 0,
    ) -> None:
        """Raises UsageError for an url that is none. Opens nothing. ``disk``: the cache between runs."""
        posts = Allowance(posts_per_s, POSTS_BURST_S)
        self._disk = disk
        self._chains: dict[str, _Chain] = {}
        for name, config in chains.items():
            for url in config.urls:
                check_url(name, url)
            link = NodeLink(name, config, io_wait_max_ms / 1_000, posts, self._watch)
            self._chains[name] = _Chain(name, config, link)
        self._counters: dict[str, dict[str, Counters]] = {}
        self._kept_pins: dict[str, tuple[Mapping[str, Any], ChainPins]] = {}
        self._by_call: dict[str, _Reader] = {}
        self._deadlines: list[tuple[float, int, Sequence[Question]]] = []
        """When the first reader of these questions has used its budget up, if they stay on their way."""
        self._deadline_seq = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._only = next(iter(self._chains.values())) if len(chains) == 1 else None

    # ---- the contract of a backend ---------------------------------------------------------------

    async def start(self) -> None:
        """Open the disk cache; connections are made by the first read."""
        if self._disk is not None:
            self._disk.start()

    def submit(self, request: IoRequest, reply: Reply) -> None:
        """Take a request; answered at once only from the cache or with an error."""
        now = monotonic()
        try:
            params = decode_params(request.params)
            name = params.chain
            chain = self._only if name is None else self._chains.get(name)
            if chain is None:
                raise self._no_chain(name)
        except (msgspec.MsgspecError, RecursionError) as error:
            text = (
                f"{request.operation}: the parameters of a node request are not understood: {error}"
            )
            reply(IoReply(request, error=WireError(kind=ErrorKind.MALFORMED, message=text)))
            return
        except ReadFailedError as failure:
            reply(IoReply(request, error=failure.error))
            return
        task = chain.tasks.get(request.task_id) or self._task(chain, request.task_id)
        reader = _Reader(request, reply, task, now)
        self._by_call[request.call_id] = reader
        if params.block is None:
            self._ask_plain(chain, reader, params)
        else:
            reader.task.pins.resolve(
                params.block, lambda block: self._ask_at(chain, reader, params, block)
            )

    def cancel(self, call_id: str) -> None:
        """End the call's reader; a question that nobody waits for and that has not left is dropped."""
        reader = self._by_call.get(call_id)
        if reader is None:
            return
        self._leave(reader)
        text = f"{reader.request.operation}: the call's attempt has ended"
        self._end(reader, None, WireError(kind=ErrorKind.CANCELLED, message=text))

    def task_ended(self, task_id: str) -> None:
        """Release pins and cache; the counters stay for the report."""
        for chain in self._chains.values():
            chain.tasks.pop(task_id, None)
        self._kept_pins.pop(task_id, None)

    def keep_pins(self, task_id: str, pins: Mapping[str, Any], on_pins: ChainPins) -> None:
        """Before the task's first read: begin with these pins, by chain, and tell of further ones as
        (chain, pins), each before the read that asked for it goes on."""
        self._kept_pins[task_id] = (pins, on_pins)

    def statistics(self, task_id: str) -> dict[str, dict[str, int]]:
        """The counters of each chain; zeros for one that the task did not ask."""
        counted = self._counters.get(task_id, {})
        return {name: asdict(counted.get(name) or Counters()) for name in self._chains}

    def health(self) -> dict[str, Sequence[UrlHealth]]:
        """How the urls of each chain fare. io thread."""
        return {name: chain.link.health() for name, chain in self._chains.items()}

    async def close(self) -> None:
        """Close the connections; what is on its way is given up."""
        if self._timer is not None:
            self._timer.cancel()
        for chain in self._chains.values():
            chain.link.close()
        if self._disk is not None:
            self._disk.close()

    # ---- from a request to a question ------------------------------------------------------------

    def _no_chain(self, name: str | None) -> ReadFailedError:
        there = named(sorted(self._chains), "none")
        if name is None:
            text = f"name the chain of this request: chain=…; there are: {there}"
        else:
            text = (
                f"there is no chain {name!r} under backends.rpc in config.yaml; there are: {there}"
            )
        return ReadFailedError(ErrorKind.IO_ERROR, text)

    def _task(self, chain: _Chain, task_id: str) -> _ChainTask:
        """A task's first read of a chain."""
        by_chain = self._counters.setdefault(task_id, {})
        while len(self._counters) > TASKS_COUNTED_MAX:
            del self._counters[next(iter(self._counters))]
        counters = by_chain.setdefault(chain.name, Counters())
        task = chain.tasks[task_id] = self._begin_task(chain, task_id, counters)
        return task

    def _begin_task(self, chain: _Chain, task_id: str, counters: Counters) -> _ChainTask:
        kept = self._kept_pins.get(task_id)
        if kept is None:
            return _ChainTask(chain, counters, None, self._disk)
        pins, on_pins = kept
        task = _ChainTask(chain, counters, partial(on_pins, chain.name), self._disk)
        task.pins.restore(pins.get(chain.name, {}))
        return task

    def _ask_plain(self, chain: _Chain, reader: _Reader, params: Params) -> None:
        method = reader.request.operation
        known = READ_METHODS.get(method)
        body = question_body(method, params.params)
        if known is None:
            self._ask_writing(chain, reader, body)
            return
        immutable = known.immutable or (known.pin is not _NO_PIN and body.find(b'"blockHash"') >= 0)
        self._ask(chain, reader, body, method, cached=immutable, block_known=False)

    def _ask_at(
        self, chain: _Chain, reader: _Reader, params: Params, block: BlockRef | WireError
    ) -> None:
        if reader.ended:  # cancelled while its block was asked for
            return
        method = reader.request.operation
        if isinstance(block, WireError):
            self._end(reader, None, block)
            return
        try:
            method, placed = place_block(method, params.params, block.number, block.hash)
        except ValueError as error:
            self._end(reader, None, WireError(kind=ErrorKind.IO_ERROR, message=str(error)))
            return
        body = question_body(method, placed)
        if method not in READ_METHODS:
            self._ask_writing(chain, reader, body)
            return
        what = f"{reader.request.operation} at block {block.name}"
        # By number alone means final: such an answer holds for ever.
        disk = reader.task.disk if block.hash is None else None
        by_height = block.hash is not None and READ_METHODS[method].pin is Pin.NUMBER
        self._ask(
            chain,
            reader,
            body,
            what,
            cached=True,
            block_known=block.known,
            disk=disk,
            params=placed,
            height=block.number,
            verified=block if by_height else None,
        )

    def _ask(
        self,
        chain: _Chain,
        reader: _Reader,
        body: bytes,
        what: str,
        *,
        cached: bool,
        block_known: bool,
        disk: TaskDisk | None = None,
        params: bytes = b"",
        height: int | None = None,
        verified: BlockRef | None = None,
    ) -> None:
        """A read: from the cache, joined to one on its way, from disk (by ``params``), or asked."""
        task = reader.task
        # Tasks may have pinned different blocks of one height.
        key = body if verified is None else b"%b %b" % (body, (verified.hash or "").encode())
        cache = task.cache if cached else None
        if cache is not None:
            result = cache.get(key)
            if result is not None:
                task.counters.cache_hits += 1
                self._end(reader, result, None)
                return
        shared = chain.inflight.get(key)
        if shared is not None:
            task.counters.merged += 1
            self._join(reader, shared)
            return
        shared = _SharedQuestion(
            method=reader.request.operation,
            body=body,
            what=what,
            counters=task.counters,
            done=self._answered,
            chain=chain,
            readers=[reader],
            block_known=block_known,
            cache=cache,
            disk=disk,
            key=key,
            verified=None if verified is None else (task.pins, verified),
        )
        presence = chain.multicall if shared.method == "eth_call" else None
        if presence is not None and height is not None and presence.covers(height, task.ask):
            shared.ride = ride_of(params)
        reader.question = shared
        if chain.config.merge_reads:
            chain.inflight[key] = shared
        if disk is None:
            chain.link.ask(shared, reader.arrived_at)
        else:
            disk.look_up(shared.method, params, partial(self._looked_up, shared))

    def _looked_up(self, shared: _SharedQuestion, key: bytes, result: bytes | None) -> None:
        """The disk cache has answered."""
        if shared.dropped:
            return
        if result is None:
            shared.disk_key = key
            shared.chain.link.ask(shared, monotonic())
            return
        shared.counters.cache_hits += 1
        shared.ended = True
        self._answered(shared, result, None)

    def _ask_writing(self, chain: _Chain, reader: _Reader, body: bytes) -> None:
        """A request that may change something: reads on their way are joined no more, here and at its end."""
        chain.inflight.clear()
        shared = _SharedQuestion(
            method=reader.request.operation,
            body=body,
            what=reader.request.operation,
            counters=reader.task.counters,
            done=self._written,
            chain=chain,
            is_read=False,
            key=body,
        )
        self._join(reader, shared)
        chain.link.ask(shared, monotonic())

    def _written(self, question: Question, result: bytes | None, error: WireError | None) -> None:
        assert isinstance(question, _SharedQuestion), "asked by _ask_writing"
        question.chain.inflight.clear()
        self._answered(question, result, error)

    # ---- readers ---------------------------------------------------------------------------------

    def _join(self, reader: _Reader, shared: _SharedQuestion) -> None:
        reader.question = shared
        shared.readers.append(reader)
        if shared.sent_at or shared.flown_s:  # others' time is not charged
            now = monotonic()
            reader.flown_before = shared.flown(now)
            if shared.sent_at:
                self._watch((shared,), now)

    def _leave(self, reader: _Reader) -> None:
        shared = reader.question
        if shared is None:
            return
        shared.readers = [other for other in shared.readers if other is not reader]
        if not shared.readers and not shared.sent_at:
            shared.dropped = True
            self._close_to_joiners(shared)

    def _close_to_joiners(self, shared: _SharedQuestion) -> None:
        inflight = shared.chain.inflight
        if inflight.get(shared.key) is shared:
            del inflight[shared.key]

    def _answered(self, question: Question, result: bytes | None, error: WireError | None) -> None:
        assert isinstance(question, _SharedQuestion), "own questions are answered to the pins"
        if question.verified is None or result is None:
            self._hand_out(question, result, error)
            return
        pins, block = question.verified
        pins.verify(
            block, lambda gone: self._hand_out(question, result if gone is None else None, gone)
        )

    def _hand_out(
        self, question: _SharedQuestion, result: bytes | None, error: WireError | None
    ) -> None:
        """The answer is settled: keep it, and end those who wait for it."""
        self._close_to_joiners(question)
        if question.cache is not None and result is not None and result != NULL:
            question.cache.put(question.key, result)
        if (
            question.disk_key
            and question.disk is not None
            and result is not None
            and result != NULL
        ):
            question.disk.keep(question.disk_key, result)
        readers, question.readers = question.readers, []
        for reader in readers:
            self._end(reader, result, error)

    def _end(self, reader: _Reader, result: bytes | None, error: WireError | None) -> None:
        if reader.ended:
            return
        reader.ended = True
        call_id = reader.request.call_id
        if self._by_call.get(call_id) is reader:
            del self._by_call[call_id]
        now = monotonic()
        charged_s = reader.charged(now)
        queued_s = now - reader.arrived_at - charged_s
        reader.reply(
            IoReply(
                reader.request,
                result,
                None,
                error,
                int(charged_s * 1e6 + 0.5),
                int(queued_s * 1e6 + 0.5) if queued_s > 0 else 0,
            )
        )

    # ---- budgets ---------------------------------------------------------------------------------

    def _watch(self, questions: Sequence[Question], now: float) -> None:
        """Note when the first budget of their readers ends if they stay on their way until then."""
        left_s = _first_budget_s(questions, now)
        if left_s is None:
            return
        self._deadline_seq += 1
        if len(self._deadlines) > 1_024 + 2 * len(self._by_call):  # long budgets of ended readers
            self._deadlines = [
                entry for entry in self._deadlines if any(q.sent_at for q in entry[2])
            ]
            heapq.heapify(self._deadlines)
        when = now + left_s
        heapq.heappush(self._deadlines, (when, self._deadline_seq, questions))
        if self._timer is None or when < self._timer_at:
            self._arm(when, left_s)

    def _arm(self, when: float, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._deadlines_due)

    def _deadlines_due(self) -> None:
        self._timer = None
        heap, now = self._deadlines, monotonic()
        due = []
        while heap and (heap[0][0] <= now or not any(q.sent_at for q in heap[0][2])):
            due.append(heapq.heappop(heap)[2])
        for questions in due:
            for question in list(questions):
                # Between two posts its clock stands; the next post notes a new end.
                if question.sent_at and isinstance(question, _SharedQuestion):
                    self._end_overdue(question, now)
            self._watch(questions, now)
        if heap and self._timer is None:
            self._arm(heap[0][0], max(0.0, heap[0][0] - now))

    def _end_overdue(self, question: _SharedQuestion, now: float) -> None:
        for reader in list(question.readers):
            budget_ms = reader.request.budget_left_ms
            if budget_ms > 0 and reader.charged(now) >= budget_ms / 1_000 - 1e-6:
                self._leave(reader)
                text = (
                    f"{question.what}: no answer within the {budget_ms:.0f} ms that were left of "
                    "the call's budget"
                )
                self._end(reader, None, WireError(kind=ErrorKind.DEADLINE_EXCEEDED, message=text))


def _first_budget_s(questions: Sequence[Question], now: float) -> float | None:
    """Seconds until the first reader of questions on their way has used its budget up; None: never."""
    first_ms = 0.0
    for question in questions:
        if not question.sent_at or not isinstance(question, _SharedQuestion):
            continue
        for reader in question.readers:
            left_ms = reader.request.budget_left_ms
            if left_ms > 0:
                if question.flown_s or question.sent_at != now:
                    left_ms -= reader.charged(now) * 1_000
                if not first_ms or left_ms < first_ms:
                    first_ms = max(left_ms, 0.001)
    return first_ms / 1_000 if first_ms else None


def check_url(chain: str, url: str) -> None:
    """Raises UsageError for an url of a chain that is no http or https url."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(
            f"backends.rpc.{chain}.urls: {redact_text(url)!r} is no http(s) url; "
            "write for example http://127.0.0.1:8545"
        )
