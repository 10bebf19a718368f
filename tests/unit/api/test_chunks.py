"""[B18] Chunks of a `map`: what is packed into one call, opened and tried again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest

import aiogpu
from aiogpu.api import map as window
from aiogpu.api.map import MOST, TARGET, Sizes
from aiogpu.errors import OptionError, SerializationError
from aiogpu.serialization.exceptions import (
    RAISED,
    UNSENDABLE,
    ChunkOutcome,
    pack_failure,
)
from aiogpu.serialization.serializer import dump_result
from tests.support.turns import turns
from tests.unit.api.fakes import FakeEngine, listed, started


@aiogpu.remote
def train(number: Any) -> Any:
    return number


@aiogpu.remote(retry_exceptions=(OSError,), max_retries=3)
def retried(number: Any) -> Any:
    return number


def chunks(engine: FakeEngine) -> list[list[Any]]:
    """Return the items of each call."""
    return [list(call[1:]) for call in engine.calls]


def end(
    engine: FakeEngine,
    call: int,
    error: BaseException | None = None,
    after: int | None = None,
    seconds: float = 1.0,
    kind: str = RAISED,
) -> None:
    """Answer a call, for all its items or for some and what the next raises."""
    values = chunks(engine)[call - 1][:after]
    failure = tuple(pack_failure(0, kind, error, "")) if error else None
    outcome = ChunkOutcome(values, seconds, failure)
    engine.receivers[call].settle(dump_result(outcome))


async def endless() -> AsyncIterator[int]:
    for number in count(1):
        yield number


async def taken_from(queue: asyncio.Queue[int]) -> AsyncIterator[int]:
    while True:
        yield await queue.get()


ordered_or_not = pytest.mark.parametrize("ordered", [True, False])


# What is packed, and when.


@pytest.mark.parametrize("kind", [lambda: count(1), endless])
@ordered_or_not
async def test_a_chunk_is_one_call(
    engine: FakeEngine, kind: Any, ordered: bool
) -> None:
    async with train.map(kind(), chunk=3, limit=7, ordered=ordered) as results:
        task = await started(anext(results))
        assert chunks(engine) == [[1, 2, 3], [4, 5, 6]], "no room for a third"
        assert {call[0] for call in engine.calls} == {0.0}, "none ends early"
        end(engine, 1)
        assert [await task, await anext(results)] == [1, 2]
        await turns(10)
        assert len(engine.calls) == 2, "its last result is ahead still"
        assert await anext(results) == 3
        task = await started(anext(results))
        assert chunks(engine)[2:] == [[7, 8, 9]]
        end(engine, 2)
        assert await task == 4
    assert engine.cancelled == [3]


async def test_many_items_are_read_in_several_turns_of_the_loop(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "SLICE", 25)
    async with train.map(range(1000), chunk=10) as results:
        task = await started(anext(results), 1)
        assert len(engine.calls) == 2
        while len(engine.calls) < 100:
            before = len(engine.calls)
            await asyncio.sleep(0)
            assert len(engine.calls) - before <= 3
        end(engine, 1)
        assert await task == 0


@pytest.mark.parametrize("fill_time", [1e6, 0])
async def test_a_slow_async_iterable_does_not_hold_a_chunk_back(
    engine: FakeEngine, fill_time: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "FILL_TIME", fill_time)
    queue: asyncio.Queue[int] = asyncio.Queue()
    async with train.map(taken_from(queue), chunk=10) as results:
        for number in (1, 2):
            queue.put_nowait(number)
        task = await started(anext(results))
        if fill_time:
            assert engine.calls == [], "others may come"
            for number in range(3, 11):
                queue.put_nowait(number)
            await turns(20)
        while not engine.calls:
            await asyncio.sleep(0)
        assert chunks(engine) == [[*range(1, 11)] if fill_time else [1, 2]]
        end(engine, 1)
        assert [await task, await anext(results)] == [1, 2]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("never")


async def test_a_chunk_that_cannot_be_sent_late_wakes_the_consumer(
    engine: FakeEngine,
) -> None:
    async def unsendable() -> AsyncIterator[Any]:
        yield Unpicklable()
        await asyncio.Event().wait()

    with pytest.raises(SerializationError, match=r"args\[1\]"):
        await anext(train.map(unsendable(), chunk=10))


# What is called again.


@ordered_or_not
async def test_an_item_that_is_tried_again_goes_alone(
    engine: FakeEngine, ordered: bool
) -> None:
    """One try of it is gone; the driver sees to the others."""
    task = await started(listed(retried.map(range(6), chunk=3, ordered=ordered)))
    end(engine, 1, OSError("try again"), after=1)
    await turns(10)
    assert engine.calls[2:] == [(1,), (0.0, 2)]
    assert engine.max_retries == [3, 3, 2, 3]
    engine.receivers[3].settle(dump_result(1))
    end(engine, 4)
    end(engine, 2)
    assert sorted(await task) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("task", "error", "kind"),
    [
        (retried, KeyError(1), RAISED),
        (retried.options(max_retries=0), OSError(1), RAISED),
        (train, OSError(1), RAISED),
        # Its result could not be sent, which the item did not raise.
        (retried.options(retry_exceptions=True), TypeError("no"), UNSENDABLE),
    ],
)
async def test_other_items_are_not_tried_again(
    engine: FakeEngine, task: Any, error: Exception, kind: str
) -> None:
    asked = await started(anext(task.map([1, 2], chunk=2)))
    end(engine, 1, error, after=0, kind=kind)
    raised = SerializationError if kind == UNSENDABLE else type(error)
    with pytest.raises(raised):
        await asked


# Automatic sizes.


def grown(seconds: float, most: int = MOST) -> Sizes:
    """Return sizes that have seen many items which take so long."""
    sizes = Sizes(most)
    for _ in range(100):
        sizes.note(sizes.size, sizes.size * seconds)
    return sizes


@pytest.mark.parametrize(
    ("seconds", "size"),
    [
        *((seconds, TARGET / seconds) for seconds in (1e-6, 1e-5, 1e-4, 1e-3)),
        *((seconds, 1) for seconds in (TARGET, 0.1, 1000.0)),  # slow items go alone
        *((seconds, MOST) for seconds in (0.0, 1e-12)),
    ],
)
def test_calls_take_about_as_long_as_they_shall(seconds: float, size: float) -> None:
    assert grown(seconds).size == pytest.approx(size, rel=0.3)
    assert grown(seconds, 7).size == min(7, grown(seconds).size)


def test_slower_items_count_at_once_and_faster_ones_gradually() -> None:
    sizes = grown(1e-5)
    sizes.note(sizes.size, 1.0)
    assert sizes.size <= TARGET / (1.0 / 400) + 1
    sizes = grown(0.1)
    sizes.note(1, 1e-5)
    assert sizes.size == 1
    for _ in range(100):
        sizes.note(sizes.size, sizes.size * 1e-5)
    assert sizes.size > 300


# What is refused.


@pytest.mark.parametrize("chunk", [0, 2.0, "4", "AUTO", True])
async def test_a_chunk_that_is_none(engine: FakeEngine, chunk: Any) -> None:
    told = f'chunk={chunk!r} must be a whole number of items, 1 or more, "auto"'
    with pytest.raises(OptionError, match=told):
        train.map([1], chunk=chunk)


async def test_a_limit_below_the_chunk(engine: FakeEngine) -> None:
    told = r"limit=9 has no room for a chunk of 10.*160"
    with pytest.raises(OptionError, match=told):
        train.map([1], chunk=10, limit=9)
    await train.map([1], chunk=10, limit=10).aclose()


# Whatever happens.


@pytest.mark.parametrize("seed", range(24))
async def test_whatever_ends_first_each_item_gives_one_result(
    engine: FakeEngine, seed: int
) -> None:
    """Calls end in any order, some of them early, some with an error to try again."""
    chance = random.Random(seed)
    count, ordered = chance.randrange(60), chance.random() < 0.5
    chunk: Any = chance.choice([2, 3, 7, "auto"])
    limit = chance.choice([None, 7, 20, 64])

    async def numbers() -> AsyncIterator[int]:
        for number in range(count):
            if chance.random() < 0.3:
                await asyncio.sleep(0)
            yield number

    iterable: Any = numbers() if chance.random() < 0.5 else range(count)
    results = retried.map(iterable, chunk=chunk, limit=limit, ordered=ordered)
    task = asyncio.ensure_future(listed(results))
    unended: set[int] = set()
    seen = 0
    async with asyncio.timeout(60):
        while not task.done():
            await turns(10)
            unended |= set(range(seen + 1, len(engine.calls) + 1))
            seen = len(engine.calls)
            if limit is not None:
                assert results._window.ahead <= limit
            if unended:
                call = chance.choice(sorted(unended))
                unended.discard(call)
                end_by_chance(engine, call, chance)
    assert (await task if ordered else sorted(await task)) == list(range(count))
    assert engine.cancelled == []


def end_by_chance(engine: FakeEngine, call: int, chance: random.Random) -> None:
    arguments = engine.calls[call - 1]
    if not isinstance(arguments[0], float):
        (item,) = arguments  # it is tried again, alone
        engine.receivers[call].settle(dump_result(item))
    elif chance.random() < 0.2:
        after = chance.randrange(len(arguments) - 1)
        end(engine, call, OSError("again"), after)
    else:
        after = chance.choice([None, None, chance.randrange(1, len(arguments))])
        end(engine, call, None, after, chance.choice([0.0, 1e-4, 1.0]))
