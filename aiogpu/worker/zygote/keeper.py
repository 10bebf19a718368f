"""The keeper of a slot: forks its worker, and kills the processes that it leaves.

A keeper adopts every process that its worker orphans, so only the keeper knows when a
worker and all its descendants have ended: when `waitpid` finds no child. Trackers of
shared memory are left to clean up before they end (`end_children`). If cgroups are
available, each keeper has its own cgroup, to kill processes that fork too fast or may
not be signalled. A keeper imports and runs no user code.

`Watch`, which zygotes use as well, waits for a message, a child's end or the driver's
death, whichever comes first. A pidfd, opened at the start, shows the driver's death;
the socket does not, because a fork of the driver may hold its other end open.
`watched_over` covers imports: an import may never return, and the zygote cannot react
meanwhile, so a fork of the zygote waits for the driver's death and cleans up.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from aiogpu.linux import syscalls as kernel
from aiogpu.linux.cgroup import SlotCgroup, end_node
from aiogpu.linux.sockets import check_server, is_own, open_checked
from aiogpu.wire.codec import encode
from aiogpu.wire.connection import KEEPER, Connection, greeting
from aiogpu.wire.messages import (
    Close,
    End,
    Ended,
    Fork,
    Forked,
    Message,
    ProtocolError,
    Setup,
    Signal,
    Unforked,
    output_path,
    socket_path,
)

CHUNK: Final = 65536


class Watch:
    """A process's connection to the driver, and the ends of its children.

    Attributes:
        driver: pidfd of the driver; forks inherit it.
        is_over: the driver has died, closed, or broken the protocol.
        is_asked: the driver sent `Close`.
    """

    def __init__(self, role: str, identity: int, path: str, driver: int) -> None:
        self.driver = driver
        self.is_over = False
        self.is_asked = False
        self._path = path
        self._connection = Connection(role)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        check_server(self._socket, path)
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, _note)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        self._poll = select.poll()
        for descriptor in (driver, self._wake_reader, self._socket.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        self._socket.sendall(greeting(role, identity, os.getpid()))

    def send(self, message: Message) -> None:
        """Send to the driver; if the driver has gone, set `is_over`."""
        try:
            self._socket.sendall(encode(message))
        except OSError:
            self.is_over = True

    def wait(self) -> list[Message]:
        """Block until an event; return the received messages.

        A child may have ended whenever this returns. `Close` and any end of the
        connection set `is_over`.
        """
        ready = [descriptor for descriptor, _ in self._poll.poll()]
        messages: list[Message] = []
        if self._wake_reader in ready:
            os.read(self._wake_reader, CHUNK)
        if self._socket.fileno() in ready:
            messages = self._receive()
        if self.driver in ready:
            self.is_over = True
        if any(isinstance(message, Close) for message in messages):
            self.is_over = self.is_asked = True
        return messages

    def wait_for_child(self, timeout: float) -> None:
        """Block until a child may have ended, for `timeout` seconds at most."""
        children = select.poll()
        children.register(self._wake_reader, select.POLLIN)
        if children.poll(max(0.0, timeout) * 1000):
            os.read(self._wake_reader, CHUNK)

    def driver_has_left(self, within: float) -> bool:
        """Return whether the driver ends or calls exec within `within` seconds.

        A process that dies or calls exec closes its sockets first. A death then shows
        on the pidfd; an exec shows only by the closed socket.
        """
        if not is_served(self._path):
            return True
        death = select.poll()
        death.register(self.driver, select.POLLIN)
        return bool(death.poll(within * 1000)) or not is_served(self._path)

    def _receive(self) -> list[Message]:
        try:
            data = self._socket.recv(CHUNK)
            messages = self._connection.receive(data)
        except (OSError, ProtocolError):
            self.is_over = True
            return []
        if not data:
            self.is_over = True
        return messages

    def close(self) -> None:
        """Close the connection; the driver sees this process end."""
        self._socket.close()

    def leave(self) -> None:
        """Close all but the driver's pidfd, in a fork that goes on."""
        signal.set_wakeup_fd(-1)
        kernel.set_default_handler(signal.SIGCHLD)
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        self._socket.close()


