"""Forks interpreters for tests: a zygote each, in a tenth of a fresh one's time.

What it forks is as far as a fresh interpreter comes before it knows its node: it has
imported what every zygote does, and what all modules of tests' tasks do. The zygote is
a child of the process that asks, as one that it had started, and ends as an interpreter
does.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import marshal
import os
import signal
import socket
import sys
from typing import Final

import aiogpu.worker.zygote.main  # noqa: F401
from aiogpu.linux import syscalls as kernel
from aiogpu.worker.zygote import bootstrap as birth
from aiogpu.worker.zygote.bootstrap import Warmup
from aiogpu.worker.zygote.preload import NEEDED

LARGEST: Final = 1 << 16
"""Bytes of what may be told of a zygote."""
IMPORTED: Final = (
    "aiogpu.api.decorator",
    "aiogpu.api.remote_function",
    "aiogpu.api.actors.actor",
    "asyncio",
    "difflib",
)
"""What every module of tasks of these tests imports, and each worker of each test would
anew: three quarters of what a worker costs. A zygote has learnt it after the first."""
SYS_CLONE: Final = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT: Final = 0x8000
CLONE_CHILD_SETTID: Final = 0x1000000
PR_GET_TID_ADDRESS: Final = 40
_NUMBERS: Final = 3
_INT: Final = 4


def serve(descriptor: int) -> dict[str, object] | None:
    """Fork for each request; ends as the socket does, and in a fork.

    Returns:
        What a zygote begins with, in a fork; None in the process that has forked them.
    """
    prepare()
    with socket.socket(fileno=descriptor) as asked:
        while True:
            told, passed = receive(asked)
            if not told:
                return None
            try:
                pid = fork_sibling()
            except OSError as error:
                answer(asked, -(error.errno or 1))
            else:
                if pid == 0:
                    return begin(asked, told, *passed)
            for each in passed:
                os.close(each)


def receive(asked: socket.socket) -> tuple[bytes, list[int]]:
    """A request and its descriptors; by `recv_fds` a zygote would have `array`."""
    space = socket.CMSG_SPACE(_NUMBERS * _INT)
    told, ancillary, _, _ = asked.recvmsg(LARGEST, space, socket.MSG_CMSG_CLOEXEC)
    passed = [
        int.from_bytes(data[place : place + _INT], sys.byteorder)
        for _, _, data in ancillary
        for place in range(0, _NUMBERS * _INT, _INT)
    ]
    return told, passed


def answer(asked: socket.socket, number: int) -> None:
    """Give the zygote's process id, or an error's number below zero."""
    asked.send(number.to_bytes(_INT, "little", signed=True))


def prepare(others: tuple[str, ...] = ()) -> None:
    """Do what each zygote would do first; it finds that it was done."""
    for name in (*NEEDED, *IMPORTED, *others):
        importlib.import_module(name)
    Warmup().play(birth.ROUNDS)
    birth.ROUNDS = 1  # type: ignore[misc]
    gc.collect()
    gc.freeze()


def begin(
    asked: socket.socket, told: bytes, page: int, output: int, place: int
) -> dict[str, object]:
    """Be what a fresh interpreter is, and say so."""
    try:
        os.setsid()
        os.fchdir(place)
    except OSError as error:
        answer(asked, -(error.errno or 1))
        os._exit(1)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.close(place)
    fields, environ = marshal.loads(told)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = fields["sys_path"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    answer(asked, os.getpid())
    asked.close()
    return {**fields, "page": page}


def fork_sibling() -> int:
    """Fork a child of this process's parent (clone(2)), whose id the C library learns.

    Where the kernel says where that looks for it, as `fork` would tell it.

    Raises:
        OSError: this kernel's number of `clone` is not known, or it refuses.
    """
    number = SYS_CLONE.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    place = ctypes.c_ulong()
    flags = CLONE_PARENT | signal.SIGCHLD
    if not kernel._prctl(PR_GET_TID_ADDRESS, ctypes.byref(place), 0, 0, 0):
        flags |= CLONE_CHILD_SETTID
    none = ctypes.c_ulong()
    ctypes.pythonapi.PyOS_BeforeFork()
    # Fourth or fifth, by the architecture; the other is not looked at.
    pid = int(kernel._syscall(number, ctypes.c_ulong(flags), none, none, place, place))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    problem = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(problem, f"clone: {os.strerror(problem)}")
    return pid
