"""How an executor gives up what it does not need, before any user code: the system calls, in order.

Main thread of the executor, while it has no other thread (stage B: when its helper threads run). Which steps
are taken, ``supervisor.sandbox`` has decided; here each either works or ends the process: nothing is skipped.

- ``harden``: every executor. It gains no privileges, leaves no core, shows itself to no debugger of its user.
- ``enter``, stage A, before it connects: control groups, namespaces, a private root of read-only binds, limits,
  a user id of its own, no capabilities, then what a change of the id takes back, then Landlock.
- ``seal``, stage B, when it is connected and its helper threads run: the filter of system calls.

Traps: a new id clears the parent-death signal, so that comes last; an open descriptor stays usable whatever is
unmounted, so that they are closed first; the old root stays reachable until it is detached.
"""

import ctypes
import dataclasses
import errno
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Final, NoReturn, Protocol, cast

from blockx.executor import landlock, seccomp, vitals
from blockx.executor.syscall_numbers import NUMBERS
from blockx.ipc.launch import Confinement, ExecutorLaunch, ProcessLimits

SOCKET_FOLDER: Final = "/run/blockx"
"""Where a private root has the folder of the slot's socket."""
TMP: Final = "/tmp"
ROOT_BYTES: Final = 1024 * 1024
"""Size of the private root itself: folders to bind to, no content."""
SYSTEM_FILES: Final = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache",
    "/usr/share/zoneinfo", "/etc/localtime",
)  # fmt: skip
"""Libraries that extension modules load late, and time zones."""
DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS = 0x0002_0000, 0x0200_0000, 0x0400_0000
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000,
)  # fmt: skip
NAMESPACES: Final = ("mount", "net", "ipc", "uts", "cgroup")
_UNSHARE: Final = _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS | _CLONE_NEWCGROUP
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x4_0000
_MNT_DETACH: Final = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_SIZE: Final = 32
_CAPABILITY_VERSION: Final = 0x2008_0522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p]
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


class ConfinementError(OSError):
    """A step failed; the text names it."""

    def __str__(self) -> str:
        return str(self.strerror)


class Descriptor(Protocol):
    """What ``multiprocessing.reduction.DupFd`` makes, which has no public type."""

    def detach(self) -> int: ...


def harden(limits: ProcessLimits) -> None:
    """What every executor gives up. Sets the parent-death signal (again, where the user id changed).

    Raises:
        ConfinementError: a step failed.
    """
    _set_limits(limits)
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, 0)
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def enter(launch: ExecutorLaunch, confinement: Confinement) -> str:
    """Stage A; returns the path of the socket as it is now.

    With a PID namespace it returns in a new process; the old one mirrors its end and never returns.

    Raises:
        ConfinementError: a step failed.
    """
    for group in confinement.groups:
        join_group(group)
    socket_path = launch.socket_path
    if confinement.namespaces != "none":
        read_only = [*library_paths(), *SYSTEM_FILES, *confinement.read_only]
        _unshare(confinement)
        if confinement.pid_namespace:
            _fork_into_namespace()
        _build_root(confinement, os.path.dirname(socket_path), read_only)
        socket_path = f"{SOCKET_FOLDER}/{os.path.basename(socket_path)}"
        rules = [("/", landlock.READ), (TMP, landlock.WRITE)]
    else:
        paths = [*library_paths(), *SYSTEM_FILES, *confinement.read_only]
        rules = [(path, _read_right(path)) for path in paths]
    _drop_privileges(confinement.uid)
    harden(launch.limits)
    if confinement.landlock_abi:
        rules += [(device, landlock.DEVICE) for device in DEVICES]
        _step("Landlock", landlock.restrict, confinement.landlock_abi, rules)
    os.environ["HOME"] = os.environ["TMPDIR"] = TMP
    return socket_path


def seal() -> None:
    """Stage B: the filter of system calls, for all threads.

    Raises:
        ConfinementError: the kernel does not take it.
    """
    _step("the filter of system calls", seccomp.load)


def probe(launch: ExecutorLaunch, answer: object) -> NoReturn:
    """Entry of a process that only tries: confine itself as ``launch`` says, and tell how that went.

    The best version of Landlock is used, whatever ``launch`` says. ``answer``: the descriptor to write to, as
    a ``multiprocessing.reduction.DupFd``. What is written is ``ok <version of Landlock>``, or ``failed <that
    version> <the step and why>``.
    """
    descriptor = cast(Descriptor, answer).detach()
    version = landlock.abi()
    outcome = f"failed {version} it ended early"
    try:
        assert launch.confinement is not None
        confinement = dataclasses.replace(launch.confinement, landlock_abi=version)
        _require(confinement)
        _reach(enter(launch, confinement), confinement.uid)
        seal()
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        outcome = f"ok {version}"
    except (OSError, RuntimeError) as error:
        outcome = f"failed {version} {error}"
    finally:
        os.write(descriptor, outcome.encode("utf-8", "replace"))
        os._exit(0)


