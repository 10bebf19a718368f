"""What a workload may ask of an environment, whichever system stands behind it.

An environment that cannot do what is asked raises `UnsupportedError`; the run goes
on and its table says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")

Call = Callable[[int], Awaitable[T]]
"""Starts a task at once; its result is awaited."""


class UnsupportedError(Exception):
    """The system has nothing of the kind."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a task asks for.

    Attributes:
        is_isolated: each call in a process that has run nothing else.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    is_isolated: bool = False


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
    def programs(self) -> Programs:
        """How programs of it begin."""
        ...

    async def open(self, num_cpus: int, num_gpus: int = 0) -> None:
        """Start the system with so much to share out."""
        ...

    def task(self, function: Callable[[int], T], need: Need) -> Call[T]:
        """A function of `tasks` as a task; `UnsupportedError` if it cannot be."""
        ...

    def decision(self, num_gpus: int, need: Need) -> Callable[[int], None]:
        """One task from submission to end in the system's scheduler, without I/O.

        Raises:
            UnsupportedError: its scheduler cannot be had alone.
        """
        ...

    async def close(self) -> None:
        """Stop the system. It may be opened again."""
        ...
