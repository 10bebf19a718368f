"""Dask: a local cluster of processes, and its client on the running loop."""

from __future__ import annotations

import asyncio
from asyncio import Future
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import distributed

from benchmarks.field.systems import Call, Function, Need, Preload, System, Use

THREADS: Final = 16
"""Of the one worker that has all GPUs: as many quarters as four of them have."""
_submitted: Final[WeakKeyDictionary[Future[Any], Any]] = WeakKeyDictionary()
"""Of each future Dask's own, which so lives as long."""
_cancelling: Final[set[Future[None]]] = set()


class Dask(System):
    """A worker of one thread for each CPU; or one that has all GPUs as a resource.

    Its resources are numbers of a worker: a task of two GPUs fits on one worker alone,
    so there is one. It gives no devices, so a fraction may lie on several.
    """

    title = "Dask"
    libraries = ("distributed", "dask", "uvloop")

    async def open(self, num_cpus: int, num_gpus: int, preload: Preload) -> None:
        self._cluster: Any = await distributed.LocalCluster(
            n_workers=1 if num_gpus else num_cpus,
            threads_per_worker=THREADS if num_gpus else 1,
            resources={"GPU": num_gpus} if num_gpus else None,
            memory_limit=None,
            dashboard_address=None,
            processes=True,
            asynchronous=True,
        )
        self._client: Any = await distributed.Client(self._cluster, asynchronous=True)

    async def close(self) -> None:
        await self._client.close()
        await self._cluster.close()

    def task(self, function: Function, need: Need) -> Call:
        """`submit`; the same arguments do not make the same task."""
        gpus = {"GPU": need.num_gpus} if need.num_gpus else None
        submit = partial(self._client.submit, pure=False, resources=gpus)
        return lambda number: _future(submit(function, number))

    def taking(self, function: Function) -> Use:
        """`submit` with values, and with Dask's futures."""

        def use(*values: Any) -> Future[Any]:
            given = [_submitted[v] if isinstance(v, Future) else v for v in values]
            return _future(self._client.submit(function, *given, pure=False))

        return use

    async def actor(self, cls: type) -> Call:
        """`submit(..., actor=True)`."""
        actor = await self._client.submit(cls, actor=True)
        return lambda number: asyncio.ensure_future(_await(actor.noop(number)))


def _future(submitted: Any) -> Future[Any]:
    future = asyncio.ensure_future(_await(submitted))
    _submitted[future] = submitted
    future.add_done_callback(_cancel)
    return future


def _cancel(future: Future[Any]) -> None:
    if future.cancelled():
        cancelling = asyncio.ensure_future(_submitted[future].cancel())
        _cancelling.add(cancelling)
        cancelling.add_done_callback(_cancelling.discard)


async def _await(future: Any) -> Any:
    return await future
