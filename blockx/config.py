"""The configuration: frozen structs, strict YAML, environment overrides, cross-checks.

Nothing else reads the environment or the file. Every key has its unit in its name, its meaning
below it, and the meaning of zero. Unknown keys are refused with line, column and a suggestion;
limits are checked against each other. Paths are relative to the file. Names and defaults: the
specification, "Configuration", and the design, section 6.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from blockx.errors import UsageError
from blockx.redact import redact_database_url, redact_text, redact_url

if TYPE_CHECKING:
    from blockx.strict_yaml import Document, KeyPath

Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Positive = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Millis = Annotated[int, Meta(ge=0, le=365 * 24 * 3_600_000)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


class WorkerConfig(_Section, frozen=True, kw_only=True):
    """The pool of executor processes."""

    executor_count: Annotated[int, Meta(ge=1, le=256)] = 8
    """Executor processes. Environment: EXECUTOR_COUNT."""
    executor_spawn_mode: Literal["process", "sandbox", "oci"] = "process"
    """process: a process of the same user, for functions that you trust. sandbox: one without
    network, files and privileges, for functions that you do not. oci: the same in a container of
    runc. Environment: EXECUTOR_SPAWN_MODE."""
    attach: Literal["pool", "same_uid"] = "pool"
    """Who may connect: only processes of the pool, or any process of the same user."""
    default_max_attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """Charged attempts of one call. Environment: CALL_RETRY_MAX_ATTEMPTS."""
    executor_restart_delay_ms: Millis = 1_000
    """Pause before a dead executor is replaced. 0: at once."""
    executor_max_restarts: Positive = 10
    """Restarts within the window before the slot backs off."""
    executor_restart_window_ms: Millis = 60_000
    """Length of that window."""
    executor_backoff_ms: Millis = 30_000
    """Pause of a slot that restarted too often."""
    heartbeat_interval_ms: Annotated[int, Meta(ge=10, le=60_000)] = 1_000
    """How often an executor's helper thread shows that it is alive."""
    executor_memory_limit_bytes: Bytes = 0
    """Resident memory of one executor at which it is killed; the call that filled it is charged. 0:
    derived, its share of three quarters of the memory of the machine or control group, at least 512
    MiB."""
    executor_recycle_memory_bytes: Bytes = 0
    """Resident memory above which an executor is drained and replaced. 0: derived, three quarters of
    the limit."""
    executor_recycle_calls: Count = 0
    """Finished calls after which an executor is drained and replaced. 0: never."""
    executor_address_space_bytes: Bytes = 0
    """Reserved memory of one executor; an allocation past it raises MemoryError in the call. 0: no
    limit; in a sandbox the memory limit + 1 GiB, since threads and libraries reserve more than they
    use."""
    executor_open_files_max: Annotated[int, Meta(ge=0, le=1_048_576)] = 0
    """Open descriptors of one executor, at least 64. 0: as main has it; in a sandbox 256."""
    oci_runtime: str = "runc"
    """Program that runs containers, by name or path; with the command line of runc."""
    oci_root: str = ""
    """Folder with the root file system of an image that has Python and blockx. Empty: those of this
    machine, read-only."""
    oci_python: str = "python3"
    """Interpreter in oci_root, by its path there or by name."""
    sandbox_threads_max: Annotated[int, Meta(ge=0, le=100_000)] = 64
    """Threads of one executor in a sandbox, its own two or three among them. 0: no limit."""
    sandbox_cpu_percent: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """CPU time of one executor in a sandbox, 100: one core; needs a writable control group. 0: no
    limit."""
    sandbox_tmp_bytes: Bytes = 64 * 1024 * 1024
    """Size of the private /tmp of a sandbox; its content counts as memory. 0: nothing is writable."""
    sandbox_file_bytes_max: Bytes = 1024 * 1024 * 1024
    """Largest file that an executor in a sandbox may write, the log included. 0: no limit."""
    sandbox_read_only_paths: list[str] = []
    """Files and folders that functions in a sandbox may read, besides installed packages."""
    sandbox_pid_namespace: bool = False
    """Hide the numbers of other processes from a sandbox; costs a small process and 5 ms each."""
    sandbox_first_uid: Annotated[int, Meta(ge=1, le=2**31 - 1_000)] = 65_000
    """Where main is root, an executor in a sandbox gets this user and group id plus its number."""
    heartbeat_timeout_ms: Millis = 0
    """Silence after which an executor is lost. 0: derived, stall timeout + 5,000 (at least
    10,000)."""


class CallLimitsConfig(_Section, frozen=True, kw_only=True):
    """Limits of the parts of a call's budget, for one attempt; the whole is call_deadline_ms."""

    cpu_ms: Millis = 0
    """CPU time. 0: no limit of its own."""
    io_ms: Millis = 0
    """Time of reads and writes at their backend. 0: no limit of its own."""
    subcall_ms: Millis = 0
    """Time of the functions that it calls. 0: no limit of its own."""
    sleep_ms: Millis = 0
    """Time asleep. 0: no limit of its own."""


