"""Whether what is weighed again and again stays what it is."""

from __future__ import annotations

from statistics import median
from typing import Final

WARM_UP: Final = 1 / 4
"""The part of all samples that come before anything has settled."""
LEAST: Final = 4
"""Samples by which growth can be told at all."""


class Series:
    """What something has weighed, at one rest after the other."""

    def __init__(self) -> None:
        self.samples: list[float] = []

    @property
    def settled(self) -> list[float]:
        """The samples after the warm-up."""
        return self.samples[max(1, round(len(self.samples) * WARM_UP)) :]

    @property
    def is_enough(self) -> bool:
        """Whether growth can be told."""
        return len(self.samples) >= LEAST

    @property
    def growth(self) -> float:
        """How much more there is at the end: of a last third, over a first one.

        Of each third its median counts, so that one rest at which more was kept than
        usual says nothing.
        """
        settled = self.settled
        third = max(1, len(settled) // 3)
        return median(settled[-third:]) - median(settled[:third])
