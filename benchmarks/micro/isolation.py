"""GPU tasks in a process of their own, and tasks that are cancelled."""

from __future__ import annotations

import asyncio
import builtins
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from math import ceil
from time import perf_counter_ns
from types import FunctionType
from typing import Any, Final, NamedTuple, cast

import aiogpu
from benchmarks.forks import open_forks, zygote_image
from benchmarks.latch import Latch, open_latch
from benchmarks.micro.rows import (
    MS,
    Goal,
    Row,
    Scale,
    missing_row,
    slowest_row,
    time_row,
)
from benchmarks.tasks import hang, noop, spin, use_numpy, use_torch
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


class Kind(NamedTuple):
    """Tasks of one kind; `preload` is imported before the first fork."""

    name: str
    function: Callable[[int], Any]
    preload: tuple[str, ...] | None = None
    goal: Goal | None = None


KINDS: Final = (
    Kind("bare", in_script(noop), None, Goal(1.5, "x fork")),
    Kind("numpy", in_script(use_numpy), ("numpy",), Goal(1.5, "x fork")),
    Kind("torch", in_script(use_torch), ("torch",), Goal(1.2, "x fork")),
)


def open_node(preload: tuple[str, ...] | None = None) -> Any:
    """Open a node of four CPUs and one GPU."""
    return aiogpu.init(
        num_cpus=4, num_gpus=1, preload="auto" if preload is None else preload
    )


async def isolated(scale: Scale) -> list[Row]:
    """A process for each call on a quarter of a GPU: 200 gathered; and one at a time.

    The floor is the fork, exit and reaping of a process with the zygote's memory.
    """
    rows = []
    for kind in KINDS:
        name = f"isolated: gathered, {kind.name}"
        if absent := [each for each in kind.preload or () if find_spec(each) is None]:
            rows.append(missing_row(name, f"{absent[0]} is not installed"))
        else:
            rows.append(await _beside_forks(name, kind, scale, is_gathered=True))
    one = KINDS[0]._replace(goal=BACK_TO_BACK)
    name = "isolated: back to back"
    return [*rows, await _beside_forks(name, one, scale, is_gathered=False)]


async def _beside_forks(
    name: str, kind: Kind, scale: Scale, *, is_gathered: bool
) -> Row:
    singles = scale(50, 4)
    async with open_node(kind.preload):
        call = aiogpu.remote(**ISOLATED)(kind.function).remote
        with open_forks() as bare, open_forks(zygote_image(kind.preload)) as image:
            runs = [
                partial(each.fork_mean if is_gathered else each.fork, singles)
                for each in (bare, image)
            ]
            workload = (
                partial(mean_of_all, call, scale(200, 8))
                if is_gathered
                else partial(one_at_a_time, call, singles)
            )
            bares, floor, found = await rotate([*runs, workload], scale(8, 1))
    note = (
        f"{Pair(bares, found).ratio:.2f} x a bare interpreter's "
        f"{percentile(bares, 50) / MS:.2f} ms"
    )
    return time_row(name, "ms", Pair(floor, found), kind.goal, scale, note)


async def spaced(scale: Scale) -> list[Row]:
    """Isolated calls with a pause before each, in which a fresh worker is made.

    Beside a reused worker's calls, back to back and with the same pauses.
    """
    count = scale(50, 4)
    async with open_node():
        with open_forks(zygote_image()) as image:
            await image.fork(count)
            forks = await image.fork(count)
        fork = percentile([forks], 50) / MS
        # A timer of the loop counts whole milliseconds.
        gap = ceil(FORKS_BETWEEN * fork) / 1000
        reused, fresh = (
            aiogpu.remote(**options)(in_script(noop)).remote
            for options in (REUSED, ISOLATED)
        )
        close, apart, found = await rotate(
            [
                partial(one_at_a_time, reused, count),
                partial(one_at_a_time, reused, count, gap),
                partial(one_at_a_time, fresh, count, gap),
            ],
            scale(8, 1),
        )
    note = f"{gap * 1000:.0f} ms between; fork {fork:.1f} ms"
    return [
        time_row(f"spaced: {name}", "ms", Pair(floor, found), SPACED, scale, note)
        for name, floor in (
            ("beside reused, back to back", close),
            ("beside reused, as spaced", apart),
        )
    ]


class Cancels(NamedTuple):
    """Nanoseconds from the cancels of tasks of one kind.

    Attributes:
        by_handle: until the caller went on, where its handle was cancelled.
        by_waiter: the same where the asyncio task that awaited it was cancelled.
        share: until the GPU was free.
    """

    by_handle: Block
    by_waiter: Block
    share: Block


async def cancel(scale: Scale) -> list[Row]:
    """A busy loop, and code blocked in C, cancelled while they run.

    Timed: when the caller goes on, and when the GPU is free. The slowest is judged.
    """
    rows = []
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        for worker, max_calls in (("isolated", 1), ("reused", 0)):
            options: dict[str, Any] = {"num_gpus": 1, "max_calls": max_calls}
            found = await _cancelled(spin, options, scale(40, 2))
            rows += [
                slowest_row(f"cancel: {name}, {worker}", samples, goal, scale)
                for name, samples, goal in (
                    ("caller, handle.cancel()", found.by_handle, CALLER),
                    ("caller, its waiter cancelled", found.by_waiter, CALLER),
                    ("share of a busy loop", found.share, SHARE),
                )
            ]
            options["cancel_grace"] = GRACE
            found = await _cancelled(hang, options, scale(20, 1))
            after = [each - int(GRACE * 1e9) for each in found.share]
            name = f"cancel: share of C code after its grace, {worker}"
            note = f"grace of {GRACE * 1000:.0f} ms subtracted"
            rows.append(slowest_row(name, after, AFTER_GRACE, scale, note))
    return rows


async def _cancelled(
    function: Callable[[int], None], options: dict[str, Any], count: int
) -> Cancels:
    """Cancel so many, one after the other, each once it runs; in turn by each way."""
    call: Call = aiogpu.remote(**options)(in_script(function)).remote
    found = Cancels([], [], [])
    with open_latch() as latch:
        for number in range(count):
            is_by_waiter = number % 2 == 1
            await _cancel_one(call, latch, function is hang, is_by_waiter, found)
    return found


async def _cancel_one(
    call: Call, latch: Latch, is_blocked: bool, is_by_waiter: bool, found: Cancels
) -> None:
    handle: Any = call(os.getpid())
    went_on = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        try:
            await handle
        finally:
            went_on.set_result(perf_counter_ns())

    waiter = asyncio.create_task(wait())
    running = await latch.connected()
    if is_blocked:  # it closes its end just before it blocks
        await asyncio.get_running_loop().sock_recv(running, 1)
    running.close()
    start = perf_counter_ns()
    (waiter if is_by_waiter else handle).cancel()
    took = await went_on - start
    (found.by_waiter if is_by_waiter else found.by_handle).append(took)
    while (await aiogpu.available_resources())["GPU"] < 1:  # noqa: ASYNC110 - as users do
        await asyncio.sleep(POLL)
    found.share.append(perf_counter_ns() - start)
    await asyncio.wait([waiter])
    if not waiter.cancelled():
        raise RuntimeError(f"an endless task was not cancelled: {waiter.exception()}")
