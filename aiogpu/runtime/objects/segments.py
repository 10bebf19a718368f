"""Segments of shared memory: what they take, and what a worker was lent of them.

Each takes up a descriptor of this process. Where few are left, a private copy of the
content is kept instead, which takes up none. A segment, a value and an actor are kept
alive as long as a worker may use them (`BorrowerReferences`). Each is lent as often as
a payload that names it is sent, and counts as returned when the worker says so as
often, or ends.
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

from aiogpu.errors import ProtocolError
from aiogpu.linux.procfs import MemoryBounds
from aiogpu.memory.fd_passing import DescriptorReceiver, DescriptorSender
from aiogpu.memory.segment import Segment, spill_directory
from aiogpu.runtime.descriptors import values_limit
from aiogpu.wire.messages import NUMBER_BITS

if TYPE_CHECKING:
    from aiogpu.memory.control_page import ControlPage
    from aiogpu.runtime.objects.values import Value


LARGEST_COPY: Final = 1 << 26
"""Bytes of the largest segment that is copied: the loop stands still meanwhile."""


class SharedSegment:
    """Kept alive by whoever reads it; with the last of these it can be written again.

    Attributes:
        id: by which payloads name it.
        fd: a descriptor for readers, which is closed with this; -1 if there is a copy.
        copy: a private copy of its content, None if there is a descriptor.
        size: in bytes.
        counted: bytes of it that count as memory in use.
        on_free: told its id, what is counted and whether it was a copy when nobody
            reads it any more; None before it is in use.
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
        """True if it takes memory; a file on disk does not, and knows no seals."""
        if self.copy is None:
            try:
                fcntl.fcntl(self.fd, fcntl.F_GET_SEALS)
            except OSError:
                return False
        return True

    def keep_copy(self) -> bool:
        """Keep a copy in place of the descriptor; False if it is too large for that.

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
        """A new descriptor with the content, for a reader; the caller closes it.

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
        """Buffers of the copy, for this process to read.

        Raises:
            ValueError: one is outside of it.
        """
        assert self.copy is not None, self
        whole = memoryview(self.copy).toreadonly()
        for offset, length in spans:
            if offset < 0 or length < 0 or offset + length > self.size:
                raise ValueError(f"span {(offset, length)} is outside of {self!r}")
        return [whole[offset : offset + length] for offset, length in spans]

    def __del__(self) -> None:
        # Wherever the collector runs: in another thread, or amid the loop's own work.
        if self.fd >= 0:
            os.close(self.fd)
        if self.on_free is not None:
            self.on_free(self.id, self.counted, self.copy is not None)


def is_short() -> bool:
    """Return whether few descriptors of this process are left.

    The kernel gives the lowest number that is free, so all below are in use.
    """
    try:
        lowest = os.dup(0)
    except OSError:
        return True
    os.close(lowest)
    return lowest >= values_limit()


PART: Final = 0.3
"""The part of the memory that may be used here that values take unless told."""


WARM_PART: Final = 4
"""Of the limit, at most one in so many bytes stands ready in workers."""


