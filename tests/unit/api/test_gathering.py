"""Which calls come together, when they start, and how each of them ends."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import traceback
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import pytest

import aiogpu
from aiogpu.api.batch import BatchQueue
from aiogpu.errors import MisuseError, NoLoopError
from tests.support.turns import no_complaints, turns

FOREVER = 3600.0
"""Seconds; a batch that is not full does not start in a test."""


class Model:
    """Each batch says that it runs and waits until the test answers it.

    Attributes:
        begun: the batches that were called, in order.
        gates: for each of these, what its results are waited for on.
        ended: how each has ended.
    """

    def __init__(self) -> None:
        self.begun: list[list[Any]] = []
        self.gates: list[asyncio.Future[Any]] = []
        self.ended: list[str] = []

    async def run(self, items: list[Any]) -> Any:
        gate = asyncio.get_running_loop().create_future()
        self.begun.append(items)
        self.gates.append(gate)
        number = len(self.ended)
        self.ended.append("not")
        try:
            results = await gate
            self.ended[number] = "returned"
            return results
        except BaseException as error:
            self.ended[number] = type(error).__name__
            raise

    @aiogpu.batch(max_size=3)
    async def soon(self, items: list[Any]) -> Any:
        return await self.run(items)

    @aiogpu.batch(max_size=3, max_wait=FOREVER)
    async def full(self, items: list[Any]) -> Any:
        return await self.run(items)

    @aiogpu.batch(max_size=3, max_wait=0.1)
    async def later(self, items: list[Any]) -> Any:
        return await self.run(items)

    @aiogpu.batch(max_size=2, max_concurrency=2)
    async def two(self, items: list[Any]) -> Any:
        return await self.run(items)

    def answer(self, number: int = -1) -> None:
        """Have a batch return its own items, each with the batch's size."""
        items = self.begun[number]
        self.gates[number].set_result([(item, len(items)) for item in items])

    async def began(self, count: int) -> None:
        """Wait until so many batches have begun."""
        while len(self.begun) < count:
            await asyncio.sleep(0)


