"""The filter of system calls, run by a small interpreter of its language: no kernel is asked."""

import errno
import re
from pathlib import Path

import pytest

from blockx.executor import seccomp
from blockx.executor.syscall_numbers import NUMBERS

PID = 4_711
ALLOW, KILL, EPERM, ENOSYS = "allow", "kill", errno.EPERM, errno.ENOSYS
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386_ARCH = 0x40000003
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
REFUSED = {
    "x86_64": {
        "socket": 41, "connect": 42, "sendmsg": 46, "recvmsg": 47, "bind": 49, "listen": 50,
        "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "ptrace": 101, "setuid": 105,
        "mount": 165, "tkill": 200, "io_setup": 206, "mq_open": 240, "keyctl": 250, "unshare": 272,
        "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "name_to_handle_at": 303, "setns": 308,
        "process_vm_readv": 310, "seccomp": 317, "memfd_create": 319, "bpf": 321, "execveat": 322,
        "userfaultfd": 323, "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_open": 434,
        "landlock_create_ruleset": 444,
    },
    "aarch64": {
        "socket": 198, "connect": 203, "bind": 200, "sendmsg": 211, "execve": 221, "kill": 129,
        "tkill": 130, "ptrace": 117, "setuid": 146, "mount": 40, "unshare": 97, "keyctl": 219,
        "bpf": 280, "userfaultfd": 282, "memfd_create": 279, "io_uring_setup": 425, "seccomp": 277,
    },
}  # fmt: skip


def verdict(machine, number, *arguments, arch=None):
    """What the filter answers to a call."""
    words = [number, ARCH[machine] if arch is None else arch, 0, 0]
    for argument in (*arguments, *[0] * (6 - len(arguments))):
        words += [argument & 0xFFFF_FFFF, argument >> 32 & 0xFFFF_FFFF]
    code, at, register = seccomp.program(machine, PID), 0, 0
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        if operation == 0x20:
            register = words[operand // 4]
        elif operation == 0x54:
            register &= operand
        elif operation == 0x15:
            at += if_true if register == operand else if_false
        else:
            assert operation == 0x06
            if operand == 0x7FFF0000:
                return ALLOW
            return KILL if operand == 0x80000000 else operand & 0xFFFF


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request):
    return request.param


def test_what_is_allowed_is_allowed_and_everything_else_is_refused(machine):
    numbers = NUMBERS[machine]
    named = {name for names in seccomp.ALLOWED.values() for name in names.split()}
    allowed = {numbers[name] for name in named & numbers.keys()}
    checked = {numbers[name] for name in seccomp.CHECKED}
    for number in set(range(600)) - checked - {numbers["clone3"]}:
        assert verdict(machine, number) == (ALLOW if number in allowed else EPERM), number


def test_nothing_that_leads_out_is_on_the_list(machine):
    assert {verdict(machine, number) for number in REFUSED[machine].values()} == {EPERM}


def test_another_architecture_ends_the_process_and_x32_numbers_are_unknown(machine):
    assert verdict(machine, NUMBERS[machine]["read"], arch=I386_ARCH) == KILL
    assert verdict("x86_64", 0x4000_0000 | NUMBERS["x86_64"]["read"]) == EPERM


def test_threads_can_be_made_and_processes_and_namespaces_cannot(machine):
    clone = NUMBERS[machine]["clone"]
    thread = 0x3D0F00  # as glibc makes one
    assert verdict(machine, clone, thread) == ALLOW
    assert verdict(machine, clone, 17) == EPERM  # fork
    assert verdict(machine, clone, 0x4111) == EPERM  # vfork
    for namespace in (0x20000, *(1 << bit for bit in range(25, 31))):
        assert verdict(machine, clone, thread | namespace) == EPERM
    assert verdict(machine, NUMBERS[machine]["clone3"], 1, 88) == ENOSYS


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("tgkill", [(PID, 1, 6)], [(PID + 1, 1, 6), (0, 1, 6)]),
        ("ioctl", [(1, 0x5401), (1, 0x5421)], [(1, 0x5412), (1, 0x8901)]),  # TIOCSTI, FIOSETOWN
        ("fcntl", [(1, 3), (1, 1030)], [(1, 8), (1, 10), (1, 1033)]),  # SETOWN, SETSIG, ADD_SEALS
        ("prctl", [(15,), (16,)], [(1,), (4,), (8,), (22,), (38,)]),
        ("getpgid", [(0,), (PID,)], [(1,)]),
        ("sched_getaffinity", [(0, 8), (PID, 8)], [(1, 8)]),
        ("socketpair", [(1, 1)], [(2, 1), (16, 3), (40, 1)]),
        ("sendto", [(3, 1, 1, 0, 0)], [(3, 1, 1, 0, 0x1000), (3, 1, 1, 0, 0x1000 << 32)]),
        (
            "prlimit64",
            [(0, 7, 0, 1), (PID, 7, 0, 1)],
            [(0, 7, 1, 0), (1, 7, 0, 1), (0, 7, 1 << 32, 0)],
        ),
    ],
)
def test_some_calls_depend_on_their_arguments(machine, name, allowed, refused):
    number = NUMBERS[machine][name]
    assert [verdict(machine, number, *words) for words in allowed] == [ALLOW] * len(allowed)
    assert [verdict(machine, number, *words) for words in refused] == [EPERM] * len(refused)


@pytest.mark.skipif(
    not all(header.exists() for header in HEADERS.values()),
    reason="the kernel's headers are not installed (linux-libc-dev)",
)
def test_the_numbers_are_those_of_the_headers(machine):
    text = HEADERS[machine].read_text()
    # The generic header has some under a second name: __NR3264_fstatat is newfstatat and so on.
    found = {name: int(n) for name, n in re.findall(r"#define __NR_(\w+)\s+(\d+)\b", text)}
    aliases = dict(re.findall(r"#define __NR_(\w+)\s+__NR3264_(\w+)", text))
    second = {name: int(n) for name, n in re.findall(r"#define __NR3264_(\w+)\s+(\d+)\b", text)}
    found |= {name: second[alias] for name, alias in aliases.items() if alias in second}
    assert {name: found.get(name) for name in NUMBERS[machine]} == NUMBERS[machine]
