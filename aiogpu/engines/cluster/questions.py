"""What an engine on a Ray cluster answers about itself, and who may ask."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiogpu.client.current import error_inside_task
from aiogpu.errors import NodeClosedError, NodeDiedError

if TYPE_CHECKING:
    from aiogpu.engines.cluster.overview import Overview
    from aiogpu.engines.cluster.pulse import Pulse
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why


class Questions:
    """See above.

    Attributes:
        overview: knows the answers.
        loop: the event loop that the engine is for.
        is_open: whether Ray can be asked.
        is_inside: whether this is the code of a task, in a worker of Ray's.
        pulse: looks for the cluster's head; None inside a task.
        lost: why the cluster is taken for lost; None while it is not.
    """

    def __init__(self, overview: Overview, loop: asyncio.AbstractEventLoop) -> None:
        self.overview = overview
        self.loop = loop
        self.is_open = self.is_inside = False
        self.pulse: Pulse | None = None
        self.lost: str | None = None

    async def total(self) -> dict[str, float]:
        """All resources by name."""
        self._check_asked("aiogpu.cluster_resources()")
        return await self.overview.total()

    async def available(self) -> dict[str, float]:
        """Return what is free of each."""
        self._check_asked("aiogpu.available_resources()")
        return await self.overview.available()

    async def status(self) -> NodeStatus:
        """Return what there is on the cluster, and what this program has running."""
        self._check_asked("aiogpu.status()")
        return await self.overview.status(self.loop.time())

    async def why(self, task: int) -> Why | None:
        """Return why a task waits; see `Engine.why`."""
        self._check_asked("handle.why()")
        return await self.overview.why(task, self.loop.time())

    async def why_task(self, number: int) -> Why | None:
        """The same; see `Engine.why_task`."""
        return await self.why(number)

    def check_open(self) -> None:
        """Raise what has become of the cluster, where it is there no more.

        Raises:
            NodeDiedError: it has gone.
            NodeClosedError: it was left.
        """
        if self.lost is not None:
            raise NodeDiedError(self.lost)
        if not self.is_open:
            raise NodeClosedError("this program has shut down its tie to the cluster.")

    def _check_asked(self, what: str) -> None:
        if self.is_inside:
            raise error_inside_task(what)
        self.check_open()
        if self.pulse is not None and self.pulse.is_missed:
            # A question without an answer would have Ray end this program.
            raise NodeDiedError("the head of the Ray cluster does not answer now.")