class Immediate:
    """Answers without leaving the loop to others."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    @aiogpu.batch(max_size=3)
    async def call(self, items: list[Any]) -> list[Any]:
        self.batches.append(items)
        return items


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with no_complaints():
        yield Model()


def start(function: Any, *items: Any) -> list[asyncio.Task[Any]]:
    """One caller for each item."""
    return [asyncio.ensure_future(function(item)) for item in items]


# Which calls come together, and when they start.


async def test_calls_of_one_turn_come_together(model: Model) -> None:
    callers = start(model.soon, 1, 2)
    await model.began(1)
    assert model.begun == [[1, 2]]
    model.answer()
    assert await asyncio.gather(*callers) == [(1, 2), (2, 2)]


async def test_a_full_batch_starts_at_once(model: Model) -> None:
    callers = start(model.full, 1, 2)
    await turns()
    assert model.begun == []
    callers += start(model.full, 3)
    await model.began(1)
    model.answer()
    assert await asyncio.gather(*callers) == [(1, 3), (2, 3), (3, 3)]


async def test_more_than_a_batch_is_shared_out_in_order(model: Model) -> None:
    callers = start(model.soon, *range(7))
    for number in range(3):
        await model.began(number + 1)
        model.answer()
    assert model.begun == [[0, 1, 2], [3, 4, 5], [6]]
    assert [item for item, _ in await asyncio.gather(*callers)] == [*range(7)]


async def test_the_first_waits_for_others_and_no_longer(model: Model) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    callers = start(model.later, 1)
    await turns()
    callers += start(model.later, 2)
    await turns()
    assert model.begun == []
    while not model.begun:
        await asyncio.wait(callers, timeout=0.001)
    # A millisecond is what uvloop's clock tells.
    assert loop.time() - began >= 0.099
    model.answer()
    assert await asyncio.gather(*callers) == [(1, 2), (2, 2)]


async def test_what_comes_while_a_batch_runs_is_gathered(model: Model) -> None:
    callers = start(model.soon, 1)
    await model.began(1)
    for item in (2, 3):
        callers += start(model.soon, item)
        await turns()
    assert model.begun == [[1]]
    model.answer()
    await model.began(2)
    model.answer()
    assert model.begun == [[1], [2, 3]]
    assert await asyncio.gather(*callers) == [(1, 1), (2, 2), (3, 2)]


async def test_the_end_of_a_batch_makes_the_next_not_due(model: Model) -> None:
    callers = start(model.full, 1, 2, 3, 4)
    await model.began(1)
    model.answer()
    await asyncio.gather(*callers[:3])
    await turns()
    assert model.begun == [[1, 2, 3]]
    callers += start(model.full, 5, 6)
    await model.began(2)
    model.answer()
    assert model.begun[1] == [4, 5, 6]
    await asyncio.gather(*callers)


async def test_what_has_waited_long_enough_starts_when_it_may(model: Model) -> None:
    callers = start(model.later, 1, 2, 3)
    await model.began(1)
    callers += start(model.later, 4)
    await asyncio.wait(callers, timeout=0.11)
    assert model.begun == [[1, 2, 3]]
    model.answer()
    await turns()
    assert len(model.begun) == 2
    model.answer()
    await asyncio.gather(*callers)


async def test_what_has_not_waited_long_enough_goes_on_waiting(model: Model) -> None:
    callers = start(model.later, 1, 2, 3)
    await model.began(1)
    callers += start(model.later, 4)
    await turns()
    model.answer()
    await asyncio.gather(*callers[:3])
    assert model.begun == [[1, 2, 3]]
    callers += start(model.later, 5)
    while len(model.begun) < 2:
        await asyncio.wait(callers[3:], timeout=0.001)
    model.answer()
    assert model.begun[1] == [4, 5]
    await asyncio.gather(*callers)


async def test_who_calls_again_at_once_joins_what_came_meanwhile(model: Model) -> None:
    results = []

    async def client(number: int) -> None:
        results.append(await model.soon(number))
        results.append(await model.soon(number))

    clients = [asyncio.ensure_future(client(number)) for number in (1, 2)]
    await model.began(1)
    clients += start(model.soon, 3)
    await turns()
    model.answer()
    await model.began(2)
    assert model.begun == [[1, 2], [3, 1, 2]]
    model.answer()
    await asyncio.gather(*clients)
    assert sorted(results) == [(1, 2), (1, 3), (2, 2), (2, 3)]


async def test_a_full_batch_begins_before_the_last_ones_callers() -> None:
    """What works elsewhere has the interpreter before callers are woken."""
    story: list[object] = []

    class Elsewhere:
        @aiogpu.batch(max_size=2)
        async def call(self, items: list[int]) -> list[int]:
            story.append(items)
            asyncio.get_running_loop().call_soon(story.append, "polled")
            await turns()
            return items

    elsewhere = Elsewhere()

    async def client(number: int) -> None:
        await elsewhere.call(number)
        story.append(number)

    await asyncio.gather(*map(client, range(4)))
    assert story == [[0, 1], "polled", [2, 3], "polled", 0, 1, 2, 3]


async def test_callers_go_on_before_a_batch_that_holds_the_loop() -> None:
    immediate = Immediate()
    story = []

    async def client(number: int) -> None:
        await immediate.call(number)
        story.append(len(immediate.batches))

    await asyncio.gather(*map(client, range(6)))
    assert immediate.batches == [[0, 1, 2], [3, 4, 5]]
    assert story == [1, 1, 1, 2, 2, 2]


async def test_several_batches_run_at_once_where_they_may(model: Model) -> None:
    callers = start(model.two, *range(5))
    await model.began(2)
    await turns()
    assert model.begun == [[0, 1], [2, 3]]
    model.answer(1)
    await model.began(3)
    assert model.begun[2] == [4]
    callers += start(model.two, 5)
    await turns()
    assert len(model.begun) == 3
    model.answer(0)
    await model.began(4)
    model.answer(2)
    model.answer(3)
    results = await asyncio.gather(*callers)
    assert results == [(0, 2), (1, 2), (2, 2), (3, 2), (4, 1), (5, 1)]


async def test_instances_share_nothing(model: Model) -> None:
    other = Model()
    callers = start(model.full, 1, 2) + start(other.full, 3, 4)
    await turns()
    assert (model.begun, other.begun) == ([], [])
    callers += start(model.full, 5) + start(other.full, 6)
    await model.began(1)
    await other.began(1)
    assert (model.begun, other.begun) == ([[1, 2, 5]], [[3, 4, 6]])
    model.answer()
    other.answer()
    await asyncio.gather(*callers)


async def test_methods_of_an_instance_share_nothing(model: Model) -> None:
    callers = start(model.full, 1, 2) + start(model.soon, 3)
    await model.began(1)
    assert model.begun == [[3]]
    callers += start(model.full, 4)
    await model.began(2)
    assert model.begun == [[3], [1, 2, 4]]
    model.answer(0)
    model.answer(1)
    await asyncio.gather(*callers)


async def test_equal_instances_and_those_without_a_hash_are_told_apart() -> None:
    class Equal:
        __slots__ = ("name",)
        __hash__ = None  # type: ignore[assignment]

        def __init__(self, name: str) -> None:
            self.name = name

        def __eq__(self, other: object) -> bool:
            return True

        @aiogpu.batch(max_size=2)
        async def say(self, items: list[int]) -> list[str]:
            return [f"{self.name}{items}"] * len(items)

    a, b = Equal("a"), Equal("b")
    said = await asyncio.gather(a.say(1), b.say(2), a.say(3))
    assert said == ["a[1, 3]", "b[2]", "a[1, 3]"]


async def test_loops_in_other_threads_share_nothing(model: Model) -> None:
    immediate = Immediate()
    mine = start(immediate.call, 1, 2)
    await asyncio.sleep(0)  # they wait, and the batch has not begun
    theirs: list[object] = []

    async def main() -> None:
        theirs.extend(await asyncio.gather(*map(immediate.call, "ab")))

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    thread.join()
    assert theirs == ["a", "b"]
    assert await asyncio.gather(*mine) == [1, 2]
    assert immediate.batches == [["a", "b"], [1, 2]]


def test_a_loop_after_another_has_nothing_of_it() -> None:
    model = Model()

    async def leave() -> None:
        start(model.full, 1, 2)
        await turns()

    async def fill() -> None:
        callers = start(model.full, 3, 4, 5)
        await model.began(1)
        model.answer()
        await asyncio.gather(*callers)

    asyncio.run(leave())
    asyncio.run(fill())
    assert model.begun == [[3, 4, 5]]


def test_without_a_loop_it_says_so() -> None:
    coroutine = Immediate().call(1)
    with pytest.raises(NoLoopError, match=r"Immediate\.call .* none is running"):
        coroutine.send(None)


# Whose context it is.

WHO: ContextVar[str] = ContextVar("WHO")


async def test_it_runs_in_the_context_of_its_first_caller() -> None:
    class Asker:
        @aiogpu.batch(max_size=2)
        async def who(self, items: list[str]) -> list[str]:
            return [WHO.get()] * len(items)

    asker = Asker()

    async def caller(name: str) -> str:
        WHO.set(name)
        return await asker.who(name)

    tasks = [asyncio.ensure_future(caller(name)) for name in "abcd"]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert [task.result() for task in tasks if not task.cancelled()] == ["a", "a", "d"]


# How calls end: what the batch raises, and what it returns.


async def test_an_exception_reaches_every_caller(model: Model) -> None:
    callers = start(model.soon, 1, 2, 3)
    await model.began(1)
    error = ValueError("too long")
    model.gates[0].set_exception(error)
    found = await asyncio.gather(*callers, return_exceptions=True)
    assert found == [error] * 3
    assert await lives_on(model)


async def lives_on(model: Model) -> bool:
    """Whether the next batch is as if nothing had been."""
    (caller,) = start(model.soon, "next")
    await model.began(len(model.begun) + 1)
    model.answer()
    return await caller == ("next", 1)


async def test_a_traceback_does_not_grow_from_caller_to_caller() -> None:
    class Failing:
        @aiogpu.batch(max_size=100)
        async def fail(self, items: list[int]) -> list[int]:
            raise ValueError(f"{len(items)} are too many")

    failing = Failing()
    lengths = set()

    async def caller(number: int) -> None:
        try:
            await failing.fail(number)
        except ValueError as error:
            frames = traceback.extract_tb(error.__traceback__)
            assert frames[-1].name == "fail"
            lengths.add(len(frames))

    await asyncio.gather(*map(caller, range(100)))
    assert len(lengths) == 1
    assert lengths.pop() < 8


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (None, "returned an object of type NoneType"),
        ({1: 2}, "returned an object of type dict"),
        ("ab", "returned an object of type str"),
        (b"ab", "returned an object of type bytes"),
        ((n for n in (1, 2)), "returned an object of type generator"),
        ([], "returned a list of 0"),
        ([1], "returned a list of 1"),
        ([1, 2, 3], "returned a list of 3"),
        ((1, 2, 3), "returned a tuple of 3"),
    ],
)
async def test_what_is_no_list_of_as_many_is_told_to_every_caller(
    model: Model, results: Any, words: str
) -> None:
    callers = start(model.soon, 1, 2)
    await model.began(1)
    model.gates[0].set_result(results)
    for caller in callers:
        with pytest.raises(MisuseError, match=words) as caught:
            await caller
        assert str(caught.value).startswith("Model.soon was given a list of 2 and must")
    assert await lives_on(model)


@pytest.mark.parametrize("results", [(1, 2), deque([1, 2]), range(1, 3)])
async def test_any_sequence_will_do(model: Model, results: Any) -> None:
    callers = start(model.soon, 1, 2)
    await model.began(1)
    model.gates[0].set_result(results)
    assert await asyncio.gather(*callers) == [1, 2]


async def test_an_exception_among_the_results_is_one_callers(model: Model) -> None:
    callers = start(model.soon, 1, 2, 3)
    await model.began(1)
    error = ValueError("not this one")
    model.gates[0].set_result([1, error, ValueError])
    assert await callers[0] == 1
    with pytest.raises(ValueError, match="not this one") as caught:
        await callers[1]
    assert caught.value is error
    assert await callers[2] is ValueError


async def test_stop_iteration_comes_as_out_of_any_coroutine(model: Model) -> None:
    callers = start(model.soon, 1, 2)
    await model.began(1)
    model.gates[0].set_result([StopIteration(7), 2])
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        await callers[0]
    assert isinstance(caught.value.__cause__, StopIteration)
    assert await callers[1] == 2


async def test_a_cancelled_result_cancels_one_caller(model: Model) -> None:
    """As `asyncio.gather(..., return_exceptions=True)` gives it."""
    callers = start(model.soon, 1, 2)
    await model.began(1)
    model.gates[0].set_result([asyncio.CancelledError(), 2])
    await asyncio.wait(callers)
    assert callers[0].cancelled()
    assert callers[1].result() == 2
    assert await lives_on(model)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_ends_a_program_comes_out_at_its_caller(kind: type[BaseException]) -> None:
    class Ender:
        @aiogpu.batch(max_size=2)
        async def end(self, items: list[int]) -> list[int]:
            raise kind(7)

    async def main() -> str:
        ender = Ender()
        try:
            await ender.end(1)
        except BaseException as error:
            return repr(error)
        return "nothing"

    assert asyncio.run(main()) == repr(kind(7))


async def test_one_that_cancels_itself_cancels_its_callers(model: Model) -> None:
    callers = start(model.soon, 1, 2)
    await model.began(1)
    model.gates[0].cancel()
    await asyncio.wait(callers)
    assert [caller.cancelled() for caller in callers] == [True, True]
    assert await lives_on(model)


# Callers that go.


async def test_who_is_cancelled_takes_the_item_out(model: Model) -> None:
    callers = start(model.full, 1, 2)
    await turns()
    callers[0].cancel()
    await turns()
    callers += start(model.full, 3)
    await turns()
    assert model.begun == []
    callers += start(model.full, 4)
    await model.began(1)
    assert model.begun == [[2, 3, 4]]
    model.answer()
    assert await asyncio.gather(*callers[1:]) == [(2, 3), (3, 3), (4, 3)]
    assert callers[0].cancelled()


async def test_an_item_is_taken_out_until_the_function_is_called(model: Model) -> None:
    callers = start(model.full, 1, 2, 3)
    await asyncio.sleep(0)  # the batch is formed and has not begun
    callers[1].cancel()
    await model.began(1)
    assert model.begun == [[1, 3]]
    model.answer()
    assert await callers[0] == (1, 2)
    assert await callers[2] == (3, 2)


async def test_no_batch_starts_for_those_that_have_gone(model: Model) -> None:
    for method in (model.soon, model.later, model.full):
        callers = start(method, 1, 2)
        await asyncio.sleep(0)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
    callers = start(model.full, 1, 2, 3)
    await asyncio.sleep(0)  # the batch is formed and has not begun
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)
    await turns()
    assert model.begun == []
    assert await lives_on(model)


async def test_the_next_in_line_waits_its_own_time(model: Model) -> None:
    """The first is cancelled: it is the second's arrival that counts."""
    loop = asyncio.get_running_loop()
    first, *_ = start(model.later, 1)
    await asyncio.wait([first], timeout=0.05)
    came = loop.time()
    second, *_ = start(model.later, 2)
    await turns()
    first.cancel()
    while not model.begun:
        await asyncio.wait([second], timeout=0.001)
    assert loop.time() - came >= 0.099
    model.answer()
    assert await second == (2, 1)


