"""[B18] Chunks of a `map` over an engine of paper: what is packed and opened."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

import pytest

import aiogpu
from aiogpu.api import map as window
from aiogpu.api.map import CALLS, GROWTH, LONGEST, MOST, TARGET, Results, Sizes
from aiogpu.api.session import Session
from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import Receiver
from aiogpu.errors import MisuseError, NodeClosedError, OptionError, SerializationError
from aiogpu.serialization.exceptions import (
    RAISED,
    UNSENDABLE,
    ChunkOutcome,
    pack_failure,
)
from aiogpu.serialization.serializer import dump_result, load_arguments
from tests.unit.api.paper_engine import PaperEngine


@aiogpu.remote
def train(number: Any) -> Any:
    return number


@aiogpu.remote(retry_exceptions=(OSError,), max_retries=3)
def retried(number: Any) -> Any:
    return number


class Paper(PaperEngine):
    """Keeps what it is called with, in the order of the calls from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = [()]
        self.retries = [0]
        self.kind = RAISED

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        args, kwargs = load_arguments(payload)
        assert not kwargs
        self.calls.append(args)
        self.retries.append(func.spec.max_retries)
        return super().submit(func, payload, receiver)

    @property
    def items(self) -> list[list[Any]]:
        """What the calls have been made with."""
        return [list(call[1:]) for call in self.calls[1:]]

    def end(
        self,
        call: int,
        error: BaseException | None = None,
        after: int | None = None,
        seconds: float = 1.0,
    ) -> None:
        """Answer a call, for all its items or for some and what the next raises."""
        values = list(self.calls[call][1:])[:after]
        failure = error and tuple(pack_failure(0, self.kind, error, ""))
        outcome = ChunkOutcome(values, seconds, failure or None)
        self.receivers[call].settle(dump_result(outcome))

    @property
    def cancelled(self) -> list[int]:
        return [int(each[7:]) for each in self.story if each.startswith("cancel ")]


@pytest.fixture
async def paper() -> AsyncIterator[Paper]:
    """An engine with an open session."""
    paper = Paper()
    session = Session(paper, asyncio.get_running_loop())  # type: ignore[arg-type]
    session.start_opening()
    await session.opened()
    yield paper
    await session.shutdown()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def asking(results: Results[Any]) -> asyncio.Task[Any]:
    async def ask() -> Any:
        return await anext(results)

    task = asyncio.ensure_future(ask())
    await settled()
    return task


async def listed(results: Results[Any]) -> list[Any]:
    return [result async for result in results]


async def endless() -> AsyncIterator[int]:
    for number in count(1):
        yield number


KINDS = [lambda: count(1), endless]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ordered", [True, False])
async def test_a_chunk_is_one_call(paper: Paper, kind: Any, ordered: bool) -> None:
    async with train.map(kind(), chunk=3, limit=7, ordered=ordered) as results:
        task = await asking(results)
        assert paper.items == [[1, 2, 3], [4, 5, 6]], "no room for a third"
        assert {call[0] for call in paper.calls[1:]} == {0.0}, "none ends early"
        paper.end(1)
        assert [await task, await anext(results)] == [1, 2]
        await settled()
        assert len(paper.items) == 2, "its last result is ahead still"
        assert await anext(results) == 3
        task = await asking(results)
        assert paper.items[2:] == [[7, 8, 9]]
        paper.end(2)
        assert await task == 4
    assert paper.cancelled == [3]


async def test_unordered_chunks_come_as_they_end(paper: Paper) -> None:
    async with train.map(range(9), chunk=3, ordered=False) as results:
        task = await asking(results)
        paper.end(3)
        paper.end(1)
        assert [await task] + [await anext(results) for _ in range(5)] == [
            *(6, 7, 8),
            *(0, 1, 2),
        ]


async def test_without_a_limit_it_counts_calls(paper: Paper) -> None:
    async with train.map(count(1), chunk=10) as results:
        task = await asking(results)
        assert len(paper.items) == CALLS == 256
        assert repr(results).endswith(": are 2560 ahead, 256 calls at most>")
        paper.end(1)
        await task
        assert len(paper.items) == CALLS, "until all ten are taken"


