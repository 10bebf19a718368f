"""What a cluster has, what of it is free, and what can never run on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiogpu.core.resources import UNIT
from aiogpu.core.snapshot import NodeStatus, TaskStatus
from aiogpu.core.why import Why
from aiogpu.core.wording import terms
from aiogpu.engines import ray
from aiogpu.errors import InfeasibleError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiogpu.core.resources import Request
    from aiogpu.engines.cluster.calls import Calls
    from aiogpu.runtime.call import Site


class Overview:
    """See above."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._nodes: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        return f"<Overview of {len(self._nodes)} nodes>"

    def check_feasible(self, site: Site) -> None:
        """Refuse what no node of the cluster could ever give.

        Raises:
            InfeasibleError: says what was asked and what there is.
        """
        self.check_request(site.spec.name, site.spec.shape.request)

    def room_for(self, request: Request) -> int | None:
        """How many that ask for this could be at once, None for any number."""
        asked = dict((*request.scalars, *request.devices))
        if not asked:
            return None
        return sum(
            min(
                int(node["Resources"].get(name, 0.0) * UNIT + 0.5) // parts
                for name, parts in asked.items()
            )
            for node in self._nodes or ray.nodes()
        )

    def count_nodes(self) -> int:
        """How many nodes live."""
        self._nodes = ray.nodes()
        return len(self._nodes)

    def check_request(self, name: str, request: Request) -> None:
        """The same for what is called so."""
        asked = dict((*request.scalars, *request.devices))
        if self._fits(asked):
            return
        # Nodes come and go; who is refused is refused by what there is now.
        self._nodes = ray.nodes()
        if self._fits(asked):
            return
        has = "; ".join(
            f"{node['NodeManagerHostname']}: {terms(told(node['Resources']).items())}"
            for node in self._nodes
        )
        raise InfeasibleError(
            f"{name} asks for {request}, which no node of "
            f"this Ray cluster can give. There are {has}. Ask for less, or add a node."
        )

    def _fits(self, asked: Mapping[str, int]) -> bool:
        return any(
            all(
                node["Resources"].get(name, 0.0) * UNIT + 0.5 >= parts
                for name, parts in asked.items()
            )
            for node in self._nodes
        )

    def total(self) -> dict[str, float]:
        """All resources by name."""
        return told(ray.total())

    def available(self) -> dict[str, float]:
        """What is free of each; 0.0 where nothing is."""
        return dict.fromkeys(self.total(), 0.0) | told(ray.available())

    async def status(self, now: float) -> NodeStatus:
        """What there is, and what this program has running."""
        import asyncio

        total, available = await asyncio.to_thread(
            lambda: (self.total(), self.available())
        )
        tasks = tuple(
            TaskStatus(number, live.name, "running", {}, None, None)
            for number, live in self._calls.live.items()
        )
        return NodeStatus(total, available, (), (), tasks, 0, (), 0, None)

    async def why(self, task: int, now: float) -> Why | None:
        """Why a task of this program waits."""
        live = self._calls.live.get(task)
        if live is None:
            return None
        return Why(live.name, task, "running", now - live.since)


def told(resources: Mapping[str, float]) -> dict[str, float]:
    """Ray's resources without those that it keeps for itself."""
    return {
        name: amount
        for name, amount in resources.items()
        if not name.startswith("node:")
        and name != "object_store_memory"
        and "_group_" not in name
    }
