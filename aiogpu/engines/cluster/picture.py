"""A cluster and one program's calls on it as a `NodeStatus`.

What only Ray knows and does not tell is left open and said to be so: on which node a
call runs, in which process, and which of a node's devices is how full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.text import span
from aiogpu.core.model.units import TYPE_PREFIX
from aiogpu.engines.cluster.capacity import DEVICES, amounts, name_of, told
from aiogpu.engines.cluster.waiting import free_devices, in_parts
from aiogpu.observe.snapshot import LISTED
from aiogpu.observe.status import DeviceStatus, NodeStatus, ShapeStatus, TaskStatus

if TYPE_CHECKING:
    from aiogpu.engines.cluster.calls import Calls, Live
    from aiogpu.engines.cluster.census import Node, Survey

TYPE_LABEL: Final = "ray.io/accelerator-type"
UNKNOWN: Final = (
    "Ray tells how much of a node's devices is free, not of which, nor to whom"
)


def status_of(survey: Survey, calls: Calls, now: float) -> NodeStatus:
    """See above.

    Args:
        survey: the cluster now.
        calls: what the program has running.
        now: the time of its loop.
    """
    total: dict[str, float] = {}
    free: dict[str, float] = {}
    for node in survey.nodes:
        for name, amount in told(node.total).items():
            total[name] = total.get(name, 0.0) + amount
            free[name] = free.get(name, 0.0) + (node.free or {}).get(name, 0.0)
    live = calls.live
    shapes = tuple(
        _shape(shape, count, live, now) for shape, count in survey.demands[:LISTED]
    )
    return NodeStatus(
        total=total,
        available=free,
        devices=tuple(one for node in survey.nodes for one in _devices(node)),
        workers=(),
        tasks=tuple(
            _task(number, one, now) for number, one in islice(live.items(), LISTED)
        ),
        waiting_count=sum(count for _, count in survey.demands),
        shapes=shapes,
        shape_count=len(survey.demands),
        reservation=None,
    )


def _devices(node: Node) -> Iterator[DeviceStatus]:
    for kind in DEVICES:
        count = int(node.total.get(kind, 0.0))
        shares = free_devices((node.free or {}).get(kind, 0.0), count)
        for index, free in enumerate(shares):
            yield DeviceStatus(
                *(kind, f"{name_of(node)}:{index}", type_of(node), None, None, 0, free),
                holders=(),
                unknown=UNKNOWN,
            )


def type_of(node: Node) -> str | None:
    """The type of a node's accelerators, where it is known."""
    found = [
        name.removeprefix(TYPE_PREFIX)
        for name in sorted(node.total)
        if name.startswith(TYPE_PREFIX)
    ]
    return node.labels.get(TYPE_LABEL) or ", ".join(found) or None


def _task(number: int, live: Live, now: float) -> TaskStatus:
    request = {} if live.request is None else live.request.as_numbers()
    age = span(now - live.since)
    if not live.refs and live.stop is None:
        return TaskStatus(
            number,
            live.name,
            "expecting",
            request,
            None,
            f"waits for its arguments: {age}",
        )
    reason = f"sent to Ray {age} ago, which does not tell whether it runs"
    return TaskStatus(number, live.name, "sent", request, None, reason)


def _shape(
    shape: Mapping[str, float], count: int, live: Mapping[int, Live], now: float
) -> ShapeStatus:
    wanted = in_parts(shape)
    ours = next(
        (
            one
            for one in live.values()
            if one.request is not None and amounts(one.request) == wanted
        ),
        None,
    )
    return ShapeStatus(
        request=dict(sorted(shape.items())),
        strategy="pack",
        variables=(),
        count=count,
        first="others" if ours is None else ours.name,
        seconds=0.0 if ours is None else now - ours.since,
        reason="has no place on any node of the cluster now, of all programs' tasks",
    )
