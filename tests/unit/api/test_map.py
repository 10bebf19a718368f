"""`f.map(...)`: read-ahead, chunks, errors, retries, and the end."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import Any

import pytest

import aiogpu
from aiogpu.api import map as window
from aiogpu.api.map import MOST, TARGET, Sizes
from aiogpu.errors import MisuseError, OptionError, SerializationError, TaskError
from aiogpu.serialization.exceptions import (
    RAISED,
    UNSENDABLE,
    ChunkOutcome,
    pack_failure,
)
from aiogpu.serialization.serializer import dump_result
from tests.support.waits import turns
from tests.unit.api.fakes import FakeEngine, listed, outcome, started


@aiogpu.remote
def train(number: Any) -> Any:
    return number


class Numbers:
    """An endless iterable that counts the items that were read."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for number in count(1):
            self.read += 1
            yield number


class AsyncNumbers:
    """The same for `async for`."""

    def __init__(self) -> None:
        self.read = 0

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in count(1):
            self.read += 1
            yield number


async def later(*numbers: int) -> AsyncIterator[int]:
    for number in numbers:
        yield number


class PausedIterable:
    """An async iterable that yields 1 and then waits.

    Attributes:
        may_end: set to let it end.
        error: raised at the end; None to raise nothing.
        exit: the name of the exception that ended the iteration.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self.may_end = asyncio.Event()
        self.error = error
        self.exit = ""

    async def __aiter__(self) -> AsyncIterator[int]:
        try:
            yield 1
            await self.may_end.wait()
        except BaseException as error:
            await asyncio.sleep(0)
            self.exit = type(error).__name__
            raise
        finally:
            if self.error is not None:
                raise self.error


KINDS = [Numbers, AsyncNumbers]
Kind = Callable[[], Any]
ordered_or_not = pytest.mark.parametrize("ordered", [True, False])


# Read-ahead.


@pytest.mark.parametrize("kind", KINDS)
@ordered_or_not
@pytest.mark.parametrize("limit", [1, 3])
async def test_read_ahead_is_limited(
    engine: FakeEngine, kind: Kind, limit: int, ordered: bool
) -> None:
    """At most `limit` items are read and called beyond the items taken."""
    numbers = kind()
    async with train.map(numbers, limit=limit, ordered=ordered) as results:
        await turns(10)
        assert (numbers.read, len(engine.calls)) == (0, 0), "no item was requested yet"
        for taken in range(6):
            task = await started(anext(results))
            assert numbers.read == len(engine.calls) == taken + limit
            engine.answer(taken + 1)
            assert await task == taken + 1
            await turns(10)
            assert numbers.read == len(engine.calls)
            assert taken <= len(engine.calls) - limit <= taken + 1
    assert engine.cancelled == list(range(len(engine.calls), 6, -1))


@ordered_or_not
@pytest.mark.parametrize("limit", [1, 5, 6])
@pytest.mark.parametrize("kind", [later, lambda *numbers: numbers])
async def test_map_of_a_finite_iterable_ends(
    engine: FakeEngine, limit: int, ordered: bool, kind: Callable[..., Any]
) -> None:
    assert await listed(train.map(kind(), ordered=ordered)) == []
    results = train.map(kind(*range(5)), limit=limit, ordered=ordered)
    task = asyncio.ensure_future(listed(results))
    for number in range(1, 6):
        await turns(10)
        engine.answer(number)
    assert await task == [1, 2, 3, 4, 5]
    assert engine.cancelled == []
    with pytest.raises(StopAsyncIteration):
        await anext(results)
    with pytest.raises(MisuseError, match=r"iterated to their end.*train\.map"):
        await listed(results)


# Errors.


async def test_stop_iteration_raised_by_a_task_is_an_error(engine: FakeEngine) -> None:
    """The original type would end the loop silently."""
    task = await started(listed(train.map(Numbers(), limit=2)))
    engine.fail(1, StopAsyncIteration("from an iterator of its own"))
    error = await outcome(task)
    assert isinstance(error, TaskError)
    assert error.type_name == "StopAsyncIteration"
    assert str(error.__cause__) == "from an iterator of its own"
    assert engine.cancelled == [2]


@ordered_or_not
@pytest.mark.parametrize("is_async", [True, False])
async def test_error_of_the_iterable_cancels_the_calls(
    engine: FakeEngine, is_async: bool, ordered: bool
) -> None:
    def numbers() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("unreadable")

    async def later_numbers() -> AsyncIterator[int]:
        for number in numbers():
            yield number

    iterable = later_numbers() if is_async else numbers()
    results = train.map(iterable, limit=3, ordered=ordered)
    assert str(await outcome(await started(anext(results)))) == "unreadable"
    assert engine.cancelled == [2, 1]
    with pytest.raises(MisuseError, match="ended with OSError"):
        aiter(results)


@pytest.mark.parametrize(
    "error", [OSError, asyncio.CancelledError, asyncio.TimeoutError]
)
@ordered_or_not
async def test_async_iterable_that_fails_late_wakes_the_consumer(
    engine: FakeEngine, error: type[BaseException], ordered: bool
) -> None:
    """Also if the iterable was cancelled: no consumer waits for a dead reader."""
    numbers = PausedIterable(error())
    task = await started(anext(train.map(numbers, ordered=ordered)))
    numbers.may_end.set()
    assert isinstance(await outcome(task), error)
    assert engine.cancelled == [1]


# The reader of an async iterable.


async def test_dropped_map_ends_its_async_iterable(engine: FakeEngine) -> None:
    numbers, before = PausedIterable(), asyncio.all_tasks()
    results = train.map(numbers)
    task = await started(anext(results))
    engine.answer(1)
    assert await task == 1
    assert len(asyncio.all_tasks() - before) == 1
    del results, task
    gc.collect()
    await turns(10)
    assert numbers.exit == "CancelledError"
    assert asyncio.all_tasks() == before


async def test_dropped_map_ends_the_generator_that_it_does_not_read(
    engine: FakeEngine,
) -> None:
    """Without the garbage collector's help."""
    ended = []

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(1, 9):
                yield number
        finally:
            ended.append(number)

    results = train.map(numbers(), limit=1)
    task = await started(anext(results))
    engine.answer(1)
    assert await task == 1
    gc.disable()
    try:
        del results, task
        await turns(10)
        assert ended == [2]
    finally:
        gc.enable()


