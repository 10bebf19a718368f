"""Streams and maps: taken whole, left early, ended by their producer's death."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiogpu
from benchmarks.soak import tasks
from benchmarks.soak.operation import Operation


async def stream(one: Operation) -> None:
    """Items in order, none twice and none left out, whoever dies."""
    hand = one.hand
    to = hand.choice((1, 10, 200))
    fatal_at = hand.randrange(to) if hand.random() < 0.1 else -1
    options: dict[str, Any] = {"max_buffered": hand.choice((1, 4, 64))}
    options["max_retries"] = hand.choice((0, 1, 3))
    match hand.randrange(3):
        case 0:
            source = tasks.count.options(**options).remote(to, fatal_at)
        case 1:
            source = tasks.count_softly.options(**options).remote(to)
        case _:
            source = tasks.pass_on.options(**options).remote(to)
    taken = one.begin("stream", source)
    until = hand.randrange(to) if hand.random() < 0.3 else to
    if hand.random() < 0.1:
        # Cancelled from beside: it ends early, after items in order.
        asyncio.get_running_loop().call_later(0.01, taken.cancel)
        await one.attempt(taken, _take(taken, until), _is_beginning(until), *_GIVEN_UP)
    else:
        await one.attempt(taken, _take(taken, until), list(range(until)))


_GIVEN_UP = (asyncio.CancelledError, aiogpu.TaskCancelledError)


def _is_beginning(until: int) -> Any:
    return lambda found: found == list(range(len(found))) and len(found) <= until


async def _take(source: AsyncIterator[int], until: int) -> list[int]:
    found: list[int] = []
    async for item in source:
        if len(found) == until:
            break
        found.append(item)
    return found


async def mapped(one: Operation) -> None:
    """A map with or without chunks, in order or not, whole or left."""
    hand = one.hand
    count = hand.choice((10, 100, 1000))
    is_ordered = hand.random() < 0.7
    results = one.begin(
        "map",
        tasks.echo.map(
            range(count),
            limit=hand.choice((4, 32, 256)) * 4,
            ordered=is_ordered,
            chunk=hand.choice((1, 3, 4, "auto")),
        ),
    )
    until = hand.randrange(count) if hand.random() < 0.3 else count
    expected: Any = list(range(until))
    if not is_ordered:
        expected = lambda found: len(set(found)) == until  # noqa: E731
    await one.attempt(results, _take_all(results, until), expected)


async def _take_all(results: Any, until: int) -> list[int]:
    async with results:
        return await _take(results, until)
