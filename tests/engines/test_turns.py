"""Coroutine calls begin in their caller's order, however Ray brings them."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("ray", reason="Ray is not installed here")
from aiogpu.engines.ray import actor_process
from aiogpu.engines.ray.actor_process import CallOrder, call_numbers

pytestmark = pytest.mark.ray


async def begun(numbers: list[int], order_kept: CallOrder) -> list[int]:
    """In which order they begin that come in this one."""
    order: list[int] = []

    async def call(number: int) -> None:
        await order_kept.wait_turn(number)
        order.append(number)

    await asyncio.gather(*map(call, numbers))
    return order


async def test_each_caller_has_its_order() -> None:
    mine, yours, order_kept = call_numbers(), call_numbers(), CallOrder()
    sent = [next(mine) for _ in range(5)]
    others = [next(yours) for _ in range(3)]
    order = await begun([*reversed(sent), *reversed(others)], order_kept)
    assert [number for number in order if number in sent] == sent
    assert [number for number in order if number in others] == others
    assert await begun([0, next(mine), 0], order_kept)


async def test_what_never_comes_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actor_process, "PATIENCE", 0.01)
    numbers, order_kept = call_numbers(), CallOrder()
    sent = [next(numbers) for _ in range(6)]
    assert await begun([sent[4], sent[2], sent[3]], order_kept) == sent[2:5]
    assert await begun([sent[5], sent[0]], order_kept) == [sent[5], sent[0]]


async def test_of_few_callers_it_is_known_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actor_process, "CALLERS", 2)
    order_kept = CallOrder()
    for _ in range(5):
        await order_kept.wait_turn(next(call_numbers()))
    assert repr(order_kept) == "<CallOrder of 2 callers>"
