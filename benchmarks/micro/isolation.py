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
from typing import Any, Final, NamedTuple, cast

import aiogpu
from benchmarks import tasks
from benchmarks.forks import open_forks, zygote_image
from benchmarks.latch import Latch, open_latch
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


class Kind(NamedTuple):
    """Tasks of one kind; `preload` is imported before the first fork."""

    name: str
    function: Callable[[int], Any]
    preload: tuple[str, ...]
    goal: Goal


KINDS: Final = (
    Kind("bare", in_script(tasks.noop), (), Goal(1.5, "x fork")),
    Kind("numpy", in_script(tasks.use_numpy), ("numpy",), Goal(1.5, "x fork")),
    Kind("torch", in_script(tasks.use_torch), ("torch",), Goal(1.2, "x fork")),
)


def _open_node(preload: tuple[str, ...] = ()) -> Any:
    return aiogpu.init(num_cpus=4, num_gpus=1, preload=preload or "auto")


async def isolated(scale: Scale) -> list[Row]:
    """A process for each call on a quarter of a GPU: 200 gathered; and one at a time.

    The floor is the fork, exit and reaping of a process with the zygote's memory.
    """
    found = []
    for kind in KINDS:
        name = f"isolated: gathered, {kind.name}"
        try:
            rows.require(*kind.preload)
        except UnavailableError as reason:
            found.append(Row(name, fault=str(reason)))
        else:
            found.append(await _beside_forks(name, kind, scale, is_gathered=True))
    one = KINDS[0]._replace(goal=BACK_TO_BACK)
    name = "isolated: back to back"
    return [*found, await _beside_forks(name, one, scale, is_gathered=False)]


async def _beside_forks(
    name: str, kind: Kind, scale: Scale, *, is_gathered: bool
) -> Row:
    singles = scale(50, 4)
    image_source = zygote_image(kind.preload or None)
    async with _open_node(kind.preload):
        call = aiogpu.remote(**ISOLATED)(kind.function).remote
        workload = partial(one_at_a_time, call, singles)
        if is_gathered:
            workload = partial(mean_of_all, call, scale(200, 8))
        with open_forks() as bare, open_forks(image_source) as image:
            runs = [
                partial(each.fork_mean if is_gathered else each.fork, singles)
                for each in (bare, image)
            ]
            bares, floor, found = await rotate([*runs, workload], scale(8, 1))
    note = (
        f"{Pair(bares, found).ratio:.2f} x a bare interpreter's "
        f"{percentile(bares, 50) / MS:.2f} ms"
    )
    return rows.times(name, "ms", Pair(floor, found), kind.goal, note)


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
    note, name = f"{gap * 1000:.0f} ms between; fork {fork:.1f} ms", "spaced: beside"
    return [
        rows.times(
            f"{name} reused, back to back", "ms", Pair(close, found), SPACED, note
        ),
        rows.times(f"{name} reused, as spaced", "ms", Pair(apart, found), SPACED, note),
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
    found = []
    caller, share = "cancel: caller", "cancel: share of"
    note = f"grace of {GRACE * 1000:.0f} ms subtracted"
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        for worker, max_calls in (("isolated", 1), ("reused", 0)):
            options: dict[str, Any] = {"num_gpus": 1, "max_calls": max_calls}
            busy = await _cancelled(tasks.spin, options, scale(40, 2))
            options["cancel_grace"] = GRACE
            hung = await _cancelled(tasks.hang, options, scale(20, 1))
            after = [each - int(GRACE * 1e9) for each in hung.share]
            by_handle, by_waiter = "handle.cancel()", "its waiter cancelled"
            in_c = f"{share} C code after its grace, {worker}"
            found += [
                rows.slowest(
                    f"{caller}, {by_handle}, {worker}", busy.by_handle, CALLER
                ),
                rows.slowest(
                    f"{caller}, {by_waiter}, {worker}", busy.by_waiter, CALLER
                ),
                rows.slowest(f"{share} a busy loop, {worker}", busy.share, SHARE),
                rows.slowest(in_c, after, AFTER_GRACE, note),
            ]
    return found


async def _cancelled(
    function: Callable[[int], None], options: dict[str, Any], count: int
) -> Cancels:
    """Cancel so many, one after the other, each once it runs; in turn by each way."""
    call: Call = aiogpu.remote(**options)(in_script(function)).remote
    found = Cancels([], [], [])
    with open_latch() as latch:
        for number in range(count):
            is_by_waiter = number % 2 == 1
            await _cancel_one(call, latch, function is tasks.hang, is_by_waiter, found)
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