def _require(confinement: Confinement) -> None:
    """What no step would miss. Raises ConfinementError."""
    machine = os.uname().machine
    if not seccomp.is_known(machine):
        raise ConfinementError(errno.ENOSYS, f"no table of system calls for {machine}")
    if confinement.namespaces == "none" and not confinement.landlock_abi:
        raise ConfinementError(errno.ENOSYS, "Landlock is not in this kernel, or switched off")


def _reach(socket_path: str, uid: int) -> None:
    """What an executor needs in its new place. Raises ConfinementError if it is not to be had."""
    for folder in [os.path.dirname(socket_path), os.path.dirname(os.__file__), *sys.path]:
        try:
            if os.path.isabs(folder):
                os.stat(f"{folder}/.")
        except PermissionError:
            who = f"user id {uid or os.getuid()}"
            raise ConfinementError(errno.EACCES, f"{who} cannot reach {folder}") from None
        except OSError:  # no folder, or missing for everybody
            continue


def library_paths() -> list[str]:
    """Absolute folders and files that imports of installed packages need, as this process finds them.

    Where blockx runs from a checkout, only its own modules of that folder: beside them lie
    configurations with the keys of nodes.
    """
    own_folder = Path(__file__).resolve().parents[2]
    found: list[str] = []
    for entry in sys.path:
        if not os.path.isabs(entry):
            continue
        if own_folder.name not in _PACKAGE_FOLDERS and Path(entry).resolve() == own_folder:
            found += [str(path) for name in _OWN_MODULES for path in Path(entry).glob(name)]
        else:
            found.append(entry)
    return [*found, *(folder for folder in _mapped_library_folders() if folder not in sys.path)]


_OWN_MODULES: Final = ("blockx", "blockdb.py", "blockx_sdk.py", "leafage.py", "*__mypyc.*.so")
"""The last: what the modules of a compiled build share."""
_PACKAGE_FOLDERS: Final = ("site-packages", "dist-packages")


def _mapped_library_folders() -> list[str]:
    """Folders of the shared libraries that are loaded: where the next ones will be looked for."""
    with open("/proc/self/maps", "rb") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if b".so" in line}
    return sorted({os.fsdecode(os.path.dirname(path)) for path in paths if path.startswith(b"/")})


def die_with_parent() -> None:
    """SIGKILL when the parent dies; at once if it has died already."""
    parent = os.getppid()
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become_standard_error(pipe: object) -> None:
    """Write errors to ``pipe``, a ``multiprocessing.reduction.DupFd``, instead of to main's own stderr."""
    descriptor = cast(Descriptor, pipe).detach()
    os.dup2(descriptor, 2)
    os.close(descriptor)


def join_group(file: str) -> None:
    """Move this process into a control group. Raises ConfinementError."""
    try:
        Path(file).write_text("0")
    except OSError as error:
        raise ConfinementError(error.errno, f"control group {file}: {error.strerror}") from None


# ---- namespaces and the private root -------------------------------------------------------------


def _unshare(confinement: Confinement) -> None:
    flags = _UNSHARE | (_CLONE_NEWPID if confinement.pid_namespace else 0)
    if confinement.namespaces == "root":
        _call("unshare", flags)
    else:
        uid, gid = os.getuid(), os.getgid()
        _call("unshare", flags | _CLONE_NEWUSER)
        # The same ids inside: the kernel tells main who connects.
        for name, text in (
            ("uid_map", f"{uid} {uid} 1"), ("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"),
        ):  # fmt: skip
            _step(f"user namespace, {name}", Path(f"/proc/self/{name}").write_text, text)
    _call("sethostname", b"blockx", 6)


def _fork_into_namespace() -> None:
    """Go on as process 1 of the new PID namespace; this process ends as that one ends."""
    inner = os.fork()
    if inner:
        _mirror(inner)
    vitals.keep_statm()
    # Until ``harden``, for what fails on the way there. It is also in the group that main kills.
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal.SIGKILL)


