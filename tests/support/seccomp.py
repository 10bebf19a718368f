"""A filter that denies system calls to this process, as old container runtimes do."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Final

NUMBERS: Final = {
    "x86_64": {"memfd_create": 319, "pidfd_open": 434},
    "aarch64": {"memfd_create": 279, "pidfd_open": 434},
}
"""Numbers of system calls, by machine."""

PR_SET_SECCOMP: Final = 22
PR_SET_NO_NEW_PRIVS: Final = 38
SECCOMP_MODE_FILTER: Final = 2
ALLOW: Final = 0x7FFF0000
ERRNO: Final = 0x00050000
LOAD: Final = 0x20
JUMP_IF_EQUAL: Final = 0x15
RETURN: Final = 0x06


def deny(call: str, error: int = errno.EPERM) -> None:
    """Have a system call fail, in this process and in all that it starts.

    Raises:
        OSError: this system has no filters.
    """
    steps = (
        (LOAD, 0, 0, 0),  # the number of the call
        (JUMP_IF_EQUAL, 1, 0, NUMBERS[platform.machine()][call]),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERRNO | error),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *s) for s in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
