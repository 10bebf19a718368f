"""Whoever reads a stream of an actor that ends is told so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

import aiogpu

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@aiogpu.remote
class Counter:
    def count(self) -> Iterator[int]:
        yield from range(10_000)

    def leave(self) -> None:
        aiogpu.exit_actor()


@aiogpu.remote
class SoftCounter:
    async def count(self) -> AsyncIterator[int]:
        for number in range(10_000):
            yield number

    async def leave(self) -> None:
        aiogpu.exit_actor()


@pytest.mark.parametrize("kind", ["threads", "coroutines"])
async def test_a_stream_of_an_actor_that_another_call_ends(kind: str) -> None:
    async with aiogpu.init(num_cpus=2):
        if kind == "threads":
            actor = await Counter.options(max_concurrency=2).remote()
        else:
            actor = await SoftCounter.remote()
        stream = actor.count.remote()
        items = aiter(stream)
        assert await anext(items) == 0
        with pytest.raises(aiogpu.ActorDiedError, match="exit_actor"):
            await actor.leave.remote()
        with pytest.raises(aiogpu.ActorDiedError, match="exit_actor"):
            async for _ in items:
                pass
