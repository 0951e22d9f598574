"""Assembly: build the parts, start them in order, run the jobs, stop in reverse order.

Main thread. Order matters: the heartbeat table and the fork server exist before the first thread does
(fork is never called from a process with threads). The only module of main that sees both kinds of
process. A thread that dies of our own bug ends the run with that bug's story, never silently.
"""

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from blockx.actor.effects import OpenTask
from blockx.actor.memory_guard import MemoryGuard, MemoryLimits
from blockx.actor.orchestrator import ExecutorExited, ExecutorSpawned, IoAnswered, Orchestrator
from blockx.actor.reactor import Reactor, monotonic_ms
from blockx.actor.watchdog import Watchdog
from blockx.audit.client import auditor_of
from blockx.backends.rpc_wire import READ_METHODS
from blockx.backends.scope import IoReply, IoRequest
from blockx.backends.service import IoService, Statistics
from blockx.backends.table_access import TableAccess
from blockx.cli import EXIT_SIGINT, EXIT_SIGTERM, RunOptions, abandon_stdout, select_jobs
from blockx.config import (
    LoadedConfig,
    executor_memory_limit_bytes,
    executor_recycle_memory_bytes,
    heartbeat_timeout_ms,
    stall_timeout_ms,
)
from blockx.dispatcher.core import DispatcherCore
from blockx.dispatcher.events import (
    ProductionEnded,
    StreamBatchSubmitted,
    TaskCancelled,
    TaskRemoved,
)
from blockx.dispatcher.model import CallSpec, TaskSpec
from blockx.errors import ErrorKind, UsageError
from blockx.executor.confine import probe as probe_confinement
from blockx.executor.container import run_container, tell_python
from blockx.executor.main import run as run_executor
from blockx.functions.view import FunctionView, Judge
from blockx.ipc.heartbeat import create_table_fd
from blockx.ipc.heartbeat_table import HeartbeatTable
from blockx.ipc.launch import ExecutorLaunch
from blockx.ipc.messages import CallWaiting, WireError
from blockx.jobs import dry_run
from blockx.jobs.output_file import JobFailedError
from blockx.jobs.records import output_files
from blockx.jobs.report import JobProgress, RunReport, plain_table, summary_lines, table_lines
from blockx.jobs.run import JobsRun, check_jobs
from blockx.jobs.runner import JobPort, JobTools, Pins
from blockx.observability import logger, set_up_logging
from blockx.progress import ProgressDisplay
from blockx.supervisor.guardian import parent_of
from blockx.supervisor.log_relay import LogRelay
from blockx.supervisor.memory import MachineMemory
from blockx.supervisor.oci import OciContainers
from blockx.supervisor.pool import ExecutorPool, ExitReport, PoolCounts
from blockx.supervisor.sandbox import Sandbox
from blockx.supervisor.spawn_mode import PlainProcesses, SpawnMode
from blockx.supervisor.spawner import (
    ForkserverSpawner,
    SpawnError,
    executor_environment,
    package_folder,
)
from blockx.transport.adapter import ExecutorAdapter
from blockx.transport.socket_folder import SocketFolder
from blockx.transport.tracing import TraceSource

SWITCH_INTERVAL_S = 0.0005
"""A post to a waiting thread beside a computing one: 5.2 ms with the default, 0.6 ms with this."""
GC_THRESHOLDS = (20_000, 20, 50)
"""Of Python's garbage collector, in main. With the default of 700 new objects its passes over the calls of a
task were 10 % of main; nothing on the path of a call leaves cycles behind."""
TURN_S = 0.1
"""How often the main thread looks at progress; exits of children and signals wake it at once."""
STOP_GRACE_S = 1.0
"""Executors get this long to end by themselves before they are killed."""
JOIN_S = 10.0
"""Wait for a thread to end; longer is a bug of ours."""
_ENTRIES: Mapping[str, tuple[Callable[..., Any], str, Callable[..., Any] | None]] = {
    "process": (run_executor, "blockx.executor.preload", None),
    "sandbox": (run_executor, "blockx.executor.preload", probe_confinement),
    "oci": (run_container, "blockx.executor.container", tell_python),
}
"""Spawn mode -> the entry of a child, what the fork server imports and freezes for all of them, and what
a child finds out for the mode's ``prepare``."""


