"""[B16] [B17] [B18] Maps, `wait` and `as_completed` where values are handed on."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

import aiogpu
from tests.contract import tasks

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@aiogpu.remote
def fill(number: int) -> Any:
    return numpy.full(200_000, number)


@aiogpu.remote
def total(array: Any) -> int:
    return int(array.sum())


@pytest.mark.parametrize("chunk", [None, 3, "auto"])
async def test_items_that_are_handles_arrive_as_their_values(
    address: str, chunk: Any
) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        handles: list[Any] = [tasks.add.remote(number) for number in range(10)]
        sums = tasks.add.map(handles, chunk=chunk)
        assert [each async for each in sums] == list(range(2, 12))


@pytest.mark.parametrize("chunk", [3, "auto"])
async def test_large_items_and_results_in_chunks(address: str, chunk: Any) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        arrays = [each async for each in fill.map(range(10), chunk=chunk)]
        assert [int(array[0]) for array in arrays] == list(range(10))
        sums = [each async for each in total.map(arrays, chunk=chunk)]
        assert sums == [200_000 * number for number in range(10)]


async def test_methods_take_such_items_too(address: str) -> None:
    @aiogpu.remote
    class Adder:
        def total(self, array: Any) -> int:
            return int(array.sum())

    async with aiogpu.init(address=address, num_cpus=2), Adder.remote() as actor:
        handles = [fill.remote(number) for number in range(4)]
        sums = actor.total.map(handles, chunk=2)
        assert [each async for each in sums] == [0, 200_000, 400_000, 600_000]


async def test_a_map_gives_one_result_an_item(address: str) -> None:
    pair = tasks.echo.options(num_returns=2)
    async with aiogpu.init(address=address, num_cpus=1):
        for chunk in (None, 2):
            with pytest.raises(
                aiogpu.errors.MisuseError, match="echo has num_returns=2"
            ):
                pair.map([(1, 2)], chunk=chunk)


async def test_handles_that_were_given_to_a_plain_task(address: str) -> None:
    @aiogpu.remote
    def first(handles: list[Any]) -> list[int]:
        ready, pending = aiogpu.wait(handles, num_returns=2)
        assert (len(ready), len(pending)) == (2, 1)
        return sorted(aiogpu.get(handle) for handle in aiogpu.as_completed(handles))

    async with aiogpu.init(address=address, num_cpus=2):
        handles = [tasks.add.remote(number) for number in range(3)]
        assert await first.remote(handles) == [1, 2, 3]


async def test_a_value_that_was_put_has_ended(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        value: Any = await aiogpu.put(5)
        assert await aiogpu.wait([value]) == ([value], [])
        assert [each async for each in aiogpu.as_completed([value])] == [value]
