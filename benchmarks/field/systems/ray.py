"""Ray: a cluster of this machine alone, by Ray's own interface from asyncio."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import ray

from benchmarks.field import systems
from benchmarks.field.systems import Call, Function, Items, Need, Preload, Use

STORE: Final = 2_000_000_000
"""Bytes of the object store."""


class Ray(systems.System):
    """A cluster without the dashboard, which would cost CPU."""

    title = "Ray"
    libraries = ("ray", "uvloop")

    async def open(self, num_cpus: int, num_gpus: int, preload: Preload) -> None:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_memory=STORE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )

    async def close(self) -> None:
        ray.shutdown()

    def task(self, function: Function, need: Need) -> Call:
        """`f.remote`; workers are reused unless the task is isolated."""
        calls = 1 if need.is_isolated else 0
        remote: Any = ray.remote(num_cpus=1, num_gpus=need.num_gpus, max_calls=calls)
        call = remote(function).remote
        return lambda number: _future(call(number))

    def taking(self, function: Function) -> Use:
        """`f.remote` with values, and with references to them."""
        remote: Any = ray.remote(function).remote

        def use(*values: Any) -> Future[Any]:
            return _future(remote(*systems.with_handles(values)))

        return use

    def stream(self, function: Function) -> Items:
        """A generator task, whose references are awaited as they come."""

        def generator(count: int) -> Iterator[int]:
            # Ray calls `send`, so `yield from` needs a generator.
            yield from (item for item in function(count))

        remote: Any = ray.remote(generator).remote

        async def items(count: int) -> AsyncIterator[int]:
            async for reference in remote(count):
                yield await reference

        return items

    async def actor(self, cls: type) -> Call:
        """`A.remote`."""
        remote: Any = ray.remote(num_cpus=0)
        actor = remote(cls).remote()
        await actor.__ray_ready__.remote()
        return lambda number: _future(actor.noop.remote(number))


def _future(reference: Any) -> Future[Any]:
    """Return Ray's asyncio future of a result; a cancel stops the work."""
    future = asyncio.wrap_future(reference.future())
    return systems.tracked(future, reference, ray.cancel)
