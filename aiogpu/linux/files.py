"""Files and directories that other users could replace: which to refuse.

Who may write to a directory may rename what is in it, and who may rename a directory
may put another in its place. So a private directory is private only if this holds for
each directory above it, up to the root: it belongs to root or to this user, and no
other user may write to it. In a directory with the sticky bit, such as /tmp, only the
owners of the directory and of an entry may rename the entry (inode(7)).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from aiogpu.linux.sockets import user


class Unfit(NamedTuple):
    """The reason why a directory or file is not used.

    Attributes:
        problem: what is wrong, as a predicate: "is a symbolic link".
        remedy: what to do, as the beginning of a sentence.
    """

    problem: str
    remedy: str


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
