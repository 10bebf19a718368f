"""Who has connected to a node and has not said yet which program it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from aiogpu.runtime.transport import Peer

WITHIN: Final = 10.0
"""Seconds in which a program says it; it does so at once, unless it is stopped."""


class Strangers:
    """See above.

    Args:
        loop: the event loop.
        on_late: told of one that has not said it in time.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_late: Callable[[Peer], object]
    ) -> None:
        self._loop = loop
        self._on_late = on_late
        self._timers: dict[Peer, asyncio.TimerHandle] = {}

    def __repr__(self) -> str:
        return f"<Strangers {len(self._timers)}>"

    def come(self, peer: Peer) -> None:
        """It has connected."""
        self._timers[peer] = self._loop.call_later(WITHIN, self._late, peer)

    def _late(self, peer: Peer) -> None:
        del self._timers[peer]
        self._on_late(peer)

    def know(self, peer: Peer) -> None:
        """It has said who it is, or was told to go."""
        timer = self._timers.pop(peer, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Wait for nobody any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
