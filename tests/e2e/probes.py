"""A function that tries to get out: the product runs it in each spawn mode. Not a test.

``_(targets)`` returns, for each attempt, whether it reached what it must not reach in a sandbox. An attempt
that raises has not. Nothing here harms the machine where it succeeds: targets are the test's own.
"""

import ctypes
import mmap
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading

LIBC = ctypes.CDLL(None, use_errno=True)
NUMBERS = {
    "x86_64": {
        "ptrace": 101, "process_vm_readv": 310, "unshare": 272, "mount": 165, "keyctl": 250, "bpf": 321,
        "userfaultfd": 323, "perf_event_open": 298, "io_uring_setup": 425, "pidfd_open": 434,
        "clone3": 435, "shmget": 29, "mq_open": 240, "open_by_handle_at": 304, "seccomp": 317,
    },
    "aarch64": {
        "ptrace": 117, "process_vm_readv": 270, "unshare": 97, "mount": 40, "keyctl": 219, "bpf": 280,
        "userfaultfd": 282, "perf_event_open": 241, "io_uring_setup": 425, "pidfd_open": 434,
        "clone3": 435, "shmget": 194, "mq_open": 180, "open_by_handle_at": 265, "seccomp": 277,
    },
}[platform.machine()]  # fmt: skip
REFUSED = {1, 13, 38}
"""EPERM, EACCES, ENOSYS: refused whatever the arguments."""


def raw(name, *arguments):
    """Whether the kernel looks at the arguments at all."""
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if LIBC.syscall(ctypes.c_long(NUMBERS[name]), *words) >= 0:
        return True
    return ctypes.get_errno() not in REFUSED


def connects(family, kind, address):
    with socket.socket(family, kind) as peer:
        peer.settimeout(5)
        peer.connect(address)
        return True