class DispatcherConfig(_Section, frozen=True, kw_only=True):
    """Which call runs where, and its limits."""

    executor_max_inflight: Annotated[int, Meta(ge=1, le=100_000)] = 128
    """Root calls resident in one executor (0 is refused: nothing could run)."""
    executor_max_runnable: Annotated[int, Meta(ge=1, le=100_000)] = 128
    """Runnable calls of one executor above which it gets no more."""
    executor_selection_sample_size: Count = 0
    """Eligible executors scored for one call; 0: all. Environment:
    EXECUTOR_SELECTION_SAMPLE_SIZE."""
    executor_memory_high_watermark: Bytes = 0
    """RSS in bytes above which an executor gets no more calls. 0: off."""
    task_max_inflight_calls: Positive = 1_024
    """Root calls of one task in flight at once."""
    call_deadline_ms: Millis = 5_000
    """Budget of one root attempt: CPU + IO + sub-calls + sleep, not queueing. 0: no limit.
    Environment: CALL_DEADLINE_MS."""
    call_limits: CallLimitsConfig = CallLimitsConfig()
    """Further limits of its parts."""
    scheduler_stall_timeout_ms: Millis = 0
    """A call that holds its executor this long gets it killed. 0: derived, call_deadline_ms +
    5,000; with call_deadline_ms 0: never. Environment: SCHEDULER_STALL_TIMEOUT_MS."""
    max_subcall_depth: Annotated[int, Meta(ge=0, le=100)] = 8
    """How deep functions may call each other. 0: not at all."""
    base_backoff_ms: Millis = 10
    """First pause before a charged retry; doubles each time, with up to 5 % jitter."""
    instance_fairness: Literal["off", "calls", "cost"] = "off"
    """Max-min fairness between instances, by weight. calls: places, root calls in flight. cost: CPU
    + IO time of their calls; for instances whose calls differ in length. The variable also takes
    false (off) and true (calls). Environment: DISPATCH_INSTANCE_FAIRNESS."""
    instance_fairness_quantum: Annotated[int, Meta(ge=0, le=1_024)] = 0
    """Consecutive calls served to one instance; 0 and 1: choose anew for each. Environment:
    DISPATCH_INSTANCE_FAIRNESS_QUANTUM."""
    max_collected_output_bytes: Bytes = 0
    """Output bytes of one task; past it the task stops and its outputs are discarded. 0: no limit.
    Environment: MAX_COLLECTED_OUTPUT_BYTES."""
    call_cache_max_bytes: Bytes = 64 * 1024 * 1024
    """Result cache of one task, least recently used first out. 0: off."""
    share_results: bool = True
    """Equal calls of a task run once (result cache and singleflight)."""


class AdmissionConfig(_Section, frozen=True, kw_only=True):
    """Tasks at once."""

    executor_task_slots: Positive = 32
    """Tasks that have calls in flight at once; further ones wait. Environment:
    EXECUTOR_TASK_SLOTS."""


class StreamBuildConfig(_Section, frozen=True, kw_only=True):
    """Production of call lists: credit-based flow control."""

    max_outstanding_batches: Annotated[int, Meta(ge=1, le=64)] = 2
    """Stream batches on their way at once."""
    batch_max_rows: Annotated[int, Meta(ge=1, le=1_000_000)] = 8_192
    """Calls in one stream batch."""
    batch_max_args_bytes: Annotated[int, Meta(ge=1, le=1 << 31)] = 32 * 1024 * 1024
    """Bytes of arguments in one stream batch."""


class FunctionsConfig(_Section, frozen=True, kw_only=True):
    """Where user functions are."""

    path: str = "functions"
    """Folder of .py files; a function's id is its path without suffix."""
    mode: Literal["open", "restricted"] = "open"
    """open: any Python; restricted: what the audit accepts, in a namespace of its own."""
    env: list[str] = []
    """Names of environment variables that functions may see."""


class RpcUrlConfig(_Section, frozen=True, kw_only=True):
    """What differs for one url of a chain."""

    weight: Annotated[int, Meta(ge=0, le=1_000)] = 0
    """Its share of the requests among urls with a weight. 0: a reserve, or, if none has a weight, used
    in the order of the list."""
    posts_max: Annotated[int, Meta(ge=0, le=256)] = 0
    """HTTP requests on their way to it at once. 0: the chain's posts_max."""
    batch_max: Annotated[int, Meta(ge=0, le=1_000)] = 0
    """Requests in one RPC batch, at most the chain's batch_max. 0: that one."""
    requests_per_s: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """JSON-RPC requests a second. 0: no limit."""


class RpcBackendConfig(_Section, frozen=True, kw_only=True):
    """One chain and its nodes."""

    urls: Annotated[list[str], Meta(min_length=1, max_length=32)]
    """http(s) urls, the first is preferred."""
    per_url: dict[str, RpcUrlConfig] = {}
    """Url -> what differs for it: weight and limits."""
    batch_max: Annotated[int, Meta(ge=1, le=1_000)] = 100
    """Requests in one RPC batch; 1: single requests."""
    posts_max: Annotated[int, Meta(ge=1, le=256)] = 8
    """HTTP requests on their way to one url at once."""
    multicall_max: Annotated[int, Meta(ge=0, le=1_000)] = 0
    """``eth_call``s at one block that leave as one call of the contract Multicall3, on a chain that has it;
    below 2: off. Only for functions that read: the sender is then Multicall3 and no longer nobody, calls of
    one group share the gas that the node allows a call, and what one of them would change the next one sees.
    Calls with a sender, value, gas or overrides never leave so, and one that fails is asked again singly."""
    merge_reads: bool = True
    """Identical reads in flight are sent once."""
    read_cache_bytes: Bytes = 64 * 1024 * 1024
    """Cache of reads at a pinned block, for one task, least recently used first out. 0: off."""
    timeout_ms: Annotated[int, Meta(ge=1, le=600_000)] = 10_000
    """Wait for one HTTP answer before the url counts as unavailable."""


