"""Placements on a cluster: Ray's placement groups, by the placements' own keys.

A key is also the group's name at Ray, so whoever is passed a placement finds its group.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiogpu.core.gang import STRICT_PACK, STRICT_SPREAD, Gang, Within
from aiogpu.core.resources import TYPE_PREFIX, TYPE_SHARE, Request
from aiogpu.core.why import Why
from aiogpu.engines import ray
from aiogpu.engines.cluster.calls import Live
from aiogpu.engines.cluster.terms import bundle_of
from aiogpu.errors import InfeasibleError, PlacementRemovedError

if TYPE_CHECKING:
    from aiogpu.engines.cluster.engine import RayEngine
    from aiogpu.runtime.call import Receiver, Site

KNOWN: Final = 1024
"""Groups that were found by their names and are remembered."""


class Placements:
    """See above, for one engine."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine
        self._groups: dict[str, Any] = {}
        self._own: dict[int, Gang] = {}

    def __repr__(self) -> str:
        return f"<Placements {len(self._own)} of {len(self._groups)}>"

    def take(self, site: Site, receiver: Receiver) -> int:
        """Ask for a placement; see `Engine.take_placement`.

        Raises:
            InfeasibleError: the cluster can never give it.
        """
        engine, gang = self._engine, site.spec.shape.request.gang
        assert isinstance(gang, Gang), site
        self._check(gang)
        group = ray.new_group(
            [bundle_of(bundle) for bundle in gang.bundles], gang.strategy, gang.key
        )
        self._groups[gang.key] = group
        live = Live(gang.name, receiver, engine.loop.time())
        number = engine.calls.begin(live)
        live.stop = partial(self.release, number)
        live.told_as = b""
        self._own[number] = gang
        engine.calls.watch(number, (group.ready(),))
        return number

    def _check(self, gang: Gang) -> None:
        overview = self._engine.overview
        for bundle in gang.bundles:
            overview.check_request(
                f"a bundle of {gang.name}", _untyped(bundle.request())
            )
        if gang.strategy == STRICT_PACK:
            whole = Request.of(*_sums(gang))
            overview.check_request(f"{gang.name}, packed strictly,", whole)
        nodes = overview.count_nodes()
        if gang.strategy == STRICT_SPREAD and len(gang.bundles) > nodes:
            raise InfeasibleError(
                f"{gang.name} asks for {len(gang.bundles)} bundles on as many nodes "
                f"(STRICT_SPREAD), and this cluster has {nodes}. Add nodes, or say "
                f"strategy='SPREAD'."
            )

    def release(self, number: int) -> bool:
        """Remove a placement that was asked for here; False if it is none."""
        gang = self._own.pop(number, None)
        if gang is None:
            return False
        group = self._groups.pop(gang.key, None)
        if group is not None:
            ray.remove_group(group)
        return True

    def options(self, request: Request) -> dict[str, Any]:
        """What Ray is told of who runs in a placement, and nothing of others.

        Raises:
            PlacementRemovedError: there is no such placement.
        """
        within = request.gang
        if not isinstance(within, Within):
            return {}
        group = self._groups.get(within.key) or ray.find_group(within.key)
        if group is None:
            raise PlacementRemovedError(
                f"{within.name} was removed, or its program has ended.", within.name
            )
        if len(self._groups) >= KNOWN:
            own = {gang.key for gang in self._own.values()}
            self._groups = {k: v for k, v in self._groups.items() if k in own}
        self._groups[within.key] = group
        return {"scheduling_strategy": ray.within(group, within.bundle)}

    def why(self, number: int) -> Why | None:
        """That a placement is held; None if there is none of that number."""
        gang = self._own.get(number)
        if gang is None or number in self._engine.calls.live:
            return None
        held = gang.request().as_numbers()
        return Why(gang.name, number, "running", request=held)

    def close(self) -> None:
        """The program leaves: what it has asked for ends with it."""
        for number in list(self._own):
            self.release(number)


def _untyped(request: Request) -> Request:
    return Request(request.scalars, request.devices)


def _sums(gang: Gang) -> tuple[dict[str, int], dict[str, int]]:
    whole = gang.request()
    scalars = {
        name: TYPE_SHARE if name.startswith(TYPE_PREFIX) else parts
        for name, parts in whole.scalars
    }
    return scalars, dict(whole.devices)
