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


class Room:
    """The bound on a node's workers.

    Attributes:
        most: workers that there may be at a time.
        now: the same for now; less than `most` after one could not be had.
        refused: tasks that lacked nothing but a worker, when all that waits was
            last looked at; of each request the first alone is counted.
        failures: tries in a row that have failed, since a worker last came or went;
            workers that fail together count as one try.
        reason: why the last of them failed.
        since: when the first of them failed.
        retry_at: when more are allowed next.
        leaving: idle workers that were retired so that others can be forked.
    """

    def __init__(self) -> None:
        self.most = self.now = BOUNDLESS
        self.refused = 0
        self.failures = 0
        self.reason = ""
        self.since = 0.0
        self.retry_at = 0.0
        self._is_counted = False
        self._is_awaited = False
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

    def shrink(self, there: int, reason: str, now: float) -> bool:
        """Allow no more than are there; whether nobody is to look again later yet."""
        if not self.failures:
            self.since = now
        if not self._is_counted:
            self._is_counted = True
            self.failures += 1
        self.reason = reason
        self._step = 1
        self.now = min(self.now, there)
        was_awaited, self._is_awaited = self._is_awaited, True
        return not was_awaited

    def grow(self, is_quiet: bool = True) -> bool:
        """Allow one more, then twice as many; whether to look again later.

        What is in vain costs something: so it is one at a time where nothing helps.

        Args:
            is_quiet: no worker is being started, so that none may still fail.
        """
        has_failed, self._is_counted = self._is_counted, False
        if is_quiet and not has_failed:
            self.failures = 0
        self.now = min(self.most, self.now + self._step)
        self._step *= 2
        self._is_awaited = self.now < self.most or has_failed
        return self._is_awaited

    def note_change(self) -> None:
        """A worker has come or gone, so that the next try is not in vain."""
        self.failures = 0
        self._is_counted = False