class TableConfig(_Section, frozen=True, kw_only=True):
    """One table of the store."""

    key: Annotated[list[str], Meta(min_length=1, max_length=16)]
    """Its key columns."""


class BlockdbConfig(_Section, frozen=True, kw_only=True):
    """Tables: in a store (a SQLite file or PostgreSQL), held in memory, or some of each."""

    path: str = ""
    """SQLite file of the embedded store; made when missing."""
    url: str = ""
    """A store elsewhere, instead of a file: ``postgresql://`` url of a database (extra ``postgres``; without a
    password there, PGPASSWORD or ~/.pgpass has it), or ``grpc://host:port`` (``grpcs://`` with TLS) of a
    table server (extra ``grpc``)."""
    schema: Annotated[
        str,
        Meta(
            pattern=r"^[a-z_][a-z0-9_]{0,62}$", description="a name of small letters, digits and _"
        ),
    ] = "blockx"
    """PostgreSQL: the schema that holds the tables; made when missing."""
    connections_max: Annotated[int, Meta(ge=1, le=64)] = 4
    """PostgreSQL: connections at once; further reads wait and then leave together."""
    timeout_ms: Annotated[int, Meta(ge=1, le=600_000)] = 10_000
    """PostgreSQL: wait for one statement; longer counts as unavailable."""
    memory: dict[str, str] = {}
    """Table name -> JSONL file of its rows; read-only, held in memory."""
    coalesce: bool = True
    """Reads of suspended calls are answered together."""
    tables: dict[str, TableConfig] = {}
    """Declared tables."""


class ReadCacheConfig(_Section, frozen=True, kw_only=True):
    """Answers of reads at final blocks, kept on disk between runs."""

    path: str = ""
    """SQLite file, made when missing; one for all chains. Empty: none."""
    max_bytes: Annotated[int, Meta(ge=1_000_000, le=1 << 46)] = 1024 * 1024 * 1024
    """Bytes of answers. Full: those that no run has used for longest go."""


class HttpBackendConfig(_Section, frozen=True, kw_only=True):
    """What ``blockx.http`` may reach."""

    hosts: list[str] = []
    """Allowed hosts: ``name`` (any port), ``name:port``, ``*.name`` (what is below it). Empty: none."""
    timeout_ms: Annotated[int, Meta(ge=1, le=600_000)] = 10_000
    """Wait for one answer."""
    inflight_max: Annotated[int, Meta(ge=1, le=10_000)] = 64
    """Requests on their way at once; further ones wait."""
    body_bytes_max: Annotated[int, Meta(ge=1, le=10 * 1024 * 1024)] = 8 * 1024 * 1024
    """Bytes of one answer. More: the request fails."""


class CapabilityConfig(_Section, frozen=True, kw_only=True):
    """A service that functions reach as ``blockx.capability(name)``."""

    kind: str
    """``grpc``, or the name of an entry point of the group ``blockx.backends``."""
    options: dict[str, Any] = {}
    """Its own settings; for grpc: target (host:port), tls (false), timeout_ms (10000),
    reads ([]: methods that only read), cache_bytes (0: bytes of their answers kept for a job)."""
    reads_only: bool = False
    """None of its operations changes anything, so a dry run may ask it."""


class BackendsConfig(_Section, frozen=True, kw_only=True):
    """What a waiting call can read."""

    rpc: dict[str, RpcBackendConfig] = {}
    """Chain name -> its nodes."""
    rpc_posts_per_s: Annotated[int, Meta(ge=0, le=1_000_000)] = 5_000
    """HTTP requests a second to all nodes together, so that a node that takes no batches cannot make the io
    thread crowd out the dispatcher (one costs it 50 to 60 us). Batches only get larger. 0: no limit."""
    read_cache: ReadCacheConfig = ReadCacheConfig()
    blockdb: BlockdbConfig = BlockdbConfig()
    http: HttpBackendConfig = HttpBackendConfig()
    capabilities: dict[str, CapabilityConfig] = {}
    """Name -> the service behind it."""


