"""What a workload may ask of an environment, whichever system stands behind it.

An environment that cannot do what is asked raises `UnsupportedError`; the run goes
on and its table says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")

Call = Callable[[int], asyncio.Future[T]]
"""Starts a task at once; its result is awaited, its `cancel()` stops the work."""

OnBatch = Callable[[list[int]], Coroutine[Any, Any, list[int]]]
"""Takes a list and gives one as long, in this process."""

OnItem = Callable[[int], Coroutine[Any, Any, int]]
"""The same for one item."""

Preload = Sequence[str] | None
"""Modules that are imported once for all workers; None for the system's default."""


Use = Callable[..., asyncio.Future[Any]]
"""Starts a task with values, or handles of them, in any number."""

Create = Callable[[], Awaitable[Call[None]]]
"""Makes an actor, once it is awaited; gives its method `noop`, with which it lives."""


class Gatherer(NamedTuple):
    """One function in another process, in two ways.

    Attributes:
        by_hand: takes a list and gives one as long.
        by_item: the same for one item; such calls are gathered into lists there.
    """

    by_hand: Callable[[list[int]], asyncio.Future[list[int]]]
    by_item: Callable[[int], asyncio.Future[int]]


class Mapped(NamedTuple):
    """One function in other processes, over many items, in two ways.

    Attributes:
        by_hand: a task that takes a list and gives one as long.
        by_map: gives the results in order, of as many items a task as is good.
    """

    by_hand: Callable[[list[int]], asyncio.Future[list[int]]]
    by_map: Callable[[Iterable[int]], AsyncIterator[int]]


class UnsupportedError(Exception):
    """The system has nothing of the kind."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a task asks for.

    Attributes:
        is_isolated: each call in a process that has run nothing else.
        grace: seconds that a cancelled task gets before it is stopped by force; None
            for the system's default.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    is_isolated: bool = False
    grace: float | None = None


class Programs(NamedTuple):
    """Sources for fresh interpreters.

    Attributes:
        package: the statement that imports the system and nothing more.
        names: the statement with which a program of it begins.
        first_result: a program that prints the nanoseconds from before the system
            is started to after the first result.
    """

    package: str
    names: str
    first_result: str


class Paper(Protocol):
    """A system's scheduler alone. Its workers are paper: they answer when told to."""

    @property
    def spent(self) -> int:
        """Nanoseconds inside the scheduler so far, without what drives it here."""
        ...

    @property
    def busy(self) -> int:
        """How many workers have a task."""
        ...

    def submit(self, need: Need) -> None:
        """Submit one task."""
        ...

    def finish(self) -> Need:
        """End one of the running tasks, as chance has it; tells what it needed."""
        ...


class Environment(Protocol):
    """One system, on the running loop."""

    @property
    def name(self) -> str:
        """What the report calls it."""
        ...

    @property
    def libraries(self) -> tuple[str, ...]:
        """Distributions whose versions belong in the report."""
        ...

    @property
    def lasting(self) -> Mapping[str, str]:
        """Its processes that outlive tasks: a word for them, how their names begin."""
        ...

    @property
    def programs(self) -> Programs:
        """How programs of it begin."""
        ...

    async def open(
        self, num_cpus: int, num_gpus: int = 0, preload: Preload = None
    ) -> None:
        """Start the system with so much to share out.

        Raises:
            UnsupportedError: it imports no modules beforehand.
        """
        ...

    def image(self, preload: Preload = None) -> str:
        """Source that makes an interpreter what isolated tasks are forked from.

        Raises:
            UnsupportedError: they are not forked.
        """
        ...

    async def free_gpus(self) -> float:
        """How many GPUs are free now, shares included.

        Raises:
            UnsupportedError: it shares out none.
        """
        ...

    def task(self, function: Callable[[int], T], need: Need) -> Call[T]:
        """A function of `tasks` as a task; `UnsupportedError` if it cannot be."""
        ...

    def taking(self, function: Callable[..., object]) -> Use:
        """A function of `tasks` as a task that is given values, or their handles.

        Raises:
            UnsupportedError: handles are no arguments.
        """
        ...

    async def keep(self, value: object) -> object:
        """Keep a value for tasks; gives its handle.

        Raises:
            UnsupportedError: no values are kept.
        """
        ...

    def stream(
        self, function: Callable[[int], Any]
    ) -> Callable[[int], AsyncIterator[int]]:
        """A generator of `tasks` as a task; gives its items as they come.

        Raises:
            UnsupportedError: tasks give one result.
        """
        ...

    def actor(self, cls: type) -> Create:
        """A class of `tasks` whose objects have a process each.

        Raises:
            UnsupportedError: the system has no actors.
        """
        ...

    def decision(self, num_gpus: int, need: Need) -> Callable[[int], None]:
        """One task from submission to end in the system's scheduler, without I/O.

        Raises:
            UnsupportedError: its scheduler cannot be had alone.
        """
        ...

    def paper(self, num_cpus: int, num_gpus: int) -> Paper:
        """The system's scheduler with so much to share out, without I/O.

        Raises:
            UnsupportedError: its scheduler cannot be had alone.
        """
        ...

    async def picture(self) -> object:
        """What a user is given who asks what runs and what waits.

        Raises:
            UnsupportedError: he cannot ask.
        """
        ...

    def tree(self, is_async: bool) -> Call[int]:
        """A task that starts so many tasks, each of which starts one less.

        Of these the last do nothing; a task that starts others waits for them, and
        gives how many there were below it.

        Args:
            is_async: whether those that start others are coroutines.

        Raises:
            UnsupportedError: tasks start no tasks.
        """
        ...

    def batched(self, function: OnBatch, size: int) -> OnItem:
        """A function that is called with one item, and runs with up to `size`.

        Raises:
            UnsupportedError: calls are not gathered.
        """
        ...

    async def batched_actor(self, function: OnBatch, size: int) -> Gatherer:
        """The same in a process of its own, where calls with one item are gathered.

        Raises:
            UnsupportedError: the system has no actors, or gathers no calls.
        """
        ...

    def mapped(
        self,
        function: Callable[[int], int],
        on_list: Callable[[list[int]], list[int]],
    ) -> Mapped:
        """A function of `tasks`, and the same for each of a list.

        Raises:
            UnsupportedError: it does not find out how many items make a task.
        """
        ...

    async def close(self) -> None:
        """Stop the system. It may be opened again."""
        ...
