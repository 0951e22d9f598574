"""The seam between what user code calls and who answers: the ``Provider`` protocol and the current one.

In an executor the runtime sets a provider for each call; elsewhere (a notebook, a script)
``blockx.local`` is found by name. The current provider lives in a context variable, so that each
greenlet has its own. This module never imports the executor: the runtime *gives* it a provider.
"""

import contextvars
import importlib
import os
from collections.abc import Mapping
from typing import Any, Protocol, cast


class Provider(Protocol):
    """Answers what the SDK asks for (the specification, "The Provider protocol")."""

    def read_req(
        self,
        backend: str,
        operation: str,
        params: Mapping[str, Any],
        *,
        cache_key: str | None = None,
    ) -> Any:
        """Read through a backend; suspends the call. Raises ReadError."""

    def write_req(self, backend: str, operation: str, params: Mapping[str, Any]) -> Any:
        """Write through a backend; returns when it is durable. Raises ReadError."""

    def capability_req(
        self,
        backend: str,
        operation: str,
        params: Mapping[str, Any],
        *,
        cache_key: str = "",
        sidecar: bytes | None = None,
    ) -> Any:
        """Ask a capability backend; suspends the call. ``sidecar``: raw bytes beside the parameters.

        An answer of raw bytes is bytes. Raises ReadError.
        """

    def subcall(self, function_id: str, args: Any) -> Any:
        """Call another function with positional ``args`` (a list). Raises SubcallFailedError."""

    def sleep(self, seconds: float) -> None:
        """Suspend the call; 0 lets others run."""


_current: contextvars.ContextVar[Provider | None] = contextvars.ContextVar(
    "blockx_provider", default=None
)

set_provider = _current.set
"""Make a provider current in this context; returns the token for ``reset_provider``."""
reset_provider = _current.reset


def get_provider() -> Provider:
    """The provider of the running call, or ``blockx.local``'s outside an executor."""
    provider = _current.get()
    if provider is None and os.environ.get("BLOCKX_EXECUTOR_RUNTIME"):
        raise RuntimeError(
            "no call runs here: only the call's own thread may read, call functions or sleep"
        )
    if provider is None:
        provider = cast(Provider, importlib.import_module("blockx.local").provider())
    return provider
