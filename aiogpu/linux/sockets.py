"""Checks the peer of a Unix socket, and tunes the heap for its buffers.

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
    """A process at the other end of a socket.

    Attributes:
        pid: its process id, 0 if it is in another PID namespace.
        uid: its effective user id.
        gid: its effective group id.
    """

    pid: int
    uid: int
    gid: int


def peer_credentials(connected: socket.socket) -> Credentials:
    """The process at the other end (SO_PEERCRED)."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Credentials(*_UCRED.unpack(raw))


def check_server(connected: socket.socket, path: str) -> None:
    """Refuse a server of another user. Call this before sending anything.

    Args:
        connected: a socket that has just connected.
        path: of the server's socket, for the message.

    Raises:
        NodeError: another user listens there.
    """
    server = peer_credentials(connected)
    if server.uid != os.geteuid():
        raise NodeError(
            f"the process that listens at {path} (pid {server.pid}) belongs to "
            f"{user(server.uid)}, and this is {user(os.geteuid())}: nothing was sent "
            f"to it. A node serves the user who has started it, and nobody else; have "
            f"that process ended, or give the socket of a node of your own."
        )


def user(uid: int) -> str:
    """Return a user id with its name, if it has one: "uid 65534 (nobody)"."""
    # Late: workers need it only for an error.
    import pwd

    try:
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"uid {uid}"


KEPT: Final = 1 << 20
"""Bytes up to which a block is taken from the heap and goes back there. Twice as many
may lie unused at the heap's end; it is four times what a message has at most."""


def keep_pages() -> None:
    """Have blocks of up to `KEPT` bytes lie in pages that this process has already.

    glibc gives a block of 128 KiB or more back to the kernel when it is freed, and so
    the pages of a large message are faulted in anew at each of its copies: measured,
    that is more than all else that it costs. glibc learns: once a larger block has been
    freed, it keeps those up to that size (`mallopt(3)`, under M_MMAP_THRESHOLD). Here
    it learns before the first message; a program that has freed a larger block, or has
    set the threshold itself, is left as it is, and so is another C library. What is
    forked later has learnt it too.
    """
    bytes(KEPT)  # of zeros that the kernel gives: no page of it is touched