class JobConfig(_Section, frozen=True, kw_only=True):
    """One call list and where its outcomes go."""

    name: Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^/@\s]+$")]
    """Unique in the file; call ids are ``{name}/{index}``."""
    function: str = ""
    """Default function of the list."""
    calls: str | list[Any] | dict[str, Any]
    """A file, one call a line (.jsonl) or row (.csv); the calls themselves; or keys that say what they
    are made of: csv, range, product, sqlite, table (see the README)."""
    results: str = ""
    """One record a call, in list order (JSONL). Empty: not kept."""
    output: str = ""
    """The rows alone: .jsonl, .csv, .sqlite, .parquet, or table:NAME. Empty: not kept."""
    schema: dict[str, Literal["int64", "uint256", "int256", "double", "bool", "text", "json"]] = {}
    """Columns of output and their kinds, in order. Empty: inferred from the first 1,000 rows."""
    failures: str = ""
    """Failed calls, in a form that ``calls`` takes. Empty: not kept."""
    instance: str = ""
    """Fairness group. Empty: the job's name."""
    weight: Annotated[int, Meta(ge=1, le=1_000)] = 1
    """Share of its instance under fair admission."""
    failure_policy: Literal["continue", "fail_fast", "stop_above_ratio"] = "continue"
    """fail_fast: the first failed call stops the job; stop_above_ratio: more than a share of them
    does. Running calls end, no further one starts."""
    failure_ratio_max: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """stop_above_ratio: the share of failed among ended calls above which the job stops."""
    failure_calls_min: Positive = 100
    """stop_above_ratio: calls that must have ended before the share is looked at."""
    max_attempts: Annotated[int, Meta(ge=0, le=100)] = 0
    """Charged attempts of one call. 0: worker.default_max_attempts."""
    call_deadline_ms: Millis | None = None
    """Overrides dispatcher.call_deadline_ms. 0: no limit."""
    deadline_ms: Millis = 0
    """Wall time of the whole job, of each run of it. 0: no limit."""
    max_inflight: Annotated[int, Meta(ge=0, le=100_000)] = 0
    """Root calls of the job in flight at once. 0: dispatcher.task_max_inflight_calls alone limits it."""
    after: list[str] | None = None
    """Jobs whose end it waits for. Not given: all before it, or with parallel none."""


class RunConfig(_Section, frozen=True, kw_only=True):
    """How a run behaves."""

    grace_ms: Millis = 5_000
    """Time for running calls to end after SIGINT or SIGTERM."""
    io_wait_max_ms: Millis = 60_000
    """Longest a read is retried while its call waits."""
    journal: bool = True
    """Keep a journal of finished calls beside the outputs, so that a stopped job resumes."""
    reorder_memory_bytes: Bytes = 64 * 1024 * 1024
    """Finished results held for list order; more goes to a temporary file beside the outputs."""


class LogConfig(_Section, frozen=True, kw_only=True):
    """What is logged, to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    """Least level shown. Environment: BLOCKX_LOG_LEVEL."""


class Config(_Section, frozen=True, kw_only=True):
    """The whole file."""

    jobs: list[JobConfig] = []
    worker: WorkerConfig = WorkerConfig()
    dispatcher: DispatcherConfig = DispatcherConfig()
    admission: AdmissionConfig = AdmissionConfig()
    stream_build: StreamBuildConfig = StreamBuildConfig()
    functions: FunctionsConfig = FunctionsConfig()
    backends: BackendsConfig = BackendsConfig()
    run: RunConfig = RunConfig()
    log: LogConfig = LogConfig()
    report: str = ""
    """JSON report of the run. Empty: printed only."""
    parallel: bool = False
    """Jobs run side by side; those with after wait for the jobs that they name."""


class LoadedConfig(msgspec.Struct, frozen=True):
    """A configuration and where it came from."""

    config: Config
    file: Path
    folder: Path
    """Absolute; paths of the configuration are relative to it."""

    def resolve(self, path: str) -> Path:
        """An absolute path for one of the configuration."""
        return self.folder / path


def waits_for(config: Config) -> dict[str, set[str]]:
    """Job -> jobs whose end it waits for."""
    before: set[str] = set()
    waits: dict[str, set[str]] = {}
    for job in config.jobs:
        if job.after is not None:
            waits[job.name] = set(job.after)
        else:
            waits[job.name] = set() if config.parallel else set(before)
        before.add(job.name)
    return waits


def stall_timeout_ms(dispatcher: DispatcherConfig) -> int:
    """The effective wedge threshold: explicit if it leaves room over the budget, else derived. 0:
    never."""
    budget_ms, explicit_ms = dispatcher.call_deadline_ms, dispatcher.scheduler_stall_timeout_ms
    if budget_ms == 0:
        return explicit_ms
    return explicit_ms if explicit_ms > budget_ms + 1_000 else budget_ms + 5_000


def heartbeat_timeout_ms(config: Config) -> int:
    """The effective silence after which an executor is lost; above the stall time, or "lost" would
    hide "wedged"."""
    return config.worker.heartbeat_timeout_ms or max(
        10_000, stall_timeout_ms(config.dispatcher) + 5_000
    )


OPEN_FILES_MIN = 64
"""Fewer descriptors, and imports fail."""
ADDRESS_SPACE_BYTES_MIN = 512 * 1024 * 1024
"""What an executor reserves before it runs a call, with room for a library."""
SANDBOX_THREADS_MIN = 4
"""The executor's own threads, and one for calls."""
EXECUTOR_MEMORY_BYTES_MIN = 512 * 1024 * 1024
"""Least derived memory limit of an executor: Python with a few large libraries."""


def executor_memory_limit_bytes(worker: WorkerConfig, machine_bytes: int) -> int:
    """The effective memory limit of one executor, on a machine or in a control group of that size."""
    share_bytes = machine_bytes * 3 // 4 // worker.executor_count
    return worker.executor_memory_limit_bytes or max(EXECUTOR_MEMORY_BYTES_MIN, share_bytes)


def executor_recycle_memory_bytes(worker: WorkerConfig, limit_bytes: int) -> int:
    """The effective mark above which an executor is drained and replaced."""
    return worker.executor_recycle_memory_bytes or limit_bytes * 3 // 4


def executor_address_space_bytes(worker: WorkerConfig, limit_bytes: int) -> int:
    """The effective limit of reserved memory. 0: none."""
    derived_bytes = limit_bytes + 1024 * 1024 * 1024
    return worker.executor_address_space_bytes or (
        0 if worker.executor_spawn_mode == "process" else derived_bytes
    )


