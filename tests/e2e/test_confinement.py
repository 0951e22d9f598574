"""What user code with the executor in its hands reaches, in each spawn mode: ``probes.py``, run by the product."""

import contextlib
import ctypes
import json
import os
import shutil
import site
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from blockx.executor import confine
from tests import machine

pytestmark = pytest.mark.slow

PROBES = (Path(__file__).parent / "probes.py").read_text()
MIB = 1024 * 1024
LIMIT_MIB = 400
ALWAYS_OPEN = {"20 threads"}
OPEN_TO_EVERY_PROCESS = {
    "TCP to this machine", "TCP listener", "UDP", "abstract unix socket", "unix socket of others",
    "second connection to main", "secret file", "password file", "configuration",
    "list of processes", "kill", "signal by a socket", "pidfd", "sight of others", "limits of others",
    "write to a folder of the machine", "write beside the socket", "system V shared memory",
    "run a shell", "run Python", "run from memory", "fork", "user namespace",
    "memory over the limit", "big file", "400 threads",
}  # fmt: skip
"""What process mode leaves open to any user on a usual Linux: proof that these probes can succeed."""


@pytest.fixture
def targets(product):
    """What the probes try to reach, all of it the test's own."""
    with reachable(product) as found:
        yield found


@contextlib.contextmanager
def reachable(product):
    """Sockets, files and a process that belong to the user who runs the product."""
    outside = product.folder.parent / "outside"
    outside.mkdir()
    outside.chmod(0o777)
    (outside / "secret").write_text("secret")
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    abstract, unix = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0blockx-probe-{os.getpid()}")
    unix.bind(str(outside / "u"))
    for listener in (abstract, unix):
        listener.listen()
    (outside / "u").chmod(0o777)
    environment = {**os.environ, "PROBE_SECRET": "x"}
    victim = subprocess.Popen(["sleep", "600"], env=environment, **product.user)
    yield {
        "tcp": tcp.getsockname(),
        "udp": udp.getsockname(),
        "abstract": abstract.getsockname().decode(),
        "unix": unix.getsockname(),
        "victim": victim.pid,
        "secret": str(outside / "secret"),
        "folder": str(outside),
        "temporary": str(product.folder.parent / "t"),
        "config": str(product.folder / "config.yaml"),
        "home": str(Path.home()),
        "too_many_mib": 4 * LIMIT_MIB,
    }
    victim.kill()
    victim.wait()
    for listener in (tcp, udp, abstract, unix):
        listener.close()


def reached(product, targets, worker=""):
    """Names of the probes that reached something; and how the run ended."""
    product.write(PROBES, [[targets]], executors=1)
    path = product.folder / "config.yaml"
    limits = f"worker: {{executor_memory_limit_bytes: {LIMIT_MIB * MIB}{worker}, "
    path.write_text(
        path.read_text().replace("worker: {", limits, 1) + "dispatcher: {call_deadline_ms: 60000}\n"
    )
    product.environment |= {"PROBE_SECRET": "x"}
    ended = product.run()
    assert ended.code == 0, ended.text + json.dumps(ended.lines(), indent=1)
    (output,) = ended.outputs()
    return {name for name, is_open in output.items() if is_open}, ended


@pytest.mark.spawn_modes("process")
def test_process_mode_leaves_open_what_its_user_may_do(product, targets):
    found, ended = reached(product, targets)
    closed = {"user namespace"} if machine.user_namespaces_are_closed() else set()
    assert found >= (OPEN_TO_EVERY_PROCESS | ALWAYS_OPEN) - closed
    # What it does close: hygiene, no boundary.
    assert not found & {"secret of the environment", "strange descriptors"}
    assert ended.report()["executors"]["spawn_mode"] == "process"


