"""Leases and placements: waited for, held, used, removed while they are used."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final

import aiogpu
from benchmarks.soak import actors, tasks
from benchmarks.soak.operation import Operation
from benchmarks.soak.shares import held

BUNDLES: Final[tuple[list[dict[str, float]], ...]] = (
    [{"GPU": 0.5, "CPU": 1}, {"CPU": 1}],
    [{"GPU": 1}, {"GPU": 1}],
    [{"GPU": 0.25}, {"GPU": 0.25}, {"GPU": 0.25}],
)


async def leased(one: Operation) -> None:
    """A share for this program itself, with a process beside it now and then."""
    amount = one.hand.choice((0.25, 0.5, 1, 2))
    timeout = one.hand.choice((0.01, 0.5, 20))
    wanted = aiogpu.lease(num_gpus=amount, timeout=timeout)
    one.begin("lease", wanted)
    await one.attempt("lease", _use(one, wanted, amount), None, aiogpu.TaskTimeoutError)


async def _use(one: Operation, wanted: Any, amount: float) -> None:
    beside = None
    async with wanted as gpu:
        with held([int(each) for each in gpu.ids], amount):
            await asyncio.sleep(one.hand.choice((0, 0.02, 0.1)))
        if one.hand.random() < 0.3:
            variables = {**os.environ, **gpu.environ}
            beside = await asyncio.create_subprocess_exec("sleep", "0.1", env=variables)
    # It has kept the share until now, though the program has given it back.
    if beside is not None:
        await beside.wait()


async def placed(one: Operation) -> None:
    """Tasks and an actor in bundles, which go under them now and then."""
    hand = one.hand
    bundles = hand.choice(BUNDLES)
    group = one.begin("placement", aiogpu.placement(bundles, hand.choice(STRATEGIES)))
    legal: tuple[type[BaseException], ...] = (aiogpu.errors.PlacementRemovedError,)
    try:
        handles = [
            _in(one, group, index) for index in range(len(bundles)) for _ in "ab"
        ]
        if hand.random() < 0.5:
            kind = actors.SERIAL.options(placement=group, num_cpus=0)
            handles.append(
                one.begin("actor's", kind.remote().add.remote(one.number - 1))
            )
        if hand.random() < 0.7:
            async with asyncio.timeout(30):
                await group
        if hand.random() < 0.7:
            legal = ()
            for handle in handles:
                await one.end(handle, one.number)
    except TimeoutError as error:
        one.note(group, error, (TimeoutError,))
    finally:
        await group.remove()
    if legal:
        for handle in handles:
            await one.end(handle, one.number, *legal)


STRATEGIES: Final = ("PACK", "SPREAD")


def _in(one: Operation, group: Any, index: int) -> Any:
    amount = group.bundles[index].get("GPU", 0)
    if amount:
        task = tasks.on_gpu.options(placement=group, bundle=index, num_gpus=amount)
        handle = task.remote(one.number, amount, 0.01)
    else:
        without = tasks.echo.options(placement=group, bundle=index)
        handle = without.remote(one.number)
    return one.begin("in a bundle", handle)
