"""The resources of a cluster, infeasible requests, and `status()`.

A program never waits for the cluster when it makes a call: it decides by the last known
nodes. Only plain code in a task queries the cluster, if a call fits no known node.

A request is for one node: Ray splits no request between nodes, and no share of a device
between devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as NotYetError
from difflib import get_close_matches
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Final

from aiogpu.client.current import is_loop_running
from aiogpu.core.model import units
from aiogpu.core.model.text import SHOWN, in_words, span, terms
from aiogpu.engines.ray import cluster
from aiogpu.engines.ray.cluster import ClusterNode, exceptions
from aiogpu.engines.ray.options import amounts
from aiogpu.engines.ray.task_worker import device_kinds
from aiogpu.engines.ray.tasks import Calls, PendingCall
from aiogpu.errors import InfeasibleError
from aiogpu.observe.snapshot import LISTED
from aiogpu.observe.status import Machine, NodeStatus, TaskStatus

if TYPE_CHECKING:
    from aiogpu.core.model.request import Request

# Nodes and requests

DEVICES: Final = (units.GPU, cluster.NEURON_CORES, "TPU", "NPU", "HPU")
"""Resources that are devices to Ray."""


def to_parts(amount: float) -> int:
    """Convert an amount of Ray's to parts."""
    return round(amount * units.UNIT)


def public_resources(resources: Mapping[str, float]) -> dict[str, float]:
    """Return Ray's resources without its internal ones, sorted."""
    return {
        name: resources[name]
        for name in sorted(resources)
        if name != "object_store_memory"
        and not name.startswith("node:")
        and "_group_" not in name
    }


def fits(nodes: Iterable[ClusterNode], requested: Mapping[str, int]) -> bool:
    """Return whether a node has all requested amounts, free or in use."""
    return any(
        all(to_parts(node.total.get(name, 0)) >= requested[name] for name in requested)
        for node in nodes
    )


