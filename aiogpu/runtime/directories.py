"""The two directories of a node: its own, and the one where programs find it.

Its own directory holds the sockets of its workers. It is private, has a short path, and
is removed with the node. If something else removes it before, `NodeDirectory` makes it
anew: processes that connect need the sockets' names. Programs find the node's socket,
pidfile and logs in the meeting directory, mode 0700. Any user may create directories in
/tmp, so nodes, programs and commands check its owner and mode before they use a file in
it.

A user who may write to a directory may rename its entries and put others in their
place. So a private directory is safe only if this holds for each directory above it, up
to the root: it belongs to root or to this user, and no other user may write to it. In a
directory with the sticky bit, such as /tmp, only the owners of the directory and of an
entry may rename the entry (inode(7)).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from aiogpu.errors import NodeError, NodeStartError
from aiogpu.linux.sockets import is_trusted, kind, user

_log: Final = logging.getLogger(__name__)


SOCKET: Final = "node.sock"


LOGS: Final = "logs"


BACKLOG: Final = 256
"""Most programs that wait to be accepted; further programs try again."""


OWN_NAMES: Final = (".sock", ".pid", LOGS)
"""Suffixes of the names of a node's files."""


SHARED: Final = 0o077
"""Bits of a directory's mode that give other users access."""


class Unfit(NamedTuple):
    """The reason why a directory or file is not used.

    Attributes:
        problem: what is wrong, as a predicate: "is a symbolic link".
        remedy: what to do, as the beginning of a sentence.
    """

    problem: str
    remedy: str


