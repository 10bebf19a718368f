"""`@batch`: which calls come together, when they start, how they end, what is kept."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import math
import pickle
import random
import sys
import textwrap
import types
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import cloudpickle
import pytest

import aiogpu
from aiogpu.api import batch as module
from aiogpu.api.batch import BatchQueue
from aiogpu.errors import MisuseError, NoLoopError, OptionError
from tests.support.turns import no_complaints, turns
from tests.unit.api.fakes import outcome

FOREVER = 3600.0
"""Seconds; a batch that is not full does not start in a test."""


class Model:
    """Its batches wait until the test answers them.

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

    def settle(self, results: Any) -> None:
        """Have the last batch return or raise something."""
        gate = self.gates[-1]
        if isinstance(results, BaseException):
            gate.set_exception(results)
        else:
            gate.set_result(results)

    async def began(self, count: int) -> None:
        """Wait until so many batches have begun."""
        while len(self.begun) < count:
            await asyncio.sleep(0)

    async def lives_on(self) -> bool:
        """Tell whether the next batch is as if nothing had been."""
        (caller,) = start(self.soon, "next")
        await self.began(len(self.begun) + 1)
        self.answer()
        return await caller == ("next", 1)


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


async def test_a_full_batch_starts_at_once(model: Model) -> None:
    """Its end does not make the next one due."""
    callers = start(model.full, 1, 2)
    await turns()
    assert model.begun == []
    callers += start(model.full, 3, 4)
    await model.began(1)
    model.answer()
    assert await asyncio.gather(*callers[:3]) == [(1, 3), (2, 3), (3, 3)]
    await turns()
    assert model.begun == [[1, 2, 3]]
    callers += start(model.full, 5, 6)
    await model.began(2)
    model.answer()
    assert model.begun[1] == [4, 5, 6]
    await asyncio.gather(*callers)


async def test_the_first_waits_for_others_and_no_longer(model: Model) -> None:
    loop = asyncio.get_running_loop()
    first, *_ = start(model.later, 1)
    await turns()
    began = loop.time()
    callers = start(model.later, 2)
    await turns()
    first.cancel()  # it is the second's arrival that counts
    await turns()
    callers += start(model.later, 3)
    while not model.begun:
        await asyncio.wait(callers, timeout=0.001)
    # A millisecond is what uvloop's clock tells.
    assert loop.time() - began >= 0.099
    model.answer()
    assert await asyncio.gather(*callers) == [(2, 2), (3, 2)]


@pytest.mark.parametrize("is_due", [True, False])
async def test_a_call_that_came_while_a_batch_ran_waits_its_own_time(
    model: Model, is_due: bool
) -> None:
    loop = asyncio.get_running_loop()
    callers = start(model.later, 1, 2, 3)
    await model.began(1)
    came = loop.time()
    callers += start(model.later, 4)
    await asyncio.wait(callers, timeout=0.11 if is_due else 0)
    assert model.begun == [[1, 2, 3]]
    model.answer()
    await turns()
    if is_due:
        assert len(model.begun) == 2
    while len(model.begun) < 2:
        await asyncio.wait(callers[3:], timeout=0.001)
    assert loop.time() - came >= 0.099
    model.answer()
    assert await asyncio.gather(*callers) == [(1, 3), (2, 3), (3, 3), (4, 1)]


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


# What shares batches: one method of one instance on one loop.


async def test_equal_instances_without_a_hash_are_told_apart() -> None:
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


def test_without_a_loop_it_says_so() -> None:
    coroutine = Immediate().call(1)
    with pytest.raises(NoLoopError, match=r"Immediate\.call .* none is running"):
        coroutine.send(None)


# How calls end: what the batch raises, and what it returns.


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
        ((1, 2, 3), "returned a tuple of 3"),
    ],
)
async def test_what_is_no_list_of_as_many_is_told_to_every_caller(
    model: Model, results: Any, words: str
) -> None:
    callers = start(model.soon, 1, 2)
    await model.began(1)
    model.settle(results)
    for caller in callers:
        with pytest.raises(MisuseError, match=words) as caught:
            await caller
        assert str(caught.value).startswith("Model.soon was given a list of 2 and must")
    assert await model.lives_on()


async def test_an_exception_among_the_results_is_one_callers(model: Model) -> None:
    """As `asyncio.gather(..., return_exceptions=True)` gives them."""
    callers = start(model.soon, 1, 2, 3)
    await model.began(1)
    error = ValueError("not this one")
    model.settle([ValueError, error, StopIteration(7)])
    assert await callers[0] is ValueError
    assert await outcome(callers[1]) is error
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        await callers[2]
    assert isinstance(caught.value.__cause__, StopIteration)
    callers = start(model.soon, 1, 2)
    await model.began(2)
    model.settle([asyncio.CancelledError(), 2])
    await asyncio.wait(callers)
    assert callers[0].cancelled()
    assert callers[1].result() == 2
    assert await model.lives_on()


