"""A process of its own for each GPU task, which has run nothing before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from benchmarks.environments import ENVIRONMENTS
from benchmarks.field.question import (
    Amount,
    Ask,
    Batch,
    Figures,
    Metric,
    Opening,
    Question,
    Stage,
)
from benchmarks.forks import open_forks
from benchmarks.port import Call, Environment, Need, UnsupportedError
from benchmarks.tasks import noop, use_numpy, use_torch

QUARTER = Need(num_gpus=0.25, is_isolated=True)
MOST = 200
"""Tasks at once, at most."""


def _task(
    environment: Environment, function: Callable[[int], object], stage: Stage
) -> Call[object]:
    """On a quarter of a GPU; without, if the system has processes and no GPUs."""
    try:
        return environment.task(function, QUARTER)
    except UnsupportedError as reason:
        call = environment.task(function, Need(is_isolated=True))
        stage.notes["gpus"] = f"{reason}: the process alone"
        return call


def _question(
    name: str, function: Callable[[int], object], library: str = ""
) -> Question:
    preload = (library,) if library else None

    async def prepare(environment: Environment, stage: Stage) -> Ask:
        call = _task(environment, function, stage)
        batch = Batch(name, stage)
        if not stage.has_preloaded:
            stage.notes["imports"] = f"each process imports {library} anew"

        async def gather(count: int) -> None:
            await asyncio.gather(*(call(number) for number in range(count)))

        return lambda amount: batch.run(gather, _of_tasks(amount))

    async def floor(stage: Stage) -> Ask:
        image = ENVIRONMENTS["aiogpu"]().image(preload)
        forks = stage.stack.enter_context(open_forks(image))
        return partial(_fork, name, forks.fork_in_a_row)

    beside = f", with {library}" if library else ""
    return Question(
        name,
        "processes",
        (Metric(name, f"a GPU task in a fresh process{beside}"),),
        prepare,
        floor,
        f"fork, _exit and reaping of aiogpu's own image{beside}",
        Opening(num_cpus=4, num_gpus=1, preload=preload),
        seconds=20,
        needs=library,
    )


def _of_tasks(amount: Amount) -> Amount:
    return amount._replace(calls=min(amount.calls, MOST), seconds=2 * amount.seconds)


async def _fork(name: str, fork: Callable[[int], object], amount: Amount) -> Figures:
    (each,) = await fork(min(amount.calls, 50))  # type: ignore[misc]
    return {name: [each / 1e9]}


QUESTIONS = (
    _question("fresh-bare", noop),
    _question("fresh-numpy", use_numpy, "numpy"),
    _question("fresh-torch", use_torch, "torch"),
)
