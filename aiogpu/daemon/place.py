"""Where one node is met: its socket, pidfile and logs, and whether that is safe."""

from __future__ import annotations

import os
import stat
from typing import Final, NamedTuple

from aiogpu.errors import NodeStartError
from aiogpu.runtime.callers.programs import (
    LOGS,
    SHARED,
    SOCKET,
    default_socket,
    kind,
    unfit_directory,
)

LONGEST: Final = 107
"""Bytes of a socket's path; the kernel has 108 with the zero at its end (unix(7))."""
_SUFFIX: Final = ".sock"


class Place(NamedTuple):
    """The files of one node; all but the logs are in one directory of mode 0700.

    Attributes:
        socket: where it listens.
        pidfile: says who it is, and is locked while it lives.
        wish: where `aiogpu stop --drain` leaves the seconds for it to read.
        logs: the directory of its logs.
    """

    socket: str
    pidfile: str
    wish: str
    logs: str

    @classmethod
    def at(cls, socket: str | None = None, logs: str | None = None) -> Place:
        """The place of a node by its socket.

        Args:
            socket: its path; None for the one that `address="auto"` joins.
            logs: the directory for its logs; beside the socket unless given.
        """
        path = default_socket() if socket is None else os.path.abspath(socket)
        directory, name = os.path.split(path)
        stem = name.removesuffix(_SUFFIX)
        # Two nodes of one user may share a directory.
        beside = LOGS if name == SOCKET else f"{stem}-{LOGS}"
        return cls(
            socket=path,
            pidfile=f"{directory}/{stem}.pid",
            wish=f"{directory}/{stem}.drain",
            logs=f"{directory}/{beside}" if logs is None else os.path.abspath(logs),
        )

    def prepare(self) -> None:
        """Make what is missing, and see that nobody else can get in.

        Raises:
            NodeStartError: the place is not fit for a node; says what to do.
        """
        check_length(self.socket)
        if os.path.isdir(self.socket):
            check_socket(self.socket)
        prepare_directory(os.path.dirname(self.socket), "--socket", SHARED)
        check_socket(self.socket)
        prepare_directory(self.logs, "--log-dir", 0o022)


def check_length(socket: str) -> None:
    """Refuse a path that no socket can have; raises `NodeStartError`."""
    length = len(os.fsencode(socket))
    if length > LONGEST:
        raise NodeStartError(
            f"the path of the node's socket, {socket}, has {length} bytes; Linux "
            f"allows {LONGEST}. Give a shorter one by --socket, or set XDG_RUNTIME_DIR "
            f"to a shorter directory."
        )


def prepare_directory(path: str, option: str, forbidden: int) -> None:
    """Make a directory of mode 0700, or check the one that is there.

    Args:
        path: the directory; the one above it must be there.
        option: what names another one, for the message.
        forbidden: bits of the mode that it must not have.

    Raises:
        NodeStartError: it cannot be made, or is not this user's alone.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise NodeStartError(
            f"the directory {path} cannot be made: {error.strerror}. Name a place "
            f"where you may write by {option}; the directory above it must be there."
        ) from error
    unfit = unfit_directory(path, forbidden)
    if unfit is not None:
        raise NodeStartError(
            f"{path} {unfit.problem}. {unfit.remedy}, or name another place by "
            f"{option}."
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise NodeStartError(
            f"{path} may not be written to by this user (uid {os.geteuid()}). "
            f"Allow it, or name another place by {option}."
        )


def check_socket(path: str) -> None:
    """Refuse to replace what is no socket; raises `NodeStartError`."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise NodeStartError(
            f"the node is to listen at {path}, but that is {kind(found)}, which is "
            f"left as it is. Move it away, or name another path by --socket."
        )
