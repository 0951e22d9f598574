"""The urls of one chain: which of them takes the next post, and how each one fares.

io thread only; pure but for one log line: times are handed in, nothing is sent from here. Rules:

- *Order*: without weights the first url that serves takes everything. With weights (``per_url``) those that
  have one share the requests in that proportion, and those without are a reserve for when none of them serves.
- *Limits*: at most ``posts_max`` posts on their way to an url and, with ``requests_per_s``, so many JSON-RPC
  requests; a quarter of a second's worth may leave at once. All urls of all chains share the posts of
  ``rpc_posts_per_s``. What does not fit waits.
- *Health*: a failing url rests, each time twice as long. After ``OPEN_AFTER`` failures in a row its circuit is
  open: when its rest is over, one request alone is let through (half open), and only an answer to that one
  closes the circuit. Meanwhile the others serve.
- *Batch limit*: what the url has shown to take; a guess grows again, a number that the node stated does not.

Invariant: an url that does not rest and has a free slot is always found, so nothing waits for ever.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from blockx.backends.http_client import HttpClient
from blockx.config import RpcBackendConfig, RpcUrlConfig
from blockx.errors import ErrorKind
from blockx.observability import logger
from blockx.redact import Secrets, redact_url

PAUSE_FIRST_S: Final = 0.1
PAUSE_MAX_S = 5.0
"""Rest of a failing url: doubles from the first to the longest, with up to 25 % jitter; an answer resets it."""
OPEN_AFTER: Final = 3
"""Failures in a row that open the circuit; a line is logged then, once until the url answers again."""
LIMIT_GROWS_S: Final = 60.0
"""A batch limit that was guessed (not told by the node) doubles again after this long."""
BURST_S: Final = 0.25
"""How much of ``requests_per_s`` may leave at once."""
POSTS_BURST_S: Final = 0.005
"""How much of ``rpc_posts_per_s`` may leave at once: no more than keeps the io thread busy for a moment."""
LATENCY_WEIGHT: Final = 0.1
"""Of the newest answer in the smoothed latency."""


class UrlHealth(NamedTuple):
    """One url as an operator sees it; ``shown`` hides credentials."""

    shown: str
    circuit: str
    """``closed``, ``open`` (rests) or ``half open`` (the next request decides)."""
    failures: int
    """In a row."""
    inflight: int
    """Posts on their way."""
    batch_limit: int
    latency_ms: float
    """Of a post, smoothed; 0: none answered yet."""
    last_error: str


@dataclass(slots=True)
class Allowance:
    """So many a second, and ``burst_s`` seconds' worth of them at once. ``per_s`` 0: no limit."""

    per_s: int
    burst_s: float = BURST_S
    _left: float = 0.0
    _filled_at: float = 0.0

    def room(self, now: float, wanted: int) -> int:
        """How many may leave now, of ``wanted``; 0: none before ``ready_at``."""
        if not self.per_s:
            return wanted
        burst = max(1.0, self.per_s * self.burst_s)
        self._left = min(burst, self._left + (now - self._filled_at) * self.per_s)
        self._filled_at = now
        allowed = int(self._left + 1e-6)
        # Rather a batch a little later than a request at a time.
        return min(wanted, allowed) if allowed >= min(wanted, int(burst)) else 0

    def ready_at(self, now: float, wanted: int) -> float:
        """When ``room`` will not be 0."""
        if not self.per_s:
            return now
        need = min(wanted, max(1, int(self.per_s * self.burst_s)))
        return now + max(0.0, need - self._left) / self.per_s

    def take(self, count: int) -> None:
        """They left."""
        self._left -= count


@dataclass(slots=True, eq=False)
class NodeUrl:
    """One url and what is known of it."""

    shown: str
    client: HttpClient
    settings: RpcUrlConfig
    posts_max: int
    limit: int
    """Members of a batch; at most ``limit_max``."""
    limit_max: int
    requests: Allowance
    posts: Allowance
    """Shared with every other url of the io thread."""
    limit_stated: bool = False
    limit_since: float = 0.0
    inflight: int = 0
    paused_until: float = 0.0
    failures: int = 0
    failed_at: float = 0.0
    last_error: str = ""
    last_kind: ErrorKind = ErrorKind.UNAVAILABLE
    share: float = 0.0
    """Requests served, divided by the weight: the smallest goes next."""
    latency_s: float = 0.0

    @property
    def is_open(self) -> bool:
        """Too many failures in a row."""
        return self.failures >= OPEN_AFTER

    @property
    def has_slot(self) -> bool:
        """One more post may go to it."""
        return self.inflight < (1 if self.is_open else self.posts_max)

    def room(self, now: float, wanted: int) -> int:
        """Requests that may leave for it now, of ``wanted``; 0: none before ``ready_at``."""
        if not self.posts.room(now, 1):
            return 0
        return self.requests.room(now, 1 if self.is_open else min(wanted, self.limit))

    def ready_at(self, now: float, wanted: int) -> float:
        """When ``room`` will not be 0."""
        requests_at = self.requests.ready_at(now, min(wanted, self.limit))
        return max(requests_at, self.posts.ready_at(now, wanted))

    def sent(self, members: int) -> None:
        """A post left with so many requests."""
        self.inflight += 1
        self.requests.take(members)
        self.posts.take(1)
        if self.settings.weight:
            self.share += members / self.settings.weight


