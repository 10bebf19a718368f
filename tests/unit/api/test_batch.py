"""`@batch`: which calls form a batch, when batches start, and how calls end."""

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
from aiogpu.api.actors import batch as module
from aiogpu.api.actors.batch import BatchQueue
from aiogpu.errors import MisuseError, NoLoopError, OptionError
from tests.support.waits import no_complaints, turns
from tests.unit.api.fakes import outcome

FOREVER = 3600.0
"""Seconds; batches that are not full never start in a test."""


class Model:
    """A class with batched methods, whose batches wait for the test's answer.

    Attributes:
        started: the items of each batch, in order.
        gates: the future that each batch waits for.
        ends: how each batch ended.
    """

    def __init__(self) -> None:
        self.started: list[list[Any]] = []
        self.gates: list[asyncio.Future[Any]] = []
        self.ends: list[str] = []

    async def run(self, items: list[Any]) -> Any:
        gate = asyncio.get_running_loop().create_future()
        self.started.append(items)
        self.gates.append(gate)
        number = len(self.ends)
        self.ends.append("not")
        try:
            results = await gate
            self.ends[number] = "returned"
            return results
        except BaseException as error:
            self.ends[number] = type(error).__name__
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

    def answer(self, number: int = -1) -> None:
        """Let a batch return its items, each with the size of the batch."""
        items = self.started[number]
        self.gates[number].set_result([(item, len(items)) for item in items])

    def settle(self, results: Any) -> None:
        """Let the last batch return or raise something."""
        gate = self.gates[-1]
        if isinstance(results, BaseException):
            gate.set_exception(results)
        else:
            gate.set_result(results)

    async def until_started(self, count: int) -> None:
        """Wait until `count` batches have started."""
        while len(self.started) < count:
            await asyncio.sleep(0)

    async def still_works(self) -> bool:
        """Run another batch."""
        (caller,) = start(self.soon, "next")
        await self.until_started(len(self.started) + 1)
        self.answer()
        return await caller == ("next", 1)


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with no_complaints():
        yield Model()


def start(function: Any, *items: Any) -> list[asyncio.Task[Any]]:
    """Start one caller for each item."""
    return [asyncio.ensure_future(function(item)) for item in items]


# Which calls form a batch, and when batches start.


async def test_full_batch_starts_at_once(model: Model) -> None:
    """The end of a batch does not start a batch that is not full."""
    callers = start(model.full, 1, 2)
    await turns()
    assert model.started == []
    callers += start(model.full, 3, 4)
    await model.until_started(1)
    model.answer()
    assert await asyncio.gather(*callers[:3]) == [(1, 3), (2, 3), (3, 3)]
    await turns()
    assert model.started == [[1, 2, 3]]
    callers += start(model.full, 5, 6)
    await model.until_started(2)
    model.answer()
    assert model.started[1] == [4, 5, 6]
    await asyncio.gather(*callers)


async def test_first_call_waits_at_most_max_wait_for_others(model: Model) -> None:
    loop = asyncio.get_running_loop()
    first, *_ = start(model.later, 1)
    await turns()
    began = loop.time()
    callers = start(model.later, 2)
    await turns()
    first.cancel()  # the arrival of the second call counts
    await turns()
    callers += start(model.later, 3)
    while not model.started:
        await asyncio.wait(callers, timeout=0.001)
    # The clock of uvloop has a resolution of one millisecond.
    assert loop.time() - began >= 0.099
    model.answer()
    assert await asyncio.gather(*callers) == [(2, 2), (3, 2)]


@pytest.mark.parametrize("is_due", [True, False])
async def test_call_during_a_batch_waits_max_wait(model: Model, is_due: bool) -> None:
    loop = asyncio.get_running_loop()
    callers = start(model.later, 1, 2, 3)
    await model.until_started(1)
    arrived = loop.time()
    callers += start(model.later, 4)
    await asyncio.wait(callers, timeout=0.11 if is_due else 0)
    assert model.started == [[1, 2, 3]]
    model.answer()
    await turns()
    if is_due:
        assert len(model.started) == 2
    while len(model.started) < 2:
        await asyncio.wait(callers[3:], timeout=0.001)
    assert loop.time() - arrived >= 0.099
    model.answer()
    assert await asyncio.gather(*callers) == [(1, 3), (2, 3), (3, 3), (4, 1)]


