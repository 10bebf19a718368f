"""Placements on a cluster: Ray's placement groups, by the placements' own keys.

A key is also the group's name at Ray, so whoever is passed a placement finds its group.
Ray ends at once what runs in a group that is removed; here it is cancelled first, and
the group goes when all that this program has in it has stopped.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiogpu.core.model.request import (
    ANY,
    STRICT_PACK,
    STRICT_SPREAD,
    BundleRef,
    PlacementGroupSpec,
    Request,
)
from aiogpu.core.model.units import TYPE_PREFIX, TYPE_SHARE
from aiogpu.core.scheduler.placement_groups import REMOVED, UNKNOWN
from aiogpu.engines.ray import ray_api as ray
from aiogpu.engines.ray.errors import died_of
from aiogpu.engines.ray.options import bundle_of, check_priority
from aiogpu.engines.ray.status import ClusterPort
from aiogpu.engines.ray.tasks import Live
from aiogpu.errors import (
    AiogpuError,
    InfeasibleError,
    OptionError,
    PlacementRemovedError,
)
from aiogpu.observe.why import Why
from aiogpu.runtime.callers.leases import removed

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver


KNOWN: Final = 1024
"""Groups that were found by their names and are remembered."""


class Own:
    """One that was asked for here, and not removed.

    Attributes:
        placement_group: its bundles.
        group: Ray's own.
        receiver: who is told of it.
    """

    __slots__ = ("group", "placement_group", "receiver")

    def __init__(
        self,
        placement_group: PlacementGroupSpec,
        group: Any,
        receiver: Receiver,
    ) -> None:
        self.placement_group = placement_group
        self.group = group
        self.receiver = receiver


class GroupActors(Protocol):
    """The actors of an engine, some of which may live in a placement."""

    def evict(self, placement_group: PlacementGroupSpec) -> None:
        """A placement was removed: who lives in it ends."""
        ...


class GroupEngine(ClusterPort, Protocol):
    """What placements ask of their engine."""

    @property
    def has_actors(self) -> bool:
        """True if anybody has asked for its actors."""
        ...

    @property
    def actors(self) -> GroupActors:
        """Its actors."""
        ...


class Placements:
    """See above, for one engine.

    Attributes:
        own: those that were asked for here, by number.
    """

    def __init__(self, engine: GroupEngine) -> None:
        self.own: dict[int, Own] = {}
        self._engine = engine
        self._groups: dict[str, Any] = {}
        self._emptying: dict[str, tuple[Any, set[int]]] = {}

    def __repr__(self) -> str:
        return f"<Placements {len(self.own)} of {len(self._groups)}>"

    def take(self, func: FunctionSpec, receiver: Receiver) -> int:
        """Ask for a placement; see `Engine.take_placement`.

        Raises:
            InfeasibleError: the cluster can never give it.
        """
        engine, placement_group = self._engine, func.spec.shape.request.placement_group
        assert isinstance(placement_group, PlacementGroupSpec), func
        check_priority(func.spec)
        self._check(placement_group)
        bundles = [bundle_of(bundle) for bundle in placement_group.bundles]
        group = ray.new_group(
            bundles, strategy=placement_group.strategy, name=placement_group.key
        )
        self._groups[placement_group.key] = group
        live = Live(placement_group.name, receiver, engine.loop.time())
        number = engine.calls.begin(live)
        live.stop = partial(self.release, number)
        live.told_as = b""
        self.own[number] = Own(placement_group, group, receiver)
        engine.calls.watch(number, (group.ready(),))
        return number

    def _check(self, placement_group: PlacementGroupSpec) -> None:
        overview = self._engine.overview
        if any(bundle.gpu_memory for bundle in placement_group.bundles):
            raise OptionError(
                f"{placement_group.name} names gpu_memory in a bundle, which a Ray "
                f"cluster cannot reserve; leave it out, or run on a node of aiogpu's "
                f"own."
            )
        for bundle in placement_group.bundles:
            overview.check_request(
                f"a bundle of {placement_group.name}", _untyped(bundle.request())
            )
        if placement_group.strategy == STRICT_PACK:
            whole = Request.of(*_sums(placement_group))
            overview.check_request(f"{placement_group.name}, packed strictly,", whole)
        nodes = overview.count_nodes()
        if (
            placement_group.strategy == STRICT_SPREAD
            and len(placement_group.bundles) > nodes
        ):
            raise InfeasibleError(
                f"{placement_group.name} asks for {len(placement_group.bundles)} "
                f"bundles, each on a machine of its own (STRICT_SPREAD), and this "
                f"cluster has {nodes}. Add nodes, or say strategy='SPREAD'."
            )
        bundles = [_untyped(bundle.request()) for bundle in placement_group.bundles]
        overview.check_together(placement_group.name, bundles)

    def release(self, number: int) -> bool:
        """Remove a placement that was asked for here; False if it is none."""
        own = self.own.pop(number, None)
        if own is None:
            return False
        placement_group = own.placement_group
        self._groups.pop(placement_group.key, None)
        members = set(self._evicted(placement_group))
        if members:
            self._emptying[placement_group.key] = own.group, members
            engine = self._engine
            engine.loop.call_later(engine.grace + 1, self._remove, placement_group.key)
        else:
            ray.remove_group(own.group)
        return True

    def _evicted(self, placement_group: PlacementGroupSpec) -> list[int]:
        """Tell all in it that it is none any more; gives those that have to stop."""
        engine = self._engine
        if engine.has_actors:
            engine.actors.evict(placement_group)
        stopping = []
        for number, live in list(engine.calls.live.items()):
            if live.within is None or live.within.key != placement_group.key:
                continue
            if number not in engine.calls.live:
                continue  # its actor has told it by now
            receiver = live.receiver
            error: Exception = removed(placement_group.name, live.name, REMOVED)
            if live.actor:
                error = died_of(live.name, error)
            engine.cancel(number)
            if number in engine.calls.ending:
                live.on_end = partial(self._note_end, placement_group.key, number)
                stopping.append(number)
            if receiver is not None:
                receiver.fail(error)
        return stopping

    def _note_end(self, key: str, number: int) -> None:
        if key in self._emptying:
            self._emptying[key][1].discard(number)
            if not self._emptying[key][1]:
                self._remove(key)

    def _remove(self, key: str) -> None:
        found = self._emptying.pop(key, None)
        if found is not None and self._engine.lost is None:
            ray.remove_group(found[0])

    def refusal(self, func: FunctionSpec) -> AiogpuError | None:
        """Why nobody with this spec is taken; None if he is in none, or may be."""
        request = func.spec.shape.request
        within = request.placement_group
        if not isinstance(within, BundleRef):
            return None
        group = self._group_of(within)
        if group is None:
            return removed(within.name, func.spec.name, UNKNOWN)
        if request.accelerator_type and not _is_typed(group, within, request):
            of_type = f"{TYPE_PREFIX}{request.accelerator_type}"
            return InfeasibleError(
                f"{func.spec.name} asks for accelerator_type="
                f"{request.accelerator_type!r} in {within}, which was not asked for "
                f"with it. On a Ray cluster a bundle says so itself: "
                f'{{"GPU": 1, "{of_type}": 0.001}}.'
            )
        return None

    def _group_of(self, within: BundleRef) -> Any | None:
        found = self._groups.get(within.key)
        if found is None and within.key not in self._emptying:
            found = ray.find_group(within.key)
            if len(self._groups) >= KNOWN:
                kept = {own.placement_group.key for own in self.own.values()}
                self._groups = {k: v for k, v in self._groups.items() if k in kept}
            if found is not None:
                self._groups[within.key] = found
        return found

    def placed(self, options: dict[str, Any], request: Request) -> dict[str, Any]:
        """What Ray is told of who asks for this, with the bundle in which he runs.

        Raises:
            PlacementRemovedError: it was removed meanwhile.
        """
        within = request.placement_group
        if not isinstance(within, BundleRef):
            return options
        group = self._group_of(within)
        if group is None:
            raise PlacementRemovedError(f"{within.name} was removed.", within.name)
        if request.accelerator_type:
            # Its bundle has that type as a whole, not each who runs in it.
            left = dict(options["resources"])
            del left[TYPE_PREFIX + request.accelerator_type]
            options = {**options, "resources": left}
        return {**options, "scheduling_strategy": ray.within(group, within.bundle)}

    def is_waiting(self, number: int) -> bool:
        """Return whether one that was asked for here is not granted yet."""
        return number in self._engine.calls.live

    def awaited_by(self, number: int) -> str | None:
        """The placement for which a call waits; None if it waits for none."""
        live = self._engine.calls.live.get(number)
        if live is None or not isinstance(live.within, BundleRef):
            return None
        for other, own in self.own.items():
            if own.placement_group.key == live.within.key and self.is_waiting(other):
                return own.placement_group.name
        return None

    async def why(self, number: int) -> Why | None:
        """Why a placement is where it is, or what waits for one; None for others."""
        own, awaited = self.own.get(number), self.awaited_by(number)
        live, now = self._engine.calls.live.get(number), self._engine.loop.time()
        if awaited is not None and live is not None and live.request is not None:
            waits = Why(live.name, number, "expecting", now - live.since)
            asked = live.request.as_numbers()
            return replace(waits, request=asked, placement=awaited)
        if own is None:
            return None
        if live is not None:
            return await self._engine.overview.why_placement(
                number, own.placement_group, now
            )
        held = own.placement_group.request().as_numbers()
        return Why(own.placement_group.name, number, "running", request=held)

    def fail(self, error: Exception) -> None:
        """None of them is there any more, or will be."""
        for number, own in self.own.items():
            if number not in self._engine.calls.live:
                own.receiver.fail(error)

    def close(self) -> None:
        """The program has left: what it has asked for ends with it."""
        for own in self.own.values():
            ray.remove_group(own.group)
        for key in list(self._emptying):
            self._remove(key)
        self.own.clear()


def _is_typed(group: Any, within: BundleRef, request: Request) -> bool:
    """Return whether all bundles that it may use were asked for with its type."""
    bundles = list(group.bundle_specs)
    if within.bundle != ANY:
        bundles = bundles[within.bundle : within.bundle + 1]
    of_type = f"{TYPE_PREFIX}{request.accelerator_type}"
    return all(of_type in bundle for bundle in bundles)


def _untyped(request: Request) -> Request:
    return Request(request.scalars, request.devices)


def _sums(placement_group: PlacementGroupSpec) -> tuple[dict[str, int], dict[str, int]]:
    whole = placement_group.request()
    scalars = {
        name: TYPE_SHARE if name.startswith(TYPE_PREFIX) else parts
        for name, parts in whole.scalars
    }
    return scalars, dict(whole.devices)
