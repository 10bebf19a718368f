"""Descriptors of shared memory that come to a worker and go from it.

They have a socket of their own, which is connected when it is first needed. Each is
matched by the id of its segment, since it comes before or after what names that.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from aiogpu.errors import NodeClosedError
from aiogpu.linux.syscalls import check_server
from aiogpu.worker.context import current

if TYPE_CHECKING:
    from aiogpu.memory.fd_passing import DescriptorReceiver, DescriptorSender
    from aiogpu.memory.segment import Segment

REFUSED: Final = 5e-3
"""Seconds after which a descriptor is sent again that the kernel would not take."""
PATIENCE: Final = 10.0
"""Seconds in which a node has sent a client what it has spoken of."""


class Descriptors:
    """See above. Made in the zygote; used by one thread at a time.

    Nothing may cut its methods short: who connects a second time is turned away.
    """

    def __init__(self, path: str, owner: int = 0) -> None:
        self._path = path
        self._owner = owner
        self._arrived: dict[int, int] = {}
        self._socket: socket.socket | None = None
        self._sender: DescriptorSender
        self._receiver: DescriptorReceiver

    def __repr__(self) -> str:
        return f"<Descriptors of {len(self._arrived)} segments>"

    def receive(self, segment: int) -> int:
        """The descriptor of a segment, waiting for it.

        Raises:
            NodeClosedError: the driver has gone, or this process has left it.
            OSError: it cannot be had, as where there are too many.
        """
        if segment not in self._arrived:
            connected = self._connected()
            poll = select.poll()
            poll.register(connected, select.POLLIN)
            # A client's loop must not stand still; a worker has nothing else to do.
            limit = PATIENCE * 1000 if self._owner else None
            while segment not in self._arrived:
                if not poll.poll(limit):
                    raise NodeClosedError(f"the node has not sent segment {segment}.")
                self.take_in()
        return self._arrived[segment]

    def take_in(self) -> None:
        """Take in what has come, without waiting; raises as `receive` does."""
        if self._socket is None:
            return
        try:
            found = self._receiver.read(socket.MSG_DONTWAIT)
        except EOFError:
            raise NodeClosedError("the node has gone.") from None
        for segment, descriptor in found:
            self.close(segment)  # it may have come before
            self._arrived[segment] = descriptor

    def close(self, segment: int) -> None:
        """A segment is not used any more."""
        descriptor = self._arrived.pop(segment, None)
        if descriptor is not None:
            os.close(descriptor)

    def close_all(self) -> None:
        """Nothing of it is used any more."""
        for segment in list(self._arrived):
            self.close(segment)
        self.leave()

    def send(self, segment: Segment, press: Callable[[], object]) -> None:
        """Send the driver a descriptor; it reads it when it hears of the segment.

        Args:
            segment: whose.
            press: called while there is no room: has the driver read what was sent.

        Raises:
            OSError: the driver has gone, or there are too many descriptors.
        """
        connected = self._connected()
        descriptor = segment.share()
        try:
            is_sent = self._sender.send(segment.id, descriptor)
            while not is_sent:
                press()
                # Not by `select` alone: it is writable where the kernel refuses.
                waited_for = [] if self._sender.is_refused else [connected]
                select.select([], waited_for, [], REFUSED)
                is_sent = self._sender.flush()
        finally:
            os.close(descriptor)

    def use(self, connected: socket.socket) -> None:
        """Take a socket that is connected: descriptors come ahead of what names them.

        Raises:
            OSError: the node has gone.
        """
        # Late: a worker that has to do with no shared memory needs none of it.
        from aiogpu.memory.fd_passing import DescriptorReceiver, DescriptorSender

        owner = self._owner or current.worker
        try:
            connected.sendall(owner.to_bytes(8, "little"))
        except BaseException:
            connected.close()
            raise
        self._sender = DescriptorSender(connected)
        self._receiver = DescriptorReceiver(connected)
        self._socket = connected

    def _connected(self) -> socket.socket:
        if self._socket is not None and self._socket.fileno() < 0:
            raise NodeClosedError(
                "its node was closed, and nobody had looked at it before; await large "
                "values while their node is open."
            )
        if self._socket is None:
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connected.connect(self._path)
                check_server(connected, self._path)
            except BaseException:
                connected.close()
                raise
            self.use(connected)
        assert self._socket is not None, self
        return self._socket

    def leave(self) -> None:
        """This process is a fork of the worker: it must not speak for it."""
        if self._socket is not None:
            self._socket.close()
