"""Values on their way: large ones and small ones.

A large one is an array, beside copying as much within one process, which is the least
that a way to another process can take.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from time import perf_counter_ns
from typing import Any, Final

import aiogpu
from benchmarks.micro.rows import (
    BUSY,
    MS,
    Goal,
    Row,
    Scale,
    UnavailableError,
    figure_row,
    missing_row,
    require,
    slowest_row,
    time_row,
)
from benchmarks.processes import reset_peak_memory, shared_memory, status_bytes
from benchmarks.tasks import (
    first_of,
    give_kept,
    give_same,
    take,
    take_and_give,
)
from benchmarks.timing import (
    Block,
    Pair,
    alternate,
    one_at_a_time,
    rotate,
    timed,
)

MB: Final = 1_000_000
THERE_AND_BACK: Final = Goal(1.4, "x two memcpys")
USE: Final = Goal(1, "ms")
ONE_COPY: Final = Goal(1.01, "x its size")
HEAP: Final = Goal(5, "MB")
SMALL: Final = Goal(1.1, "x none")
KILOBYTE: Final = bytes(1024)


class Copying:
    """The floor: copying within this process, to memory that has been written."""

    def __init__(self, size: int) -> None:
        self._numpy: Any = import_module("numpy")
        self.array = self._numpy.ones(size, self._numpy.uint8)
        self._target = self._numpy.zeros_like(self.array)

    async def block(self, times: int) -> Block:
        """Copy so many times; one sample."""
        start = perf_counter_ns()
        for _ in range(times):
            self._numpy.copyto(self._target, self.array)
        return [perf_counter_ns() - start]


async def values(scale: Scale) -> list[Row]:
    """100 MB there and back, by handle and from task to task; and 1 KB.

    Each on a node of its own, so that no memory is warm from the others.
    """
    rows: list[Row] = []
    try:
        require("numpy")
    except UnavailableError as reason:
        rows.append(missing_row("values: large", reason))
    else:
        for large in (_ways, _by_handle, _task_to_task):
            async with _one_worker():
                rows += await large(scale(100 * MB, MB), scale)
    async with _one_worker():
        return [*rows, await _small(scale)]


@asynccontextmanager
async def _one_worker() -> AsyncIterator[None]:
    async with aiogpu.init(num_cpus=1):
        yield


def _call(function: Any) -> Any:
    return aiogpu.remote(function).remote


async def _ways(size: int, scale: Scale) -> list[Row]:
    copying, array = Copying(size), Copying(size).array
    same, another = _call(give_same), _call(take_and_give)
    there, back = _call(take), _call(give_kept)
    twice, once, *ways = await rotate(
        [
            partial(copying.block, 2),
            partial(copying.block, 1),
            partial(timed, lambda: same(array)),
            partial(timed, lambda: another(array, size)),
            partial(timed, lambda: there(array)),
            partial(timed, lambda: back(size)),
        ],
        scale(25, 2),
    )
    parts = ("there and back", "there, another back", "there", "back")
    floors, goals = (twice, twice, once, once), (THERE_AND_BACK,) * 2 + (None,) * 2
    return [
        time_row(
            f"values: {size / MB:g} MB {part}", "ms", Pair(floor, way), goal, scale
        )
        for part, floor, way, goal in zip(parts, floors, ways, goals, strict=True)
    ]


async def _by_handle(size: int, scale: Scale) -> list[Row]:
    use, uses = _call(first_of), scale(50, 4)
    await use(KILOBYTE)
    before = shared_memory()
    handle = await aiogpu.put(Copying(size).array)
    pair = await alternate(
        partial(one_at_a_time, lambda _: use(KILOBYTE), uses),
        partial(one_at_a_time, lambda _: use(handle), uses),
        1,
    )
    shared = shared_memory() - before
    (samples,), (without,) = pair.workload, pair.floor
    fault = f"calls without it took longer; {BUSY}" if max(without) > MS else ""
    name = f"values: {size / MB:g} MB by handle"
    note = f"of as many without it: {max(without) / MS:.1f} ms"
    return [
        slowest_row(f"{name}, each use", samples, USE, scale, note, fault=fault),
        figure_row(
            f"{name}, memory",
            "x its size",
            shared / size,
            ONE_COPY,
            scale,
            f"shared memory for {2 * uses} uses",
        ),
    ]


async def _task_to_task(size: int, scale: Scale) -> list[Row]:
    give, use, copying = _call(give_kept), _call(first_of), Copying(size)
    growths: list[int] = []

    async def pass_on() -> Block:
        reset_peak_memory()
        before = status_bytes("VmRSS")
        took = await timed(lambda: use(give(size)))
        growths.append(status_bytes("VmHWM") - before)
        return took

    pair = await alternate(partial(copying.block, 1), pass_on, scale(25, 2))
    name = f"values: {size / MB:g} MB task to task"
    note = f"by which its memory grew at most, of {len(growths)} times"
    growth = max(growths) / MB
    return [
        time_row(name, "ms", pair, None, scale),
        figure_row(f"{name}, driver", "MB", growth, HEAP, scale, note),
    ]


async def _small(scale: Scale) -> Row:
    call = _call(take)
    pair = await alternate(
        partial(one_at_a_time, lambda _: call(), scale(500, 20)),
        partial(one_at_a_time, lambda _: call(KILOBYTE), scale(500, 20)),
        scale(40, 2),
    )
    return time_row("values: 1 KB argument", "us", pair, SMALL, scale, "beside none")
