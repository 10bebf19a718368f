"""[B18] `f.map(...)`: what is read ahead, called, given back and stopped."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import Any

import pytest

import aiogpu
from aiogpu.errors import MisuseError, OptionError, TaskError
from tests.support.turns import turns
from tests.unit.api.fakes import FakeEngine, listed, outcome, started


@aiogpu.remote
def train(number: Any) -> Any:
    return number


class Numbers:
    """An endless iterable, which counts what is read of it."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for number in count(1):
            self.read += 1
            yield number


class AsyncNumbers:
    """The same by `async for`."""

    def __init__(self) -> None:
        self.read = 0

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in count(1):
            self.read += 1
            yield number


async def later(*numbers: int) -> AsyncIterator[int]:
    for number in numbers:
        yield number


class Held:
    """An async iterable that yields 1 and then waits.

    Attributes:
        may_end: set to have it raise `error`.
        error: what it raises in the end; None to end.
        left: how it was left.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self.may_end = asyncio.Event()
        self.error = error
        self.left = ""

    async def __aiter__(self) -> AsyncIterator[int]:
        try:
            yield 1
            await self.may_end.wait()
        except BaseException as error:
            await asyncio.sleep(0)
            self.left = type(error).__name__
            raise
        finally:
            if self.error is not None:
                raise self.error


KINDS = [Numbers, AsyncNumbers]
Kind = Callable[[], Any]
ordered_or_not = pytest.mark.parametrize("ordered", [True, False])


# What is ahead.


@pytest.mark.parametrize("kind", KINDS)
@ordered_or_not
@pytest.mark.parametrize("limit", [1, 3])
async def test_no_more_than_the_limit_is_ahead(
    engine: FakeEngine, kind: Kind, limit: int, ordered: bool
) -> None:
    """Read and called are never more than `limit` beyond what was taken."""
    numbers = kind()
    async with train.map(numbers, limit=limit, ordered=ordered) as results:
        await turns(10)
        assert (numbers.read, len(engine.calls)) == (0, 0), "nobody has asked yet"
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
async def test_a_finite_iterable_ends(
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


async def test_a_stop_raised_by_a_task_is_no_end(engine: FakeEngine) -> None:
    """[B37] Its own type would end the loop, with no sign of what is missing."""
    task = await started(listed(train.map(Numbers(), limit=2)))
    engine.fail(1, StopAsyncIteration("from an iterator of its own"))
    error = await outcome(task)
    assert isinstance(error, TaskError)
    assert error.type_name == "StopAsyncIteration"
    assert str(error.__cause__) == "from an iterator of its own"
    assert engine.cancelled == [2]


@ordered_or_not
@pytest.mark.parametrize("is_async", [True, False])
async def test_an_error_of_the_iterable_stops_the_rest(
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
async def test_an_async_iterable_that_fails_late_wakes_the_consumer(
    engine: FakeEngine, error: type[BaseException], ordered: bool
) -> None:
    """Also one that was itself cancelled: nobody waits for a reader that has gone."""
    numbers = Held(error())
    task = await started(anext(train.map(numbers, ordered=ordered)))
    numbers.may_end.set()
    assert isinstance(await outcome(task), error)
    assert engine.cancelled == [1]


# The reader of an async iterable.


async def test_dropped_the_reader_of_an_async_iterable_ends(engine: FakeEngine) -> None:
    numbers, before = Held(), asyncio.all_tasks()
    results = train.map(numbers)
    task = await started(anext(results))
    engine.answer(1)
    assert await task == 1
    assert len(asyncio.all_tasks() - before) == 1
    del results, task
    gc.collect()
    await turns(10)
    assert numbers.left == "CancelledError"
    assert asyncio.all_tasks() == before


# What is refused, and its length.


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"limit": 0}, "limit=0 must be a whole number"),
        ({"limit": -1}, "limit=-1 must be a whole number"),
        ({"limit": 2.0}, "limit=2.0 must be a whole number"),
        ({"limit": True}, "limit=True must be a whole number"),
        ({"ordered": "no"}, "ordered='no'"),
        ({"return_exceptions": 1}, "return_exceptions=1 must be True or False"),
    ],
)
async def test_options_that_are_refused(
    engine: FakeEngine, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(OptionError, match=told):
        train.map([1], **options)


async def test_what_is_refused(engine: FakeEngine) -> None:
    handle = train.remote(1)
    for given, told in (
        ([5], "given 5, which is neither"),
        ([handle], "`await` before it"),
        ([[1], [2]], r"train\.map\(\) takes one .*`zip\(a, b\)`"),
    ):
        with pytest.raises(MisuseError, match=told):
            train.map(*given)  # type: ignore[arg-type]
    handle.cancel()
    with pytest.raises(MisuseError, match=r"write `async for item in train\.map"):
        iter(train.map([1]))  # type: ignore[call-overload]
    async with train.map(Numbers(), limit=2) as results:
        task = await started(anext(results))
        with pytest.raises(MisuseError, match="another asyncio task"):
            await anext(results)
        engine.answer(2)
        assert await task == 2, "the one that was first goes on"


async def test_its_length_is_that_of_the_items(engine: FakeEngine) -> None:
    assert len(train.map([1, 2, 3])) == 3
    assert len(train.map({}, chunk=2)) == 0
    assert bool(train.map([])) is True, "a map of nothing is a map"
    unknown = train.map(iter([1]))
    assert unknown
    with pytest.raises(TypeError, match=r"train is mapped over has no len\(\)"):
        len(unknown)
