"""A mixed day on four GPUs, in a few seconds: fractions and whole ones as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final

from benchmarks.field.question import (
    Amount,
    Ask,
    Figures,
    Metric,
    Opening,
    Question,
    Stage,
)
from benchmarks.field.trace import GPUS, SIZES, Day, Least, best, bound, trace, work
from benchmarks.port import Call, Environment, Need, UnsupportedError
from benchmarks.tasks import stay

BEGINS: Final = 0.05
"""Seconds from the start of a day to its first arrival."""
LATEST: Final = 20.0
"""Seconds after which a day is given up."""


def _question(
    name: str, title: str, share: float, seconds: float, *, is_isolated: bool
) -> Question:
    names = f"{name}-makespan", f"{name}-wait-p50", f"{name}-wait-p99"

    def figures(values: Least, count: int, stage: Stage) -> Figures:
        jobs = trace(count)
        used = work(jobs) / GPUS
        found, most = used / values.makespan, used / bound(jobs)
        stage.notes["utilisation"] = f"utilisation {found:.0%}, of at most {most:.0%}"
        return {key: [value / 1000] for key, value in zip(names, values, strict=True)}

    async def prepare(environment: Environment, stage: Stage) -> Ask:
        calls = {
            size: environment.task(stay, Need(1, size / 4, is_isolated=is_isolated))
            for size in SIZES
        }
        is_warm = False

        async def ask(amount: Amount) -> Figures:
            nonlocal is_warm
            if not is_warm:  # a first day of eight tasks, so that processes are there
                is_warm = True
                await asyncio.gather(*(calls[1](50) for _ in range(8)))
            count = max(4, round(amount.tasks * share))
            day = await _live(calls, count)
            seen = Least(day.makespan, day.wait(50), day.wait(99))
            return figures(seen, count, stage)

        return ask

    async def floor(stage: Stage) -> Ask:
        async def ask(amount: Amount) -> Figures:
            count = max(4, round(amount.tasks * share))
            return figures(best(trace(count)), count, stage)

        return ask

    return Question(
        name,
        "day",
        tuple(
            Metric(key, f"{title}: {what}")
            for key, what in zip(
                names, ("makespan", "waiting, p50", "waiting, p99"), strict=True
            )
        ),
        prepare,
        floor,
        "the least that any of seven rules of packing gives, carried out without cost",
        Opening(num_cpus=16, num_gpus=GPUS),
        seconds=seconds,
    )


async def _live(calls: dict[int, Call[tuple[float, float]]], count: int) -> Day:
    """Submit each when it arrives."""
    loop, jobs = asyncio.get_running_loop(), trace(count)
    handles: list[asyncio.Future[tuple[float, float]]] = []
    begin, delay = monotonic() + BEGINS, loop.time() + BEGINS

    def submit(call: Callable[[int], asyncio.Future[tuple[float, float]]]) -> None:
        handles.append(call(jobs[len(handles)].duration))

    for job in jobs:
        loop.call_at(delay + job.arrival / 1000, submit, calls[job.size])
    try:
        async with asyncio.timeout(LATEST):
            await asyncio.sleep(BEGINS + jobs[-1].arrival / 1000 + 0.01)
            spans = await asyncio.gather(*handles)
    except TimeoutError:
        done = sum(handle.done() for handle in handles)
        raise UnsupportedError(
            f"of the day's {count} tasks it did {done} within {LATEST:g} s"
        ) from None
    assert len(spans) == count
    starts = [(start - begin) * 1000 for start, _ in spans]
    waits = [start - job.arrival for start, job in zip(starts, jobs, strict=True)]
    return Day((max(end for _, end in spans) - begin) * 1000, waits)


QUESTIONS = (
    _question("day", "a day on four GPUs", 1.0, 50, is_isolated=False),
    _question(
        "fresh-day",
        "a day on four GPUs, a process for each task",
        0.25,
        40,
        is_isolated=True,
    ),
)
