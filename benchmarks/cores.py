"""On which core the driver and the floor's worker run.

Left to itself the kernel has both on one core for minutes, and then on two for
minutes. A call of the floor takes 15 us there and 50 to 75 us here, most of it for a
core to wake; so beside a floor that moves, a ratio says more of the kernel than of
what is measured.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Final

from benchmarks.floor import Floor, open_floor

FLOOR: Final = "benchmarks.floor"


@contextmanager
def running_on(cores: set[int]) -> Iterator[None]:
    """Have this thread, and the processes that it starts, run on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def one_core() -> set[int]:
    """The first that this process may use."""
    return {min(os.sched_getaffinity(0))}


def next_core() -> set[int]:
    """Another than the first; the same where there is one."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {others[0] if others else first}


@asynccontextmanager
async def floor_apart(module: str = FLOOR) -> AsyncIterator[Floor]:
    """The floor's worker on a core of its own, and this thread on another.

    What this process has started before, workers of a node too, may run on any.
    """
    first, second = one_core(), next_core()
    async with AsyncExitStack() as opened:
        with running_on(second):
            floor = await opened.enter_async_context(open_floor(module))
        with running_on(first):
            yield floor
