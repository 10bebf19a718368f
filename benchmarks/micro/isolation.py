"""GPU tasks in a process of their own; tasks that are cancelled."""

from __future__ import annotations

import asyncio
import builtins
import os
from collections.abc import Callable
from functools import partial
from math import ceil
from time import perf_counter_ns
from types import FunctionType
from typing import Any, Final, cast

import aiogpu
from benchmarks import tasks
from benchmarks.forks import open_forks, zygote_image
from benchmarks.latch import connected, open_latch
from benchmarks.micro import rows
from benchmarks.micro.rows import MS, Goal, Row, Scale, UnavailableError
from benchmarks.timing import (
    Block,
    Pair,
    mean_of_all,
    one_at_a_time,
    percentile,
    rotate,
)

ISOLATED: Final[dict[str, Any]] = {"num_gpus": 0.25, "max_calls": 1}
REUSED: Final[dict[str, Any]] = {"num_gpus": 0.25, "max_calls": 0}
BACK_TO_BACK: Final = Goal(1.2, "x fork")
SPACED: Final = Goal(2, "x reused")
FORKS_BETWEEN: Final = 3
"""The pause before a spaced call, in times of a fork."""
GRACE: Final = 0.2
"""Seconds between a cancel and the kill of code that ignores interrupts."""
POLL: Final = 0.001
"""Seconds between two queries of the free GPUs."""
CALLER: Final = Goal(5, "ms")
SHARE: Final = Goal(50, "ms")
AFTER_GRACE: Final = Goal(100, "ms")


