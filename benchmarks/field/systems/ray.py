"""Ray: a cluster of this machine alone, by its own interface from asyncio."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final
from weakref import WeakKeyDictionary

import ray

from benchmarks.field.systems import Call, Function, Items, Need, Preload, System, Use

STORE: Final = 2_000_000_000
"""Bytes of its object store."""
_references: Final[WeakKeyDictionary[Future[Any], Any]] = WeakKeyDictionary()
"""Of each future Ray's reference, which so lives as long."""


class Ray(System):
    """A cluster without its dashboard, so that it has less to do."""

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
        """`f.remote`; its workers are reused unless told otherwise."""
        calls = 1 if need.is_isolated else 0
        remote: Any = ray.remote(num_cpus=1, num_gpus=need.num_gpus, max_calls=calls)
        call = remote(function).remote
        return lambda number: _future(call(number))

    def taking(self, function: Function) -> Use:
        """`f.remote` with values, and with references to them."""
        remote: Any = ray.remote(function).remote

        def use(*values: Any) -> Future[Any]:
            given = [_references[v] if isinstance(v, Future) else v for v in values]
            return _future(remote(*given))

        return use

    def stream(self, function: Function) -> Items:
        """A generator task, whose references are awaited as they come."""

        def generator(count: int) -> Iterator[int]:
            # Ray sends to it, so what is behind `yield from` must be a generator.
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
    """Return the future of a result as Ray has it for asyncio; a cancel stops work."""
    future = asyncio.wrap_future(reference.future())
    _references[future] = reference
    future.add_done_callback(_cancel)
    return future


def _cancel(future: Future[Any]) -> None:
    if future.cancelled():
        ray.cancel(_references[future])
