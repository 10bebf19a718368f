"""What code in a worker is told that it is called."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiogpu

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]


def name() -> str:
    return aiogpu.get_runtime_context().task_name


class Named:
    def __init__(self) -> None:
        self.made_as = name()

    def made(self) -> str:
        return self.made_as

    def called(self, _: int = 0) -> str:
        return name()


class NamedBeside(Named):
    @aiogpu.method(concurrency_group="side")
    def beside(self) -> str:
        return name()


class NamedSoftly(Named):
    async def softly(self) -> list[str]:
        before = name()
        return [before, await asyncio.create_task(self.again()), name()]

    async def second(self) -> str:
        return await self.again()

    async def again(self) -> str:
        await asyncio.sleep(0)
        return name()


Serial = aiogpu.remote(Named)
Threaded = aiogpu.remote(concurrency_groups={"side": 1})(NamedBeside)
Softly = aiogpu.remote(NamedSoftly)


@pytest.mark.parametrize(
    "kind",
    [Serial, pytest.param(Threaded, marks=pytest.mark.needs("threads")), Softly],
)
async def test_a_call_is_named_after_its_actor_and_method(kind: Any) -> None:
    """[B20]"""
    own = kind.__name__
    async with aiogpu.init(num_cpus=1):
        actor = await kind.remote()
        assert await actor.called.remote() == f"{own}.called"
        assert await actor.made.remote() == own
        assert await anext(aiter(actor.called.map([1], chunk=1))) == f"{own}.called"
        assert await aiogpu.remote(name).remote() == "name"
        if kind is Threaded:
            assert await actor.beside.remote() == f"{own}.beside"
            other = actor.called.options(concurrency_group="side")
            assert await other.remote() == f"{own}.called"


async def test_calls_that_interleave_have_names_of_their_own() -> None:
    async with aiogpu.init(num_cpus=1):
        actor = await Softly.remote()
        names, other = await asyncio.gather(
            actor.softly.remote(), actor.second.remote()
        )
        assert names == ["NamedSoftly.softly"] * 3
        assert other == "NamedSoftly.second"
