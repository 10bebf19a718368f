"""Transfer of values, large and small.

A large value is an array. Its floor is a copy within one process: the least that a
transfer to another process can take.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any, Final

import aiogpu
from benchmarks import tasks
from benchmarks.micro import rows
from benchmarks.micro.calls import in_turn
from benchmarks.micro.rows import BUSY, MS, Goal, Row, Scale, UnavailableError
from benchmarks.processes import reset_peak_memory, shared_memory, status_bytes
from benchmarks.timing import Block, Pair, alternate, one_at_a_time, rotate, timed

MB: Final = 1_000_000
THERE_AND_BACK: Final = Goal(1.4, "x two memcpys")
USE: Final = Goal(1, "ms")
ONE_COPY: Final = Goal(1.01, "x its size")
HEAP: Final = Goal(5, "MB")
SMALL: Final = Goal(1.1, "x none")
KILOBYTE: Final = bytes(1024)


class Copying:
    """The floor: a copy within this process, to memory that was written before."""

    def __init__(self, size: int) -> None:
        self._numpy: Any = import_module("numpy")
        self.array = self._numpy.ones(size, self._numpy.uint8)
        self._target = self._numpy.zeros_like(self.array)

    async def block(self, times: int) -> Block:
        """Copy a number of times; return the total as one sample."""

        async def copy() -> None:
            for _ in range(times):
                self._numpy.copyto(self._target, self.array)

        return await timed(copy)


async def values(scale: Scale) -> list[Row]:
    """100 MB there and back, by handle and from task to task; and 1 KB.

    Each has a new node, so that no memory is warm from the others.
    """
    table: list[Row] = []
    try:
        rows.require("numpy")
    except UnavailableError as reason:
        table.append(Row("values: large", fault=str(reason)))
    else:
        for large in (_ways, _by_handle, _task_to_task):
            async with aiogpu.init(num_cpus=1):
                table += await large(scale(100 * MB, MB), scale)
    async with aiogpu.init(num_cpus=1):
        call = _call(tasks.take)
        both = (lambda _: call()), (lambda _: call(KILOBYTE))
        pair = await in_turn(one_at_a_time, *both, scale(500, 20), scale(40, 2))
    small = rows.times("values: 1 KB argument", "us", pair, SMALL, "beside none")
    return [*table, small]


def _call(function: Any) -> Any:
    return aiogpu.remote(function).remote


async def _ways(size: int, scale: Scale) -> list[Row]:
    copying, array = Copying(size), Copying(size).array
    same, another = _call(tasks.give_same), _call(tasks.take_and_give)
    there, back = _call(tasks.take), _call(tasks.give_kept)
    calls = (
        *(partial(same, array), partial(another, array, size)),
        *(partial(there, array), partial(back, size)),
    )
    copies = [partial(copying.block, times) for times in (2, 1)]
    runs = [*copies, *(partial(timed, call) for call in calls)]
    twice, once, *ways = await rotate(runs, scale(25, 2))
    parts = ("there and back", "there, another back", "there", "back")
    floors, goals = (twice, twice, once, once), (THERE_AND_BACK,) * 2 + (None,) * 2
    return [
        rows.times(f"values: {size / MB:g} MB {part}", "ms", Pair(floor, way), goal)
        for part, floor, way, goal in zip(parts, floors, ways, goals, strict=True)
    ]


async def _by_handle(size: int, scale: Scale) -> list[Row]:
    use, uses = _call(tasks.first_of), scale(50, 4)
    await use(KILOBYTE)
    before = shared_memory()
    handle = aiogpu.put(Copying(size).array)
    both = (lambda _: use(KILOBYTE)), (lambda _: use(handle))
    pair = await in_turn(one_at_a_time, *both, uses, 1)
    share = (shared_memory() - before) / size
    (without,), (samples,) = pair
    fault = f"calls without the array took longer; {BUSY}" if max(without) > MS else ""
    name = f"values: {size / MB:g} MB by handle"
    note = f"of as many without the array: {max(without) / MS:.1f} ms"
    uses_note = f"shared memory for {2 * uses} uses"
    return [
        rows.slowest(f"{name}, each use", samples, USE, note, fault=fault),
        Row(f"{name}, memory", "x its size", share, ONE_COPY, uses_note),
    ]


async def _task_to_task(size: int, scale: Scale) -> list[Row]:
    give, use, copying = _call(tasks.give_kept), _call(tasks.first_of), Copying(size)
    growths: list[int] = []

    async def pass_on() -> Block:
        reset_peak_memory()
        before = status_bytes("VmRSS")
        took = await timed(lambda: use(give(size)))
        growths.append(status_bytes("VmHWM") - before)
        return took

    pair = await alternate(partial(copying.block, 1), pass_on, scale(25, 2))
    name = f"values: {size / MB:g} MB task to task"
    note = f"largest growth of the driver's memory in {len(growths)} transfers"
    return [
        rows.times(name, "ms", pair),
        Row(f"{name}, driver", "MB", max(growths) / MB, HEAP, note),
    ]
