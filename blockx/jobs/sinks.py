"""Where outcomes go: ``results``, ``output`` and ``failures``, three files of JSON lines.

Jobs thread only. A file is written as ``NAME.partial`` beside its place and renamed when the job is
complete, after everything has reached the disk: what stands under a final name is whole, or it is
what an earlier run left. Values of users are spliced in as the bytes they are; no number is read
and written again. Rows are told apart by their first byte.

Invariant: each file is closed exactly once, by ``publish`` or by ``discard``.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

from blockx.config import JobConfig, LoadedConfig
from blockx.dispatcher.model import CallError, CallResult, Via
from blockx.errors import UsageError
from blockx.ipc import exact_json
from blockx.jobs.reorder import Record

PARTIAL_SUFFIX = ".partial"
ARGS_SHOWN_CHARS = 500
"""How much of a failed call's arguments stands in its error."""
FUNCTION_NAMES_MAX = 10_000
"""Encoded names of functions that are kept. Full: forgotten, and encoded again."""
_BUFFER_BYTES = 1 << 18


class JobFailedError(Exception):
    """A job cannot go on: a file cannot be written or read (a full disk). The text names it and
    says why."""


class OutputFile:
    """One file that gets its name when it is whole."""

    def __init__(self, path: Path) -> None:
        """Open ``path.partial``, making the folder; a leftover of a killed run is overwritten.

        Raises:
            JobFailedError: it cannot be made.
        """
        # A link is followed, so that it stays a link.
        self.path = Path(os.path.realpath(path))
        self._partial = partial_of(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self._partial.open("wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise self._failed(error) from None

    def write(self, data: bytes) -> None:
        """Append bytes. Raises JobFailedError."""
        try:
            self._file.write(data)
        except OSError as error:
            raise self._failed(error) from None

    def flush_to_disk(self) -> None:
        """Everything written is on the disk afterwards. Raises JobFailedError."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise self._failed(error) from None

    def rename(self) -> None:
        """Give the file its final name; after ``flush_to_disk``. Raises JobFailedError."""
        try:
            self._partial.replace(self.path)
            _sync_folder(self.path.parent)
        except OSError as error:
            raise self._failed(error) from None

    def discard(self) -> None:
        """Remove what was written. Never fails; idempotent."""
        with contextlib.suppress(OSError):  # closing flushes, and the disk may be full
            self._file.close()
        self._partial.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> JobFailedError:
        return JobFailedError(
            f"{self.path}: cannot be written: {error.strerror} (errno {error.errno});"
            " free the disk or name another file, then run again"
        )


class JobSinks:
    """The outputs of one job that are wanted, and how an outcome looks in each."""

    def __init__(self, job: JobConfig, loaded: LoadedConfig) -> None:
        """Open all files.

        Raises:
            JobFailedError: one cannot be made; nothing is left.
        """
        self._call_id_prefix = exact_json.encode(f"{job.name}/")[:-1]
        self._names: dict[str, bytes] = {}
        self._keeps = (bool(job.results), bool(job.output), bool(job.failures))
        self.rows_count = 0
        """Rows found in the outcomes so far, also if ``output`` is not kept."""
        self.rowless_functions: dict[str, str] = {}
        """Functions that returned something that is no row -> what it was, the first time."""
        self._files: list[OutputFile | None] = []
        try:
            for name in (job.results, job.output, job.failures):
                self._files.append(OutputFile(loaded.resolve(name)) if name else None)
        except JobFailedError:
            self.discard()
            raise
        self._folder = next((file.path.parent for file in self._files if file), None)

    outputs_count = 3
    """Parts of a record: results, output, failures."""

    def encode(self, result: CallResult, args: bytes | None) -> Record:
        """The bytes of one outcome for each output. ``args``: of a failed call, if it has any."""
        if result.error is not None:
            return self._encode_failed(result, result.error, args)
        output = result.output
        assert output is not None, f"{result.call_id} has neither output nor error"
        keeps_results, keeps_rows, _ = self._keeps
        line = b""
        if keeps_results:
            line = b'%b"status":"ok","output":%b%b' % (self._head(result), output, _tail(result))
        rows = self._rows(result.function_id, output)
        return line, rows if keeps_rows else b"", b""

    def write(self, output: int, data: bytes) -> None:
        """Append to one output. Raises JobFailedError."""
        file = self._files[output]
        if file is not None:
            file.write(data)

    def open_spill_file(self) -> BinaryIO:
        """A file without a name, on the disk of the outputs, which has room for them; else a
        temporary one."""
        file = tempfile.TemporaryFile(dir=self._folder, buffering=_BUFFER_BYTES)  # noqa: SIM115
        return cast(BinaryIO, file)  # on Linux, a plain file object

    def publish(self) -> None:
        """Give all files their final names, once all of them are on the disk. Raises
        JobFailedError."""
        files = [file for file in self._files if file is not None]
        for file in files:
            file.flush_to_disk()
        for file in files:
            file.rename()

    def discard(self) -> None:
        """Remove everything written; idempotent, and without effect on published files."""
        for file in self._files:
            if file is not None:
                file.discard()

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
        return line, b"", failure

    def _rows(self, function_id: str, output: bytes) -> bytes:
        """A dict is one row, a list of dicts several, null none; anything else none and one warning
        a function."""
        first = output[:1]
        if first == b"{":
            self.rows_count += 1
            return output + b"\n"
        if first == b"n" or output == b"[]":
            return b""
        if first == b"[":
            rows = exact_json.raw_elements(output)
            if all(row[:1] == b"{" for row in rows):
                self.rows_count += len(rows)
                return b"\n".join(rows) + b"\n"
        if (
            function_id not in self.rowless_functions
            and len(self.rowless_functions) < FUNCTION_NAMES_MAX
        ):
            self.rowless_functions[function_id] = _shortened(output, 60)
        return b""


def check_writable(path: Path) -> None:
    """Find out before a run whether an output can be written; leaves nothing but its folder.

    Raises:
        UsageError: it cannot; the text says why.
    """
    real = Path(os.path.realpath(path))
    if real.is_dir():
        raise UsageError(f"{path}: cannot be written: it is a folder; name a file in it")
    partial = partial_of(real)
    existed = partial.exists()
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("ab"):
            pass
        if not existed:
            partial.unlink()
    except OSError as error:
        why = "a part of its folder's path is a file" if real.parent.is_file() else error.strerror
        raise UsageError(
            f"{path}: cannot be written: {why}; name another file, or see to the folder's permissions"
        ) from None


def partial_of(path: Path) -> Path:
    """Where a file is written until it is whole."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def _sync_folder(folder: Path) -> None:
    """A rename is durable only once its folder is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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


def all_outputs(job: JobConfig) -> Iterable[str]:
    """The files that a job writes, as named in the configuration."""
    return [name for name in (job.results, job.output, job.failures) if name]
