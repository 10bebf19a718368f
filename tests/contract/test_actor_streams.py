"""[B17] Methods of actors that are generators, of each kind of actor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import aiogpu
from tests.contract.draining import drained
from tests.support.gate import Gate, pass_gate, say

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


class Counting:
    """Counts, and remembers what has ended."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.ended: list[str] = []

    def count(self, end: int) -> Iterator[int]:
        try:
            yield from range(end)
        finally:
            self.ended.append("count")
            if self.path:
                say(self.path, "count")

    @aiogpu.method(max_buffered=1)
    def slowly(self) -> Iterator[int]:
        number = 0
        while True:
            say(self.path, f"begun-{number}")
            yield number
            number += 1

    def stand(self) -> Iterator[int]:
        yield 1
        pass_gate(self.path, "stand")
        yield 2

    def fail(self, good: int) -> Iterator[int]:
        yield from range(good)
        raise ZeroDivisionError("after", good)

    def has_ended(self) -> list[str]:
        return self.ended


@aiogpu.remote(num_cpus=0)
class Serial(Counting):
    """One call at a time."""


@aiogpu.remote(num_cpus=0, max_concurrency=4)
class Threaded(Counting):
    """Four calls at once, in threads."""


@aiogpu.remote(num_cpus=0)
class Async(Counting):
    """Calls interleave on a loop."""

    async def count_softly(self, end: int) -> AsyncIterator[int]:
        try:
            for number in range(end):
                await asyncio.sleep(0)
                yield number
        finally:
            self.ended.append("softly")
            if self.path:
                say(self.path, "softly")


@aiogpu.remote
def sum_of(actor: Any) -> int:
    """Consumes an actor's stream in plain code."""
    return sum(actor.count.remote(500))


@aiogpu.remote
async def sum_softly(actor: Any) -> int:
    """The same in a coroutine; leaves another early."""
    async for number in actor.count.remote(10**9):
        if number == 5:
            break
    return sum([number async for number in actor.count.remote(500)])


@aiogpu.remote(num_cpus=0)
async def asks(actor: Any, times: int) -> AsyncIterator[list[str]]:
    """A generator that has a handle as an argument, and nobody else has it."""
    for _ in range(times):
        yield await actor.has_ended.remote()


@aiogpu.remote
async def makes(number: int) -> AsyncIterator[Any]:
    """Yields handles of actors that it has made."""
    for _ in range(number):
        yield Async.remote()


@pytest.fixture(
    params=[Serial, pytest.param(Threaded, marks=pytest.mark.needs("threads")), Async]
)
def kind(request: pytest.FixtureRequest) -> Any:
    """Each kind of actor, where there may be one."""
    return request.param


async def test_items_come_in_order(address: str, kind: Any) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        actor = kind.remote()
        assert [each async for each in actor.count.remote(300)] == list(range(300))
        assert [each async for each in actor.count.remote(0)] == []
        assert await actor.has_ended.remote() == ["count"] * 2


