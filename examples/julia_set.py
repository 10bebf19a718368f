"""A Julia set, band by band on fractions of GPUs: what `aiogpu demo` computes.

Only operations that IEEE 754 rounds one by one are used: a pixel's value does not
depend on which others are computed with it, and bands can be compared bit by bit.
Install numpy by: pip install 'aiogpu[demo]'.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import aiogpu

STEPS: Final = 1000
"""A point that has not escaped by then counts as inside."""
LEVELS: Final = 16
"""Shades of a preview."""

Counts = NDArray[np.uint16]


class Scene(NamedTuple):
    """A picture to compute: z → z² + c on a square of `size` by `size` points."""

    size: int
    c_x: float
    c_y: float

    @classmethod
    def of(cls, size: int, seed: int) -> Scene:
        """A scene with c just inside the edge of the Mandelbrot set's heart."""
        angle = random.Random(seed).uniform(0.3, 1.3)
        x = math.cos(angle) / 2 - math.cos(2 * angle) / 4
        y = math.sin(angle) / 2 - math.sin(2 * angle) / 4
        return cls(size, 0.99 * x, 0.99 * y)

    def band(self, number: int, of: int) -> tuple[int, int]:
        """First row of a band and the row after its last."""
        return self.size * number // of, self.size * (number + 1) // of


class Band(NamedTuple):
    """A task's result: its rows, and where and when they were computed.

    Attributes:
        number: the task's number.
        first_row: where its rows begin.
        counts: the rows.
        gpus: the devices that the task held.
        pid: its process.
        begin: when its code began, by `time.monotonic()`.
        end: when it ended.
    """

    number: int
    first_row: int
    counts: Counts
    gpus: tuple[int | str, ...]
    pid: int
    begin: float
    end: float


def escape_counts(scene: Scene, first: int, end: int) -> Counts:
    """Return how many steps each point of the rows takes to escape."""
    axis = (2.0 * np.arange(scene.size) + 1.0 - scene.size) * (1.6 / scene.size)
    x = np.tile(axis, end - first)
    y = np.repeat(axis[first:end], scene.size)
    counts = np.full(x.size, STEPS, np.uint16)
    alive = np.arange(x.size)
    for step in range(STEPS):
        xx, yy = x * x, y * y
        stays = xx + yy <= 4.0
        counts[alive[~stays]] = step
        alive, x, y, xx, yy = (a[stays] for a in (alive, x, y, xx, yy))
        y = 2.0 * x * y + scene.c_y
        x = xx - yy + scene.c_x
    return counts.reshape(end - first, scene.size)


@aiogpu.remote
def band(scene: Scene, number: int, of: int) -> Band:
    """Compute one band in a worker, and note where and when."""
    begin = time.monotonic()  # the same clock for all processes of a machine
    first, end = scene.band(number, of)
    counts = escape_counts(scene, first, end)
    gpus = tuple(aiogpu.get_gpu_ids())
    return Band(number, first, counts, gpus, os.getpid(), begin, time.monotonic())


class Picture:
    """The whole, as it is put together from bands.

    Attributes:
        scene: what it shows.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self._counts: Counts = np.zeros((scene.size, scene.size), np.uint16)

    def add(self, part: Band) -> None:
        """Put a band in its place."""
        rows = slice(part.first_row, part.first_row + len(part.counts))
        self._counts[rows] = part.counts

    def equals_serial(self) -> bool:
        """Compute all in this process, at once, and compare."""
        serial = escape_counts(self.scene, 0, self.scene.size)
        return np.array_equal(self._counts, serial)

    def preview(self, width: int, height: int) -> list[list[int]]:
        """Levels from 0 to `LEVELS` - 1, by row; 0 where nothing is yet."""
        rows = np.arange(height) * self.scene.size // height
        columns = np.arange(width) * self.scene.size // width
        counts = self._counts[np.ix_(rows, columns)]
        scale = (LEVELS - 1) / math.log1p(STEPS)
        levels: list[list[int]] = (np.log1p(counts) * scale).astype(int).tolist()
        return levels


async def main() -> None:
    picture = Picture(Scene.of(size=256, seed=7))
    async with aiogpu.init(num_cpus=8, num_gpus=2, preload=("numpy",)):
        task = band.options(num_gpus=0.25)
        parts = (task.remote(picture.scene, number, 16) for number in range(16))
        for part in asyncio.as_completed(list(parts)):
            picture.add(await part)
    for row in picture.preview(64, 24):
        print("".join(" .:-=+*#%@"[level * 10 // LEVELS] for level in row).rstrip())
    print("equals the serial one:", picture.equals_serial())


if __name__ == "__main__":
    aiogpu.run(main())