def meeting_directory() -> str:
    """Return `$XDG_RUNTIME_DIR/aiogpu`, or `/tmp/aiogpu-<uid>` if it is not set."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isabs(runtime):
        return f"{runtime}/aiogpu"
    return f"/tmp/aiogpu-{os.getuid()}"


def default_socket() -> str:
    """Return the socket that `aiogpu start` listens on and `address="auto"` joins."""
    return f"{meeting_directory()}/{SOCKET}"


def logs_beside(socket: str) -> str:
    """Return the default log directory of a node, next to its socket.

    Two nodes of one user may share a directory: `b.sock` has its logs in `b-logs`.
    """
    directory, name = os.path.split(os.path.abspath(socket))
    logs = LOGS if name == SOCKET else f"{name.removesuffix('.sock')}-{LOGS}"
    return f"{directory}/{logs}"


def unfit_directory(path: str, forbidden: int = SHARED) -> Unfit | None:
    """Return why a node's files must not be in a directory; None if they may.

    Args:
        path: the directory.
        forbidden: bits that its mode must not have.

    Raises:
        OSError: the directory cannot be inspected.
    """
    status = os.lstat(path)
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        problem = "is a symbolic link, which is not followed here"
        return Unfit(problem, "Replace it with a directory")
    if not stat.S_ISDIR(status.st_mode):
        problem = f"is {kind(status)}, where a directory is needed"
        return Unfit(problem, "Move it away")
    if mode & stat.S_ISVTX and status.st_uid in {0, os.geteuid()}:  # such as /tmp
        return Unfit(
            f"is open to all users (mode {mode:04o}); a node needs a private directory",
            "Make a subdirectory by `mkdir -m 700`",
        )
    if status.st_uid != os.geteuid():
        return Unfit(
            f"belongs to {user(status.st_uid)}, and this is {user(os.geteuid())}: a "
            f"node's files must be in a directory of its own user",
            "Ask that user to remove it",
        )
    if mode & forbidden:
        # Do not advise chmod for a directory like /etc, which root may own.
        has_others = any(not name.endswith(OWN_NAMES) for name in os.listdir(path))
        return Unfit(
            f"has mode {mode:04o}, so other users have access; a node needs 0700",
            "Make a directory for it by `mkdir -m 700`"
            if has_others
            else f"Run `chmod 700 {path}` if no other user needs access",
        )
    return replaceable(os.path.dirname(os.path.abspath(path)))


def replaceable(path: str) -> Unfit | None:
    """Return why another user could replace what is in a directory; None if not.

    Args:
        path: the absolute path of the directory.

    Raises:
        OSError: a part does not exist, or cannot be inspected.
    """
    for part in _parts(path):
        status = os.lstat(part)
        mode = status.st_mode
        if not is_trusted(status.st_uid):
            return Unfit(
                f"is not safe: {part} belongs to {user(status.st_uid)}, who could "
                f"replace what is in it, and this is {user(os.geteuid())}",
                "Unset XDG_RUNTIME_DIR and TMPDIR if they are another user's, as after "
                "`su` or `sudo -E`",
            )
        if stat.S_ISLNK(mode) or mode & stat.S_ISVTX:
            continue
        if mode & stat.S_IWOTH:
            who = "all users"
        elif mode & stat.S_IWGRP and not _is_private_group(status.st_gid):
            who = _group(status.st_gid)
        else:
            continue
        return Unfit(
            f"is not safe: {who} may write to {part} (mode {stat.S_IMODE(mode):04o}) "
            f"and could replace what is in it",
            f"Have the sticky bit set by `chmod +t {part}`",
        )
    return None


LINKS: Final = 40
"""Symbolic links that the kernel follows in one path."""


def _parts(path: str) -> Iterator[str]:
    """Yield the directories and links by which the kernel resolves a path."""
    yield "/"
    current, links = "/", 0
    rest = path.split("/")[::-1]
    while rest:
        name = rest.pop()
        if name == "..":
            current = os.path.dirname(current)
        elif name not in {"", "."}:
            part = os.path.join(current, name)
            yield part
            try:
                target = os.readlink(part)
            except OSError:
                current = part
                continue
            links += 1
            if links > LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if target.startswith("/"):
                current = "/"
            rest += target.split("/")[::-1]


def _is_private_group(gid: int) -> bool:
    """Return True if only this user and root are in a group.

    Many systems give each user a group of the same name, and a umask that lets it write
    (useradd(8)). The group of root has no other members.
    """
    if gid == 0:
        return True
    import grp
    import pwd

    try:
        group, account = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    is_of_user = (group.gr_name, gid) == (account.pw_name, account.pw_gid)
    return is_of_user and set(group.gr_mem) <= {account.pw_name}


def _group(gid: int) -> str:
    import grp

    try:
        return f"group {gid} ({grp.getgrgid(gid).gr_name})"
    except KeyError:
        return f"group {gid}"


def check_socket(path: str) -> None:
    """Check that connecting to a socket is safe. A missing socket passes.

    Raises:
        NodeError: the file is no socket, or as in `check_meeting`.
    """
    with suppress(OSError):
        status = os.lstat(path)
        if not (stat.S_ISSOCK(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            raise NodeError(
                f"{path} is {kind(status)}, not the socket of a node. Give the path "
                f"that `aiogpu start` has printed, or 'auto' for the default socket."
            )
    check_meeting(path)


def check_meeting(path: str) -> None:
    """Check that no other user controls a node's file, before it is used.

    Args:
        path: the node's socket, pidfile or log directory. A missing file passes: the
            caller finds out by using it.

    Raises:
        NodeError: other users have access to the directory, or the file is a symbolic
            link or belongs to another user.
    """
    directory = os.path.dirname(os.path.abspath(path))
    unfit: Unfit | None = None
    try:
        unfit = unfit_directory(directory)
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError as error:
        if unfit is None:
            raise NodeError(
                f"cannot determine the owner of {path}: {error.strerror}. Give the "
                f"socket of a node that {user(os.geteuid())} has started."
            ) from error
        raise _refused(directory, unfit) from error
    if unfit is not None:
        raise _refused(directory, unfit)
    if stat.S_ISLNK(status.st_mode):
        problem = "is a symbolic link, which is not followed here"
        raise _refused(path, Unfit(problem, "Give the path of its target"))
    if status.st_uid != os.geteuid():
        problem = f"belongs to {user(status.st_uid)}, and this is {user(os.geteuid())}"
        raise _refused(path, Unfit(problem, "Ask that user to remove it"))


def _refused(path: str, unfit: Unfit) -> NodeError:
    return NodeError(
        f"{path} {unfit.problem}, so it is not used. {unfit.remedy}, or use a node "
        f"elsewhere: set XDG_RUNTIME_DIR to a directory of this user, or give the "
        f"address of the node's socket."
    )


LONGEST: Final = 75
"""Most bytes of the path in which a node's directory is made.