async def test_a_coroutines_items_come_in_order(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        actor = Async.remote()
        found = [each async for each in actor.count_softly.remote(300)]
        assert found == list(range(300))


async def test_one_ahead_is_one_ahead(address: str, kind: Any, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        actor = kind.remote(gate.path)
        async with actor.slowly.remote() as stream:
            for taken in range(5):
                assert await anext(stream) == taken
                await gate.entered(f"begun-{taken + 1}")
                assert f"begun-{taken + 2}" not in gate.pids


async def test_leaving_early_ends_it_and_the_actor_goes_on(
    address: str, kind: Any, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        actor = kind.remote(gate.path)
        for _ in range(2):
            async for each in actor.count.remote(10**9):
                if each == 100:
                    break
            await gate.entered("count")
            gate.forget("count")
        assert await actor.has_ended.remote() == ["count"] * 2


async def test_leaving_a_coroutine_early(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        actor = Async.remote(gate.path)
        async for each in actor.count_softly.remote(10**9):
            if each == 100:
                break
        await gate.entered("softly")
        assert await actor.has_ended.remote() == ["softly"]


async def test_an_error_comes_in_its_place(address: str, kind: Any) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        actor = kind.remote()
        found, error = await drained(actor.fail.remote(70))
        assert found == list(range(70))
        assert type(error) is ZeroDivisionError
        assert await actor.has_ended.remote() == []


async def test_streams_interleave_where_calls_do(
    address: str, kind: Any, gate: Gate
) -> None:
    if kind is Serial:
        pytest.skip("its calls run one at a time")
    async with aiogpu.init(address=address, num_cpus=1):
        actor = kind.remote(gate.path)
        streams = [actor.slowly.remote() for _ in range(3)]
        for number in range(4):
            assert [await anext(stream) for stream in streams] == [number] * 3
        for stream in streams:
            await stream.aclose()
        assert [each async for each in actor.count.remote(2)] == [0, 1]


async def test_a_stream_occupies_an_actor_that_runs_one_at_a_time(
    address: str, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        actor = Serial.remote(gate.path)
        stream = actor.slowly.remote()
        assert await anext(stream) == 0
        await gate.entered("begun-1")
        other = actor.has_ended.remote()
        assert [await anext(stream) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert not other.done()
        await stream.aclose()
        assert await other == []


@pytest.mark.parametrize("consumer", [sum_of, sum_softly])
async def test_a_task_consumes_it(address: str, kind: Any, consumer: Any) -> None:
    if address == "inline" and kind is Async and consumer is sum_of:
        pytest.skip("inline: code that blocks has the loop's thread")
    async with aiogpu.init(address=address, num_cpus=1):
        actor = kind.remote()
        assert await consumer.remote(actor) == sum(range(500))


@pytest.mark.needs("processes")
async def test_an_actor_that_dies_amid_a_stream(address: str, kind: Any) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        actor = kind.remote()
        stream = actor.count.remote(10**9)
        assert [await anext(stream) for _ in range(100)] == list(range(100))
        aiogpu.kill(actor)
        found, error = await drained(stream)
        assert found == list(range(100, 100 + len(found)))
        assert type(error) is aiogpu.ActorDiedError


@pytest.mark.needs("processes")
async def test_an_actor_that_is_restarted_goes_on_where_it_was(
    address: str, kind: Any
) -> None:
    lasting = kind.options(max_restarts=1, max_task_retries=1)
    async with aiogpu.init(address=address, num_cpus=1):
        actor, found = lasting.remote(), []
        async for each in actor.count.remote(1000):
            found.append(each)
            if each == 300:
                aiogpu.kill(actor, no_restart=False)
        assert found == list(range(1000))


@pytest.mark.usefixtures("each_engine")
async def test_a_call_before_the_node_is_open(kind: Any) -> None:
    actor = kind.remote()
    stream = actor.count.remote(3)
    dropped = actor.count.remote(3)
    await dropped.aclose()
    assert [each async for each in stream] == [0, 1, 2]
    await aiogpu.shutdown()


async def test_a_pool_and_a_map_refuse_it(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        actor = Serial.remote()
        with pytest.raises(aiogpu.errors.MisuseError, match="map"):
            actor.count.map([1])
        async with aiogpu.ActorPool(Serial, 1) as pool:
            with pytest.raises(aiogpu.errors.MisuseError, match="generator"):
                pool.count.remote(1)


async def test_handles_of_actors_go_either_way(address: str) -> None:
    """[B29] They live as long as somebody has them or waits for them."""
    async with aiogpu.init(address=address, num_cpus=1):
        assert [each async for each in asks.remote(Async.remote(), 70)] == [[]] * 70
        async for actor in makes.remote(3):
            assert [each async for each in actor.count.remote(2)] == [0, 1]
            assert await actor.has_ended.remote() == ["count"]
