"""The node of which this process is a worker: a task's children, over its own socket.

Not a whole engine: a task starts others, waits for them and stops them; all else is
its program's business. asyncio stays out, since plain functions need none. Where
tasks share their program's process, each has a `Host` instead.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from aiogpu.engines.base import error_inside_task
from aiogpu.engines.family import host_of_task
from aiogpu.errors import MisuseError, NodeClosedError, NodeError
from aiogpu.runtime.callers.requests import Terms
from aiogpu.wire.codec import LARGEST_PAYLOAD
from aiogpu.wire.messages import Declare, Discard
from aiogpu.worker.context import current
from aiogpu.worker.services import services

if TYPE_CHECKING:
    import asyncio

    from aiogpu.engines.family import Family
    from aiogpu.observe.why import Why
    from aiogpu.runtime.calls import Site
    from aiogpu.worker.nested import Children
    from aiogpu.worker.objects import Receiver


def current_family() -> Family:
    """The children of the task whose code asks, wherever it runs.

    Raises:
        NodeError: it is none of a task.
    """
    return host_of_task.get() or family()


def family() -> Children:
    """The children of the task that this worker runs.

    Raises:
        NodeError: this process is no worker.
    """
    if services.children is None:
        raise NodeError("no task of aiogpu runs in this process, or in this thread.")
    return services.children


def submit(site: Site, payload: bytes, receiver: Receiver) -> int:
    """Start a child of the running task; gives its number.

    Raises:
        MisuseError: no task runs any more.
        SerializationError: the arguments are too large to be sent.
    """
    if len(payload) > LARGEST_PAYLOAD:
        # Only now: what it needs is not otherwise imported in a worker.
        from aiogpu.engines.admission import check_arguments

        check_arguments(site, payload)
    child = family().submit(site.id, payload, receiver, partial(describe, site))
    if not child:
        raise MisuseError(
            f"{site.spec.name}.remote() was called after the task had ended, by a "
            f"thread that it has left behind."
        )
    return child


def describe(site: Site) -> Declare:
    """Return what the driver must know of a site.

    Raises:
        MisuseError: a module that a task imports would start that task anew.
    """
    if site.spec.name == current.name:
        # Late: a task that starts itself is rare, and mostly meant.
        from aiogpu.worker.nested import refuse_to_begin_anew

        refuse_to_begin_anew()
    terms = Terms.of(site).pack()
    return Declare(site.id, site.spec.name, terms, site.function.payload)


def cancel(child: int) -> None:
    """Stop a child; its receiver is told nothing any more."""
    family().withdraw(child)


class LoopLink:
    """One event loop's way to the children of the task that runs on it.

    The task waits as long as any of its code waits for a child; the driver is told
    once in a turn of the loop.

    Attributes:
        loop: that event loop.
    """

    far = None

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = self._loop = loop
        self._waits: dict[int, int] = {}
        self._is_told = True
        self._has_told = False
        self._task = current.task
        self._children = family()
        if self._children.loop is not loop:
            # A loop of the user's own, in a plain function or a thread.
            loop.add_reader(self._children.fileno(), self._read)

    @property
    def is_current(self) -> bool:
        """True if the task that it was made for still runs."""
        return self._task == current.task != 0

    def _read(self) -> None:
        if self.is_current:
            with suppress(NodeClosedError):
                self._children.read()
                return
        # It would be called again and again, for what is not this loop's to read.
        self._loop.remove_reader(self._children.fileno())

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Start a child; gives its number."""
        return submit(site, payload, receiver)

    def ask(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; gives the call's number."""
        return self._children.ask(actor, method, payload, receiver)

    def find(self, name: str, namespace: str, receiver: Receiver) -> int:
        """Ask which actor has a name; gives the question's number."""
        return self._children.find(name, namespace, receiver)

    def fetch(self, value: int, receiver: Receiver) -> int:
        """Ask for a value; gives the question's number."""
        return self._children.fetch(value, receiver)

    def discard(self, value: int) -> None:
        """Nobody wants a value any more: stop whoever makes it."""
        self._children.tell(Discard(value))

    def demand(self, child: int, limit: int) -> None:
        """Let a child that is a stream yield so many items in all."""
        self._children.demand(child, limit)

    def cancel(self, child: int) -> None:
        """Stop a child."""
        cancel(child)

    async def why(self, name: str, child: int) -> Why:
        """Refuse: only the program asks why a task waits.

        Raises:
            NodeError: always.
        """
        raise error_inside_task(f"why() of the handle of {name}")

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

    def settle(self, child: int) -> None:
        """A child has ended; nobody waits for it any more."""
        self._waits.pop(child, None)

    def _tell_soon(self) -> None:
        if self._is_told:
            self._is_told = False
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._is_told = True
        # What has ended within the turn was not waited for, as the driver sees it.
        if self.is_current and (self._waits or self._has_told):
            self._children.note_wait(self, tuple(self._waits))
            self._has_told = bool(self._waits)
