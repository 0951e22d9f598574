"""Main's part of tracing: which root calls are traced, and the W3C ``traceparent`` that their attempts get.

Actor thread only; pure but for the key drawn at the start. Main imports no OpenTelemetry and exports no span:
a trace begins with the executor's span of a root attempt. Without the variables of ``ENABLING`` there is
no ``TraceSource``, frames carry no ``trace`` and nothing is computed.

Invariants: whether a call is traced depends on its id and the ratio alone, so all its attempts are, and the
same calls of the same job in every run; all attempts of a call share one trace id, which no other run has.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from typing import Final

from blockx.errors import UsageError

ENABLING: Final = ("BLOCKX_OTEL_SPAN_FILE", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Tracing is on when one of them is set and not empty."""
RATIO_VARIABLE: Final = "OTEL_TRACES_SAMPLER_ARG"
TRACEPARENT_CHARS: Final = 55
"""Length of every ``traceparent`` of version 00; whatever else an executor says is not passed on."""

_RATIO_STEPS: Final = 1 << 64


class TraceSource:
    """Makes the trace context of root calls."""

    def __init__(self, ratio: float, run_key: bytes) -> None:
        """``ratio``: share of root calls that are traced, 0 to 1. ``run_key``: up to 64 random bytes."""
        self._sampled_below = int(ratio * _RATIO_STEPS)
        self._run_key = run_key

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "TraceSource | None":
        """None: tracing is off. Raises UsageError for a ratio that is no number from 0 to 1."""
        if not any(environ.get(name) for name in ENABLING):
            return None
        text = environ.get(RATIO_VARIABLE) or "1"
        try:
            ratio = float(text)
        except ValueError:
            ratio = math.nan
        if not 0 <= ratio <= 1:
            raise UsageError(
                f"{RATIO_VARIABLE}={text!r} is the share of calls to trace: give a number from 0 to 1"
            )
        return cls(ratio, os.urandom(16))

    def root(self, call_id: str) -> str | None:
        """The context of a root call; None: it is not sampled."""
        name = call_id.encode("utf-8", "surrogatepass")
        place = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())
        if place >= self._sampled_below:
            return None
        ids = hashlib.blake2b(name, digest_size=24, key=self._run_key).hexdigest()
        return f"00-{ids[:32]}-{ids[32:]}-01"