# Callers that go.


async def test_no_batch_starts_for_callers_that_have_gone(model: Model) -> None:
    for method, items in (
        (model.soon, [1, 2]),
        (model.later, [1, 2]),
        (model.full, [1, 2]),
        (model.full, [1, 2, 3]),  # which is formed and has not begun
    ):
        callers = start(method, *items)
        await asyncio.sleep(0)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
        await turns()
    assert model.begun == []
    assert await model.lives_on()


async def test_a_running_batch_goes_with_its_last_caller(model: Model) -> None:
    callers = start(model.soon, 1, 2)
    await model.began(1)
    callers += start(model.soon, 3)
    await turns()
    callers[0].cancel()
    await turns()
    assert model.ended == ["not"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(callers[1], 0.001)
    await model.began(2)
    assert model.ended == ["CancelledError", "not"]
    model.answer()
    assert await callers[2] == (3, 1)


async def test_a_batch_that_ignores_its_cancellation_holds_back_the_next() -> None:
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


async def test_a_caller_that_is_closed_has_gone(model: Model) -> None:
    """A coroutine driven by hand, which nobody cancels."""
    for begun in (0, 1):
        coroutine: Any = model.soon(1)
        coroutine.send(None)
        await model.began(begun)
        coroutine.close()
        await turns()
        assert model.ended == ["CancelledError"] * begun


# What is kept.


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Objects go by their reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Item:
    """Something large."""


def queues() -> list[BatchQueue]:
    return [each for each in gc.get_objects() if isinstance(each, BatchQueue)]


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
        model.settle(items)
    elif end == "error":
        model.settle(ValueError("all"))
    elif end == "item error":
        model.settle([ValueError("a"), ValueError("b")])
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
    assert queues() == []
    del model
    assert [ref() for ref in gone] == [None, None, None]


# Whatever happens.


@pytest.mark.parametrize("seed", range(12))
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


# The decorator.


@aiogpu.batch(max_size=4)
async def double(numbers: list[int]) -> list[int]:
    """Twice each number."""
    return [number * 2 for number in numbers]


class Scaler:
    """Remembers what came together."""

    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.batches: list[list[int]] = []

    @aiogpu.batch(max_size=4)
    async def scale(self, numbers: list[int]) -> list[int]:
        """Each number times the factor."""
        self.batches.append(numbers)
        return [number * self.factor for number in numbers]

    @staticmethod
    @aiogpu.batch(max_size=4)
    async def negate(numbers: list[int]) -> list[int]:
        return [-number for number in numbers]

    @classmethod
    @aiogpu.batch(max_size=4)
    async def name(cls, numbers: list[int]) -> list[str]:
        return [f"{cls.__name__} {number} of {len(numbers)}" for number in numbers]


async def test_functions_and_methods_of_all_kinds_are_batched() -> None:
    scaler = Scaler(3)
    assert await asyncio.gather(double(1), double(2)) == [2, 4]
    assert await asyncio.gather(scaler.negate(1), Scaler.negate(2)) == [-1, -2]
    names = await asyncio.gather(scaler.name(1), Scaler.name(2))
    assert names == ["Scaler 1 of 2", "Scaler 2 of 2"]

    class Shifter(Scaler):
        @aiogpu.batch(max_size=2)
        async def scale(self, numbers: list[int]) -> list[int]:
            above = super().scale
            return [1 + n for n in await asyncio.gather(*map(above, numbers))]

    shifter = Shifter(10)
    assert await asyncio.gather(*map(shifter.scale, range(3))) == [1, 11, 21]
    assert shifter.batches == [[0, 1], [2]]


async def test_it_looks_like_its_function_and_takes_one_item() -> None:
    scaler: Any = Scaler(2)
    assert Scaler.scale.__name__ == "scale"
    assert Scaler.scale.__qualname__ == "Scaler.scale"
    assert Scaler.scale.__module__ == __name__
    assert Scaler.scale.__doc__ == "Each number times the factor."
    assert inspect.iscoroutinefunction(Scaler.scale)
    assert inspect.iscoroutinefunction(scaler.scale)
    assert str(inspect.signature(Scaler.scale)) == "(self, item, /)"
    assert str(inspect.signature(scaler.scale)) == "(item, /)"
    assert str(inspect.signature(double)) == "(item, /)"
    assert inspect.get_annotations(Scaler.scale) == {}
    for args, kwargs in (((1, 2), {}), ((), {}), ((), {"numbers": 1})):
        with pytest.raises(TypeError, match=r"positional|keyword"):
            scaler.scale(*args, **kwargs)
    wrapped: Any = inspect.unwrap(Scaler.scale)
    assert await wrapped(scaler, [1, 2, 3, 4, 5]) == [2, 4, 6, 8, 10]
    assert scaler.batches == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("max_size", 0, "max_size=0 must be a whole number of items, 1 or more."),
        *(("max_size", value, "must") for value in (-1, 2.0, True, "8", None)),
        ("max_wait", -0.1, "max_wait=-0.1 must be a number of seconds, 0 or more."),
        *(("max_wait", value, "must") for value in (math.nan, math.inf, True, "1")),
        ("max_wait", None, "must"),
        ("max_concurrency", 0, "max_concurrency=0 must be a whole number of batches"),
        *(("max_concurrency", value, "must") for value in (False, 1.5)),
    ],
)
def test_an_ill_valued_option_is_named(option: str, value: Any, words: str) -> None:
    options: dict[str, Any] = {"max_size": 8, option: value}
    with pytest.raises(OptionError, match=rf"{option}={value!r} must") as caught:
        aiogpu.batch(**options)
    assert words in str(caught.value)


