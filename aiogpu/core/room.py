"""For how many workers there is room, and who makes way where there is none.

Each worker takes descriptors of the driver and two processes. How many there may be
is found out when the node is opened. Where fewer turn out to be had, the bound is
lowered to what is there, and rises again step by step.
"""

from __future__ import annotations

from typing import Final

from aiogpu.core.ids import WorkerId

BOUNDLESS: Final = 1 << 30
"""A node without a bound; one on paper is that."""
VAIN: Final = 40
"""How often it is tried again where no worker is left that could make room."""


class Room:
    """The bound on a node's workers.

    Attributes:
        most: workers that there may be at a time.
        now: the same for now; less than `most` after one could not be had.
        refused: tasks that lacked nothing but a worker, when all that waits was
            last looked at; of each request the first alone is counted.
        vain: how often more were allowed since a worker last came or went.
        leaving: idle workers that were retired so that others can be forked.
    """

    def __init__(self) -> None:
        self.most = self.now = BOUNDLESS
        self.refused = 0
        self.vain = 0
        self._step = 1
        self.leaving: set[WorkerId] = set()

    def __repr__(self) -> str:
        return f"<Room for {self.now} of {self.most}>"

    def bound(self, most: int) -> None:
        """Say how many there may be.

        Args:
            most: at least 1.
        """
        self.most = self.now = most

    def shrink(self, there: int) -> bool:
        """Allow no more than are there; whether it was not lowered before."""
        was_lowered = self.now < self.most
        self._step = 1
        self.now = min(self.now, there)
        return not was_lowered and self.now < self.most

    def grow(self) -> bool:
        """Allow one more, then twice as many; whether that is still less than at first.

        What is in vain costs something: so it is one at a time where nothing helps.
        """
        self.now = min(self.most, self.now + self._step)
        self._step *= 2
        self.vain += 1
        return self.now < self.most
