"""[B20] [B30] What an actor is told about itself, and names that arguments may have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import aiogpu

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]


def facts() -> tuple[int | None, dict[str, float]]:
    context = aiogpu.get_runtime_context()
    assert context.get_assigned_resources() == dict(context.assigned_resources)
    return context.actor_id, context.get_assigned_resources()


@aiogpu.remote
class Plain:
    def __init__(self) -> None:
        self.at_first = facts()

    def facts(self) -> tuple[Any, Any]:
        return self.at_first, facts()


@aiogpu.remote
class Softly:
    async def facts(self) -> tuple[Any, Any]:
        return facts(), facts()


@aiogpu.remote
def of_a_task() -> tuple[int | None, dict[str, float]]:
    return facts()


@pytest.mark.parametrize("kind", [Plain, Softly])
async def test_an_actor_knows_its_id_and_what_it_holds(kind: Any) -> None:
    async with aiogpu.init(num_cpus=3, num_gpus=2):
        first = await kind.options(num_gpus=0.5).remote()
        other = await kind.options(num_cpus=2, num_gpus=0).remote()
        before, now = await first.facts.remote()
        assert before == now
        assert isinstance(now[0], int)
        assert now[1] == {"GPU": 0.5}, "the CPU by which it was placed is given back"
        _, others = await other.facts.remote()
        assert others[0] not in (None, now[0])
        assert others[1] == {"CPU": 2.0}
        assert await of_a_task.remote() == (None, {"CPU": 1.0})
    assert aiogpu.get_runtime_context().actor_id is None


@aiogpu.remote
def named(one: int, **others: int) -> dict[str, int]:
    return {"one": one, **others}


@aiogpu.remote
def each_named(**others: int) -> Iterator[int]:
    yield from others.values()


@aiogpu.remote
class Named:
    def __init__(this, **others: int) -> None:
        this.others = others

    def named(this, **others: int) -> dict[str, int]:
        return {**this.others, **others}


async def test_an_argument_may_be_called_self() -> None:
    async with aiogpu.init(num_cpus=2):
        assert await named.remote(1, self=2) == {"one": 1, "self": 2}
        assert [item async for item in each_named.remote(self=3)] == [3]
        actor = Named.remote(self=4)
        assert await actor.named.remote(args=5) == {"self": 4, "args": 5}
        assert await actor.named.remote(self=6) == {"self": 6}


@aiogpu.remote
def failing() -> Iterator[int]:
    yield 1
    raise KeyError("it")


async def test_a_stream_that_has_failed_has_no_further_item() -> None:
    async with aiogpu.init(num_cpus=1):
        stream = failing.remote()
        assert await anext(stream) == 1
        with pytest.raises(KeyError):
            await anext(stream)
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(stream)


@aiogpu.remote
class Keeper:
    def __init__(self) -> None:
        self.value = 0

    def add(self, number: int) -> int:
        self.value += number
        return self.value


@aiogpu.remote
async def finds(name: str) -> int:
    actor = await aiogpu.get_actor(name)
    return int(await actor.add.remote(1))


@aiogpu.remote
async def misses(name: str) -> None:
    await aiogpu.get_actor(name)


@aiogpu.remote
class Finder:
    async def find(self, name: str) -> int:
        actor = await aiogpu.get_actor(name)
        again = await aiogpu.get_actor(name)
        return int(await actor.add.remote(1)) + int(await again.add.remote(1))


async def test_actors_are_found_by_name_in_coroutines() -> None:
    async with aiogpu.init(num_cpus=3):
        keeper = await Keeper.options(name="kept").remote()
        assert await finds.remote("kept") == 1
        finder = Finder.remote()
        assert await finder.find.remote("kept") == 2 + 3
        with pytest.raises(aiogpu.errors.ActorNameError, match="'nobody'"):
            await misses.remote("nobody")
        assert await keeper.add.remote(1) == 4
