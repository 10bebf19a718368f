"""The standard library's `ProcessPoolExecutor`, awaited by `asyncio.wrap_future`."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from concurrent.futures import Executor as Pool
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from benchmarks.environments.base import Bare
from benchmarks.port import Call, Need, Preload, Programs, UnsupportedError, Use

T = TypeVar("T")

FIRST_RESULT = """
import asyncio
from concurrent.futures import ProcessPoolExecutor
from time import perf_counter_ns

async def main():
    start = perf_counter_ns()
    with ProcessPoolExecutor(1) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, abs, 1)
        print(perf_counter_ns() - start, flush=True)

asyncio.run(main())
"""


class Executor(Bare):
    """A pool of as many processes as there are CPUs to share out.

    A second one gives each task a process of its own; it is made when it is asked for.
    """

    name = "executor"
    title = "an executor"
    libraries: tuple[str, ...] = ("uvloop",)
    programs = Programs(
        "import concurrent.futures",
        "from concurrent.futures import ProcessPoolExecutor",
        FIRST_RESULT,
    )

    def __init__(self) -> None:
        self._pools: dict[bool, Pool] = {}
        self._num_cpus = 0

    async def open(
        self, num_cpus: int, num_gpus: int = 0, preload: Preload = None
    ) -> None:
        """Start a pool."""
        self._preload(list(preload or ()))
        self._num_cpus = num_cpus
        self._pools[False] = self._pool(num_cpus, is_isolated=False)

    def _preload(self, modules: list[str]) -> None:
        """For the process from which all others are forked, if it does not run yet."""
        multiprocessing.get_context("forkserver").set_forkserver_preload(modules)

    def _pool(self, num_cpus: int, *, is_isolated: bool) -> Pool:
        # Not by "fork": this process runs an event loop.
        context = multiprocessing.get_context("forkserver")
        each = 1 if is_isolated else None
        return ProcessPoolExecutor(num_cpus, context, max_tasks_per_child=each)

    def image(self, preload: Preload = None) -> str:
        """Never possible: what it forks from is its own."""
        raise UnsupportedError(f"{self.title} does not say what it forks from")

    def task(self, function: Callable[[int], T], need: Need) -> Call[T]:
        """`pool.submit`, as an asyncio future."""
        if need.num_gpus:
            self._lacks("shares out no GPUs")
        if need.is_isolated not in self._pools:
            self._pools[True] = self._pool(self._num_cpus, is_isolated=True)
        pool = self._pools[need.is_isolated]
        return lambda number: asyncio.wrap_future(pool.submit(function, number))

    def taking(self, function: Callable[..., object]) -> Use:
        """The same with values. A future of its own cannot be one of them."""
        pool = self._pools[False]

        def use(*values: object) -> asyncio.Future[object]:
            if any(isinstance(value, asyncio.Future) for value in values):
                self._lacks("gives its tasks no handles")
            return asyncio.wrap_future(pool.submit(function, *values))

        return use

    async def close(self) -> None:
        """Stop the pools."""
        while self._pools:
            _, pool = self._pools.popitem()
            pool.shutdown(cancel_futures=True)
