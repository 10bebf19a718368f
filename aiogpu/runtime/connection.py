"""The driver's side of a connection: bytes to messages, messages to bytes.

This is the asyncio shell of `wire.Connection`. A peer of another user is refused. A
peer that breaks the protocol is cut off, which affects no other peer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, cast

from aiogpu.linux.sockets import peer_credentials
from aiogpu.wire.codec import LARGE, encode, encode_all
from aiogpu.wire.connection import CLIENT, Connection
from aiogpu.wire.messages import (
    ChildDone,
    Hello,
    Invoke,
    Message,
    ProtocolError,
    Refused,
)

_log: Final = logging.getLogger(__name__)


CHUNK: Final = 1 << 18


_POSTED: Final = frozenset({ChildDone, Invoke})
"""Messages that are posted in large numbers; all but the payload is small."""


AT_A_TIME: Final = 1 << 14
"""Bytes that are read from a peer at a time without the loop."""


AT_ONCE: Final = 256
"""Messages of one peer that are processed in one turn of the loop: a few ms."""


Handler = Callable[[list[Message]], None]


class Recipient(NamedTuple):
    """The receiver of a peer's messages and of changes to its connection.

    Attributes:
        on_messages: called with messages that have arrived together, in order.
        on_lost: called after the end of the connection.
        on_slow: called with True when the peer reads too slowly, and with False when
            it has caught up; None for no call.
    """

    on_messages: Handler
    on_lost: Callable[[], None]
    on_slow: Callable[[bool], None] | None = None


OnHello = Callable[["Peer", Hello], Recipient | None]
"""Called with a peer's `Hello`; returns its recipient, or None after refusing it."""


