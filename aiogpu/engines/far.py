"""The port's part for values that another process keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from aiogpu.engines.base import Waits

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from aiogpu.observe.why import Why
    from aiogpu.serialization.references import Reference


class ValueLink(Waits, Protocol):
    """The way to values that are not this process's own."""

    @property
    def loop(self) -> AbstractEventLoop:
        """The event loop."""
        ...

    @property
    def far(self) -> Far | None:
        """Whose way it is, None in a worker."""
        ...

    def fetch(self, value: int, receiver: Any) -> int:
        """Ask for a value; gives the question's number."""
        ...

    def discard(self, value: int) -> None:
        """Nobody wants a value any more: stop whoever makes it."""
        ...

    def cancel(self, task: int) -> None:
        """Nobody wants an answer any more."""
        ...

    async def why(self, name: str, task: int) -> Why:
        """Say why a task waits."""
        ...


class Lent(Protocol):
    """What was lent to this process."""

    def loan(self, identity: int, /) -> Reference:
        """The value to which a handle is being unpickled."""
        ...


class Given(Protocol):
    """What this process gives to others."""

    def share(self, handle: Any, /) -> Reference:
        """What others refer to who are given a handle."""
        ...

    def promise(self) -> Reference:
        """The same before its task is started."""
        ...

    def keep(self, promised: Any, handle: Any, /) -> None:
        """The task of what was promised is started."""
        ...

    def fail(self, promised: Any, error: BaseException, /) -> None:
        """The task of what was promised is never started."""
        ...

    def drop(self, child: int, loan: Any, /) -> None:
        """One of a child's several results is cancelled; the others may still come."""
        ...

    def put(self, payload: bytes, /) -> Reference:
        """Have a value kept."""
        ...


class Far(Protocol):
    """What a program has to do with values that another process keeps."""

    @property
    def loans(self) -> Lent:
        """What was lent to this process."""
        ...

    @property
    def shares(self) -> Given:
        """What it gives to others."""
        ...

    @property
    def link(self) -> ValueLink:
        """The way to values."""
        ...