@pytest.mark.spawn_modes("sandbox")
def test_a_sandbox_leaves_threads_open_and_nothing_else(product, targets):
    """By the strongest route of this machine."""
    found, ended = reached(product, targets)
    assert found == ALWAYS_OPEN
    told = ended.report()["executors"]["sandbox"]
    assert told["seccomp"]
    assert told["namespaces"] != "none" or told["landlock_abi"]


@pytest.mark.spawn_modes("sandbox")
def test_a_sandbox_with_its_own_pids_is_as_tight(product, targets):
    machine.need(machine.cached_refusal(machine.OWN_NAMESPACES, pid_namespace=True))
    found, ended = reached(product, targets, ", sandbox_pid_namespace: true")
    assert found == ALWAYS_OPEN
    assert ended.report()["executors"]["sandbox"]["pid_namespace"]


@pytest.mark.spawn_modes("oci")
def test_a_container_leaves_threads_open_and_nothing_else(product, targets):
    found, ended = reached(product, targets)
    assert found == ALWAYS_OPEN
    assert ended.report()["executors"]["oci"]["seccomp"]


SPOILS_THE_LOG = """
import contextlib, os, stat
def _(forged):
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            kind = os.fstat(fd).st_mode
            if stat.S_ISREG(kind):
                os.ftruncate(fd, 0)
                os.lseek(fd, 0, os.SEEK_SET)
            if stat.S_ISREG(kind) or stat.S_ISFIFO(kind):
                os.write(fd, forged.encode() + b"\\n")
"""


@pytest.mark.spawn_modes("sandbox", "oci")
def test_the_log_of_main_is_not_cut_and_lines_of_an_executor_do_not_pass_for_others(product):
    forged = "00:00:00.000 ERROR   \x1b[2Jlies"
    product.write(SPOILS_THE_LOG, [[forged]], config="log: {level: info}", executors=1)
    log = product.folder / "log"
    with log.open("w") as errors:
        ended = product.finish(product.start(stderr=errors))
    assert ended.code == 0, log.read_text()
    first, *rest = log.read_text().splitlines()
    assert "executors are confined" in first
    assert "exec-0: 00:00:00.000 ERROR   \\x1b[2Jlies" in rest
    assert not [line for line in rest if line.startswith("00:00:00.000")]


@pytest.mark.spawn_modes("oci")
def test_an_image_may_bring_its_own_python(product, tmp_path_factory):
    """The image is an empty folder here: what it would hold is shown to it from this machine."""
    image = tmp_path_factory.mktemp("image")
    image.chmod(0o755)
    python = os.path.realpath(sys._base_executable)
    shown = [
        path
        for path in (*confine.library_paths(), *confine.SYSTEM_FILES, python)
        if os.path.exists(path)
    ]
    source = "import os\ndef _(n):\n    return [n, os.getpid(), os.path.exists('/etc/passwd')]\n"
    product.write(source, [[2**70]], config="functions: {env: [PYTHONPATH]}")
    path = product.folder / "config.yaml"
    worker = (
        f"worker: {{oci_root: '{image}', oci_python: '{python}', sandbox_read_only_paths: {shown}, "
    )
    path.write_text(path.read_text().replace("worker: {", worker, 1))
    product.environment |= {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    ended = product.run()
    assert ended.code == 0, ended.text
    assert ended.outputs() == [[2**70, 1, False]]
    assert ended.report()["executors"]["oci"]["root"] == str(image)


USER_ID = 54_321


@pytest.fixture
def product_of_a_user(bare_product, socket_folder):
    """The product as a user runs it in a sandbox who is not root, from where he may read it."""
    product = bare_product
    user = {"user": USER_ID, "group": USER_ID, "extra_groups": []}
    socket_folder.chmod(0o755)
    python = interpreter_for(user, socket_folder / "venv")
    if python is None:
        machine.need("no Python of this machine can be run as another user")
    for name in ("p", "t"):
        (socket_folder / name).mkdir()
    product.folder, product.python, product.user = socket_folder / "p", python, user
    product.environment["EXECUTOR_SPAWN_MODE"] = "sandbox"
    return product


def interpreter_for(user, venv):
    """A Python that another user may run, with the packages of this one."""
    packages = site.getsitepackages()[0]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, shutil.which(version, path="/usr/local/bin:/usr/bin")):
        if python is None:
            continue
        made = subprocess.run([python, "-m", "venv", "--without-pip", venv], check=False)
        if made.returncode == 0:
            (venv / "lib" / version / "site-packages" / "theirs.pth").write_text(packages)
            launcher = Path(__file__).parents[2] / "blockx.py"
            command = [str(venv / "bin" / "python"), str(launcher), "--version"]
            with contextlib.suppress(OSError):
                if subprocess.run(command, check=False, cwd="/", **user).returncode == 0:
                    return command[0]
        shutil.rmtree(venv, ignore_errors=True)
    return None


