"""A peer's connection on the driver's loop: bytes to messages, messages to bytes.

The shell around `wire.Connection`. A peer of another user is refused; one that
breaks the protocol is cut off, and nothing else suffers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, cast

from aiogpu.errors import ProtocolError
from aiogpu.linux.sockets import peer_credentials
from aiogpu.wire.codec import LARGE, encode, encode_all
from aiogpu.wire.connection import CLIENT, Connection
from aiogpu.wire.messages import ChildDone, Hello, Invoke, Message, Refused

_log: Final = logging.getLogger(__name__)


CHUNK: Final = 1 << 18


_POSTED: Final = frozenset({ChildDone, Invoke})
"""Of these many are posted in one turn; but for their payload they are small."""


AT_A_TIME: Final = 1 << 14
"""Bytes of one peer that are read while the loop does not turn."""


AT_ONCE: Final = 256
"""Messages of one peer that are passed on in one turn of the loop: a few ms."""


Handler = Callable[[list[Message]], None]


Greeted = Callable[["Peer", Hello], None]


class Peer(asyncio.Protocol):
    """One zygote, keeper or worker as the driver sees it.

    Whoever is told of its greeting sets `on_messages` and `on_lost`, and `on_slow` if
    he minds that it does not read what it is sent. What has come together is passed
    on together, in order.
    """

    def __init__(
        self, greeted: Greeted, on_heard: Callable[[int], object] | None = None
    ) -> None:
        self.on_messages: Handler = _ignore
        self.on_lost: Callable[[], None] = _nothing
        self.on_slow: Callable[[bool], object] = bool  # nobody minds
        self._greeted = greeted
        self._on_heard = on_heard
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
        """Accept the peer if it is the same user's."""
        # uvloop's transports are not asyncio's by class, only by what they do.
        stream = cast("asyncio.Transport", transport)
        uid = peer_uid(stream)
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
            messages = self._connection.receive(data)
        except ProtocolError as error:
            _log.warning("! cut off %r: %s", self, error)
            if self._connection.peer is None:
                # It may be of another version, and somebody's program.
                self.refuse(str(error))
            elif self._connection.peer.role == CLIENT:
                self.drop(f"it has said what it may not: {error}")
            else:
                self.abort()
            return
        if messages and type(messages[0]) is Hello:
            # It comes first, and once.
            self._greeted(self, messages.pop(0))  # type: ignore[arg-type]
        count = len(messages)
        if self._waiting or count > AT_ONCE:
            self._put_off(messages)
        elif count:
            self.on_messages(messages)
        if self._on_heard is not None:
            self._on_heard(count)

    @property
    def readable(self) -> int:
        """The descriptor from which it may be read now, without the loop; -1 for none.

        It may not while what came before has yet to be passed on.
        """
        transport = self._transport
        if self._is_paused or self._waiting or transport is None:
            return -1
        return -1 if transport.is_closing() else self._descriptor

    def read_now(self) -> None:
        """Pass on what has come, without the loop; that it has gone the loop tells."""
        try:
            data = os.read(self._descriptor, AT_A_TIME)
        except OSError:
            return
        if data:
            self.data_received(data)

    def _put_off(self, messages: list[Message]) -> None:
        """Pass on a flood in parts, between which the loop does other things."""
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
            self.on_messages(part)

    def _set_reading(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._is_paused or self._waiting:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Hear the peer out, then tell that it has gone.

        A write to one that has just ended makes the transport give up at once, with
        the peer's last words unread; its descriptor is closed after this.
        """
        transport, self._transport = self._transport, None
        if exc is not None and transport is not None:
            self._hear_out(transport)
        self._connection.close()
        while self._waiting:
            self._work_off()
        self.on_lost()

    def _hear_out(self, transport: asyncio.Transport) -> None:
        with suppress(OSError):
            descriptor = transport.get_extra_info("socket").fileno()
            while data := os.read(descriptor, CHUNK):
                self.data_received(data)

    def send(self, *messages: Message) -> None:
        """Send messages in one write; to a peer that has gone, nothing."""
        if self._posted:
            self._flush()
        if self._transport is not None:
            self._transport.write(encode_all(messages))

    def send_one(self, message: Message) -> None:
        """The same for a single message, the commonest case."""
        if self._posted:
            self._flush()
        if self._transport is not None:
            self._transport.write(encode(message))

    def post(self, message: Message) -> None:
        """Send a message at once, and what is posted later in this turn together.

        So the peer begins soon, and is not woken by each of many. What is sent
        meanwhile goes after them.
        """
        if self._transport is None:
            return
        if self._is_posting:
            # What may be too long is to fail here, and nothing else with it.
            is_small = type(message) in _POSTED and len(message.payload) < LARGE  # type: ignore[union-attr, arg-type]
            self._posted.append(message if is_small else encode(message))
        else:
            self._is_posting = True
            asyncio.get_running_loop().call_soon(self._end_posting)
            self._transport.write(encode(message))

    def post_all(self, messages: Sequence[ChildDone]) -> None:
        """Send answers, none of which is large, together with what is posted later.

        Where several have come at once, others are about to.
        """
        if self._transport is None:
            return
        self._posted += messages
        if not self._is_posting:
            self._is_posting = True
            asyncio.get_running_loop().call_soon(self._end_posting)

    def send_posted(self) -> None:
        """Send what was posted until now; the turn goes on."""
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
        """Bytes of what was sent that have not left this process."""
        if self._transport is None:
            return 0
        return self._transport.get_write_buffer_size()

    def pause(self) -> None:
        """Read no more for now; the peer will block when its buffer is full."""
        self._is_paused = True
        self._set_reading()

    def resume(self) -> None:
        """Read again after `pause`."""
        self._is_paused = False
        self._set_reading()

    def pause_writing(self) -> None:
        """It reads too slowly what it is sent; see `asyncio.Protocol`."""
        self.on_slow(True)

    def resume_writing(self) -> None:
        """It has caught up."""
        self.on_slow(False)

    @property
    def pid(self) -> int:
        """Process id at the other end, 0 where the kernel does not know it."""
        if self._transport is None:
            return 0
        return peer_credentials(self._transport.get_extra_info("socket")).pid

    def refuse(self, reason: str) -> None:
        """Say why it may not stay, and close."""
        self.send_one(Refused(reason))
        self.end()

    def drop(self, reason: str) -> None:
        """Say why it is cut off, hear nothing more of it, and close at once."""
        self._waiting.clear()
        self.on_messages = _ignore
        if self.unsent:
            self.abort()  # it does not read, and would never hear
            return
        self.send_one(Refused(reason))
        if self._transport is not None:
            self._transport.close()

    def end(self) -> None:
        """Close after what was sent; nothing more is passed on, not even the end."""
        self.on_messages = _ignore
        self.on_lost = _nothing
        self._connection.close()
        if self._posted:
            self._flush()
        if self._transport is not None:
            self._transport.close()

    def cut_off(self) -> None:
        """Close, and pass on nothing more, not even the end."""
        self._waiting.clear()
        self.on_messages = _ignore
        self.on_lost = _nothing
        self.abort()

    def abort(self) -> None:
        """Close without sending what is still buffered; as soon as it is open."""
        self._is_aborted = True
        if self._transport is not None:
            self._transport.abort()

    def kill(self) -> None:
        """Send SIGKILL to the process at the other end, if it has not hung up.

        For zygotes and keepers: of their connections no other process has a copy.
        """
        if self._transport is None:
            return
        sock = self._transport.get_extra_info("socket")
        try:
            process = os.pidfd_open(peer_credentials(sock).pid)
        except OSError:
            return  # it has ended
        try:
            # Its process id was its own when the process was opened.
            ended = select.poll()
            ended.register(sock.fileno(), select.POLLRDHUP)
            if not ended.poll(0):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def peer_uid(transport: asyncio.Transport) -> int:
    """The user id at the other end of a Unix socket (SO_PEERCRED, unix(7))."""
    return peer_credentials(transport.get_extra_info("socket")).uid


def _ignore(_messages: list[Message]) -> None:
    """What a peer says before anybody listens has no meaning."""


def _nothing() -> None:
    """Nobody has asked to be told."""
