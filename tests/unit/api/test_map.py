"""[B18] `f.map(...)` over an engine of paper: what is read, called and stopped."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import Any

import pytest

import aiogpu
from aiogpu.api.map import DEFAULT_LIMIT, Results
from aiogpu.api.session import Session
from aiogpu.errors import (
    InfeasibleError,
    MisuseError,
    NodeClosedError,
    NoLoopError,
    OptionError,
    SerializationError,
    TaskError,
)
from aiogpu.serialization.serializer import dump_result
from tests.unit.api.paper_engine import PaperEngine


@aiogpu.remote
def train(number: Any) -> Any:
    return number


class Paper(PaperEngine):
    """Calls are known by number, in the order in which they were made from 1."""

    @property
    def called(self) -> int:
        return self.story.count("submit train")

    @property
    def cancelled(self) -> list[int]:
        return [int(each[7:]) for each in self.story if each.startswith("cancel ")]

    def end(self, *calls: int) -> None:
        for call in calls:
            self.receivers[call].settle(dump_result(call))

    def fail(self, call: int, error: Exception) -> None:
        self.receivers[call].settle(error)


@pytest.fixture
async def paper() -> AsyncIterator[Paper]:
    """An engine with an open session, and nothing for asyncio to complain of."""
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, what: told.append(what))
    paper = Paper()
    session = Session(paper, loop)  # type: ignore[arg-type]
    session.start_opening()
    await session.opened()
    yield paper
    await session.shutdown()
    paper.receivers.clear()
    gc.collect()
    assert told == []


class Numbers:
    """An endless iterable of either kind, which counts what is read of it."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for number in count(1):
            self.read += 1
            yield number


class LaterNumbers:
    def __init__(self) -> None:
        self.read = 0

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in count(1):
            self.read += 1
            yield number


KINDS = [Numbers, LaterNumbers]
Kind = Callable[[], Any]


async def settled() -> None:
    """Let everything happen that needs no more than the loop's turns."""
    for _ in range(10):
        await asyncio.sleep(0)


async def asking(results: Results[Any]) -> asyncio.Task[Any]:
    """A task that asks for the next result, and has got as far as it can."""

    async def ask() -> Any:
        return await anext(results)

    task = asyncio.ensure_future(ask())
    await settled()
    return task


async def listed(results: Results[Any]) -> list[Any]:
    return [result async for result in results]


async def ended(task: asyncio.Future[Any]) -> Any:
    (found,) = await asyncio.gather(task, return_exceptions=True)
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_read_or_called_before_it_is_asked(
    paper: Paper, kind: Kind
) -> None:
    numbers = kind()
    results = train.map(numbers)
    await settled()
    assert (numbers.read, paper.called) == (0, 0)
    assert repr(results) == "<Results of train: are 0 ahead, 256 at most>"
    await results.aclose()
    assert repr(results) == "<Results of train: were closed>"


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [1, 3])
async def test_no_more_than_the_limit_is_ahead(
    paper: Paper, kind: Kind, limit: int, ordered: bool
) -> None:
    """Read and called are never more than `limit` beyond what was taken."""
    numbers = kind()
    async with train.map(numbers, limit=limit, ordered=ordered) as results:
        for taken in range(6):
            task = await asking(results)
            assert numbers.read == paper.called == taken + limit
            paper.end(taken + 1)
            assert await task == taken + 1
            await settled()
            assert taken + limit <= numbers.read == paper.called <= taken + 1 + limit
    assert paper.cancelled == list(range(paper.called, 6, -1))


@pytest.mark.parametrize("kind", KINDS)
async def test_in_order_what_has_ended_counts_until_it_is_taken(
    paper: Paper, kind: Kind
) -> None:
    numbers = kind()
    async with train.map(numbers, limit=3) as results:
        first = await asking(results)
        paper.end(2, 3)
        await settled()
        assert not first.done()
        assert paper.called == numbers.read == 3
        paper.end(1)
        assert [await first, await anext(results), await anext(results)] == [1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
async def test_unordered_they_come_as_they_end(paper: Paper, kind: Kind) -> None:
    async with train.map(kind(), limit=3, ordered=False) as results:
        first = await asking(results)
        paper.end(3, 1)
        assert await first == 3
        assert await anext(results) == 1
        second = await asking(results)
        paper.end(5)
        assert await second == 5


async def test_no_limit_named_is_one_all_the_same(paper: Paper) -> None:
    async with train.map(Numbers()) as results:
        task = await asking(results)
        assert paper.called == DEFAULT_LIMIT == 256
        assert "are 256 ahead" in repr(results)
        paper.end(1)
        await task


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 5, 6])
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_finite_iterable_ends(
    paper: Paper, limit: int, ordered: bool, is_async: bool
) -> None:
    async def later() -> AsyncIterator[int]:
        for number in range(5):
            yield number

    iterable = later() if is_async else range(5)
    results = train.map(iterable, limit=limit, ordered=ordered)
    task = asyncio.ensure_future(listed(results))
    for number in range(1, 6):
        await settled()
        paper.end(number)
    assert await task == [1, 2, 3, 4, 5]
    assert paper.cancelled == []
    with pytest.raises(StopAsyncIteration):
        await anext(results)


