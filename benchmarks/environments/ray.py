"""Ray: a cluster of this machine alone, by its own interface from asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import ray

from benchmarks.environments.base import Bare
from benchmarks.port import Call, Create, Need, Preload, Programs, Use

T = TypeVar("T")

STORE: Final = 2_000_000_000
"""Bytes of its store for values."""
FIRST_RESULT = """
import asyncio
from time import perf_counter_ns
import ray

@ray.remote
def noop(number):
    return None

async def main():
    start = perf_counter_ns()
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    await noop.remote(1)
    print(perf_counter_ns() - start, flush=True)
    ray.shutdown()

asyncio.run(main())
"""


_references: Final[WeakKeyDictionary[asyncio.Future[Any], Any]] = WeakKeyDictionary()
"""Of each future what it stands for, which so lives as long."""


class Ray(Bare):
    """A cluster without its dashboard, so that it has less to do."""

    name = "ray"
    title = "Ray"
    libraries = ("ray", "uvloop")
    programs = Programs("import ray", "from ray import init, remote", FIRST_RESULT)

    async def open(
        self, num_cpus: int, num_gpus: int = 0, preload: Preload = None
    ) -> None:
        """Start a cluster, and join it."""
        await super().open(num_cpus, num_gpus, preload)
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_memory=STORE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )

    def task(self, function: Callable[[int], T], need: Need) -> Call[T]:
        """`f.remote`; its workers are used again unless told otherwise."""
        remote: Any = ray.remote(
            num_cpus=need.num_cpus,
            num_gpus=need.num_gpus,
            max_calls=1 if need.is_isolated else 0,
        )(function).remote
        return lambda number: _future(remote(number))

    def taking(self, function: Callable[..., object]) -> Use:
        """The same with values, and with references to them."""
        remote: Any = ray.remote(function).remote

        def use(*values: object) -> asyncio.Future[object]:
            return _future(remote(*map(_given, values)))

        return use

    async def keep(self, value: object) -> object:
        """`put`."""
        return ray.put(value)

    async def free_gpus(self) -> float:
        """`available_resources()`, which is a moment behind."""
        return float(ray.available_resources().get("GPU", 0.0))

    def stream(
        self, function: Callable[[int], Any]
    ) -> Callable[[int], AsyncIterator[int]]:
        """A generator task, whose references are awaited as they come."""

        def generator(count: int) -> Iterator[int]:
            # Ray sends to it, so what is behind `yield from` must be a generator.
            yield from (item for item in function(count))

        remote: Any = ray.remote(generator).remote

        async def items(count: int) -> AsyncIterator[int]:
            async for reference in remote(count):
                yield await reference

        return items

    def actor(self, cls: type) -> Create:
        """`A.remote`."""
        remote_class: Any = ray.remote(num_cpus=0)(cls)

        async def create() -> Call[None]:
            actor = remote_class.remote()
            await actor.__ray_ready__.remote()
            return lambda number: _future(actor.noop.remote(number))

        return create

    async def close(self) -> None:
        """Leave the cluster, which ends it."""
        ray.shutdown()


def _given(value: object) -> object:
    """A value, or the reference that stands for it."""
    if isinstance(value, asyncio.Future):
        return _references[value]
    return value


def _future(reference: Any) -> asyncio.Future[Any]:
    """Its result as asyncio's own way has it; a cancel stops the work."""
    future = asyncio.wrap_future(reference.future())
    _references[future] = reference
    future.add_done_callback(_stop_if_cancelled)
    return future


def _stop_if_cancelled(future: asyncio.Future[Any]) -> None:
    if future.cancelled():
        ray.cancel(_references[future])
