"""The systems, one a module, each imported when it is asked for; and what they share.

A system implements what it has; `LACKS` says what it has not, as its row does.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

Function = Callable[..., Any]
"""A function of `benchmarks.tasks`."""
Call = Callable[[int], "Future[Any]"]
"""Starts a task at once; its result is awaited, its `cancel()` stops the work."""
Use = Callable[..., "Future[Any]"]
"""Starts a task with values, or futures of results."""
Items = Callable[[int], AsyncIterator[int]]
"""Starts a stream of so many items."""
Preload = Sequence[str] | None
"""Modules to import once for all workers; None for the default."""

NEEDS: Final = {
    "aiogpu": "aiogpu",
    "node": "aiogpu",
    "executor": "concurrent.futures",
    "loky": "loky",
    "dask": "distributed",
    "xoscar": "xoscar",
    "ray": "ray",
}
"""The systems, and the module that each needs."""
MODULES: Final = {"node": "aiogpu", "loky": "executor"}
LACKS: Final = {
    "actors": ("has no actors", {"executor", "loky"}),
    "gpus": ("shares out no GPUs", {"executor", "loky", "xoscar"}),
    "handles": ("gives its tasks no handles", {"executor", "loky", "xoscar"}),
    "isolation": ("gives no task a process of its own", {"loky", "dask", "xoscar"}),
    "preload": ("imports nothing beforehand", {"loky", "dask", "xoscar", "ray"}),
    "streams": ("has calls of one result alone", {"executor", "loky", "dask"}),
}
"""What a workload may ask for: the words for a system without, and these systems."""
FIRST_RESULT: Final = """
import asyncio
from benchmarks.field.systems import Need, load
from benchmarks.tasks import noop

async def main():
    system = load("{}")
    await system.open(1, 0, None)
    await system.task(noop, Need())(1)
    print(1, flush=True)
    await system.close()

if __name__ == "__main__":
    asyncio.run(main())
"""
"""A program that prints a number after its first result."""


class Need(NamedTuple):
    """What a task asks for; isolated: a process that has run nothing else."""

    num_gpus: float = 0
    is_isolated: bool = False


class UnsupportedError(Exception):
    """The system has nothing of the kind."""


class System:
    """One system, on the running loop.

    Attributes:
        title: the system as the subject of a sentence, such as "an executor".
        libraries: distributions whose versions belong in the report.
    """

    title = "a system"
    libraries: tuple[str, ...] = ()

    def first_result(self) -> str:
        """Return a program that prints a number after its first result."""
        return FIRST_RESULT.format(type(self).__name__.lower())

    def lacks(self, feature: str) -> str:
        """Say that it has no such thing; return nothing if it has."""
        words, systems = LACKS[feature]
        name = type(self).__name__.lower()
        return f"{self.title} {words}" if name in systems else ""

    def require(self, *features: str) -> None:
        """Raise `UnsupportedError` if it lacks one of these."""
        for why in filter(None, map(self.lacks, features)):
            raise UnsupportedError(why)

    async def open(self, num_cpus: int, num_gpus: int, preload: Preload) -> None:
        """Start the system."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop the system. It may be opened again."""
        raise NotImplementedError

    def task(self, function: Function, need: Need) -> Call:
        """Return a function of one number as a task."""
        raise NotImplementedError

    def taking(self, function: Function) -> Use:
        """Return a function as a task that takes values, or futures of its results."""
        raise NotImplementedError

    def stream(self, function: Function) -> Items:
        """Return a generator as a task that gives its items as they come."""
        raise NotImplementedError

    async def actor(self, cls: type) -> Call:
        """Make an object in a process; return its `noop`, with which it lives."""
        raise NotImplementedError


def missing(name: str) -> str:
    """Return why this system cannot be had here; nothing if it can."""
    return "" if find_spec(NEEDS[name]) else f"{NEEDS[name]} is not installed"


def load(name: str) -> System:
    """Import and make a system."""
    module = import_module(f"{__name__}.{MODULES.get(name, name)}")
    system: System = getattr(module, name.title())()
    return system
