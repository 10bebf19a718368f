"""`aiogpu.util.ActorPool`, the pool of ported Ray programs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

import aiogpu
from aiogpu import errors, sync, util
from tests.contract.sync_tasks import (
    Counter,
    Turns,
    Waiter,
    double,
    sum_by_a_ray_pool,
)

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.fixture
def node(address: str) -> Iterator[Any]:
    with sync.init(address=address, num_cpus=4) as node:
        yield node


def test_results_come_in_either_order(node: Any) -> None:
    turns, actors = Turns.remote(), [Waiter.remote() for _ in range(2)]
    pool: Any = util.ActorPool(actors)
    assert (pool.has_free(), pool.has_next()) == (True, False)
    for name in "abcd":
        pool.submit(lambda actor, name: actor.wait.remote(turns, name), name)
    assert not pool.has_free()
    turns.let.remote("b")
    assert pool.get_next_unordered() == "b"
    with pytest.raises(errors.TaskTimeoutError, match="call again to go on waiting"):
        pool.get_next(timeout=0.01)
    turns.let.remote("a", "c", "d")
    assert [pool.get_next() for _ in range(3)] == ["a", "c", "d"]
    assert (pool.has_free(), pool.has_next()) == (True, False)
    with pytest.raises(errors.MisuseError, match="nothing to wait for"):
        pool.get_next()
    seen = sync.get([actor.seen.remote() for actor in actors])
    assert sorted(chain.from_iterable(seen)) == [*"abcd"]


def test_a_function_is_mapped_over_the_actors(node: Any) -> None:
    pool = util.ActorPool([Counter.remote(), Counter.remote()])
    add = lambda actor, k: actor.add.remote(k)  # noqa: E731
    assert list(pool.map(add, [])) == []
    assert list(pool.map(add, [1, 2])) == [1, 2]
    assert sorted(pool.map_unordered(add, (1 for _ in range(2)))) == [2, 3]
    # In the function as elsewhere, a handle arrives as its value.
    pool.submit(add, double.remote(5))
    with pytest.raises(errors.MisuseError, match="take these by get_next"):
        pool.map(add, [1])
    assert pool.get_next() in (12, 13)


def test_errors_of_calls_come_in_turn(node: Any) -> None:
    pool: Any = util.ActorPool([Counter.remote()])
    waiter = Waiter.remote()
    pool.submit(lambda actor, word: waiter.fail.remote(word), "bad")
    pool.submit(lambda actor, k: k, 7)
    pool.submit(lambda actor, k: actor.no_method.remote(k), 7)
    pool.submit(lambda actor, k: actor.add.remote(k), 7)
    with pytest.raises(LookupError, match="bad"):
        pool.get_next()
    with pytest.raises(errors.MisuseError, match="returned 7; it must return a call's"):
        pool.get_next()
    with pytest.raises(AttributeError, match="no_method"):
        pool.get_next_unordered()
    assert pool.get_next() == 7


def test_actors_are_added_and_removed(node: Any) -> None:
    counter = Counter.remote()
    pool = util.ActorPool([counter])
    with pytest.raises(errors.MisuseError, match="already in this pool"):
        pool.push(counter)
    assert pool.pop_idle() == counter
    assert pool.pop_idle() is None
    pool.submit(lambda actor, k: actor.add.remote(k), 3)
    with pytest.raises(errors.MisuseError, match=r"has no actor. Add one by push"):
        pool.get_next()
    pool.push(counter)
    assert pool.get_next() == 3
    sync.kill(counter)
    pool.submit(lambda actor, k: actor.add.remote(k), 3)
    with pytest.raises(aiogpu.ActorDiedError):
        pool.get_next()


def test_a_plain_task_has_a_pool(node: Any) -> None:
    assert sync.get(sum_by_a_ray_pool.remote(4)) == 4