class Peer(asyncio.Protocol):
    """The connection of one zygote, keeper, worker or program."""

    def __init__(
        self, on_hello: OnHello, on_data: Callable[[int], object] | None = None
    ) -> None:
        """Make the protocol of one connection.

        Args:
            on_hello: called with the peer's `Hello`.
            on_data: called after data has arrived, with the number of messages.
        """
        # Before `Hello` and after `end` everything is ignored.
        self._on_messages: Handler = _ignore
        self._on_lost: Callable[[], None] = _nothing
        self._on_slow: Callable[[bool], None] | None = None
        self._on_hello = on_hello
        self._on_data = on_data
        self._connection = Connection()
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1
        self._posted: list[Message | bytes] = []
        self._waiting: list[Message] = []
        self._is_paused = False
        self._is_posting = False
        self._is_aborted = False

    def __repr__(self) -> str:
        return f"<Peer {self._connection!r}>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the peer if it runs as the same user."""
        # The transports of uvloop do not derive from those of asyncio.
        stream = cast("asyncio.Transport", transport)
        uid = peer_credentials(stream.get_extra_info("socket")).uid
        if uid != os.geteuid():
            _log.warning("! refused a connection of user %d", uid)
            self._connection.close()
            stream.abort()
            return
        self._transport = stream
        self._descriptor = stream.get_extra_info("socket").fileno()
        if self._is_aborted:
            stream.abort()

    def data_received(self, data: bytes) -> None:
        """Pass on every message that is complete."""
        try:
            try:
                messages = self._connection.receive(data)
            except ProtocolError as error:
                _log.warning("! cut off %r: %s", self, error)
                if self._connection.peer is None:
                    # It may be a program with another version of aiogpu.
                    self.refuse(str(error))
                elif self._connection.peer.role == CLIENT:
                    self.drop(f"it broke the protocol: {error}")
                else:
                    self.abort()
                return
            if messages and type(messages[0]) is Hello:
                # `wire.Connection` guarantees that `Hello` comes first, and only once.
                recipient = self._on_hello(self, messages.pop(0))  # type: ignore[arg-type]
                if recipient is not None:
                    self._on_messages, self._on_lost, self._on_slow = recipient
            count = len(messages)
            if self._waiting or count > AT_ONCE:
                self._put_off(messages)
            elif count:
                self._on_messages(messages)
            if self._on_data is not None:
                self._on_data(count)
        except BaseException:
            # Messages may be lost. A handler of signals has raised, or a handler of
            # messages has failed.
            self.abort()
            raise

    @property
    def readable(self) -> int:
        """The descriptor for `read_now`; -1 while the connection may not be read.

        It may not be read while earlier messages still have to be passed on.
        """
        transport = self._transport
        if self._is_paused or self._waiting or transport is None:
            return -1
        return -1 if transport.is_closing() else self._descriptor

    def read_now(self) -> None:
        """Read and pass on messages without the loop; only the loop handles the end."""
        try:
            data = os.read(self._descriptor, AT_A_TIME)
        except OSError:
            return
        if data:
            self.data_received(data)

    def _put_off(self, messages: list[Message]) -> None:
        """Pass on many messages in parts, so that the loop can do other work."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._work_off)
        self._waiting.extend(messages)
        self._set_reading()

    def _work_off(self) -> None:
        part = self._waiting[:AT_ONCE]
        del self._waiting[:AT_ONCE]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._work_off)
        self._set_reading()
        if part:
            self._on_messages(part)

    def _set_reading(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._is_paused or self._waiting:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Read the peer's last messages, then report the end.

        If a write fails because the peer has just ended, the transport gives up at once
        and leaves the last messages unread. Its descriptor is closed after this call.
        """
        transport, self._transport = self._transport, None
        if exc is not None and transport is not None:
            self._read_rest(transport)
        self._connection.close()
        while self._waiting:
            self._work_off()
        self._on_lost()

    def _read_rest(self, transport: asyncio.Transport) -> None:
        with suppress(OSError):
            descriptor = transport.get_extra_info("socket").fileno()
            while data := os.read(descriptor, CHUNK):
                self.data_received(data)

    def send(self, *messages: Message) -> None:
        """Send messages in one write; do nothing if the connection has ended."""
        if self._posted:
            self._flush()
        if self._transport is not None:
            self._transport.write(encode_all(messages))

    def send_one(self, message: Message) -> None:
        """Send a single message, the most frequent case."""
        if self._posted:
            self._flush()
        if self._transport is not None:
            self._transport.write(encode(message))

    def post(self, message: Message) -> None:
        """Send a message now, and further ones together at the end of the loop's turn.

        So the peer starts early, but is not woken for each of many messages. Other
        `send` methods first send what was posted, so the order is kept.
        """
        if self._transport is None:
            return
        if self._is_posting:
            # A message that may be too long must fail here, and fail alone.
            is_small = type(message) in _POSTED and len(message.payload) < LARGE  # type: ignore[union-attr, arg-type]
            self._posted.append(message if is_small else encode(message))
        else:
            self._is_posting = True
            asyncio.get_running_loop().call_soon(self._end_posting)
            self._transport.write(encode(message))

    def post_all(self, messages: Sequence[ChildDone]) -> None:
        """Post small answers, to be sent at the end of the loop's turn.

        After several results at once, more are likely to follow.
        """
        if self._transport is None:
            return
        self._posted += messages
        if not self._is_posting:
            self._is_posting = True
            asyncio.get_running_loop().call_soon(self._end_posting)

    def send_posted(self) -> None:
        """Send what was posted so far, before the end of the loop's turn."""
        if self._posted:
            self._flush()

    def _end_posting(self) -> None:
        self._is_posting = False
        self._flush()

    def _flush(self) -> None:
        posted, self._posted = self._posted, []
        if posted and self._transport is not None:
            self._transport.write(encode_all(posted))

    @property
    def unsent(self) -> int:
        """The number of bytes in the write buffer."""
        if self._transport is None:
            return 0
        return self._transport.get_write_buffer_size()

    def limit_frames(self, limit: int) -> None:
        """Set the limit on the length of this peer's frames."""
        self._connection.limit_frames(limit)

    def pause(self) -> None:
        """Stop reading until `resume`; the peer blocks when its buffer is full."""
        self._is_paused = True
        self._set_reading()

    def resume(self) -> None:
        """Read again after `pause`."""
        self._is_paused = False
        self._set_reading()

    def pause_writing(self) -> None:
        """Note that the peer reads too slowly; see `asyncio.Protocol`."""
        if self._on_slow is not None:
            self._on_slow(True)

    def resume_writing(self) -> None:
        """Note that the peer has caught up."""
        if self._on_slow is not None:
            self._on_slow(False)

    @property
    def pid(self) -> int:
        """Process id at the other end, 0 if the kernel does not know it."""
        if self._transport is None:
            return 0
        return peer_credentials(self._transport.get_extra_info("socket")).pid

    def refuse(self, reason: str) -> None:
        """Send the reason why the peer is refused, and close."""
        self.send_one(Refused(reason))
        self.end()

    def drop(self, reason: str) -> None:
        """Send the reason why the peer is cut off, ignore its messages, and close."""
        self._waiting.clear()
        self._on_messages = _ignore
        if self.unsent:
            self.abort()  # the peer does not read, so it would not get the reason
            return
        self.send_one(Refused(reason))
        if self._transport is not None:
            self._transport.close()

    def end(self) -> None:
        """Close after sending everything; call no more handlers, not even `on_lost`."""
        self._on_messages = _ignore
        self._on_lost = _nothing
        self._connection.close()
        if self._posted:
            self._flush()
        if self._transport is not None:
            self._transport.close()

    def cut_off(self) -> None:
        """Close at once; call no more handlers, not even `on_lost`."""
        self._waiting.clear()
        self._on_messages = _ignore
        self._on_lost = _nothing
        self.abort()

    def abort(self) -> None:
        """Close without sending the buffer, now or once the connection is made."""
        self._is_aborted = True
        if self._transport is not None:
            self._transport.abort()

    def kill(self) -> None:
        """Send SIGKILL to the process at the other end, if it is still connected.

        For zygotes and keepers: no other process has a copy of their connections.
        """
        if self._transport is None:
            return
        sock = self._transport.get_extra_info("socket")
        try:
            process = os.pidfd_open(peer_credentials(sock).pid)
        except OSError:
            return  # the process has ended
        try:
            # If still connected, the pidfd refers to this process, not a successor.
            ended = select.poll()
            ended.register(sock.fileno(), select.POLLRDHUP)
            if not ended.poll(0):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def _ignore(_messages: list[Message]) -> None:
    """Ignore messages."""


def _nothing() -> None:
    """Ignore the end."""
