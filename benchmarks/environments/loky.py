"""loky: executors of processes that are started anew where one has died."""

from __future__ import annotations

from concurrent.futures import Executor as Pool
from typing import cast

import loky

from benchmarks.environments.executor import Executor
from benchmarks.port import Programs

FIRST_RESULT = """
import asyncio
from loky import ProcessPoolExecutor
from time import perf_counter_ns

async def main():
    start = perf_counter_ns()
    with ProcessPoolExecutor(1) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, abs, 1)
        print(perf_counter_ns() - start, flush=True)

asyncio.run(main())
"""


class Loky(Executor):
    """A pool of its processes, with its own pickler."""

    name = "loky"
    title = "loky"
    libraries = ("loky", "cloudpickle", "uvloop")
    programs = Programs(
        "import loky", "from loky import ProcessPoolExecutor", FIRST_RESULT
    )

    def _preload(self, modules: list[str]) -> None:
        if modules:
            self._lacks("imports nothing beforehand")

    def _pool(self, num_cpus: int, *, is_isolated: bool) -> Pool:
        if is_isolated:
            self._lacks("gives no task a process of its own")
        pool: Pool = loky.ProcessPoolExecutor(num_cpus)
        return pool

    async def close(self) -> None:
        """Stop the pool, and what its processes are at."""
        while self._pools:
            _, pool = self._pools.popitem()
            cast("loky.ProcessPoolExecutor", pool).shutdown(kill_workers=True)