def is_served(path: str) -> bool:
    """Return whether a process listens at a Unix socket, even if it is busy."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.setblocking(False)
        try:
            visitor.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True  # its backlog is full
    return True


def _note(_number: int, _frame: object) -> None:
    """Handle SIGCHLD, so that it reaches the wake-up descriptor."""


@contextmanager
def watched_over(
    setup: Setup, driver: int, leave: Callable[[], None]
) -> Iterator[None]:
    """Context manager: the driver's death ends this process in the block.

    Args:
        setup: names the directory and the cgroup to remove.
        driver: pidfd of the driver.
        leave: called in the fork, to close the parent's descriptors.
    """
    watched = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            leave()
            _wait(setup, driver, watched)
        finally:
            os._exit(0)
    # An imported module may reap children that it did not start.
    sentinel = os.pidfd_open(pid)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(sentinel, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(sentinel)


def _wait(setup: Setup, driver: int, watched: int) -> None:
    kernel.set_process_name("aiogpu-sentinel")
    ends = select.poll()
    ends.register(driver, select.POLLIN)
    with suppress(ProcessLookupError):
        zygote = os.pidfd_open(watched)
        ends.register(zygote, select.POLLIN)
    # If another process has the number now, or none, the zygote has ended.
    is_alive = os.getppid() == watched
    ended = [process for process, _ in ends.poll(None if is_alive else 0)]
    if driver not in ended:
        return
    if is_alive:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(zygote, signal.SIGKILL)
    end_node(setup.cgroup)
    remove_directory(setup.directory)


def remove_directory(path: str) -> None:
    """Remove the directory of a node whose driver is dead.

    Several processes may do this at once; the last finds it empty or gone.
    """
    if os.path.isdir(path):
        # Imported late: takes 4 ms, and is needed once in a node's life at most.
        import shutil

        shutil.rmtree(path, ignore_errors=True)


WorkerMain = Callable[[int, int, int], None]
"""Runs a worker in a fresh fork: its id, its slot, the keeper's process id."""


PATIENCE: Final = 64
"""Times that new children are found and killed before `end_others` is called."""

TRACKER_MAIN: Final = b"_tracker import main"
"""Part of the code after `python -c` in trackers of `multiprocessing`, of loky, and of
other packages derived from them."""

TRACKER_LIMIT: Final = 1.0
"""Seconds that trackers may take after the end of all other processes. They take about
20 ms; only a tracker whose pipe another worker's process has open goes on."""

EXEC_LIMIT: Final = 50
"""Milliseconds that a process may take to become another program."""

TORCH_MANAGER: Final = b"torch_shm_manager"
"""The program that does the same for PyTorch's sharing strategy `file_system`. It stays
for two seconds after the end of its last client, so it is killed, and the keeper cleans
up."""

TORCH_DIRECTORY: Final = "/torch-shm-dir-"
"""Part of the path of a manager's directory, which holds its socket."""


class Keeper:
    """The keeper of one slot; made in a fresh fork of the zygote."""

    def __init__(
        self, slot: int, setup: Setup, driver: int, worker_main: WorkerMain
    ) -> None:
        self._slot = slot
        self._directory = setup.directory
        self._worker_main = worker_main
        self._worker: int | None = None
        self._pid = 0
        self._zygote = os.getppid()
        kernel.resume_with_parents_end()
        kernel.set_process_name(f"aiogpu-keep-{slot}")
        kernel.adopt_orphans()
        self._cgroup = SlotCgroup(setup.cgroup, slot)
        self._score = kernel.OomScore()
        for stream in (1, 2):
            path = output_path(setup.directory, slot, stream)
            # This would hang without O_NONBLOCK if the driver has died.
            output = open_checked(path, os.O_WRONLY, stat.S_ISFIFO, is_own)
            os.set_blocking(output, True)
            os.dup2(output, stream)
            os.close(output)
        self._watch = Watch(KEEPER, slot, socket_path(setup.directory), driver)

    def run(self) -> None:
        """Serve until the driver closes or dies; leaves no process behind."""
        while not self._watch.is_over:
            for message in self._watch.wait():
                self._obey(message)
            self._reap()
        if self._worker is not None:
            kernel.kill(self._pid)
        self._end_rest()
        self._clear_up(has_zygote=os.getppid() == self._zygote)
        self._watch.close()

    def _clear_up(self, has_zygote: bool) -> None:
        """Remove the node's directory and cgroup if its driver died without doing so.

        The zygote does the same after this process. But a zygote that seems alive may
        have been killed and wait for a CPU to end on.
        """
        within = 0.1 if has_zygote else 2.0
        is_left = not self._watch.is_asked and self._watch.driver_has_left(within)
        if is_left or not has_zygote:
            self._cgroup.remove()
        if is_left:
            remove_directory(self._directory)

    def _obey(self, message: Message) -> None:
        match message:
            case Fork(worker) if self._worker is None:
                self._fork(worker)
            case Signal(worker) if worker == self._worker:
                kernel.kill(self._pid, signal.SIGINT)
            case End(worker) if worker == self._worker:
                kernel.kill(self._pid)

    def _fork(self, worker: int) -> None:
        me = os.getpid()
        # Out of memory, the kernel is to kill a worker, never the driver.
        self._score.expose()
        try:
            pid = os.fork()
        except OSError as error:
            self._score.restore()
            self._watch.send(Unforked(worker, kernel.why_not_forked(error)))
            return
        if pid == 0:
            try:
                self._watch.leave()
                self._cgroup.forget()
                self._score.close()
                os.close(self._watch.driver)
                self._worker_main(worker, self._slot, me)
            finally:
                os._exit(1)
        self._score.restore()
        self._worker, self._pid = worker, pid
        self._watch.send(Forked(worker, pid))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid and self._worker is not None:
                self._end_rest()
                self._watch.send(Ended(self._worker, status))
                self._worker, self._pid = None, 0

    def _end_rest(self) -> None:
        end_children(self._cgroup.end_others, self._pid)
        if self._cgroup.has_others:
            self._cgroup.end_others()
            end_children(self._cgroup.end_others)


