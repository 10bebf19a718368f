"""One end of a connection, without its socket: greeting, states, allowed messages.

The end that connects greets with `Hello`, by which the other end learns what it is.
After that each end accepts only what its peer's role may send.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from aiogpu.errors import ProtocolError
from aiogpu.wire.codec import LIMIT, FrameReader, encode
from aiogpu.wire.messages import (
    VERSION,
    Ask,
    Bind,
    Cancel,
    Carried,
    Carry,
    Check,
    ChildDemand,
    ChildDone,
    ChildFailed,
    ChildItems,
    Close,
    Create,
    Created,
    Declare,
    Define,
    Demand,
    Depart,
    Departed,
    Discard,
    Done,
    Drop,
    End,
    Ended,
    Exit,
    Failed,
    Fetch,
    Find,
    FindPlacement,
    Forget,
    Fork,
    Forked,
    Hello,
    Hold,
    Imported,
    Inquire,
    Invoke,
    Items,
    Join,
    Keep,
    Leave,
    LeftOut,
    Log,
    Lost,
    Make,
    Message,
    Printed,
    Put,
    PutFailed,
    RanOut,
    Ready,
    Recycle,
    Refused,
    Release,
    Returned,
    Run,
    Share,
    Signal,
    Skipped,
    Spoilt,
    Stale,
    Stop,
    Submit,
    Sync,
    Synced,
    TakeLease,
    Unfit,
    Unforked,
    Wait,
    Warned,
    Welcome,
    Withdraw,
)

ZYGOTE: Final = "zygote"
KEEPER: Final = "keeper"
WORKER: Final = "worker"
CLIENT: Final = "client"

GREETING_LIMIT: Final = 1024
"""Bytes of the longest frame from a peer that has not said who it is."""

SAYS: Final[dict[str, frozenset[type[Message]]]] = {
    ZYGOTE: frozenset({Ready, Unfit, Lost, LeftOut, Stale}),
    KEEPER: frozenset({Forked, Ended, Unforked}),
    WORKER: frozenset(
        {
            *(Done, Failed, Log, Skipped, Spoilt, Declare, Submit, Wait, Withdraw),
            *(Imported, Created, Make, Find, Ask, Hold, Release, Carry, Stop),
            *(Returned, Put, PutFailed, Share, Fetch, Discard),
            *(Items, ChildDemand, RanOut, Sync),
        }
    ),
    CLIENT: frozenset(
        {
            *(Join, Depart, Inquire, Declare, Submit, TakeLease, FindPlacement),
            *(Withdraw, ChildDemand),
            *(Make, Find, Ask, Hold, Release, Carry, Stop),
            *(Returned, Put, PutFailed, Share, Fetch, Discard),
        }
    ),
}
"""What a peer of each role may say to the driver after its greeting."""

HEARS: Final[dict[str, frozenset[type[Message]]]] = {
    ZYGOTE: frozenset({Keep, Check, Close}),
    KEEPER: frozenset({Fork, Signal, End, Close}),
    WORKER: frozenset(
        {
            *(Bind, Define, Forget, Run, Cancel, Exit, ChildDone, ChildFailed),
            *(Create, Invoke, Drop, Leave, Recycle, Demand, ChildItems, Carried),
            Synced,
        }
    ),
    CLIENT: frozenset(
        {
            *(Refused, Welcome, Close, Departed, Carried, Recycle),
            *(ChildDone, ChildFailed, ChildItems, Printed, Warned),
        }
    ),
}
"""What the driver may say to a peer of each role."""

_NOTHING: Final[frozenset[type[Message]]] = frozenset()


class ConnectionState(Enum):
    """Where a connection is."""

    GREETING = "greeting"
    """Nothing but `Hello` may come."""
    OPEN = "open"
    CLOSED = "closed"
    """The peer broke the rules or the stream ended; nothing is read any more."""

    __hash__ = object.__hash__


class Connection:
    """One end of a connection. Bytes in, messages out, and the reverse."""

    def __init__(self, accepted: frozenset[type[Message]] | None = None) -> None:
        self.state = (
            ConnectionState.GREETING if accepted is None else ConnectionState.OPEN
        )
        self.peer: Hello | None = None
        self._accepted = accepted or frozenset({Hello})
        is_new = accepted is None
        self._reader = FrameReader(GREETING_LIMIT if is_new else LIMIT, is_new)

    @classmethod
    def accepting(cls) -> Connection:
        """The driver's end: waits for the greeting."""
        return cls()

    @classmethod
    def connecting(cls, role: str) -> Connection:
        """The end that connects, by its role; send `greeting(...)` first."""
        return cls(HEARS[role])

    def __repr__(self) -> str:
        who = f"{self.peer.role} {self.peer.id}" if self.peer else "unknown"
        return f"<Connection {self.state.value} with {who}>"

    @property
    def missing(self) -> int:
        """How many bytes at least are still to come for the next message."""
        return self._reader.missing

    def receive(self, data: bytes) -> list[Message]:
        """Take in bytes; give the messages that are complete now.

        Raises:
            ProtocolError: the peer broke the rules; the connection is closed.
        """
        if not self._accepted:  # closed
            return []
        try:
            messages = self._feed(data)
            if not self._accepted.issuperset(map(type, messages)):
                self._check_turns(messages)
        except ProtocolError:
            self.close()
            raise
        return messages

    def _check_turns(self, messages: list[Message]) -> None:
        for message in messages:
            if type(message) not in self._accepted and message is not self.peer:
                name = type(message).__name__
                raise ProtocolError(f"{name} out of turn on {self!r}")

    def _feed(self, data: bytes) -> list[Message]:
        """The messages that are complete; the greeting is looked at before the rest."""
        if self.state is not ConnectionState.GREETING:
            return self._reader.feed(data)
        first = self._reader.feed(data)
        if not first:
            return first
        if type(first[0]) is not Hello:
            raise ProtocolError(f"{type(first[0]).__name__} out of turn on {self!r}")
        self._greeted(first[0])
        return [*first, *self._reader.feed(b"")]

    def _greeted(self, hello: Hello) -> None:
        if hello.version != VERSION:
            raise ProtocolError(
                f"the peer speaks protocol {hello.version}, this end {VERSION}; use "
                f"the same version of aiogpu on both"
            )
        if hello.role not in SAYS:
            raise ProtocolError(f"a peer calls itself {hello.role[:40]!r}")
        self.peer = hello
        self._accepted = SAYS[hello.role]
        self._reader.limit, self._reader.is_single = LIMIT, False
        self.state = ConnectionState.OPEN

    def close(self) -> None:
        """Read nothing any more."""
        self.state = ConnectionState.CLOSED
        self._accepted = _NOTHING


def greeting(role: str, identity: int, pid: int) -> bytes:
    """The first bytes that a connecting end sends."""
    return encode(Hello(VERSION, role, identity, pid))
