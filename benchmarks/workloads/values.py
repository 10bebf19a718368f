"""What do values cost on their way: large ones, small ones, and very many?

A large one is an array. It is held against copying as much within one process, which
is the least that a way to another process can take.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from time import perf_counter_ns
from typing import Any, Final

from benchmarks.census import forget_peak, memory_now, peak_memory, shared_memory
from benchmarks.method import (
    Block,
    Pair,
    Scale,
    all_at_once,
    alternate,
    one_at_a_time,
    percentile,
    rotate,
)
from benchmarks.port import Environment, Use
from benchmarks.rows import (
    BUSY,
    MS,
    Goal,
    Row,
    beside_row,
    judge,
    missing_row,
    slowest_row,
)
from benchmarks.tasks import (
    count_all,
    first_of,
    give_kept,
    give_same,
    take,
    take_and_give,
)
from benchmarks.workloads.isolated import not_there

MB: Final = 1_000_000
THERE_AND_BACK: Final = Goal(1.4, "x two memcpys")
USE: Final = Goal(1, "ms")
ONE_COPY: Final = Goal(1.01, "x its size")
HEAP: Final = Goal(5, "MB")
SMALL: Final = Goal(1.1, "x none")
MANY: Final = Goal(1_000, "ms")
KILOBYTE: Final = bytes(1024)


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """Each of them on a node of its own, so that no memory is warm from the others."""
    rows = []
    if reason := not_there("numpy"):
        rows.append(missing_row("values: large", reason))
    else:
        for large in (_ways, _by_handle, _task_to_task):
            async with _opened(environment):
                rows += await large(environment, scale)
    async with _opened(environment):
        rows.append(await _small(environment, scale))
    async with _opened(environment):
        return [*rows, *await _many(environment, scale)]


@asynccontextmanager
async def _opened(environment: Environment) -> AsyncIterator[None]:
    """One CPU, so that it is always the same worker."""
    await environment.open(num_cpus=1)
    try:
        yield
    finally:
        await environment.close()


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


async def _ways(environment: Environment, scale: Scale) -> list[Row]:
    same = environment.taking(give_same)
    another = environment.taking(take_and_give)
    there = environment.taking(take)
    back = environment.taking(give_kept)
    copying = Copying(scale.large)
    twice, once, echoed, changed, taken, given = await rotate(
        [
            partial(copying.block, 2),
            partial(copying.block, 1),
            partial(_timed, lambda: same(copying.array)),
            partial(_timed, lambda: another(copying.array, scale.large)),
            partial(_timed, lambda: there(copying.array)),
            partial(_timed, lambda: back(scale.large)),
        ],
        scale.copies,
    )
    return [
        beside_row(
            f"values: {_size(scale)} there and back",
            Pair(twice, echoed),
            THERE_AND_BACK,
            scale,
        ),
        beside_row(
            f"values: {_size(scale)} there, another back",
            Pair(twice, changed),
            THERE_AND_BACK,
            scale,
        ),
        beside_row(f"values: {_size(scale)} there", Pair(once, taken), None, scale),
        beside_row(f"values: {_size(scale)} back", Pair(once, given), None, scale),
    ]


def _size(scale: Scale) -> str:
    return f"{scale.large / MB:g} MB"


async def _timed(call: Callable[[], Awaitable[object]]) -> Block:
    """One call. Its result is there to be read, and is dropped after that."""
    start = perf_counter_ns()
    await call()
    return [perf_counter_ns() - start]


async def _by_handle(environment: Environment, scale: Scale) -> list[Row]:
    use = environment.taking(first_of)
    await use(KILOBYTE)
    before = shared_memory()
    handle = await environment.keep(Copying(scale.large).array)
    pair = await alternate(
        partial(one_at_a_time, lambda _: use(KILOBYTE), scale.uses),
        partial(one_at_a_time, lambda _: use(handle), scale.uses),
        1,
    )
    shared = shared_memory() - before
    copies = shared / scale.large
    (samples,), (without,) = pair.workload, pair.floor
    busy = f"calls without it took longer; {BUSY}" if max(without) > MS else ""
    return [
        slowest_row(
            f"values: {_size(scale)} by handle, each use",
            samples,
            USE,
            scale,
            f"of as many without it: {max(without) / MS:.1f} ms",
            fault=busy,
        ),
        Row(
            f"values: {_size(scale)} by handle, in all",
            "MB",
            judge(copies, ONE_COPY, scale),
            p50=shared / MB,
            floor=scale.large / MB,
            ratio=copies,
            note=f"shared memory for {2 * scale.uses} uses",
            goal=str(ONE_COPY),
        ),
    ]


async def _task_to_task(environment: Environment, scale: Scale) -> list[Row]:
    give = environment.taking(give_kept)
    use = environment.taking(first_of)
    copying = Copying(scale.large)
    growths: list[int] = []

    async def pass_on() -> Block:
        forget_peak()
        before = memory_now()
        took = await _timed(lambda: use(give(scale.large)))
        growths.append(peak_memory() - before)
        return took

    pair = await alternate(partial(copying.block, 1), pass_on, scale.copies)
    growth = max(growths) / MB
    return [
        beside_row(f"values: {_size(scale)} task to task", pair, None, scale),
        Row(
            f"values: {_size(scale)} task to task, driver",
            "MB",
            judge(growth, HEAP, scale),
            p50=growth,
            note=f"by which its memory grew at most, of {len(growths)} times",
            goal=str(HEAP),
        ),
    ]


async def _small(environment: Environment, scale: Scale) -> Row:
    call = environment.taking(take)
    pair = await alternate(
        partial(one_at_a_time, lambda _: call(), scale.calls),
        partial(one_at_a_time, lambda _: call(KILOBYTE), scale.calls),
        scale.blocks,
    )
    return beside_row("values: 1 KB argument", pair, SMALL, scale, "beside none")


async def _many(environment: Environment, scale: Scale) -> list[Row]:
    give = environment.taking(give_same)
    count = environment.taking(count_all)
    alone, finished, running = await rotate(
        [
            partial(all_at_once, give, scale.handles),
            partial(_counted, give, count, scale.handles, True),
            partial(_counted, give, count, scale.handles, False),
        ],
        scale.gathers,
    )
    name = f"values: {scale.handles:,} handles of"
    return [
        slowest_row(f"{name} results", [took for (took,) in finished], MANY, scale),
        slowest_row(
            f"{name} tasks",
            [took for (took,) in running],
            MANY,
            scale,
            f"with the tasks, which take {percentile(alone, 50) / MS:,.0f} ms alone",
        ),
    ]


async def _counted(give: Use, count: Use, handles: int, is_finished: bool) -> Block:
    """One task with so many handles as arguments, of what is there or still to be."""
    start = perf_counter_ns()
    given = [give(number) for number in range(handles)]
    if is_finished:
        for each in given:
            await each
        start = perf_counter_ns()
    assert await count(*given) == handles
    return [perf_counter_ns() - start]