A socket's path has at most 107 bytes (unix(7)), and `/aiogpu-`, twelve digits and
`/memory.sock` are appended.
"""


def places_of(environ: Mapping[str, str]) -> list[str]:
    """Return the places for a node's directory, for a program with these variables.

    The program uses the first writable place.
    """
    # Not `tempfile`: its import takes 10 ms, and its other rules are not needed.
    named = [environ.get(name) for name in ("XDG_RUNTIME_DIR", "TMPDIR")]
    places = [os.path.abspath(place) for place in (*named, "/tmp") if place]
    return [place for place in places if len(os.fsencode(place)) <= LONGEST]


def create_directory() -> str:
    """Make a directory that only this user may enter (mode 0700).

    Raises:
        NodeStartError: no place is writable, or other users could replace what is in
            the first writable place.
    """
    places = places_of(os.environ)
    problem: OSError | None = None
    for place in places:
        path = f"{place}/aiogpu-{os.urandom(6).hex()}"
        try:
            os.mkdir(path, 0o700)
            unfit = replaceable(place)
        except OSError as error:
            problem = error
            continue
        if unfit is None:
            return path
        os.rmdir(path)
        raise NodeStartError(
            f"{place} {unfit.problem}, so the directory of the node's socket is not "
            f"made there. {unfit.remedy}, or set XDG_RUNTIME_DIR to a directory of "
            f"this user."
        )
    raise NodeStartError(
        f"cannot make a directory for the node's socket in {', '.join(places)}: "
        f"{problem}. Set XDG_RUNTIME_DIR or TMPDIR to a writable directory."
    )


def lock_directory(path: str) -> int:
    """Lock a directory, so that systemd-tmpfiles(8) removes no old files in it.

    Returns:
        The descriptor that holds the lock.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def no_room(path: str, error: OSError) -> str:
    """Explain why a file cannot be made in a node's directory."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{path}: {error.strerror}; free space or inodes there (`df -i`), or set "
            f"TMPDIR to a directory with room"
        )
    return f"{path}: {error.strerror}"


CONNECTING: Final = 64
"""Most processes that wait to be accepted by a node's own sockets."""


class NodeDirectory:
    """A node's own directory with its sockets.

    Cleaners of /tmp may remove it: some do not heed its lock.

    Attributes:
        path: the directory; its name is the id of the node.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = -1
        with suppress(OSError):  # without a descriptor the first socket fails, in words
            self._lock = lock_directory(path)
        self._sockets: dict[str, Callable[[socket.socket], None]] = {}

    def __repr__(self) -> str:
        return f"<NodeDirectory {self.path}>"

    def listen(self, path: str) -> socket.socket:
        """Make a socket in the directory.

        Raises:
            NodeStartError: it cannot be made, as on a full disk.
        """
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(path)
            listening.listen(CONNECTING)
        except OSError as error:
            listening.close()
            raise NodeStartError(
                f"a node's socket cannot be made: {no_room(path, error)}."
            ) from error
        return listening

    def renew(self, path: str, serve: Callable[[socket.socket], None]) -> None:
        """Have a socket made anew if it is removed.

        Args:
            path: the socket.
            serve: called with each new socket.
        """
        self._sockets[path] = serve

    def check(self) -> bool:
        """Make the directory and its sockets anew if they were removed.

        Called before a process is started that will connect.

        Returns:
            True if they were removed.

        Raises:
            NodeStartError: they cannot be made.
        """
        missing = [path for path in self._sockets if not os.path.exists(path)]
        if not missing:
            return False
        try:
            os.mkdir(self.path, 0o700)
            self._unlock()
            self._lock = lock_directory(self.path)
        except FileExistsError:
            pass
        except OSError as error:
            raise NodeStartError(
                f"the node's directory was removed while the node ran, and cannot be "
                f"made anew: {no_room(self.path, error)}."
            ) from error
        unfit = unfit_directory(self.path)
        if unfit is not None:
            raise NodeStartError(
                f"the node's directory was removed while the node ran, and {self.path} "
                f"{unfit.problem}. Close the node and open it again."
            )
        for path in missing:
            self._sockets[path](self.listen(path))
        _log.warning(
            "! something has removed files of the running node in %s; they were made "
            "anew. Have cleaners leave this directory alone, or set XDG_RUNTIME_DIR",
            self.path,
        )
        return True

    def remove(self) -> None:
        """Remove the directory with its content, for good."""
        self._sockets.clear()
        self._unlock()
        remove_directory(self.path)

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_directory(path: str) -> None:
    """Remove a directory and its content, if it exists."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)
