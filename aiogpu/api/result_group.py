"""The handles of one call that has several results, and who stops it.

Each of them is a value of its own. The work goes on as long as somebody wants one of
them; when all are cancelled, it is stopped.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aiogpu.api.blocking import handle_for
from aiogpu.api.blocking_handle import BlockingHandle
from aiogpu.api.submission import host_beside_loop, session_of_caller
from aiogpu.client.current import services
from aiogpu.errors import InternalError
from aiogpu.serialization.payload import Payload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiogpu.api.session import Session
    from aiogpu.client.function_spec import Site
    from aiogpu.client.interface import Client
    from aiogpu.engines.base import Engine
    from aiogpu.observe.why import Why
    from aiogpu.wire.messages import Failed


class ResultPart(Protocol):
    """The handle of one of the results."""

    def receive(self, payload: bytes) -> None:
        """Take the pickled result."""
        ...

    def reject(self, failed: Failed) -> None:
        """Take why there is none."""
        ...

    def fail(self, error: Exception) -> None:
        """Take the error in place of a result."""
        ...


class ResultGroup:
    """See above: the receiver of the call, and the owner of its handles.

    Attributes:
        task_id: the call's number.
        handles: one for each result.
        stop: stops the call, given its number.
        ask: says why it waits, given its name and number.
    """

    def __init__(self) -> None:
        self.task_id = 0
        self.handles: tuple[Any, ...] = ()
        self.stop: Callable[[int], object]
        self.ask: Callable[[str, int], Awaitable[Why]]
        self._wanted = 0

    def __repr__(self) -> str:
        return f"<ResultGroup {len(self.handles)} results of task {self.task_id}>"

    def begin(self, handles: tuple[Any, ...]) -> None:
        """Serve these handles."""
        self.handles = handles
        self._wanted = len(handles)

    def note(self, number: int) -> None:
        """The call was made, under that number."""
        self.task_id = number
        for handle in self.handles:
            # Some were given to others before.
            if hasattr(handle, "task_id"):
                handle.task_id = number

    def done(self) -> bool:
        """Return whether nobody wants a result any more, or all have come."""
        return all(handle.done() for handle in self.handles)

    def cancel(self, _task: int) -> None:
        """One of them is not wanted; see `Owner`."""
        self._wanted -= 1
        if not self._wanted:
            self.stop(self.task_id)

    async def why(self, name: str, _task: int) -> Why:
        """Return why the call waits."""
        return await self.ask(name, self.task_id)

    def receive(self, payload: bytes) -> None:
        """The call has ended; see `Receiver`."""
        parts = payload.parts if type(payload) is Payload else ()
        if len(parts) != len(self.handles):
            self.fail(InternalError(f"{self!r} came as {len(parts)}"))
            return
        for handle, part in zip(self.handles, parts, strict=True):
            handle.receive(part)

    def reject(self, failed: Failed) -> None:
        """It has no results."""
        for handle in self.handles:
            handle.reject(failed)
        self._quieten()

    def fail(self, error: Exception) -> None:
        """It has none, for that reason."""
        for handle in self.handles:
            handle.fail(error)
        self._quieten()

    def _quieten(self) -> None:
        """One of them tells asyncio of the failure, if nobody looks at it."""
        for handle in self.handles[1:]:
            if not handle.cancelled():
                handle.exception()

    def abandon(self) -> None:
        """The task that made the call has ended first."""
        for handle in self.handles:
            handle.abandon()


def submit_several(count: int, site: Site, payload: bytes) -> tuple[Any, ...]:
    """Start a task that has several results; gives the handle of each.

    Args:
        count: how many.
        site: what is called.
        payload: the pickled arguments.
    """
    return call_several(site.spec.name, count, Submission(site, payload))


class Submission(NamedTuple):
    """A task to be started for a `ResultGroup`, from wherever it is called.

    Attributes:
        site: what is called.
        payload: the pickled arguments.
    """

    site: Site
    payload: bytes

    def in_program(self, session: Session, several: ResultGroup) -> None:
        """Start it on the program's node."""
        several.stop, several.ask = session.cancel, session.why
        session.when_open(partial(self._start, several), several.fail)

    def _start(self, several: ResultGroup, engine: Engine) -> None:
        if not several.done():
            several.note(engine.submit(self.site, self.payload, several))

    def by_client(self, client: Client, several: ResultGroup) -> None:
        """Start it for the task whose code asks."""
        several.stop, several.ask = client.cancel, client.why
        several.note(client.submit(self.site, self.payload, several))


class Start(Protocol):
    """How a call is made, from wherever it is called; see `Submission`."""

    def in_program(self, session: Session, several: ResultGroup) -> None:
        """Make it on the program's node."""
        ...

    def by_client(self, client: Client, several: ResultGroup) -> None:
        """Make it for the task whose code asks."""
        ...


def call_several(name: str, count: int, start: Start) -> tuple[Any, ...]:
    """Make a call that has several results; gives the kind of handles that fit."""
    several = ResultGroup()
    names = [f"{name}[{index}]" for index in range(count)]
    client = services.client or host_beside_loop()
    if client is not None:
        several.begin(tuple(handle_for(client, one, several) for one in names))
        start.by_client(client, several)
    else:
        session = session_of_caller()
        several.begin(tuple(session.new_handle(one, several) for one in names))
        start.in_program(session, several)
    for index, handle in enumerate(several.handles):
        handle.part = index
        if isinstance(handle, BlockingHandle):
            handle.child = several.task_id
        else:
            handle.task_id = several.task_id
    return several.handles