def in_script(function: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return the function as if a script had defined it, so that it is sent by value.

    For a function of a module, each fresh process has to import the module.

    Args:
        function: uses no globals.
    """
    source = cast("Any", function)
    names = {"__name__": "__main__", "__builtins__": builtins}
    return FunctionType(source.__code__, names, source.__name__)


KINDS: Final[dict[str, tuple[Callable[[int], Any], tuple[str, ...], Goal]]] = {
    "bare": (in_script(tasks.noop), (), Goal(1.5, "x fork")),
    "numpy": (in_script(tasks.use_numpy), ("numpy",), Goal(1.5, "x fork")),
    "torch": (in_script(tasks.use_torch), ("torch",), Goal(1.2, "x fork")),
}
"""Functions, each with the modules to import before the first fork, and the goal."""


async def isolated(scale: Scale) -> list[Row]:
    """A process for each call on a quarter of a GPU: 200 gathered, and one at a time.

    The floor is the fork, exit and reaping of a process with the zygote's memory.
    """
    table = []
    for kind, (function, preload, goal) in KINDS.items():
        name = f"isolated: gathered, {kind}"
        try:
            rows.require(*preload)
            table.append(await _beside_forks(name, function, preload, goal, scale))
        except UnavailableError as reason:
            table.append(Row(name, fault=str(reason)))
    name, (function, _, _) = "isolated: back to back", KINDS["bare"]
    return [*table, await _beside_forks(name, function, (), BACK_TO_BACK, scale, True)]


async def _beside_forks(
    name: str,
    function: Callable[[int], Any],
    preload: tuple[str, ...],
    goal: Goal,
    scale: Scale,
    is_single: bool = False,
) -> Row:
    count, image = scale(50, 4), zygote_image(preload or None)
    async with aiogpu.init(num_cpus=4, num_gpus=1, preload=preload or "auto"):
        call = aiogpu.remote(**ISOLATED)(function).remote
        with open_forks() as bare, open_forks(image) as floor:
            if is_single:
                runs = [partial(each.fork, count) for each in (bare, floor)]
                runs.append(partial(one_at_a_time, call, count))
            else:
                runs = [partial(each.fork_mean, count) for each in (bare, floor)]
                runs.append(partial(mean_of_all, call, scale(200, 8)))
            bares, forks, samples = await rotate(runs, scale(8, 1))
    beside, p50 = Pair(bares, samples).ratio, percentile(bares, 50) / MS
    note = f"{beside:.2f} x a bare interpreter's {p50:.2f} ms"
    return rows.times(name, "ms", Pair(forks, samples), goal, note)


async def spaced(scale: Scale) -> list[Row]:
    """Isolated calls with a pause before each, in which the next worker is made.

    Beside the calls of a reused worker, back to back and with the same pauses.
    """
    count = scale(50, 4)
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        with open_forks(zygote_image()) as image:
            await image.fork(count)
            fork = percentile([await image.fork(count)], 50) / MS
        # A timer of the loop counts whole milliseconds.
        gap = ceil(FORKS_BETWEEN * fork) / 1000
        reused, fresh = (
            aiogpu.remote(**options)(in_script(tasks.noop)).remote
            for options in (REUSED, ISOLATED)
        )
        ways = (reused, 0), (reused, gap), (fresh, gap)
        runs = [partial(one_at_a_time, call, count, pause) for call, pause in ways]
        close, apart, samples = await rotate(runs, scale(8, 1))
    note = f"{gap * 1000:.0f} ms between; fork {fork:.1f} ms"
    name = "spaced: beside reused, "
    return [
        rows.times(name + how, "ms", Pair(floor, samples), SPACED, note)
        for how, floor in (("back to back", close), ("as spaced", apart))
    ]


async def cancel(scale: Scale) -> list[Row]:
    """A busy loop, and code that is blocked in C, cancelled while they run.

    Timed until the caller continues, and until the GPU is free. The slowest is judged.
    """
    table = []
    note = f"grace of {GRACE * 1000:.0f} ms subtracted"
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        for worker, max_calls in (("isolated", 1), ("reused", 0)):
            options: dict[str, Any] = {"num_gpus": 1, "max_calls": max_calls}
            busy = await _cancelled(tasks.spin, scale(40, 2), options)
            options["cancel_grace"] = GRACE
            *_, share = await _cancelled(tasks.hang, scale(20, 1), options)
            after = [each - int(GRACE * 1e9) for each in share]
            for what, samples, goal, *notes in (
                ("caller, handle.cancel()", busy[0], CALLER),
                ("caller, its waiter cancelled", busy[1], CALLER),
                ("share of a busy loop", busy[2], SHARE),
                ("share of C code after its grace", after, AFTER_GRACE, note),
            ):
                name = f"cancel: {what}, {worker}"
                table.append(rows.slowest(name, samples, goal, *notes))
    return table


async def _cancelled(
    function: Callable[[int], None], count: int, options: dict[str, Any]
) -> tuple[Block, Block, Block]:
    """Cancel tasks one after the other, each once it runs, in turn in two ways.

    Returns:
        Nanoseconds from the cancel until the caller continued, where its handle was
        cancelled; the same where the asyncio task that awaited the handle was
        cancelled; nanoseconds until the GPU was free.
    """
    call: Any = aiogpu.remote(**options)(in_script(function)).remote
    by_handle, by_waiter, share = Block(), Block(), Block()
    continued = Block()

    async def wait(handle: Any) -> None:
        try:
            await handle
        finally:
            continued.append(perf_counter_ns())

    with open_latch() as latch:
        for number in range(count):
            handle = call(os.getpid())
            waiter = asyncio.create_task(wait(handle))
            running = await connected(latch)
            if function is tasks.hang:  # closes its end just before it blocks
                await asyncio.get_running_loop().sock_recv(running, 1)
            running.close()
            start, is_by_waiter = perf_counter_ns(), number % 2
            (waiter if is_by_waiter else handle).cancel()
            await asyncio.wait([waiter])
            (by_waiter if is_by_waiter else by_handle).append(continued[-1] - start)
            while (await aiogpu.available_resources())["GPU"] < 1:  # noqa: ASYNC110 - as users do
                await asyncio.sleep(POLL)
            share.append(perf_counter_ns() - start)
            if not waiter.cancelled():
                error = waiter.exception()
                raise RuntimeError(f"an endless task was not cancelled: {error}")
    return by_handle, by_waiter, share