SANDBOX_OPEN_FILES = 256
"""Descriptors of an executor in a sandbox, if the configuration does not say."""

FILE_BYTES_MAX = 16 * 1024 * 1024
"""Size of a configuration file. Larger: refused; long call lists belong into a file of their
own."""
MISTAKES_MAX = 20
"""Mistakes shown at once; the rest is counted."""

ENVIRONMENT: Mapping[str, tuple[str, str]] = {
    "EXECUTOR_COUNT": ("worker", "executor_count"),
    "EXECUTOR_SPAWN_MODE": ("worker", "executor_spawn_mode"),
    "CALL_RETRY_MAX_ATTEMPTS": ("worker", "default_max_attempts"),
    "EXECUTOR_SELECTION_SAMPLE_SIZE": ("dispatcher", "executor_selection_sample_size"),
    "CALL_DEADLINE_MS": ("dispatcher", "call_deadline_ms"),
    "SCHEDULER_STALL_TIMEOUT_MS": ("dispatcher", "scheduler_stall_timeout_ms"),
    "DISPATCH_INSTANCE_FAIRNESS": ("dispatcher", "instance_fairness"),
    "DISPATCH_INSTANCE_FAIRNESS_QUANTUM": ("dispatcher", "instance_fairness_quantum"),
    "MAX_COLLECTED_OUTPUT_BYTES": ("dispatcher", "max_collected_output_bytes"),
    "EXECUTOR_TASK_SLOTS": ("admission", "executor_task_slots"),
    "BLOCKX_LOG_LEVEL": ("log", "level"),
}
"""Variable (the specification's name) -> section and key it overrides. Set but empty: as if not
set."""

_OLD_SPELLINGS = {
    # The specification's variable is a boolean.
    ("dispatcher", "instance_fairness"): {
        "false": "off",
        "0": "off",
        "true": "calls",
        "1": "calls",
    },
}


def load_config(path: Path, environ: Mapping[str, str]) -> LoadedConfig:
    """Read, check and complete a configuration file.

    ``environ`` is consulted for the names in ``ENVIRONMENT`` only. Blocking file read; any thread.

    Raises:
        UsageError: one line for each mistake (at most ``MISTAKES_MAX``), each with file, line and
        column.
    """
    # Imported here: executors import the structs above and must not pay for a YAML library.
    from blockx.strict_yaml import parse

    document = parse(_read(path), str(path))
    tree = {} if document.value is None else document.value
    _raise_all(_mistakes_of(tree, Config, document, ()))
    config = _with_environment(msgspec.convert(tree, Config), environ)
    folder = path.absolute().parent
    loaded = LoadedConfig(config=config, file=folder / path.name, folder=folder)
    _raise_all(_cross_checks(loaded, document))
    return loaded


def overrides(environ: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """(section, key) -> name of the variable that overrides it in this environment."""
    return {target: name for name, target in ENVIRONMENT.items() if environ.get(name)}


def describe(loaded: LoadedConfig, environ: Mapping[str, str]) -> str:
    """The effective configuration as YAML, every key shown, derived limits in comments.

    Urls are shown without credentials; inline calls are counted, not shown.
    """
    import yaml

    config = loaded.config
    tree = msgspec.to_builtins(config)
    for chain in tree["backends"]["rpc"].values():
        _redact_urls(chain)
    tree["backends"]["blockdb"]["url"] = redact_database_url(config.backends.blockdb.url)
    for service in tree["backends"]["capabilities"].values():
        service["options"] = dict.fromkeys(
            service["options"], "***"
        )  # there may be keys among them
    for job in tree["jobs"]:
        if isinstance(job["calls"], list):
            job["calls"] = f"({len(job['calls'])} calls in the file itself)"
    stall_ms = stall_timeout_ms(config.dispatcher)
    lines = [
        f"# effective configuration of {loaded.file}",
        f"# an executor counts as stuck after: {f'{stall_ms} ms' if stall_ms else 'never'}",
        f"# an executor counts as lost after: {heartbeat_timeout_ms(config)} ms of silence",
        *(f"# {s}.{k} comes from {name}" for (s, k), name in sorted(overrides(environ).items())),
    ]
    body = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    return "\n".join(lines) + "\n" + body


def _redact_urls(chain: dict[str, Any]) -> None:
    """Of two urls that look alike then, the settings of each say which one they are for."""
    shown = [redact_url(url) for url in chain["urls"]]
    names = {
        url: name if shown.count(name) == 1 else f"{name} (url {number})"
        for number, (url, name) in enumerate(zip(chain["urls"], shown, strict=True), 1)
    }
    chain["per_url"] = {names[url]: own for url, own in chain["per_url"].items()}
    chain["urls"] = shown


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; name the configuration with --config") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise UsageError(
            f"{path}: larger than {FILE_BYTES_MAX:,} bytes; put long call lists into a file of their own"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path}:{line}: not UTF-8 text: {error.reason}; save the file as UTF-8"
        ) from None


def _raise_all(mistakes: Iterator[str]) -> None:
    found = list(mistakes)
    if found:
        more = len(found) - MISTAKES_MAX
        raise UsageError(
            "\n".join([*found[:MISTAKES_MAX], *([f"and {more} more mistakes"] if more > 0 else [])])
        )


# ---- the shape: every key known, every value of its type
# --------------------------------------------


