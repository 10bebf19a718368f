"""What `.remote()`, `put` and `wait` refuse at once, on every engine."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aiogpu
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
    (named_only, (), {}, "missing a required argument: 'size'"),
    (counted, (), {}, "missing a required argument: 'most'"),
]


@pytest.mark.parametrize(("function", "args", "named", "told"), WRONG)
async def test_a_task_refuses_arguments_that_its_function_does_not_take(
    function: Callable[..., Any], args: Any, named: Any, told: str
) -> None:
    async with aiogpu.init(num_cpus=1):
        for _ in range(2):
            task = aiogpu.remote(function)
            with pytest.raises(TypeError, match=told) as caught:
                task.remote(*args, **named)
            assert isinstance(caught.value, aiogpu.errors.MisuseError)
            assert str(caught.value).startswith(f"{function.__name__}(")
            with pytest.raises(TypeError, match=told):
                task.options(max_retries=1).remote(*args, **named)


async def test_a_task_takes_what_its_function_takes() -> None:
    async with aiogpu.init(num_cpus=1):
        task = aiogpu.remote(scaled)
        assert await task.remote(1) == 2
        assert await task.remote(1, offset=5) == 7
        assert await task.remote(1, offset=6) == 8
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
        with pytest.raises(TypeError, match=r"a handle already.*`aiogpu\.put\(await"):
            aiogpu.put(handle)
        result = add.remote(1)
        with pytest.raises(aiogpu.errors.MisuseError, match="a handle already"):
            aiogpu.put(result)
        assert await result == 2

        @aiogpu.remote
        def inside() -> str:
            own: Any = aiogpu.get(aiogpu.put(1))
            with pytest.raises(aiogpu.errors.MisuseError) as caught:
                aiogpu.put(add.remote(own))
            return str(caught.value)

        assert "a handle already" in await inside.remote()


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