def run(loaded: LoadedConfig, options: RunOptions) -> int:
    """Run the chosen jobs; the exit code. Prints progress, a table and where the rows are.

    Raises:
        UsageError: a mistake that is known before anything runs.
    """
    set_up_logging(loaded.config.log.level)
    with auditor_of(loaded.config.functions.mode) as auditor:
        return _run(loaded, options, partial(_view, loaded, auditor))


def _run(
    loaded: LoadedConfig, options: RunOptions, view_factory: Callable[[], FunctionView]
) -> int:
    jobs = select_jobs(loaded, options.jobs)
    check_jobs(loaded, jobs, view_factory())
    started_s = time.monotonic()
    progress = JobProgress()
    is_dry = options.choice.dry_run
    engine = Engine(loaded, reads_only=is_dry)
    signals = _Signals(engine.wake)
    try:
        engine.start()
        tools = JobTools(
            loaded=loaded,
            view_factory=view_factory,
            dispatch=engine,
            run_id=engine.run_id,
            choice=options.choice,
            statistics=engine.statistics,
            tables=TableAccess(loaded),
        )
        sample, chosen = dry_run.sampled(tools, jobs) if is_dry else (tools, jobs)
        work = JobsRun(sample, chosen, progress)
        jobs_thread = _Worker("blockx-jobs", work.run, engine.wake)
        jobs_thread.start()
        messages = options.messages or sys.stderr
        display = ProgressDisplay(progress, messages, quiet=options.quiet)
        try:
            _supervise(engine, work, jobs_thread, signals, progress, display)
        finally:
            display.close()
    finally:
        engine.stop(0.0 if signals.count > 1 else STOP_GRACE_S)
        signals.restore()
    if engine.failure is not None:
        raise engine.failure
    if work.was_stopped:
        return EXIT_SIGTERM if signals.first == signal.SIGTERM else EXIT_SIGINT
    if jobs_thread.error is not None:
        raise jobs_thread.error
    exit_code: int = jobs_thread.result
    if is_dry:
        told = dry_run.sentences(tools, jobs, work.reports)
        sys.stdout.write("\n".join(told) + "\n")
        return exit_code
    report = RunReport(
        work.reports, time.monotonic() - started_s, exit_code, engine.executor_numbers()
    )
    return _tell(loaded, options, report)


def _supervise(
    engine: "Engine",
    work: JobsRun,
    jobs_thread: "_Worker",
    signals: "_Signals",
    progress: JobProgress,
    display: ProgressDisplay,
) -> None:
    """The main thread's loop while the jobs run."""
    handled = 0
    while jobs_thread.is_alive():
        engine.turn(TURN_S)
        if engine.failure is not None:
            work.fail(engine.failure)
            jobs_thread.join(JOIN_S)
            return
        while handled < signals.count:
            handled += 1
            work.request_stop("SIGTERM" if signals.first == signal.SIGTERM else "SIGINT")
        progress.running = engine.running_calls()
        display.update()


def _view(loaded: LoadedConfig, judge: Judge | None) -> FunctionView:
    return FunctionView(loaded.resolve(loaded.config.functions.path), judge)


def _tell(loaded: LoadedConfig, options: RunOptions, report: RunReport) -> int:
    """Write report.json, print the table and where the outputs are."""
    if loaded.config.report:
        try:
            report.write(loaded.resolve(loaded.config.report))
        except JobFailedError as error:
            raise UsageError(f"the report: {error}") from None
    if not options.quiet:
        try:
            _print_report(loaded, report, sys.stdout)
        except BrokenPipeError:
            raise
        except OSError as error:  # the jobs are done: their exit code says how
            abandon_stdout()
            logger.warning("the table cannot be written", reason=error.strerror)
    return report.exit_code


