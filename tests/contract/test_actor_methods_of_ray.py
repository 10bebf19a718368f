"""What Ray's users expect of actors' methods and classes [B31] [B32].

`exit_actor()` that user code swallows, options of one call, names of the class.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiogpu
from tests.support.gate import Gate, pass_gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]


class Leaving:
    """Calls `exit_actor()` and swallows what it raises."""

    limit = 7

    @staticmethod
    def doubled(number: int) -> int:
        return 2 * number

    @classmethod
    def label(cls) -> str:
        return cls.__name__

    def returned(self) -> str:
        try:
            aiogpu.exit_actor()
        except BaseException:
            return "swallowed"

    def replaced(self) -> None:
        try:
            aiogpu.exit_actor()
        except BaseException:
            raise ValueError("another") from None

    def items(self) -> Any:
        yield 1
        try:
            aiogpu.exit_actor()
        except BaseException:
            yield 2

    def add(self, number: int) -> int:
        return number + 1


class LeavingSoftly(Leaving):
    async def returned(self) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().returned()

    async def replaced(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().replaced()


Serial = aiogpu.remote(Leaving)
Threaded = aiogpu.remote(max_concurrency=2)(Leaving)
Softly = aiogpu.remote(LeavingSoftly)


@pytest.mark.whole
@pytest.mark.parametrize("method", ["returned", "replaced"])
@pytest.mark.parametrize(
    "kind",
    [Serial, pytest.param(Threaded, marks=pytest.mark.needs("threads")), Softly],
)
async def test_an_exit_that_is_swallowed_ends_the_actor(kind: Any, method: str) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = await kind.options(max_restarts=2).remote()
        with pytest.raises(aiogpu.ActorDiedError, match="exit_actor"):
            await getattr(actor, method).remote()
        with pytest.raises(aiogpu.ActorDiedError):
            await actor.add.remote(1)


@pytest.mark.needs("processes")
async def test_an_exit_that_a_generator_swallows() -> None:
    async with aiogpu.init(num_cpus=1):
        actor = await Serial.remote()
        items = actor.items.remote()
        assert await anext(items) == 1
        with pytest.raises(aiogpu.ActorDiedError):
            _ = [item async for item in items]
        with pytest.raises(aiogpu.ActorDiedError):
            await actor.add.remote(1)


async def test_what_a_class_has_is_reached_by_its_remote_class() -> None:
    assert Serial.limit == 7
    assert Serial.doubled(3) == 6
    assert Serial.label() == "Leaving"
    with pytest.raises(AttributeError, match=r"Leaving.remote\(\.\.\.\)"):
        _ = Serial.add
    with pytest.raises(AttributeError, match="no missing"):
        _ = Serial.missing


@aiogpu.remote(concurrency_groups={"io": 1, "compute": 2})
class Grouped:
    def pair(self) -> tuple[int, int]:
        return 1, 2

    def stay(self, path: str, name: str) -> str:
        return pass_gate(path, name)

    @aiogpu.method(concurrency_group="io")
    def read(self) -> str:
        return "read"

    @aiogpu.method(num_returns=2)
    def two(self) -> tuple[int, int]:
        return 3, 4

    def each(self, count: int) -> Any:
        yield from range(count)


@pytest.mark.needs("threads")
async def test_a_call_runs_in_the_group_that_it_names(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = await Grouped.remote()
        stays = actor.stay.options(concurrency_group="io")
        staying = stays.remote(gate.path, "a")
        await gate.entered("a")
        late = actor.read.remote()  # the one place of its group is taken
        assert await actor.pair.remote() == (1, 2)
        elsewhere = actor.read.options(concurrency_group="compute")
        assert await elsewhere.remote() == "read"
        assert not late.done()
        gate.release("a")
        assert await staying == "a"
        assert await late == "read"
        counting = actor.each.options(concurrency_group="compute")
        assert [one async for one in counting.remote(3)] == [0, 1, 2]

        @aiogpu.remote
        def inside(actor: Any) -> str:
            call = actor.read.options(concurrency_group="compute")
            with pytest.raises(aiogpu.OptionError, match="names io, compute"):
                actor.read.options(concurrency_group="other")
            return str(aiogpu.get(call.remote()))

        assert await inside.remote(actor) == "read"


async def test_a_call_has_a_number_of_results_of_its_own() -> None:
    one_group = aiogpu.remote(Leaving)
    async with aiogpu.init(num_cpus=1):
        actor = await aiogpu.remote(Pairs).remote()
        first, second = actor.pair.options(num_returns=2).remote()
        assert (await first, await second) == (1, 2)
        assert await actor.pair.remote() == (1, 2)
        assert await actor.two.options(num_returns=1).remote() == (3, 4)
        first, second = actor.two.remote()
        assert (await first, await second) == (3, 4)
        assert "Pairs.pair" in repr(actor.pair.options(num_returns=2))
        for method, options, told in (
            (actor.pair, {"concurrency_group": "io"}, "its class names none"),
            (actor.pair, {"max_buffered": 3}, "@aiogpu.method"),
            (actor.pair, {"num_cpus": 3}, "not an option"),
            (actor.pair, {"num_returns": 0}, "num_returns=0"),
            (actor.each, {"num_returns": 2}, "generator"),
        ):
            with pytest.raises(aiogpu.OptionError, match=told):
                method.options(**options)
        assert one_group.limit == 7


class Pairs:
    def pair(self) -> tuple[int, int]:
        return 1, 2

    @aiogpu.method(num_returns=2)
    def two(self) -> tuple[int, int]:
        return 3, 4

    def each(self) -> Any:
        yield 1
