"""Checks who serves a Unix socket or owns a file; tunes the heap for large messages.

The kernel records the credentials of a client when it connects, and those of a server
when it calls listen(2). Neither side can forge them (unix(7)).
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable
from struct import Struct
from typing import Final, NamedTuple

from aiogpu.errors import NodeError

_UCRED: Final = Struct("iII")


class Credentials(NamedTuple):
    """The credentials of the process at the other end of a socket.

    Attributes:
        pid: process id, 0 if the process is in another PID namespace.
        uid: effective user id.
        gid: effective group id.
    """

    pid: int
    uid: int
    gid: int


def peer_credentials(connected: socket.socket) -> Credentials:
    """Return the credentials of the process at the other end (SO_PEERCRED)."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Credentials(*_UCRED.unpack(raw))


def check_server(connected: socket.socket, path: str) -> None:
    """Refuse a server of another user. Must be called before anything is sent.

    Args:
        connected: a socket that has just connected.
        path: path of the server's socket, for the message.

    Raises:
        NodeError: the server belongs to another user.
    """
    server = peer_credentials(connected)
    if server.uid != os.geteuid():
        raise NodeError(
            f"the process that listens at {path} (pid {server.pid}) belongs to "
            f"{user(server.uid)}, and this process to {user(os.geteuid())}; nothing "
            f"was sent. A node serves only the user who started it. Stop that process, "
            f"or give the socket of your own node."
        )


def user(uid: int) -> str:
    """Return a user id with its name, if it has one: "uid 65534 (nobody)"."""
    # Imported late: workers need it only for an error.
    import pwd

    try:
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"uid {uid}"


class UnexpectedFileError(OSError):
    """A file is not of the expected kind, or belongs to another user."""


def kind(status: os.stat_result) -> str:
    """Return the type of a file in words."""
    words = {
        stat.S_IFREG: "a regular file",
        stat.S_IFDIR: "a directory",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
    }
    return words.get(stat.S_IFMT(status.st_mode), "a device")


def is_own(uid: int) -> bool:
    """Return True for this user."""
    return uid == os.geteuid()


def is_trusted(uid: int) -> bool:
    """Return True for root and this user, whose files no other user can replace.

    A user namespace that does not map root, as in a container of a plain user, shows
    root's files as those of the overflow uid. All users that are not mapped look alike,
    so files of the others are trusted there as well; see user_namespaces(7).
    """
    return uid == 0 or is_own(uid) or _is_unmapped(uid)


def _is_unmapped(uid: int) -> bool:
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            if uid != int(file.read()):
                return False
        with open("/proc/self/uid_map", encoding="ascii") as file:
            ranges = [tuple(map(int, line.split())) for line in file]
    except (OSError, ValueError):
        return False
    return not any(first <= uid < first + count for first, _, count in ranges)


def open_checked(
    path: str,
    flags: int,
    is_kind: Callable[[int], bool],
    is_owner: Callable[[int], bool],
) -> int:
    """Open a file, check what was opened, and return the descriptor.

    Symbolic links are not followed, and the call does not wait for the other end of a
    named pipe. The descriptor is in non-blocking mode.

    Args:
        path: the file.
        flags: flags of open(2), without `O_CREAT`.
        is_kind: a function of `stat` that accepts the file's mode.
        is_owner: accepts the file's uid: `is_own` or `is_trusted`.

    Raises:
        UnexpectedFileError: the file is of another kind or of another user.
        OSError: the file cannot be opened.
    """
    extra = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags | extra)
    status = os.fstat(descriptor)
    if is_kind(status.st_mode) and is_owner(status.st_uid):
        return descriptor
    os.close(descriptor)
    found = f"it is {kind(status)} of {user(status.st_uid)}"
    raise UnexpectedFileError(errno.EPERM, found, path)


KEPT: Final = 1 << 20
"""The largest block that stays on the heap, in bytes: four times the largest message.
Up to twice as many bytes may stay unused at the end of the heap."""


def keep_pages() -> None:
    """Make glibc reuse the pages of freed blocks of up to `KEPT` bytes.

    By default glibc returns a freed block of 128 KiB or more to the kernel, so each
    copy of a large message faults its pages in again. Measured, these faults cost more
    than everything else about the message. But glibc adapts: after a larger block was
    freed, it keeps blocks up to that size (`mallopt(3)`, under M_MMAP_THRESHOLD). This
    function frees such a block before the first message. It has no effect if the
    program has freed a larger block or set the threshold itself, or with another C
    library. Forks inherit the setting.
    """
    bytes(KEPT)  # calloc gets zeroed pages from the kernel and touches none
