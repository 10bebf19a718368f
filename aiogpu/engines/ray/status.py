"""What a cluster has, what of it is free, what waits, and what can never run on it.

A request is for one node: Ray divides none between two, and no share of a device
between two devices. Nothing is asked while a program sends calls: it decides by the
nodes that it has seen last. A task asks, where one of its calls needs what no node that
it has seen has.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from difflib import get_close_matches
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiogpu.client.current import error_inside_task, is_loop_running
from aiogpu.core.model.request import Request
from aiogpu.core.model.text import SHOWN, in_words, listing, span, terms
from aiogpu.core.model.units import (
    GPU,
    MEMORY,
    TYPE_PREFIX,
    UNIT,
    number,
    spoken,
    written,
)
from aiogpu.engines.ray import ray_api as ray
from aiogpu.engines.ray.options import kinds_here
from aiogpu.engines.ray.ray_api import PATIENCE, asked, begun
from aiogpu.errors import InfeasibleError, NodeClosedError, NodeDiedError
from aiogpu.observe.snapshot import LISTED
from aiogpu.observe.status import DeviceStatus, NodeStatus, ShapeStatus, TaskStatus
from aiogpu.observe.why import Why

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.core.model.request import PlacementGroupSpec
    from aiogpu.engines.ray.cluster import Pulse
    from aiogpu.engines.ray.ray_api import Node, Survey
    from aiogpu.engines.ray.tasks import Calls, Live
    from aiogpu.wire.messages import Failed


DEVICES: Final = (GPU, "neuron_cores", "TPU", "NPU", "HPU")
"""Resources that are devices to Ray."""


OWN: Final = "object_store_memory"
"""A resource that Ray keeps for itself, as it does those of a node's name."""


OF_GROUPS: Final = "_group_"
"""In the names of what placement groups hold, beside the resources themselves."""


def amounts(request: Request) -> dict[str, int]:
    """Return what is asked for, in parts, without what is 0."""
    asked = (*request.scalars, *request.devices)
    return {name: parts for name, parts in asked if parts}


def parts_of(amount: float) -> int:
    """Return what Ray tells of a resource, in parts."""
    return round(amount * UNIT)


def told(resources: Mapping[str, float]) -> dict[str, float]:
    """Ray's resources without those that it keeps for itself, sorted by name."""
    return {
        name: resources[name]
        for name in sorted(resources)
        if not name.startswith("node:") and name != OWN and OF_GROUPS not in name
    }


def short_of(there: Mapping[str, float], asked: Mapping[str, int]) -> tuple[str, ...]:
    """The names of what there is too little of."""
    return tuple(
        name for name, parts in asked.items() if parts_of(there.get(name, 0.0)) < parts
    )


def fits_one(nodes: Iterable[Node], asked: Mapping[str, int]) -> bool:
    """Return whether a node has all of it, be it in use now."""
    return any(not short_of(node.total, asked) for node in nodes)