@pytest.mark.parametrize("ordered", [True, False])
async def test_an_empty_iterable(paper: Paper, ordered: bool) -> None:
    async def none() -> AsyncIterator[int]:
        for _ in ():
            yield 0

    assert await listed(train.map([], ordered=ordered)) == []
    assert await listed(train.map(none(), ordered=ordered)) == []
    assert paper.called == 0


@pytest.mark.parametrize("ordered", [True, False])
async def test_an_error_comes_in_its_place_and_ends_it(
    paper: Paper, ordered: bool
) -> None:
    results = train.map(range(9), limit=5, ordered=ordered)
    first = await asking(results)
    paper.end(1)
    paper.fail(2, KeyError("boom"))
    paper.fail(4, OSError("later, and nobody will ask"))
    assert await first == 1
    with pytest.raises(KeyError, match="boom"):
        await anext(results)
    assert paper.cancelled == [6, 5, 3], "newest first, and not what had ended"
    with pytest.raises(MisuseError, match=r"ended with KeyError.*train\.map"):
        await anext(results)


async def test_a_stop_raised_by_a_task_is_no_end(paper: Paper) -> None:
    """[B37] Its own type would end the loop, with no sign of what is missing."""
    task = asyncio.ensure_future(listed(train.map(Numbers(), limit=2)))
    await settled()
    paper.fail(1, StopAsyncIteration("from an iterator of its own"))
    error = await ended(task)
    assert isinstance(error, TaskError)
    assert error.type_name == "StopAsyncIteration"
    assert str(error.__cause__) == "from an iterator of its own"
    assert paper.cancelled == [2]


async def test_unordered_an_error_overtakes(paper: Paper) -> None:
    results = train.map(range(9), limit=3, ordered=False)
    first = await asking(results)
    paper.fail(3, KeyError("boom"))
    assert isinstance(await ended(first), KeyError)
    assert paper.cancelled == [2, 1]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
async def test_an_error_of_the_iterable_stops_the_rest(
    paper: Paper, is_async: bool, ordered: bool
) -> None:
    def numbers() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("unreadable")

    async def later() -> AsyncIterator[int]:
        for number in numbers():
            yield number

    iterable = later() if is_async else numbers()
    results = train.map(iterable, limit=3, ordered=ordered)
    assert str(await ended(await asking(results))) == "unreadable"
    assert paper.cancelled == [2, 1]
    with pytest.raises(MisuseError, match="ended with OSError"):
        aiter(results)


@pytest.mark.parametrize("ordered", [True, False])
async def test_an_async_iterable_that_fails_late_wakes_who_waits(
    paper: Paper, ordered: bool
) -> None:
    is_broken = asyncio.Event()

    async def later() -> AsyncIterator[int]:
        yield 1
        await is_broken.wait()
        raise OSError("unreadable")

    task = await asking(train.map(later(), ordered=ordered))
    is_broken.set()
    assert str(await ended(task)) == "unreadable"
    assert paper.cancelled == [1]


@pytest.mark.parametrize("kind", [asyncio.CancelledError, asyncio.TimeoutError])
async def test_an_async_iterable_that_was_itself_cancelled(
    paper: Paper, kind: type[BaseException]
) -> None:
    """Nobody waits for a reader that has gone."""

    async def later() -> AsyncIterator[int]:
        yield 1
        raise kind

    task = await asking(train.map(later()))
    assert isinstance(await ended(task), kind)
    assert paper.cancelled == [1]


async def test_what_remote_refuses_is_raised_at_once(paper: Paper) -> None:
    results = train.map([1, threading.Lock()], limit=1)
    first = await asking(results)
    paper.end(1)
    assert await first == 1
    with pytest.raises(SerializationError, match=r"args\[0\]"):
        await anext(results)
    results = train.map([1, threading.Lock()], limit=2)
    assert isinstance(await ended(await asking(results)), SerializationError)
    assert paper.cancelled == [2]
    paper.infeasible.add("train")
    with pytest.raises(InfeasibleError):
        await listed(train.map([1]))