UNSHARE = {"x86_64": 272, "aarch64": 97}[os.uname().machine]


LANDLOCK_CREATE_RULESET = 444


def forbid_namespaces():
    """In the child, before the product: ``unshare`` answers EPERM, as in a container of the usual kind."""
    forbid(UNSHARE)


def forbid_both():
    """Landlock neither."""
    forbid(UNSHARE)
    forbid(LANDLOCK_CREATE_RULESET)


def forbid(number):
    load, equal, answer = 0x20, 0x15, 0x06
    code = [
        (load, 0, 0, 0),
        (equal, 0, 1, number),
        (answer, 0, 0, 0x5_0001),
        (answer, 0, 0, 0x7FFF_0000),
    ]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(packed))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0


def probe_as_user(product, worker="", **options):
    product.user |= options
    with reachable(product) as targets:
        product.write(PROBES, [[targets]], executors=1)
        for path in (product.folder.parent, *product.folder.parent.rglob("*")):
            if "venv" not in path.parts:
                os.chown(path, USER_ID, USER_ID)
        found, ended = reached(product, targets, worker)
    return found, ended.report()["executors"]["sandbox"]


@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root runs the other tests that way")
@pytest.mark.parametrize("pid_namespace", ["false", "true"])
def test_a_sandbox_of_a_user_is_as_tight(product_of_a_user, pid_namespace):
    has_own_pids = pid_namespace == "true"
    user = {"python": product_of_a_user.python, **product_of_a_user.user}
    machine.need(machine.refusal("user", pid_namespace=has_own_pids, **user))
    worker = f", sandbox_pid_namespace: {pid_namespace}"
    found, told = probe_as_user(product_of_a_user, worker)
    assert found == ALWAYS_OPEN
    assert told["namespaces"] == "user"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user than the one of the tests")
def test_without_namespaces_the_other_layers_hold(product_of_a_user):
    user = {"python": product_of_a_user.python, **product_of_a_user.user}
    machine.need(machine.refusal("none", preexec_fn=forbid_namespaces, **user))
    found, told = probe_as_user(product_of_a_user, preexec_fn=forbid_namespaces)
    assert found == ALWAYS_OPEN
    assert (told["namespaces"], told["landlock_abi"] > 0) == ("none", True)
    assert told["missing"][0] == (
        "private namespaces in a user namespace: unshare: Operation not permitted"
    )


def test_where_too_little_works_nothing_runs_and_what_is_missing_is_named(bare_product):
    product = bare_product
    machine.need(machine.filter_refusal(forbid_both))
    product.environment["EXECUTOR_SPAWN_MODE"] = "sandbox"
    product.user = {"preexec_fn": forbid_both}
    ended = product.write("def _(n):\n    return n\n", [[1]]).run()
    assert ended.code == 2
    assert "Traceback" not in ended.text
    assert "worker.executor_spawn_mode: sandbox: executors cannot be confined" in ended.text
    assert "unshare: Operation not permitted" in ended.text
    assert "Landlock is not in this kernel, or switched off" in ended.text
    assert not (product.folder / "results.jsonl").exists()
    assert product.socket_folders == []
