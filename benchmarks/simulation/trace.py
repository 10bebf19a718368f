"""The tasks of a simulation, drawn from stated distributions; a seed fixes them.

The shape follows published traces without being fitted to one: many tasks ask for a
part of a GPU and most others for one (Weng et al., NSDI 2022; Hu et al., SC 2021),
few ask for many but use most of the GPU time (Jeon et al., ATC 2019), durations are
log-normal with a long tail and grow with the size, and arrivals follow the day.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi, sin
from random import Random
from typing import Final

from aiogpu.core.model.units import UNIT


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Tasks of one size.

    Attributes:
        amount: GPUs, in units of 1/10 000.
        weight: number of tasks of this size in a thousand.
        median: median duration in seconds.
    """

    amount: int
    weight: int
    median: float

    @property
    def name(self) -> str:
        """GPUs as the user writes them: "0.25", "8"."""
        return f"{self.amount / UNIT:g}"


SIZE_CLASSES: Final = (
    SizeClass(UNIT // 10, 100, 120.0),
    SizeClass(UNIT // 4, 150, 120.0),
    SizeClass(UNIT // 2, 200, 120.0),
    SizeClass(UNIT, 380, 600.0),
    SizeClass(2 * UNIT, 70, 1800.0),
    SizeClass(4 * UNIT, 50, 1800.0),
    SizeClass(8 * UNIT, 40, 1800.0),
    SizeClass(16 * UNIT, 8, 1800.0),
    SizeClass(32 * UNIT, 2, 1800.0),
)
SIGMA: Final = 1.5
"""Standard deviation of the durations' logarithm: the mean is three medians."""
DURATIONS: Final = 1.0, 6 * 3600.0
"""The shortest and the longest duration, in seconds."""
LOAD: Final = 0.9
"""Mean ratio of requested to available GPU seconds."""
WAVE: Final = 0.3
"""Relative excess of arrivals at the peak of a day; at night the same lack."""
DAYS: Final = 7
"""Number of waves in a trace."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Tasks in the order of their arrival.

    Attributes:
        gpus: number of GPUs for which the trace is drawn.
        span: seconds from the first possible arrival to the last.
        classes: the sizes that fit on these GPUs.
        arrivals: arrival time of each task, in seconds.
        sizes: index into `classes` of each task.
        durations: seconds that each task runs.
    """

    gpus: int
    span: float
    classes: tuple[SizeClass, ...]
    arrivals: list[float]
    sizes: list[int]
    durations: list[float]

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def work(self) -> float:
        """Requested GPU seconds."""
        pairs = zip(self.sizes, self.durations, strict=True)
        return sum(self.classes[size].amount / UNIT * each for size, each in pairs)


def draw(
    tasks: int,
    gpus: int,
    seed: int,
    classes: Sequence[SizeClass] = SIZE_CLASSES,
    durations: tuple[float, float] = DURATIONS,
) -> Trace:
    """Draw a trace that requests `LOAD` of the GPUs."""
    random = Random(seed)
    fitting = tuple(each for each in classes if each.amount <= gpus * UNIT)
    weights = [each.weight for each in fitting]
    sizes = random.choices(range(len(fitting)), weights, k=tasks)
    shortest, longest = durations
    drawn = [
        min(
            max(fitting[size].median * random.lognormvariate(0, SIGMA), shortest),
            longest,
        )
        for size in sizes
    ]
    work = Trace(gpus, 0.0, fitting, [], sizes, drawn).work
    span = work / (LOAD * gpus)
    arrivals = sorted(_time_of_day(random) * span for _ in range(tasks))
    return Trace(gpus, span, fitting, arrivals, sizes, drawn)


def _time_of_day(random: Random) -> float:
    """Draw a point of the span [0, 1), more likely by day than by night."""
    while True:
        point = random.random()
        height = 1 + WAVE * sin(2 * pi * DAYS * point)
        if random.random() * (1 + WAVE) <= height:
            return point