def _print_report(loaded: LoadedConfig, report: RunReport, stream: TextIO) -> None:
    done = {job.name for job in report.jobs if job.complete}
    paths = [
        f"{job.name}: {loaded.resolve(output)}"
        for job in loaded.config.jobs
        if job.name in done
        for output in output_files(job).values()
    ]
    stream.write(
        "\n".join([plain_table(table_lines(report)), *summary_lines(report), *paths]) + "\n"
    )
    stream.flush()


class Engine:
    """Executors, actor and io: everything but jobs. Implements the jobs' ``Dispatch``.

    ``start``, ``turn`` and ``stop`` on the main thread; the Dispatch methods on any thread.
    """

    def __init__(self, loaded: LoadedConfig, *, reads_only: bool = False) -> None:
        """``reads_only``: calls can change nothing, for a dry run."""
        self._loaded = loaded
        self._reads_only = reads_only
        self.run_id = f"{os.getpid():x}{random.SystemRandom().getrandbits(24):06x}"
        self.failure: BaseException | None = None
        """Why the engine cannot go on: a bug of ours, or executors that cannot start."""
        self._reactor = Reactor()
        self._memory = MachineMemory()
        self._memory_limits = _memory_limits(loaded, self._memory)
        self._parts_to_stop: list[Callable[[float], None]] = []
        self._pool: ExecutorPool | None = None
        self._orchestrator: Orchestrator | None = None
        self._actor: _Worker | None = None
        self._traces: TraceSource | None = None
        self._mode: SpawnMode = PlainProcesses(loaded.config.worker, 0)

    # ---- main thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything; executors attach while the first calls are being read.

        Raises:
            UsageError: the folder of the sockets, or a backend, cannot be had; a wrong sampling ratio.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.set_threshold(*GC_THRESHOLDS)
        config = self._loaded.config
        self._traces = TraceSource.from_environment(os.environ)
        folder = SocketFolder()
        self._later(lambda _grace: folder.remove())
        slots = config.worker.executor_count
        table_fd = create_table_fd(slots)
        table = HeartbeatTable(table_fd, slots)
        self._later(lambda _grace: os.close(table_fd))
        self._later(lambda _grace: table.close())
        environment = {
            **executor_environment(
                os.environ,
                config.functions.env,
                is_confined=config.worker.executor_spawn_mode != "process",
            ),
            # The file's level too, not only the variable's, which overrides it.
            "BLOCKX_LOG_LEVEL": config.log.level,
        }
        mode = self._mode = self._make_mode(folder, environment)
        self._later(lambda _grace: mode.close())
        entry, preload, question = _ENTRIES[config.worker.executor_spawn_mode]
        relay = LogRelay()
        self._later(lambda _grace: relay.close())
        spawner = ForkserverSpawner(
            entry,
            [preload],
            environment,
            [package_folder()],
            folder=str(folder.path),
            open_log=None if question is None else relay.open,
        )
        self._later(lambda _grace: spawner.stop())
        try:
            spawner.start()
            if question is not None:
                relay.start()
                mode.prepare(partial(spawner.ask, question), self._launch(0, folder))
                _tell_mode(mode)
        except SpawnError as error:
            raise UsageError(f"executors cannot start: {error}") from None
        launches = [mode.dress(self._launch(slot, folder)) for slot in range(slots)]
        pool = self._pool = ExecutorPool(
            config.worker,
            spawner,
            launches,
            table,
            self,
            heartbeat_fd=table_fd,
            was_out_of_memory=mode.was_out_of_memory,
        )
        self._later(pool.stop)
        io = self._io = IoService(
            self._loaded, lambda replies: self._reactor.post(IoAnswered(replies))
        )
        io.start()
        self._later(lambda _grace: io.stop())
        self._start_actor(table, launches)
        pool.start()

    def _make_mode(self, folder: SocketFolder, environment: Mapping[str, str]) -> SpawnMode:
        worker, limit_bytes = self._loaded.config.worker, self._memory_limits.limit_bytes
        if worker.executor_spawn_mode == "process":
            return PlainProcesses(worker, limit_bytes)
        if "OTEL_EXPORTER_OTLP_ENDPOINT" in os.environ:
            logger.warning(
                "executors without network reach no collector: no spans are sent",
                instead="BLOCKX_OTEL_SPAN_FILE",
            )
        read_only = [str(self._loaded.resolve(path)) for path in worker.sandbox_read_only_paths]
        if worker.executor_spawn_mode == "oci":
            return OciContainers(worker, limit_bytes, environment, read_only, folder.path)
        point = str(folder.mount_point())
        return Sandbox(worker, limit_bytes, mount_point=point, read_only=read_only)

    def _launch(self, slot: int, folder: SocketFolder) -> ExecutorLaunch:
        config = self._loaded.config
        executor_id = f"exec-{slot}"
        return ExecutorLaunch(
            executor_id=executor_id,
            slot_index=slot,
            socket_path=str(folder.slot_socket(executor_id, self._mode.uid(slot))),
            heartbeat_interval_ms=config.worker.heartbeat_interval_ms,
            executor_max_inflight=config.dispatcher.executor_max_inflight,
            executor_max_runnable=config.dispatcher.executor_max_runnable,
            memory_mark_bytes=self._memory_limits.recycle_bytes,
            requires_audit=config.functions.mode == "restricted",
        )

    def _start_actor(self, table: HeartbeatTable, launches: Sequence[ExecutorLaunch]) -> None:
        config = self._loaded.config
        assert self._pool is not None
        adapter = ExecutorAdapter(
            selector=self._reactor,
            pool=self._pool,
            table=table,
            executor_max_inflight=config.dispatcher.executor_max_inflight,
            check_pid=config.worker.attach == "pool",
            now_ms=monotonic_ms,
            call_limits=config.dispatcher.call_limits,
            spawned_pid=parent_of if self._mode.has_own_pids else int,
        )
        adapter.traces = self._traces
        stall_ms = stall_timeout_ms(config.dispatcher)
        core = DispatcherCore(
            config.dispatcher,
            task_slots=config.admission.executor_task_slots,
            stall_timeout_ms=stall_ms,
            rng=random.Random(self.run_id),
        )
        watchdog = Watchdog(
            adapter, stall_timeout_ms=stall_ms, heartbeat_timeout_ms=heartbeat_timeout_ms(config)
        )
        orchestrator = self._orchestrator = Orchestrator(
            reactor=self._reactor,
            core=core,
            adapter=adapter,
            io=_IoRequests(self._io_for_calls()),
            watchdog=watchdog,
            memory_guard=MemoryGuard(adapter, self._memory, self._memory_limits, monotonic_ms),
        )
        for launch in launches:
            uid = self._mode.uid(launch.slot_index)
            adapter.listen(launch.executor_id, launch.slot_index, Path(launch.socket_path), uid)
        actor = self._actor = _Worker("blockx-actor", orchestrator.run, self.wake)
        actor.start()
        self._later(lambda _grace: self._stop_actor(adapter))

    def _io_for_calls(self) -> "IoService | _ReadsOnly":
        if not self._reads_only:
            return self._io
        capabilities = self._loaded.config.backends.capabilities
        return _ReadsOnly(
            self._io,
            {name: capability.reads_only for name, capability in capabilities.items()},
            lambda reply: self._reactor.post(IoAnswered([reply])),
        )

    def _stop_actor(self, adapter: ExecutorAdapter) -> None:
        assert self._actor is not None
        self._reactor.stop()
        self._actor.join(JOIN_S)
        adapter.close()
        self._reactor.close()

    def _later(self, stop: Callable[[float], Any]) -> None:
        self._parts_to_stop.append(stop)

    def turn(self, timeout_s: float) -> None:
        """Look after executors for at most ``timeout_s``; notice a dead actor."""
        assert self._pool is not None
        assert self._actor is not None
        self._pool.turn(timeout_s)
        if self._actor.error is not None and self.failure is None:
            self.failure = self._actor.error

    def wake(self) -> None:
        """Let ``turn`` return at once; also allowed in a signal handler."""
        if self._pool is not None:
            self._pool.wake()

    def stop(self, grace_s: float) -> None:
        """Stop what was started, in reverse order; nothing is left.

        The actor goes first and closes the sockets: executors end by themselves at the end-of-file.
        """
        while self._parts_to_stop:
            self._parts_to_stop.pop()(grace_s)

    def running_calls(self) -> int | None:
        """Calls on executors or waiting for a read, over all tasks."""
        if self._orchestrator is None:
            return None
        return sum(
            running + waiting for _ready, running, waiting in self._orchestrator.gauges.values()
        )

    def executor_numbers(self) -> dict[str, Any]:
        """``executors`` of the report."""
        counts = PoolCounts() if self._pool is None else self._pool.counts()
        kinds = {"lost": counts.lost, "killed": counts.killed, "recycled": counts.recycled}
        mode, effective = self._loaded.config.worker.executor_spawn_mode, self._mode.effective()
        return {
            "spawn_mode": mode,
            **({mode: dict(effective)} if effective else {}),
            "restarts": counts.restarts,
            **{name: sum(reasons.values()) for name, reasons in kinds.items()},
            "reasons": {name: dict(reasons) for name, reasons in kinds.items() if reasons},
        }

    # ---- PoolListener, main thread -------------------------------------------------------------

    def executor_spawned(self, executor_id: str, pid: int) -> None:
        """A process lives."""
        self._reactor.post(ExecutorSpawned(executor_id, pid))

    def executor_exited(self, report: ExitReport) -> None:
        """It is dead and reaped."""
        self._reactor.post(
            ExecutorExited(
                report.executor_id,
                report.pid,
                report.exit_code,
                report.last_scheduler,
                report.out_of_memory,
            )
        )

    def pool_failed(self, message: str) -> None:
        """No executor can start: the run ends with that text."""
        self.failure = UsageError(message)

    # ---- Dispatch, jobs thread -----------------------------------------------------------------

    def open(self, task: TaskSpec, view: FunctionView, port: JobPort) -> None:
        """Announce a task."""
        self._reactor.post(OpenTask(task, view, port))

    def keep_pins(self, task_id: str, pins: Pins, on_pins: Callable[[str, Pins], None]) -> None:
        """Begin a task with blocks that an earlier run pinned, and tell of further ones."""
        self._io.keep_pins(task_id, pins, on_pins)

    def submit(self, task_id: str, batch_id: int, calls: list[CallSpec]) -> None:
        """Hand over one stream batch."""
        self._reactor.post(StreamBatchSubmitted(task_id, batch_id, calls, monotonic_ms()))

    def end_production(self, task_id: str) -> None:
        """No further stream batch will come."""
        self._reactor.post(ProductionEnded(task_id))

    def cancel(self, task_id: str, drain: bool) -> None:
        """Stop a task."""
        self._reactor.post(TaskCancelled(task_id, drain, monotonic_ms()))

    def remove(self, task_id: str) -> None:
        """Forget a task."""
        self._reactor.post(TaskRemoved(task_id))

    def statistics(self, task_id: str) -> Statistics:
        """Numbers of a task's reads; asked once, when it has ended."""
        return self._io.statistics(task_id)


