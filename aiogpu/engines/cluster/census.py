"""What a cluster says of itself: its nodes, and what waits on it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Node(NamedTuple):
    """A node that lives.

    Attributes:
        id: in hexadecimal.
        host: its machine's name.
        total: its resources by name.
        free: what of each nobody has; None where Ray was not asked.
        labels: what was said of it.
    """

    id: str
    host: str
    total: Mapping[str, float]
    free: Mapping[str, float] | None
    labels: Mapping[str, str]


class Survey(NamedTuple):
    """The cluster at one moment.

    Attributes:
        nodes: those that live.
        demands: what tasks and actors of all programs ask for that have no place yet,
            and how many ask for it.
        coming: nodes that are being started, in words.
        failed: the last ones that could not be, in words.
        grows: whether something starts nodes as they are needed.
    """

    nodes: Sequence[Node]
    demands: Sequence[tuple[Mapping[str, float], int]]
    coming: Sequence[str]
    failed: Sequence[str]
    grows: bool


def survey_of(seen: Any, nodes: Sequence[Node], grows: bool) -> Survey:
    """The cluster as its status tells it.

    Args:
        seen: a `ClusterStatus` of Ray's.
        nodes: those that live.
        grows: whether something starts nodes as they are needed.
    """
    free = {
        one.node_id: one.available_resources()
        for one in (*seen.active_nodes, *seen.idle_nodes)
    }
    names = [
        *(f"{one.count} x {one.ray_node_type_name}" for one in seen.pending_launches),
        *(one.ray_node_type_name for one in seen.pending_nodes),
    ]
    return Survey(
        [node._replace(free=free[node.id]) for node in nodes if node.id in free],
        [
            (dict(shape.bundle), shape.count)
            for demand in seen.resource_demands.ray_task_actor_demand
            for shape in demand.bundles_by_count
        ],
        names,
        [f"{one.ray_node_type_name}: {one.details}" for one in seen.failed_launches],
        grows,
    )


def has_types(told: bytes | None) -> bool:
    """Return whether what Ray's autoscaler has told names types of nodes that may come.

    It runs beside a cluster without one as well, and mirrors its nodes: then each is of
    a type of its own.
    """
    report = json.loads(told or b"{}").get("autoscaler_report") or {}
    types = report.get("node_type_mapping") or {}
    return any(name != f"node_{node}" for node, name in types.items())
