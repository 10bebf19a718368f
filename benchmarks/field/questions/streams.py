"""Streams: small items of a generator that runs as a task."""

from __future__ import annotations

from benchmarks.field.question import Amount, Ask, Batch, Metric, Question, Stage
from benchmarks.port import Environment
from benchmarks.stream_floor import open_stream_floor
from benchmarks.tasks import numbers

NAME = "stream"
ITEMS = 100
"""So many times as many items are streamed as calls are awaited, at most."""


async def _prepare(environment: Environment, stage: Stage) -> Ask:
    start, batch = environment.stream(numbers), Batch(NAME, stage)

    async def consume(count: int) -> None:
        found = 0
        async for _ in start(count):
            found += 1
        assert found == count, (found, count)

    return lambda amount: batch.run(consume, _of_items(amount))


async def _floor(stage: Stage) -> Ask:
    floor = await stage.stack.enter_async_context(open_stream_floor())
    batch = Batch(NAME, stage)
    return lambda amount: batch.run(floor.items, _of_items(amount))


def _of_items(amount: Amount) -> Amount:
    return amount._replace(calls=amount.calls * ITEMS)


QUESTIONS = (
    Question(
        NAME,
        "calls",
        (Metric(NAME, "an item of a stream"),),
        _prepare,
        _floor,
        "a bare worker that sends pickled items, without back-pressure",
        seconds=15,
    ),
)
