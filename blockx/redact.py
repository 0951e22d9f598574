"""Urls as they may be shown, and the parts of them that may be shown nowhere.

Pure. Node providers put keys into user, password, path and query; so of a url the scheme, the host and the port are
shown and nothing else. Texts that others make (the page of a node that refuses a key) are searched for these parts.
"""

import re
from typing import Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

_SECRET_CHARS_MIN: Final = 4
"""Shorter ones are searched for in no text: they stand everywhere."""
_SEGMENT_CHARS_MIN: Final = 8
"""The same for parts of a path, which are mostly names such as ``v2`` and ``mainnet``."""


def redact_url(url: str) -> str:
    """``https://me:pw@host:8545/v2/KEY?key=1`` as ``https://host:8545/***``."""
    parts = _split(url)
    if parts is None or not parts.hostname:
        return "(an url that cannot be read)"
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = f":{parts.port}" if parts.port else ""
    rest = "/***" if parts.path.strip("/") or parts.query or parts.fragment else ""
    return f"{parts.scheme}://{host}{port}{rest}"


def redact_database_url(url: str) -> str:
    """The url of a database as it may be shown: scheme, hosts and database."""
    parts = urlsplit(url)
    hosts = parts.netloc.rpartition("@")[2] or ",".join(parse_qs(parts.query).get("host", []))
    return f"{parts.scheme}://{hosts}{parts.path}" if url else ""


def redact_text(text: str) -> str:
    """A text of a configuration that may be a url, or a piece of one."""
    if "://" in text:
        return redact_url(text)
    return f"***@{text.rpartition('@')[2].partition('/')[0]}" if "@" in text else text


class Secrets:
    """What is cut out of texts that hold parts of some urls."""

    __slots__ = ("_found",)

    def __init__(self, *urls: str) -> None:
        parts = {part for url in urls for part in _parts(url)}
        # The longest first: one may be a part of another.
        words = sorted(map(re.escape, parts), key=len, reverse=True)
        self._found = re.compile("|".join(words)) if words else None

    def cut(self, text: str) -> str:
        """The text with ``***`` in their place."""
        return text if self._found is None else self._found.sub("***", text)


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # a port that is no number, brackets that do not match
        return None
    return parts


def _parts(url: str) -> set[str]:
    parts = _split(url)
    if parts is None:
        return {url}
    short = {parts.username, parts.password, parts.query, parts.fragment}
    short.update(item.partition("=")[2] for item in parts.query.split("&"))
    found = {word for word in short if word and len(word) >= _SECRET_CHARS_MIN}
    found |= {word for word in parts.path.split("/") if len(word) >= _SEGMENT_CHARS_MIN}
    return found | {unquote(word) for word in found}