def _mistakes_of(value: Any, kind: Any, document: "Document", path: "KeyPath") -> Iterator[str]:
    """Walk the value beside its type, so that every mistake has its own place and none hides
    another."""
    bare, parameters = _bare(kind)
    if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
        if isinstance(value, dict):
            yield from _mistakes_of_section(value, bare, document, path)
        else:
            yield f"{document.at(path)}: {_dotted(path) or 'the file'}: expected keys with values, got {_shown(value)}"
        return
    if bare is list and isinstance(value, list) and parameters != (Any,):
        for index, item in enumerate(value):
            yield from _mistakes_of(item, parameters[0], document, (*path, index))
    elif bare is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from _mistakes_of(item, parameters[1], document, (*path, key))
    else:
        parameters = ()
    if not parameters or not _has_section(parameters[-1]):
        yield from _mistake_of_leaf(value, kind, document, path, inner=bool(parameters))


def _mistakes_of_section(
    value: dict[str, Any],
    kind: type[msgspec.Struct],
    document: "Document",
    path: "KeyPath",
) -> Iterator[str]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key, item in value.items():
        if key in fields:
            yield from _mistakes_of(item, fields[key].type, document, (*path, key))
            continue
        near = difflib.get_close_matches(key, fields, 1)
        hint = (
            f"did you mean {_dotted((*path, near[0]))}?"
            if near
            else f"known keys: {', '.join(fields)}"
        )
        yield f"{document.at((*path, key), key=True)}: unknown key {_dotted((*path, key))}; {hint}"
    for name, field in fields.items():
        if field.required and name not in value:
            yield f"{document.at(path)}: {_dotted(path)} has no {name}; add it"


def _mistake_of_leaf(
    value: Any, kind: Any, document: "Document", path: "KeyPath", *, inner: bool
) -> Iterator[str]:
    """``inner``: the parts of the value were looked at already, only its own rules (its length) are
    left."""
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        if inner and "`$[" in str(error):
            return
        yield f"{document.at(path)}: {_dotted(path)}: expected {_expected(kind)}, got {_shown(value)}"