def test_options_go_by_name_and_a_size_must_be_named() -> None:
    misused: Any = aiogpu.batch
    with pytest.raises(TypeError, match="max_size"):
        misused()
    for given, options in ((double, {}), (8, {"max_size": 8})):
        with pytest.raises(
            MisuseError, match=r"options of batch.. are keyword arguments"
        ) as caught:
            misused(given, **options)
        assert str(caught.value).endswith(" Write `@aiogpu.batch(max_size=...)`.")


class Wrong:
    async def three(self, numbers: list[int], factor: int) -> list[int]:
        return numbers

    async def none() -> list[int]:  # type: ignore[misc]
        return []

    async def __call__(self, numbers: list[int]) -> list[int]:
        return numbers


def refused() -> Iterator[tuple[Any, str]]:
    """Yield what cannot be batched, and what is said of it."""

    async def stream(numbers: list[int]) -> Any:
        yield numbers

    async def two(numbers: list[int], factor: int = 1) -> list[int]:
        return numbers

    async def many(*numbers: int) -> list[int]:
        return [*numbers]

    async def named(*, numbers: list[int]) -> list[int]:
        return numbers

    yield len, "was given <built-in"
    yield lambda numbers: numbers, "is no coroutine function.* Write `async def`, with"
    yield stream, "stream is no coroutine function"
    yield two, r"two\(numbers.*, factor.*\).* it takes one list of items and no more"
    yield many, "one list of items and no more"
    yield named, "one list of items and no more"
    yield Wrong.three, r"Wrong\.three\(self, .* one list of items after self"
    yield Wrong.none, "one list of items after self and no more"
    yield Wrong(), "was given <.*Wrong object.*>; write @aiogpu.batch"
    yield functools.partial(two, factor=1), r"was given functools\.partial"
    yield staticmethod(double), "as a staticmethod; write @staticmethod above @aiogpu"
    yield classmethod(two), "as a classmethod; write @classmethod above"
    remote = aiogpu.remote(two)
    yield remote, "RemoteFunction .*two> was given .* Batch an async method of an actor"


@pytest.mark.parametrize(("thing", "words"), [*refused()])
def test_what_cannot_be_batched_is_refused_in_words(thing: Any, words: str) -> None:
    with pytest.raises(MisuseError, match=words):
        aiogpu.batch(max_size=8)(thing)


# How it is pickled.


async def test_it_goes_by_value_where_it_must() -> None:
    """As the class of a script does, also after it was used, when it knows of loops."""
    source = types.ModuleType("batched_by_value")
    sys.modules[source.__name__] = source
    cloudpickle.register_pickle_by_value(source)
    text = """
        import aiogpu

        @aiogpu.batch(max_size=2, max_wait=0.5, max_concurrency=3)
        async def count(items):
            return [len(items)] * len(items)

        class Counter:
            def __init__(self, start):
                self.start = start

            @aiogpu.batch(max_size=3)
            async def count(self, items):
                return [(type(self).__name__, self.start + len(items))] * len(items)
    """
    exec(textwrap.dedent(text), vars(source))
    count: Callable[[Any], Any] = vars(source)["count"]
    try:
        assert await asyncio.gather(count(1), count(2)) == [2, 2]
        kept = (count, vars(source)["Counter"], vars(source)["Counter"](5))
        payload = cloudpickle.dumps(kept)
    finally:
        cloudpickle.unregister_pickle_by_value(source)
        del sys.modules[source.__name__]
    found, counter, instance = pickle.loads(payload)
    assert found is not count
    assert await asyncio.gather(*map(found, "abcd")) == [2, 2, 2, 2]
    batching = pickle.loads(cloudpickle.dumps(module.Batching(found, 1, 2.5, 3)))
    assert (batching.max_size, batching.max_wait, batching.max_concurrency) == (
        *(1, 2.5, 3),
    )
    assert await asyncio.gather(*map(counter(1).count, "abcd")) == [
        *[("Counter", 4)] * 3,
        ("Counter", 2),
    ]
    assert await instance.count(1) == ("Counter", 6)
    again = pickle.loads(cloudpickle.dumps(cloudpickle.loads(payload)[1]))
    assert await again(1).count(1) == ("Counter", 2)
