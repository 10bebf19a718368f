"""Coroutine calls begin in their caller's order, however Ray brings them."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("ray", reason="Ray is not installed here")
from aiogpu.engines.ray import actors as turns
from aiogpu.engines.ray.actors import Numbers, Turns

pytestmark = pytest.mark.ray


async def begun(numbers: list[int], all_turns: Turns) -> list[int]:
    """In which order they begin that come in this one."""
    order: list[int] = []

    async def call(number: int) -> None:
        await all_turns.come(number)
        order.append(number)

    await asyncio.gather(*map(call, numbers))
    return order


async def test_each_caller_has_its_order() -> None:
    mine, yours, all_turns = Numbers(), Numbers(), Turns()
    sent = [mine.take() for _ in range(5)]
    others = [yours.take() for _ in range(3)]
    order = await begun([*reversed(sent), *reversed(others)], all_turns)
    assert [number for number in order if number in sent] == sent
    assert [number for number in order if number in others] == others
    assert await begun([0, mine.take(), 0], all_turns)


async def test_what_never_comes_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 0.01)
    numbers, all_turns = Numbers(), Turns()
    sent = [numbers.take() for _ in range(6)]
    assert await begun([sent[4], sent[2], sent[3]], all_turns) == sent[2:5]
    assert await begun([sent[5], sent[0]], all_turns) == [sent[5], sent[0]]


async def test_of_few_callers_it_is_known_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "CALLERS", 2)
    all_turns = Turns()
    for _ in range(5):
        await all_turns.come(Numbers().take())
    assert repr(all_turns) == "<Turns of 2 callers>"
