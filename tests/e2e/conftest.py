"""The product as a user starts it: a folder with a config, a subprocess, and what it leaves behind."""

import contextlib
import ctypes
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests import machine
from tests.builders import CODE

LAUNCHER = CODE / "blockx.py"
RUN_S_MAX = 60
PR_SET_CHILD_SUBREAPER = 36
MODES_VARIABLE = "TEST_SPAWN_MODES"
"""``TEST_SPAWN_MODES=sandbox pytest tests/e2e``: all tests in these modes. By default those without the
marker ``spawn_modes`` run in process mode, so that CI stays short."""


def pytest_generate_tests(metafunc):
    """A test of the product runs in the modes that its marker names, or else in process mode."""
    if "spawn_mode" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("spawn_modes")
    modes = list(marker.args) if marker else ["process"]
    chosen = os.environ.get(MODES_VARIABLE, "")
    if chosen:
        modes = [mode for mode in chosen.split(",") if not marker or mode in modes]
    metafunc.parametrize("spawn_mode", modes)


def need_spawn_mode(mode):
    """Skip, with the reason, where executors cannot be started in this mode."""
    if mode == "sandbox":
        machine.need(machine.sandbox_refusal())
    if mode == "oci":
        machine.need(machine.oci_refusal())


def descendants():
    """Living processes below this one; orphans of the product come to us, since we are its reaper."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            # The test chain and the database are children of ours too, and live as long as the session.
            theirs = process.name() in ("anvil", "postgres")
            if process.status() != psutil.STATUS_ZOMBIE and not theirs:
                found.add(process)
        except psutil.NoSuchProcess:
            continue
    return found


@dataclass
class Ended:
    """How a run ended and what it left."""

    folder: Path
    code: int
    text: str

    def lines(self, name="results.jsonl"):
        return [json.loads(line) for line in (self.folder / name).read_text("utf-8").splitlines()]

    def outputs(self):
        return [record.get("output") for record in self.lines()]

    def report(self):
        return json.loads((self.folder / "report.json").read_text())

    def job(self, name="case"):
        return next(job for job in self.report()["jobs"] if job["name"] == name)


@dataclass
class Product:
    """One folder with a job ``case``; ``run`` starts it and waits for its end."""

    folder: Path
    started: list = field(default_factory=list)
    environment: dict = field(default_factory=dict)
    """Variables beside those of this process."""
    python: str = sys.executable
    user: dict = field(default_factory=dict)
    """Options of Popen that say who runs it; empty: who runs the tests."""

    def write(self, source, calls, *, config="", children=None, job="", executors=2):
        functions = self.folder / "functions"
        functions.mkdir(exist_ok=True)
        for name, text in {"case": source, **(children or {})}.items():
            (functions / f"{name}.py").write_text(text)
        (self.folder / "calls.jsonl").write_text("".join(json.dumps(c) + "\n" for c in calls))
        (self.folder / "config.yaml").write_text(
            f"worker: {{executor_count: {executors}, executor_restart_delay_ms: 50}}\n"
            f"{config}\n"
            "jobs:\n"
            "  - {name: case, function: case, calls: calls.jsonl, results: results.jsonl, output: rows.jsonl,"
            f" failures: failures.jsonl{job}}}\n"
            "report: report.json\n"
        )
        return self

    def start(self, *arguments, stderr=subprocess.STDOUT):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("BLOCKX_")}
        process = subprocess.Popen(
            [self.python, str(LAUNCHER), *(arguments or ("--config", "config.yaml"))],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**environment, "TMPDIR": str(self.folder.parent / "t"), **self.environment},
            **self.user,
        )
        self.started.append(process)
        return process

    def finish(self, process):
        text, _ = process.communicate(timeout=RUN_S_MAX)
        return Ended(self.folder, process.returncode, text)

    def run(self, *arguments):
        return self.finish(self.start(*arguments))

    @property
    def socket_folders(self):
        return list((self.folder.parent / "t").glob("blockx-*"))

    def until(self, condition, what):
        """Wait for an outside event; there is no other way to see a process make progress."""
        end = time.monotonic() + RUN_S_MAX
        while not condition():
            assert time.monotonic() < end, f"never: {what}"
            time.sleep(0.01)

    def bodies(self):
        """How many bodies have said ``tally()``, in all runs."""
        store = self.folder / "store.sqlite"
        if not store.exists():
            return 0
        with contextlib.closing(sqlite3.connect(store)) as db:
            try:
                return db.execute("SELECT count(*) FROM ran").fetchone()[0]
            except sqlite3.OperationalError:  # no table yet
                return 0

    def executors(self):
        """Executor processes of this product, by their title."""
        found = []
        for process in descendants():
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith("blockx: exec-"):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@contextlib.contextmanager
def base_folder():
    """Where other users may pass, unlike in pytest's own: executors have users of their own."""
    with tempfile.TemporaryDirectory(prefix="bx-", dir="/tmp") as folder:
        base = Path(folder)
        base.chmod(0o711)
        for name in ("p", "t"):
            (base / name).mkdir()
        yield base


@pytest.fixture
def bare_product():
    """In process mode, unless its test says otherwise."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    there_before = descendants()  # a fork server of other tests in this process, say
    with base_folder() as base:
        product = Product(base / "p")
        yield product
        end_all(product, there_before)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)  # other tests of this process count on it


def end_all(product, there_before):
    for process in product.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    product.until(lambda: not (descendants() - there_before), "all processes gone")


@pytest.fixture
def product(bare_product, spawn_mode):
    """In each mode of the test that works on this machine."""
    need_spawn_mode(spawn_mode)
    bare_product.environment["EXECUTOR_SPAWN_MODE"] = spawn_mode
    return bare_product
