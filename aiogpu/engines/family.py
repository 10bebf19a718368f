"""What a task has started, as its own code sees it, wherever the task runs.

In a worker it is known by the worker's socket (`worker.children`); where tasks share
their program's process, by the task's host there. asyncio stays out, since plain
functions need none.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable

    from aiogpu.engines.base import Engine, Far, Waits
    from aiogpu.runtime.calls import Receiver, Site


class Family(Protocol):
    """The children of a task, as its plain code may stop them and wait for them.

    Attributes:
        upsets: how many have ended without a result so far.
    """

    upsets: int

    def demand(self, child: int, limit: int) -> None:
        """Let a child that is a stream yield so many items in all."""
        ...

    def withdraw(self, child: int) -> None:
        """Nobody wants a child's result any more: stop it."""
        ...

    def withdraw_soon(self, child: int) -> None:
        """The same where the collector runs, which may be amid anything."""
        ...

    def note_wait(
        self, waiter: object, children: tuple[int, ...], is_bound: bool = False
    ) -> None:
        """A thread or loop of the task waits for these, or for none any more.

        Args:
            waiter: the thread's number, or the loop.
            children: numbers of what it waits for.
            is_bound: whether it does nothing else before all of them have ended or
                one has failed, however long that takes.
        """
        ...

    def end_wait(self, waiter: object) -> None:
        """All that it waited for has ended."""
        ...

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Wait until something is done; False if time is up before."""
        ...


class Host(Family, Protocol):
    """The node of a task that shares its program's process, as the task sees it."""

    @property
    def waits(self) -> Waits:
        """Who is to be told of waits on an event loop."""
        ...

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Start a child of the task; gives its number."""
        ...

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; gives the call's number."""
        ...

    @property
    def program(self) -> AbstractEventLoop:
        """The loop of the program that has opened the node."""
        ...

    @property
    def far(self) -> Far | None:
        """Who knows values that are not this process's; None where all are."""
        ...

    def engine(self, loop: AbstractEventLoop | None) -> Engine | None:
        """Who takes the calls of code that a loop runs, or of plain code.

        None where the program's own engine takes them all.
        """
        ...

    def cancel(self, task: int) -> None:
        """Stop a child or a call."""
        ...

    async def why(self, name: str, task: int) -> NoReturn:
        """Refuse: only the program asks why a task waits."""
        ...


host_of_task: Final[ContextVar[Host | None]] = ContextVar("host_of_task", default=None)
"""The host of the task whose code asks; None in programs and in workers."""


def is_loop_running() -> bool:
    """Return whether an event loop runs in this thread; imports nothing to find out."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None