def _tell_mode(mode: SpawnMode) -> None:
    logger.info("executors are confined", **mode.effective())
    advice = mode.advice()
    if advice:
        logger.warning("executors are confined, and could be more tightly", what_to_do=advice)


class _ReadsOnly:
    """In front of the io side in a dry run: what is not known to be a read is refused.

    A GET is a read by the rules of HTTP; what a capability does only the configuration can tell.
    """

    def __init__(
        self,
        io: IoService,
        capabilities: Mapping[str, bool],
        answer: Callable[[IoReply], None],
    ) -> None:
        """``capabilities``: whether each of them only reads."""
        self.task_ended, self.cancel = io.task_ended, io.cancel
        self._io = io
        self._capabilities = capabilities
        self._answer = answer

    def submit(self, requests: list[IoRequest]) -> None:
        """Pass reads on, answer the others."""
        self._io.submit([request for request in requests if self._is_read(request)])
        for request in requests:
            if not self._is_read(request):
                text = f"{request.operation}: a dry run only reads"
                if request.backend in self._capabilities:
                    key = f"backends.capabilities.{request.backend}.reads_only"
                    text += f"; {key}: true says that this service does nothing else"
                error = WireError(kind=ErrorKind.IO_ERROR, message=text)
                self._answer(IoReply(request, error=error))

    def _is_read(self, request: IoRequest) -> bool:
        if request.backend == "rpc":
            return request.operation in READ_METHODS
        if request.backend == "http":
            return request.operation == "GET"
        if request.backend == "blockdb":
            return not request.write
        return self._capabilities.get(request.backend, False)