def at_once(nodes: Iterable[Node], asked: Mapping[str, int]) -> int:
    """How many that ask for this the nodes could have running together at most."""
    return sum(
        min(
            (parts_of(node.total.get(name, 0.0)) // parts)
            for name, parts in asked.items()
        )
        for node in nodes
        if asked
    )


def name_of(node: Node) -> str:
    """A node in a word: its machine, and the begin of its id."""
    return f"{node.host}/{node.id[:6]}"


def lacking(nodes: Sequence[Node], asked: Mapping[str, int]) -> str:
    """Return what no node has, in words: "each lacks GPU 4 of 2 at most"."""
    if not nodes:
        return "it has no nodes"
    found = list(_lacking(nodes, asked))
    return f"each lacks {in_words(found)}" if found else "none has all of it at once"


def _lacking(nodes: Sequence[Node], asked: Mapping[str, int]) -> Iterator[str]:
    for name, parts in asked.items():
        most = max(node.total.get(name, 0.0) for node in nodes)
        if parts_of(most) < parts:
            wanted = f"{spoken(name)} {written(name, number(parts))}"
            had = f"of {written(name, most)} at most" if most else "of 0"
            known = {one for node in nodes for one in told(node.total)}
            near = () if most else get_close_matches(name, known, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            yield f"{wanted} {had}{hint}"


def kinds(nodes: Sequence[Node], asked: Mapping[str, int]) -> str:
    """The nodes in words, alike ones together: "2 x {CPU: 4, GPU: 1}"."""
    counts = Counter(
        terms(
            (name, amount)
            for name, amount in told(node.total).items()
            if name != MEMORY or MEMORY in asked
        )
        for node in nodes
    )
    shown = [f"{count} x {kind}" for kind, count in counts.most_common(SHOWN)]
    if len(counts) > SHOWN:
        shown.append(f"{len(counts) - SHOWN} kinds more")
    return ", ".join(shown)


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


HELD: Final = "it runs, and waits for its consumer to take items"
"""Of a stream that has yielded as many as it may."""


def why(task: int, live: Live, survey: Survey, now: float) -> Why:
    """Say where a call is that has not ended, as far as Ray tells.

    Ray tells what waits by its shape, of all programs together, and not which call.
    `ray status` and Ray's dashboard tell more.

    Args:
        task: its number.
        live: what is known of it.
        survey: the cluster now.
        now: the moment for which it is said.
    """
    request, seconds = live.request, now - live.since
    told = {} if request is None else request.as_numbers()
    if not live.refs and live.stop is None:
        unsent = ("calls that are still to be sent",)
        return Why(
            live.name, task, "expecting", seconds, told, children=unsent, count=1
        )
    notes: tuple[str, ...] = ()
    if getattr(live.stop, "is_held", False):
        notes = (HELD,)
    elif request is not None and (waiting := demand_of(request, survey)):
        wanted = amounts(request)
        alike = f"{waiting} task{'s' * (waiting > 1)}"
        notes = (
            f"without a place on the cluster, of all programs: {alike} alike",
            f"the cluster has {kinds(survey.nodes, wanted)}",
            *_growth(survey),
        )
    return Why(live.name, task, "sent", seconds, told, notes=notes)


def why_placement(
    task: int,
    live: Live,
    placement_group: PlacementGroupSpec,
    survey: Survey,
    now: float,
) -> Why:
    """Say that a placement waits for its bundles; see `why`."""
    request = placement_group.request().as_numbers()
    notes = (f"the cluster has {kinds(survey.nodes, {})}", *_growth(survey))
    return Why(
        *(placement_group.name, task, "sent", now - live.since, request), notes=notes
    )


def demand_of(request: Request, survey: Survey) -> int:
    """Return how many that ask for the same have no place, of all programs."""
    wanted = amounts(request)
    return sum(count for shape, count in survey.demands if in_parts(shape) == wanted)


def in_parts(shape: Mapping[str, float]) -> dict[str, int]:
    """Return what Ray says is asked for, in parts."""
    return {name: parts_of(value) for name, value in shape.items() if value}


def _growth(survey: Survey) -> Iterator[str]:
    """Return what is known of nodes that may come."""
    if survey.coming:
        yield f"nodes that come: {listing(survey.coming, len(survey.coming))}"
    elif survey.grows:
        yield "the cluster has an autoscaler, which starts nodes that it knows"
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

    def check_feasible(self, func: FunctionSpec) -> None:
        """Refuse what no node of the cluster could ever give.

        Raises:
            InfeasibleError: says what was asked and what there is.
        """
        self.check_request(func.spec.name, func.spec.shape.request)

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
        return status_of(await asked(ray.survey), self._calls, now)

    async def why(self, task: int, now: float) -> Why | None:
        """Return why a task of this program waits."""
        if task not in self._calls.live:
            return None
        survey = await asked(ray.survey)
        live = self._calls.live
        return None if (one := live.get(task)) is None else why(task, one, survey, now)

    async def why_placement(
        self, task: int, placement_group: PlacementGroupSpec, now: float
    ) -> Why | None:
        """Return why a placement of this program waits."""
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


class ClusterPort(Protocol):
    """What the parts of an engine ask of it; see `RayEngine`."""

    loop: asyncio.AbstractEventLoop
    calls: Calls
    grace: float
    overview: Overview
    lost: str | None
    is_open: bool

    @property
    def mark(self) -> object:
        """Left on functions that were checked."""
        ...

    def check_open(self) -> None:
        """Raise what has become of the cluster, where it is there no more."""
        ...

    def admit(self, func: FunctionSpec) -> None:
        """Check what is the same for all calls of a function."""
        ...

    def send(
        self, number: int, payload: bytes, send: Callable[[tuple[Any, ...]], None]
    ) -> None:
        """Send a call as soon as all that it refers to is known to Ray."""
        ...

    def given(self, payload: bytes) -> tuple[Any, ...]:
        """A payload as the arguments that Ray is given."""
        ...

    def refuse(self, number: int, failed: Failed) -> None:
        """A call is not sent: its receiver is told why."""
        ...

    def demand(self, task: int, limit: int) -> None:
        """Let a stream yield so many items in all."""
        ...

    def cancel(self, task: int) -> None:
        """Stop a task."""
        ...
