"""A task and an actor with options as large as they may be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import aiogpu

COUNT: Final = 2**31 - 1
TIME: Final = 10**9


@aiogpu.remote(
    max_calls=COUNT,
    max_retries=COUNT,
    priority=COUNT,
    timeout=TIME,
    cancel_grace=TIME,
)
def give(number: int) -> int:
    return number


@aiogpu.remote(max_buffered=COUNT, priority=-COUNT)
def count(last: int) -> Iterator[int]:
    yield from range(last)


@aiogpu.remote(num_returns=1000)
def many() -> tuple[int, ...]:
    return tuple(range(1000))


@aiogpu.remote(
    max_restarts=COUNT, max_task_retries=COUNT, concurrency_groups={"io": COUNT}
)
class Patient:
    """Has methods of all kinds."""

    async def give(self, number: int) -> int:
        return number

    @aiogpu.method(max_buffered=COUNT, concurrency_group="io")
    async def count(self, last: int) -> Any:
        for number in range(last):
            yield number


@aiogpu.remote(max_concurrency=COUNT)
class Interleaved:
    async def give(self, number: int) -> int:
        return number


@aiogpu.remote
def give_below(number: int) -> list[int]:
    """Wait for a task of its own as long as may be, in plain code."""
    ready, _ = aiogpu.wait([give.remote(number)], timeout=TIME)
    return [aiogpu.get(ready[0], timeout=TIME), *count.remote(3)]
