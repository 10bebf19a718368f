"""Work that is spread over turns of the event loop, so that no turn takes long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextvars import Context
from time import perf_counter
from typing import Final

SLICE: Final = 5e-3
"""Seconds of one turn of the loop that such work takes."""


_DONE: Final = object()


class Slices:
    """Steps of work that are done in order, for a short time in each turn.

    Args:
        loop: the loop.
        seconds: how long they may take in each turn.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float = SLICE) -> None:
        self._loop = loop
        self._seconds = seconds
        self._work: deque[Iterator[object]] = deque()
        self._until: float | None = None
        self._is_working = False

    def __repr__(self) -> str:
        return f"<Slices of {len(self._work)}>"

    def add(self, work: Iterator[object]) -> None:
        """Do the steps of an iterator, now if this turn has time left.

        An exception of a step ends its work, and is raised here or in the loop.
        """
        self._work.append(work)
        if self._until is None:
            self._begin_turn()
        if not self._is_working:
            self._do_some()

    def _begin_turn(self) -> None:
        self._until = perf_counter() + self._seconds
        # An empty context: the caller's would keep its variables alive.
        self._loop.call_soon(self._end_turn, context=Context())

    def _end_turn(self) -> None:
        self._until = None
        if self._work:
            self._begin_turn()
            self._do_some()

    def _do_some(self) -> None:
        assert self._until is not None, self
        self._is_working = True
        try:
            while self._work and perf_counter() < self._until:
                if next(self._work[0], _DONE) is _DONE:
                    self._work.popleft()
        finally:
            self._is_working = False

    async def run(self, work: Iterator[object]) -> None:
        """Add work, and return when it is done; raises what one of its steps raises."""
        done = self._loop.create_future()

        def steps() -> Iterator[object]:
            error: Exception | None = None
            try:
                yield from work
            except Exception as raised:  # noqa: BLE001 - raised for the caller
                error = raised
            if not done.cancelled() and error is not None:
                done.set_exception(error)
            elif not done.cancelled():
                done.set_result(None)

        self.add(steps())
        await done

    async def finish(self) -> None:
        """Return when all work is done."""
        while self._work:
            await self.run(iter(()))
