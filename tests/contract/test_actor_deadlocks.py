"""[B12] Actors that wait for each other without end: one of them gets an error."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

import aiogpu
from tests.contract.waiting_actors import Pair, Player, Soft
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
    pytest.mark.needs("deadlocks"),
]

WITHIN = 20
"""Seconds, after which a wait counts as one without end."""


@pytest.mark.parametrize("count", [2, 3])
async def test_a_ring_of_actors(count: int, address: str) -> None:
    async with aiogpu.init(num_cpus=1), asyncio.timeout(WITHIN):
        ring = [Player.options(name=str(i)).remote(str(i)) for i in range(count)]
        with pytest.raises(aiogpu.errors.DeadlockError) as it:
            await ring[0].relay.remote([*ring[1:], ring[0]])
        if address != "inline":
            names = [f"Player '{i % count}'.relay" for i in range(count + 1)]
            waits = [f"{a} waits for {b}" for a, b in pairwise(names)]
            for told in waits:
                assert told in str(it.value)
            assert f"{waits[-1]}, which comes after {names[0]}" in str(it.value)
        # The others go on.
        assert await ring[-1].relay.remote(ring[:-1]) == "".join(
            str(i) for i in (count - 1, *range(count - 1))
        )


@pytest.mark.needs("blocking", "at once")
async def test_two_that_are_called_at_once(gate: Gate) -> None:
    """Each call is queued behind the one that waits; one of them is given up."""
    async with aiogpu.init(num_cpus=1), asyncio.timeout(WITHIN):
        a, b = Player.remote("a"), Player.remote("b")
        calls = [
            a.meet_and_ask.remote([b], gate.path),
            b.meet_and_ask.remote([a], gate.path),
        ]
        await gate.entered("a", "b")
        gate.release("a", "b")
        ended = await asyncio.gather(*calls, return_exceptions=True)
        errors = [one for one in ended if isinstance(one, aiogpu.errors.DeadlockError)]
        assert len(errors) == 1
        assert "answer, which comes after Player.meet_and_ask" in str(errors[0])
        assert {one for one in ended if isinstance(one, str)} <= {"a", "b"}
        assert await a.answer.remote() == "a"


@pytest.mark.parametrize("way", ["ask_by_task", "ask_by_maker"])
async def test_an_actor_that_a_task_or_a_constructor_calls_back(way: str) -> None:
    async with aiogpu.init(num_cpus=2), asyncio.timeout(WITHIN):
        player = Player.remote("p")
        with pytest.raises(aiogpu.AiogpuError) as it:
            await getattr(player, way).remote([player])
        # Of a constructor, the error of the actor that is dead quotes it.
        assert "DeadlockError" in repr(it.value)
        assert await player.answer.remote() == "p"


@pytest.mark.needs("blocking", "threads")
@pytest.mark.parametrize("kind", [Pair, Soft])
async def test_no_wait_that_ends_is_given_up(kind: Any) -> None:
    async with aiogpu.init(num_cpus=2), asyncio.timeout(WITHIN):
        player, other = Player.remote("p"), kind.remote(*("p" * (kind is Pair)))
        assert len(await other.relay.remote([player, other])) == 3
        assert await player.ask_for_a_while.remote([other, player]) == "too late"