def _memory_limits(loaded: LoadedConfig, memory: MachineMemory) -> MemoryLimits:
    worker = loaded.config.worker
    limit_bytes = executor_memory_limit_bytes(worker, memory.total_bytes)
    return MemoryLimits(
        limit_bytes=limit_bytes,
        recycle_bytes=executor_recycle_memory_bytes(worker, limit_bytes),
        recycle_calls=worker.executor_recycle_calls,
    )


class _IoRequests:
    """Turns frames of waiting calls into requests of the io side."""

    def __init__(self, io: "IoService | _ReadsOnly") -> None:
        self._io = io
        self.task_ended = io.task_ended

    def cancel(self, call_ids: Sequence[str]) -> None:
        """IoPort: these attempts have ended."""
        self._io.cancel(list(call_ids))

    def submit_waiting(self, waiting: Sequence[tuple[str, CallWaiting, bytes | None]]) -> None:
        """IoPort: a group for one turn of the actor."""
        self._io.submit([_io_request(*entry) for entry in waiting])


def _io_request(executor_id: str, message: CallWaiting, sidecar: bytes | None) -> IoRequest:
    payload = message.payload
    return IoRequest(
        executor_id=executor_id,
        task_id=payload.task_id,
        call_id=message.call_id,
        attempt_seq=payload.attempt_seq,
        request_id=message.request_id,
        backend=payload.backend,
        operation=payload.operation,
        params=bytes(payload.params),
        sidecar=sidecar,
        write=payload.write,
        cache_key=payload.cache_key,
        budget_left_ms=payload.budget_left_ms,
    )


class _Worker(threading.Thread):
    """A thread of ours: keeps its result or the error that ended it, and says when it ends."""

    def __init__(self, name: str, body: Callable[[], Any], on_end: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._body = body
        self._on_end = on_end
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """The thread's body."""
        try:
            self.result = self._body()
        except BaseException as error:  # noqa: BLE001 - kept whole; the main thread raises it
            self.error = error
        finally:
            self._on_end()


class _Signals:
    """SIGINT and SIGTERM, counted; the handlers only enqueue."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.count = 0
        self.first: int = 0
        self._wake = wake
        self._before = {
            n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)
        }

    def _on_signal(self, number: int, _frame: Any) -> None:
        self.first = self.first or number
        self.count += 1
        self._wake()

    def restore(self) -> None:
        """Give the handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
