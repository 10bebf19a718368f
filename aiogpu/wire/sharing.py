"""What driver and worker say to each other of values and shared memory.

Things that a worker was lent, segments and values, are counted: each time that a
payload which names one comes to it, and each time that it has returned it. See
`wire.parcel`.
"""

from typing import Final, NamedTuple

SEGMENTS: Final = 1 << 60
"""Ids of segments begin here; those of values are below."""
WARM: Final = 1 << 28
"""Bytes of its segments that stand ready in one worker, to be written again."""
NUMBERS: Final = 32
"""Bits of the id of a value, or of an actor, below those that say whose it is.

Such an id is negated; its owner is the worker or the client that has given it.
"""
OWNER: Final = 36
"""Bits of a segment's id below those that say whose it is: a worker's id, or 0."""


class Recycle(NamedTuple):
    """Driver to worker: nobody reads these segments of yours; write them again.

    Those whose id comes negated are to be closed: the node has no memory to spare.
    """

    segments: tuple[int, ...]


class Returned(NamedTuple):
    """Worker to driver: these things that came so often are not used any more.

    See `PRESSING` for none.
    """

    things: tuple[int, ...]
    counts: tuple[int, ...]


PRESSING: Final = Returned((), ())
"""Read the descriptors that I have sent: there is no room for more, and they are for
one message, which cannot be sent before all of them."""


class Put(NamedTuple):
    """Worker to driver: keep this value, under an id of the worker's choice.

    That is below zero, and the only one of its kind on the node. It counts as lent.
    """

    value: int
    payload: bytes


class PutFailed(NamedTuple):
    """Worker to driver: the child whose result was to be this value has none."""

    value: int
    kind: str
    type_name: str
    message: str
    traceback: str
    payload: bytes | None


class Share(NamedTuple):
    """Worker to driver: the result of this child is a value as well, under that id.

    Or, where it has several results, the part of that index; -1 for all of it.
    """

    value: int
    child: int
    part: int


class Fetch(NamedTuple):
    """Worker to driver: tell a value, as the result of a child."""

    task: int
    child: int
    value: int


class Discard(NamedTuple):
    """Worker to driver: nobody wants this value any more: stop who makes it."""

    value: int


class Sync(NamedTuple):
    """Worker to driver: answer `Synced` once you have taken in what I said before.

    A child may have ended before the driver was told that its result is shared. Its
    answer is on the way then, and arrives before `Synced`.
    """


class Synced(NamedTuple):
    """Driver to worker: the answer to `Sync`."""


Sharing = Recycle | Returned | Put | PutFailed | Share | Fetch | Discard
"""Everything that concerns values and shared memory."""
