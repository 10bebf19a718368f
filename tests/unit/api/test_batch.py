"""`@batch` as a decorator: what it takes and refuses, what it makes, how it travels."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import pickle
import sys
import textwrap
import types
from typing import Any

import cloudpickle
import pytest

import aiogpu
from aiogpu.errors import MisuseError, OptionError
from tests.support.program import run


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


async def test_calls_with_one_item_become_one_with_a_list() -> None:
    scaler = Scaler(3)
    assert await asyncio.gather(*map(scaler.scale, range(4))) == [0, 3, 6, 9]
    assert scaler.batches == [[0, 1, 2, 3]]


async def test_a_function_is_batched_as_a_method_is() -> None:
    assert await asyncio.gather(double(1), double(2)) == [2, 4]


async def test_static_and_class_methods_are_batched() -> None:
    scaler = Scaler(1)
    assert await asyncio.gather(scaler.negate(1), Scaler.negate(2)) == [-1, -2]
    names = await asyncio.gather(scaler.name(1), Scaler.name(2))
    assert names == ["Scaler 1 of 2", "Scaler 2 of 2"]


def test_it_looks_like_its_function_and_takes_one_item() -> None:
    assert Scaler.scale.__name__ == "scale"
    assert Scaler.scale.__qualname__ == "Scaler.scale"
    assert Scaler.scale.__module__ == __name__
    assert Scaler.scale.__doc__ == "Each number times the factor."
    assert inspect.iscoroutinefunction(Scaler.scale)
    assert inspect.iscoroutinefunction(Scaler(1).scale)
    assert str(inspect.signature(Scaler.scale)) == "(self, item, /)"
    assert str(inspect.signature(Scaler(1).scale)) == "(item, /)"
    assert str(inspect.signature(double)) == "(item, /)"
    assert inspect.get_annotations(Scaler.scale) == {}


async def test_the_function_as_written_is_there() -> None:
    scaler = Scaler(2)
    wrapped: Any = inspect.unwrap(Scaler.scale)
    assert await wrapped(scaler, [1, 2, 3, 4, 5]) == [2, 4, 6, 8, 10]
    assert scaler.batches == [[1, 2, 3, 4, 5]]


async def test_a_wrong_call_is_a_type_error_and_nothing_is_called() -> None:
    scaler: Any = Scaler(2)
    with pytest.raises(TypeError, match="positional"):
        scaler.scale(1, 2)
    with pytest.raises(TypeError, match="positional"):
        scaler.scale()
    with pytest.raises(TypeError, match="keyword"):
        scaler.scale(numbers=1)
    assert scaler.batches == []


async def test_a_subclass_may_call_and_replace_it() -> None:
    class Shifter(Scaler):
        @aiogpu.batch(max_size=2)
        async def scale(self, numbers: list[int]) -> list[int]:
            above = super().scale
            return [1 + n for n in await asyncio.gather(*map(above, numbers))]

    shifter = Shifter(10)
    assert await asyncio.gather(*map(shifter.scale, range(3))) == [1, 11, 21]
    assert shifter.batches == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("max_size", 0, "max_size=0 must be a whole number of items, 1 or more."),
        ("max_size", -1, "max_size=-1 must"),
        ("max_size", 2.0, r"max_size=2\.0 must"),
        ("max_size", True, "max_size=True must"),
        ("max_size", "8", "max_size='8' must"),
        ("max_size", None, "max_size=None must"),
        ("max_wait", -0.1, "max_wait=-0.1 must be a number of seconds, 0 or more."),
        ("max_wait", math.nan, "max_wait=nan must"),
        ("max_wait", math.inf, "max_wait=inf must"),
        ("max_wait", True, "max_wait=True must"),
        ("max_wait", "1", "max_wait='1' must"),
        ("max_wait", None, "max_wait=None must"),
        ("max_concurrency", 0, "max_concurrency=0 must be a whole number of batches"),
        ("max_concurrency", False, "max_concurrency=False must"),
        ("max_concurrency", 1.5, r"max_concurrency=1\.5 must"),
    ],
)
def test_an_ill_valued_option_is_named(option: str, value: Any, words: str) -> None:
    options: dict[str, Any] = {"max_size": 8, option: value}
    with pytest.raises(OptionError, match=words):
        aiogpu.batch(**options)


def test_options_go_by_name_and_a_size_must_be_named() -> None:
    misused: Any = aiogpu.batch
    with pytest.raises(TypeError, match="max_size"):
        misused(double)
    with pytest.raises(MisuseError, match=r"by name: @aiogpu\.batch\(max_size=32\)"):
        misused(8, max_size=8)
    with pytest.raises(OptionError, match=r"^max_sise is .* Did you mean max_size\?"):
        misused(max_size=8, max_sise=8)


def plain(numbers: list[int]) -> list[int]:
    return numbers


async def stream(numbers: list[int]) -> Any:
    yield numbers


async def two(numbers: list[int], factor: int) -> list[int]:
    return numbers


async def defaulted(numbers: list[int], factor: int = 1) -> list[int]:
    return numbers


async def nothing() -> list[int]:
    return []


async def many(*numbers: int) -> list[int]:
    return [*numbers]


async def named(*, numbers: list[int]) -> list[int]:
    return numbers


class Wrong:
    async def three(self, numbers: list[int], factor: int) -> list[int]:
        return numbers

    async def options(self, numbers: list[int], **options: int) -> list[int]:
        return numbers

    async def none() -> list[int]:  # type: ignore[misc]
        return []

    async def __call__(self, numbers: list[int]) -> list[int]:
        return numbers


@aiogpu.remote
async def far(numbers: list[int]) -> list[int]:
    return numbers


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (plain, "plain is no coroutine function.* Write `async def`, without `yield`"),
        (stream, "stream is no coroutine function"),
        (two, r"two\(numbers.*, factor.*\).* it takes one list of items and no more"),
        (defaulted, "one list of items and no more"),
        (nothing, r"nothing\(\).* cannot be batched"),
        (many, "one list of items and no more"),
        (named, "one list of items and no more"),
        (Wrong.three, r"Wrong\.three\(self, .* one list of items after self"),
        (Wrong.options, "one list of items after self and no more"),
        (Wrong.none, "one list of items after self and no more"),
        (Wrong(), "was given <.*Wrong object.*>; write @aiogpu.batch"),
        (Wrong, "was given <class .*Wrong'>"),
        (functools.partial(two, factor=1), r"was given functools\.partial"),
        (None, "was given None"),
        (8, "was given 8"),
        (staticmethod(double), "as a staticmethod; write @staticmethod above @aiogpu"),
        (classmethod(two), "as a classmethod; write @classmethod above"),
        (far, "RemoteFunction .*far> was given .* Batch an async method of an actor"),
    ],
)
def test_what_cannot_be_batched_is_refused_in_words(thing: Any, words: str) -> None:
    with pytest.raises(MisuseError, match=words):
        aiogpu.batch(max_size=8)(thing)


def test_a_function_inside_another_is_no_method() -> None:
    async def inner(items: list[int], factor: int) -> list[int]:
        return items

    with pytest.raises(MisuseError, match="one list of items and no more"):
        aiogpu.batch(max_size=8)(inner)  # type: ignore[arg-type]


async def test_a_class_inside_a_function_has_methods() -> None:
    class Inner:
        @aiogpu.batch(max_size=8)
        async def method(self, items: list[int]) -> list[int]:
            return items

    assert await Inner().method(1) == 1


def test_it_travels_by_name() -> None:
    for pickler in (pickle, cloudpickle):
        assert pickle.loads(pickler.dumps(double)) is double
        assert pickle.loads(pickler.dumps(Scaler)) is Scaler


async def test_an_instance_travels_and_is_copied_while_calls_wait() -> None:
    scaler = Scaler(2)
    call = asyncio.ensure_future(scaler.scale(1))
    await asyncio.sleep(0)
    sent = pickle.loads(pickle.dumps(scaler))
    copied = copy.deepcopy(scaler)
    assert await asyncio.gather(sent.scale(2), copied.scale(3), call) == [4, 6, 2]
    assert (scaler.batches, sent.batches, copied.batches) == ([[1]], [[2]], [[3]])


async def test_it_travels_by_value() -> None:
    module: Any = types.ModuleType("batched_by_value")
    sys.modules[module.__name__] = module
    cloudpickle.register_pickle_by_value(module)
    source = """
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
    exec(textwrap.dedent(source), vars(module))
    try:
        # Also after it was used, when it knows of loops.
        assert await asyncio.gather(module.count(1), module.count(2)) == [2, 2]
        payload = cloudpickle.dumps((module.count, module.Counter, module.Counter(5)))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[module.__name__]
    count, counter, instance = pickle.loads(payload)
    assert count is not module.count
    assert await asyncio.gather(*map(count, "abcd")) == [2, 2, 2, 2]
    assert await asyncio.gather(*map(counter(1).count, "abcd")) == [
        *[("Counter", 4)] * 3,
        ("Counter", 2),
    ]
    assert await instance.count(1) == ("Counter", 6)
    again = pickle.loads(cloudpickle.dumps(cloudpickle.loads(payload)[1]))
    assert await again(1).count(1) == ("Counter", 2)


def test_a_class_of_a_script_is_batched_in_a_worker() -> None:
    told = run(
        """
        import asyncio
        import aiogpu

        class Model:
            @aiogpu.batch(max_size=8)
            async def embed(self, texts):
                return [f"{text} of {len(texts)}" for text in texts]

        @aiogpu.remote
        async def embed_all(texts):
            model = Model()
            return await asyncio.gather(*map(model.embed, texts))

        async def main():
            async with aiogpu.init(num_cpus=1):
                print(*await embed_all.remote("ab"), sep=", ")
                print(*await embed_all.remote("cde"), sep=", ")

        aiogpu.run(main())
        """
    )
    assert told == "a of 2, b of 2\nc of 3, d of 3, e of 3\n"