async def test_a_slow_async_iterable_holds_no_result_back(paper: Paper) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()

    async def later() -> AsyncIterator[int]:
        while True:
            yield await queue.get()

    async with train.map(later()) as results:
        for number in (1, 2):
            task = await asking(results)
            assert paper.called == number - 1
            queue.put_nowait(number)
            await settled()
            paper.end(number)
            assert await task == number


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", KINDS)
async def test_break_stops_what_is_ahead(
    paper: Paper, kind: Kind, ordered: bool
) -> None:
    """Nothing but the loop refers to the results, so they go with it."""

    async def leave() -> int:
        async for result in train.map(kind(), limit=3, ordered=ordered):
            return result
        raise AssertionError

    task = asyncio.ensure_future(leave())
    await settled()
    paper.end(1)
    assert await task == 1
    await settled()
    assert set(paper.cancelled) == set(range(2, paper.called + 1)) >= {2, 3}


async def test_an_error_in_the_body_stops_what_is_ahead(paper: Paper) -> None:
    async def fail() -> None:
        async for result in train.map(Numbers(), limit=3):
            raise KeyError(result)

    task = asyncio.ensure_future(fail())
    await settled()
    paper.end(1)
    assert isinstance(await ended(task), KeyError)
    await settled()
    assert paper.cancelled == [3, 2]


@pytest.mark.parametrize("kind", KINDS)
async def test_with_stops_although_the_results_are_kept(
    paper: Paper, kind: Kind
) -> None:
    async with train.map(kind(), limit=2) as results:
        task = await asking(results)
        paper.end(1)
        await task
    assert set(paper.cancelled) == set(range(2, paper.called + 1)) >= {2}
    await results.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(results)
    with pytest.raises(MisuseError, match="were closed"):
        aiter(results)


async def test_a_cancelled_consumer_stops_it_where_it_waits(paper: Paper) -> None:
    results = train.map(Numbers(), limit=2)
    task = asyncio.ensure_future(listed(results))
    await settled()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert paper.cancelled == [2, 1]
    with pytest.raises(MisuseError, match="was cancelled"):
        await anext(results)


async def test_a_cancelled_consumer_stops_it_from_its_body(paper: Paper) -> None:
    async def work() -> None:
        async for _ in train.map(Numbers(), limit=2):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    await settled()
    paper.end(1)
    await settled()
    task.cancel()
    await asyncio.wait([task])
    await settled()
    assert paper.cancelled == [2]


async def test_a_timeout_around_one_result_stops_all(paper: Paper) -> None:
    results = train.map(Numbers(), limit=2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(results), 0.001)
    assert paper.cancelled == [2, 1]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", KINDS)
async def test_closed_by_another_the_loop_ends(
    paper: Paper, kind: Kind, ordered: bool
) -> None:
    results = train.map(kind(), limit=2, ordered=ordered)
    task = asyncio.ensure_future(listed(results))
    await settled()
    await results.aclose()
    assert await task == []
    assert paper.cancelled == [2, 1]
    assert paper.called == 2


@pytest.mark.parametrize("is_waited", [True, False])
async def test_closing_waits_for_the_async_iterable(
    paper: Paper, is_waited: bool
) -> None:
    story = []

    async def later() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            story.append("left")

    results = train.map(later())
    task = await asking(results)
    if not is_waited:
        paper.end(1)
        await task
    await results.aclose()
    assert story == ["left"]
    assert isinstance(await ended(task), StopAsyncIteration if is_waited else int)


async def test_an_async_iterable_that_does_not_hear_of_the_end(paper: Paper) -> None:
    async def later() -> AsyncIterator[int]:
        yield 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            yield 2

    results = train.map(later())
    task = await asking(results)
    await results.aclose()
    assert isinstance(await ended(task), StopAsyncIteration)
    assert (paper.called, paper.cancelled) == (1, [1])


async def test_dropped_the_reader_of_an_async_iterable_ends(paper: Paper) -> None:
    has_left = asyncio.Event()

    async def later() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            has_left.set()

    before = asyncio.all_tasks()
    results = train.map(later())
    task = await asking(results)
    paper.end(1)
    assert await task == 1
    assert len(asyncio.all_tasks() - before) == 1
    del results, task
    gc.collect()
    await asyncio.wait_for(has_left.wait(), 60)
    await settled()
    assert asyncio.all_tasks() == before


async def test_an_iterable_that_fails_when_it_is_left_is_told_of(paper: Paper) -> None:
    told: list[Any] = []
    loop = asyncio.get_running_loop()
    handler = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, what: told.append(what["exception"]))

    async def later() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            raise OSError("in its last act")

    results = train.map(later())
    task = await asking(results)
    paper.end(1)
    await task
    await results.aclose()
    del results, task
    gc.collect()
    loop.set_exception_handler(handler)
    assert [str(error) for error in told] == ["in its last act"]


async def test_dropped_in_another_thread(paper: Paper) -> None:
    results = [train.map(Numbers(), limit=2)]
    task = await asking(results[0])
    paper.end(1)
    await task
    del task
    gc.collect()
    thread = threading.Thread(target=results.clear)
    thread.start()
    await asyncio.to_thread(thread.join)
    await settled()
    assert paper.cancelled == [2]


