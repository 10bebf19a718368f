"""Shared-memory segments on the driver's side, and the references that workers hold.

An open segment takes a descriptor of this process. When few descriptors are left, the
driver keeps a private copy of the content instead. `BorrowerReferences` counts the
references to segments, values and actors: a worker borrows a thing once for each
payload that names it, and must return it as often, or end.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from aiogpu.linux.procfs import MemoryBounds
from aiogpu.memory.fd_passing import DescriptorReceiver, DescriptorSender
from aiogpu.memory.segment import Segment, spill_directory
from aiogpu.runtime.descriptors import values_limit
from aiogpu.wire.messages import NUMBER_BITS, ProtocolError

if TYPE_CHECKING:
    from aiogpu.memory.control_page import ControlPage
    from aiogpu.runtime.objects.values import Value


LARGEST_COPY: Final = 1 << 26
"""Bytes of the largest segment that is copied: the loop stands still meanwhile."""


class SharedSegment:
    """One segment, kept alive by its readers; without readers it can be reused.

    Attributes:
        id: the id of the segment in payloads.
        fd: a descriptor for readers, closed with this object; -1 if there is a copy.
        copy: a private copy of the content, None if there is a descriptor.
        size: the size in bytes.
        counted: the bytes that count as memory in use.
        on_free: called when the last reader has gone, with the id, `counted` and
            whether there was a copy; None before the segment is in use.
    """

    __slots__ = ("__weakref__", "copy", "counted", "fd", "id", "on_free", "size")

    def __init__(self, identity: int, fd: int, size: int) -> None:
        self.id = identity
        self.fd = fd
        self.copy: mmap.mmap | None = None
        self.size = size
        self.counted = 0
        self.on_free: Callable[[int, int, bool], object] | None = None

    def __repr__(self) -> str:
        return f"<SharedSegment {self.id}, {self.size} bytes>"

    @property
    def is_memory(self) -> bool:
        """True if the segment is in memory, and not a file; only memory has seals."""
        if self.copy is None:
            try:
                fcntl.fcntl(self.fd, fcntl.F_GET_SEALS)
            except OSError:
                return False
        return True

    def keep_copy(self) -> bool:
        """Replace the descriptor by a copy; False if the segment is too large.

        Raises:
            OSError: there is too little memory.
        """
        if not 0 < self.size <= LARGEST_COPY:
            return False
        copy = mmap.mmap(-1, self.size)
        with memoryview(copy) as whole:
            done = 0
            while done < self.size:
                count = os.preadv(self.fd, [whole[done:]], done)
                if not count:
                    raise OSError("the segment is shorter than it was")
                done += count
        os.close(self.fd)
        self.fd, self.copy = -1, copy
        return True

    def share(self) -> int:
        """Return a new descriptor with the content; the caller closes it.

        Raises:
            OSError: there are too many descriptors, or there is too little memory.
        """
        if self.copy is None:
            return os.dup(self.fd)
        segment = Segment.create(self.id, self.size)
        try:
            segment.write([memoryview(self.copy)[: self.size]])
            return segment.share()
        finally:
            segment.close()

    def views_of_copy(self, spans: list[tuple[int, int]]) -> list[memoryview]:
        """Return copies of parts of the copy, which their reader may change.

        Raises:
            ValueError: a span is outside of the segment.
        """
        assert self.copy is not None, self
        whole = memoryview(self.copy)
        for offset, length in spans:
            if offset < 0 or length < 0 or offset + length > self.size:
                raise ValueError(f"span {(offset, length)} is outside of {self!r}")
        return [
            memoryview(bytearray(whole[offset : offset + length]))
            for offset, length in spans
        ]

    def __del__(self) -> None:
        # The garbage collector may call this in any thread, at any point of the loop.
        if self.fd >= 0:
            os.close(self.fd)
        if self.on_free is not None:
            self.on_free(self.id, self.counted, self.copy is not None)


def is_short() -> bool:
    """Return True if few descriptors of this process are left.

    The kernel gives the lowest free number, so all numbers below are in use.
    """
    try:
        lowest = os.dup(0)
    except OSError:
        return True
    os.close(lowest)
    return lowest >= values_limit()


PART: Final = 0.3
"""The default limit for values, as a fraction of the memory of this machine."""


WARM_PART: Final = 4
"""Workers keep at most 1/`WARM_PART` of the limit as segments for reuse."""


class ObjectMemory:
    """Counts the memory of all segments that have readers.

    Attributes:
        limit: bytes; beyond the limit, values are written to disk.
        used: bytes in memory now.
        warm: bytes of segments that workers keep for reuse.
    """

    def __init__(self, limit: int | None = None, directory: str | None = None) -> None:
        self.limit = limit
        self._directory = directory
        self.used = 0
        self.warm = 0
        self._page: ControlPage | None = None

    def __repr__(self) -> str:
        return f"<ObjectMemory {self.used} of {self.limit} bytes>"

    def show_on(self, page: ControlPage | None) -> None:
        """Publish the bytes left on the control page, where workers read them.

        Args:
            page: the page, None once there are no workers any more.
        """
        self._page = page
        self._show()

    @property
    def directory(self) -> str:
        """The directory for values beyond the limit."""
        if self._directory is None:
            self._directory = spill_directory()
        return self._directory

    @property
    def total(self) -> int:
        """The limit in bytes; computed on first use."""
        if self.limit is None:
            self.limit = int(MemoryBounds().safe_limit() * PART)
        return self.limit

    @property
    def left(self) -> int:
        """Bytes left below the limit; negative beyond it."""
        return self.total - self.used - self.warm

    def keep_warm(self, size: int) -> bool:
        """Count a segment that its worker keeps for reuse; False if over the limit."""
        if not size or size > min(
            self.left, (self.limit or 0) // WARM_PART - self.warm
        ):
            return False
        self.warm += size
        self._show()
        return True

    def use_warm(self, size: int) -> None:
        """Stop counting a kept segment: it is reused, or its worker has ended."""
        self.warm -= size
        self._show()

    def _show(self) -> None:
        if self._page is not None:
            self._page.note_left(max(0, self.left))

    def take(self, size: int) -> int:
        """Count the memory of a segment or of its copy; return `size`."""
        if size:
            self.used += size
            self._show()
        return size

    def give_back(self, size: int) -> None:
        """Stop counting the memory of a segment."""
        self.used -= size
        self._show()


MOST_EARLY: Final = 1024
"""Descriptors that may arrive before the message that names them."""


REFUSED: Final = 5e-3
"""Seconds until descriptors that the kernel refused are sent again."""


_SHORT_OF_DESCRIPTORS: Final = {errno.EMFILE, errno.ENFILE}


class ActorRegister(Protocol):
    """Counts the holders of handles to actors."""

    def hold(self, actor: int) -> bool:
        """Count one more holder; False if the actor is unknown."""

    def release(self, actor: int) -> None:
        """Count one holder less."""

    def release_soon(self, actor: int) -> None:
        """Count one holder less, from any thread or `__del__`."""


class ActorHold:
    """One counted holder of an actor: a process, or a payload in transit.

    The count is decremented when this object is freed. The actor ends with its last
    holder.

    Args:
        actor: the id of the actor; the holder is counted already.
        register: counts the holders of the actor.
    """

    __slots__ = ("_register", "id")

    def __init__(self, actor: int, register: ActorRegister) -> None:
        self.id = actor
        self._register: ActorRegister | None = register

    def __repr__(self) -> str:
        return f"<ActorHold of {self.id}>"

    def end(self) -> None:
        """Decrement the count now."""
        register, self._register = self._register, None
        if register is not None:
            register.release(self.id)

    def __del__(self) -> None:
        if self._register is not None:
            self._register.release_soon(self.id)


class BorrowerReferences:
    """The references of one worker or program, and its socket for descriptors.

    Attributes:
        worker: the id of the worker or program.
        warm: sizes in bytes of the segments that it keeps for reuse, by id.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, worker: int) -> None:
        self.worker = worker
        self.warm: dict[int, int] = {}
        self._loop = loop
        self._things: dict[int, SharedSegment | Value | ActorHold] = {}
        self._counts: dict[int, int] = {}
        self._socket: socket.socket | None = None
        self._sender: DescriptorSender | None = None
        self._receiver: DescriptorReceiver | None = None
        self._unsent: dict[int, SharedSegment] = {}
        self._arrived: dict[int, SharedSegment] = {}

    def __repr__(self) -> str:
        return (
            f"<BorrowerReferences {len(self._things)} things to worker {self.worker}>"
        )

    @property
    def is_connected(self) -> bool:
        """True if the worker has connected for descriptors."""
        return self._socket is not None

    def lend(self, thing: SharedSegment | Value | ActorHold) -> None:
        """Lend a thing; each call counts one more loan."""
        identity = thing.id
        if identity in self._things:
            self._counts[identity] += 1
            return
        self._things[identity], self._counts[identity] = thing, 1
        self._pass(thing)

    def _pass(self, thing: SharedSegment | Value | ActorHold) -> None:
        if isinstance(thing, SharedSegment):
            self._unsent[thing.id] = thing
            self._send()

    def take_back(self, things: tuple[int, ...], counts: tuple[int, ...]) -> list[int]:
        """Take back things as often as counted; return the ids that were never lent."""
        unknown = []
        for identity, count in zip(things, counts, strict=False):
            loans = self._counts.get(identity, 0) - count
            if loans > 0:
                self._counts[identity] = loans
                # The worker closed its descriptor before it received the latest loan.
                self._pass(self._things[identity])
            else:
                self._counts.pop(identity, None)
                self._unsent.pop(identity, None)
                if self._things.pop(identity, None) is None:
                    unknown.append(identity)
        return unknown

    def connect(self, connected: socket.socket) -> None:
        """Send and receive descriptors over the socket of the worker."""
        self._socket = connected
        self._sender = DescriptorSender(connected)
        self._receiver = DescriptorReceiver(connected)
        self._send()

    def _send(self) -> None:
        sender, connected = self._sender, self._socket
        if sender is None or connected is None:
            return
        try:
            while self._unsent:
                segment = next(iter(self._unsent.values()))
                if segment.copy is None:
                    sender.send(segment.id, segment.fd)
                else:
                    descriptor = segment.share()
                    try:
                        sender.send(segment.id, descriptor)
                    finally:
                        os.close(descriptor)
                del self._unsent[segment.id]
        except OSError as error:
            if error.errno in _SHORT_OF_DESCRIPTORS:
                self._loop.call_later(REFUSED, self._send)
            return  # the worker has ended; its main connection reports that
        if sender.waiting or sender.is_refused:
            self._flush()

    def _flush(self) -> None:
        if self._sender is None or self._socket is None:
            return  # the worker has ended
        try:
            is_sent = self._sender.flush()
        except OSError:
            is_sent = True  # the worker has ended; its main connection reports that
        if is_sent or self._sender.is_refused:
            self._loop.remove_writer(self._socket.fileno())
        else:
            self._loop.add_writer(self._socket.fileno(), self._flush)
        if not is_sent and self._sender.is_refused:
            # The socket is writable, but too many descriptors of this user are in
            # flight until other processes receive theirs.
            self._loop.call_later(REFUSED, self._flush)

    def receive(self, segment: int) -> SharedSegment:
        """Return a segment of the worker, which must have been sent already.

        Raises:
            ProtocolError: the worker has not sent it.
        """
        most = len(self._arrived) + MOST_EARLY
        while segment not in self._arrived and len(self._arrived) <= most:
            if not self._read():
                break
        if segment not in self._arrived:
            raise ProtocolError(f"worker {self.worker} has sent no segment {segment}")
        return self._arrived.pop(segment)

    def read_descriptors(self) -> None:
        """Read all descriptors that have arrived: the worker waits for room."""
        while self._read():
            pass

    def _read(self) -> bool:
        """Read one message; False if there is none.

        Each message carries one descriptor, so the buffer for one always suffices.
        """
        if self._receiver is None:
            return False
        try:
            received = self._receiver.read(socket.MSG_DONTWAIT, 1)
        except EOFError:
            return False
        for number, descriptor in received:
            size = os.fstat(descriptor).st_size
            arrived = self._arrived[number] = SharedSegment(number, descriptor, size)
            if descriptor >= values_limit():
                # Few descriptors are left; a copy frees this one for the next segment.
                with suppress(OSError):  # there is no memory for a copy
                    arrived.keep_copy()
        return bool(received)

    def own_values(self) -> list[Value]:
        """Return the values that the worker has created."""
        things, owner = self._things, self.worker
        return [
            thing
            for identity, thing in things.items()
            if -identity >> NUMBER_BITS == owner
            and not isinstance(thing, SharedSegment | ActorHold)
        ]

    def take_actors(self) -> list[ActorHold]:
        """Remove and return all holds of actors."""
        things = list(self._things.values())
        holds = [thing for thing in things if isinstance(thing, ActorHold)]
        for hold in holds:
            del self._things[hold.id], self._counts[hold.id]
        return holds

    def close(self) -> None:
        """Drop all references: the worker has ended."""
        self._things.clear()
        self._counts.clear()
        self._unsent.clear()
        self._arrived.clear()
        if self._receiver is not None:
            self._receiver.close()
        if self._sender is not None:
            self._sender.close()
        if self._socket is not None:
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
        self._sender = self._receiver = self._socket = None
