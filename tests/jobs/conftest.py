"""A job in a folder of its own, run against a dispatcher that answers in the same thread."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from blockx.config import Config, LoadedConfig
from blockx.dispatcher.commands import EmitResult, FinishTask, JobCommand, ReturnCredit
from blockx.dispatcher.model import (
    CallCounts,
    CallError,
    CallResult,
    CallSpec,
    Costs,
    TaskEnd,
    TaskSpec,
    Via,
)
from blockx.functions.view import FunctionView
from blockx.jobs.choice import Choice
from blockx.jobs.report import JobProgress
from blockx.jobs.run import JobsRun
from blockx.jobs.runner import JobPort, JobTools

Answer = Callable[[CallSpec], bytes | CallError]
COSTS = Costs(cpu_us=1, io_us=2, subcall_us=3, sleep_us=4, queue_us=5)


@dataclass
class FakeDispatch:
    """Answers each stream batch when it is submitted, in the order that ``order`` makes of it.

    ``before_batch`` may return commands to deliver instead of the answers.
    """

    answer: Answer
    order: Callable[[list[CallSpec]], list[CallSpec]] = list
    before_batch: Callable[[int], list[JobCommand] | None] = lambda _batch_id: None
    log: list[tuple[Any, ...]] = field(default_factory=list)
    open_batches_max: int = 0
    """Most stream batches that were on their way at once."""
    calls: CallCounts = field(default_factory=CallCounts)
    ended: bool = False

    def keep_pins(self, task_id: str, pins: Any, on_pins: Any) -> None:
        self.pins, self.on_pins = pins, on_pins

    def open(self, task: TaskSpec, view: FunctionView, port: JobPort) -> None:
        self.log.append(("open", task.task_id))
        self.task, self.view, self.port = task, view, port

    def submit(self, task_id: str, batch_id: int, calls: list[CallSpec]) -> None:
        self.log.append(("submit", batch_id, [call.index for call in calls]))
        if self.ended:
            return
        scripted = self.before_batch(batch_id)
        if scripted is not None:
            self.port.deliver(scripted)
            return
        results = [EmitResult(task_id, self.result(call)) for call in self.order(calls)]
        self.port.deliver([*results, ReturnCredit(task_id, batch_id)])

    def result(self, call: CallSpec) -> CallResult:
        answer = self.answer(call)
        self.calls.calls += 1
        self.calls.ran += 1
        self.calls.executed += 1
        failed = isinstance(answer, CallError)
        if failed:
            self.calls.failed += 1
        else:
            self.calls.ok += 1
        return CallResult(
            index=call.index,
            call_id=f"{self.task.job_name}/{call.index}",
            function_id=call.function.function_id,
            output=None if failed else answer,
            error=answer if failed else None,
            via=Via.RAN,
            attempts=1,
            moves=0,
            costs=COSTS,
        )

    def end_production(self, task_id: str) -> None:
        self.log.append(("end_production",))
        if not any(entry[0] == "cancel" for entry in self.log):
            self.finish(TaskEnd.COMPLETED)

    def finish(self, end: TaskEnd, error: CallError | None = None) -> None:
        if not self.ended:
            self.ended = True
            self.port.deliver([FinishTask(self.task.task_id, end, error, self.calls, CallCounts())])

    def cancel(self, task_id: str, drain: bool) -> None:
        self.log.append(("cancel", drain))
        self.finish(TaskEnd.CANCELLED)

    def remove(self, task_id: str) -> None:
        self.log.append(("remove", task_id))


class Folder:
    """A folder with functions, a call list and a configuration; ``run`` runs its jobs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.progress = JobProgress()
        (path / "functions").mkdir()
        self.add_function("f", "def _(*args):\n    return {}\n")

    def add_function(self, function_id: str, source: str) -> None:
        file = self.path / "functions" / f"{function_id}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)

    def write(self, name: str, content: str | bytes) -> Path:
        file = self.path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    def read(self, name: str) -> str:
        return (self.path / name).read_text()

    def files(self) -> list[str]:
        """Of the folder itself, without journals."""
        names = sorted(entry.name for entry in self.path.iterdir() if entry.is_file())
        return [name for name in names if not name.endswith(".journal")]

    def loaded(self, *jobs: dict[str, Any], **sections: Any) -> LoadedConfig:
        config = msgspec.convert({"jobs": list(jobs), **sections}, Config)
        return LoadedConfig(config=config, file=self.path / "config.yaml", folder=self.path)

    def view(self) -> FunctionView:
        return FunctionView(self.path / "functions")

    def jobs_run(
        self,
        dispatch: Any,
        *jobs: dict[str, Any],
        choice: Choice | None = None,
        tables: Any = None,
        **sections: Any,
    ) -> JobsRun:
        loaded = self.loaded(*jobs, **sections)
        tools = JobTools(
            loaded=loaded,
            view_factory=self.view,
            dispatch=dispatch,
            run_id="r1",
            choice=choice or Choice(),
            tables=tables,
        )
        return JobsRun(tools, loaded.config.jobs, self.progress)

    def notices(self) -> Sequence[str]:
        return list(self.progress.notices)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def fake_dispatch() -> type[FakeDispatch]:
    return FakeDispatch
