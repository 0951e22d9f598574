"""The private folders of the sockets: made, removed, and cleaned up after a dead main."""

import os
import signal
import subprocess
import sys

import pytest

from blockx.errors import UsageError
from blockx.transport.socket_folder import SocketFolder


def test_folders_are_private_and_gone_after_remove(tmp_path):
    folder = SocketFolder(tmp_path)
    path = folder.slot_socket("exec-0")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_living_main_is_left_alone(tmp_path):
    first = SocketFolder(tmp_path)
    second = SocketFolder(tmp_path)
    assert first.path.exists()
    first.remove()
    second.remove()


@pytest.mark.slow
def test_the_folder_of_a_killed_main_is_removed_at_the_next_start(tmp_path):
    script = (
        "import sys, pathlib; from blockx.transport.socket_folder import SocketFolder; "
        "f = SocketFolder(pathlib.Path(sys.argv[1])); f.slot_socket('exec-0'); "
        "print(f.path, flush=True); sys.stdin.read()"
    )
    dead = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    with dead:
        left = dead.stdout.readline().strip()
        dead.send_signal(signal.SIGKILL)
    assert os.path.exists(left)
    folder = SocketFolder(tmp_path)
    assert not os.path.exists(left)
    folder.remove()


def test_a_path_that_is_too_long_for_a_socket_is_refused_with_advice(tmp_path):
    parent = tmp_path / ("x" * 100)
    parent.mkdir()
    folder = SocketFolder(parent)
    with pytest.raises(UsageError, match="XDG_RUNTIME_DIR"):
        folder.slot_socket("exec-0")
    folder.remove()


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    with pytest.raises(UsageError, match="no folder for the sockets"):
        SocketFolder(tmp_path / "missing")
