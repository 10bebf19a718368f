"""The files of a shared node: socket, pidfile, logs; checks that they are private."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from contextlib import suppress
from typing import Final, NamedTuple

from aiogpu.errors import NodeRunningError, NodeStartError
from aiogpu.linux.procfs import read_stat
from aiogpu.linux.sockets import kind
from aiogpu.runtime.directories import (
    LOGS,
    SHARED,
    SOCKET,
    default_socket,
    lock_directory,
    unfit_directory,
)

MAX_SOCKET_PATH: Final = 107
"""Most bytes of a socket's path; the kernel allows 108 with a final zero (unix(7))."""
_SUFFIX: Final = ".sock"


class Place(NamedTuple):
    """The files of one node; all but the logs are in one directory of mode 0700.

    Attributes:
        socket: the node's socket.
        pidfile: the file with the node's pid, locked while the node lives.
        drain_file: the file in which `aiogpu stop --drain` passes its seconds.
        logs: the directory of the node's logs.
    """

    socket: str
    pidfile: str
    drain_file: str
    logs: str

    @classmethod
    def at(cls, socket: str | None = None, logs: str | None = None) -> Place:
        """Return the files of the node that listens on a socket.

        Args:
            socket: the socket's path; None for the default, which `address="auto"`
                joins.
            logs: the directory for logs; None for a directory beside the socket.
        """
        path = default_socket() if socket is None else os.path.abspath(socket)
        directory, name = os.path.split(path)
        stem = name.removesuffix(_SUFFIX)
        # Two nodes of one user may share a directory.
        beside = LOGS if name == SOCKET else f"{stem}-{LOGS}"
        return cls(
            socket=path,
            pidfile=f"{directory}/{stem}.pid",
            drain_file=f"{directory}/{stem}.drain",
            logs=f"{directory}/{beside}" if logs is None else os.path.abspath(logs),
        )

    def prepare(self) -> None:
        """Create the directories, and check that only this user can enter them.

        Raises:
            NodeStartError: a path is not usable; the text says what to do.
        """
        check_length(self.socket)
        if os.path.isdir(self.socket):
            check_socket(self.socket)
        prepare_directory(os.path.dirname(self.socket), "--socket", SHARED)
        check_socket(self.socket)
        prepare_directory(self.logs, "--log-dir", 0o022)


def check_length(socket: str) -> None:
    """Raise `NodeStartError` for a path that is too long for a socket."""
    length = len(os.fsencode(socket))
    if length > MAX_SOCKET_PATH:
        raise NodeStartError(
            f"the path of the node's socket, {socket}, has {length} bytes; Linux "
            f"allows {MAX_SOCKET_PATH}. Give a shorter one by --socket, or set "
            f"XDG_RUNTIME_DIR to a shorter directory."
        )


def prepare_directory(path: str, option: str, forbidden: int) -> None:
    """Make a directory of mode 0700, or check an existing directory.

    Args:
        path: the directory; its parent must exist.
        option: the option that sets another path, for the message.
        forbidden: bits that the directory's mode must not have.

    Raises:
        NodeStartError: the directory cannot be made, or other users can access it.
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
    """Raise `NodeStartError` if something that is not a socket is in the way."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise NodeStartError(
            f"the node is to listen at {path}, but that is {kind(found)}, which is "
            f"left as it is. Move it away, or name another path by --socket."
        )


RECORD_SIZE: Final = 1 << 16
WRITTEN_WITHIN: Final = 5.0
"""Most seconds between taking the lock and writing the pidfile."""
_PAUSE: Final = 0.01


class Record(NamedTuple):
    """The content of a pidfile.

    Attributes:
        pid: the node's process.
        started: the start time of the process, in ticks since boot.
        socket: the node's socket.
        logs: the directory of the node's logs.
        drain: seconds that running tasks have when the node is stopped.
        ends_within: most seconds that the node needs to end after that.
        version: the version of aiogpu.
    """

    pid: int
    started: int
    socket: str
    logs: str
    drain: float
    ends_within: float
    version: str

    @classmethod
    def of_this_process(cls, place: Place, drain: float, ends_within: float) -> Record:
        """Return the record of this process."""
        from aiogpu.version import __version__

        pid = os.getpid()
        started = start_time(pid)
        assert started is not None, "this process lives"
        socket, logs = place.socket, place.logs
        return cls(pid, started, socket, logs, drain, ends_within, __version__)

    @property
    def is_alive(self) -> bool:
        """True if the process is alive, and its pid was not given to another one."""
        return start_time(self.pid) == self.started


def start_time(pid: int) -> int | None:
    """Return a process's start time in ticks since boot; None if it has ended."""
    stat = read_stat(pid)
    return None if stat is None or stat.state in "ZX" else stat.start