def room(nodes: Iterable[ClusterNode], requested: Mapping[str, int]) -> int:
    """Return how many such requests fit at the same time."""
    return sum(
        min(to_parts(node.total.get(name, 0)) // requested[name] for name in requested)
        for node in nodes
        if requested
    )


def describe_shortage(
    nodes: Sequence[ClusterNode], requested: Mapping[str, int]
) -> str:
    """Describe what every node lacks: "each lacks GPU 4 of 2 at most"."""
    if not nodes:
        return "it has no nodes"
    shortages = list(_shortages(nodes, requested))
    return (
        f"each lacks {in_words(shortages)}"
        if shortages
        else "none has all of it at once"
    )


def _shortages(
    nodes: Sequence[ClusterNode], requested: Mapping[str, int]
) -> Iterator[str]:
    for name, parts in requested.items():
        most = max(node.total.get(name, 0.0) for node in nodes)
        if to_parts(most) < parts:
            amount = units.format_amount(name, units.number(parts))
            wanted = f"{units.display_name(name)} {amount}"
            had = f"of {units.format_amount(name, most)} at most" if most else "of 0"
            known = {
                resource for node in nodes for resource in public_resources(node.total)
            }
            similar = () if most else get_close_matches(name, known, 1)
            hint = f" (did you mean {similar[0]!r}?)" if similar else ""
            yield f"{wanted} {had}{hint}"


def describe_nodes(nodes: Sequence[ClusterNode], requested: Mapping[str, int]) -> str:
    """Describe the nodes, grouped by resources: "2 x {CPU: 4, GPU: 1}"."""
    counts = Counter(
        terms(
            (name, amount)
            for name, amount in public_resources(node.total).items()
            if name != units.MEMORY or units.MEMORY in requested
        )
        for node in nodes
    )
    shown = [f"{count} x {kind}" for kind, count in counts.most_common(SHOWN)]
    if len(counts) > SHOWN:
        shown.append(f"{len(counts) - SHOWN} kinds more")
    return ", ".join(shown)


# Known nodes

TASK_LIMIT: Final = 1.0
"""Seconds that `.remote()` in a plain task waits for the list of nodes."""


class Overview:
    """The last known nodes of the cluster.

    Attributes:
        nodes: the nodes.
        grows: an autoscaler may start nodes.
    """

    def __init__(self) -> None:
        self.nodes: Sequence[ClusterNode] = ()
        self.grows = False
        self._is_watched = False

    async def look(self, seconds: float = cluster.ANSWER_LIMIT) -> bool:
        """Update the list of nodes; return whether a node has left.

        A program calls this every few seconds, so that `.remote()` need not query the
        cluster.

        Raises:
            NodeDiedError: the cluster does not answer within `seconds`.
        """
        before = {node.id for node in self.nodes}
        self._note(*await cluster.ask(_nodes_and_growth, seconds))
        self._is_watched = True
        return not before <= {node.id for node in self.nodes}

    def _note(self, nodes: Sequence[ClusterNode], grows: bool) -> None:
        self.nodes, self.grows = nodes, grows
        has = {name for node in nodes for name, amount in node.total.items() if amount}
        device_kinds[:] = [kind for kind in DEVICES if kind in has]

    def may_run(self, request: Request) -> bool:
        """Return whether a node fits a request, or may be started."""
        return self.grows or fits(self.nodes, amounts(request))

    def room_for(self, request: Request) -> int | None:
        """Return how many such requests fit at the same time; None for any number."""
        requested = amounts(request)
        if not requested or (self._may_have_changed() and not self.nodes):
            return None
        return room(self.nodes, requested)

    def check_request(self, name: str, request: Request) -> None:
        """Check that a node of the cluster can meet the request of the task `name`.

        The check uses the current nodes. It passes if an autoscaler may start nodes, or
        if the nodes are unknown.

        Raises:
            InfeasibleError: no node can meet the request.
        """
        requested = amounts(request)
        if fits(self.nodes, requested):
            return
        if self._may_have_changed() or fits(self.nodes, requested):
            return
        raise InfeasibleError(
            f"{name} asks for {request}, which no node of this Ray cluster can give: "
            f"{describe_shortage(self.nodes, requested)}. There are "
            f"{describe_nodes(self.nodes, requested)}. Ask for less, or add a node."
        )

    def check_together(self, name: str, requests: Sequence[Request]) -> None:
        """Check that idle nodes can meet all requests at the same time.

        Raises:
            InfeasibleError: the nodes cannot meet all requests together.
        """
        requested: Counter[str] = Counter()
        for request in requests:
            requested.update(amounts(request))
        if (
            self._has_all(requested)
            or self._may_have_changed()
            or self._has_all(requested)
        ):
            return
        raise InfeasibleError(
            f"{name} asks for bundles that do not all fit at once on this Ray cluster. "
            f"There are {describe_nodes(self.nodes, requested)}. Ask for less, or add "
            f"a node."
        )

    def _has_all(self, requested: Mapping[str, int]) -> bool:
        return all(
            sum(to_parts(node.total.get(name, 0.0)) for node in self.nodes) >= parts
            for name, parts in requested.items()
        )

    def count_nodes(self) -> float:
        """Return the number of living nodes; infinity if more may be started."""
        return inf if self._may_have_changed() else len(self.nodes)

    def _may_have_changed(self) -> bool:
        """Return whether there may be other nodes; plain code of a task queries them.

        Code on the event loop of a task's coroutine does not wait for the answer: there
        no request is refused, and Ray lets it wait.
        """
        if self._is_watched:
            return self.grows
        if is_loop_running():
            return True
        question = cluster.start_call(_nodes_and_growth)
        try:
            self._note(*question.result(TASK_LIMIT))
        except (NotYetError, exceptions.RayError, ConnectionError, RuntimeError):
            return True
        return self.grows


def _nodes_and_growth() -> tuple[Sequence[ClusterNode], bool]:
    return cluster.nodes(), cluster.has_autoscaler()


async def total_resources() -> dict[str, float]:
    """Return all resources by name."""
    return public_resources(await cluster.ask(cluster.total_resources))


async def free_resources(total: Iterable[str]) -> dict[str, float]:
    """Return the free amounts of these resources, 0.0 if nothing is free."""
    free = public_resources(await cluster.ask(cluster.free_resources))
    return dict.fromkeys(total, 0.0) | free


# Status


async def status(calls: Calls) -> NodeStatus:
    """Return the cluster's resources, its nodes, and the calls of this program.

    For tasks that wait on the cluster, see `ray status`.
    """
    total = await total_resources()
    now = calls.loop.time()
    return NodeStatus(
        total=total,
        available=await free_resources(total),
        devices=(),
        workers=(),
        tasks=tuple(_task(*item, now) for item in islice(calls.live.items(), LISTED)),
        waiting_count=sum(not call.is_sent for call in calls.live.values()),
        shapes=(),
        shape_count=0,
        reservation=None,
        nodes=tuple(
            Machine(node.id, node.host, node.is_alive, public_resources(node.total))
            for node in await cluster.ask(cluster.all_nodes)
        ),
    )


def _task(task: int, call: PendingCall, now: float) -> TaskStatus:
    request = {} if call.request is None else call.request.as_numbers()
    age = span(now - call.since)
    if call.is_sent:
        reason = f"sent to Ray {age} ago, which does not tell whether it runs"
        return TaskStatus(task, call.name, "sent", request, None, reason)
    reason = f"waits for its arguments: {age}"
    return TaskStatus(task, call.name, "expecting", request, None, reason)
