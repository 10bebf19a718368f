"""[B45] Every entry point refuses another thread than its loop's, and sends nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aiogpu

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]


@aiogpu.remote
def add(number: int) -> int:
    return number + 1


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


class Things:
    """What a program holds as its thread calls.

    Attributes:
        actor: has been called once.
        pool: of one actor.
        handle: of a call that has ended.
        stream: of which one item was taken.
        results: of a map, of which one was taken.
    """

    actor: Any
    pool: Any
    handle: Any
    stream: Any
    results: Any


def steps(coroutine: Any) -> None:
    """Take the first step of a coroutine, as a loop of another thread would."""
    try:
        coroutine.send(None)
    finally:
        coroutine.close()


ENTRIES: dict[str, Callable[[Things], object]] = {
    "a task": lambda it: add.remote(1),
    "a generator": lambda it: count.remote(3),
    "a map": lambda it: steps(anext(add.map([1]))),
    "an actor": lambda it: Counter.remote(),
    "a method": lambda it: it.actor.add.remote(),
    "a coroutine method": lambda it: it.actor.add_softly.remote(),
    "a method with two results": lambda it: it.actor.pair.remote(),
    "a generator method": lambda it: it.actor.each.remote(3),
    "kill": lambda it: aiogpu.kill(it.actor),
    "a wait for an actor": lambda it: steps(it.actor.__await__()),
    "a pool's method": lambda it: it.pool.add.remote(),
    "a pool": lambda it: aiogpu.ActorPool(Counter, 1),
    "put": lambda it: aiogpu.put(1),
    "get_actor": lambda it: aiogpu.get_actor("any"),
    "cancel of a handle": lambda it: it.handle.cancel(),
    "an item": lambda it: steps(anext(it.stream)),
    "aclose of a stream": lambda it: steps(it.stream.aclose()),
    "cancel of a stream": lambda it: it.stream.cancel(),
}
OF_HANDLES: dict[str, Callable[[Things], object]] = {
    "get": lambda it: aiogpu.get(it.handle),
    "wait": lambda it: aiogpu.wait([it.handle]),
}
"""They say that the handle is to be awaited on its loop."""


async def refused(entry: Callable[[Things], object], it: Things) -> str:
    """What a thread is told that calls it."""
    with pytest.raises(aiogpu.NoLoopError) as caught:
        await asyncio.to_thread(entry, it)
    return str(caught.value)


@pytest.mark.whole
async def test_another_thread_is_refused_by_each_of_them() -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        it = Things()
        it.actor = await Counter.remote()
        it.stream = count.remote(3)
        assert await anext(it.stream) == 0
        async with aiogpu.ActorPool(Counter, 1) as it.pool:
            for name, entry in ENTRIES.items():
                it.handle = add.remote(1)
                told = await refused(entry, it)
                assert "event loop" in told, name
                assert await it.handle == 2, name
            for entry in OF_HANDLES.values():
                with pytest.raises(aiogpu.AiogpuError, match="event loop"):
                    await asyncio.to_thread(entry, it)
            assert await it.pool.add.remote() == 1
        assert await it.actor.add.remote() == 1, "no call was sent"
        assert [item async for item in it.stream] == [1, 2]
        async with Counter.remote() as other:
            await refused(lambda _: other.add.remote(), it)
            assert await other.add.remote() == 1


@pytest.mark.needs("leases")
async def test_another_thread_gives_no_lease_back() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        it = Things()
        async with aiogpu.lease(num_gpus=1) as gpu:
            told = await refused(lambda _: steps(gpu.release()), it)
            assert "release() of a lease" in told
            assert gpu.is_held


async def test_what_is_written_in_its_place() -> None:
    """As a FastAPI endpoint that is a plain `def` would."""
    async with aiogpu.init(num_cpus=1):
        actor = await Counter.remote()
        loop = asyncio.get_running_loop()

        async def call() -> int:
            return int(await actor.add.remote())

        def endpoint() -> int:
            return asyncio.run_coroutine_threadsafe(call(), loop).result()

        assert await asyncio.to_thread(endpoint) == 1
