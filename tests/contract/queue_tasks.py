"""The tasks of the tests of `aiogpu.Queue`."""

from __future__ import annotations

from typing import Any

import aiogpu
from tests.support.gate import say


@aiogpu.remote
async def fill(queue: aiogpu.Queue[int], count: int) -> int:
    for number in range(count):
        await queue.put(number)
    return count


@aiogpu.remote
def fill_plainly(queue: Any, count: int) -> int:
    for number in range(count):
        queue.put(number)
    return count


@aiogpu.remote
async def drain(queue: aiogpu.Queue[int]) -> list[int]:
    return [item async for item in queue]


@aiogpu.remote
def drain_plainly(queue: Any, path: str) -> list[int]:
    say(path, "drains")
    items: list[int] = []
    try:
        while True:
            items += queue.get_batch(2)
    except aiogpu.errors.QueueClosedError:
        return items


@aiogpu.remote
async def wait_for_item(queue: aiogpu.Queue[int], path: str, name: str) -> int:
    say(path, name)
    return await queue.get()


@aiogpu.remote
def wait_for_item_plainly(queue: Any, path: str, name: str) -> Any:
    say(path, name)
    return queue.get()


@aiogpu.remote
async def try_all(queue: aiogpu.Queue[int]) -> list[str]:
    """Return the errors of gets from an empty queue."""
    errors = []
    for call in (queue.get_nowait, lambda: queue.get(timeout=0.01)):
        try:
            await call()
        except aiogpu.errors.QueueEmptyError as error:
            errors.append(str(error))
    return errors
