"""[B10] Options as large as they may be: every engine serves them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import aiogpu
from tests.contract import bounded_tasks as b
from tests.contract.node_here import node_here

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.fixture(params=["local", "joined", "inline"])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """Two CPUs."""
    async with asyncio.timeout(60):
        if request.param == "joined":
            async with node_here(tmp_path) as here, here.join():
                yield request.param
        else:
            async with aiogpu.init(address=request.param, num_cpus=2):
                yield request.param


async def test_tasks_are_served(node: str) -> None:
    assert await b.give.remote(1) == 1
    assert [number async for number in b.count.remote(3)] == [0, 1, 2]
    assert await asyncio.gather(*b.many.remote()) == list(range(1000))
    ready, _ = await aiogpu.wait([b.give.remote(2)], timeout=b.TIME)
    assert await ready[0] == 2
    with pytest.raises(aiogpu.OptionError, match=f"timeout=1e.300 .* {b.TIME:_}"):
        aiogpu.wait(ready, timeout=1e300)


async def test_so_are_those_that_tasks_start_and_wait_for(node: str) -> None:
    assert await b.give_below.remote(7) == [7, 0, 1, 2]


@pytest.mark.parametrize("kind", [b.Patient, b.Interleaved])
async def test_so_are_actors(kind: type[b.Patient], node: str) -> None:
    async with kind.remote() as actor:  # type: ignore[attr-defined]
        assert await actor.give.remote(1) == 1
        if kind is b.Patient:
            assert [number async for number in actor.count.remote(3)] == [0, 1, 2]
