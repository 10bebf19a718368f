"""xoscar: pools of processes for actors. A task is a call of an actor that runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import cycle
from typing import Any, TypeVar

import xoscar

from benchmarks.environments.base import Bare
from benchmarks.port import Call, Create, Need, Preload, Programs, Use

T = TypeVar("T")

ADDRESS = "127.0.0.1"
FIRST_RESULT = """
import asyncio
from time import perf_counter_ns
import xoscar
from benchmarks.environments.xoscar import Runner

async def main():
    start = perf_counter_ns()
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1)
    async with pool:
        runner = await xoscar.create_actor(
            Runner,
            address=pool.external_address,
            allocate_strategy=xoscar.allocate_strategy.ProcessIndex(1),
        )
        await runner.run(abs, 1)
        print(perf_counter_ns() - start, flush=True)

if __name__ == "__main__":
    asyncio.run(main())
"""


class Runner(xoscar.Actor):  # type: ignore[misc]
    """Runs functions, one at a time."""

    def run(self, function: Callable[..., object], *values: object) -> object:
        """Run one."""
        return function(*values)

    @xoscar.generator  # type: ignore[untyped-decorator]
    def stream(self, function: Callable[[int], Any], count: int) -> Any:
        """Give the items of a generator."""
        return function(count)


class Living(xoscar.Actor):  # type: ignore[misc]
    """Keeps an object of a class that knows no actors."""

    def __init__(self, cls: type) -> None:
        self._object: Any = cls()

    def noop(self, number: int) -> None:
        """The object's."""
        self._object.noop(number)


class Xoscar(Bare):
    """A pool with a process for each CPU, and in each an actor that runs tasks."""

    name = "xoscar"
    title = "xoscar"
    libraries = ("xoscar", "uvloop")
    programs = Programs(
        "import xoscar", "from xoscar import create_actor_pool", FIRST_RESULT
    )

    def __init__(self) -> None:
        self._pool: Any = None
        self._runners: list[Any] = []

    async def open(
        self, num_cpus: int, num_gpus: int = 0, preload: Preload = None
    ) -> None:
        """Start a pool, and its runners."""
        await super().open(num_cpus, num_gpus, preload)
        self._pool = await xoscar.create_actor_pool(ADDRESS, n_process=num_cpus)
        self._runners = [
            await self._create(process, Runner) for process in range(1, num_cpus + 1)
        ]

    async def _create(self, process: int, cls: type, *values: object) -> Any:
        return await xoscar.create_actor(
            cls,
            *values,
            address=self._pool.external_address,
            allocate_strategy=xoscar.allocate_strategy.ProcessIndex(process),
        )

    def task(self, function: Callable[[int], T], need: Need) -> Call[T]:
        """A call of the runners in turn."""
        if need.num_gpus:
            self._lacks("shares out no GPUs")
        if need.is_isolated:
            self._lacks("gives no task a process of its own")
        runners = cycle(self._runners)
        return lambda number: asyncio.ensure_future(next(runners).run(function, number))

    def taking(self, function: Callable[..., object]) -> Use:
        """The same with values. What a call gives comes to the caller first."""
        runners = cycle(self._runners)

        def use(*values: object) -> asyncio.Future[object]:
            if any(isinstance(value, asyncio.Future) for value in values):
                self._lacks("gives its tasks no handles")
            running: asyncio.Future[object] = asyncio.ensure_future(
                next(runners).run(function, *values)
            )
            return running

        return use

    def stream(
        self, function: Callable[[int], Any]
    ) -> Callable[[int], AsyncIterator[int]]:
        """`xoscar.generator`, of which each item is asked for by a call."""
        runner = self._runners[0]

        async def items(count: int) -> AsyncIterator[int]:
            async for item in await runner.stream(function, count):
                yield item

        return items

    def actor(self, cls: type) -> Create:
        """`create_actor`, beside a runner."""

        async def create() -> Call[None]:
            actor = await self._create(1, Living, cls)
            return lambda number: asyncio.ensure_future(actor.noop(number))

        return create

    async def close(self) -> None:
        """Stop the pool."""
        await self._pool.stop()
