"""The `ProcessPoolExecutor` of the standard library and of loky, used from asyncio."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

from benchmarks.field.systems import (
    REAL_CPUS,
    REAL_TASKS,
    Call,
    Function,
    Need,
    Preload,
    System,
    Use,
)

FIRST_RESULT: Final = """
import asyncio
from {} import ProcessPoolExecutor

async def main():
    with ProcessPoolExecutor(1) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, abs, 1)
        print(1, flush=True)

asyncio.run(main())
"""


REAL_WORK: Final = """
from {module} import ProcessPoolExecutor
from benchmarks.field.programs.{program} import work

if __name__ == "__main__":
    with ProcessPoolExecutor({cpus}) as pool:
        assert len(list(pool.map(work, range({count})))) == {count}
        print(1, flush=True)
"""


class Executor(System):
    """A pool with a process for each CPU; a second pool gives each task a process."""

    title = "an executor"
    libraries: tuple[str, ...] = ("uvloop",)
    module = "concurrent.futures"

    def first_result(self) -> str:
        """Return a program as users write it, whose pool forks by default."""
        return FIRST_RESULT.format(self.module)

    def real_work(self, program: str) -> str:
        """Return a program as users write it: its pool forks, and reuses processes."""
        return REAL_WORK.format(
            module=self.module, program=program, cpus=REAL_CPUS, count=REAL_TASKS
        )

    def __init__(self) -> None:
        self._pools: dict[bool, Any] = {}
        self._num_cpus = 0

    async def open(self, num_cpus: int, num_gpus: int, preload: Preload) -> None:
        forkserver = multiprocessing.get_context("forkserver")
        forkserver.set_forkserver_preload(list(preload or ()))
        self._num_cpus = num_cpus
        self._pools[False] = self.pool(num_cpus, False)

    def pool(self, num_cpus: int, is_isolated: bool) -> Any:
        # Not "fork": this process runs an event loop.
        context = multiprocessing.get_context("forkserver")
        each = 1 if is_isolated else None
        return ProcessPoolExecutor(num_cpus, context, max_tasks_per_child=each)

    def task(self, function: Function, need: Need) -> Call:
        """`pool.submit`, as an asyncio future."""
        if need.is_isolated not in self._pools:
            self._pools[True] = self.pool(self._num_cpus, True)
        return self._submitting(function, self._pools[need.is_isolated])

    def taking(self, function: Function) -> Use:
        """`pool.submit` with values."""
        return self._submitting(function, self._pools[False])

    def _submitting(self, function: Function, pool: Any) -> Use:
        return lambda *values: asyncio.wrap_future(pool.submit(function, *values))

    async def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].shutdown(cancel_futures=True)


class Loky(Executor):
    """A pool of loky's processes, with loky's pickler."""

    title = "loky"
    libraries = ("loky", "cloudpickle", "uvloop")
    module = "loky"

    def pool(self, num_cpus: int, is_isolated: bool) -> Any:
        import loky

        return loky.ProcessPoolExecutor(num_cpus)

    async def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].shutdown(kill_workers=True)
