"""Keeps one slot: forks its one worker, and ends what the worker leaves behind.

A keeper adopts every process that its worker orphans, so it alone can say when a
worker and all that it started have ended: when `waitpid` knows no child any more.
Where there is a cgroup it lives in one of its own, which holds what forks faster
than it can be killed and what may not be signalled. It imports nothing of the
user's and runs none of his code.

`Watch`, which zygotes have as well, waits for a message, a child's end or the driver's
death, whichever is first. The driver's death shows on a pidfd that was opened before
anything else, not on the socket, whose other end a fork of the driver may hold open.
`watched_over` covers imports: one may never return, and the zygote hears nothing
meanwhile, so a fork of it waits for the driver's death in its place, and clears up.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Final

from aiogpu.errors import ProtocolError
from aiogpu.linux import syscalls as kernel
from aiogpu.linux.cgroup import SlotCgroup, end_node
from aiogpu.linux.sockets import check_server
from aiogpu.wire.codec import encode
from aiogpu.wire.connection import KEEPER, Connection, greeting
from aiogpu.wire.messages import (
    Close,
    End,
    Ended,
    Fork,
    Forked,
    Message,
    Setup,
    Signal,
    Unforked,
    output_path,
    socket_path,
)

CHUNK: Final = 65536


class Watch:
    """One process's connection to the driver, with its children's ends.

    Attributes:
        driver: pidfd of the driver; forks inherit it.
        is_over: the driver has died, or broke the protocol, or closed.
        is_asked: it is over because the driver said `Close`.
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
        self._wake, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, _note)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._poll = select.poll()
        for descriptor in (driver, self._wake, self._socket.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        self._socket.sendall(greeting(role, identity, os.getpid()))

    def send(self, message: Message) -> None:
        """Send to the driver; one that has gone is noticed by `wait`."""
        try:
            self._socket.sendall(encode(message))
        except OSError:
            self.is_over = True

    def wait(self) -> list[Message]:
        """Block until something happens; give the messages that came.

        A child may have ended whenever this returns. `Close` sets `is_over`, as
        does all that ends the connection.
        """
        ready = [descriptor for descriptor, _ in self._poll.poll()]
        messages: list[Message] = []
        if self._wake in ready:
            os.read(self._wake, CHUNK)
        if self._socket.fileno() in ready:
            messages = self._receive()
        if self.driver in ready:
            self.is_over = True
        if any(isinstance(message, Close) for message in messages):
            self.is_over = self.is_asked = True
        return messages

    def wait_for_child(self, timeout: float) -> None:
        """Block until a child may have ended, for so many seconds at most."""
        children = select.poll()
        children.register(self._wake, select.POLLIN)
        if children.poll(max(0.0, timeout) * 1000):
            os.read(self._wake, CHUNK)

    def driver_has_left(self, within: float) -> bool:
        """Return whether the driver has ended or called exec, or does so in `within` s.

        A process that dies or calls exec closes its sockets first. Its death then shows
        on its pidfd; an exec shows nowhere else.
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
        """Close all but the driver's pidfd: this process is a fork and goes on."""
        signal.set_wakeup_fd(-1)
        kernel.set_default_handler(signal.SIGCHLD)
        os.close(self._wake)
        os.close(self._wakeup)
        self._socket.close()


def is_served(path: str) -> bool:
    """Return whether a process listens at a Unix socket, even if too busy to answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.setblocking(False)
        try:
            visitor.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True  # its queue is full
    return True


def _note(_number: int, _frame: object) -> None:
    """Let SIGCHLD reach the wake-up descriptor; a default handler would not."""


@contextmanager
def watched_over(
    setup: Setup, driver: int, leave: Callable[[], None]
) -> Iterator[None]:
    """Context manager: the driver's death ends this process in the block.

    Args:
        setup: says what is to be removed then.
        driver: pidfd of the driver.
        leave: called in the fork, to give up what is this process's alone.
    """
    watched = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            leave()
            _wait(setup, driver, watched)
        finally:
            os._exit(0)
    # What is imported may collect children that are not its own.
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
    # If its number is another's by now, it has ended, as it has without one.
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

    Several processes may do so at once: whoever comes last finds it empty, or gone.
    """
    if os.path.isdir(path):
        # Costs 4 ms to import, and is needed once in a node's life at most.
        import shutil

        shutil.rmtree(path, ignore_errors=True)


WorkerMain = Callable[[int, int, int], None]
"""Runs a worker in a fresh fork: its id, its slot, the keeper's process id."""


PATIENCE: Final = 64
"""Children that are ended one by one before all are ended in one step."""


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
            # Without O_NONBLOCK a driver that died meanwhile would hang us here.
            output = os.open(
                output_path(setup.directory, slot, stream), os.O_WRONLY | os.O_NONBLOCK
            )
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
        """Remove what the node has left if its driver has died, and has not done so.

        The zygote does so as well, after this process. But one that seems to be there
        may have been killed, and wait for a CPU to end on.
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
        # The kernel is to take a worker, never the driver.
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
        end_children(self._cgroup.end_others)
        if self._cgroup.has_others:
            self._cgroup.end_others()
            end_children(self._cgroup.end_others)


def _nothing() -> None:
    """There is no other way to end them."""


def end_children(end_others: Callable[[], None] = _nothing) -> None:
    """Kill all children, and those that come by their deaths, until none is left.

    Args:
        end_others: ends also those that may not be signalled, or fork too fast.
    """
    for attempt in count(1):
        killed = [kernel.kill(pid) for pid in kernel.children()]
        if attempt % PATIENCE == 0 or not all(killed):
            end_others()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
