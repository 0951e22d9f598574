"""The provider outside an executor: the same user code in a notebook or a script, without a run.

Found by name by ``sdk.provider.get_provider``; lives in the process that imported ``blockdb``,
``leafage`` or ``blockx_sdk``. Reads go directly to the backends of ``BLOCKX_CONFIG`` or
``./config.yaml`` and block the calling thread; functions called by ``function.call`` run in it. There
are no budgets, no retries of calls and no sharing of results: for those, run a job.
"""

import atexit
import itertools
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blockx.audit.client import auditor_of
from blockx.backends.scope import IoReply, IoRequest
from blockx.backends.service import IoService
from blockx.config import LoadedConfig, load_config
from blockx.errors import (
    SubcallCycleDetectedError,
    SubcallDepthExceededError,
    SubcallFailedError,
    UsageError,
    read_error,
)
from blockx.executor.loader import Loader, LoadFailedError
from blockx.functions.view import FunctionView, PinnedFunction
from blockx.ipc import exact_json

CONFIG_VARIABLE = "BLOCKX_CONFIG"
_TASK_ID = "local"
_instance: "LocalProvider | None" = None
_instance_lock = threading.Lock()


def provider() -> "LocalProvider":
    """The one provider of this process, made at its first use.

    Raises:
        UsageError: there is no configuration, or it is wrong.
    """
    global _instance  # noqa: PLW0603 - one in a process, like the backends behind it
    with _instance_lock:
        if _instance is None:
            file = Path(os.environ.get(CONFIG_VARIABLE, "config.yaml"))
            if not file.exists():
                raise UsageError(
                    f"{file}: not found; outside a run, reads go to the backends of a configuration: "
                    f"name it in the environment variable {CONFIG_VARIABLE}"
                )
            _instance = LocalProvider(load_config(file, os.environ))
            atexit.register(_instance.close)
        return _instance


class LocalProvider:
    """``Provider`` over the backends and functions of one configuration. Any thread."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self._loaded = loaded
        self._request_seq = itertools.count(1)
        self._answers: dict[str, queue.SimpleQueue[IoReply]] = {}
        self._view: FunctionView | None = None
        self._loader = Loader()
        self._stack = threading.local()
        self._io = IoService(loaded, self._on_replies)
        self._io.start()

    def read_req(
        self,
        backend: str,
        operation: str,
        params: Mapping[str, Any],
        *,
        cache_key: str | None = None,
    ) -> Any:
        """Read and wait for the answer. Raises ReadError."""
        return self._ask(backend, operation, params, cache_key or "", write=False)

    def write_req(self, backend: str, operation: str, params: Mapping[str, Any]) -> Any:
        """Write and wait until it is durable. Raises ReadError."""
        return self._ask(backend, operation, params, "", write=True)

    def capability_req(
        self,
        backend: str,
        operation: str,
        params: Mapping[str, Any],
        *,
        cache_key: str = "",
        sidecar: bytes | None = None,
    ) -> Any:
        """Ask a capability backend and wait. Raises ReadError."""
        return self._ask(backend, operation, params, cache_key, write=False, sidecar=sidecar)

    def sleep(self, seconds: float) -> None:
        """Block this thread."""
        time.sleep(seconds)

    def subcall(self, function_id: str, args: Any) -> Any:
        """Run a function of the configuration's folder in this thread.

        Arguments and result pass through exact JSON, as in a run. Raises SubcallFailedError.
        """
        encoded = exact_json.encode(args)
        pinned = self._pinned(function_id)
        ancestry: tuple[bytes, ...] = getattr(self._stack, "ancestry", ())
        key = pinned.digest.encode() + exact_json.canonical(encoded)
        if key in ancestry:
            raise SubcallCycleDetectedError(
                f"{function_id}: called by itself with the same arguments"
            )
        if len(ancestry) > self._loaded.config.dispatcher.max_subcall_depth:
            raise SubcallDepthExceededError(
                f"{function_id}: called more than {len(ancestry) - 1} deep"
            )
        self._stack.ancestry = (*ancestry, key)
        try:
            loaded = self._loader.load(
                _TASK_ID, function_id, pinned.digest, pinned.entry, lambda *_: pinned.source
            )
            return exact_json.decode(
                exact_json.encode(loaded.call(*_list(exact_json.decode(encoded))))
            )
        except (SubcallFailedError, LoadFailedError) as error:
            raise SubcallFailedError(f"{function_id}: {error}") from error
        except Exception as error:  # whatever the user's function raised
            raise SubcallFailedError(f"{function_id}: {type(error).__name__}: {error}") from error
        finally:
            self._stack.ancestry = ancestry

    def close(self) -> None:
        """Finish accepted writes and close connections."""
        self._io.stop()

    def _pinned(self, function_id: str) -> PinnedFunction:
        if self._view is None:
            functions = self._loaded.config.functions
            with auditor_of(functions.mode) as auditor:
                self._view = FunctionView(self._loaded.resolve(functions.path), auditor)
        pinned = self._view.get(function_id)
        if pinned is None:
            near = " or ".join(self._view.suggest(function_id))
            hint = f"; did you mean {near}?" if near else ""
            raise SubcallFailedError(f"no function {function_id!r}{hint}")
        if pinned.error is not None:
            raise SubcallFailedError(f"{function_id}: {pinned.error}")
        return pinned

    def _ask(
        self,
        backend: str,
        operation: str,
        params: Mapping[str, Any],
        cache_key: str,
        *,
        write: bool,
        sidecar: bytes | None = None,
    ) -> Any:
        request_id = f"local-{next(self._request_seq)}"
        request = IoRequest(
            executor_id="",
            task_id=_TASK_ID,
            call_id=request_id,
            attempt_seq=1,
            request_id=request_id,
            backend=backend,
            operation=operation,
            params=exact_json.encode(dict(params)),
            sidecar=sidecar,
            write=write,
            cache_key=cache_key,
            budget_left_ms=0,
        )
        answer = self._answers[request_id] = queue.SimpleQueue()
        self._io.submit([request])
        reply = answer.get()
        if reply.error is not None:
            error = reply.error
            raise read_error(
                error.kind,
                error.message,
                retryable=error.retryable,
                reason=error.reason,
                data=error.data,
                status=error.status,
            )
        if reply.sidecar is not None:
            return reply.sidecar
        return exact_json.decode(reply.result or b"null")

    def _on_replies(self, replies: Sequence[IoReply]) -> None:
        """On the io thread."""
        for reply in replies:
            self._answers.pop(reply.request.call_id).put(reply)


def _list(args: object) -> list[Any]:
    assert isinstance(args, list), "arguments of a sub-call are a list"
    return args
