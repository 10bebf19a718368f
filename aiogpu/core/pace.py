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
UP: Final = 0.25
DOWN: Final = 0.5
"""What the latest duration counts in the mean, where it is longer, or shorter."""
OUTLIER: Final = 4
"""How many times the mean a duration counts at most: a worker may be put aside."""
LEAST: Final = 1e-4
"""Seconds that count in any case."""


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
        if mean < 0:
            mean = took
        elif took < mean:
            mean += (took - mean) * DOWN
        else:
            mean += (min(took, mean * OUTLIER + LEAST) - mean) * UP
        self.mean = mean
        self.depth = DEEPEST if mean * DEEPEST < HORIZON else int(HORIZON / mean)

    def note_long(self) -> None:
        """One takes longer than was thought: queue nothing until it is known."""
        self.mean = max(self.mean, HORIZON)
        self.depth = 0