def _mirror(inner: int) -> NoReturn:
    """Pass SIGTERM on to the inner process, and end the way it ends."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: os.kill(inner, signal.SIGTERM))
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))  # above all its copy of the log
    _set_limits(ProcessLimits())
    _pid, status = os.waitpid(inner, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code)


def _build_root(confinement: Confinement, socket_folder: str, read_only: list[str]) -> None:
    """A small file system with read-only views of what is needed; afterwards there is nothing else."""
    _mount("", "/", "", _MS_REC | _MS_PRIVATE)
    root = confinement.mount_point
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _mount("blockx", root, "tmpfs", flags, f"mode=755,size={ROOT_BYTES}")
    os.mkdir(root + TMP, 0o555)
    if confinement.tmp_bytes:
        _mount("blockx", root + TMP, "tmpfs", flags, f"mode=1777,size={confinement.tmp_bytes}")
    for path in outermost(read_only):
        _bind(path, root + path, _MS_NOSUID | _MS_NODEV)
    for path in DEVICES:
        _bind(path, root + path, _MS_NOSUID | _MS_NOEXEC)
    _bind(socket_folder, root + SOCKET_FOLDER, flags)
    # Last of the tmpfs: its folders are made. The mounts in it keep their own flags.
    _set_attributes(root, _MS_RDONLY | flags, recursive=False)
    os.chdir(root)
    _syscall("pivot_root", b".", b".")  # the old root lies on the new one, and is lifted off
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def outermost(paths: list[str]) -> list[str]:
    """Those that exist and lie below no other one, each once."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if os.path.exists(path)}):
        if path != "/" and not (kept and path.startswith(kept[-1] + "/")):
            kept.append(path)
    return kept


def _bind(source: str, target: str, flags: int) -> None:
    """Show ``source`` read-only at ``target``, with all that is mounted below it."""
    if os.path.isdir(source):
        os.makedirs(target, 0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o644))
    _mount(source, target, "", _MS_BIND | _MS_REC)
    _set_attributes(target, _MS_RDONLY | flags, recursive=True)


def _set_attributes(target: str, attributes: int, *, recursive: bool) -> None:
    """Attributes are added: in a user namespace those that are there may not be taken away."""
    words = b"".join(word.to_bytes(8, sys.byteorder) for word in (attributes, 0, 0, 0))
    _syscall(
        "mount_setattr", _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE if recursive else 0,
        ctypes.c_char_p(words), _MOUNT_ATTR_SIZE,
    )  # fmt: skip


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [os.fsencode(text) or None for text in (source, target, kind)]
    if _libc.mount(*texts, flags, os.fsencode(options) or None) != 0:
        raise _error(f"mount of {target}")


# ---- limits and privileges -----------------------------------------------------------------------


def _set_limits(limits: ProcessLimits) -> None:
    _set_limit(resource.RLIMIT_CORE, 0)
    for kind, value in (
        (resource.RLIMIT_AS, limits.address_space_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files_max),
        (resource.RLIMIT_FSIZE, limits.file_bytes_max),
        (resource.RLIMIT_NPROC, limits.threads_max),
    ):
        if value:
            _set_limit(kind, value)


def _set_limit(kind: int, value: int) -> None:
    """Soft and hard, never above what it has."""
    _soft, hard = resource.getrlimit(kind)
    lowered = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (lowered, lowered))


def _drop_privileges(uid: int) -> None:
    for number in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break  # past the last one, or it has no right to: then there is nothing to bound
    if uid:
        _step("setgroups", os.setgroups, [])
        _step("setresgid", os.setresgid, uid, uid, uid)
        _step("setresuid", os.setresuid, uid, uid, uid)
    header = _CAPABILITY_VERSION.to_bytes(4, sys.byteorder) + bytes(4)
    _syscall("capset", ctypes.c_char_p(header), ctypes.c_char_p(bytes(24)))


def _read_right(path: str) -> int:
    return landlock.READ if os.path.isdir(path) else landlock.READ_FILE


# ---- raw calls -----------------------------------------------------------------------------------


def _step(name: str, call: object, *arguments: object) -> None:
    try:
        call(*arguments)  # type: ignore[operator]
    except OSError as error:
        raise ConfinementError(error.errno, f"{name}: {error.strerror}") from None


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        raise _error(name)


def _syscall(name: str, *arguments: object) -> None:
    if _libc.syscall(NUMBERS[os.uname().machine][name], *arguments) != 0:
        raise _error(name)


def _prctl(name: str, option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise _error(f"prctl({name})")


def _error(name: str) -> ConfinementError:
    number = ctypes.get_errno()
    return ConfinementError(number, f"{name}: {os.strerror(number)}")
