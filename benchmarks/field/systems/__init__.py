"""The systems, one in each module, which is imported on demand; and the common parts.

A system implements the features that it has; `LACKS` names the missing ones.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

Function = Callable[..., Any]
"""A function of `benchmarks.tasks`."""
Call = Callable[[int], "Future[Any]"]
"""Starts a task at once; the future's `cancel()` stops the work."""
Use = Callable[..., "Future[Any]"]
"""Starts a task with values, or with futures of other tasks."""
Items = Callable[[int], AsyncIterator[int]]
"""Starts a stream of a number of items."""
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
"""The systems, and the module that each of them needs."""
MODULES: Final = {"node": "aiogpu", "loky": "executor"}
LACKS: Final = {
    "actors": ("has no actors", {"executor", "loky"}),
    "gpus": ("shares out no GPUs", {"executor", "loky", "xoscar"}),
    "handles": ("gives its tasks no handles", {"executor", "loky", "xoscar"}),
    "isolation": ("gives no task a process of its own", {"loky", "dask", "xoscar"}),
    "preload": ("imports nothing beforehand", {"loky", "dask", "xoscar", "ray"}),
    "streams": ("has calls of one result alone", {"executor", "loky", "dask"}),
}
"""Features of workloads: the reason in the row of a system without, and the systems."""
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
REAL_WORK: Final = """
import asyncio
from benchmarks.field.programs.{program} import work
from benchmarks.field.systems import Need, load

async def main():
    system = load("{system}")
    await system.open({cpus}, {gpus}, None)
    call = system.task(work, Need({share}, {is_isolated}))
    await asyncio.gather(*map(call, range({count})))
    print(1, flush=True)
    await system.close()

if __name__ == "__main__":
    asyncio.run(main())
"""
"""A program that prints a number once its tasks have ended."""
REAL_CPUS: Final = 8
REAL_GPUS: Final = 2
REAL_SHARE: Final = 0.25
REAL_TASKS: Final = 40


class Need(NamedTuple):
    """The needs of a task; isolated means a process that has run no other task."""

    num_gpus: float = 0
    is_isolated: bool = False


class UnsupportedError(Exception):
    """The system lacks this feature."""


class System:
    """One system, on the running loop.

    Attributes:
        title: the name in a sentence, such as "an executor".
        libraries: distributions whose versions the report states.
    """

    title = "a system"
    libraries: tuple[str, ...] = ()

    def first_result(self) -> str:
        """Return a program that prints a number after its first result."""
        return FIRST_RESULT.format(type(self).__name__.lower())

    def real_work(self, program: str) -> str:
        """Return a program that prints a number after tasks with a slow import.

        Args:
            program: the module of `benchmarks.field.programs` with the task.
        """
        return REAL_WORK.format(
            program=program,
            system=type(self).__name__.lower(),
            cpus=REAL_CPUS,
            gpus=0 if self.lacks("gpus") else REAL_GPUS,
            share=0 if self.lacks("gpus") else REAL_SHARE,
            is_isolated=not self.lacks("isolation"),
            count=REAL_TASKS,
        )

    def lacks(self, feature: str) -> str:
        """Return why the system lacks a feature, or "" if the system has it."""
        words, systems = LACKS[feature]
        name = type(self).__name__.lower()
        return f"{self.title} {words}" if name in systems else ""

    def require(self, *features: str) -> None:
        """Raise `UnsupportedError` if the system lacks one of these."""
        for why in filter(None, map(self.lacks, features)):
            raise UnsupportedError(why)

    async def open(self, num_cpus: int, num_gpus: int, preload: Preload) -> None:
        """Start the system."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop the system, which may be opened again."""
        raise NotImplementedError

    def task(self, function: Function, need: Need) -> Call:
        """Return a function of one number as a task."""
        raise NotImplementedError

    def taking(self, function: Function) -> Use:
        """Return a function as a task that takes values, or futures of other tasks."""
        raise NotImplementedError

    def stream(self, function: Function) -> Items:
        """Return a generator as a task whose items arrive one by one."""
        raise NotImplementedError

    async def actor(self, cls: type) -> Call:
        """Make an actor; return its `noop`, which keeps the actor alive."""
        raise NotImplementedError


_handles: Final[WeakKeyDictionary[Future[Any], Any]] = WeakKeyDictionary()
"""The system's own handle of each asyncio future, which keeps the handle alive."""


def tracked(
    future: Future[Any], handle: Any, cancel: Callable[[Any], object]
) -> Future[Any]:
    """Return an asyncio future that keeps the system's handle and cancels it."""

    def on_done(_: Future[Any]) -> None:
        if future.cancelled():
            cancel(handle)

    _handles[future] = handle
    future.add_done_callback(on_done)
    return future


def with_handles(values: Sequence[Any]) -> list[Any]:
    """Return the values, with the system's own handles in place of futures."""
    return [_handles[each] if isinstance(each, Future) else each for each in values]


def missing(name: str) -> str:
    """Return why this system cannot run here, or "" if it can."""
    return "" if find_spec(NEEDS[name]) else f"{NEEDS[name]} is not installed"


def load(name: str) -> System:
    """Import and create a system."""
    module = import_module(f"{__name__}.{MODULES.get(name, name)}")
    system: System = getattr(module, name.title())()
    return system