async def test_a_running_batch_goes_on_for_those_that_stay(model: Model) -> None:
    callers = start(model.soon, 1, 2, 3)
    await model.began(1)
    callers[0].cancel()
    callers[2].cancel()
    await turns()
    assert model.ended == ["not"]
    model.answer()
    assert await callers[1] == (2, 3)
    assert callers[0].cancelled()
    assert callers[2].cancelled()


async def test_with_the_last_caller_goes_the_batch(model: Model) -> None:
    callers = start(model.soon, 1, 2)
    await model.began(1)
    callers += start(model.soon, 3)
    await turns()
    for caller in callers[:2]:
        caller.cancel()
    await model.began(2)
    assert model.ended == ["CancelledError", "not"]
    model.answer()
    assert await callers[2] == (3, 1)


async def test_a_timeout_of_the_last_caller_cancels_the_batch(model: Model) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(model.soon(1), 0.005)
    await turns()
    assert model.ended == ["CancelledError"]


async def test_a_batch_that_resists_holds_back_the_next() -> None:
    class Stubborn:
        def __init__(self) -> None:
            self.story: list[object] = []
            self.gate = asyncio.get_running_loop().create_future()

        @aiogpu.batch(max_size=2)
        async def hold(self, items: list[int]) -> list[int]:
            self.story.append(items)
            try:
                await self.gate
            except asyncio.CancelledError:
                self.story.append("cancelled")
                self.gate = asyncio.get_running_loop().create_future()
                await self.gate
            self.story.append("ended")
            return items

    stubborn = Stubborn()
    first, *_ = start(stubborn.hold, 1)
    await turns()
    first.cancel()
    await turns()
    second, *_ = start(stubborn.hold, 2)
    await turns()
    assert stubborn.story == [[1], "cancelled"]
    stubborn.gate.set_result(None)
    assert await second == 2
    assert stubborn.story == [[1], "cancelled", "ended", [2], "ended"]
    assert first.cancelled()


