"""Handles, actors and queues in results are usable without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiogpu
from aiogpu import errors, sync, util
from tests.contract.sync_tasks import (
    Counter,
    Maker,
    double,
    make_counter,
    return_queue,
    start_double,
    use_a_handle,
    yield_handles,
)
from tests.support.waits import LIMIT

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.fixture
def node(address: str) -> Iterator[Any]:
    with sync.init(address=address, num_cpus=4) as node:
        yield node


def test_a_handle_in_a_result_is_waited_for(node: Any) -> None:
    child, [same] = sync.get(start_double.remote(3))
    assert isinstance(child, concurrent.futures.Future)
    assert sync.get(child) == same.result(LIMIT) == 6
    assert concurrent.futures.wait([child, same], LIMIT).done == {child, same}
    assert sync.get(double.remote(child)) == 12, "as an argument"
    again, _ = sync.wait([start_double.remote(4).result(LIMIT)[0]])
    assert sync.get(again) == [8]
    told: list[Any] = []
    in_callback = start_double.remote(5)
    in_callback.add_done_callback(lambda handle: told.append(handle.result()[0]))
    in_callback.result(LIMIT)
    assert sync.get(told) == [10]


def test_an_actor_in_a_result_is_called(node: Any) -> None:
    counter = sync.get(make_counter.remote(5))["counter"]
    assert sync.get([counter.add.remote(), counter.add.remote(2)]) == [6, 8]
    assert sync.get(counter) is counter
    with counter:
        assert counter.add.remote().result(LIMIT) == 9
    with pytest.raises(aiogpu.ActorDiedError):
        counter.add.remote().result(LIMIT)


def test_handles_come_from_each_way_to_a_result(node: Any) -> None:
    maker = Maker.remote()
    pool: Any = sync.ActorPool([maker])
    ported = util.ActorPool([maker])
    ported.submit(lambda actor, x: actor.start.remote(x), 4)
    found = {
        "method": sync.get(maker.start.remote(1))[0],
        "map": next(start_double.map([2]))[0],
        "chunk": next(start_double.map([3], chunk=2))[0],
        "put": sync.get(sync.put([double.remote(5)]))[0],
        "get_next": ported.get_next()[0],
        "pool.map": next(pool.start.map([6]))[0],
    }
    with sync.Executor() as executor:
        found["executor"] = executor.submit(start_double.__wrapped__, 7).result()[0]
    values = {name: handle.result(LIMIT) for name, handle in found.items()}
    assert values == {
        "method": 2,
        "map": 4,
        "chunk": 6,
        "put": 10,
        "get_next": 8,
        "pool.map": 12,
        "executor": 14,
    }


def test_a_generator_yields_handles(node: Any) -> None:
    assert sync.get(list(yield_handles.remote(3))) == [0, 2, 4]


def test_a_queue_carries_handles_and_is_iterated(node: Any) -> None:
    queue: sync.Queue[Any] = sync.Queue()
    queue.put_batch([double.remote(1), [Counter.remote(3)]])
    [received] = sync.get(return_queue.remote(queue))
    received.shutdown()
    handle, [counter] = queue
    assert sync.get(handle) == 2
    assert sync.get(counter.add.remote()) == 4
    assert list(received) == []
    sync.kill(received.actor)
    with pytest.raises(aiogpu.ActorDiedError):
        queue.get()


async def test_threads_and_the_loop_get_handles_of_their_own_kind(address: str) -> None:
    def in_thread() -> list[Any]:
        child, _ = start_double.remote(4).result(LIMIT)
        made = aiogpu.from_thread(make_counter._wrapped.remote, 1).result(LIMIT)
        return [
            child.result(LIMIT),
            made["counter"].add.remote().result(LIMIT),
            aiogpu.from_thread(use_a_handle),
        ]

    async with aiogpu.init(address=address, num_cpus=4):
        assert await asyncio.to_thread(in_thread) == [8, 2, [6, 6]]
        assert await use_a_handle() == [6, 6]


def test_a_class_has_the_attributes_of_the_plain_class(node: Any) -> None:
    assert (Maker.LIMIT, Maker.twice(2), Maker.named()) == (5, 4, "Maker")
    with pytest.raises(AttributeError, match=r"made by `Maker\.remote\(\.\.\.\)`"):
        Maker.start  # noqa: B018
    with pytest.raises(AttributeError, match="has no _hidden"):
        Maker._hidden  # noqa: B018


def test_a_handle_or_an_actor_is_not_what_it_stands_for(node: Any) -> None:
    handle, counter = double.remote(4), Counter.remote()
    advice = r"write `aiogpu\.sync\.get\(\.\.\.\)` around double\.remote"
    with pytest.raises(AttributeError, match=f"has no attribute 'real'; {advice}"):
        _ = handle.real  # type: ignore[attr-defined]
    with pytest.raises(errors.MisuseError, match=f"is not an array; {advice}"):
        np.stack([handle, handle])
    for actor in (counter, sync.ActorPool([counter])):
        with pytest.raises(errors.MisuseError, match="value cannot be set on <Actor"):
            actor.value = 5


def test_what_cannot_be_an_argument_says_what_to_pass(node: Any) -> None:
    maker, pool = Maker.remote(), sync.ActorPool([Maker.remote()])
    for wrong, advice in (
        (maker.start, "pass the actor's handle"),
        (pool, "pass handles of its actors"),
        (pool.start, "pass handles of its actors"),
        (double.map([1]), "pass a list of the results"),
    ):
        with pytest.raises(errors.SerializationError, match=advice):
            return_queue.remote(wrong)


async def test_what_cannot_be_an_argument_on_a_loop_says_what_to_pass() -> None:
    async with aiogpu.init(address="inline", num_cpus=2):
        plain = aiogpu.remote(return_queue.__wrapped__)
        actors = [aiogpu.remote(Maker.__wrapped__).remote()]
        handle = plain.remote(1)
        async with aiogpu.lease(num_cpus=1) as lease:
            pool = aiogpu.ActorPool(actors)
            for wrong, advice in (
                (pool, "pass handles of its actors"),
                (pool.start, "pass handles of its actors"),
                (plain.map([1]), "pass a list of the results"),
                (aiogpu.as_completed([handle]), "pass its handles"),
                (lease, "pass its ids or its environ"),
            ):
                with pytest.raises(errors.SerializationError, match=advice):
                    plain.remote(wrong)
        await handle