def sends(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        return peer.sendto(b"x", tuple(address)) == 1


def opens(family, kind=socket.SOCK_RAW, protocol=0):
    socket.socket(family, kind, protocol).close()
    return True


def sockets_of_main():
    """Paths of the socket of main that this executor, or any other, may know of."""
    found = {"/run/blockx/s"}
    for fd in range(3, 64):
        try:
            copy = os.dup(fd)
        except OSError:
            continue
        try:
            copy = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with copy:
            if copy.family == socket.AF_UNIX:
                found.add(copy.getpeername())
    return [path for path in found if path]


def connects_again():
    return any(
        attempt(lambda p=path: connects(socket.AF_UNIX, socket.SOCK_STREAM, p))
        for path in sockets_of_main()
    )


def writes_beside_socket():
    return any(
        attempt(lambda p=path: writes(os.path.join(os.path.dirname(p), "x")))
        for path in sockets_of_main()
    )


def reads(path):
    with open(path, "rb") as file:
        return bool(file.read(100))


def writes(path):
    with open(path, "wb") as file:
        file.write(b"x")
    os.unlink(path)
    return True


def runs(*command):
    return subprocess.run(command, check=False, capture_output=True, timeout=20).returncode == 0


def runs_memory():
    fd = os.memfd_create("probe", 0)
    os.write(fd, b"#!/bin/sh\nexit 0\n")
    done = subprocess.run([f"/proc/self/fd/{fd}"], check=False, pass_fds=[fd], timeout=20)
    return done.returncode == 0


def forks():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


def allocates(size):
    with mmap.mmap(-1, size) as memory:  # reserved, and not used
        return len(memory) == size


def lists_home(folder):
    """More than the way to libraries that are installed below it."""
    ways = [path for path in (*sys.path, os.__file__) if path.startswith(folder)]
    entries = [os.path.join(folder, name) for name in os.listdir(folder)]
    return any(not any(way.startswith(entry) for way in ways) for entry in entries)


def fills_a_file(folder, size):
    path = os.path.join(folder, "big")
    try:
        with open(path, "wb") as file:
            for _ in range(size // 1_000_000):
                file.write(bytes(1_000_000))
        return True
    finally:
        os.unlink(path)


def starts_threads(number):
    done = threading.Event()
    started = []
    try:
        for _ in range(number):
            started.append(threading.Thread(target=done.wait))
            started[-1].start()
    finally:
        done.set()
        for thread in started:
            if thread.ident is not None:
                thread.join()
    return True


def traces(pid):
    seize, detach = 0x4206, 17
    if (
        LIBC.syscall(
            ctypes.c_long(NUMBERS["ptrace"]), *[ctypes.c_long(n) for n in (seize, pid, 0, 0)]
        )
        != 0
    ):
        return False
    LIBC.syscall(ctypes.c_long(NUMBERS["ptrace"]), *[ctypes.c_long(n) for n in (detach, pid, 0, 0)])
    return True


def kills(pid):
    os.kill(pid, 0)
    return True


def sends_signals_by_socket(pid):
    """F_SETOWN and F_SETSIG: a socket may send any signal to a process of the same user."""
    import fcntl

    ours, theirs = socket.socketpair()
    with ours, theirs:
        fcntl.fcntl(ours, fcntl.F_SETOWN, pid)
    return True


def lowers_a_limit_of(pid):
    resource.prlimit(pid, resource.RLIMIT_CORE)
    return True


def strange_descriptors():
    """Open descriptors besides 0-2, the log, the connection to main, the own memory file, the span file."""
    return sum(attempt(lambda fd=fd: bool(os.fstat(fd))) for fd in range(3, 256)) > 4


def looks_up():
    """The environment of this process from its beginning, not only what Python shows."""
    seen = dict(os.environ)
    try:
        with open("/proc/self/environ", "rb") as file:
            return b"PROBE_SECRET" in file.read() or "PROBE_SECRET" in seen
    except OSError:
        return "PROBE_SECRET" in seen


def keeps_dying_with_parent():
    """Whether it can take back the parent-death signal."""
    return LIBC.prctl(1, 0, 0, 0, 0) == 0


def attempt(action):
    try:
        return bool(action())
    except BaseException as error:
        if type(error).__name__ in ("DeadlineExceeded", "CallCancelled"):
            raise
        return False


def _(t):
    unix, stream, inet = socket.AF_UNIX, socket.SOCK_STREAM, socket.AF_INET
    mib = 1024 * 1024
    attempts = {
        "strange descriptors": strange_descriptors,
        "TCP to this machine": lambda: connects(inet, stream, tuple(t["tcp"])),
        "TCP listener": lambda: socket.create_server(("127.0.0.1", 0)).close() or True,
        "UDP": lambda: sends(t["udp"]),
        "netlink": lambda: opens(socket.AF_NETLINK),
        "packet": lambda: opens(socket.AF_PACKET),
        "vsock": lambda: opens(socket.AF_VSOCK, stream),
        "abstract unix socket": lambda: connects(unix, stream, t["abstract"]),
        "unix socket of others": lambda: connects(unix, stream, t["unix"]),
        "second connection to main": connects_again,
        "secret file": lambda: reads(t["secret"]),
        "password file": lambda: reads("/etc/passwd"),
        "home": lambda: lists_home(t["home"]),
        "configuration": lambda: reads(t["config"]),
        "list of processes": lambda: reads(f"/proc/{t['victim']}/stat"),
        "environment of others": lambda: reads(f"/proc/{t['victim']}/environ"),
        "memory of others": lambda: raw("process_vm_readv", t["victim"], 0, 0, 0, 0, 0),
        "ptrace": lambda: traces(t["victim"]),
        "kill": lambda: kills(t["victim"]),
        "signal by a socket": lambda: sends_signals_by_socket(t["victim"]),
        "pidfd": lambda: raw("pidfd_open", t["victim"], 0),
        "sight of others": lambda: os.getpgid(t["victim"]) > 0,
        "limits of others": lambda: lowers_a_limit_of(t["victim"]),
        "write to a folder of the machine": lambda: writes(os.path.join(t["folder"], "x")),
        "write to the library": lambda: writes(os.path.join(os.path.dirname(os.__file__), "probe_x.py")),
        "write to blockx": lambda: writes(os.path.join(os.path.dirname(sys.modules["blockx"].__file__), "x.py")),
        "write beside the socket": writes_beside_socket,
        "write to shared memory": lambda: writes("/dev/shm/blockx-probe"),
        "system V shared memory": lambda: raw("shmget", 0, 4096, 0o1600),
        "run a shell": lambda: runs("/bin/sh", "-c", "exit 0"),
        "run Python": lambda: runs(sys.executable, "-c", "pass"),
        "run from memory": runs_memory,
        "fork": forks,
        "clone3 looks": lambda: raw("clone3", 0, 0),
        "mount": lambda: raw("mount", b"x", b"/", b"nofs", 0, 0),
        "user namespace": lambda: raw("unshare", 0x1000_0000),
        "become root": lambda: os.setuid(0) is None,
        "bpf": lambda: raw("bpf", 0, 0, 0),
        "keyctl": lambda: raw("keyctl", 0, 0, 0),
        "userfaultfd": lambda: raw("userfaultfd", 0),
        "perf": lambda: raw("perf_event_open", 0, 0, 0, 0, 0),
        "io_uring": lambda: raw("io_uring_setup", 1, 0),
        "file handles": lambda: raw("open_by_handle_at", 0, 0, 0),
        "own filter": lambda: raw("seccomp", 2, 0, 0),
        "device node": lambda: os.mknod(os.path.join(t["folder"], "node"), 0o600 | 0o020000, os.makedev(1, 3)) is None,
        "outlive the parent": keeps_dying_with_parent,
        "secret of the environment": looks_up,
        "memory over the limit": lambda: allocates(t["too_many_mib"] * mib),
        "big file": lambda: fills_a_file(t["temporary"], 100 * mib),
        "400 threads": lambda: starts_threads(400),
        "20 threads": lambda: starts_threads(20),
    }  # fmt: skip
    # Our own ends: what would end the executor is seen by its absence in the results.
    signal.raise_signal(signal.SIGWINCH)
    return {name: attempt(action) for name, action in attempts.items()}
