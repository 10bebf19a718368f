"""What is asked of a node while it is still opening."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from aiogpu.runtime.calls import Receiver

if TYPE_CHECKING:
    from aiogpu.engines.base import Engine
    from aiogpu.runtime.calls import Site


class Awaited(Receiver, Protocol):
    """A handle, or the end of a stream at which its items come in.

    Attributes:
        task_id: the task's number, set when it is started.
    """

    task_id: int

    def done(self) -> bool:
        """Whether nobody wants it any more, or it has ended."""
        ...


class Early(NamedTuple):
    """One request: how it is made, and who is told that it never will be."""

    start: Callable[[Engine], None]
    fail: Callable[[Exception], None]


class EarlyRequests:
    """Requests in the order in which they came."""

    def __init__(self) -> None:
        self._kept: list[Early] = []

    def add(
        self, start: Callable[[Engine], None], fail: Callable[[Exception], None]
    ) -> None:
        """Keep a request."""
        self._kept.append(Early(start, fail))

    def start_all(self, engine: Engine) -> None:
        """Make them; what one of them raises is told to who has asked."""
        kept, self._kept = self._kept, []
        for start, fail in kept:
            try:
                start(engine)
            except Exception as error:  # noqa: BLE001 - it is the handle's
                fail(error)

    def fail_all(self, error: Exception) -> bool:
        """Tell that none of them will be made; False if there was none."""
        kept, self._kept = self._kept, []
        for request in kept:
            request.fail(error)
        return bool(kept)


def submit_early(
    site: Site,
    payload: bytes,
    handle: Awaited,
    receiver: Receiver,
    engine: Engine,
) -> None:
    """Start a task whose handle exists, unless nobody wants it any more."""
    if not handle.done():
        handle.task_id = engine.submit(site, payload, receiver)


def retrieve(opening: asyncio.Task[None]) -> None:
    """Look at its error, which is told elsewhere, so that asyncio does not."""
    if not opening.cancelled():
        opening.exception()
