"""[B45] What `.remote()`, `put` and `wait` refuse at once, and in any other thread."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aiogpu
from tests.contract.map_tasks import Counter, count
from tests.contract.tasks import add

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]


def scaled(value: int, /, factor: int = 2, *, offset: int = 0) -> int:
    return value * factor + offset


def named_only(*, size: int) -> int:
    return size


def counted(most: int) -> Iterator[int]:
    yield from range(most)


def anything(*args: int, **named: int) -> tuple[tuple[int, ...], dict[str, int]]:
    return args, named


@functools.wraps(scaled)
def wrapping(*args: int, **named: int) -> int:
    return scaled(*args, 3, **named)


WRONG: list[tuple[Callable[..., Any], tuple[int, ...], dict[str, int], str]] = [
    (scaled, (), {}, "missing a required argument: 'value'"),
    (scaled, (1, 2, 3), {}, "too many positional arguments"),
    (scaled, (1,), {"ofset": 1}, "unexpected keyword argument 'ofset'"),
    (scaled, (1, 2), {"factor": 1}, "multiple values for argument 'factor'"),
    (scaled, (), {"value": 1}, "value"),
    (named_only, (1,), {}, "too many positional arguments"),
    (named_only, (), {}, "missing a required (keyword-only )?argument: 'size'"),
    (counted, (), {}, "missing a required argument: 'most'"),
]


async def test_a_task_refuses_arguments_that_its_function_does_not_take() -> None:
    async with aiogpu.init(num_cpus=1):
        for function, args, named, told in WRONG:
            task = aiogpu.remote(function)
            for call in (task, task, task.options(max_retries=1)):
                with pytest.raises(TypeError, match=told) as caught:
                    call.remote(*args, **named)
                assert isinstance(caught.value, aiogpu.errors.MisuseError)
                assert str(caught.value).startswith(f"{function.__name__}(")
        task = aiogpu.remote(scaled)
        assert await task.remote(1) == 2
        assert await task.remote(1, offset=5) == 7
        with pytest.raises(TypeError, match="too many positional"):
            task.remote(1, 2, 3, offset=6)
        assert await task.remote(1, 4, offset=5) == 9
        assert await aiogpu.remote(named_only).remote(size=3) == 3
        assert await aiogpu.remote(anything).remote(1, a=2) == ((1,), {"a": 2})
        assert await aiogpu.remote(wrapping).remote(1, offset=1) == 4
        assert await aiogpu.remote(max).remote(1, 2, 3) == 3  # has no signature


async def test_a_chunked_map_refuses_a_function_that_takes_no_item() -> None:
    async with aiogpu.init(num_cpus=1):
        with pytest.raises(TypeError, match="too many positional"):
            async for _ in aiogpu.remote(named_only).map([1, 2], chunk=2):  # type: ignore[arg-type]
                pass


class Exiting:
    """Ends the program where it is pickled, or would."""

    def __reduce__(self) -> Any:
        raise SystemExit(3)


async def test_an_exit_amid_pickling_is_no_exit() -> None:
    """[B39]"""
    async with aiogpu.init(num_cpus=1):
        told = r"\['exiting'\] \(a Exiting\): SystemExit: 3"
        with pytest.raises(aiogpu.errors.SerializationError, match=rf"args\[0\]{told}"):
            add.remote({"exiting": Exiting()})  # type: ignore[arg-type]
        with pytest.raises(aiogpu.errors.SerializationError, match=rf"value{told}"):
            await aiogpu.put({"exiting": Exiting()})

        captured = Exiting()

        @aiogpu.remote
        def closing() -> object:
            return captured

        with pytest.raises(
            aiogpu.errors.SerializationError, match=r"captured \(a Exiting\)"
        ):
            closing.remote()
        assert await add.remote(1) == 2


async def test_a_handle_is_not_put_again() -> None:
    async with aiogpu.init(num_cpus=1):
        handle = await aiogpu.put([1])
        with pytest.raises(TypeError, match=r"already a handle.*`aiogpu\.put\(await"):
            aiogpu.put(handle)
        result = add.remote(1)
        with pytest.raises(aiogpu.errors.MisuseError, match="already a handle"):
            aiogpu.put(result)
        assert await result == 2

        @aiogpu.remote
        def inside() -> str:
            own: Any = aiogpu.get(aiogpu.put(1))
            with pytest.raises(aiogpu.errors.MisuseError) as caught:
                aiogpu.put(add.remote(own))
            return str(caught.value)

        assert "already a handle" in await inside.remote()


async def test_waiting_for_nothing_gives_two_empty_lists() -> None:
    async with aiogpu.init(num_cpus=1):
        async with asyncio.timeout(10):
            assert await aiogpu.wait([]) == ([], [])
            assert await aiogpu.wait([], num_returns=3, timeout=0) == ([], [])
            assert [one async for one in aiogpu.as_completed([])] == []

        @aiogpu.remote
        def inside() -> Any:
            found: Any = aiogpu.wait([])
            return found

        assert await inside.remote() == ([], [])


# Every entry point refuses another thread than its loop's, and sends nothing


class Things:
    """What a program holds as its thread calls.

    Attributes:
        actor: has been called once.
        pool: of one actor.
        handle: of a call that has ended.
        stream: of which one item was taken.
        results: of a map, of which one was taken.
    """

    actor: Any
    pool: Any
    handle: Any
    stream: Any
    results: Any


def steps(coroutine: Any) -> None:
    """Take the first step of a coroutine, as a loop of another thread would."""
    try:
        coroutine.send(None)
    finally:
        coroutine.close()


ENTRIES: dict[str, Callable[[Things], object]] = {
    "a task": lambda it: add.remote(1),
    "a generator": lambda it: count.remote(3),
    "a map": lambda it: steps(anext(add.map([1]))),
    "an actor": lambda it: Counter.remote(),
    "a method": lambda it: it.actor.add.remote(),
    "a coroutine method": lambda it: it.actor.add_softly.remote(),
    "a method with two results": lambda it: it.actor.pair.remote(),
    "a generator method": lambda it: it.actor.each.remote(3),
    "kill": lambda it: aiogpu.kill(it.actor),
    "a wait for an actor": lambda it: steps(it.actor.__await__()),
    "a pool's method": lambda it: it.pool.add.remote(),
    "a pool": lambda it: aiogpu.ActorPool(Counter, 1),
    "put": lambda it: aiogpu.put(1),
    "get_actor": lambda it: aiogpu.get_actor("any"),
    "cancel of a handle": lambda it: it.handle.cancel(),
    "an item": lambda it: steps(anext(it.stream)),
    "aclose of a stream": lambda it: steps(it.stream.aclose()),
    "cancel of a stream": lambda it: it.stream.cancel(),
}
OF_HANDLES: dict[str, Callable[[Things], object]] = {
    "get": lambda it: aiogpu.get(it.handle),
    "wait": lambda it: aiogpu.wait([it.handle]),
}
"""They say that the handle is to be awaited on its loop."""


async def refused(entry: Callable[[Things], object], it: Things) -> str:
    """What a thread is told that calls it."""
    with pytest.raises(aiogpu.NoLoopError) as caught:
        await asyncio.to_thread(entry, it)
    return str(caught.value)


@pytest.mark.whole
async def test_another_thread_is_refused_by_each_of_them() -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        it = Things()
        it.actor = await Counter.remote()
        it.stream = count.remote(3)
        assert await anext(it.stream) == 0
        async with aiogpu.ActorPool(Counter, 1) as it.pool:
            for name, entry in ENTRIES.items():
                it.handle = add.remote(1)
                told = await refused(entry, it)
                assert "event loop" in told, name
                assert "`aiogpu.from_thread(f.remote, x).result()`" in told, name
                assert await it.handle == 2, name
            for entry in OF_HANDLES.values():
                with pytest.raises(aiogpu.AiogpuError, match="event loop"):
                    await asyncio.to_thread(entry, it)
            assert await it.pool.add.remote() == 1
        assert await it.actor.add.remote() == 1, "no call was sent"
        assert [item async for item in it.stream] == [1, 2]
        async with Counter.remote() as other:
            await refused(lambda _: other.add.remote(), it)
            assert await other.add.remote() == 1


@pytest.mark.needs("leases")
async def test_another_thread_gives_no_lease_back() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        it = Things()
        async with aiogpu.lease(num_gpus=1) as gpu:
            told = await refused(lambda _: steps(gpu.release()), it)
            assert "release() of a lease" in told
            assert gpu.is_held


async def test_what_is_written_in_its_place() -> None:
    """As a FastAPI endpoint that is a plain `def` would."""
    async with aiogpu.init(num_cpus=1):
        actor = await Counter.remote()
        loop = asyncio.get_running_loop()

        async def call() -> int:
            return int(await actor.add.remote())

        def endpoint() -> int:
            return asyncio.run_coroutine_threadsafe(call(), loop).result()

        assert await asyncio.to_thread(endpoint) == 1

        def in_brief() -> int:
            return aiogpu.from_thread(add.remote, 2).result()

        assert await asyncio.to_thread(in_brief) == 3
