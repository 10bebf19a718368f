"""GPU tasks in a process of their own, and tasks that are cancelled."""

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
from benchmarks.latch import open_latch
from benchmarks.micro import rows
from benchmarks.micro.rows import MS, Goal, Row, Scale, UnavailableError
from benchmarks.timing import (
    Block,
    Call,
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
"""Spaced calls have a pause of so many forks before them."""
GRACE: Final = 0.2
"""Seconds between a cancel and the kill of code that cannot be interrupted."""
POLL: Final = 0.001
"""Seconds after which the free GPUs are asked for again."""
CALLER: Final = Goal(5, "ms")
SHARE: Final = Goal(50, "ms")
AFTER_GRACE: Final = Goal(100, "ms")


def in_script(function: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return the function as if a script had defined it, so that it travels by value.

    A function of a module has the module imported, in each fresh process again.

    Args:
        function: uses nothing global.
    """
    source = cast("Any", function)
    names = {"__name__": "__main__", "__builtins__": builtins}
    return FunctionType(source.__code__, names, source.__name__)


KINDS: Final[dict[str, tuple[Callable[[int], Any], tuple[str, ...], Goal]]] = {
    "bare": (in_script(tasks.noop), (), Goal(1.5, "x fork")),
    "numpy": (in_script(tasks.use_numpy), ("numpy",), Goal(1.5, "x fork")),
    "torch": (in_script(tasks.use_torch), ("torch",), Goal(1.2, "x fork")),
}
"""Functions, each with what is imported before the first fork, and its goal."""


def _open_node(preload: tuple[str, ...] = ()) -> Any:
    return aiogpu.init(num_cpus=4, num_gpus=1, preload=preload or "auto")


async def isolated(scale: Scale) -> list[Row]:
    """A process for each call on a quarter of a GPU: 200 gathered; and one at a time.

    The floor is the fork, exit and reaping of a process with the zygote's memory.
    """
    found = []
    for kind, (function, preload, goal) in KINDS.items():
        name = f"isolated: gathered, {kind}"
        try:
            rows.require(*preload)
            found.append(await _beside_forks(name, function, preload, goal, scale))
        except UnavailableError as reason:
            found.append(Row(name, fault=str(reason)))
    name, (function, _, _) = "isolated: back to back", KINDS["bare"]
    return [*found, await _beside_forks(name, function, (), BACK_TO_BACK, scale, True)]


async def _beside_forks(
    name: str,
    function: Callable[[int], Any],
    preload: tuple[str, ...],
    goal: Goal,
    scale: Scale,
    is_single: bool = False,
) -> Row:
    count, image = scale(50, 4), zygote_image(preload or None)
    async with _open_node(preload):
        call = aiogpu.remote(**ISOLATED)(function).remote
        with open_forks() as bare, open_forks(image) as floor:
            both = bare, floor
            if is_single:
                runs = [partial(each.fork, count) for each in both]
                runs.append(partial(one_at_a_time, call, count))
            else:
                runs = [partial(each.fork_mean, count) for each in both]
                runs.append(partial(mean_of_all, call, scale(200, 8)))
            bares, forks, found = await rotate(runs, scale(8, 1))
    beside, p50 = Pair(bares, found).ratio, percentile(bares, 50) / MS
    note = f"{beside:.2f} x a bare interpreter's {p50:.2f} ms"
    return rows.times(name, "ms", Pair(forks, found), goal, note)


async def spaced(scale: Scale) -> list[Row]:
    """Isolated calls with a pause before each, in which a fresh worker is made.

    Beside a reused worker's calls, back to back and with the same pauses.
    """
    count = scale(50, 4)
    async with _open_node():
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
        close, apart, found = await rotate(runs, scale(8, 1))
    note = f"{gap * 1000:.0f} ms between; fork {fork:.1f} ms"
    floors = {"back to back": close, "as spaced": apart}
    return [
        rows.times(
            f"spaced: beside reused, {how}", "ms", Pair(floor, found), SPACED, note
        )
        for how, floor in floors.items()
    ]


async def cancel(scale: Scale) -> list[Row]:
    """A busy loop, and code blocked in C, cancelled while they run.

    Timed: when the caller goes on, and when the GPU is free. The slowest is judged.
    """
    found = []
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
                found.append(rows.slowest(name, samples, goal, *notes))
    return found


async def _cancelled(
    function: Callable[[int], None], count: int, options: dict[str, Any]
) -> tuple[Block, Block, Block]:
    """Cancel so many, one after the other, each once it runs; in turn by each way.

    Returns nanoseconds from the cancel: until the caller went on, where its handle was
    cancelled, and where the asyncio task that awaited it was; until the GPU was free.
    """
    call: Call = aiogpu.remote(**options)(in_script(function)).remote
    by_handle, by_waiter, share = Block(), Block(), Block()
    went_on = Block()

    async def wait(handle: Any) -> None:
        try:
            await handle
        finally:
            went_on.append(perf_counter_ns())

    with open_latch() as latch:
        for number in range(count):
            handle: Any = call(os.getpid())
            waiter = asyncio.create_task(wait(handle))
            running = await latch.connected()
            if function is tasks.hang:  # it closes its end just before it blocks
                await asyncio.get_running_loop().sock_recv(running, 1)
            running.close()
            start, is_by_waiter = perf_counter_ns(), number % 2
            (waiter if is_by_waiter else handle).cancel()
            await asyncio.wait([waiter])
            (by_waiter if is_by_waiter else by_handle).append(went_on[-1] - start)
            while (await aiogpu.available_resources())["GPU"] < 1:  # noqa: ASYNC110 - as users do
                await asyncio.sleep(POLL)
            share.append(perf_counter_ns() - start)
            if not waiter.cancelled():
                error = waiter.exception()
                raise RuntimeError(f"an endless task was not cancelled: {error}")
    return by_handle, by_waiter, share
