"""The standard library's `ProcessPoolExecutor`, awaited by `asyncio.wrap_future`."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from types import MappingProxyType
from typing import NoReturn, TypeVar

from benchmarks.port import Call, Need, OnBatch, Preload, Programs, UnsupportedError

T = TypeVar("T")

FIRST_RESULT = """
import asyncio
from concurrent.futures import ProcessPoolExecutor
from time import perf_counter_ns

async def main():
    start = perf_counter_ns()
    with ProcessPoolExecutor(1) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, abs, 1)
        print(perf_counter_ns() - start)

asyncio.run(main())
"""


class Executor:
    """A pool of as many processes as there are CPUs to share out."""

    name = "executor"
    libraries = ("uvloop",)
    lasting: Mapping[str, str] = MappingProxyType({})
    programs = Programs(
        "import concurrent.futures",
        "from concurrent.futures import ProcessPoolExecutor",
        FIRST_RESULT,
    )

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def open(
        self, num_cpus: int, num_gpus: int = 0, preload: Preload = None
    ) -> None:
        """Start a pool."""
        if preload:
            raise UnsupportedError("an executor imports nothing beforehand")
        # Not by "fork": this process runs an event loop.
        context = multiprocessing.get_context("forkserver")
        self._pool = ProcessPoolExecutor(num_cpus, context)

    def image(self, preload: Preload = None) -> NoReturn:
        """Never possible: its workers are there once and for all."""
        raise UnsupportedError("an executor isolates no tasks")

    async def free_gpus(self) -> NoReturn:
        """Never possible."""
        raise UnsupportedError("an executor shares out no GPUs")

    def task(self, function: Callable[[int], T], need: Need) -> Call[T]:
        """`pool.submit`, as an asyncio future."""
        if need.num_gpus:
            raise UnsupportedError("an executor shares out no GPUs")
        pool = self._pool
        assert pool is not None
        return lambda number: asyncio.wrap_future(pool.submit(function, number))

    def taking(self, function: Callable[..., object]) -> NoReturn:
        """Never possible."""
        raise UnsupportedError("an executor's tasks are given no handles")

    async def keep(self, value: object) -> NoReturn:
        """Never possible."""
        raise UnsupportedError("an executor keeps no values")

    def stream(self, function: Callable[[int], object]) -> NoReturn:
        """Never possible."""
        raise UnsupportedError("an executor's calls give one result")

    def actor(self, cls: type) -> NoReturn:
        """Never possible."""
        raise UnsupportedError("an executor has no actors")

    def decision(self, num_gpus: int, need: Need) -> NoReturn:
        """Never possible."""
        raise UnsupportedError("an executor has no scheduler apart from its pool")

    def paper(self, num_cpus: int, num_gpus: int) -> NoReturn:
        """Never possible."""
        raise UnsupportedError("an executor has no scheduler apart from its pool")

    async def picture(self) -> NoReturn:
        """Never possible."""
        raise UnsupportedError("an executor does not tell what waits")

    def tree(self, is_async: bool) -> NoReturn:
        """Never possible."""
        raise UnsupportedError("an executor's tasks start no tasks")

    def batched(self, function: OnBatch, size: int) -> NoReturn:
        """Never possible."""
        raise UnsupportedError("an executor gathers no calls")

    async def batched_actor(self, function: OnBatch, size: int) -> NoReturn:
        """Never possible."""
        raise UnsupportedError("an executor has no actors")

    def mapped(
        self,
        function: Callable[[int], int],
        on_list: Callable[[list[int]], list[int]],
    ) -> NoReturn:
        """Never possible: its `map` must be told how many items make a task."""
        raise UnsupportedError("an executor does not find out what makes a task")

    async def close(self) -> None:
        """Stop the pool."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
