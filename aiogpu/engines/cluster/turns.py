"""Calls of coroutines in the order in which each caller has sent them.

Ray begins the calls of an actor with coroutines as they come, which is nearly in their
order. So each has a number of its caller's, and waits for those before it. One that
does not come, since its sender's process has died, or the actor's, is not waited for
long.
"""

from __future__ import annotations

import asyncio
from itertools import count
from secrets import randbits
from typing import Final

PATIENCE: Final = 0.25
"""Seconds in which a call comes that was sent before another that has come."""
CALLERS: Final = 10_000
"""Of so many callers it is known how far they are."""
_BITS: Final = 32


class Numbers:
    """The numbers of one caller's calls to one actor."""

    def __init__(self) -> None:
        self._next = count(randbits(31) << _BITS | 1)

    def __repr__(self) -> str:
        return f"<Numbers {self._next}>"

    def take(self) -> int:
        """The next one."""
        return next(self._next)


class Turns:
    """See above, in the actor's process; used on its loop alone."""

    def __init__(self) -> None:
        self._due: dict[int, int] = {}
        self._waiting: dict[int, dict[int, asyncio.Future[None]]] = {}

    def __repr__(self) -> str:
        return f"<Turns of {len(self._due)} callers>"

    async def come(self, number: int) -> None:
        """Wait until all calls have begun that its caller has sent before.

        `number` is the call's, 0 for one that waits for none.
        """
        if not number:
            return
        caller, place = number >> _BITS, number & ((1 << _BITS) - 1)
        while place > self._due.get(caller, 1):
            await self._wait(caller, place)
        self._pass(caller, place)

    def _pass(self, caller: int, place: int) -> None:
        """It begins: the next one may, unless that has begun already."""
        due = self._due.pop(caller, 1)
        self._due[caller] = due = max(due, place + 1)
        while len(self._due) > CALLERS:
            del self._due[next(iter(self._due))]
        waiting = self._waiting.get(caller)
        if waiting is not None and due in waiting and not waiting[due].done():
            waiting[due].set_result(None)

    async def _wait(self, caller: int, place: int) -> None:
        waiting = self._waiting.setdefault(caller, {})
        turn = waiting[place] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(PATIENCE):
                await turn
        except TimeoutError:
            # What is missing does not come: the first of those that have is next.
            first = min(waiting)
            self._due[caller] = max(self._due.get(caller, 1), first)
            if not waiting[first].done():
                waiting[first].set_result(None)
        finally:
            del waiting[place]
            if not waiting:
                self._waiting.pop(caller, None)
