"""Checks the peer of a Unix socket, and tunes the heap for large messages.

The kernel records the credentials of a client when it connects, and those of a server
when it calls listen(2). Neither side can forge them (unix(7)).
"""

from __future__ import annotations

import os
import socket
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
