"""A program's socket to a node of another process.

It is not a transport of asyncio's: what was said must be on its way, and the answer
read, where plain code has to wait for the node, as for room on its other socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from aiogpu.errors import ProtocolError
from aiogpu.linux.sockets import check_server
from aiogpu.wire.codec import encode
from aiogpu.wire.connection import CLIENT, Connection
from aiogpu.wire.messages import Message

CHUNK: Final = 1 << 18


AT_ONCE: Final = 1 << 14
"""Bytes of what is said in one turn that are sent in the midst of it, so that the node
begins with them while the program goes on."""


FIRST_PAUSE: Final = 1e-3


LONGEST_PAUSE: Final = 0.05
"""Seconds until a node is tried again whose queue of connections is full."""


async def connect_to(path: str) -> socket.socket:
    """A non-blocking socket, connected to a node of this user.

    Where the node's queue of connections is full, it tries again until there is room:
    the caller sets a limit of time.

    Raises:
        OSError: nobody listens there.
        NodeError: another user does; nothing was sent.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        pause = FIRST_PAUSE
        while True:
            try:
                connected.connect(path)
                break
            except BlockingIOError:
                # EAGAIN, see connect(2). No event tells when there is room.
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        check_server(connected, path)
    except BaseException:
        connected.close()
        raise
    return connected


class NodeConnection:
    """The messages of a program to its node, and of the node to the program.

    Args:
        loop: on which it is used.
        on_messages: told what has come.
        on_lost: told that the node has gone, and why if that is known.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_messages: Callable[[list[Message]], None],
        on_lost: Callable[[Exception | None], None],
    ) -> None:
        self._loop = loop
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._connection = Connection(CLIENT)
        self._socket: socket.socket | None = None
        self._unsent: list[bytes] = []
        self._size = 0
        self._rest: memoryview | None = None
        self._is_flushing = False
        self._is_reset = False
        self._late: list[Message] = []

    def __repr__(self) -> str:
        return f"<NodeConnection {'open' if self.is_open else 'closed'}>"

    @property
    def is_open(self) -> bool:
        """True if the node is there, as far as is known."""
        return self._socket is not None

    async def connect(self, path: str, greeting: bytes, first: Message) -> None:
        """Connect and greet; see `connect_to` for how long that may take.

        Args:
            path: of the node's socket.
            greeting: see `wire.connection.greeting`.
            first: what is said next, before what was said until now.

        Raises:
            OSError: nobody listens there.
            NodeError: another user does; nothing was sent.
        """
        connected = await connect_to(path)
        try:
            connected.send(greeting)
        except BaseException:
            connected.close()
            raise
        self._socket = connected
        self._loop.add_reader(connected.fileno(), self._read)
        self._flush_soon()
        # Not in a turn to come: the node waits for it, and this loop may be held up.
        self._write(encode(first))

    def send(self, message: Message) -> None:
        """Say something: at once, and what is said later in this turn together.

        Raises:
            SerializationError: it is too long.
        """
        frame = encode(message)
        if self._is_flushing or self._rest is not None or self._socket is None:
            self._unsent.append(frame)
            self._size += len(frame)
            if self._size >= AT_ONCE and self._socket is not None:
                self._send_unsent()
            return
        self._flush_soon()
        self._write(frame)

    def _flush_soon(self) -> None:
        self._is_flushing = True
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        self._send_unsent()

    def _send_unsent(self) -> None:
        """Send what is to be said; what waits for room goes before it."""
        if self._unsent and self._rest is None:
            unsent, self._unsent, self._size = self._unsent, [], 0
            self._write(b"".join(unsent))

    def _write(self, data: bytes) -> None:
        connected = self._socket
        if connected is None:
            return
        sent = self._send_now(connected, data)
        if sent < len(data):
            # Never copied again, however many times it takes.
            self._rest = memoryview(data)[sent:]
            self._loop.add_writer(connected.fileno(), self._go_on)

    def _go_on(self) -> None:
        """There is room for more of what was not sent."""
        connected, rest = self._socket, self._rest
        assert connected is not None, self
        assert rest is not None, self
        sent = self._send_now(connected, rest)
        if sent < len(rest):
            self._rest = rest[sent:]
            return
        self._rest = None
        self._loop.remove_writer(connected.fileno())
        self._send_unsent()

    def _read(self) -> None:
        if self._socket is None:
            return  # closed since it was to be called soon
        try:
            messages = self._receive()
        except ProtocolError as error:
            self._lose(error)
            return
        self._tell_late()
        if messages is None:
            self._lose(None)
            return
        if messages:
            self._on_messages(messages)
        self._end_if_reset()

    def _end_if_reset(self) -> None:
        """Read to the end if the node has died without reading all that it was sent.

        The kernel reports that as an error of the socket, also while what the node
        said last is still to be read. uvloop calls a reader once for such an error and
        never again.
        """
        connected = self._socket
        if connected is None:
            return
        if connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._is_reset = True
        if self._is_reset:
            self._loop.call_soon(self._read)

    def _receive(self) -> list[Message] | None:
        """Return what has come; None where the node has gone."""
        assert self._socket is not None, self
        size = max(CHUNK, self._connection.missing)
        try:
            data = self._socket.recv(min(size, 4 * CHUNK))
        except BlockingIOError:
            self._is_reset = False  # its other end is open: reading on would never end
            return []
        except OSError:
            return None
        return self._connection.receive(data) if data else None

    def _lose(self, error: Exception | None) -> None:
        self.close()
        self._on_lost(error)

    def press(self) -> None:
        """Send and read what can be, while the loop waits in plain code for the node.

        It hears nothing from who reads nothing.
        """
        if self._socket is None:
            return
        self._push()
        try:
            messages = self._receive()
        except ProtocolError as error:
            self._lose(error)
            return
        # Where the node has gone, the loop finds that out and tells everybody.
        self._tell_later(messages or [])

    def _push(self) -> None:
        if self._rest is not None:
            self._go_on()
        else:
            self._send_unsent()

    def _tell_later(self, messages: list[Message]) -> None:
        if messages and not self._late:
            self._loop.call_soon(self._tell_late)
        self._late += messages

    def _tell_late(self) -> None:
        late, self._late = self._late, []
        if late:
            self._on_messages(late)

    def pause(self) -> None:
        """Stop reading for now; the node notices and sends no more."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())

    def resume(self) -> None:
        """Read again."""
        if self._socket is not None:
            self._loop.add_reader(self._socket.fileno(), self._read)

    def close(self) -> None:
        """Close the connection; unsent messages are dropped."""
        connected, self._socket = self._socket, None
        if connected is None:
            return
        self._loop.remove_reader(connected.fileno())
        self._loop.remove_writer(connected.fileno())
        connected.close()

    def leave(self) -> None:
        """This process is a fork of the client: it must not speak for it."""
        connected, self._socket = self._socket, None
        if connected is not None:
            connected.close()

    def _send_now(self, connected: socket.socket, data: bytes | memoryview) -> int:
        """Send what there is room for now; gives how much."""
        try:
            return connected.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            # What the node said last may still be read, and then its end. The error
            # that `_end_if_reset` looks for is gone from the socket by now.
            self._is_reset = True
            return len(data)