@pytest.mark.parametrize("is_async", [True, False])
async def test_the_last_chunk_is_as_long_as_there_are_items(
    paper: Paper, is_async: bool
) -> None:
    async def later() -> AsyncIterator[int]:
        for number in range(5):
            yield number

    results = train.map(later() if is_async else range(5), chunk=3)
    task = asyncio.ensure_future(listed(results))
    await settled()
    assert paper.items == [[0, 1, 2], [3, 4]]
    paper.end(1)
    paper.end(2)
    assert await task == [0, 1, 2, 3, 4]
    assert paper.cancelled == []


async def test_much_is_read_in_several_turns_of_the_loop(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "SLICE", 25)
    async with train.map(range(1000), chunk=10) as results:
        step = asyncio.ensure_future(results.__anext__())  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert len(paper.items) == 2
        while len(paper.items) < 100:
            before = len(paper.items)
            await asyncio.sleep(0)
            assert len(paper.items) - before <= 3
        paper.end(1)
        assert await step == 0


async def test_a_slow_async_iterable_does_not_hold_a_chunk_back(paper: Paper) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()

    async def later() -> AsyncIterator[int]:
        while True:
            yield await queue.get()

    async with train.map(later(), chunk=10) as results:
        queue.put_nowait(1)
        queue.put_nowait(2)
        task = await asking(results)
        assert paper.items == [], "others may come"
        async with asyncio.timeout(60):
            while not paper.items:
                await asyncio.sleep(0)
        assert paper.items == [[1, 2]]
        paper.end(1)
        assert [await task, await anext(results)] == [1, 2]


async def test_a_chunk_that_cannot_be_sent_late_wakes_who_waits(paper: Paper) -> None:
    async def later() -> AsyncIterator[Any]:
        yield Unpicklable()
        await asyncio.Event().wait()

    with pytest.raises(SerializationError, match=r"args\[1\]"):
        await anext(train.map(later(), chunk=10))


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("never")


@pytest.mark.parametrize("ordered", [True, False])
async def test_an_error_comes_in_its_place_and_ends_it(
    paper: Paper, ordered: bool
) -> None:
    results = train.map(range(9), chunk=3, ordered=ordered)
    task = await asking(results)
    paper.end(1, KeyError("boom"), after=2)
    assert [await task, await anext(results)] == [0, 1]
    assert paper.cancelled == [], "not before it is raised"
    with pytest.raises(KeyError, match="boom"):
        await anext(results)
    assert paper.cancelled == [3, 2]
    with pytest.raises(MisuseError, match="ended with KeyError"):
        await anext(results)


async def test_a_call_that_fails_as_a_whole(paper: Paper) -> None:
    results = train.map(range(9), chunk=3)
    task = await asking(results)
    paper.receivers[1].settle(NodeClosedError("shut down"))
    with pytest.raises(NodeClosedError):
        await task
    assert paper.cancelled == [3, 2]


async def test_closed_amid_a_chunk_no_result_comes(paper: Paper) -> None:
    results = train.map(range(9), chunk=3)
    task = await asking(results)
    paper.end(1, KeyError("boom"), after=2)
    assert await task == 0
    await results.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(results)
    assert paper.cancelled == [3, 2]
    assert repr(results) == "<Results of train: were closed>"


async def test_dropped_amid_a_chunk_the_rest_is_cancelled(paper: Paper) -> None:
    async def leave() -> int:
        async for result in train.map(range(9), chunk=3):
            return result
        raise AssertionError

    task = asyncio.ensure_future(leave())
    await settled()
    paper.end(1)
    assert await task == 0
    await settled()
    assert paper.cancelled == [3, 2]


@pytest.mark.parametrize("ordered", [True, False])
async def test_the_rest_of_a_chunk_that_ended_early_is_called_again(
    paper: Paper, ordered: bool
) -> None:
    results = train.map(range(7), chunk=3, ordered=ordered)
    task = asyncio.ensure_future(listed(results))
    await settled()
    paper.end(1, after=1)
    await settled()
    assert paper.items[3:] == [[1, 2]]
    for call in (2, 3, 4):
        paper.end(call)
    expected = [0, 1, 2, 3, 4, 5, 6] if ordered else [0, 3, 4, 5, 6, 1, 2]
    assert await task == expected


