"""How an outcome looks in each output, and the outputs of one job together.

Jobs thread only. A *record* is the bytes of one finished call for each of three outputs: ``results``, ``output``,
``failures``. It goes into the journal, waits for its turn in the reorder buffer, and is written in list order.
Values of users are spliced in as the bytes they are; no number is read and written again, but for an ``output``
with columns. For such an output the second part of a record is a *group* (see ``sinks.groups``), and the third
is empty.

Invariant: all outputs get their final names, or none does and nothing is left (``keep`` apart).
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from blockx.config import JobConfig, LoadedConfig
from blockx.dispatcher.model import CallError, CallResult, Via
from blockx.ipc import exact_json
from blockx.jobs.journal import SUFFIX as JOURNAL_SUFFIX
from blockx.jobs.output_file import JobFailedError, OutputFile
from blockx.jobs.reorder import Record
from blockx.jobs.sinks import registry
from blockx.jobs.sinks.base import Row, Sink, SinkPlace, TableWriter
from blockx.jobs.sinks.groups import GroupWriter, group_of

ARGS_SHOWN_CHARS = 500
"""How much of a failed call's arguments stands in its error."""
FUNCTION_NAMES_MAX = 10_000
"""Encoded names of functions that are kept. Full: forgotten, and encoded again."""
_BUFFER_BYTES = 1 << 18
EMPTY: Record = (b"", b"", b"")
"""Of a call that is left out."""


class _Output(Protocol):
    """What a file and a group writer have in common."""

    def flush_to_disk(self) -> None:
        """Everything is on the disk afterwards."""

    def rename(self) -> None:
        """Show it under its final name."""

    def discard(self) -> None:
        """Remove it."""


class JobSinks:
    """The outputs of one job that are wanted."""

    outputs_count = 3
    """Parts of a record: results, output, failures."""

    def __init__(
        self, job: JobConfig, loaded: LoadedConfig, tables: TableWriter | None = None
    ) -> None:
        """Open all files.

        Raises:
            JobFailedError: one cannot be made; nothing is left.
        """
        self._job, self._loaded, self._tables = job, loaded, tables
        self._call_id_prefix = exact_json.encode(f"{job.name}/")[:-1]
        self._names: dict[str, bytes] = {}
        self.form = form_of(job)
        self._keeps = (bool(job.results), bool(job.output), bool(job.failures))
        self.rows_count = 0
        """Rows found in the outcomes so far, also if ``output`` is not kept."""
        self.rowless_functions: dict[str, str] = {}
        """Functions that returned something that is no row -> what it was, the first time."""
        self._files: list[OutputFile | None] = []
        self._groups: GroupWriter | None = None
        self._is_kept = False
        names = (job.results, job.output if self.form == "lines" else "", job.failures)
        try:
            for name in names:
                self._files.append(OutputFile(loaded.resolve(name)) if name else None)
        except JobFailedError:
            self.discard()
            raise
        if self.form == "groups":
            self._groups = GroupWriter(self._open_sink, self._write_failure)
        self._folder = next((file.path.parent for file in self._files if file), None)

    @property
    def refused_count(self) -> int:
        """Rows that did not fit into the columns of ``output``."""
        return 0 if self._groups is None else self._groups.refused_count

    @property
    def first_refusal(self) -> str:
        """Call, row and field of the first of them, and why."""
        return "" if self._groups is None else self._groups.first_refusal

    def encode(self, result: CallResult, args: bytes | None) -> Record:
        """The bytes of one outcome for each output. ``args``: of the call, where ``needs_args``."""
        if result.error is not None:
            return self._encode_failed(result, result.error, args)
        output = result.output
        assert output is not None, f"{result.call_id} has neither output nor error"
        keeps_results, keeps_rows, _ = self._keeps
        line = b""
        if keeps_results:
            line = b'%b"status":"ok","output":%b%b' % (self._head(result), output, _tail(result))
        rows = self._rows(result.function_id, output)
        if not keeps_rows or not rows:
            return line, b"", b""
        if self._groups is None:
            return line, b"\n".join(rows) + b"\n", b""
        listed = b"[%b]" % b",".join(rows)
        function = self._name(result.function_id)
        return line, group_of(self._call_id(result), function, args or b"[]", listed), b""

    def needs_args(self, result: CallResult) -> bool:
        """Whether ``encode`` wants the arguments: finding them costs something."""
        return result.error is not None or self._groups is not None

    def write(self, output: int, data: bytes) -> None:
        """Append to one output. Raises JobFailedError."""
        if output == 1 and self._groups is not None:
            self._groups.feed(data)
            return
        file = self._files[output]
        if file is not None:
            file.write(data)

    def open_spill_file(self) -> BinaryIO:
        """A file without a name, on the disk of the outputs, which has room for them; else a
        temporary one."""
        file = tempfile.TemporaryFile(dir=self._folder, buffering=_BUFFER_BYTES)  # noqa: SIM115
        return cast(BinaryIO, file)  # on Linux, a plain file object

    def publish(self) -> None:
        """Give all outputs their final names, once all of them are on the disk. Raises
        JobFailedError."""
        outputs = self._outputs()
        for output in outputs:
            output.flush_to_disk()
        for output in outputs:
            output.rename()

    def keep(self) -> None:
        """Leave the outputs under their unfinished names, for a look. Raises JobFailedError."""
        for output in self._outputs():
            output.flush_to_disk()
        self._is_kept = True

    def discard(self) -> None:
        """Remove everything written; idempotent, and without effect on published files."""
        if not self._is_kept:
            for output in self._outputs():
                output.discard()

    def _outputs(self) -> Sequence[_Output]:
        """The one with rows first: what it refuses goes to ``failures``."""
        groups = [] if self._groups is None else [self._groups]
        return [*groups, *(file for file in self._files if file is not None)]

    def _open_sink(self, sample: list[Row]) -> Sink:
        job = self._job
        kind = registry.kind_of(job.output)
        target = job.output if kind[:1] == "." else job.output.partition(":")[2]
        place = SinkPlace(
            target=target,
            path=self._loaded.resolve(target),
            declared=job.schema,
            sample=sample,
            tables=self._tables,
        )
        return registry.opener_of(job.output)(place)

    def _write_failure(self, line: bytes) -> None:
        file = self._files[2]
        if file is not None:
            file.write(line)

    def _call_id(self, result: CallResult) -> bytes:
        return b'%b%d"' % (self._call_id_prefix, result.index)

    def _head(self, result: CallResult) -> bytes:
        return b'{"index":%d,"call_id":%b%d","function":%b,' % (
            result.index,
            self._call_id_prefix,
            result.index,
            self._name(result.function_id),
        )

    def _name(self, function_id: str) -> bytes:
        name = self._names.get(function_id)
        if name is None:
            if len(self._names) >= FUNCTION_NAMES_MAX:
                self._names.clear()
            name = self._names[function_id] = _encoded(function_id)
        return name

    def _encode_failed(self, result: CallResult, error: CallError, args: bytes | None) -> Record:
        keeps_results, _, keeps_failures = self._keeps
        shown = _encoded(_error_fields(error, result, args))
        line = failure = b""
        if keeps_results:
            line = b'%b"status":"failed","error":%b%b' % (self._head(result), shown, _tail(result))
        if keeps_failures and args is not None:
            # A malformed line has no arguments, and nothing that `calls` takes would stand for it.
            failure = b'{"function":%b,"args":%b,"call_id":%b%d","error":%b}\n' % (
                self._name(result.function_id),
                args,
                self._call_id_prefix,
                result.index,
                shown,
            )
            if self._groups is not None:
                return line, b"F" + failure, b""
        return line, b"", failure

    def _rows(self, function_id: str, output: bytes) -> Sequence[bytes]:
        """A dict is one row, a list of dicts several, null none; anything else none and one warning
        a function."""
        first = output[:1]
        if first == b"{":
            self.rows_count += 1
            return (output,)
        if first == b"n" or output == b"[]":
            return ()
        if first == b"[":
            rows = exact_json.raw_elements(output)
            if all(row[:1] == b"{" for row in rows):
                self.rows_count += len(rows)
                return rows
        if (
            function_id not in self.rowless_functions
            and len(self.rowless_functions) < FUNCTION_NAMES_MAX
        ):
            self.rowless_functions[function_id] = _shortened(output, 60)
        return ()


