"""The cgroup of a node, with a child cgroup for each slot.

It is a backup for the keepers: it ends the processes of a slot whose zygote and keeper
were both killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Final

from aiogpu.linux.cgroup import Cgroup, find_cgroup

_log: Final = logging.getLogger(__name__)

LIMIT: Final = 2.0
"""Most seconds for which a closing node waits for the end of its processes."""

FIRST_LOOK: Final = 1e-3
"""Seconds until the second try to remove the cgroups; each next pause is doubled."""


class NodeCgroup:
    """The cgroup of one node.

    Attributes:
        path: the path, "" if cgroups cannot be used.
        reason: why cgroups cannot be used, "" if they can.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.path = ""
        self.reason = "the node has not started"
        self._loop = loop

    def __repr__(self) -> str:
        return f"<NodeCgroup {self.path or self.reason}>"

    def choose(self, node: str) -> None:
        """Choose the path for a node of this name.

        The zygote makes the cgroup together with the first slot's. So there is nothing
        to remove if the zygote ends before it has forked.
        """
        place = find_cgroup()
        self.reason = place.reason
        if place.directory is not None:
            # The process id shows users to which program the cgroup belongs.
            self.path = f"{place.directory}/{node}-{os.getpid()}"

    def of_slot(self, slot: int) -> Cgroup | None:
        """Return the cgroup of a slot; None if cgroups cannot be used."""
        return Cgroup(f"{self.path}/{slot}") if self.path else None

    async def remove(self) -> None:
        """End all remaining processes and remove the cgroups, within `LIMIT`."""
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
