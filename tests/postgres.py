"""A private PostgreSQL server for the tests: one a test process, in a folder of its own, without a TCP port.

Each test takes a schema of its own. The server is a child that dies with the tests, however they end.
"""

import asyncio
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

PASSWORD = "the-passw0rd"
"""Of the server's user; tests look for it where it must not be."""
NEEDED = (
    "these tests need the server programs of PostgreSQL: apt-get install postgresql; "
    "to leave the tests out: make test WITHOUT=postgres"
)
START_S = 60


def program(name: str) -> str:
    """Debian keeps the server's programs out of the PATH. Raises FileNotFoundError."""
    in_path = shutil.which(name)
    installed = [str(found) for found in Path("/usr/lib/postgresql").glob(f"*/bin/{name}")]
    if in_path is None and not installed:
        raise FileNotFoundError(NEEDED)
    return in_path or max(installed, key=lambda path: float(Path(path).parts[-3]))


def unprivileged() -> list[str]:
    """The beginning of a command: dies with us, and is not root, as whom PostgreSQL refuses to run."""
    command = ["setpriv", "--pdeathsig", "QUIT"]
    if os.getuid() == 0:
        user = server_user()
        command += ["--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"]
    return command


def server_user() -> pwd.struct_passwd:
    """Who runs the server when the tests run as root."""
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


class PostgresServer:
    """A running server; made and started by the constructor."""

    def __init__(self) -> None:
        initdb = program("initdb")
        self.folder = Path(tempfile.mkdtemp(prefix="bx-pg-", dir="/tmp"))
        password = self.folder / "password"
        password.write_text(PASSWORD)
        if os.getuid() == 0:
            user = server_user()
            for path in (self.folder, password):
                os.chown(path, user.pw_uid, user.pw_gid)
        command = [initdb, "-D", str(self.folder / "data"), "--no-sync", "-U", "blockx"]
        command += ["--auth=scram-sha-256", f"--pwfile={password}", "--encoding=UTF8"]
        # An order of texts that is not that of their bytes, as many databases have it.
        command += ["--locale-provider=icu", "--icu-locale=en-US", "--locale=C"]
        done = subprocess.run(
            [*unprivileged(), *command], capture_output=True, text=True, cwd="/", check=False
        )
        assert done.returncode == 0, done.stderr
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://blockx:{PASSWORD}@/postgres?host={self.folder}"

    def start(self) -> None:
        """Returns when it answers."""
        settings = ["listen_addresses=", "fsync=off", "shared_buffers=16MB", "max_connections=40"]
        command = [program("postgres"), "-D", str(self.folder / "data"), "-k", str(self.folder)]
        for setting in settings:
            command += ["-c", setting]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*unprivileged(), *command], stdout=log, stderr=log, cwd="/"
            )
        give_up = time.monotonic() + START_S
        ready = [program("pg_isready"), "-q", "-h", str(self.folder)]
        while subprocess.run(ready, check=False).returncode != 0:
            alive = self._process.poll() is None and time.monotonic() < give_up
            assert alive, (self.folder / "log").read_text()
            time.sleep(0.02)

    def kill(self) -> None:
        """As after a crash: nothing is finished, connections break."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(START_S)

    def remove(self) -> None:
        """Leave nothing behind."""
        self.kill()
        shutil.rmtree(self.folder)

    def settings(self) -> dict[str, str]:
        """``backends.blockdb`` for a schema that nobody else uses."""
        return {"url": self.url, "schema": f"test_{secrets.token_hex(6)}"}

    @contextmanager
    def session(self) -> Iterator["Session"]:
        """Somebody else's connection."""
        with asyncio.Runner() as runner:
            session = Session(runner, runner.run(asyncpg.connect(self.url)))
            try:
                yield session
            finally:
                runner.run(session.connection.close())


class Session:
    """SQL, statement by statement."""

    def __init__(self, runner: asyncio.Runner, connection: Any) -> None:
        self._runner = runner
        self.connection = connection

    def run(self, sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._runner.run(self.connection.fetch(sql))]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    try:
        server = PostgresServer()
    except FileNotFoundError as error:
        pytest.fail(str(error), pytrace=False)
    yield server
    server.remove()
