"""A worker's blocking connection to the driver.

The main thread reads; threads of the running task may read too while it lets them. Any
thread may send. Neither another thread nor an interrupt can split a frame.
"""

from __future__ import annotations

import os
import select
import socket
import time
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Final

from aiogpu.linux.sockets import check_server, peer_credentials
from aiogpu.wire.codec import encode, encode_all
from aiogpu.wire.connection import WORKER, Connection, greeting
from aiogpu.wire.messages import Drop, Message, Report
from aiogpu.worker.interrupts import Interrupts, report_dropped

if TYPE_CHECKING:
    from aiogpu.client.references import Loans


CHUNK: Final = 65536


LARGEST_CHUNK: Final = 1 << 20


DAY: Final = 86_400.0


SHORT: Final = 300e-6
"""Seconds of busy waiting, if the wait before was no longer than this. A sleeping
driver needs 60 to 150 us from an answer to its next call."""


MOMENT: Final = 0.01
"""Seconds that a report waits for room in the socket's buffer, or for another
thread."""


class Channel:
    """Messages in, messages out, over one blocking socket.

    The zygote makes the channel before the fork, which saves each worker the time; the
    worker connects it.

    Attributes:
        on_child: takes messages about the task's children; False for other messages.
        on_idle: called before `next` waits; None for no call.
        loans: receives payloads that refer to values lent to this worker.
        is_closed: this process is a fork of the worker, and shares the poll of its
            loop.
        may_stay_awake: the driver has another core to run on.
    """

    def __init__(self, interrupts: Interrupts) -> None:
        self.on_child: Callable[[Message], bool] | None = None
        self.on_idle: Callable[[], object] | None = None
        self.loans: Loans | None = None
        self.is_closed = False
        self._interrupts = interrupts
        self._connection = Connection(WORKER)
        self._received: deque[Message] = deque()
        self._lock = allocate_lock()
        self._reading = allocate_lock()
        self._has_guests = False
        self._waking = -1
        self._main = get_ident()
        self._socket: socket.socket
        # A poll object serves one thread at a time: this one serves the main thread.
        self._poll = select.poll()
        # With one CPU, a busy wait would only keep the driver from running.
        self.may_stay_awake = len(os.sched_getaffinity(0)) > 1
        self._is_awake = False
        self._has_room = True
        self._unsent: dict[int, Report] = {}
        self._signals = interrupts.user
        waiting = (self.next, self._wait, self.read, self.wait, self.is_silent)
        self._signals.wait_in(*(method.__code__ for method in waiting))

    def connect(self, path: str, worker: int) -> None:
        """Connect to the driver and send this worker's number.

        Raises:
            OSError: the driver has gone.
            NodeError: a process of another user listens at the path.
        """
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.connect(path)
        check_server(connected, path)
        connected.sendall(greeting(WORKER, worker, os.getpid()))
        self.use(connected)

    def use(self, connected: socket.socket) -> None:
        """Use a connected socket on which the greeting was sent."""
        self._socket = connected
        self._poll.register(connected, select.POLLIN)

    def is_silent(self, seconds: float) -> bool:
        """Return whether no message arrives within `seconds`."""
        return not self._received and not self._poll.poll(seconds * 1000)

    @property
    def path(self) -> str:
        """The path of the driver's socket."""
        path: str = self._socket.getpeername()
        return path

    @property
    def driver(self) -> int:
        """The process of the driver; 0 if it is in another PID namespace."""
        return peer_credentials(self._socket).pid

    def fileno(self) -> int:
        """Return the descriptor of the socket, for an event loop to watch."""
        return self._socket.fileno()

    def next(self) -> Message | None:
        """Wait for the next message; None when the driver has gone.

        Raises:
            ProtocolError: the driver sent an invalid message.
        """
        while not self._received:
            if self.on_idle is not None:
                self.on_idle()
            self._wait()
            if not self.read():
                return None
        return self._received.popleft()

    def _wait(self) -> None:
        """Wait for bytes: busy for a moment if the last wait was short, then asleep.

        Waking a sleeping core costs as much as the rest of a short call. After a long
        wait, no time is spent on busy waiting.
        """
        if self._signals.deferred:
            self._signals.run_deferred()
        poll, now = self._poll.poll, time.monotonic
        try:
            if self._is_awake:
                end = now() + SHORT
                while now() < end:
                    if poll(0):
                        return
                    os.sched_yield()
                self._is_awake = False
                poll()
            elif self.may_stay_awake:
                started = now()
                poll()
                self._is_awake = now() - started < SHORT
        except BaseException as error:  # noqa: BLE001 - no call can have it
            # Another thread has raised it in this one, by `PyThreadState_SetAsyncExc`.
            # While bytes are read it would lose them.
            report_dropped(error)

    def read(self, flags: int = 0) -> bool:
        """Wait for bytes and read once; False when the driver has gone.

        With `MSG_DONTWAIT` among the flags, do not wait; see recv(2).
        """
        size = min(max(CHUNK, self._connection.missing), LARGEST_CHUNK)
        try:
            data = self._socket.recv(size, flags)
        except BlockingIOError:
            return True
        except OSError:
            return False
        messages = self._connection.receive(data)
        if self.loans is not None:
            messages = self.loans.take_in(messages)
        if self.on_child is not None:
            messages = [message for message in messages if not self.on_child(message)]
        self._received.extend(messages)
        return bool(data)

    def read_ready(self, is_guest: bool = False) -> bool:
        """Read once if there are bytes to read; False when the driver has gone.

        Threads may call this at the same time; the second one finds nothing. A guest is
        a thread or an event loop that the task started and that may outlive the task.
        """
        with self._reading:
            if is_guest and not self._has_guests:
                return True
            if self._interrupts.entered and get_ident() == self._main:
                with self._interrupts.shielded():
                    return self.read(socket.MSG_DONTWAIT)
            return self.read(socket.MSG_DONTWAIT)

    def admit_guests(self, are_admitted: bool) -> None:
        """Allow or forbid reads by threads and loops of the running task."""
        with self._reading:
            self._has_guests = are_admitted

    def wait(self, seconds: float | None) -> None:
        """Wait until there may be bytes to read, for `seconds` or a day at most.

        In the main thread, a call of the function that `waker` returns ends the wait
        too.
        """
        poll = self._poll
        if get_ident() == self._main:
            if self._signals.deferred and not self._interrupts.entered:
                self._signals.run_deferred()
        else:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
        if seconds is not None:
            # poll(2) takes milliseconds as a C int: 24 days at most.
            seconds = min(max(seconds, 0), DAY)
        for descriptor, _ in poll.poll(None if seconds is None else seconds * 1000):
            if descriptor == self._waking:
                os.eventfd_read(descriptor)

    def waker(self) -> Callable[[], object]:
        """Return a function that ends a `wait` of the main thread, from any thread.

        Threads that read call it: after such a read the socket is empty and the main
        thread would sleep on, although the message may be for the main thread.
        """
        if self._waking < 0:
            # Never closed before the process ends: a thread may call at any time.
            self._waking = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._poll.register(self._waking, select.POLLIN)
        return partial(os.eventfd_write, self._waking, 1)

    @property
    def entered(self) -> int:
        """The task or call whose code the main thread runs; 0 for none."""
        return self._interrupts.entered

    @property
    def is_busy(self) -> bool:
        """True while a message is sent or read, possibly by the calling thread."""
        is_held = self._lock.locked() or self._reading.locked()
        return is_held or self._interrupts.is_shielded

    def close(self) -> None:
        """Close this end, in a fork of the worker: it must not send for the worker."""
        self.is_closed = True
        self._socket.close()

    def take(self, kind: type[Message]) -> list[Message]:
        """Remove and return the messages of one kind that were read but not taken."""
        with self._reading:
            received = self._received
            taken = [message for message in received if type(message) is kind]
            if taken:
                rest = [message for message in received if type(message) is not kind]
                self._received = deque(rest)
        return taken

    def has_drop(self, call: int) -> bool:
        """Return whether a message that was read, but not taken, cancels a call."""
        with self._reading:
            return any(
                type(message) is Drop and message.call == call
                for message in self._received
            )

    def take_all(self) -> list[Message]:
        """Remove and return all messages that were read but not taken."""
        with self._reading:
            messages = list(self._received)
            self._received.clear()
        return messages

    def send_all(self, messages: Sequence[Message]) -> None:
        """Send messages together, outside of user code; see `send`."""
        frames = encode_all(messages)
        if self.loans is not None and self.loans.unnamed:
            for message in messages:
                self.loans.name(message)
        with self._lock:
            if self._unsent:
                self._send_unsent()
            self._socket.sendall(frames)

    def send(self, message: Message) -> None:
        """Send one message, waiting while the driver does not read.

        Raises:
            OSError: the driver has gone.
            SerializationError: the message is too long.
        """
        frame = encode(message)
        if self._interrupts.entered and get_ident() == self._main:
            with self._interrupts.shielded(), self._lock:
                self._prepare(message)
                self._socket.sendall(frame)
        else:
            with self._lock:
                self._prepare(message)
                self._socket.sendall(frame)

    def report(self, number: int, payload: bytes) -> None:
        """Send a report of a call, or keep the newest report until there is room.

        Wait for `MOMENT` at most, and not at all if the last wait was in vain. A kept
        report is sent before the next message, which may wait. The kernel reports room
        when at most a quarter of the socket's buffer is in use.
        """
        older = self._unsent.pop(number, None)
        message = Report(number, older.lost + 1 if older is not None else 0, payload)
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        with self.without_interrupts():
            # Another thread may hold the lock while it waits for room.
            if self._lock.acquire(timeout=MOMENT * self._has_room):
                try:
                    self._has_room = bool(poll.poll(MOMENT * 1000 * self._has_room))
                    if self._has_room:
                        self._socket.sendall(encode(message))
                        return
                finally:
                    self._lock.release()
            self._unsent[number] = message

    def without_interrupts(self) -> AbstractContextManager[None]:
        """Context manager: no interrupt is raised in this thread in the block."""
        return self._interrupts.shielded_if_open()

    def _send_unsent(self) -> None:
        while self._unsent:
            _, report = self._unsent.popitem()
            self._socket.sendall(encode(report))

    def _prepare(self, message: Message) -> None:
        if self._unsent:
            self._send_unsent()
        if self.loans is not None and self.loans.unnamed:
            self.loans.name(message)
