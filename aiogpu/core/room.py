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
STEP: Final = 8
"""A lowered bound rises by this part of itself at a time, and by one more."""


class Room:
    """The bound on a node's workers.

    Attributes:
        most: workers that there may be at a time.
        now: the same for now; less than `most` after one could not be had.
        refused: tasks that lacked nothing but a worker, when all that waits was
            last looked at; of each request the first alone is counted.
        leaving: idle workers that were retired so that others can be forked.
    """

    def __init__(self) -> None:
        self.most = self.now = BOUNDLESS
        self.refused = 0
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
        self.now = max(1, min(self.now, there))
        return not was_lowered and self.now < self.most

    def grow(self) -> bool:
        """Allow a few more; whether that is still less than at first."""
        self.now = min(self.most, self.now + 1 + self.now // STEP)
        return self.now < self.most