@pytest.mark.parametrize("ordered", [True, False])
async def test_an_item_that_is_tried_again_goes_alone(
    paper: Paper, ordered: bool
) -> None:
    """One try of it is gone; the driver sees to the others."""
    results = retried.map(range(6), chunk=3, ordered=ordered)
    task = asyncio.ensure_future(listed(results))
    await settled()
    paper.end(1, OSError("try again"), after=1)
    await settled()
    assert paper.calls[3:] == [(1,), (0.0, 2)]
    assert paper.retries[1:] == [3, 3, 2, 3]
    paper.receivers[3].settle(dump_result(1))
    paper.end(4)
    paper.end(2)
    assert sorted(await task) == [0, 1, 2, 3, 4, 5]


async def test_others_are_not_tried_again(paper: Paper) -> None:
    for task, error in (
        (retried, KeyError(1)),
        (retried.options(max_retries=0), OSError(1)),
        (train, OSError(1)),
    ):
        results = task.map([1, 2], chunk=2)
        asked = await asking(results)
        paper.end(len(paper.calls) - 1, error, after=0)
        with pytest.raises(type(error)):
            await asked


async def test_what_the_item_did_not_raise_is_no_reason_to_try_again(
    paper: Paper,
) -> None:
    """As with single calls: its result could not be sent."""
    paper.kind = UNSENDABLE
    asked = await asking(retried.options(retry_exceptions=True).map([1, 2], chunk=2))
    paper.end(1, TypeError("no pickle"), after=0)
    with pytest.raises(SerializationError, match="no pickle"):
        await asked


async def test_a_chunk_that_shall_be_larger_goes_where_the_limit_is_reached(
    paper: Paper,
) -> None:
    """Sizes may change while an async iterable fills one."""
    queue: asyncio.Queue[int] = asyncio.Queue()

    async def later() -> AsyncIterator[int]:
        while True:
            yield await queue.get()

    async with train.map(later(), chunk="auto", limit=32) as results:
        chunker = results._window._chunker
        assert chunker is not None
        chunker._sizes.size = 3
        queue.put_nowait(1)
        task = await asking(results)
        chunker._sizes.size = 40
        for number in range(2, 40):
            queue.put_nowait(number)
        for _ in range(10):
            await settled()
        assert paper.items == [list(range(1, 33))]
        task.cancel()
        await asyncio.wait([task])


async def test_automatic_chunks_grow_with_what_is_known(paper: Paper) -> None:
    async with train.map(count(1), chunk="auto", limit=1600) as results:
        task = await asking(results)
        assert paper.items == [[number] for number in range(1, 1601)]
        assert {call[0] for call in paper.calls[1:]} == {LONGEST}
        for call in range(1, 1601):
            paper.end(call, seconds=0.0)
        assert await task == 1
        for number in range(2, 1601):
            assert await anext(results) == number
        sizes = [len(items) for items in paper.items[1600:]]
        assert 1 < max(sizes) <= GROWTH, "no more was seen than chunks of one"
        await asking(results)


async def test_a_named_limit_has_room_for_several_automatic_chunks(
    paper: Paper,
) -> None:
    async with train.map(count(1), chunk="auto", limit=32) as results:
        chunker = results._window._chunker
        assert chunker is not None
        for _ in range(20):
            chunker._sizes.note(1000, 1e-9)
        assert chunker.size == 2
        await (await asked_and_ended(paper, results))
        assert {len(items) for items in paper.items} == {2}


async def asked_and_ended(paper: Paper, results: Results[Any]) -> asyncio.Task[Any]:
    task = await asking(results)
    paper.end(1)
    return task


class TestSizes:
    def grown(self, seconds: float, most: int = MOST) -> Sizes:
        sizes = Sizes(most)
        for _ in range(100):
            sizes.note(sizes.size, sizes.size * seconds)
        return sizes

    @pytest.mark.parametrize("seconds", [1e-6, 1e-5, 1e-4, 1e-3])
    def test_calls_take_about_as_long_as_they_shall(self, seconds: float) -> None:
        assert self.grown(seconds).size * seconds == pytest.approx(TARGET, rel=0.3)

    @pytest.mark.parametrize("seconds", [TARGET, 0.1, 1000.0])
    def test_slow_items_go_alone(self, seconds: float) -> None:
        assert self.grown(seconds).size == 1

    @pytest.mark.parametrize("seconds", [0.0, 1e-12])
    def test_there_is_an_end_to_it(self, seconds: float) -> None:
        assert self.grown(seconds).size == MOST
        assert self.grown(seconds, 7).size == 7

    def test_it_grows_step_by_step(self) -> None:
        sizes = Sizes(MOST)
        for _ in range(3):
            before = sizes.size
            sizes.note(before, 0.0)
            assert sizes.size == GROWTH * before
        sizes.note(1, 0.0)
        assert sizes.size == before * GROWTH, "an old one is no reason to shrink"

    def test_slower_items_are_believed_at_once(self) -> None:
        sizes = self.grown(1e-5)
        sizes.note(sizes.size, 1.0)
        assert sizes.size <= TARGET / (1.0 / 400) + 1

    def test_faster_ones_by_and_by(self) -> None:
        sizes = self.grown(0.1)
        sizes.note(1, 1e-5)
        assert sizes.size == 1
        for _ in range(100):
            sizes.note(sizes.size, sizes.size * 1e-5)
        assert sizes.size > 300


