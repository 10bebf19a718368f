"""Staying awake for a moment, where the next message is about to come.

Between a client and a worker a node has nothing to do for some tens of microseconds,
and waking it costs more than that: measured on two cores, a call through the service
takes 102 to 130 us with this and 290 us without. It costs CPU only while messages
follow each other so closely that it pays, and a node of a program's own, on a loop
that is not ours, never does it.
"""

from __future__ import annotations

import asyncio
import os
from time import perf_counter
from typing import Final

SHORT: Final = 300e-6
"""Seconds; after a pause between two messages that was no longer, it stays awake."""
AWAKE: Final = 100e-6
"""Seconds for which it does, from the last message on."""


class Wakefulness:
    """See above. Made for the running loop, told of each message."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._last = 0.0
        self._is_awake = False
        # With one CPU it would only keep the others from running.
        self._may = len(os.sched_getaffinity(0)) > 1

    def note(self, count: int) -> None:
        """So many messages have come together.

        Several are a flood: there the next ones are long under way, and whoever sends
        them needs the CPU.
        """
        if count != 1:
            self._last = 0.0
            return
        before, self._last = self._last, perf_counter()
        if not self._is_awake and self._may and self._last - before < SHORT:
            self._is_awake = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Have the loop look again at once, instead of sleeping."""
        if perf_counter() - self._last < AWAKE:
            self._loop.call_soon(self._look)
        else:
            self._is_awake = False
