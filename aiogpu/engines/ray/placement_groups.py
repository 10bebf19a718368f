"""Ray's placement groups, by aiogpu's keys.

A key is also the group's name in Ray, so the receiver of a placement can find its
group. When a group is removed, Ray ends all tasks and actors in it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiogpu.core.model.request import (
    ANY,
    STRICT_PACK,
    STRICT_SPREAD,
    BundleRef,
    PlacementGroupSpec,
    Request,
)
from aiogpu.core.model.units import TYPE_PREFIX, TYPE_SHARE
from aiogpu.core.scheduler.placement_groups import UNKNOWN
from aiogpu.engines.ray import cluster
from aiogpu.engines.ray.options import bundle_of, check_priority
from aiogpu.engines.ray.status import Overview
from aiogpu.engines.ray.tasks import Calls, PendingCall
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
"""Cached groups, at most."""


class _OwnGroup(NamedTuple):
    """A group that this program has requested and not removed."""

    spec: PlacementGroupSpec
    group: Any
    receiver: Receiver


class PlacementGroups:
    """The placement groups that one engine has requested or found."""

    def __init__(
        self,
        calls: Calls,
        overview: Overview,
        on_removed: Callable[[PlacementGroupSpec], object],
    ) -> None:
        """Begin without groups; `on_removed` is called before a group is removed."""
        self._calls = calls
        self._overview = overview
        self._on_removed = on_removed
        self._own: dict[int, _OwnGroup] = {}
        self._groups: dict[str, Any] = {}

    def create(self, func: FunctionSpec, receiver: Receiver) -> int:
        """Request a group; see `Engine.take_lease`.

        Raises:
            InfeasibleError: the cluster can never meet the request.
            OptionError: Ray does not support the request.
        """
        spec = func.spec.shape.request.placement_group
        assert isinstance(spec, PlacementGroupSpec), func
        check_priority(func.spec)
        self._check(spec)
        bundles = [bundle_of(bundle) for bundle in spec.bundles]
        group = cluster.create_placement_group(bundles, spec.strategy, spec.key)
        self._groups[spec.key] = group
        now = self._calls.loop.time()
        call = PendingCall(spec.name, receiver, now, goes_on=True, result=b"")
        number = self._calls.begin(call)
        self._own[number] = _OwnGroup(spec, group, receiver)
        self._calls.watch(number, (group.ready(),))
        return number

    def _check(self, spec: PlacementGroupSpec) -> None:
        overview = self._overview
        if any(bundle.gpu_memory for bundle in spec.bundles):
            raise OptionError(
                f"{spec.name} names gpu_memory in a bundle, which a Ray cluster cannot "
                f"reserve; leave it out, or run on a node of aiogpu's own."
            )
        bundles = [_without_type(bundle) for bundle in spec.bundles]
        for bundle in bundles:
            overview.check_request(f"a bundle of {spec.name}", bundle)
        if spec.strategy == STRICT_PACK:
            overview.check_request(f"{spec.name}, packed strictly,", _sum(spec))
        nodes = overview.count_nodes()
        if spec.strategy == STRICT_SPREAD and len(bundles) > nodes:
            raise InfeasibleError(
                f"{spec.name} asks for {len(bundles)} bundles, each on a separate "
                f"machine (STRICT_SPREAD), and this cluster has {nodes}. Add nodes, or "
                f"use strategy='SPREAD'."
            )
        overview.check_together(spec.name, bundles)

    def remove(self, number: int) -> None:
        """Remove a group that this program has requested; ignore other numbers."""
        own = self._own.pop(number, None)
        if own is not None:
            self._groups.pop(own.spec.key, None)
            self._on_removed(own.spec)
            cluster.remove_placement_group(own.group)

    def refusal(self, func: FunctionSpec) -> AiogpuError | None:
        """Return why a task or actor cannot run in its group; None if it can."""
        request = func.spec.shape.request
        within = request.placement_group
        if not isinstance(within, BundleRef):
            return None
        group = self._find(within)
        if group is None:
            return removed(within.name, func.spec.name, UNKNOWN)
        if request.accelerator_type and not _has_type(group, within, request):
            of_type = f"{TYPE_PREFIX}{request.accelerator_type}"
            return InfeasibleError(
                f"{func.spec.name} asks for accelerator_type="
                f"{request.accelerator_type!r} in {within}, which was requested "
                f"without it. On a Ray cluster, add the type to the bundle: "
                f'{{"GPU": 1, "{of_type}": 0.001}}.'
            )
        return None

    def _find(self, within: BundleRef) -> Any | None:
        group = self._groups.get(within.key)
        if group is None:
            group = cluster.find_placement_group(within.key)
            if len(self._groups) >= KNOWN:
                self._groups = {own.spec.key: own.group for own in self._own.values()}
            if group is not None:
                self._groups[within.key] = group
        return group

    def add_strategy(self, options: dict[str, Any], request: Request) -> dict[str, Any]:
        """Return Ray's options with the bundle in which the task runs.

        Raises:
            PlacementRemovedError: the group was removed.
        """
        within = request.placement_group
        if not isinstance(within, BundleRef):
            return options
        group = self._find(within)
        if group is None:
            raise PlacementRemovedError(f"{within.name} was removed.", within.name)
        if request.accelerator_type:
            # The bundle as a whole has the type, not each task in it.
            resources = dict(options["resources"])
            del resources[TYPE_PREFIX + request.accelerator_type]
            options = {**options, "resources": resources}
        strategy = cluster.in_bundle(group, within.bundle)
        return {**options, "scheduling_strategy": strategy}

    def why(self, number: int) -> Why | None:
        """Return the state of a group that this program has requested."""
        call, own = self._calls.live.get(number), self._own.get(number)
        if own is None:
            return None
        request = own.spec.request().as_numbers()
        if call is None:
            return Why(own.spec.name, number, "running", request=request)
        seconds = self._calls.loop.time() - call.since
        return Why(own.spec.name, number, "waiting", seconds, request)

    def fail(self, error: Exception) -> None:
        """Fail the receivers of granted groups."""
        for number, own in self._own.items():
            if number not in self._calls.live:
                own.receiver.settle(error)

    def close(self) -> None:
        """Remove the groups that this program has requested."""
        for own in self._own.values():
            cluster.remove_placement_group(own.group)
        self._own.clear()


def _has_type(group: Any, within: BundleRef, request: Request) -> bool:
    """Return whether all bundles that a task may use were requested with its type."""
    bundles = list(group.bundle_specs)
    if within.bundle != ANY:
        bundles = bundles[within.bundle : within.bundle + 1]
    of_type = f"{TYPE_PREFIX}{request.accelerator_type}"
    return all(of_type in bundle for bundle in bundles)


def _without_type(request: Request) -> Request:
    return Request(request.scalars, request.devices)


def _sum(spec: PlacementGroupSpec) -> Request:
    """Return the resources of a node that holds all bundles."""
    whole = spec.request()
    scalars = {
        name: TYPE_SHARE if name.startswith(TYPE_PREFIX) else parts
        for name, parts in whole.scalars
    }
    return Request.of(scalars, dict(whole.devices))
