"""What one worker was lent: values and segments, and the way for their descriptors.

A thing is kept alive as long as a worker may use it. It is lent as often as a payload
that names it is sent, and counts as returned when the worker says so as often, or ends.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import TYPE_CHECKING, Final

from aiogpu.errors import ProtocolError
from aiogpu.memory.fd_passing import DescriptorReceiver, DescriptorSender
from aiogpu.runtime.segment import SharedSegment, discard, kept
from aiogpu.wire.messages import NUMBER_BITS

if TYPE_CHECKING:
    import mmap

    from aiogpu.runtime.values import Value


MOST_EARLY: Final = 1024
"""Descriptors that may come before what names them."""
REFUSED: Final = 5e-3
"""Seconds after which descriptors are sent again that the kernel would not take."""
_SHORT_OF_DESCRIPTORS: Final = {errno.EMFILE, errno.ENFILE}


class Lending:
    """See above.

    Attributes:
        worker: id of the worker.
        warm: bytes of its segments that stand ready to be written again, by id.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, worker: int) -> None:
        self.worker = worker
        self.warm: dict[int, int] = {}
        self._loop = loop
        self._things: dict[int, SharedSegment | Value] = {}
        self._counts: dict[int, int] = {}
        self._socket: socket.socket | None = None
        self._sender: DescriptorSender | None = None
        self._receiver: DescriptorReceiver | None = None
        self._unsent: dict[int, SharedSegment] = {}
        self._arrived: dict[int, int | mmap.mmap] = {}

    def __repr__(self) -> str:
        return f"<Lending {len(self._things)} things to worker {self.worker}>"

    @property
    def is_connected(self) -> bool:
        """Whether the worker has connected for descriptors."""
        return self._socket is not None

    def lend(self, thing: SharedSegment | Value) -> None:
        """Lend a thing, once more if it has it already."""
        identity = thing.id
        if identity in self._things:
            self._counts[identity] += 1
            return
        self._things[identity], self._counts[identity] = thing, 1
        self._pass(thing)

    def _pass(self, thing: SharedSegment | Value) -> None:
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
                self._send_one(sender, segment)
                del self._unsent[segment.id]
        except OSError as error:
            if error.errno in _SHORT_OF_DESCRIPTORS:
                self._loop.call_later(REFUSED, self._send)
            return  # else it has ended, which is told elsewhere
        if sender.waiting or sender.is_refused:
            self._flush()

    def _send_one(self, sender: DescriptorSender, segment: SharedSegment) -> None:
        if segment.copy is None:
            sender.send(segment.id, segment.fd)
            return
        descriptor = segment.share()
        try:
            sender.send(segment.id, descriptor)
        finally:
            os.close(descriptor)

    def _flush(self) -> None:
        assert self._sender is not None, self
        assert self._socket is not None, self
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
            self._loop.call_later(REFUSED, self._flush_again)

    def _flush_again(self) -> None:
        if self._socket is not None:
            self._flush()

    def receive(self, segment: int) -> int | mmap.mmap:
        """A segment that the worker has written; it was sent first.

        Returns:
            The descriptor; where few are left, a copy of the content.

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
            if number in self._arrived:
                discard(self._arrived[number])
            self._arrived[number] = kept(descriptor)
        return bool(found)

    def own_values(self) -> list[Value]:
        """The values that the worker has begun itself."""
        things, owner = self._things, self.worker
        return [
            thing
            for identity, thing in things.items()
            if -identity >> NUMBER_BITS == owner
            and not isinstance(thing, SharedSegment)
        ]

    def close(self) -> None:
        """The worker has ended: it has nothing any more."""
        self._things.clear()
        self._counts.clear()
        self._unsent.clear()
        for content in self._arrived.values():
            discard(content)
        self._arrived.clear()
        if self._receiver is not None:
            self._receiver.close()
        if self._sender is not None:
            self._sender.close()
        if self._socket is not None:
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
        self._sender = self._receiver = self._socket = None
