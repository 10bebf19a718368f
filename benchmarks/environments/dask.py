"""Dask: a local cluster of processes, and its client on the running loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import distributed

from benchmarks.environments.base import Bare
from benchmarks.port import Call, Create, Need, Preload, Programs, Use

T = TypeVar("T")

THREADS: Final = 16
"""Of the one worker that has all GPUs: as many quarters as four of them have."""
FIRST_RESULT = """
import asyncio
from dask.distributed import Client, LocalCluster
from time import perf_counter_ns

async def main():
    start = perf_counter_ns()
    async with LocalCluster(
        n_workers=1, threads_per_worker=1, dashboard_address=None, asynchronous=True
    ) as cluster, Client(cluster, asynchronous=True) as client:
        await client.submit(abs, 1)
        print(perf_counter_ns() - start, flush=True)

if __name__ == "__main__":
    asyncio.run(main())
"""


_submitted: Final[WeakKeyDictionary[asyncio.Future[Any], Any]] = WeakKeyDictionary()
"""Of each future what it stands for at Dask's, which so lives as long."""
_giving_up: Final[set[asyncio.Future[None]]] = set()


class Dask(Bare):
    """A worker of one thread for each CPU; or one that has all GPUs as a resource.

    Its resources are numbers of a worker: a task of two GPUs fits on one worker alone,
    so there is one. It gives no devices, so a fraction may lie on several.
    """

    name = "dask"
    title = "Dask"
    libraries = ("distributed", "dask", "uvloop")
    programs = Programs(
        "import distributed", "from distributed import Client", FIRST_RESULT
    )

    def __init__(self) -> None:
        self._cluster: Any = None
        self._client: Any = None

    async def open(
        self, num_cpus: int, num_gpus: int = 0, preload: Preload = None
    ) -> None:
        """Start a cluster and a client."""
        await super().open(num_cpus, num_gpus, preload)
        self._cluster = await distributed.LocalCluster(
            n_workers=1 if num_gpus else num_cpus,
            threads_per_worker=THREADS if num_gpus else 1,
            resources={"GPU": num_gpus} if num_gpus else None,
            memory_limit=None,
            dashboard_address=None,
            processes=True,
            asynchronous=True,
        )
        self._client = await distributed.Client(self._cluster, asynchronous=True)

    def task(self, function: Callable[[int], T], need: Need) -> Call[T]:
        """`submit`; what has the same arguments is not the same task."""
        if need.is_isolated:
            self._lacks("gives no task a process of its own")
        client = self._client
        needs = {"GPU": need.num_gpus} if need.num_gpus else None

        def call(number: int) -> asyncio.Future[T]:
            submitted = client.submit(function, number, pure=False, resources=needs)
            return _future(submitted)

        return call

    def taking(self, function: Callable[..., object]) -> Use:
        """The same with values, and with its futures."""
        client = self._client

        def use(*values: object) -> asyncio.Future[object]:
            return _future(client.submit(function, *map(_given, values), pure=False))

        return use

    def actor(self, cls: type) -> Create:
        """`submit(..., actor=True)`."""
        client = self._client

        async def create() -> Call[None]:
            actor = await client.submit(cls, actor=True)
            return lambda number: asyncio.ensure_future(_awaited(actor.noop(number)))

        return create

    async def close(self) -> None:
        """Leave the cluster and stop it."""
        await self._client.close()
        await self._cluster.close()


def _given(value: object) -> object:
    """A value, or Dask's future that stands for it."""
    if isinstance(value, asyncio.Future):
        return _submitted[value]
    return value


def _future(submitted: Any) -> asyncio.Future[Any]:
    future = asyncio.ensure_future(_awaited(submitted))
    _submitted[future] = submitted
    future.add_done_callback(_give_up_if_cancelled)
    return future


def _give_up_if_cancelled(future: asyncio.Future[Any]) -> None:
    if future.cancelled():
        _giving_up.add(giving_up := asyncio.ensure_future(_submitted[future].cancel()))
        giving_up.add_done_callback(_giving_up.discard)


async def _awaited(future: Any) -> Any:
    return await future