@dataclass(slots=True)
class ChainUrls:
    """The urls of one chain."""

    chain: str
    config: RpcBackendConfig
    body_bytes_max: int
    posts: Allowance
    all: list[NodeUrl] = field(default_factory=list)
    secrets: Secrets = field(init=False)
    """Of all its urls: a node may answer with them."""
    _random: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.secrets = Secrets(*self.config.urls)
        self.all = [self._made(url) for url in self.config.urls]

    def _made(self, url: str) -> NodeUrl:
        config = self.config
        settings = config.per_url.get(url, RpcUrlConfig())
        limit = min(settings.batch_max or config.batch_max, config.batch_max)
        client = HttpClient(
            url, timeout_s=config.timeout_ms / 1_000, body_bytes_max=self.body_bytes_max
        )
        posts_max = settings.posts_max or config.posts_max
        requests = Allowance(settings.requests_per_s)
        shown = redact_url(url)
        return NodeUrl(shown, client, settings, posts_max, limit, limit, requests, self.posts)

    def choose(self, now: float, avoid: NodeUrl | None) -> NodeUrl | None:
        """The url of the next post, rather another than ``avoid``; it may have no free slot just now.

        None: all rest, or wait for the one request that decides whether they serve again.
        """
        if len(self.all) == 1:
            url = self.all[0]
            return url if url.paused_until <= now and (url.has_slot or not url.is_open) else None
        serving = [
            url
            for url in self.all
            if url.paused_until <= now and not (url.is_open and url.inflight)
        ]
        if not serving:
            return None
        others = [url for url in serving if url is not avoid] or serving
        weighted = [url for url in others if url.settings.weight]
        if not weighted:
            return others[0]
        free = [url for url in weighted if url.has_slot and url.room(now, 1)]
        return min(free or weighted, key=_share)

    def wakes_at(self) -> float:
        """When the next url's rest is over; those whose probe is on its way wake with its answer."""
        return min(
            (url.paused_until for url in self.all if not (url.is_open and url.inflight)),
            default=float("inf"),
        )

    def answered(self, url: NodeUrl, now: float, latency_s: float) -> None:
        """It gave an answer: it serves."""
        if url.failures:
            url.failures = 0
            # What it missed while it rested is not made up for.
            others = [other.share for other in self.all if other is not url and not other.failures]
            url.share = max([url.share, *([min(others)] if others else [])])
        weight = LATENCY_WEIGHT if url.latency_s else 1.0
        url.latency_s += weight * (latency_s - url.latency_s)
        guessed = url.limit < url.limit_max and not url.limit_stated
        if guessed and now - url.limit_since > LIMIT_GROWS_S:
            url.limit, url.limit_since = min(url.limit * 2, url.limit_max), now

    def failed(
        self,
        url: NodeUrl,
        kind: ErrorKind,
        text: str,
        *,
        sent_at: float,
        now: float,
        asked_pause_s: float | None,
    ) -> None:
        """Let it rest; posts that left before its last failure do not count again."""
        text = self.secrets.cut(text)
        url.last_error, url.last_kind = text, kind
        if sent_at >= url.failed_at:
            url.failures += 1
            url.failed_at = now
            if url.failures == OPEN_AFTER:
                logger.warning(
                    "node does not serve, its reads wait",
                    chain=self.chain,
                    node=url.shown,
                    error=text,
                )
        pause = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** min(url.failures - 1, 10))
        pause *= 1 + self._random.random() / 4
        if asked_pause_s is not None:
            pause = max(pause, asked_pause_s)
        url.paused_until = max(url.paused_until, now + pause)

    def lower_limit(self, url: NodeUrl, size: int, stated: int, now: float) -> None:
        """A batch of ``size`` was refused; ``stated``: the limit that the refusal names, 0: none."""
        url.limit_stated = 0 < stated < size
        url.limit = min(url.limit, stated if url.limit_stated else max(1, size // 2))
        url.limit_since = now

    def health(self, now: float) -> Sequence[UrlHealth]:
        """How each url fares, in the order of the configuration."""
        return [
            UrlHealth(
                url.shown,
                _circuit(url, now),
                url.failures,
                url.inflight,
                url.limit,
                url.latency_s * 1_000,
                url.last_error,
            )
            for url in self.all
        ]

    def close(self) -> None:
        """Close the connections."""
        for url in self.all:
            url.client.close()


def _share(url: NodeUrl) -> float:
    return url.share


def _circuit(url: NodeUrl, now: float) -> str:
    if not url.is_open:
        return "closed"
    return "open" if url.paused_until > now else "half open"
