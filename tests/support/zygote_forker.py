"""Forks zygotes for tests, in a tenth of the time of a new interpreter.

A fork has the state of a new interpreter before it knows its node: the imports of every
zygote and of all modules of test tasks. The zygote is a child of the process that asks,
as if that process had started it, and ends as an interpreter does.
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
"""The largest request in bytes."""
IMPORTED: Final = (
    "aiogpu.api.decorator",
    "aiogpu.api.remote_function",
    "aiogpu.api.actors.actor",
    "asyncio",
    "difflib",
)
"""Imports of every module of test tasks: three quarters of a worker's cost, which each
worker of each test would pay again. A zygote learns these after its first worker."""
SYS_CLONE: Final = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT: Final = 0x8000
CLONE_CHILD_SETTID: Final = 0x1000000
PR_GET_TID_ADDRESS: Final = 40
_NUMBERS: Final = 3
_INT: Final = 4


def serve(descriptor: int) -> dict[str, object] | None:
    """Fork for each request, until the socket is closed.

    Returns:
        In a fork, the fields with which the zygote begins; None in the forker.
    """
    prepare()
    with socket.socket(fileno=descriptor) as requests:
        while True:
            request, descriptors = receive(requests)
            if not request:
                return None
            try:
                pid = fork_sibling()
            except OSError as error:
                answer(requests, -(error.errno or 1))
            else:
                if pid == 0:
                    return begin(requests, request, *descriptors)
            for each in descriptors:
                os.close(each)


def receive(requests: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a request with descriptors; `recv_fds` would import `array`."""
    space = socket.CMSG_SPACE(_NUMBERS * _INT)
    request, ancillary, _, _ = requests.recvmsg(LARGEST, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = [
        int.from_bytes(data[place : place + _INT], sys.byteorder)
        for _, _, data in ancillary
        for place in range(0, _NUMBERS * _INT, _INT)
    ]
    return request, descriptors


def answer(requests: socket.socket, number: int) -> None:
    """Send the zygote's process id, or an error number below zero."""
    requests.send(number.to_bytes(_INT, "little", signed=True))


def prepare(others: tuple[str, ...] = ()) -> None:
    """Do the first work of each zygote, which then finds the work done."""
    for name in (*NEEDED, *IMPORTED, *others):
        importlib.import_module(name)
    Warmup().play(birth.ROUNDS)
    birth.ROUNDS = 1  # type: ignore[misc]
    gc.collect()
    gc.freeze()


def begin(
    requests: socket.socket, request: bytes, page: int, output: int, place: int
) -> dict[str, object]:
    """Take on the state of a new interpreter, and report the process id."""
    try:
        os.setsid()
        os.fchdir(place)
    except OSError as error:
        answer(requests, -(error.errno or 1))
        os._exit(1)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.close(place)
    fields, environ = marshal.loads(request)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = fields["sys_path"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    answer(requests, os.getpid())
    requests.close()
    return {**fields, "page": page}


def fork_sibling() -> int:
    """Fork a child of this process's parent (clone(2)).

    Like `fork`, stores the child's id for the C library, if the kernel says where.

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
    # The fourth or the fifth, depending on the architecture; the other is ignored.
    pid = int(kernel._syscall(number, ctypes.c_ulong(flags), none, none, place, place))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    problem = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(problem, f"clone: {os.strerror(problem)}")
    return pid
