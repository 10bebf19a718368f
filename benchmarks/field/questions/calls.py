"""Calls: one awaited, and many gathered; of functions and of actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from benchmarks.field.question import (
    Amount,
    Ask,
    Batch,
    Figures,
    Metric,
    Question,
    Stage,
    awaited,
)
from benchmarks.floor import open_floor
from benchmarks.port import Call, Environment, Need
from benchmarks.tasks import Plain, noop

GATHERED = 40
"""So many times as many calls are gathered as are awaited, at most."""


async def _function(environment: Environment, _stage: Stage) -> Call[None]:
    return environment.task(noop, Need())


async def _method(environment: Environment, _stage: Stage) -> Call[None]:
    return await environment.actor(Plain)()


async def _bare(stage: Stage) -> Call[None]:
    return (await stage.stack.enter_async_context(open_floor())).call


def _one(name: str, call: Callable[[int], Awaitable[object]], stage: Stage) -> Ask:
    return lambda amount: awaited(name, call, amount)


def _many(name: str, call: Callable[[int], Awaitable[object]], stage: Stage) -> Ask:
    batch = Batch(name, stage)

    async def gather(count: int) -> None:
        await asyncio.gather(*(call(number) for number in range(count)))

    async def ask(amount: Amount) -> Figures:
        return await batch.run(gather, amount._replace(calls=amount.calls * GATHERED))

    return ask


def _question(
    name: str,
    family: str,
    title: str,
    of: Callable[[Environment, Stage], Awaitable[Call[None]]],
    how: Callable[[str, Callable[[int], Awaitable[object]], Stage], Ask],
) -> Question:
    async def prepare(environment: Environment, stage: Stage) -> Ask:
        return how(name, await of(environment, stage), stage)

    async def floor(stage: Stage) -> Ask:
        return how(name, await _bare(stage), stage)

    return Question(
        name,
        family,
        (Metric(name, title),),
        prepare,
        floor,
        "a blocking worker on a Unix socket, no scheduler",
    )


QUESTIONS = (
    _question("call", "calls", "a call, awaited", _function, _one),
    _question("gathered", "calls", "a call, of many gathered", _function, _many),
    _question("actor-call", "calls", "an actor's call, awaited", _method, _one),
    _question(
        "actor-gathered", "calls", "an actor's call, of many gathered", _method, _many
    ),
)
