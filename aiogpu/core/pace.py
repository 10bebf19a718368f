"""How long a function's tasks take, and how many may be queued behind one.

A task that is sent ahead cannot be given elsewhere for free, so only as much is
sent as a worker will do in a moment. This file does arithmetic, nothing else.
"""

from __future__ import annotations

from typing import Final

HORIZON: Final = 2e-3
"""Seconds of work that may be queued behind a task."""
DEEPEST: Final = 64
"""Tasks that may be queued behind one, however short they are."""
WEIGHT: Final = 0.25
"""What the latest duration counts in the mean."""


class Pace:
    """A running mean of what a function's tasks took.

    Attributes:
        mean: seconds, negative while nothing is known.
        depth: how many of them may be queued behind one; 0 while nothing is known.
    """

    __slots__ = ("depth", "mean")

    def __init__(self) -> None:
        self.mean = -1.0
        self.depth = 0

    def note(self, took: float) -> None:
        """Take in one task's duration in seconds."""
        mean = self.mean
        mean = self.mean = took if mean < 0 else mean + (took - mean) * WEIGHT
        self.depth = DEEPEST if mean * DEEPEST < HORIZON else int(HORIZON / mean)

    def note_long(self) -> None:
        """One takes longer than was thought: queue nothing until it is known."""
        self.mean = max(self.mean, HORIZON)
        self.depth = 0