def read_record(path: str) -> Record | None:
    """Read a pidfile; return None without a valid one.

    Raises:
        PermissionError: the file belongs to another user.
    """
    # O_NONBLOCK, because opening a named pipe waits for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with open(path, "rb", 0, opener=lambda name, _: os.open(name, flags)) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
            return Record(**json.loads(file.read(RECORD_SIZE)))
    except PermissionError:
        raise
    except (OSError, ValueError, TypeError):
        return None


def living_node(path: str) -> Record | None:
    """Return the living node of a pidfile; None without one."""
    record = read_record(path)
    return record if record is not None and record.is_alive else None


def holds_pidfile(pid: int, path: str) -> bool:
    """Return whether a process belongs to this user and has the pidfile open.

    A node holds its `PidfileLock` from before it writes the pidfile until it ends. So
    the answer is also True while the node starts or closes and does not listen.

    Args:
        pid: the process; the caller holds a pidfd of it.
        path: the path of the pidfile.
    """
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return False
        pidfile = os.lstat(path)
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for descriptor in descriptors:
        with suppress(OSError):  # the descriptor was closed meanwhile
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{descriptor}"), pidfile):
                return True
    return False


class PidfileLock:
    """The lock on a node's files, held by the node until its process ends."""

    def __init__(self, path: str, descriptor: int, directory: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._directory = directory

    def __repr__(self) -> str:
        return f"<PidfileLock {self._path}>"

    @classmethod
    def take(cls, place: Place) -> PidfileLock:
        """Take the lock, and take over the files of a dead node.

        Raises:
            NodeRunningError: another node holds the lock.
            NodeStartError: the pidfile cannot be made.
        """
        path = place.pidfile
        while True:
            try:
                descriptor = os.open(
                    path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except OSError as error:
                raise _no_pidfile(path, error) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise _already_running(place) from None
            if _is_there(path, descriptor):
                return cls(path, descriptor, lock_directory(os.path.dirname(path)))
            os.close(descriptor)  # the last node has just removed the file; try again

    def write(self, record: Record) -> None:
        """Write the pidfile.

        Raises:
            NodeStartError: the file cannot be written, as on a full disk.
        """
        text = json.dumps(record._asdict()).encode()
        try:
            os.ftruncate(self._descriptor, 0)
            if os.pwrite(self._descriptor, text, 0) != len(text):
                raise OSError(None, "it could be written in part only")
        except OSError as error:
            raise _no_pidfile(self._path, error) from error

    def extend(self, seconds: float) -> None:
        """Note at the pidfile that the node goes on ending for some seconds.

        Its time of modification is set to the time by which the node has ended, or has
        extended this time again.
        """
        now = time.time()
        with suppress(OSError):
            os.utime(self._descriptor, (now, now + seconds))

    def release(self) -> None:
        """Remove the file, then release the lock."""
        if _is_there(self._path, self._descriptor):
            with suppress(OSError):
                os.unlink(self._path)
        os.close(self._descriptor)
        os.close(self._directory)

    def __enter__(self) -> PidfileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def extended_for(path: str) -> float:
    """Return for how many more seconds a node goes on ending; see `extend`.

    At most 0 if the node has not extended its time.
    """
    try:
        return os.lstat(path).st_mtime - time.time()
    except OSError:
        return 0.0


def _is_there(path: str, descriptor: int) -> bool:
    """Return whether the path still refers to the open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _no_pidfile(path: str, error: OSError) -> NodeStartError:
    return NodeStartError(
        f"the node's pidfile {path} cannot be written: {error.strerror}. Make room "
        f"or allow it, or name another place by --socket."
    )


def _already_running(place: Place) -> NodeRunningError:
    """Wait for the other node's pidfile, and return the error that names the node."""
    ends = time.monotonic() + WRITTEN_WITHIN
    while (record := living_node(place.pidfile)) is None:
        if time.monotonic() >= ends:
            return NodeRunningError(
                f"another node is starting or stopping at {place.socket}. Try again "
                f"in a moment, or name another place by --socket."
            )
        time.sleep(_PAUSE)
    address, stop = how_to_use(record.socket)
    return NodeRunningError(
        f"a node runs at {record.socket} already (pid {record.pid}). Join it by "
        f"aiogpu.init(address={address!r}), end it by `{stop}`, or start another at a "
        f"place of its own by --socket."
    )


def how_to_use(socket: str) -> tuple[str, str]:
    """Return the address by which programs join a node, and the command to stop it."""
    if socket == default_socket():
        return "auto", "aiogpu stop"
    return socket, f"aiogpu stop --socket {socket}"
