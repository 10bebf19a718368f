"""The node of which this process is a worker: a task's children, over its own socket.

Not a whole engine: a task starts others, waits for them and stops them; all else is
its program's business. asyncio stays out, since plain functions need none. Where
tasks share their program's process, each has a `Host` instead.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol

from aiogpu.errors import NodeError
from aiogpu.runtime.terms import Terms
from aiogpu.worker.context import current

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aiogpu.engines.base import Waits
    from aiogpu.runtime.call import Receiver as AnyReceiver
    from aiogpu.runtime.call import Site
    from aiogpu.worker.children import Children, Receiver


class Family(Protocol):
    """What a task has started, as its plain code may stop it and wait for it."""

    def withdraw(self, child: int) -> None:
        """Nobody wants a child's result any more: stop it."""
        ...

    def holds(self, child: int) -> bool:
        """Whether a child has not ended, and its task neither."""
        ...

    def note_wait(self, children: tuple[int, ...]) -> None:
        """The task's code waits for these, or for none any more."""
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

    def submit(self, site: Site, payload: bytes, receiver: AnyReceiver) -> int:
        """Start a child of the task; gives its number."""
        ...


host_of_task: Final[ContextVar[Host | None]] = ContextVar("host_of_task", default=None)
"""The host of the task whose code asks; None in programs and in workers."""


def family() -> Family:
    """The children of the task whose code asks.

    Raises:
        NodeError: it is none of a task.
    """
    return host_of_task.get() or children()


def children() -> Children:
    """The children of the task that this worker runs.

    Raises:
        NodeError: this process is no worker.
    """
    if current.children is None:
        raise NodeError("no task of aiogpu runs here.")
    return current.children


def submit(site: Site, payload: bytes, receiver: Receiver) -> int:
    """Start a child of the running task; gives its number."""
    mine = children()
    if not mine.knows(site.id):
        terms = Terms.of(site).pack()
        mine.declare(site.id, site.spec.name, terms, site.function.payload)
    return mine.submit(site.id, payload, receiver)


def cancel(child: int) -> None:
    """Stop a child; its receiver is told nothing any more."""
    children().withdraw(child)


class LoopLink:
    """One event loop's way to the children of the task that runs on it.

    The task waits as long as any of its code waits for a child; the driver is told
    once in a turn of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waits: dict[int, int] = {}
        self._is_told = True
        self._task = current.task
        self._children = children()
        if self._children.loop is not loop:
            # A loop of the user's own, in a plain function or a thread.
            loop.add_reader(self._children.fileno(), self._children.read)

    @property
    def is_current(self) -> bool:
        """Whether the task that it was made for still runs."""
        return self._task == current.task

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Start a child; gives its number."""
        return submit(site, payload, receiver)

    def cancel(self, child: int) -> None:
        """Stop a child."""
        cancel(child)

    def begin_wait(self, child: int) -> None:
        """Some code waits for a child now."""
        self._waits[child] = self._waits.get(child, 0) + 1
        if self._waits[child] == 1:
            self._tell_soon()

    def end_wait(self, child: int) -> None:
        """It waits no longer, although the child has not ended."""
        if child in self._waits:
            self._waits[child] -= 1
            if not self._waits[child]:
                del self._waits[child]
                self._tell_soon()

    def settle(self, child: int, has_failed: bool) -> None:
        """A child has ended; nobody waits for it any more."""
        if self._waits.pop(child, 0) and has_failed and self._waits:
            # A wait for the others may now be one that can never end.
            self._tell_soon()

    def _tell_soon(self) -> None:
        if self._is_told:
            self._is_told = False
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._is_told = True
        if self.is_current:
            self._children.note_wait(tuple(self._waits))