def form_of(job: JobConfig) -> str:
    """How rows stand in a record: ``lines`` as they go into a file, or ``groups`` for a sink with columns."""
    return (
        "groups"
        if job.output and registry.kind_of(job.output) != registry.LINES_SUFFIX
        else "lines"
    )


def output_files(job: JobConfig) -> dict[str, str]:
    """The files that a job writes: key of the configuration -> name as it stands there."""
    names = {"results": job.results, "output": job.output, "failures": job.failures}
    return {key: name for key, name in names.items() if name and registry.is_file(name)}


def all_outputs(job: JobConfig) -> list[str]:
    """Everything that a job writes, as named in the configuration."""
    return [name for name in (job.results, job.output, job.failures) if name]


def journal_place(job: JobConfig, loaded: LoadedConfig) -> Path:
    """Where the journal of a job is: beside its first file, or beside the configuration."""
    first = next(iter(output_files(job).values()), job.name)
    return loaded.resolve(first + JOURNAL_SUFFIX)


def _tail(result: CallResult) -> bytes:
    costs = result.costs
    return (
        b',"attempts":%d,"moves":%d,"cached":%b,"cpu_us":%d,"io_us":%d,"subcall_us":%d,"sleep_us":%d,"queue_us":%d}\n'
        % (
            result.attempts,
            result.moves,
            b"true" if result.via is Via.CACHED else b"false",
            costs.cpu_us,
            costs.io_us,
            costs.subcall_us,
            costs.sleep_us,
            costs.queue_us,
        )
    )


def _error_fields(error: CallError, result: CallResult, args: bytes | None) -> dict[str, Any]:
    """What is told of a failure; what is empty is left out but for the four that are always
    there."""
    fields: dict[str, Any] = {
        "kind": str(error.kind),
        "message": error.message,
        "stack": error.stack,
        "locals": error.local_vars,
    }
    optional = {
        "reason": error.reason,
        "data": error.data,
        "args": None if args is None else _shortened(args, ARGS_SHOWN_CHARS),
        "output_tail": result.output_tail or None,
    }
    fields.update((key, value) for key, value in optional.items() if value is not None)
    return fields


def _encoded(value: Any) -> bytes:
    """Exact JSON of our own texts; half a surrogate pair in one of them becomes ``?``."""
    try:
        return exact_json.encode(value)
    except ValueError:
        return exact_json.encode(_without_surrogates(value))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _shortened(raw: bytes, chars: int) -> str:
    # Cut before decoding: an argument may have megabytes. A character has at most four bytes.
    text = raw[: 4 * chars + 4].decode("utf-8", "replace")
    return text if len(text) <= chars and len(raw) <= 4 * chars + 4 else f"{text[: chars - 3]}..."
