"""The tasks of a simulation: drawn from stated distributions, the same for a seed.

The shape is that of published traces, not a fit to any of them: many tasks ask for a
part of a GPU and most others for one (Weng et al., NSDI 2022; Hu et al., SC 2021),
few ask for many but have most of the GPU time (Jeon et al., ATC 2019), durations are
log-normal with a long tail and grow with the size, and arrivals follow the day.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, sin
from random import Random
from typing import Final

from aiogpu.core.model.units import UNIT


@dataclass(frozen=True, slots=True)
class Kind:
    """Tasks of one size.

    Attributes:
        amount: of a GPU, or GPUs, in parts of 1/10 000.
        weight: how many of a thousand tasks are of this kind.
        median: seconds that half of them take at most.
    """

    amount: int
    weight: int
    median: float

    @property
    def name(self) -> str:
        """As the user writes it: "0.25", "8"."""
        return f"{self.amount / UNIT:g}"


KINDS: Final = (
    Kind(UNIT // 10, 100, 120.0),
    Kind(UNIT // 4, 150, 120.0),
    Kind(UNIT // 2, 200, 120.0),
    Kind(UNIT, 380, 600.0),
    Kind(2 * UNIT, 70, 1800.0),
    Kind(4 * UNIT, 50, 1800.0),
    Kind(8 * UNIT, 40, 1800.0),
    Kind(16 * UNIT, 8, 1800.0),
    Kind(32 * UNIT, 2, 1800.0),
)
SIGMA: Final = 1.5
"""Of the durations' logarithm: the mean is three times the median."""
SHORTEST, LONGEST = 1.0, 6 * 3600.0
"""Seconds that a task takes at least, and at most."""
LOAD: Final = 0.9
"""GPU seconds that are asked for, of those that there are, in the mean."""
WAVE: Final = 0.3
"""How much more than the mean arrives at the height of a day; so much less at night."""
DAYS: Final = 7
"""Waves in a trace."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Tasks in the order of their arrival.

    Attributes:
        gpus: for how many GPUs it is meant.
        span: seconds in which they arrive.
        kinds: the sizes, without such as are more than all GPUs.
        arrivals: when each comes.
        sizes: the place of each one's kind.
        seconds: how long each runs.
    """

    gpus: int
    span: float
    kinds: tuple[Kind, ...]
    arrivals: list[float]
    sizes: list[int]
    seconds: list[float]

    def __len__(self) -> int:
        return len(self.arrivals)


def draw(tasks: int, gpus: int, seed: int) -> Trace:
    """Draw a trace that asks for `LOAD` of so many GPUs."""
    chance = Random(seed)
    kinds = tuple(kind for kind in KINDS if kind.amount <= gpus * UNIT)
    weights = [kind.weight for kind in kinds]
    sizes = chance.choices(range(len(kinds)), weights, k=tasks)
    seconds = [_duration(chance, kinds[size]) for size in sizes]
    work = sum(
        kinds[size].amount / UNIT * each
        for size, each in zip(sizes, seconds, strict=True)
    )
    span = work / (LOAD * gpus)
    arrivals = sorted(_moment(chance) * span for _ in range(tasks))
    return Trace(gpus, span, kinds, arrivals, sizes, seconds)


def _duration(chance: Random, kind: Kind) -> float:
    drawn = kind.median * chance.lognormvariate(0.0, SIGMA)
    return min(max(drawn, SHORTEST), LONGEST)


def _moment(chance: Random) -> float:
    """A moment of a span of 1, more likely by day than by night."""
    while True:
        moment = chance.random()
        height = 1 + WAVE * sin(2 * pi * DAYS * moment)
        if chance.random() * (1 + WAVE) <= height:
            return moment
