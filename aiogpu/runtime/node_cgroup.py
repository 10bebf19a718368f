"""The cgroup of a node, in which its slots have theirs.

It is used beside the keepers, not instead of them: it ends what outlives a zygote and a
keeper that were both killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Final

from aiogpu.linux.cgroup import Cgroup, find_cgroup

_log: Final = logging.getLogger(__name__)

LIMIT: Final = 2.0
"""Seconds for which the end of what is in it is waited for."""

FIRST_LOOK: Final = 1e-3
"""Seconds until the first look at whether it has become empty; then twice that."""


class NodeCgroup:
    """The cgroup of one node, with one below it for each slot.

    Attributes:
        path: where it is or would be, "" where there can be none.
        reason: why there can be none, "" if there can.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.path = ""
        self.reason = "the node has not started"
        self._loop = loop

    def __repr__(self) -> str:
        return f"<NodeCgroup {self.path or self.reason}>"

    def choose(self, node: str) -> None:
        """Say where that of a node of this name is; its zygote makes it with a slot's.

        So there is nothing to remove where a zygote ends before it has forked.
        """
        place = find_cgroup()
        self.reason = place.reason
        if place.directory is not None:
            # The process id tells a reader whose it is.
            self.path = f"{place.directory}/{node}-{os.getpid()}"

    def end_slot(self, slot: int, then: Callable[[], None]) -> None:
        """End all that is in a slot's group, its keeper too; then call back.

        At once if nobody is there; otherwise when all have gone or `LIMIT` is over.
        """
        if not self.path:
            then()
            return
        group = Cgroup(f"{self.path}/{slot}")
        group.kill()
        self._look(group, then, FIRST_LOOK, self._loop.time() + LIMIT)

    def _look(
        self, group: Cgroup, then: Callable[[], None], pause: float, deadline: float
    ) -> None:
        if group.is_populated:
            if self._loop.time() < deadline:
                # Once more, for kernels that must end them one by one.
                group.kill()
                self._loop.call_later(
                    pause, self._look, group, then, 2 * pause, deadline
                )
                return
            _log.warning(
                "! processes %s of an ended worker do not die of SIGKILL; they may "
                "hold devices",
                group.pids(),
            )
        then()

    async def remove(self) -> None:
        """End the processes that are left and remove it with all below, in `LIMIT`."""
        if not self.path:
            return
        node, self.path = Cgroup(self.path), ""
        pause, deadline = FIRST_LOOK, self._loop.time() + LIMIT
        while not node.remove():
            if self._loop.time() >= deadline:
                _log.warning("! %s cannot be removed: %s", node.path, node.all_pids())
                return
            node.kill()
            await asyncio.sleep(pause)
            pause *= 2