async def test_who_is_cancelled_as_the_result_comes_is_cancelled(model: Model) -> None:
    """Also where it was an error: asyncio has nothing to complain of."""
    for outcome in (ValueError("unheard"), [1, 2]):
        callers = start(model.soon, 1, 2)
        await model.began(len(model.begun) + 1)
        gate = model.gates[-1]
        if isinstance(outcome, list):
            gate.set_result(outcome)
        else:
            gate.set_exception(outcome)
        await asyncio.sleep(0)  # both have their result, and have not gone on
        callers[0].cancel()
        await asyncio.wait(callers)
        assert callers[0].cancelled()
        assert not callers[1].cancelled()
        assert callers[1].exception() in (outcome, None)
    assert await lives_on(model)


async def test_an_error_that_nobody_waits_for_is_told_to_the_loop() -> None:
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, what: told.append(f"{what['message']}: {what['exception']}")
    )

    class Untidy:
        @aiogpu.batch(max_size=2)
        async def hold(self, items: list[int]) -> list[int]:
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError("in cleaning up")

    (caller,) = start(Untidy().hold, 1)
    await turns()
    caller.cancel()
    await asyncio.wait([caller])
    await turns()
    gc.collect()
    assert told == ["Task exception was never retrieved: in cleaning up"]


