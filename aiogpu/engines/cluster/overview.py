"""What a cluster has, what of it is free, what waits, and what can never run on it.

Nothing here is asked while a program sends calls: it decides by the nodes that it has
seen last. A task asks, where one of its calls needs what no node that it has seen has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from math import inf
from typing import TYPE_CHECKING, Final

from aiogpu.client.current import is_loop_running
from aiogpu.engines import ray
from aiogpu.engines.cluster.asking import PATIENCE, asked, begun
from aiogpu.engines.cluster.capacity import (
    DEVICES,
    amounts,
    at_once,
    fits_one,
    kinds,
    lacking,
    parts_of,
    told,
)
from aiogpu.engines.cluster.work import kinds_here
from aiogpu.errors import InfeasibleError

if TYPE_CHECKING:
    from aiogpu.client.function_spec import Site
    from aiogpu.core.model.request import PlacementGroupSpec, Request
    from aiogpu.engines.cluster.calls import Calls
    from aiogpu.engines.cluster.census import Node
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why

AT_ONCE: Final = 1.0
"""Seconds for which `.remote()` in a plain task waits to learn what nodes there are."""


class Overview:
    """See above.

    Attributes:
        grows: whether nodes may come as they are needed, as far as was seen.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._nodes: Sequence[Node] = ()
        self.grows = False
        self._is_watched = False
        self._asking: Future[tuple[Sequence[Node], bool]] | None = None

    def __repr__(self) -> str:
        return f"<Overview of {len(self._nodes)} nodes>"

    async def open(self) -> None:
        """Learn what nodes there are; `look` is called every few seconds from now on.

        So `.remote()` on the program's event loop never has to ask, and to wait.
        """
        await self.look()
        self._is_watched = True

    async def look(self, seconds: float = PATIENCE) -> bool:
        """Learn what nodes there are; whether one has left since the last time.

        Raises:
            NodeDiedError: the cluster does not answer in so many seconds.
        """
        before = {node.id for node in self._nodes}
        self._nodes, self.grows = await asked(_nodes_and_growth, seconds)
        return not before <= {node.id for node in self._nodes}

    def fits(self, request: Request) -> bool:
        """Return whether a node that was seen has all of it, be it in use now."""
        return fits_one(self._nodes, amounts(request))

    def lacking(self, request: Request) -> str:
        """Return what no node has of it, in words."""
        return lacking(self._nodes, amounts(request))

    def check_feasible(self, site: Site) -> None:
        """Refuse what no node of the cluster could ever give.

        Raises:
            InfeasibleError: says what was asked and what there is.
        """
        self.check_request(site.spec.name, site.spec.shape.request)

    def room_for(self, request: Request) -> int | None:
        """Return how many that ask for this could be at once, None for any number."""
        wanted = amounts(request)
        if not wanted:
            return None
        if self._looks_again() and not self._nodes:
            return None
        return at_once(self._nodes, wanted)

    def check_request(self, name: str, request: Request) -> None:
        """The same for what is called so.

        Nodes come and go: who is refused is refused by what there is now. Where they
        come as they are needed, or cannot be asked for now, all is let pass.
        """
        wanted = amounts(request)
        if fits_one(self._nodes, wanted):
            return
        if self._looks_again() or fits_one(self._nodes, wanted):
            return
        raise InfeasibleError(
            f"{name} asks for {request}, which no node of this Ray cluster can give: "
            f"{lacking(self._nodes, wanted)}. There are {kinds(self._nodes, wanted)}. "
            f"Ask for less, or add a node."
        )

    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices that the nodes have, as far as they are known."""
        if not self._nodes:
            return tuple(kinds_here)
        return tuple(
            kind
            for kind in DEVICES
            if any(node.total.get(kind) for node in self._nodes)
        )

    def check_together(self, name: str, requests: Sequence[Request]) -> None:
        """Refuse what nodes could give one by one, but not at once, were they idle.

        Raises:
            InfeasibleError: says what was asked and what there is.
        """
        asked_for: Counter[str] = Counter()
        for request in requests:
            asked_for.update(amounts(request))
        if self._has_all(asked_for) or self._looks_again() or self._has_all(asked_for):
            return
        raise InfeasibleError(
            f"{name} asks for bundles that do not all fit at once on this Ray cluster. "
            f"There are {kinds(self._nodes, asked_for)}. Ask for less, or add a node."
        )

    def _has_all(self, asked_for: Mapping[str, int]) -> bool:
        return all(
            sum(parts_of(node.total.get(name, 0.0)) for node in self._nodes) >= parts
            for name, parts in asked_for.items()
        )

    def count_nodes(self) -> float:
        """Return how many nodes live; infinity where they come as they are needed."""
        return inf if self._looks_again() else len(self._nodes)

    def _looks_again(self) -> bool:
        """Learn what nodes there are; whether others may come, as far as is known.

        On an event loop, that of a task's coroutine, nobody waits for the answer: it
        is there for a later call, and until then all is let pass.
        """
        if self._is_watched:
            return self.grows
        is_loop = is_loop_running()
        if self._asking is None:
            self._asking = begun(_nodes_and_growth)
        if is_loop and not self._asking.done():
            return True
        asking, self._asking = self._asking, None
        try:
            self._nodes, self.grows = asking.result(AT_ONCE)
        except (NotYetError, ray.RayError, ConnectionError, RuntimeError):
            return True
        # What was asked for an earlier call may be old: nobody is refused by it.
        return self.grows or is_loop

    async def total(self) -> dict[str, float]:
        """All resources by name."""
        await self.look()
        return told(await asked(ray.total))

    async def available(self) -> dict[str, float]:
        """Return what is free of each; 0.0 where nothing is."""
        total, free = await asked(_total_and_free)
        return dict.fromkeys(told(total), 0.0) | told(free)

    async def status(self, now: float) -> NodeStatus:
        """Return what there is, and what this program has running."""
        from aiogpu.engines.cluster.picture import status_of

        return status_of(await asked(ray.survey), self._calls, now)

    async def why(self, task: int, now: float) -> Why | None:
        """Return why a task of this program waits."""
        from aiogpu.engines.cluster.waiting import why

        if task not in self._calls.live:
            return None
        survey = await asked(ray.survey)
        live = self._calls.live
        return why(task, live, survey, now) if task in live else None

    async def why_placement(
        self, task: int, placement_group: PlacementGroupSpec, now: float
    ) -> Why | None:
        """Return why a placement of this program waits."""
        from aiogpu.engines.cluster.waiting import why_placement

        if task not in self._calls.live:
            return None
        survey = await asked(ray.survey)
        live = self._calls.live.get(task)
        return (
            None
            if live is None
            else why_placement(task, live, placement_group, survey, now)
        )


def _nodes_and_growth() -> tuple[Sequence[Node], bool]:
    return ray.nodes(), ray.grows()


def _total_and_free() -> tuple[dict[str, float], dict[str, float]]:
    return ray.total(), ray.available()
