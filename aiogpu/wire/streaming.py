"""What driver and worker say to each other of a stream; see `wire.messages`.

A task or a call whose `limit` is not 0 is a stream: what its generator yields goes
ahead of its answer. Limits count from the first item, whichever attempt yields it.
"""

from typing import NamedTuple


class Items(NamedTuple):
    """Worker to driver: what the generator of this task has yielded, in order.

    `payloads` are pickles, as that of a result.
    """

    task: int
    payloads: tuple[bytes, ...]


class Demand(NamedTuple):
    """Driver to worker: this task's generator may yield so many items in all."""

    task: int
    limit: int


class ChildItems(NamedTuple):
    """Driver to worker: what the generator of this child has yielded, in order."""

    child: int
    payloads: tuple[bytes, ...]


class ChildDemand(NamedTuple):
    """Worker to driver: this child's generator may yield so many items in all."""

    child: int
    limit: int


Streaming = Items | Demand | ChildItems | ChildDemand
"""Everything that concerns streams."""