async def test_a_step_that_is_closed_stops_it(paper: Paper) -> None:
    results = train.map(Numbers(), limit=2)
    step = results.__anext__()
    step.send(None)  # type: ignore[attr-defined]
    assert paper.called == 2
    step.close()  # type: ignore[attr-defined]
    assert paper.cancelled == [], "it may be the garbage collector's doing"
    await settled()
    assert paper.cancelled == [2, 1]
    with pytest.raises(MisuseError, match="was cancelled"):
        await anext(results)


@pytest.mark.parametrize("ordered", [True, False])
async def test_closed_it_keeps_no_handle(paper: Paper, ordered: bool) -> None:
    async with train.map(Numbers(), limit=2, ordered=ordered) as results:
        task = await asking(results)
        paper.end(1)
        await task
        handles = [weakref.ref(handle) for handle in paper.receivers.values()]
        del task
    await settled()
    paper.receivers.clear()
    gc.collect()
    assert [handle() for handle in handles] == [None, None]
    assert repr(results) == "<Results of train: were closed>"


def test_an_interrupt_in_an_async_iterable_is_not_kept_for_later() -> None:
    async def later() -> AsyncIterator[int]:
        yield 1
        raise KeyboardInterrupt

    async def main() -> None:
        paper = Paper()
        session = Session(paper, asyncio.get_running_loop())  # type: ignore[arg-type]
        session.start_opening()
        await session.opened()
        results = train.map(later(), limit=1)
        task = await asking(results)
        paper.end(1)
        await task
        await settled()
        raise AssertionError("the loop went on")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())


def test_dropped_when_its_loop_is_closed() -> None:
    async def begin() -> Results[Any]:
        session = Session(Paper(), asyncio.get_running_loop())  # type: ignore[arg-type]
        session.start_opening()
        await session.opened()
        results = train.map(Numbers(), limit=2)
        step = results.__anext__()
        step.send(None)  # type: ignore[attr-defined]
        kept.append(step)
        return results

    kept: list[Any] = []
    results = asyncio.run(begin())
    assert "2 ahead" in repr(results)
    kept.clear()
    del results
    gc.collect()


async def test_a_node_that_shuts_down_ends_it(paper: Paper) -> None:
    results = train.map(Numbers(), limit=2)
    task = await asking(results)
    for call in (1, 2):
        paper.fail(call, NodeClosedError("shut down"))
    assert isinstance(await ended(task), NodeClosedError)


async def test_the_first_alone_and_then_the_rest(paper: Paper) -> None:
    results = train.map(range(3))
    first = await asking(results)
    paper.end(1, 2, 3)
    assert await first == 1
    assert await listed(results) == [2, 3]


async def test_iterated_a_second_time(paper: Paper) -> None:
    results = train.map([1])
    task = asyncio.ensure_future(listed(results))
    await settled()
    paper.end(1)
    assert await task == [1]
    with pytest.raises(MisuseError, match=r"iterated to their end.*train\.map"):
        await listed(results)


async def test_one_task_iterates(paper: Paper) -> None:
    async with train.map(Numbers(), limit=2) as results:
        task = await asking(results)
        with pytest.raises(MisuseError, match="another asyncio task"):
            await anext(results)
        paper.end(1)
        assert await task == 1, "the one that was first goes on"


@pytest.mark.parametrize("limit", [0, -1, 2.0, "4", True])
async def test_a_limit_that_is_none(paper: Paper, limit: Any) -> None:
    with pytest.raises(OptionError, match=f"limit={limit!r} must be a whole number"):
        train.map([1], limit=limit)


async def test_ordered_is_true_or_false(paper: Paper) -> None:
    with pytest.raises(OptionError, match="ordered='no'"):
        train.map([1], ordered="no")  # type: ignore[arg-type]


async def test_what_is_no_iterable(paper: Paper) -> None:
    with pytest.raises(MisuseError, match="given 5, which is neither"):
        train.map(5)  # type: ignore[arg-type]
    handle = train.remote(1)
    with pytest.raises(MisuseError, match="`await` before it"):
        train.map(handle)  # type: ignore[arg-type]
    handle.cancel()


async def test_in_a_plain_loop(paper: Paper) -> None:
    with pytest.raises(MisuseError, match=r"write `async for item in train\.map"):
        for _ in train.map([1]):  # type: ignore[attr-defined]
            pass


def test_without_a_loop() -> None:
    with pytest.raises(NoLoopError, match=r"aiogpu\.run"):
        train.map([1])


def test_several_iterables_are_told_to_be_zipped() -> None:
    """As `map` of Python and of executors takes them."""
    with pytest.raises(MisuseError, match=r"train\.map\(\) takes one .*`zip\(a, b\)`"):
        train.map([1], [2])  # type: ignore[arg-type]
