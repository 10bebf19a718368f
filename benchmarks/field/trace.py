"""A day of GPU tasks in a few seconds, and how well it could be packed.

Arrivals, sizes and durations come from a seed. `bound` is a makespan that nobody can
be below; `best` is what a scheduler would do that costs nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from random import Random
from typing import Final, NamedTuple

SEED: Final = 10
GPUS: Final = 4
QUARTERS: Final = 4
"""Parts of a GPU, of which all sizes are whole numbers."""
SIZES: Final = {1: 0.40, 2: 0.25, 4: 0.25, 8: 0.10}
"""How often a task asks for so many quarters."""
LOAD: Final = 0.9
"""Of the GPUs, over the time in which tasks come."""
MEAN: Final = 100
"""Milliseconds that a task takes."""


class Job(NamedTuple):
    """A task of the day. Milliseconds; the size in quarters of a GPU."""

    arrival: int
    size: int
    duration: int

    @property
    def num_gpus(self) -> float:
        """What it asks for."""
        return self.size / QUARTERS


class Day(NamedTuple):
    """How a day went. Milliseconds, from the first arrival on.

    Attributes:
        waits: of each task, from its arrival to its start.
    """

    makespan: float
    waits: list[float]

    def wait(self, percent: int) -> float:
        """That percentile of the waiting times, the nearest sample."""
        waits = sorted(self.waits)
        return waits[min(len(waits) * percent // 100, len(waits) - 1)]


def trace(count: int, seed: int = SEED) -> list[Job]:
    """So many tasks, as they come: half of them in two rush hours."""
    random = Random(seed)
    sizes = random.choices(list(SIZES), list(SIZES.values()), k=count)
    durations = [
        max(5, min(6 * MEAN, round(random.lognormvariate(4.2, 0.9)))) for _ in sizes
    ]
    work = sum(size * each for size, each in zip(sizes, durations, strict=True))
    length = work / (GPUS * QUARTERS * LOAD)
    arrivals = sorted(_hour(random) * length for _ in sizes)
    return [
        Job(round(arrival - arrivals[0]), size, duration)
        for arrival, size, duration in zip(arrivals, sizes, durations, strict=True)
    ]


def _hour(random: Random) -> float:
    """A moment of the day, which lasts from 0 to 1."""
    if random.random() < 0.5:
        return random.random()
    return min(1.0, max(0.0, random.gauss(random.choice((0.3, 0.7)), 0.06)))


def work(jobs: Sequence[Job]) -> float:
    """Milliseconds of a whole GPU."""
    return sum(job.size * job.duration for job in jobs) / QUARTERS


def bound(jobs: Sequence[Job]) -> float:
    """No makespan is below this: what comes from some moment on must still be done."""
    least, left = 0.0, 0.0
    for job in sorted(jobs, reverse=True):
        left += job.size * job.duration / QUARTERS
        least = max(least, job.arrival + left / GPUS, job.arrival + job.duration)
    return least


Rule = Callable[[Job], tuple[int, ...]]

RULES: Final[Sequence[Rule]] = (
    lambda job: (job.arrival,),
    lambda job: (-job.size, job.arrival),
    lambda job: (job.size, job.arrival),
    lambda job: (job.duration, job.arrival),
    lambda job: (-job.duration, job.arrival),
    lambda job: (job.size * job.duration, job.arrival),
    lambda job: (-job.size * job.duration, job.arrival),
)
"""In which order those that wait are looked at; each takes what fits."""


class Least(NamedTuple):
    """The least of each that any of the rules gives. Milliseconds."""

    makespan: float
    wait_p50: float
    wait_p99: float


def best(jobs: Sequence[Job]) -> Least:
    """Of each figure the best that is found, though no one day may have them all."""
    days = [packed(jobs, rule) for rule in RULES]
    return Least(
        min(day.makespan for day in days),
        min(day.wait(50) for day in days),
        min(day.wait(99) for day in days),
    )


def packed(jobs: Sequence[Job], rule: Rule) -> Day:
    """The day under this rule, where nothing takes any time but the tasks."""
    free = [QUARTERS] * GPUS
    coming = sorted(jobs)[::-1]
    waiting: list[Job] = []
    running: list[tuple[int, int, list[tuple[int, int]]]] = []
    waits: list[float] = []
    now = 0
    while coming or waiting or running:
        moments = [coming[-1].arrival] if coming else []
        now = min([*moments, *(entry[0] for entry in running[:1])])
        while running and running[0][0] <= now:
            for device, size in heapq.heappop(running)[2]:
                free[device] += size
        while coming and coming[-1].arrival <= now:
            waiting.append(coming.pop())
        for job in sorted(waiting, key=rule):
            if held := _fit(job.size, free):
                waiting.remove(job)
                waits.append(now - job.arrival)
                heapq.heappush(running, (now + job.duration, len(waits), held))
    return Day(now, waits)


def _fit(size: int, free: list[int]) -> list[tuple[int, int]]:
    """Take it from the fullest device that has room, or from entirely free ones."""
    if size >= QUARTERS:
        whole = [index for index, room in enumerate(free) if room == QUARTERS]
        count = size // QUARTERS
        held = [(index, QUARTERS) for index in whole[:count]]
        if len(held) < count:
            return []
    else:
        rooms = [(room, index) for index, room in enumerate(free) if room >= size]
        if not rooms:
            return []
        held = [(min(rooms)[1], size)]
    for index, taken in held:
        free[index] -= taken
    return held
