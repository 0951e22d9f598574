"""Dummies for tests: name only the fields that the test is about.

``dummy(EventType, ...)`` fills in the rest; equal keys come from equal ``args``, as in a real task.
"""

import inspect
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import blockx
from blockx.config import DispatcherConfig
from blockx.dispatcher.core import DispatcherCore
from blockx.dispatcher.model import (
    CallError,
    CallSpec,
    Costs,
    ExecutorSnapshot,
    FunctionRef,
    TaskSpec,
)
from blockx.errors import ErrorKind

CODE = Path(blockx.__file__).parents[1]
"""Where the tested code is: the checkout, or the folder of a compiled build. What a test starts runs this code."""

T = TypeVar("T")

_DEFAULTS: dict[str, Any] = {
    "task_id": "t@1",
    "attempt_seq": 1,
    "executor_id": "exec-0",
    "incarnation_id": "p0",
    "now_ms": 1_000,
    "output": b"1",
    "batch_id": 0,
    "calls": (),
    "request_id": "req-p0-1",
    "load_error": None,
    "granted_budget_ms": 3_000.0,
    "kind": ErrorKind.EXECUTOR_LOST,
    "detail": "killed by signal 9",
    "running_call_seq": 0,
    "free_of_charge": False,
    "drain": False,
}


def dummy(kind: type[T], /, **fields: Any) -> T:
    """A record of that type with harmless values in all fields that are not named."""
    names = inspect.signature(kind).parameters
    for name in names:
        if name not in fields and name in _DEFAULTS:
            fields[name] = _DEFAULTS[name]
    if "costs" in names:
        fields.setdefault("costs", Costs())
    return kind(**fields)


def function_ref(function_id: str = "f") -> FunctionRef:
    """A function whose digest is made from its id."""
    return FunctionRef(function_id, f"digest-of-{function_id}", "_")


def key_of(function_id: str, args: bytes) -> bytes:
    """The key of a call: digest and arguments."""
    return f"digest-of-{function_id}:".encode() + args


def call_spec(index: int, args: bytes | None = None, function_id: str = "f") -> CallSpec:
    """A call with arguments of its own, unless ``args`` says otherwise."""
    args = b"[%d]" % index if args is None else args
    return CallSpec(index, function_ref(function_id), args, key_of(function_id, args))


def call_specs(indexes: Iterable[int]) -> list[CallSpec]:
    """Calls that are all different."""
    return [call_spec(index) for index in indexes]


def task_spec(job_name: str = "t", **fields: Any) -> TaskSpec:
    """A task of that job, alone in its instance."""
    fields.setdefault("task_id", f"{job_name}@1")
    fields.setdefault("instance_id", job_name)
    return TaskSpec(job_name=job_name, **fields)


def snapshot(executor_id: str = "exec-0", **fields: Any) -> ExecutorSnapshot:
    """A healthy idle executor with 128 places."""
    values: dict[str, Any] = {
        "incarnation_id": "p0",
        "healthy": True,
        "usable_contexts": 128,
        "runnable_count": 0,
        "memory_bytes": 0,
        "heartbeat_seq": 1,
        "running_call_seq": 0,
        "scheduler_idle_ms": 0,
    }
    return ExecutorSnapshot(executor_id=executor_id, **(values | fields))


def error(kind: ErrorKind = ErrorKind.USER_ERROR, message: str = "ValueError: no") -> CallError:
    """Why a call failed."""
    return CallError(kind, message)


def dispatcher_core(
    *, stall_timeout_ms: int = 10_000, seed: int = 7, task_slots: int = 32, **config: Any
) -> DispatcherCore:
    """A core with the default configuration but for the named keys."""
    return DispatcherCore(
        DispatcherConfig(**config),
        stall_timeout_ms=stall_timeout_ms,
        rng=random.Random(seed),
        task_slots=task_slots,
    )
