"""Handles of actors within what is sent by way of Ray, which counts who holds them."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiogpu
from tests.contract import handed_on
from tests.contract import value_tasks as v
from tests.contract.actor_classes import Counter

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("rayed")]


@pytest.fixture
async def node() -> AsyncIterator[Any]:
    async with aiogpu.init(address="ray", num_cpus=4) as session:
        yield session


async def test_a_call_keeps_its_actors_while_it_waits_to_be_sent(node: Any) -> None:
    """Others are sent meanwhile."""
    counter = await Counter.remote(1)
    promised = node._session.new_handle("promised", node._session)
    waiting = handed_on.add_to.remote(counter, promised)
    assert await v.give.remote(2) == 2
    given = v.give.remote(5)
    promised.task_id = given.task_id
    del counter
    gc.collect()
    assert await waiting == 6


async def test_what_was_put_keeps_its_actors(node: Any) -> None:
    counter = await Counter.remote(1)
    small = await aiogpu.put([counter])
    large = await aiogpu.put([counter, bytes(1 << 20)])
    assert await v.give.remote(2) == 2
    del counter
    gc.collect()
    for box in (small, large):
        found = await v.give.remote(box)
        assert await handed_on.add_to.remote(found[0], 1) in (2, 3)


async def test_a_function_that_holds_an_actor_is_refused(node: Any) -> None:
    counter = await Counter.remote(1)

    @aiogpu.remote
    def closure() -> Any:
        return counter

    with pytest.raises(
        aiogpu.errors.SerializationError, match=r"counter.*as an argument"
    ):
        closure.remote()
    assert await counter.add.remote(1) == 2


async def test_an_actor_passes_on_what_it_was_given(node: Any) -> None:
    """A box with a handle goes through three processes unopened."""
    counter = await Counter.remote(1)
    box = v.give.remote(v.give.remote([counter]))
    del counter
    gc.collect()
    (found,) = await box
    assert await found.add.remote(1) == 2