@pytest.mark.parametrize("chunk", [0, -1, 2.0, "4", "AUTO", True])
async def test_a_chunk_that_is_none(paper: Paper, chunk: Any) -> None:
    told = f'chunk={chunk!r} must be a whole number of items, 1 or more, "auto"'
    with pytest.raises(OptionError, match=told):
        train.map([1], chunk=chunk)


async def test_a_limit_below_the_chunk(paper: Paper) -> None:
    with pytest.raises(
        OptionError, match=r"limit=9 has no room for a chunk of 10.*160"
    ):
        train.map([1], chunk=10, limit=9)
    await train.map([1], chunk=10, limit=10).aclose()


@pytest.mark.parametrize("chunk", [None, 1])
async def test_one_item_a_call(paper: Paper, chunk: int | None) -> None:
    async with train.map(count(5), chunk=chunk, limit=2) as results:
        await asking(results)
        assert paper.calls[1:] == [(5,), (6,)], "as `.remote` calls it"
        assert "2 ahead, 2 at most" in repr(results)


async def test_its_length_is_that_of_the_items(paper: Paper) -> None:
    results = train.map([1, 2, 3])
    assert len(results) == 3
    assert len(train.map({}, chunk=2)) == 0
    assert bool(train.map([])) is True, "a map of nothing is a map"

    def numbers() -> Iterator[int]:
        yield 1

    unknown = train.map(numbers())
    assert unknown
    with pytest.raises(TypeError, match=r"train is mapped over has no len\(\)"):
        len(unknown)


@pytest.mark.parametrize("seed", range(60))
async def test_whatever_ends_first_each_item_gives_one_result(
    paper: Paper, seed: int
) -> None:
    """Calls end in any order, some of them early, some with an error to try again."""
    chance = random.Random(seed)
    count, ordered = chance.randrange(60), chance.random() < 0.5
    chunk: Any = chance.choice([2, 3, 7, "auto"])
    limit = chance.choice([None, 7, 20, 64])

    async def later() -> AsyncIterator[int]:
        for number in range(count):
            if chance.random() < 0.3:
                await asyncio.sleep(0)
            yield number

    iterable: Any = later() if chance.random() < 0.5 else range(count)
    results = retried.map(iterable, chunk=chunk, limit=limit, ordered=ordered)
    task = asyncio.ensure_future(listed(results))
    open_calls: set[int] = set()
    seen = 0
    async with asyncio.timeout(60):
        while not task.done():
            await settled()
            open_calls |= set(range(seen + 1, len(paper.calls)))
            seen = len(paper.calls) - 1
            if limit is not None:
                assert results._window.ahead <= limit
            if open_calls:
                call = chance.choice(sorted(open_calls))
                open_calls.discard(call)
                end(paper, call, chance)
    assert (await task if ordered else sorted(await task)) == list(range(count))
    assert paper.cancelled == []


def end(paper: Paper, call: int, chance: random.Random) -> None:
    arguments = paper.calls[call]
    if not isinstance(arguments[0], float):
        (item,) = arguments  # it is tried again, alone
        paper.receivers[call].settle(dump_result(item))
    elif chance.random() < 0.2:
        paper.end(call, OSError("again"), after=chance.randrange(len(arguments) - 1))
    else:
        after = chance.choice([None, None, chance.randrange(1, len(arguments))])
        paper.end(call, after=after, seconds=chance.choice([0.0, 1e-4, 1.0]))
