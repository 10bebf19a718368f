"""Handles to values of a node that was closed, when the loop has another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiogpu
from tests.contract import shared_tasks as s
from tests.contract import value_tasks as v

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

MIB = 1 << 20
A, B = b"ab"


async def of_closed_node(address: str) -> dict[str, aiogpu.Handle[Any]]:
    """Handles to large values of one byte: awaited, done, and put."""
    async with aiogpu.init(address=address, num_cpus=1):
        awaited, done = s.make.remote(A, MIB), s.make.remote(A, MIB)
        await awaited
        await asyncio.wait([done])
        put = await aiogpu.put(memoryview(bytes([A]) * MIB))
        return {"awaited": awaited, "done": done, "put": put}


async def test_no_task_gets_a_value_of_the_next_node(address: str) -> None:
    """What lies in shared memory has numbers that the next node may give again."""
    handles = await of_closed_node(address)
    async with aiogpu.init(address=address, num_cpus=1):
        others = [await s.make.remote(B, MIB) for _ in range(3)]
        for handle in handles.values():
            with pytest.raises(aiogpu.errors.MisuseError, match="that was closed"):
                s.count.remote(handle, A)
            with pytest.raises(
                (aiogpu.errors.MisuseError, aiogpu.errors.SerializationError),
                match="was closed",
            ):
                v.give.remote([handle])
        assert await s.count.remote(others[0], B) == MIB


async def test_what_was_awaited_may_be_passed_on(address: str) -> None:
    awaited = (await of_closed_node(address))["awaited"]
    async with aiogpu.init(address=address, num_cpus=1):
        assert await s.count.remote(await awaited, A) == MIB


async def test_of_a_service_that_was_left_nothing_more_can_be_seen(
    address: str,
) -> None:
    done = (await of_closed_node(address))["done"]
    if address == "node":
        with pytest.raises(
            aiogpu.errors.DeserializationError, match="its node was closed"
        ):
            await done
    elif address != "ray":
        assert bytes(await done).count(A) == MIB
