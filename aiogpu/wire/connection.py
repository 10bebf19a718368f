"""One end of a connection, without its socket: greeting, states, allowed messages.

The connecting end sends `Hello` first, which names its role. After that each end
accepts only the messages that its peer's role may send.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, get_args

from aiogpu.wire.codec import FrameReader, encode
from aiogpu.wire.messages import (
    LIMIT,
    VERSION,
    FromClient,
    FromKeeper,
    FromWorker,
    FromZygote,
    Hello,
    Message,
    ProtocolError,
    ToClient,
    ToKeeper,
    ToWorker,
    ToZygote,
)

ZYGOTE: Final = "zygote"
KEEPER: Final = "keeper"
WORKER: Final = "worker"
CLIENT: Final = "client"

GREETING_LIMIT: Final = 1024
"""Bytes of the longest frame from a peer that has not sent its greeting."""

FROM_PEER: Final[dict[str, frozenset[type[Message]]]] = {
    ZYGOTE: frozenset(get_args(FromZygote)),
    KEEPER: frozenset(get_args(FromKeeper)),
    WORKER: frozenset(get_args(FromWorker)),
    CLIENT: frozenset(get_args(FromClient)),
}
"""The messages that a peer of each role may send to the driver after its greeting."""

TO_PEER: Final[dict[str, frozenset[type[Message]]]] = {
    ZYGOTE: frozenset(get_args(ToZygote)),
    KEEPER: frozenset(get_args(ToKeeper)),
    WORKER: frozenset(get_args(ToWorker)),
    CLIENT: frozenset(get_args(ToClient)),
}
"""The messages that the driver may send to a peer of each role."""


class ConnectionState(Enum):
    """The states of a connection."""

    GREETING = "greeting"
    """Only `Hello` is accepted."""
    OPEN = "open"
    """The messages of the peer's role are accepted."""
    CLOSED = "closed"
    """The peer broke the rules or the stream ended; nothing more is read."""


class Connection:
    """One end of a connection: bytes in, messages out.

    Attributes:
        state: the state.
        peer: the greeting of the other end, once received; None at the end that greets.
    """

    def __init__(self, role: str | None = None) -> None:
        """Make an end.

        Args:
            role: the role of an end that connects, which sends `greeting(...)` first;
                None for the driver's end, which waits for the greeting.
        """
        is_driver = role is None
        self.state = ConnectionState.GREETING if is_driver else ConnectionState.OPEN
        self.peer: Hello | None = None
        self._accepted = frozenset({Hello}) if role is None else TO_PEER[role]
        self._reader = FrameReader(GREETING_LIMIT if is_driver else LIMIT, is_driver)

    def __repr__(self) -> str:
        who = f"{self.peer.role} {self.peer.id}" if self.peer else "unknown"
        return f"<Connection {self.state.value} with {who}>"

    @property
    def missing(self) -> int:
        """Return the least number of further bytes that complete a message."""
        return self._reader.missing

    def receive(self, data: bytes) -> list[Message]:
        """Take in bytes; return the messages that are complete now.

        Raises:
            ProtocolError: the peer broke the rules; the connection is closed.
        """
        if not self._accepted:  # closed
            return []
        try:
            messages = self._reader.feed(data)
            if not self._accepted.issuperset(map(type, messages)):
                wrong = next(m for m in messages if type(m) not in self._accepted)
                raise ProtocolError(f"{type(wrong).__name__} out of turn on {self!r}")
            if messages and self.state is ConnectionState.GREETING:
                # The reader stops after the greeting, which decides how to read on.
                self._open(*messages)  # type: ignore[arg-type]
                messages += self.receive(b"")
        except ProtocolError:
            self.close()
            raise
        return messages

    def _open(self, hello: Hello) -> None:
        if hello.version != VERSION:
            raise ProtocolError(
                f"the peer uses protocol {hello.version}, this end {VERSION}; use the "
                f"same version of aiogpu on both"
            )
        if hello.role not in FROM_PEER:
            raise ProtocolError(f"the peer has the unknown role {hello.role[:40]!r}")
        self.peer = hello
        self._accepted = FROM_PEER[hello.role]
        self._reader.limit, self._reader.is_single = LIMIT, False
        self.state = ConnectionState.OPEN

    def limit_frames(self, limit: int) -> None:
        """Accept only frames of at most `limit` bytes; call after the greeting."""
        self._reader.limit = limit
        self._reader.missing = 0  # also check the length of a frame that has begun

    def close(self) -> None:
        """Stop reading."""
        self.state = ConnectionState.CLOSED
        self._accepted = frozenset()


def greeting(role: str, identity: int, pid: int) -> bytes:
    """Encode the first message of a connecting end."""
    return encode(Hello(VERSION, role, identity, pid))