def _nothing() -> None:
    """Do nothing: there is no cgroup."""


def end_children(
    end_others: Callable[[], None] = _nothing,
    worker: int | None = None,
    spared: Container[int] = (),
) -> None:
    """Kill all children and the orphans that are adopted by their deaths.

    Trackers of named shared memory and semaphores end by themselves: a tracker reads a
    pipe, and cleans up when all processes that may write to it have ended. So the
    others are killed first. A tracker that has not ended within `TRACKER_LIMIT` is
    killed as well.

    Args:
        end_others: also kills processes that may not be signalled or fork too fast.
        worker: process id of the worker that has ended and has left the children.
        spared: process ids of children that live on.
    """
    ended = {worker}
    trackers: dict[int, bool] = {}  # children by pid: True for trackers
    managers: list[str] = []
    rounds, deadline = 0, None
    while True:
        every = kernel.children()
        children = [pid for pid in every if pid not in spared]
        if every and not children:
            break
        found = [pid for pid in children if pid not in trackers]
        for pid in found:
            command = command_of(pid)
            trackers[pid] = any(TRACKER_MAIN in word for word in command)
            if command[0] == TORCH_MANAGER:
                managers += directories_of_sockets(pid)
        killed = [kernel.kill(pid) for pid in found if not trackers[pid]]
        rounds += bool(killed)
        if (killed and rounds % PATIENCE == 0) or not all(killed):
            end_others()
        if children and all(trackers[pid] for pid in children):
            deadline = deadline or time.monotonic() + TRACKER_LIMIT
            if not _ends(children[0], deadline - time.monotonic()):
                for pid in children:
                    trackers[pid] = False
                    kernel.kill(pid)
        try:
            pid, _ = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        trackers.pop(pid, None)
        ended.add(pid)
    if managers:
        remove_torch_files(ended, managers)


def command_of(pid: int) -> list[bytes]:
    """Return a process's command line; `[b""]` if it has ended.

    A process that is about to call exec has its parent's command line. A tracker in
    this state has nothing to clean up: no process has written to its pipe yet. But then
    its command line is empty for a moment.
    """
    command = b""
    for _ in range(EXEC_LIMIT):
        with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
        if command or _ends(pid, 1e-3):
            break
    return command.split(b"\0")


def directories_of_sockets(pid: int) -> list[str]:
    """Return the directories of the Unix sockets that a process has bound."""
    inodes = set()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            kind, _, inode = os.readlink(f"/proc/{pid}/fd/{name}").partition(":")
            if kind == "socket":
                inodes.add(os.fsencode(inode.strip("[]")))
    with open("/proc/net/unix", "rb") as file:
        sockets = [line.split(maxsplit=7) for line in file]
    return [
        os.path.dirname(os.fsdecode(socket[7].strip()))
        for socket in sockets
        if len(socket) == 8 and socket[6] in inodes
    ]


def remove_torch_files(pids: Container[int | None], directories: Sequence[str]) -> None:
    """Remove what PyTorch's managers would remove two seconds after their last client.

    Args:
        pids: the ended processes; each name of shared memory has its creator's id.
        directories: the managers' own directories.
    """
    for name in os.listdir("/dev/shm"):
        kind, _, rest = name.partition("_")
        pid = rest.partition("_")[0]
        if kind == "torch" and pid.isdecimal() and int(pid) in pids:
            with suppress(OSError):
                os.unlink(f"/dev/shm/{name}")
    for directory in directories:
        if TORCH_DIRECTORY in directory:
            remove_directory(directory)


def _ends(pid: int, seconds: float) -> bool:
    """Return whether a child ends within `seconds`; leaves the zombie."""
    process = os.pidfd_open(pid)
    try:
        end = select.poll()
        end.register(process, select.POLLIN)
        return bool(end.poll(max(0.0, seconds) * 1000))
    finally:
        os.close(process)
