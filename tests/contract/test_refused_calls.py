"""Calls that `.remote()`, `put` and `wait` refuse, and calls in other threads."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aiogpu
from aiogpu.errors import MisuseError, SerializationError
from tests.contract.map_tasks import Counter, count
from tests.contract.tasks import add

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "node"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=2, num_gpus=1),
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


async def test_a_task_refuses_arguments_that_its_function_lacks() -> None:
    for function, args, named, message in WRONG:
        task = aiogpu.remote(function)
        for call in (task, task, task.options(max_retries=1)):
            with pytest.raises(TypeError, match=message) as caught:
                call.remote(*args, **named)
            assert isinstance(caught.value, MisuseError)
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


async def test_a_chunked_map_refuses_a_function_without_arguments() -> None:
    with pytest.raises(TypeError, match="too many positional"):
        async for _ in aiogpu.remote(named_only).map([1, 2], chunk=2):  # type: ignore[arg-type]
            pass


class Exiting:
    """Raises SystemExit when it is pickled."""

    def __reduce__(self) -> Any:
        raise SystemExit(3)


async def test_an_exit_amid_pickling_is_an_error() -> None:
    message = r"\['exiting'\] \(a Exiting\): SystemExit: 3"
    with pytest.raises(SerializationError, match=rf"args\[0\]{message}"):
        add.remote({"exiting": Exiting()})  # type: ignore[arg-type]
    with pytest.raises(SerializationError, match=rf"value{message}"):
        aiogpu.put({"exiting": Exiting()})

    captured = Exiting()

    @aiogpu.remote
    def closing() -> object:
        return captured

    with pytest.raises(SerializationError, match=r"captured \(a Exiting\)"):
        closing.remote()
    assert await add.remote(1) == 2


async def test_put_refuses_a_handle() -> None:
    handle = aiogpu.put([1])
    with pytest.raises(TypeError, match=r"already a handle.*`aiogpu\.put\(await"):
        aiogpu.put(handle)
    result = add.remote(1)
    with pytest.raises(MisuseError, match="already a handle"):
        aiogpu.put(result)
    assert await result == 2

    @aiogpu.remote
    def inside() -> str:
        own: Any = aiogpu.put(1)
        with pytest.raises(MisuseError) as caught:
            aiogpu.put(add.remote(own))
        return str(caught.value)

    assert "already a handle" in await inside.remote()


async def test_wait_for_nothing_gives_two_empty_lists() -> None:
    async with asyncio.timeout(10):
        assert await aiogpu.wait([]) == ([], [])
        assert await aiogpu.wait([], num_returns=3, timeout=0) == ([], [])
        assert [handle async for handle in aiogpu.as_completed([])] == []

    @aiogpu.remote
    def inside() -> Any:
        return aiogpu.wait([])

    assert await inside.remote() == ([], [])


# Every entry point refuses threads other than its loop's, and sends nothing


class Things:
    """The objects of a program whose thread makes calls."""

    actor: Any
    pool: Any
    handle: Any
    stream: Any


def steps(coroutine: Any) -> None:
    """Take the first step of a coroutine, as a loop of another thread would."""
    try:
        coroutine.send(None)
    finally:
        coroutine.close()


ENTRIES: dict[str, Callable[[Things], object]] = {
    "a task": lambda things: add.remote(1),
    "a generator": lambda things: count.remote(3),
    "a map": lambda things: steps(anext(add.map([1]))),
    "an actor": lambda things: Counter.remote(),
    "a method": lambda things: things.actor.add.remote(),
    "a coroutine method": lambda things: things.actor.add_softly.remote(),
    "a method with two results": lambda things: things.actor.pair.remote(),
    "a generator method": lambda things: things.actor.each.remote(3),
    "kill": lambda things: aiogpu.kill(things.actor),
    "a wait for an actor": lambda things: steps(things.actor.__await__()),
    "a pool's method": lambda things: things.pool.add.remote(),
    "a pool": lambda things: aiogpu.ActorPool(Counter, 1),
    "put": lambda things: aiogpu.put(1),
    "get_actor": lambda things: aiogpu.get_actor("any"),
    "cancel of a handle": lambda things: things.handle.cancel(),
    "an item": lambda things: steps(anext(things.stream)),
    "aclose of a stream": lambda things: steps(things.stream.aclose()),
    "cancel of a stream": lambda things: things.stream.cancel(),
}
OF_HANDLES: dict[str, Callable[[Things], object]] = {
    "get": lambda things: aiogpu.get(things.handle),
    "wait": lambda things: aiogpu.wait([things.handle]),
}
"""Their errors say that the handle must be awaited on its loop."""


async def refused(entry: Callable[[Things], object], things: Things) -> str:
    """Call an entry point in a thread; return the error."""
    with pytest.raises(aiogpu.NoLoopError) as caught:
        await asyncio.to_thread(entry, things)
    return str(caught.value)


@pytest.mark.whole
async def test_each_entry_point_refuses_another_thread() -> None:
    things = Things()
    things.actor = await Counter.remote()
    things.stream = count.remote(3)
    assert await anext(things.stream) == 0
    async with aiogpu.ActorPool(Counter, 1) as things.pool:
        for name, entry in ENTRIES.items():
            things.handle = add.remote(1)
            message = await refused(entry, things)
            assert "event loop" in message, name
            assert "`aiogpu.from_thread(f.remote, x).result()`" in message, name
            assert await things.handle == 2, name
        for entry in OF_HANDLES.values():
            with pytest.raises(aiogpu.AiogpuError, match="event loop"):
                await asyncio.to_thread(entry, things)
        assert await things.pool.add.remote() == 1
    assert await things.actor.add.remote() == 1, "no call was sent"
    assert [item async for item in things.stream] == [1, 2]
    async with Counter.remote() as other:
        await refused(lambda _: other.add.remote(), things)
        assert await other.add.remote() == 1


@pytest.mark.needs("leases")
async def test_another_thread_may_not_release_a_lease() -> None:
    async with aiogpu.lease(num_gpus=1) as gpu:
        message = await refused(lambda _: steps(gpu.release()), Things())
        assert "release() of a lease" in message
        assert gpu.is_held


async def test_another_thread_may_call_through_the_loop() -> None:
    """A FastAPI endpoint that is a plain `def` runs in such a thread."""
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
