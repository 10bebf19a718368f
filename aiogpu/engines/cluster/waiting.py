"""Why a call of this program is where it is, as far as a Ray cluster tells.

Ray tells what waits by its shape, of all programs together, and not which call it is.
So a call is said to wait where the nodes cannot have as many of its kind running, and
else to have been sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.request import Request
from aiogpu.core.model.text import SHOWN, listing, terms
from aiogpu.core.model.units import UNIT, number
from aiogpu.engines.cluster.capacity import (
    amounts,
    at_once,
    fits_one,
    kinds,
    name_of,
    parts_of,
    short_of,
)
from aiogpu.observe.why import Shortage, Why

if TYPE_CHECKING:
    from aiogpu.core.model.request import PlacementGroupSpec
    from aiogpu.engines.cluster.calls import Live
    from aiogpu.engines.cluster.census import Node, Survey

HELD: Final = "it runs, and waits for its consumer to take items"
"""Of a stream that has yielded as many as it may."""


def why(task: int, calls: Mapping[int, Live], survey: Survey, now: float) -> Why:
    """Say why a call that has not ended is where it is.

    Args:
        task: its number.
        calls: all of its program that have not ended.
        survey: the cluster now.
        now: the moment for which it is said.
    """
    live = calls[task]
    request = live.request
    told = {} if request is None else request.as_numbers()
    seconds = now - live.since
    if not live.refs and live.stop is None:
        unsent = ("calls that are still to be sent",)
        return Why(
            live.name, task, "expecting", seconds, told, children=unsent, count=1
        )
    is_held = getattr(live.stop, "is_held", False)
    if request is None or is_held:
        notes = (HELD,) if is_held else ()
        return Why(live.name, task, "sent", seconds, told, notes=notes)
    alike = [number for number, one in calls.items() if one.request == request]
    # At best so many run, and these are the first ones. An actor is noted here only
    # for as long as it waits.
    room = 0 if live.actor else at_once(survey.nodes, amounts(request))
    running = min(room, len(alike))
    position = alike.index(task) + 1 - running
    waiting = demand_of(request, survey)
    is_waiting = waiting > 0 and position > 0
    return Why(
        name=live.name,
        task=task,
        state="waiting" if is_waiting else "sent",
        seconds=seconds,
        request=told,
        position=position if is_waiting else None,
        of=len(alike) - running if is_waiting else 0,
        reasons=tuple(_shortages(request, survey.nodes)) if waiting else (),
        notes=tuple(_notes(request, waiting, survey)),
    )


def why_placement(
    task: int,
    live: Live,
    placement_group: PlacementGroupSpec,
    survey: Survey,
    now: float,
) -> Why:
    """Say why a placement waits for its bundles.

    Args:
        task: its number.
        live: what is known of it.
        placement_group: its bundles.
        survey: the cluster now.
        now: the moment for which it is said.
    """
    whole = placement_group.request()
    asked = Request(whole.scalars, whole.devices)
    return Why(
        name=placement_group.name,
        task=task,
        state="waiting",
        seconds=now - live.since,
        request=whole.as_numbers(),
        reasons=tuple(_shortages(asked, survey.nodes, together=True)),
        notes=tuple(_growth(survey, is_fitting=True)),
    )


def demand_of(request: Request, survey: Survey) -> int:
    """Return how many that ask for the same have no place, of all programs."""
    wanted = amounts(request)
    return sum(count for shape, count in survey.demands if in_parts(shape) == wanted)


def in_parts(shape: Mapping[str, float]) -> dict[str, int]:
    """Return what Ray says is asked for, in parts."""
    return {name: parts_of(value) for name, value in shape.items() if value}


def _shortages(
    request: Request, nodes: Sequence[Node], *, together: bool = False
) -> Iterator[Shortage]:
    """Return what no node has enough of now; where it is only not together, all of it.

    Or what all nodes `together` have too little of.
    """
    wanted = amounts(request)
    free = [node.free or {} for node in nodes]
    seen = [_summed(free)] if together else free
    each = [
        name for name in wanted if all(name in short_of(one, wanted) for one in seen)
    ]
    for name in each or wanted:
        had = sum(one.get(name, 0.0) for one in free)
        total = sum(node.total.get(name, 0.0) for node in nodes)
        yield Shortage(name, number(wanted[name]), had, total, 0.0, (), ())


def _summed(nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for node in nodes for name in node}
    return {name: sum(node.get(name, 0.0) for node in nodes) for name in names}


def _notes(request: Request, waiting: int, survey: Survey) -> Iterator[str]:
    wanted = amounts(request)
    if not waiting:
        yield (
            "nothing that asks for the same waited on the cluster when it last said "
            "so, which it does every second or so: it runs, is being started, or "
            "waits for its arguments"
        )
        return
    yield f"without a place on the cluster, of all programs: {_count(waiting)} alike"
    fitting = [node for node in survey.nodes if not short_of(node.total, wanted)]
    for node in fitting[:SHOWN]:
        yield f"node {name_of(node)}: {_state_of(node, wanted)}"
    if len(fitting) > SHOWN:
        yield f"and {len(fitting) - SHOWN} nodes more that could have it"
    if not fitting:
        yield f"no node could have it: there are {kinds(survey.nodes, wanted)}"
    yield from _growth(survey, is_fitting=fits_one(survey.nodes, wanted))
    others = [
        f"{count} x {terms(sorted(shape.items()))}"
        for shape, count in survey.demands
        if in_parts(shape) != wanted
    ]
    if others:
        yield f"others that wait: {listing(others, len(others))}"


def _count(waiting: int) -> str:
    return f"{waiting} task{'s' * (waiting > 1)}"


def _state_of(node: Node, wanted: Mapping[str, int]) -> str:
    free = node.free or {}
    told = terms((name, max(free.get(name, 0.0), 0.0)) for name in wanted)
    lacks = short_of(free, wanted)
    return f"{told} free" + (f", short of {', '.join(lacks)}" if lacks else "")


def _growth(survey: Survey, *, is_fitting: bool) -> Iterator[str]:
    """Return what is known of nodes that may come."""
    if survey.coming:
        yield f"nodes that come: {listing(survey.coming, len(survey.coming))}"
    elif survey.grows:
        yield (
            "the cluster has an autoscaler, which starts nodes that it knows"
            + (
                ""
                if is_fitting
                else "; whether one of them would do, Ray does not tell"
            )
        )
    if survey.failed:
        told = listing(survey.failed, len(survey.failed))
        yield f"nodes that could not be started: {told}"


def free_devices(amount: float, count: int) -> Iterator[float]:
    """A free amount of a node's devices as shares, whole devices first."""
    left = parts_of(amount)
    for _ in range(count):
        share = max(min(left, UNIT), 0)
        left -= share
        yield number(share)
