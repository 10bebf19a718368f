"""Dask: a local cluster of processes, and its client on the running loop."""

from __future__ import annotations

import asyncio
from asyncio import Future
from functools import partial
from typing import Any, Final

import distributed

from benchmarks.field import systems
from benchmarks.field.systems import Call, Function, Need, Preload, Use

THREADS: Final = 16
"""Threads of the one worker that has all GPUs: the quarters of four GPUs."""
_cancelling: Final[set[Future[None]]] = set()


class Dask(systems.System):
    """A worker of one thread for each CPU; or one worker with all GPUs as a resource.

    Dask's resources are numbers of a worker. A task of two GPUs must fit on one worker,
    so there is only one. Dask assigns no devices, so a fraction may lie on several.
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
        """`submit`, with `pure=False`: equal arguments are different tasks."""
        gpus = {"GPU": need.num_gpus} if need.num_gpus else None
        submit = partial(self._client.submit, pure=False, resources=gpus)
        return lambda number: _future(submit(function, number))

    def taking(self, function: Function) -> Use:
        """`submit` with values, and with Dask's futures."""

        def use(*values: Any) -> Future[Any]:
            arguments = systems.with_handles(values)
            return _future(self._client.submit(function, *arguments, pure=False))

        return use

    async def actor(self, cls: type) -> Call:
        """`submit(..., actor=True)`."""
        actor = await self._client.submit(cls, actor=True)
        return lambda number: asyncio.ensure_future(_await(actor.noop(number)))


def _future(submitted: Any) -> Future[Any]:
    return systems.tracked(asyncio.ensure_future(_await(submitted)), submitted, _cancel)


def _cancel(submitted: Any) -> None:
    cancelling = asyncio.ensure_future(submitted.cancel())
    _cancelling.add(cancelling)
    cancelling.add_done_callback(_cancelling.discard)


async def _await(future: Any) -> Any:
    return await future