def _bare(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its annotations: (list, (item,)), (dict, (key, value)), or (itself, ())."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    origin = get_origin(kind)
    return (origin, get_args(kind)) if origin in (list, dict) else (kind, ())


def _has_section(kind: Any) -> bool:
    bare, parameters = _bare(kind)
    if parameters:
        return _has_section(parameters[-1])
    return isinstance(bare, type) and issubclass(bare, msgspec.Struct)


def _dotted(path: "KeyPath") -> str:
    text = "".join(
        f"[{part}]" if isinstance(part, int) else f".{redact_text(part)}" for part in path
    )
    return text.removeprefix(".")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "keys with values"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    text = repr(redact_text(value)) if isinstance(value, str) else str(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"the text {text}" if isinstance(value, str) else text


def _expected(kind: Any) -> str:
    """What a key takes, in words for its user."""
    metas = (
        [meta for meta in get_args(kind)[1:] if isinstance(meta, Meta)]
        if get_origin(kind) is Annotated
        else []
    )
    bare, parameters = _bare(kind)
    if get_origin(bare) is Literal:
        return " or ".join(str(choice) for choice in get_args(bare))
    if bare is bool:
        return "true or false"
    if parameters:
        lengths = next((f" of {m.min_length} to {m.max_length} entries" for m in metas), "")
        return ("a list" if bare is list else "keys with values") + lengths
    if bare is int:
        return next((f"a whole number from {m.ge} to {m.le}" for m in metas), "a whole number")
    if bare is str:
        plain = "a name without spaces, / and @"
        return next((meta.description or plain for meta in metas if meta.pattern), "text")
    # What is left are the two unions.
    if str in get_args(bare):
        return "the name of a file or a list of calls"
    return next(_expected(option) for option in get_args(bare) if option is not type(None))


# ---- the environment
# --------------------------------------------------------------------------------


def _with_environment(config: Config, environ: Mapping[str, str]) -> Config:
    for (section_name, key), name in overrides(environ).items():
        section = getattr(config, section_name)
        kind = next(
            field.type for field in msgspec.structs.fields(section) if field.encode_name == key
        )
        text = environ[name].strip()
        value: Any = _OLD_SPELLINGS.get((section_name, key), {}).get(text.lower(), text)
        if _bare(kind)[0] is int and re.fullmatch(r"-?[0-9]{1,18}", text):
            value = int(text)
        try:
            value = msgspec.convert(value, kind, strict=True)
        except msgspec.ValidationError:
            raise UsageError(
                f"environment variable {name} (overrides {section_name}.{key}):"
                f" expected {_expected(kind)}, got {_shown(text)}"
            ) from None
        section = msgspec.structs.replace(section, **{key: value})
        config = msgspec.structs.replace(config, **{section_name: section})
    return config


# ---- what keys must hold together
# -------------------------------------------------------------------


def _cross_checks(loaded: LoadedConfig, document: "Document") -> Iterator[str]:
    yield from _check_limits(loaded.config, document)
    yield from _check_backends(loaded.config, document)
    yield from _check_far_tables(loaded.config, document)
    yield from _check_names(loaded.config, document)
    yield from _check_order(loaded.config, document)
    yield from _check_files(loaded, document)


def _check_limits(config: Config, document: "Document") -> Iterator[str]:
    worker, stall_ms = config.worker, stall_timeout_ms(config.dispatcher)
    timeout_ms = worker.heartbeat_timeout_ms
    place = document.at(("worker", "heartbeat_timeout_ms"))
    if timeout_ms and timeout_ms <= worker.heartbeat_interval_ms:
        yield (
            f"{place}: worker.heartbeat_timeout_ms: {timeout_ms} ms is not longer than one"
            f" worker.heartbeat_interval_ms ({worker.heartbeat_interval_ms} ms); use several intervals, or 0"
        )
    elif timeout_ms and timeout_ms <= stall_ms:
        yield (
            f"{place}: worker.heartbeat_timeout_ms: {timeout_ms} ms would call an executor lost before it"
            f" counts as stuck ({stall_ms} ms, see dispatcher.scheduler_stall_timeout_ms); use more, or 0"
        )
    if 0 < worker.executor_open_files_max < OPEN_FILES_MIN:
        place = document.at(("worker", "executor_open_files_max"))
        yield (
            f"{place}: worker.executor_open_files_max: {worker.executor_open_files_max} are too few to"
            f" import packages; use at least {OPEN_FILES_MIN}, or 0"
        )
    space_bytes = worker.executor_address_space_bytes
    if 0 < space_bytes < max(ADDRESS_SPACE_BYTES_MIN, worker.executor_memory_limit_bytes):
        place = document.at(("worker", "executor_address_space_bytes"))
        yield (
            f"{place}: worker.executor_address_space_bytes: {space_bytes} bytes is less than an executor"
            " reserves (512 MiB) or may use (worker.executor_memory_limit_bytes); use more, or 0"
        )
    if 0 < worker.sandbox_threads_max < SANDBOX_THREADS_MIN:
        place = document.at(("worker", "sandbox_threads_max"))
        yield (
            f"{place}: worker.sandbox_threads_max: an executor itself needs {SANDBOX_THREADS_MIN}; use"
            " more, or 0"
        )
    limit_bytes, mark_bytes = (
        worker.executor_memory_limit_bytes,
        worker.executor_recycle_memory_bytes,
    )
    if limit_bytes and mark_bytes >= limit_bytes:
        place = document.at(("worker", "executor_recycle_memory_bytes"))
        yield (
            f"{place}: worker.executor_recycle_memory_bytes: {mark_bytes} bytes is not below"
            f" worker.executor_memory_limit_bytes ({limit_bytes} bytes): executors would be killed, not"
            " replaced; use less, or 0"
        )
    for index, job in enumerate(config.jobs):
        yield from _check_job_budget(job, index, config.dispatcher, document)


def _check_job_budget(
    job: JobConfig, index: int, dispatcher: DispatcherConfig, document: "Document"
) -> Iterator[str]:
    """A job's own budget must fit below the one time after which an executor counts as stuck."""
    stall_ms = stall_timeout_ms(dispatcher)
    budget_ms, path = job.call_deadline_ms, ("jobs", index, "call_deadline_ms")
    place = f"{document.at(path)}: {_dotted(path)}"
    if budget_ms is None or not stall_ms:
        return
    if budget_ms and budget_ms + 1_000 >= stall_ms:
        yield (
            f"{place}: calls may run {budget_ms} ms, but an executor counts as stuck after"
            f" {stall_ms} ms; set dispatcher.scheduler_stall_timeout_ms to more than"
            f" {budget_ms + 1_000}"
        )
    elif not budget_ms and not dispatcher.scheduler_stall_timeout_ms:
        yield (
            f"{place}: calls may run without limit, but an executor counts as stuck after"
            f" {stall_ms} ms, derived from dispatcher.call_deadline_ms; set"
            " dispatcher.scheduler_stall_timeout_ms to the time you mean"
        )


def _check_backends(config: Config, document: "Document") -> Iterator[str]:
    blockdb = config.backends.blockdb
    yield from _check_store(blockdb, document)
    for name in blockdb.memory.keys() & blockdb.tables.keys():
        place = document.at(("backends", "blockdb", "tables", name), key=True)
        yield f"{place}: the table {name} is held in memory; it needs no key here"
    for chain, node in config.backends.rpc.items():
        for index, url in enumerate(node.urls):
            path: KeyPath = ("backends", "rpc", chain, "urls", index)
            if not _is_http_url(url):
                yield f"{document.at(path)}: {_dotted(path)}: expected an http:// or https:// url with a host"
        for url in node.per_url.keys() - node.urls:
            place = document.at(("backends", "rpc", chain, "per_url", url), key=True)
            yield f"{place}: backends.rpc.{chain}.per_url: {redact_url(url)} is none of the chain's urls"


def _check_store(blockdb: BlockdbConfig, document: "Document") -> Iterator[str]:
    """One place for the store, and an url that is understood; it is not shown: there may be a password in it."""
    place = document.at(("backends", "blockdb", "path"))
    if re.match(r"(postgres(ql)?|grpcs?)://", blockdb.path):
        yield f"{place}: backends.blockdb.path: this is an url; its key is backends.blockdb.url"
    elif blockdb.path and blockdb.url:
        yield f"{place}: backends.blockdb.path: there is a backends.blockdb.url too; name one store"
    place = document.at(("backends", "blockdb", "url"))
    if is_table_server(blockdb.url):
        if not _is_grpc_url(blockdb.url):
            yield f"{place}: backends.blockdb.url: expected grpc://host:port or grpcs://host:port"
        if blockdb.tables:
            place = document.at(("backends", "blockdb", "tables"), key=True)
            yield f"{place}: backends.blockdb.tables: keys are declared in the configuration of the table server"
    elif blockdb.url and not _is_database_url(blockdb.url):
        yield (
            f"{place}: backends.blockdb.url: expected grpc://host:port or postgresql://user@host:port/database;"
            " write special characters of a password as %40 (for @), %2F (/), %3A (:), %23 (#)"
        )


def is_table_server(url: str) -> bool:
    """Whether ``backends.blockdb.url`` names a table server, not a database."""
    return url.startswith(("grpc://", "grpcs://"))


def _is_database_url(url: str) -> bool:
    """Strict, since a part of a badly written password would count as host or database, and be shown."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that do not match
        return False
    user, _, hosts = parts.netloc.rpartition("@")
    return (
        parts.scheme in ("postgresql", "postgres")
        and "@" not in user
        and user.count(":") <= 1
        and "@" not in parts.path
        and not parts.fragment
        and all(
            re.fullmatch(r"([\w.-]*|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?", h) for h in hosts.split(",")
        )
    )


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not match
        return False


def _check_far_tables(config: Config, document: "Document") -> Iterator[str]:
    """A table server answers the requests of functions; it hands out and takes no whole tables."""
    blockdb = config.backends.blockdb
    if not is_table_server(blockdb.url):
        return
    for index, job in enumerate(config.jobs):
        path: KeyPath = ("jobs", index, "output")
        if job.output.startswith("table:"):
            yield (
                f"{document.at(path)}: {_dotted(path)}: {job.output} needs backends.blockdb.path; tables of a"
                " table server are written by functions (upsert_rows)"
            )
        source = job.calls.get("table") if isinstance(job.calls, dict) else None
        if source is not None and source not in blockdb.memory:
            path = ("jobs", index, "calls")
            yield (
                f"{document.at(path)}: {_dotted(path)}: {{table: {source}}} needs backends.blockdb.path; where the"
                f" table server has its file, `blockx table dump {source}` writes a list"
            )


def _is_grpc_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname and parts.port) and "@" not in parts.netloc
        return is_whole and url.endswith(parts.netloc)
    except ValueError:  # a port that is no number, brackets that do not match
        return False


def _check_names(config: Config, document: "Document") -> Iterator[str]:
    first: dict[str, int] = {}
    for index, job in enumerate(config.jobs):
        path: KeyPath = ("jobs", index, "name")
        if first.setdefault(job.name, index) != index:
            yield f"{document.at(path)}: jobs[{first[job.name]}] has the name {job.name!r} too; names must differ"


def _check_order(config: Config, document: "Document") -> Iterator[str]:
    """``after`` names jobs, and no job waits for itself, directly or through others."""
    names = {job.name for job in config.jobs}
    waits = waits_for(config)
    for index, job in enumerate(config.jobs):
        path: KeyPath = ("jobs", index, "after")
        for name in job.after or ():
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                yield f"{document.at(path)}: {_dotted(path)}: there is no job {name!r}{hint}"
        seen: set[str] = set()
        todo = [job.name]
        while todo:
            for name in waits.get(todo.pop(), set()) - seen:
                seen.add(name)
                todo.append(name)
        if job.name in seen and job.after is not None:
            yield f"{document.at(path)}: {_dotted(path)}: {job.name} would wait for itself"


def _check_files(loaded: LoadedConfig, document: "Document") -> Iterator[str]:
    """No file is written twice; none is written that is read, but by a later job."""
    config = loaded.config
    inputs: dict[Path, str] = {loaded.file.resolve(): "the configuration itself"}
    for table, name in config.backends.blockdb.memory.items():
        inputs[loaded.resolve(name).resolve()] = f"the table {table}"
    if config.backends.blockdb.path:
        inputs[loaded.resolve(config.backends.blockdb.path).resolve()] = "the table store"
    if config.backends.read_cache.path:
        inputs[loaded.resolve(config.backends.read_cache.path).resolve()] = "the read cache"
    for index, job in enumerate(config.jobs):
        if isinstance(job.calls, str):
            # A job may read what an earlier one wrote, so only what comes later can collide.
            inputs.setdefault(
                loaded.resolve(job.calls).resolve(), f"the call list of job {job.name}"
            )
        yield from _check_outputs(loaded, index, inputs, document)
    if config.report:
        yield from _check_output(loaded, ("report",), config.report, inputs, document)


def _check_outputs(
    loaded: LoadedConfig, index: int, taken: dict[Path, str], document: "Document"
) -> Iterator[str]:
    job = loaded.config.jobs[index]
    for key, name in (("results", job.results), ("output", job.output), ("failures", job.failures)):
        path: KeyPath = ("jobs", index, key)
        if not name:
            continue
        if re.match(r"[a-z_]+:", name) is None:  # table:NAME is no file
            yield from _check_output(loaded, path, name, taken, document)


def _check_output(
    loaded: LoadedConfig,
    path: "KeyPath",
    name: str,
    taken: dict[Path, str],
    document: "Document",
) -> Iterator[str]:
    file = loaded.resolve(name).resolve()
    if file in taken:
        yield f"{document.at(path)}: {_dotted(path)}: {name} is {taken[file]} already; name another file"
    taken[file] = _dotted(path)