async def test_full_batch_starts_before_earlier_callers_wake() -> None:
    """The next batch starts its work before the callers of the last one wake up."""
    story: list[object] = []

    class Service:
        @aiogpu.batch(max_size=2)
        async def call(self, items: list[int]) -> list[int]:
            story.append(items)
            asyncio.get_running_loop().call_soon(story.append, "polled")
            await turns()
            return items

    service = Service()

    async def client(number: int) -> None:
        await service.call(number)
        story.append(number)

    await asyncio.gather(*map(client, range(4)))
    assert story == [[0, 1], "polled", [2, 3], "polled", 0, 1, 2, 3]


# Batches belong to one method of one instance on one loop.


async def test_equal_unhashable_instances_have_separate_batches() -> None:
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
    results = await asyncio.gather(a.say(1), b.say(2), a.say(3))
    assert results == ["a[1, 3]", "b[2]", "a[1, 3]"]


def test_call_without_a_loop_is_an_error() -> None:
    coroutine = Model().soon(1)
    with pytest.raises(NoLoopError, match=r"Model\.soon .* none is running"):
        coroutine.send(None)


# How calls end.


@pytest.mark.parametrize(
    ("results", "message"),
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
async def test_batch_with_a_wrong_result_fails_every_caller(
    model: Model, results: Any, message: str
) -> None:
    callers = start(model.soon, 1, 2)
    await model.until_started(1)
    model.settle(results)
    for caller in callers:
        with pytest.raises(MisuseError, match=message) as caught:
            await caller
        assert str(caught.value).startswith("Model.soon was given a list of 2 and must")
    assert await model.still_works()


async def test_exception_among_the_results_fails_one_caller(model: Model) -> None:
    """`asyncio.gather(..., return_exceptions=True)` returns such results."""
    callers = start(model.soon, 1, 2, 3)
    await model.until_started(1)
    error = ValueError("not this one")
    model.settle([ValueError, error, StopIteration(7)])
    assert await callers[0] is ValueError
    assert await outcome(callers[1]) is error
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        await callers[2]
    assert isinstance(caught.value.__cause__, StopIteration)
    callers = start(model.soon, 1, 2)
    await model.until_started(2)
    model.settle([asyncio.CancelledError(), 2])
    await asyncio.wait(callers)
    assert callers[0].cancelled()
    assert callers[1].result() == 2
    assert await model.still_works()


# Callers that are cancelled.


async def test_no_batch_starts_for_cancelled_callers(model: Model) -> None:
    for method, items in (
        (model.soon, [1, 2]),
        (model.later, [1, 2]),
        (model.full, [1, 2]),
        (model.full, [1, 2, 3]),  # a full batch that has not started
    ):
        callers = start(method, *items)
        await asyncio.sleep(0)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
        await turns()
    assert model.started == []
    assert await model.still_works()


async def test_running_batch_is_cancelled_with_its_last_caller(model: Model) -> None:
    callers = start(model.soon, 1, 2)
    await model.until_started(1)
    callers += start(model.soon, 3)
    await turns()
    callers[0].cancel()
    await turns()
    assert model.ends == ["not"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(callers[1], 0.001)
    await model.until_started(2)
    assert model.ends == ["CancelledError", "not"]
    model.answer()
    assert await callers[2] == (3, 1)


async def test_batch_that_ignores_its_cancellation_delays_the_next() -> None:
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


async def test_closed_caller_counts_as_cancelled(model: Model) -> None:
    """A coroutine that is driven by hand gets `GeneratorExit`."""
    for started in (0, 1):
        coroutine: Any = model.soon(1)
        coroutine.send(None)
        await model.until_started(started)
        coroutine.close()
        await turns()
        assert model.ends == ["CancelledError"] * started


# Memory.


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Free objects by their reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Item:
    """An item that can have weak references."""


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("end", ["result", "error", "item error", "cancel", "early"])
async def test_ended_calls_leave_no_references(end: str) -> None:
    model = Model()
    items = [Item(), Item()]
    references = [weakref.ref(thing) for thing in (model, *items)]
    callers = start(model.soon, *items)
    if end == "early":
        await asyncio.sleep(0)
    else:
        await model.until_started(1)
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
        # The traceback of an exception references its frames.
        if not caller.cancelled() and (error := caller.exception()) is not None:
            error.__traceback__ = None
            del error
    del caller, callers
    await turns()
    assert not any(isinstance(thing, BatchQueue) for thing in gc.get_objects())
    del model
    assert [reference() for reference in references] == [None, None, None]


# Random events.


@pytest.mark.parametrize("seed", range(12))
async def test_every_call_gets_its_own_result_after_random_events(seed: int) -> None:
    chance = random.Random(seed)
    size, most = chance.randint(1, 5), chance.randint(1, 3)
    wait = chance.choice([0.0, 0.001])
    running: set[int] = set()
    sizes: list[int] = []
    started: list[int] = []

    class Random:
        @aiogpu.batch(max_size=size, max_wait=wait, max_concurrency=most)
        async def call(self, items: list[int]) -> list[Any]:
            running.add(items[0])
            sizes.append(len(items))
            started.extend(items)
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

    instance = Random()
    callers: list[asyncio.Task[Any]] = []
    for number in range(200):
        callers += start(instance.call, number)
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
    assert started == sorted(set(started))
    assert max(sizes) <= size


# The decorator.


@aiogpu.batch(max_size=4)
async def double(numbers: list[int]) -> list[int]:
    """Return twice each number."""
    return [number * 2 for number in numbers]


class Scaler:
    """A class that records its batches."""

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


async def test_all_kinds_of_functions_and_methods_can_be_batched() -> None:
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


async def test_batched_method_has_the_name_of_its_function_and_takes_one_item() -> None:
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
    ("option", "value", "message"),
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
def test_error_names_an_invalid_option(option: str, value: Any, message: str) -> None:
    options: dict[str, Any] = {"max_size": 8, option: value}
    with pytest.raises(OptionError, match=rf"{option}={value!r} must") as caught:
        aiogpu.batch(**options)
    assert message in str(caught.value)


def test_options_are_given_by_name_and_max_size_is_required() -> None:
    misused: Any = aiogpu.batch
    with pytest.raises(TypeError, match="max_size"):
        misused()
    for given, options in ((double, {}), (8, {"max_size": 8})):
        rule = r"options of batch.. are keyword arguments"
        advice = r"Write `@aiogpu.batch\(max_size=...\)`\.$"
        with pytest.raises(MisuseError, match=f"{rule}.* {advice}"):
            misused(given, **options)


class Wrong:
    async def three(self, numbers: list[int], factor: int) -> list[int]:
        return numbers

    async def none() -> list[int]:  # type: ignore[misc]
        return []

    async def __call__(self, numbers: list[int]) -> list[int]:
        return numbers


def refused() -> Iterator[tuple[Any, str]]:
    """Yield objects that cannot be batched, and parts of the error messages."""

    async def stream(numbers: list[int]) -> Any:
        yield numbers

    async def two(numbers: list[int], factor: int = 1) -> list[int]:
        return numbers

    async def many(*numbers: int) -> list[int]:
        return [*numbers]

    async def named(*, numbers: list[int]) -> list[int]:
        return numbers

    yield len, "was given <built-in"
    yield (
        lambda numbers: numbers,
        "needs a coroutine function.* write `async def`, with",
    )
    yield stream, "a coroutine function, and .*stream is none"
    yield (
        two,
        r"two\(numbers.*, factor.*\).* it must take one list of items and nothing else",
    )
    yield many, "one list of items and nothing else"
    yield named, "one list of items and nothing else"
    yield Wrong.three, r"Wrong\.three\(self, .* one list of items after self"
    yield Wrong.none, "one list of items after self and nothing else"
    yield Wrong(), "was given <.*Wrong object.*>; write @aiogpu.batch"
    yield functools.partial(two, factor=1), r"was given functools\.partial"
    yield staticmethod(double), "staticmethod double; write @staticmethod above @aiogpu"
    yield classmethod(two), "the classmethod two; write @classmethod above"
    remote = aiogpu.remote(two)
    yield remote, "RemoteFunction .*two>, which .* Decorate an async method of an actor"


@pytest.mark.parametrize(("thing", "message"), [*refused()])
def test_objects_that_cannot_be_batched_are_refused(thing: Any, message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        aiogpu.batch(max_size=8)(thing)


# Pickling.


async def test_batched_functions_are_pickled_by_value() -> None:
    """Classes of scripts are pickled by value, also after their use on a loop."""
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
        things = (count, vars(source)["Counter"], vars(source)["Counter"](5))
        payload = cloudpickle.dumps(things)
    finally:
        cloudpickle.unregister_pickle_by_value(source)
        del sys.modules[source.__name__]
    copied, counter, instance = pickle.loads(payload)
    assert copied is not count
    assert await asyncio.gather(*map(copied, "abcd")) == [2, 2, 2, 2]
    batching = pickle.loads(cloudpickle.dumps(module.Batching(copied, 1, 2.5, 3)))
    options = batching.max_size, batching.max_wait, batching.max_concurrency
    assert options == (1, 2.5, 3)
    counts = await asyncio.gather(*map(counter(1).count, "abcd"))
    assert counts == [*[("Counter", 4)] * 3, ("Counter", 2)]
    assert await instance.count(1) == ("Counter", 6)
    again = pickle.loads(cloudpickle.dumps(cloudpickle.loads(payload)[1]))
    assert await again(1).count(1) == ("Counter", 2)