async def test_a_caller_that_is_closed_has_gone(model: Model) -> None:
    """A coroutine driven by hand, which nobody cancels."""
    coroutine: Any = model.soon(1)
    coroutine.send(None)
    coroutine.close()
    await turns()
    assert model.begun == []
    coroutine = model.soon(1)
    coroutine.send(None)
    await model.began(1)
    coroutine.close()
    await turns()
    assert model.ended == ["CancelledError"]


def test_a_loop_that_is_given_up_leaves_nothing() -> None:
    """It was closed with calls in it, which a program ought not to do."""
    model = Model()
    loop = asyncio.new_event_loop()
    told: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, what: told.append(what))

    async def leave(model: Model) -> None:
        start(model.soon, 1, 2)
        start(model.full, 3)
        await turns()

    loop.run_until_complete(leave(model))
    loop.close()
    gone = weakref.ref(model)
    del model, loop
    gc.collect()
    assert gone() is None
    assert {what["message"] for what in told} == {
        "Task was destroyed but it is pending!"
    }


# What is kept.


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What goes, goes by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Item:
    """Something large."""


def gatherings() -> list[BatchQueue]:
    return [each for each in gc.get_objects() if isinstance(each, BatchQueue)]


@pytest.mark.usefixtures("no_collector")
async def test_an_error_that_was_handled_keeps_nothing() -> None:
    class Failing:
        @aiogpu.batch(max_size=2)
        async def fail(self, items: list[Item]) -> list[Item]:
            raise ValueError("all")

    async def call(failing: Failing, item: Item) -> None:
        with suppress(ValueError):
            await failing.fail(item)

    failing, items = Failing(), [Item(), Item()]
    gone = [weakref.ref(each) for each in (failing, *items)]
    await asyncio.gather(*(call(failing, item) for item in items))
    del failing, items
    await turns()
    assert [ref() for ref in gone] == [None, None, None]


