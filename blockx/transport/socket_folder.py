"""The private folders that hold the sockets: one a slot, all below one folder of this run.

Main thread only. The run's folder holds a lock file that lives as long as main: a folder whose lock can
be taken belongs to a dead main and is removed at the next start, whatever killed it.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from blockx.errors import UsageError

SOCKET_PATH_BYTES_MAX = 107
"""The kernel's limit of a Unix socket path, without its closing NUL."""
_PREFIX = "blockx-"


class SocketFolder:
    """The folder of one run; ``remove`` it at exit."""

    def __init__(self, parent: Path | None = None) -> None:
        """``parent``: where to make it; default XDG_RUNTIME_DIR or the temporary folder.

        Raises:
            UsageError: no folder can be made there.
        """
        self._parent = parent or Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        remove_leftovers(self._parent)
        name = f"{_PREFIX}{secrets.token_hex(6)}"
        self.path = self._parent / name
        unlocked = self._parent / f".{name}"
        try:
            unlocked.mkdir(mode=0o700)
            self._lock = os.open(unlocked / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Under its final name only once it is locked: another start would take it for a leftover.
            unlocked.rename(self.path)
        except OSError as error:
            raise UsageError(
                f"{self.path}: no folder for the sockets can be made: {error.strerror}; "
                "set XDG_RUNTIME_DIR or TMPDIR to a folder that you may write"
            ) from None

    def slot_socket(self, executor_id: str, uid: int = 0) -> Path:
        """Make the slot's own folder and return the path of its socket.

        ``uid``: the user that will connect, if it is another one than ours (who is root then).

        Raises:
            UsageError: the path is longer than the kernel allows.
        """
        folder = self.path / executor_id
        folder.mkdir(mode=0o700, exist_ok=True)
        if uid:
            os.chown(folder, uid, uid)
            self.path.chmod(0o711)  # he may walk through, and see nothing
        path = folder / "s"
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise UsageError(
                f"{path}: longer than {SOCKET_PATH_BYTES_MAX} bytes, which no socket path may be; "
                "set XDG_RUNTIME_DIR or TMPDIR to a shorter folder"
            )
        return path

    def mount_point(self) -> Path:
        """An empty folder, on which each executor of a sandbox builds its own root."""
        folder = self.path / "root"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def remove(self) -> None:
        """Remove everything; harmless when it is gone already."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_leftovers(parent: Path) -> None:
    """Remove folders of runs whose main is dead: nobody holds their lock."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # not ours, or another start removes it just now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its main lives
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