# Refusals, and the length.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"limit": limit}, f"limit={limit} must be a whole number")
            for limit in (0, -1, 2.0, True)
        ),
        ({"ordered": "no"}, "ordered='no'"),
        ({"return_exceptions": 1}, "return_exceptions=1 must be True or False"),
    ],
)
async def test_invalid_options_are_refused(
    engine: FakeEngine, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        train.map([1], **options)


async def test_invalid_arguments_and_consumers_are_refused(engine: FakeEngine) -> None:
    handle = train.remote(1)
    for given, message in (
        ([5], "takes an iterable or an async iterable, not 5"),
        ([handle], "must be awaited first"),
        ([[1], [2]], r"train\.map\(\) takes one .*`zip\(a, b\)`"),
    ):
        with pytest.raises(MisuseError, match=message):
            train.map(*given)  # type: ignore[arg-type]
    handle.cancel()
    with pytest.raises(MisuseError, match=r"write `async for item in train\.map"):
        iter(train.map([1]))  # type: ignore[call-overload]
    async with train.map(Numbers(), limit=2) as results:
        task = await started(anext(results))
        with pytest.raises(MisuseError, match="another asyncio task"):
            await anext(results)
        engine.answer(2)
        assert await task == 2, "the first consumer goes on"


async def test_map_has_the_length_of_its_items(engine: FakeEngine) -> None:
    assert len(train.map([1, 2, 3])) == 3
    assert len(train.map({}, chunk=2)) == 0
    assert bool(train.map([])) is True, "an empty map is true"
    unknown = train.map(iter([1]))
    assert unknown
    with pytest.raises(
        TypeError, match=r"the iterable of train.map\(\) has no len\(\)"
    ):
        len(unknown)


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
    """Answer a call for all its items, or for some of them and an error of the next."""
    values = chunks(engine)[call - 1][:after]
    failure = tuple(pack_failure(0, kind, error, "")) if error else None
    outcome = ChunkOutcome(values, seconds, failure)
    engine.receivers[call].settle(dump_result(outcome))


# Chunks.


@pytest.mark.parametrize("kind", [lambda: count(1), AsyncNumbers])
@ordered_or_not
async def test_chunk_is_one_call(engine: FakeEngine, kind: Any, ordered: bool) -> None:
    async with train.map(kind(), chunk=3, limit=7, ordered=ordered) as results:
        task = await started(anext(results))
        assert chunks(engine) == [[1, 2, 3], [4, 5, 6]], "no room for a third chunk"
        assert {call[0] for call in engine.calls} == {0.0}, "no chunk ends early"
        end(engine, 1)
        assert [await task, await anext(results)] == [1, 2]
        await turns(10)
        assert len(engine.calls) == 2, "its last result is not taken yet"
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
async def test_chunk_of_a_slow_async_iterable_is_sent_after_a_time(
    engine: FakeEngine, fill_time: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "FILL_TIME", fill_time)
    queue: asyncio.Queue[int] = asyncio.Queue()

    async def taken_from_queue() -> AsyncIterator[int]:
        while True:
            yield await queue.get()

    async with train.map(taken_from_queue(), chunk=10) as results:
        for number in (1, 2):
            queue.put_nowait(number)
        task = await started(anext(results))
        if fill_time:
            assert engine.calls == [], "more items may come"
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


async def test_unpicklable_chunk_wakes_the_consumer(engine: FakeEngine) -> None:
    async def unsendable() -> AsyncIterator[Any]:
        yield Unpicklable()
        await asyncio.Event().wait()

    with pytest.raises(SerializationError, match=r"args\[0\]"):
        await anext(train.map(unsendable(), chunk=10))


# Retries.


@ordered_or_not
async def test_retried_item_is_sent_alone(engine: FakeEngine, ordered: bool) -> None:
    """The retry uses one attempt; the driver counts the others."""
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
        # The result could not be sent; the item itself did not fail.
        (retried.options(retry_exceptions=True), TypeError("no"), UNSENDABLE),
    ],
)
async def test_items_with_other_errors_are_not_retried(
    engine: FakeEngine, task: Any, error: Exception, kind: str
) -> None:
    result = await started(anext(task.map([1, 2], chunk=2)))
    end(engine, 1, error, after=0, kind=kind)
    with pytest.raises(SerializationError if kind == UNSENDABLE else type(error)):
        await result


