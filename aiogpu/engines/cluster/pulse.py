"""Whether the head of a cluster is still there.

Ray waits for a head that has gone, its calls without end; and after a minute it ends
the program. So the head is looked for, and a cluster that has lost it is left in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from aiogpu.engines.cluster.reach import answers

BEAT: Final = 2.0
"""Seconds between two looks."""
LOST_AFTER: Final = 30.0
"""Seconds without a head after which it is given up; one that restarts is back then.

Ray's own limit is 60 s, and to leave such a cluster takes up to 20 s.
"""


class Pulse:
    """See above, for one event loop.

    Attributes:
        is_missed: whether it did not answer when it was looked for last.
    """

    def __init__(
        self,
        host: str,
        port: int,
        on_lost: Callable[[], object],
        on_beat: Callable[[], Awaitable[object]],
    ) -> None:
        self._host = host
        self._port = port
        self._on_lost = on_lost
        self._on_beat = on_beat
        self._task: asyncio.Task[None] | None = None
        self.is_missed = False

    def __repr__(self) -> str:
        return f"<Pulse of {self._host}:{self._port}>"

    def begin(self) -> None:
        """Look for it from now on."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def end(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        seen = loop.time()
        while loop.time() - seen < LOST_AFTER:
            said = await answers(self._host, self._port, LOST_AFTER / 3)
            self.is_missed = said is not None
            if not self.is_missed:
                seen = loop.time()
                await self._on_beat()
            await asyncio.sleep(BEAT)
        self._task = None
        self._on_lost()
