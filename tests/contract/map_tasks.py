"""Tasks for maps, waits and refused calls. Light to import, as workers import them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import aiogpu
from tests.contract import tasks


@aiogpu.remote
def check(number: int) -> int:
    if number % 10 == 7:
        raise ValueError(number)
    return number


@aiogpu.remote
async def check_later(number: int) -> int:
    import asyncio

    await asyncio.sleep(0)
    if number % 10 == 7:
        raise ValueError(number)
    return number


@aiogpu.remote
def here(number: int) -> tuple[int, int]:
    return number, aiogpu.get_runtime_context().task_id


@aiogpu.remote
def fill(number: int) -> Any:
    import numpy

    return numpy.full(200_000, number)


@aiogpu.remote
def total(array: Any) -> int:
    return int(array.sum())


class Adder:
    """Methods of all kinds."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    @staticmethod
    def half(number: int) -> float:
        return number / 2

    def sum(self, array: Any) -> int:
        return int(array.sum())


class LaterAdder(Adder):
    async def add_later(self, number: int) -> int:
        import asyncio

        await asyncio.sleep(0)
        return self.add(number)


@aiogpu.remote
def exit_at_2(number: int) -> int:
    if number == 2:
        raise SystemExit("enough")
    return number


@aiogpu.remote
def lock_at_2(number: int) -> Any:
    return threading.Lock() if number == 2 else number


@aiogpu.remote
class Plus:
    def add(self, number: int) -> int:
        return number + 1


@aiogpu.remote
def sum_of(count: int) -> list[int]:
    """Wait for the children of a plain task by `wait` and `as_completed`."""
    handles: list[Any] = [tasks.add.remote(number) for number in range(count)]
    ready, pending = aiogpu.wait(handles, num_returns=2)
    assert len(ready) == 2
    assert len(pending) == count - 2
    first = [aiogpu.get(handle) for handle in ready]
    return first + [aiogpu.get(handle) for handle in aiogpu.as_completed(pending)]


@aiogpu.remote
async def sum_of_later(count: int) -> list[int]:
    """Wait for the children of a coroutine by `wait` and `as_completed`."""
    handles: list[Any] = [tasks.add.remote(number) for number in range(count)]
    ready, pending = await aiogpu.wait(handles, num_returns=2)
    assert len(ready) == 2
    first = [await handle for handle in ready]
    return first + [await handle async for handle in aiogpu.as_completed(pending)]


@aiogpu.remote
def sum_of_given(handles: list[Any]) -> int:
    """Wait for handles that the program has started."""
    ready, pending = aiogpu.wait(handles, num_returns=2)
    assert (len(ready), len(pending)) == (2, 1)
    return sum(aiogpu.get(handle) for handle in aiogpu.as_completed(handles))


@aiogpu.remote
def count(end: int) -> Iterator[int]:
    yield from range(end)


@aiogpu.remote(num_cpus=0)
class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def add(self, number: int = 1) -> int:
        self.calls += number
        return self.calls

    async def add_softly(self) -> int:
        return self.add()

    @aiogpu.method(num_returns=2)
    def pair(self) -> tuple[int, int]:
        return self.add(), 2

    def each(self, end: int) -> Iterator[int]:
        yield from range(end)


class Echo:
    def echo(self, item: bytes) -> bytes:
        return item
