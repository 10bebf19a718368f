"""The items of a generator that runs on the cluster, on their way to its consumer.

Ray holds the generator as soon as so many items wait as the stream allows. So items are
taken out of Ray only as the consumer takes them here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from aiogpu.engines.cluster.shared import arrived

if TYPE_CHECKING:
    from aiogpu.client.interface import ItemReceiver
    from aiogpu.engines.cluster.calls import Calls, Live


class Inflow:
    """See above: calling it stops the generator."""

    def __init__(
        self, calls: Calls, number: int, live: Live, items: Any, window: int
    ) -> None:
        self._calls = calls
        self._number = number
        self._live = live
        self._items = items
        self._taken = 0
        self._window = window
        self._stop: Callable[[Any], object] | None = None
        self._limit = window
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Inflow {self._live.name}, {self._taken} of {self._limit}>"

    @property
    def is_held(self) -> bool:
        """True if its consumer has to take items before more are taken out of Ray."""
        return self._taken >= self._limit - self._window + step_of(self._window)

    def begin(self, stop: Callable[[Any], object] | None = None) -> None:
        """Take items as they come; `stop` ends the generator, where Ray is not to."""
        self._stop = stop
        self._live.stop, self._live.waitables = self, (self._items,)
        self._live.tell_sent()
        self._task = self._calls.loop.create_task(self._take())

    def rise(self, limit: int) -> None:
        """The consumer has taken items: so many may come in all."""
        self._limit = max(self._limit, limit)
        self._more.set()

    def __call__(self) -> None:
        """Stop the generator; nobody wants its items any more."""
        if self._stop is None:
            cancel = self._calls.cancelling.cancel
            cancel(self._items)
            kill = partial(cancel, self._items, at_once=True)
            self._calls.loop.call_later(self._live.grace, kill)
        else:
            # Ray holds no generator of which nobody takes the items any more.
            self._stop(self._items.completed())
        self._items, self._live.waitables = None, ()
        self._calls.ending.pop(self._number, None)
        if self._task is not None:
            self._task.cancel()

    async def _take(self) -> None:
        try:
            async for ref in self._items:
                found = await ref
                self._pass(found, ref)
                del ref, found
                await self._allowed()
        except asyncio.CancelledError:
            if self._live.receiver is None:
                return
            raise
        except Exception as error:  # noqa: BLE001 - whatever ends a stream is told
            caught = error
            self._calls.end(
                self._number, lambda receiver: self._live.tell_error(receiver, caught)
            )
            return
        self._calls.end(self._number, lambda receiver: receiver.receive(b""))

    async def _allowed(self) -> None:
        """Wait until the consumer may take one more before it says that it has."""
        while self.is_held:
            self._live.waitables = ()
            self._more.clear()
            await self._more.wait()
        self._live.waitables = (self._items,)

    def _pass(self, found: Any, ref: Any) -> None:
        receiver = self._live.receiver
        if receiver is not None:
            self._taken += 1
            items = (arrived(found, ref),)
            cast("ItemReceiver", receiver).receive_items(items)
            self._calls.tell_delivered()


def step_of(window: int) -> int:
    """After how many items a consumer says that it has taken them; see `MapWindow`."""
    return (window + 1) // 2


def ahead_at_ray(window: int) -> int:
    """Return how many items may wait in Ray, beside those that wait here."""
    return max(window - step_of(window), 1)
