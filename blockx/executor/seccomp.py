"""Which system calls a sandboxed executor may make: an allowlist as data, and the filter made of it.

Everything else answers EPERM, so that user code sees a PermissionError and goes on; a call by another
architecture's numbers ends the process, since the names below would mean other calls there. The filter
holds for all threads and cannot be taken back.

Why an own assembler: the program is a list of comparisons, and a library for that (libseccomp by ctypes)
takes 25 ms to load where this takes 0.5.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from blockx.executor.syscall_numbers import NUMBERS

ALLOWED: Final[Mapping[str, str]] = {
    "memory": "brk madvise mmap mprotect mremap munmap",
    "threads of this process, which clone makes": """
        arch_prctl exit exit_group futex gettid membarrier rseq sched_yield set_robust_list
        set_tid_address""",
    "its clocks, timers and the handling of its own signals": """
        alarm clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep pause
        restart_syscall rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend
        rt_sigtimedwait setitimer sigaltstack time timerfd_create timerfd_gettime timerfd_settime
        times""",
    "descriptors that are open": """
        close close_range copy_file_range dup dup2 dup3 fadvise64 fallocate fdatasync flock fstat
        fstatfs fsync ftruncate getdents64 lseek pread64 preadv preadv2 pwrite64 pwritev pwritev2
        read readv sendfile sync_file_range write writev""",
    "files by path: which ones, the private root and Landlock decide": """
        access chdir chmod creat faccessat faccessat2 fchdir fchmod fchmodat fgetxattr flistxattr
        futimesat getcwd getxattr lgetxattr link linkat listxattr llistxattr lstat mkdir mkdirat
        newfstatat open openat readlink readlinkat rename renameat renameat2 rmdir stat statfs statx
        symlink symlinkat truncate umask unlink unlinkat utime utimensat utimes""",
    "waiting for descriptors": """
        epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2
        pipe pipe2 poll ppoll pselect6 select""",
    "sockets that are connected: the one to main, pairs of its own (asyncio makes one)": """
        getpeername getsockname getsockopt recvfrom shutdown""",
    "who and where it is, and waiting for children that it cannot have": """
        getcpu getegid geteuid getgid getgroups getpgrp getpid getppid getrandom getresgid getresuid
        getrlimit getrusage getuid sched_get_priority_max sched_get_priority_min sysinfo uname wait4
        waitid""",
}
"""Why -> calls that are allowed whatever their arguments."""

_CLONE_THREAD: Final = 0x0001_0000
_CLONE_NEW_ANY: Final = 0x7E02_0000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_ALL_BITS: Final = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Check:
    """One argument of a call: ``argument & mask`` must be one of ``values``."""

    argument: int
    values: tuple[int, ...]
    mask: int = _ALL_BITS
    is_pointer: bool = False
    """64 bits are compared, not the low 32, which are all that the kernel itself looks at elsewhere."""


OWN_PID: Final = -1
"""Among ``Check.values``: the number of the process that loads the filter."""

_ABOUT_ITSELF: Final = (Check(0, (0, OWN_PID)),)
"""Of another process, the answer would tell whether there is one."""

CHECKED: Final[Mapping[str, tuple[Check, ...]]] = {
    "getpgid": _ABOUT_ITSELF,
    "getsid": _ABOUT_ITSELF,
    "sched_getaffinity": _ABOUT_ITSELF,
    "sched_getparam": _ABOUT_ITSELF,
    "sched_getscheduler": _ABOUT_ITSELF,
    # A thread of this process; no new process, no new namespace.
    "clone": (Check(0, (_CLONE_THREAD,), mask=_CLONE_THREAD | _CLONE_NEW_ANY),),
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, locks, F_DUPFD_CLOEXEC, locks of open files. Not
    # F_SETOWN and F_SETSIG, by which a socket sends any signal to any process of the same user.
    "fcntl": (Check(1, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 36, 37, 38)),),
    # TCGETS (isatty), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Not TIOCSTI, which types into a
    # terminal, nor FIOSETOWN.
    "ioctl": (Check(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
    # PR_SET_NAME, PR_GET_NAME, and names of memory (PR_SET_VMA), which libraries of C use.
    "prctl": (Check(0, (15, 16, 0x5356_4D41)),),
    # Reading limits.
    "prlimit64": (*_ABOUT_ITSELF, Check(2, (0,), is_pointer=True)),
    # Without an address: what is connected already.
    "sendto": (Check(4, (0,), is_pointer=True),),
    "socketpair": (Check(0, (1,)),),  # AF_UNIX
    "tgkill": (Check(0, (OWN_PID,)),),  # raise(), abort(), pthread_kill()
}
"""Calls that are allowed for some values of their arguments; all checks must hold."""

ANSWERED_ENOSYS: Final = ("clone3",)
"""libc then uses ``clone``, whose flags lie in an argument and not in memory, and can be looked at."""

_AUDIT_ARCH: Final = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_RET_KILL_PROCESS: Final = 0x8000_0000
_RET_ERRNO: Final = 0x0005_0000
_RET_ALLOW: Final = 0x7FFF_0000
_LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_SECCOMP_SET_MODE_FILTER: Final = 1
_SECCOMP_FILTER_FLAG_TSYNC: Final = 1

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""


def is_known(machine: str) -> bool:
    """Whether there is a table for this architecture."""
    return machine in _AUDIT_ARCH


def program(machine: str, pid: int) -> list[Instruction]:
    """The filter for an architecture and the process ``pid``."""
    numbers = NUMBERS[machine]
    code: list[Instruction] = [
        (_LOAD_WORD, 0, 0, _ARCH_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _RET_KILL_PROCESS),
        (_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
    ]
    # The kernel itself remembers which numbers are always allowed, so their order costs nothing.
    for names in ALLOWED.values():
        for name in names.split():
            if name in numbers:
                code += _when(numbers[name], [(_RETURN, 0, 0, _RET_ALLOW)])
    for name, checks in CHECKED.items():
        code += _when(numbers[name], _body(checks, pid))
    for name in ANSWERED_ENOSYS:
        code += _when(numbers[name], [(_RETURN, 0, 0, _RET_ERRNO | errno.ENOSYS)])
    return [*code, (_RETURN, 0, 0, _RET_ERRNO | errno.EPERM)]


def load() -> None:
    """Put all threads of this process under the filter, for good. Needs NO_NEW_PRIVS.

    Raises:
        OSError: the kernel does not take it.
    """
    code = program(os.uname().machine, os.getpid())
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
    instructions = ctypes.create_string_buffer(packed)
    header = struct.pack("@HP", len(code), ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    number = NUMBERS[os.uname().machine]["seccomp"]
    answer = libc.syscall(
        number, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, ctypes.c_char_p(header)
    )
    if answer != 0:  # -1, or the thread that could not follow
        code_of_error = ctypes.get_errno() if answer < 0 else errno.EBUSY
        raise OSError(code_of_error, f"seccomp: {os.strerror(code_of_error)}")


def _when(number: int, body: list[Instruction]) -> list[Instruction]:
    """If the call has this number: ``body``, which must return; the number stays loaded otherwise."""
    return [(_JUMP_IF_EQUAL, 0, len(body), number), *body]


def _body(checks: tuple[Check, ...], pid: int) -> list[Instruction]:
    """Allow if all checks hold, else EPERM."""
    refuse: Instruction = (_RETURN, 0, 0, _RET_ERRNO | errno.EPERM)
    code: list[Instruction] = []
    for check in checks:
        offset = _ARGUMENTS_OFFSET + 8 * check.argument
        words = [(offset, check.mask)]
        if check.is_pointer:
            words.append((offset + 4, _ALL_BITS))
        for word_offset, mask in words:
            code.append((_LOAD_WORD, 0, 0, word_offset))
            if mask != _ALL_BITS:
                code.append((_AND, 0, 0, mask))
            values = [pid if value == OWN_PID else value for value in check.values]
            # Each comparison jumps over the rest of them and over the refusal.
            for left, value in zip(range(len(values), 0, -1), values, strict=True):
                code.append((_JUMP_IF_EQUAL, left, 0, value))
            code.append(refuse)
    return [*code, (_RETURN, 0, 0, _RET_ALLOW)]
