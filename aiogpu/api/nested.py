"""`.remote()` inside a task: which kind of handle, and who is told of waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiogpu.api.handle import Handle
from aiogpu.engines.base import Waits
from aiogpu.engines.nested import LoopLink

if TYPE_CHECKING:
    from aiogpu.runtime.call import Site

T = TypeVar("T")

_sessions: Final[dict[asyncio.AbstractEventLoop, TaskSession]] = {}


class ChildHandle(Handle[T]):
    """A handle of which the task's node knows whether anybody waits for it.

    Its loop may be one of the user's own, in a plain task, that was closed before the
    child has ended: then nobody is left to be told.
    """

    __slots__ = ("_waits",)

    def __init__(
        self, task_name: str, waits: Waits, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(task_name, waits.cancel, loop)
        self._waits = waits

    def __await__(self) -> Generator[Any, None, T]:
        if self.done():
            return self.result()
        self._waits.begin_wait(self.task_id)
        try:
            return (yield from super().__await__())
        finally:
            self._waits.end_wait(self.task_id)

    __iter__ = __await__

    def add_done_callback(
        self, fn: Callable[[Any], object], /, *, context: Context | None = None
    ) -> None:
        """Call `fn(handle)` soon after the end; see `asyncio.Future`."""
        super().add_done_callback(fn, context=context)
        if not self.done():
            self._waits.begin_wait(self.task_id)

    def remove_done_callback(self, fn: Callable[[Any], object], /) -> int:
        """Undo `add_done_callback`; gives how many there were."""
        removed = super().remove_done_callback(fn)
        for _ in range(removed):
            self._waits.end_wait(self.task_id)
        return removed

    def receive(self, payload: bytes) -> None:
        """Take the pickled result; called by the engine."""
        self._waits.settle(self.task_id, has_failed=False)
        if not self.get_loop().is_closed():
            super().receive(payload)

    def fail(self, error: Exception) -> None:
        """Take the error in place of a result; called by the engine."""
        self._waits.settle(self.task_id, has_failed=True)
        if not self.get_loop().is_closed():
            super().fail(error)


class TaskSession:
    """The running loop's tie to the node of which this process is a worker."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._link = LoopLink(loop)

    @property
    def is_current(self) -> bool:
        """Whether the task that it was made for still runs."""
        return self._link.is_current

    def submit(self, site: Site, payload: bytes) -> Handle[Any]:
        """Start a child of the running task."""
        handle: ChildHandle[Any] = ChildHandle(site.spec.name, self._link, self._loop)
        handle.task_id = self._link.submit(site, payload, handle)
        return handle


def session_of_task(loop: asyncio.AbstractEventLoop) -> TaskSession:
    """The session of the task that runs on a loop; made when it is first asked for."""
    session = _sessions.get(loop)
    if session is None or not session.is_current:
        _sessions.clear()
        session = _sessions[loop] = TaskSession(loop)
    return session