class ObjectMemory:
    """Counts the segments that somebody reads, whoever has written them.

    Attributes:
        limit: bytes; beyond it values are written to disk.
        used: bytes in memory now.
        warm: bytes of segments that stand ready in workers, to be written again.
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
        """Have workers see how much is left, who do not ask before they write.

        None: there are no workers any more.
        """
        self._page = page
        self._show()

    @property
    def directory(self) -> str:
        """Where values are written that have no room in memory."""
        if self._directory is None:
            self._directory = spill_directory()
        return self._directory

    @property
    def total(self) -> int:
        """The limit in bytes, which is found out when it is first needed."""
        if self.limit is None:
            self.limit = int(MemoryBounds().safe_limit() * PART)
        return self.limit

    @property
    def left(self) -> int:
        """Bytes to the limit; below zero beyond it."""
        return self.total - self.used - self.warm

    def keep_warm(self, size: int) -> bool:
        """Count a segment that nobody reads as ready; False if it is too much."""
        if not size or size > min(
            self.left, (self.limit or 0) // WARM_PART - self.warm
        ):
            return False
        self.warm += size
        self._show()
        return True

    def use_warm(self, size: int) -> None:
        """What stood ready is written again, or has gone with its worker."""
        self.warm -= size
        self._show()

    def _show(self) -> None:
        if self._page is not None:
            self._page.note_left(max(0, self.left))

    def take(self, size: int) -> int:
        """Count so many bytes that a segment, or a copy of it, takes in memory."""
        if size:
            self.used += size
            self._show()
        return size

    def give_back(self, size: int) -> None:
        """Count a segment no more that took so much."""
        self.used -= size
        self._show()


MOST_EARLY: Final = 1024
"""Descriptors that may come before what names them."""


REFUSED: Final = 5e-3
"""Seconds after which descriptors are sent again that the kernel would not take."""


_SHORT_OF_DESCRIPTORS: Final = {errno.EMFILE, errno.ENFILE}


class ActorRegister(Protocol):
    """Counts who has a handle to an actor."""

    def hold(self, actor: int) -> bool:
        """One more has; False if nobody has until now."""

    def release(self, actor: int) -> None:
        """One who had has gone."""

    def release_soon(self, actor: int) -> None:
        """The same from wherever objects are dropped."""


class ActorHold:
    """Somebody who has a handle to an actor: a process, or a payload on its way.

    The actor has one holder less when this has gone, and ends with the last.

    Args:
        actor: its id; who holds it counts already.
        register: has the actor.
    """

    __slots__ = ("_register", "id")

    def __init__(self, actor: int, register: ActorRegister) -> None:
        self.id = actor
        self._register: ActorRegister | None = register

    def __repr__(self) -> str:
        return f"<ActorHold of {self.id}>"

    def end(self) -> None:
        """Let go of it now."""
        register, self._register = self._register, None
        if register is not None:
            register.release(self.id)

    def __del__(self) -> None:
        if self._register is not None:
            self._register.release_soon(self.id)


class BorrowerReferences:
    """What one worker was lent, and the socket by which it gets descriptors.

    Attributes:
        worker: id of the worker.
        warm: sizes in bytes of its segments that are ready to be written again, by id.
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
        """Lend a thing, once more if it has it already."""
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
        """The worker has returned these things that often; give what it never had."""
        strange = []
        for identity, count in zip(things, counts, strict=False):
            left = self._counts.get(identity, 0) - count
            if left > 0:
                self._counts[identity] = left
                # It has closed its descriptor before it heard of the latest loan.
                self._pass(self._things[identity])
            else:
                self._counts.pop(identity, None)
                self._unsent.pop(identity, None)
                if self._things.pop(identity, None) is None:
                    strange.append(identity)
        return strange

    def connect(self, connected: socket.socket) -> None:
        """The worker has connected for descriptors."""
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
            return  # else it has ended, which is told elsewhere
        if sender.waiting or sender.is_refused:
            self._flush()

    def _flush(self) -> None:
        if self._sender is None or self._socket is None:
            return  # the worker has ended
        try:
            is_through = self._sender.flush()
        except OSError:
            is_through = True  # it has ended, which is told elsewhere
        if is_through or self._sender.is_refused:
            self._loop.remove_writer(self._socket.fileno())
        else:
            self._loop.add_writer(self._socket.fileno(), self._flush)
        if not is_through and self._sender.is_refused:
            # Writable all the same: too many are under way, until others read theirs.
            self._loop.call_later(REFUSED, self._flush)

    def receive(self, segment: int) -> SharedSegment:
        """A segment that the worker has written; it was sent first.

        Raises:
            ProtocolError: it was not.
        """
        most = len(self._arrived) + MOST_EARLY
        while segment not in self._arrived and len(self._arrived) <= most:
            if not self._read():
                break
        if segment not in self._arrived:
            raise ProtocolError(f"worker {self.worker} has passed no segment {segment}")
        return self._arrived.pop(segment)

    def take_in(self) -> None:
        """Read all that the worker has sent: it waits for room for more."""
        while self._read():
            pass

    def _read(self) -> bool:
        """Read one message; False where there is nothing.

        One at a time, and each carries one descriptor: so there is room for it.
        """
        if self._receiver is None:
            return False
        try:
            found = self._receiver.read(socket.MSG_DONTWAIT, 1)
        except EOFError:
            return False
        for number, descriptor in found:
            size = os.fstat(descriptor).st_size
            arrived = self._arrived[number] = SharedSegment(number, descriptor, size)
            if descriptor >= values_limit():
                # Few are left. The next one gets the same number again.
                with suppress(OSError):  # there is no memory
                    arrived.keep_copy()
        return bool(found)

    def own_values(self) -> list[Value]:
        """The values that the worker has begun itself."""
        things, owner = self._things, self.worker
        return [
            thing
            for identity, thing in things.items()
            if -identity >> NUMBER_BITS == owner
            and not isinstance(thing, SharedSegment | ActorHold)
        ]

    def take_actors(self) -> list[ActorHold]:
        """Have the worker hold no actor any more; gives those that it has held."""
        things = list(self._things.values())
        holds = [thing for thing in things if isinstance(thing, ActorHold)]
        for hold in holds:
            del self._things[hold.id], self._counts[hold.id]
        return holds

    def close(self) -> None:
        """The worker has ended: it has nothing any more."""
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
