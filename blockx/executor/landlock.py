"""Landlock: what the process may open, and that it reaches nobody by TCP, abstract sockets or signals.

By raw system calls. It holds for the calling thread and for the threads and processes that it starts
later: call it while there is one thread. Each version (ABI) of the kernel knows more; what it does not know
is left to the other layers.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Final

from blockx.executor.syscall_numbers import NUMBERS

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE = 1 << 13, 1 << 14

READ: Final = _READ_FILE | _READ_DIR
READ_FILE: Final = _READ_FILE
DEVICE: Final = _READ_FILE | _WRITE_FILE
WRITE: Final = (
    READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM
    | _REFER | _TRUNCATE
)  # fmt: skip

_FILE_RIGHTS: Final[Mapping[int, int]] = {1: 13, 2: 14, 3: 15, 5: 16}
"""ABI -> how many rights of files it knows, counted from bit 0."""
_TCP_ABI, _TCP_RIGHTS = 4, 0b11
_SCOPE_ABI, _SCOPES = 6, 0b11
"""Abstract Unix sockets and signals of processes outside."""
_CREATE_RULESET_VERSION: Final = 1
_RULE_PATH_BENEATH: Final = 1

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_numbers = NUMBERS.get(os.uname().machine, {})


def abi() -> int:
    """The version that this kernel has. 0: none, or switched off."""
    if not _numbers:
        return 0
    answer = _syscall(_numbers["landlock_create_ruleset"], None, 0, _CREATE_RULESET_VERSION)
    return max(0, int(answer))


def restrict(abi_version: int, rules: Sequence[tuple[str, int]]) -> None:
    """Only ``rules``, pairs of a path and what may be done at and below it, are left of all files.

    Paths that do not exist or cannot be reached are left out. Needs NO_NEW_PRIVS.

    Raises:
        OSError: the kernel refuses.
    """
    known = max(rights for version, rights in _FILE_RIGHTS.items() if version <= abi_version)
    handled = (1 << known) - 1
    attributes = struct.pack(
        "=QQQ",
        handled,
        _TCP_RIGHTS if abi_version >= _TCP_ABI else 0,
        _SCOPES if abi_version >= _SCOPE_ABI else 0,
    )
    size = 24 if abi_version >= _SCOPE_ABI else 16 if abi_version >= _TCP_ABI else 8
    ruleset = _checked("landlock_create_ruleset", ctypes.c_char_p(attributes), size, 0)
    try:
        for path, rights in rules:
            _add(ruleset, path, rights & handled)
        _checked("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _add(ruleset: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            return
        raise OSError(error.errno, f"{path}: {error.strerror}") from None
    try:
        attributes = struct.pack("=Qi", rights, beneath)
        _checked("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, ctypes.c_char_p(attributes), 0)
    finally:
        os.close(beneath)


def _checked(name: str, *arguments: object) -> int:
    answer = int(_syscall(_numbers[name], *arguments))
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return answer
