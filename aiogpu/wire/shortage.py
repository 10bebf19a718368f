"""What a worker says when a task has run out of device memory; see `wire.messages`."""

from typing import NamedTuple


class RanOut(NamedTuple):
    """Worker to driver: the task or call whose `Failed` follows ran out of it.

    `peak` is the most bytes of device memory that this process is known to have used,
    0 where nobody can tell.
    """

    task: int
    peak: int
