"""How soon does a caller go on whose task is cancelled, and when is its share free?"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Final

from benchmarks.gate import Gate, open_gate
from benchmarks.method import Block, Scale
from benchmarks.port import Call, Environment, Need
from benchmarks.rows import Goal, Row, slowest_row
from benchmarks.script import in_script
from benchmarks.tasks import hang, spin

GRACE: Final = 0.2
"""Seconds that those get who cannot hear."""
LOOK: Final = 0.001
"""Seconds after which it is looked again whether the share is free."""
CALLER: Final = Goal(5, "ms")
SHARE: Final = Goal(50, "ms")
AFTER_GRACE: Final = Goal(100, "ms")


@dataclass(slots=True)
class Cancels:
    """What was seen of tasks of one kind. Nanoseconds since each was cancelled.

    Attributes:
        by_handle: until the caller went on, where its handle was cancelled.
        by_waiter: the same where what awaited it was cancelled.
        share: until its share was free.
    """

    by_handle: Block = field(default_factory=list)
    by_waiter: Block = field(default_factory=list)
    share: Block = field(default_factory=list)


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """A busy loop, and code that is blocked in C; isolated, and in a reused worker."""
    rows = []
    await environment.open(num_cpus=1, num_gpus=1)
    try:
        for worker, is_isolated in (("isolated", True), ("reused", False)):
            rows += await _busy(environment, worker, is_isolated, scale)
        for worker, is_isolated in (("isolated", True), ("reused", False)):
            rows.append(await _blocked(environment, worker, is_isolated, scale))
    finally:
        await environment.close()
    return rows


async def _busy(
    environment: Environment, worker: str, is_isolated: bool, scale: Scale
) -> list[Row]:
    need = Need(num_gpus=1, is_isolated=is_isolated)
    seen = await _cancel(environment, spin, need, scale.cancels)
    return [
        slowest_row(f"cancel: {name}, {worker}", samples, goal, scale)
        for name, samples, goal in (
            ("caller, handle.cancel()", seen.by_handle, CALLER),
            ("caller, its waiter cancelled", seen.by_waiter, CALLER),
            ("share of a busy loop", seen.share, SHARE),
        )
    ]


async def _blocked(
    environment: Environment, worker: str, is_isolated: bool, scale: Scale
) -> Row:
    need = Need(num_gpus=1, is_isolated=is_isolated, grace=GRACE)
    seen = await _cancel(environment, hang, need, scale.cancels // 2)
    after = [taken - int(GRACE * 1e9) for taken in seen.share]
    name = f"cancel: share of C code after its grace, {worker}"
    note = f"grace of {GRACE * 1000:.0f} ms subtracted"
    return slowest_row(name, after, AFTER_GRACE, scale, note)


async def _cancel(
    environment: Environment, function: Callable[[int], None], need: Need, count: int
) -> Cancels:
    """Cancel so many, one after the other, each once it runs."""
    call = environment.task(in_script(function), need)
    seen = Cancels()
    with open_gate() as gate:
        for number in range(count):
            await _cancel_one(environment, call, gate, number % 2 == 1, seen)
    return seen


async def _cancel_one(
    environment: Environment,
    call: Call[None],
    gate: Gate,
    is_by_waiter: bool,
    seen: Cancels,
) -> None:
    handle = call(os.getpid())
    went_on = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        try:
            await handle
        finally:
            went_on.set_result(perf_counter_ns())

    waiter = asyncio.create_task(wait())
    await gate.entered()
    start = perf_counter_ns()
    if is_by_waiter:
        waiter.cancel()
    else:
        handle.cancel()
    took = await went_on - start
    (seen.by_waiter if is_by_waiter else seen.by_handle).append(took)
    while await environment.free_gpus() < 1:  # noqa: ASYNC110 - a user looks so, too
        await asyncio.sleep(LOOK)
    seen.share.append(perf_counter_ns() - start)
    await asyncio.wait([waiter])
    if not waiter.cancelled():
        raise RuntimeError(f"a task for ever was not cancelled: {waiter.exception()}")
