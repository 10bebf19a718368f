"""A program's socket to a node in another process.

It is not an asyncio transport: plain code may have to wait for the node, for example
for room on the other socket. Then messages must be sent and received without the loop
(`press`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from aiogpu.linux.sockets import check_server
from aiogpu.wire.codec import encode
from aiogpu.wire.connection import CLIENT, Connection
from aiogpu.wire.messages import Message, ProtocolError

CHUNK: Final = 1 << 18


AT_ONCE: Final = 1 << 14
"""Bytes of unsent messages that are sent before the end of a turn of the loop, so that
the node starts on them while the program goes on."""


FIRST_PAUSE: Final = 1e-3


LONGEST_PAUSE: Final = 0.05
"""Seconds at most between two attempts to connect while the node's backlog is full."""


async def connect_to(path: str) -> socket.socket:
    """Return a non-blocking socket, connected to a node of this user.

    While the node's backlog is full, this tries again without end: the caller sets a
    timeout.

    Raises:
        OSError: no process listens there.
        NodeError: a process of another user listens there; nothing was sent.
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
                # EAGAIN, see connect(2). There is no event for room in the backlog.
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        check_server(connected, path)
    except BaseException:
        connected.close()
        raise
    return connected


class NodeConnection:
    """The messages between a program and its node.

    Args:
        loop: the loop on which it is used.
        on_messages: called with received messages.
        on_lost: called when the node has gone, with the reason if it is known.
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
        """True until the connection is closed or known to be lost."""
        return self._socket is not None

    async def connect(self, path: str, greeting: bytes, first: Message) -> None:
        """Connect and greet; may wait without end, like `connect_to`.

        Args:
            path: path of the node's socket.
            greeting: see `wire.connection.greeting`.
            first: first message, sent before messages that already wait.

        Raises:
            OSError: no process listens there.
            NodeError: a process of another user listens there; nothing was sent.
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
        # Not in a later turn: the node waits for it, and this loop may be blocked.
        self._write(encode(first))

    def send(self, message: Message) -> None:
        """Send a message: the first in a turn at once, later ones together.

        Raises:
            SerializationError: the message is too long.
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
        """Send the waiting messages, unless earlier bytes still wait for room."""
        if self._unsent and self._rest is None:
            unsent, self._unsent, self._size = self._unsent, [], 0
            self._write(b"".join(unsent))

    def _write(self, data: bytes) -> None:
        connected = self._socket
        if connected is None:
            return
        sent = self._send_now(connected, data)
        if sent < len(data):
            # A view, so that repeated sends do not copy the rest.
            self._rest = memoryview(data)[sent:]
            self._loop.add_writer(connected.fileno(), self._go_on)

    def _go_on(self) -> None:
        """Send more of the rest, since there is room."""
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
            return  # closed since this callback was scheduled
        messages = self._receive()
        self._deliver_late()
        if messages is None:
            self._lose(None)
            return
        if messages:
            self._on_messages(messages)
        self._end_if_reset()

    def _end_if_reset(self) -> None:
        """Read to the end if the node has died without reading all its messages.

        The kernel reports this as an error of the socket, even while the node's last
        messages are unread. uvloop calls a reader once for such an error and never
        again.
        """
        connected = self._socket
        if connected is None:
            return
        if connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._is_reset = True
        if self._is_reset:
            self._loop.call_soon(self._read)

    def _receive(self) -> list[Message] | None:
        """Receive messages without waiting; None if the node has gone.

        If the messages cannot be read, the connection ends.
        """
        assert self._socket is not None, self
        size = max(CHUNK, self._connection.missing)
        try:
            data = self._socket.recv(min(size, 4 * CHUNK))
        except BlockingIOError:
            self._is_reset = False  # the other end is open: reading on would never end
            return []
        except OSError:
            return None
        try:
            return self._connection.receive(data) if data else None
        except ProtocolError as error:
            self._lose(error)
            return []

    def _lose(self, error: Exception | None) -> None:
        self.close()
        self._on_lost(error)

    def press(self) -> None:
        """Send and receive now, while plain code on the loop waits for the node.

        The node reads no messages from a program that does not read the node's
        messages.
        """
        if self._socket is None:
            return
        if self._rest is not None:
            self._go_on()
        else:
            self._send_unsent()
        # If the node has gone, the loop notices it and reports it.
        messages = self._receive()
        if messages and not self._late:
            self._loop.call_soon(self._deliver_late)
        self._late += messages or []

    def _deliver_late(self) -> None:
        late, self._late = self._late, []
        if late:
            self._on_messages(late)

    def pause(self) -> None:
        """Stop reading for now; the node notices and stops sending."""
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
        """Close the socket in a fork, which must not send for the program."""
        connected, self._socket = self._socket, None
        if connected is not None:
            connected.close()

    def _send_now(self, connected: socket.socket, data: bytes | memoryview) -> int:
        """Send as many bytes as there is room for; return their number."""
        try:
            return connected.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            # The node's last messages may still be unread, and then its end. The socket
            # no longer has the error that `_end_if_reset` looks for.
            self._is_reset = True
            return len(data)
