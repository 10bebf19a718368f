"""A worker's blocking connection to the driver.

Reads happen in the main thread only. Sends may come from any thread of the user's
that prints, and one frame is never torn by another or by an interrupt.
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

from aiogpu.linux.sockets import check_server
from aiogpu.wire.codec import encode, encode_all
from aiogpu.wire.connection import WORKER, Connection, greeting
from aiogpu.wire.messages import Message, Report
from aiogpu.worker.interrupts import Interrupts

if TYPE_CHECKING:
    from aiogpu.client.references import Loans


CHUNK: Final = 65536


LARGEST_CHUNK: Final = 1 << 20


DAY: Final = 86_400.0


SHORT: Final = 300e-6
"""Seconds; after a wait that was no longer, the next one begins awake, for as long.
From an answer to its next call a driver that sleeps takes 60 to 150 us."""


MOMENT: Final = 0.01
"""Seconds for which a report waits for room, or for other threads."""


class Channel:
    """Messages in, messages out, over one blocking socket.

    Made before the fork, since what is made after it is paid by each worker;
    connected in the worker.

    Attributes:
        on_child: takes what is said of the task's children; False for all else.
        on_idle: called before `next` waits; None for nothing to be done.
        loans: takes in the payloads that name what this worker was lent.
        is_closed: this process is a fork of the worker, and shares its loop's poll.
        may_stay_awake: whether there is a core beside the driver's.
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
        # One object is for one thread at a time: this one for the main one.
        self._poll = select.poll()
        # With one CPU, staying awake would only keep the driver from running.
        self.may_stay_awake = len(os.sched_getaffinity(0)) > 1
        self._is_awake = False
        self._has_room = True
        self._unsent: dict[int, Report] = {}

    def connect(self, path: str, worker: int) -> None:
        """Connect to the driver and say which worker this is.

        Raises:
            OSError: the driver has gone.
            NodeError: another user listens in its place.
        """
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.connect(path)
        check_server(connected, path)
        connected.sendall(greeting(WORKER, worker, os.getpid()))
        self.use(connected)

    def use(self, connected: socket.socket) -> None:
        """Take a socket that is connected and has been greeted on."""
        self._socket = connected
        self._poll.register(connected, select.POLLIN)

    def is_silent(self, seconds: float) -> bool:
        """Return whether nothing comes for so long."""
        return not self._received and not self._poll.poll(seconds * 1000)

    def fileno(self) -> int:
        """Descriptor of the socket, for an event loop to watch."""
        return self._socket.fileno()

    def next(self) -> Message | None:
        """The next message, waiting for it; None when the driver has gone.

        Raises:
            ProtocolError: the driver sent what is no message.
        """
        while not self._received:
            if self.on_idle is not None:
                self.on_idle()
            self._wait()
            if not self.read():
                return None
        return self._received.popleft()

    def _wait(self) -> None:
        """Wait for bytes: awake for a moment if that has paid, then asleep.

        Waking a sleeping core costs as much as all else in a short call. Where
        calls come seldom or are long, nothing is spent on staying awake.
        """
        poll, now = self._poll.poll, time.monotonic
        if self._is_awake:
            end = now() + SHORT
            while now() < end:
                if poll(0):
                    return
                os.sched_yield()
            self._is_awake = False
        elif self.may_stay_awake:
            started = now()
            poll()
            self._is_awake = now() - started < SHORT

    def read(self, flags: int = 0) -> bool:
        """Read once, waiting for bytes; False when the driver has gone.

        With `MSG_DONTWAIT` among the flags it does not wait; see recv(2).
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
        """Read once if there is something to read; False when the driver has gone.

        Other threads may do the same; who comes second finds nothing. A guest is
        a thread or an event loop of the task's own, which may outlive it.
        """
        with self._reading:
            if is_guest and not self._has_guests:
                return True
            if self._interrupts.entered and get_ident() == self._main:
                with self._interrupts.shielded():
                    return self.read(socket.MSG_DONTWAIT)
            return self.read(socket.MSG_DONTWAIT)

    def admit_guests(self, are_admitted: bool) -> None:
        """Let threads of the running task read, or only the worker's main thread."""
        with self._reading:
            self._has_guests = are_admitted

    def wait(self, seconds: float | None) -> None:
        """Wait until there may be something to read, or for so long; a day at most.

        In the main thread also until `waker` is called.
        """
        poll = self._poll
        if get_ident() != self._main:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
        if seconds is not None:
            # poll(2) takes milliseconds as an int of C: 24 days at most.
            seconds = min(max(seconds, 0), DAY)
        for descriptor, _ in poll.poll(None if seconds is None else seconds * 1000):
            if descriptor == self._waking:
                os.eventfd_read(descriptor)

    def waker(self) -> Callable[[], object]:
        """Return what ends a `wait` of the main thread, whichever thread calls it.

        For threads that read: what another has read before it wakes keeps the main
        thread asleep, though it may be for it.
        """
        if self._waking < 0:
            # Closed with the process: a thread may call at any time.
            self._waking = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._poll.register(self._waking, select.POLLIN)
        return partial(os.eventfd_write, self._waking, 1)

    @property
    def entered(self) -> int:
        """The task or call whose code the main thread runs; 0 for none."""
        return self._interrupts.entered

    @property
    def is_busy(self) -> bool:
        """True if a message is being sent or read, maybe by the thread that asks."""
        is_held = self._lock.locked() or self._reading.locked()
        return is_held or self._interrupts.is_shielded

    def close(self) -> None:
        """Close this process's end; a fork of the worker must not speak for it."""
        self.is_closed = True
        self._socket.close()

    def take(self, kind: type[Message]) -> list[Message]:
        """Remove the messages of one kind that were read but not taken yet."""
        with self._reading:
            received = self._received
            found = [message for message in received if type(message) is kind]
            if found:
                rest = [message for message in received if type(message) is not kind]
                self._received = deque(rest)
        return found

    def take_all(self) -> list[Message]:
        """Remove all messages that were read but not taken yet."""
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
        """Send a report of a call, or keep the newest one until there is room.

        It waits for `MOMENT` at most, and not at all if that was in vain before. What
        is kept goes ahead of the next message, which may wait. The kernel reports room
        when a quarter of the socket's buffer is taken at most.
        """
        older = self._unsent.pop(number, None)
        message = Report(number, older.lost + 1 if older is not None else 0, payload)
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        with self.uncut():
            # Another thread may be waiting for room.
            if self._lock.acquire(timeout=MOMENT * self._has_room):
                try:
                    self._has_room = bool(poll.poll(MOMENT * 1000 * self._has_room))
                    if self._has_room:
                        self._socket.sendall(encode(message))
                        return
                finally:
                    self._lock.release()
            self._unsent[number] = message

    def uncut(self) -> AbstractContextManager[None]:
        """Context manager: no interrupt is raised in this thread in the block."""
        return self._interrupts.if_open()

    def _send_unsent(self) -> None:
        while self._unsent:
            _, report = self._unsent.popitem()
            self._socket.sendall(encode(report))

    def _prepare(self, message: Message) -> None:
        if self._unsent:
            self._send_unsent()
        if self.loans is not None and self.loans.unnamed:
            self.loans.name(message)