# Automatic sizes.


def grown(seconds: float, most: int = MOST) -> Sizes:
    """Return sizes after many items of `seconds` each."""
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
def test_chunk_sizes_reach_the_target_duration(seconds: float, size: float) -> None:
    assert grown(seconds).size == pytest.approx(size, rel=0.3)
    assert grown(seconds, 7).size == min(7, grown(seconds).size)


def test_chunk_size_shrinks_at_once_and_grows_gradually() -> None:
    sizes = grown(1e-5)
    sizes.note(sizes.size, 1.0)
    assert sizes.size <= TARGET / (1.0 / 400) + 1
    sizes = grown(0.1)
    sizes.note(1, 1e-5)
    assert sizes.size == 1
    for _ in range(100):
        sizes.note(sizes.size, sizes.size * 1e-5)
    assert sizes.size > 300


# Refusals.


@pytest.mark.parametrize("chunk", [0, 2.0, "4", "AUTO", True])
async def test_invalid_chunk_sizes_are_refused(engine: FakeEngine, chunk: Any) -> None:
    message = f'chunk={chunk!r} must be a whole number of items, 1 or more, "auto"'
    with pytest.raises(OptionError, match=message):
        train.map([1], chunk=chunk)


async def test_limit_below_the_chunk_size_is_refused(engine: FakeEngine) -> None:
    with pytest.raises(
        OptionError, match=r"limit=9 has no room for a chunk of 10.*160"
    ):
        train.map([1], chunk=10, limit=9)
    await train.map([1], chunk=10, limit=10).aclose()


# Random events.


@pytest.mark.parametrize("seed", range(24))
async def test_each_item_gives_one_result_after_random_events(
    engine: FakeEngine, seed: int
) -> None:
    """Calls end in any order, some of them early, some with an error to retry."""
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
        (item,) = arguments  # a retried item
        engine.receivers[call].settle(dump_result(item))
    elif chance.random() < 0.2:
        after = chance.randrange(len(arguments) - 1)
        end(engine, call, OSError("again"), after)
    else:
        after = chance.choice([None, None, chance.randrange(1, len(arguments))])
        end(engine, call, None, after, chance.choice([0.0, 1e-4, 1.0]))