@pytest.mark.usefixtures("no_collector")
async def test_no_timer_keeps_what_has_nothing_to_wait_for() -> None:
    class Patient(Model):
        @aiogpu.batch(max_size=3, max_wait=FOREVER, max_concurrency=2)
        async def call(self, items: list[Any]) -> Any:
            return await self.run(items)

    patient = Patient()
    callers = start(patient.call, 1, 2)
    await turns()
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)
    del caller
    assert gatherings() == []

    callers = start(patient.call, *range(5))  # a full batch, and two that wait
    await patient.began(1)
    patient.answer(0)
    await asyncio.wait(callers[:3])
    callers += start(patient.call, 5)
    await patient.began(2)
    patient.answer(1)
    await asyncio.wait(callers)
    await turns()
    assert gatherings() == []


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("end", ["result", "error", "item error", "cancel", "unbegun"])
async def test_nothing_is_kept_of_what_has_ended(end: str) -> None:
    model = Model()
    items = [Item(), Item()]
    gone = [weakref.ref(each) for each in (model, *items)]
    callers = start(model.soon, *items)
    if end == "unbegun":
        await asyncio.sleep(0)
    else:
        await model.began(1)
    if end == "result":
        model.gates[0].set_result(items)
    elif end == "error":
        model.gates[0].set_exception(ValueError("all"))
    elif end == "item error":
        model.gates[0].set_result([ValueError("a"), ValueError("b")])
    else:
        for caller in callers:
            caller.cancel()
    del items
    await asyncio.wait(callers)
    await turns()
    for caller in callers:
        # An exception's traceback holds the frames that it came through.
        if not caller.cancelled() and (error := caller.exception()) is not None:
            error.__traceback__ = None
            del error
    del caller, callers
    await turns()
    assert gatherings() == []
    del model
    assert [ref() for ref in gone] == [None, None, None]


# All of it, as chance has it.


@pytest.mark.parametrize("seed", range(30))
async def test_every_call_gets_its_own_result_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    size, most = chance.randint(1, 5), chance.randint(1, 3)
    wait = chance.choice([0.0, 0.001])
    running: set[int] = set()
    sizes: list[int] = []
    begun: list[int] = []

    class Chancy:
        @aiogpu.batch(max_size=size, max_wait=wait, max_concurrency=most)
        async def call(self, items: list[int]) -> list[Any]:
            running.add(items[0])
            sizes.append(len(items))
            begun.extend(items)
            assert len(running) <= most
            try:
                await turns(chance.choice([0, 0, 1, 2, 7]))
                if chance.random() < 0.1:
                    raise ValueError(items)
                return [
                    LookupError(item) if item % 7 == 0 else (item, items)
                    for item in items
                ]
            finally:
                running.remove(items[0])

    chancy = Chancy()
    callers: list[asyncio.Task[Any]] = []
    for number in range(200):
        callers += start(chancy.call, number)
        if chance.random() < 0.3:
            await turns(chance.randint(0, 3))
        if chance.random() < 0.2:
            chance.choice(callers).cancel()
    await asyncio.wait(callers)
    for number, caller in enumerate(callers):
        if caller.cancelled():
            continue
        error = caller.exception()
        if error is None:
            item, items = caller.result()
            assert (item, number in items) == (number, True)
            assert number % 7
        elif isinstance(error, ValueError):
            assert number in error.args[0]
        else:
            assert isinstance(error, LookupError)
            assert error.args == (number,)
    assert begun == sorted(begun)
    assert len(begun) == len(set(begun))
    assert max(sizes) <= size
