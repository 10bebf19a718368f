"""xoscar: pools of processes for actors. A task is a call of an actor."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import AsyncIterator, Callable
from itertools import cycle
from typing import Any, cast

import xoscar

from benchmarks.field.systems import Call, Function, Items, Need, Preload, System, Use


class Runner(xoscar.Actor):  # type: ignore[misc]
    """An actor that runs functions, one at a time."""

    def run(self, function: Callable[..., object], *values: object) -> object:
        """Run a function."""
        return function(*values)

    @xoscar.generator  # type: ignore[untyped-decorator]
    def stream(self, function: Callable[[int], Any], count: int) -> Any:
        """Return a generator, whose items xoscar sends."""
        return function(count)


class Holder(xoscar.Actor):  # type: ignore[misc]
    """An actor that holds an object of a plain class."""

    def __init__(self, cls: type) -> None:
        self._object: Any = cls()

    def noop(self, number: int) -> None:
        self._object.noop(number)


class Xoscar(System):
    """A pool with a process for each CPU; an actor in each process runs tasks."""

    title = "xoscar"
    libraries = ("xoscar", "uvloop")

    async def open(self, num_cpus: int, num_gpus: int, preload: Preload) -> None:
        self._pool: Any = await xoscar.create_actor_pool(
            "127.0.0.1", n_process=num_cpus
        )
        self._runners = [
            await self._create(process, Runner) for process in range(1, num_cpus + 1)
        ]

    async def close(self) -> None:
        await self._pool.stop()

    async def _create(self, process: int, cls: type, *values: object) -> Any:
        return await xoscar.create_actor(
            cls,
            *values,
            address=self._pool.external_address,
            allocate_strategy=xoscar.allocate_strategy.ProcessIndex(process),
        )

    def task(self, function: Function, need: Need) -> Call:
        """Calls of the runners in turn."""
        return self.taking(function)

    def taking(self, function: Function) -> Use:
        """Calls of the runners with values; results return to the caller first."""
        runners = cycle(self._runners)

        def use(*values: object) -> Future[Any]:
            call = next(runners).run(function, *values)
            return cast("Future[Any]", asyncio.ensure_future(call))

        return use

    def stream(self, function: Function) -> Items:
        """`xoscar.generator`; each item takes a call."""

        async def items(count: int) -> AsyncIterator[int]:
            async for item in await self._runners[0].stream(function, count):
                yield item

        return items

    async def actor(self, cls: type) -> Call:
        """`create_actor`, in the process of a runner."""
        actor = await self._create(1, Holder, cls)
        return lambda number: asyncio.ensure_future(actor.noop(number))
