"""A file that gets its name when it is whole.

Jobs thread only (``check_writable``: main thread, before a run). A file is written as ``NAME.partial`` beside its
place and renamed when the job is complete, after everything has reached the disk: what stands under a final
name is whole, or it is what an earlier run left.

Invariant: each file is closed exactly once, by ``flush_to_disk`` or by ``discard``.
"""

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

from blockx.errors import UsageError

PARTIAL_SUFFIX = ".partial"
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
            raise write_failed(self.path, error) from None

    def write(self, data: bytes) -> None:
        """Append bytes. Raises JobFailedError."""
        try:
            self._file.write(data)
        except OSError as error:
            raise write_failed(self.path, error) from None

    def flush_to_disk(self) -> None:
        """Everything written is on the disk afterwards. Raises JobFailedError."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise write_failed(self.path, error) from None

    def rename(self) -> None:
        """Give the file its final name; after ``flush_to_disk``. Raises JobFailedError."""
        try:
            self._partial.replace(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise write_failed(self.path, error) from None

    def discard(self) -> None:
        """Remove what was written. Never fails; idempotent."""
        with contextlib.suppress(OSError):  # closing flushes, and the disk may be full
            self._file.close()
        self._partial.unlink(missing_ok=True)


def write_failed(path: Path, error: OSError) -> JobFailedError:
    """What the user is told of a file that cannot be written."""
    return JobFailedError(
        f"{path}: cannot be written: {error.strerror or error} (errno {error.errno});"
        " free the disk or name another file, then run again"
    )


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


def sync_folder(folder: Path) -> None:
    """A rename is durable only once its folder is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
