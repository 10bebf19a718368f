"""A `FunctionSpec` as bytes, without pickle: what a caller declares to its node.

Only plain values travel in `Terms`, since a worker's hashes mean nothing in the driver.
What is the user's stays pickled on its own: exception classes, the description of
actors.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, Final, NamedTuple

from aiogpu.client.function_spec import (
    ActorTerms,
    Function,
    FunctionSpec,
    new_func_id,
)
from aiogpu.client.plain_data import Maybe, dump_plain, fits, load_plain
from aiogpu.core.model.ids import PROGRAM
from aiogpu.core.model.request import (
    ANY,
    MOST_BUNDLES,
    STRATEGIES,
    Bundle,
    BundleRef,
    DeviceSelector,
    PlacementGroupSpec,
    Request,
    Shape,
    TaskSpec,
)
from aiogpu.core.model.units import GPU, UNIT
from aiogpu.errors import (
    ProtocolError,
)

_AMOUNTS: Final = [(str, int)]


_SECONDS: Final = int | float | None


_WHERE: Final = Maybe((int, (int, int), str))


_ACTING: Final = Maybe(
    (str, _AMOUNTS, [(str, str)], int, bool, bytes, _AMOUNTS),
)


_PLACEMENT_GROUP: Final = Maybe(
    (str, str, int, str, [(_AMOUNTS, _AMOUNTS, str | None, int)])
)


_FIELDS: Final = (
    *(str, _AMOUNTS, _AMOUNTS, str | None, bool, _WHERE, int, [(str, str)]),
    *(int, int, int, _SECONDS, _SECONDS, bool, bool, bytes, bool, bool, _ACTING, int),
    *(bool, _PLACEMENT_GROUP),
)


class Terms(NamedTuple):
    """The fields of a function and its spec; see `TaskSpec` and `FunctionSpec`."""

    name: str
    scalars: tuple[tuple[str, int], ...]
    devices: tuple[tuple[str, int], ...]
    accelerator_type: str | None
    spread: bool
    where: tuple[Any, ...] | None
    gpu_memory: int
    environment: tuple[tuple[str, str], ...]
    max_calls: int
    max_retries: int
    priority: int
    timeout: float | None
    cancel_grace: float | None
    is_detached: bool
    is_coroutine: bool
    retried: bytes
    is_endless: bool = False
    retries_oom: bool = False
    acting: tuple[Any, ...] | None = None
    window: int = 0
    is_lease: bool = False
    placement_group: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, func: FunctionSpec) -> Terms:
        """The terms of a function."""
        spec, request = func.spec, func.spec.shape.request
        return cls(
            name=spec.name,
            scalars=request.scalars,
            devices=request.devices,
            accelerator_type=request.accelerator_type,
            spread=request.spread,
            where=None if request.where is None else astuple(request.where),
            gpu_memory=request.gpu_memory,
            environment=spec.shape.environment,
            max_calls=spec.max_calls,
            max_retries=spec.max_retries,
            priority=spec.priority,
            timeout=spec.timeout,
            cancel_grace=spec.cancel_grace,
            is_detached=spec.is_detached,
            is_coroutine=func.is_coroutine,
            retried=func.retried,
            is_endless=spec.is_endless,
            retries_oom=spec.retries_oom,
            acting=None if func.actor is None else _acting(func.actor),
            window=func.window,
            is_lease=spec.is_lease,
            placement_group=None
            if request.placement_group is None
            else _placement_group(request.placement_group),
        )

    def pack(self) -> bytes:
        """The terms as bytes."""
        return dump_plain(tuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Terms:
        """The terms that `pack` has made.

        Raises:
            ProtocolError: these are none.
        """
        fields: Any = load_plain(data)
        if not fits(fields, _FIELDS):
            raise ProtocolError("what a function asks for is not said as it must be")
        terms = cls(*fields)
        if not _may_be(terms):
            raise ProtocolError("a function asks for what nobody can ask for")
        return terms

    def of_program(self, program: str) -> Terms:
        """The same for the workers of that program alone."""
        others = (pair for pair in self.environment if pair[0] != PROGRAM)
        return self._replace(environment=tuple(sorted((*others, (PROGRAM, program)))))

    def func(self, function: Function) -> FunctionSpec:
        """A function of this process with these terms."""
        request = Request(
            self.scalars,
            self.devices,
            self.accelerator_type,
            self.spread,
            None if self.where is None else DeviceSelector(*self.where),
            self.gpu_memory,
            None
            if self.placement_group is None
            else _placement_group_of(self.placement_group),
        )
        spec = TaskSpec(
            name=self.name,
            shape=Shape(request, self.environment),
            function=function.id,
            max_calls=self.max_calls,
            max_retries=self.max_retries,
            priority=self.priority,
            timeout=self.timeout,
            cancel_grace=self.cancel_grace,
            is_detached=self.is_detached,
            is_endless=self.is_endless,
            retries_oom=self.retries_oom,
            is_lease=self.is_lease,
        )
        return FunctionSpec(
            id=new_func_id(),
            function=function,
            spec=spec,
            resources=request.as_numbers(),
            environ=dict(self.environment),
            is_coroutine=self.is_coroutine,
            retried=self.retried,
            actor=None if self.acting is None else _actor_terms(self.acting),
            window=self.window,
        )


def _may_be(terms: Terms) -> bool:
    """Return whether the numbers are such as `@remote` lets through."""
    names = [[name for name, _ in of] for of in (terms.scalars, terms.devices)]
    amounts = [amount for _, amount in (*terms.scalars, *terms.devices)]
    seconds = [each for each in terms[11:13] if each is not None]
    return (
        all(given == sorted(set(given)) for given in names)
        and min((terms.max_calls, terms.window, *amounts)) >= 0
        and min(terms.gpu_memory, terms.max_retries) >= -1
        and all(0 <= each < float("inf") for each in seconds)
        and (not terms.is_lease or (terms.is_endless and terms.acting is None))
        and (
            terms.placement_group is None
            or _may_be_in(terms, _placement_group_of(terms.placement_group))
        )
    )


def _may_be_in(terms: Terms, placement_group: PlacementGroupSpec | BundleRef) -> bool:
    """Return whether it asks for what its group is, or is a member of one."""
    if isinstance(placement_group, BundleRef):
        return placement_group.bundle >= ANY and not terms.is_lease
    scalars = [n for each in placement_group.bundles for _, n in each.scalars]
    shares = [n for each in placement_group.bundles for _, n in each.devices]
    asked = placement_group.request()
    return (
        terms.is_lease
        and len(placement_group.bundles) <= MOST_BUNDLES
        and not any(n > UNIT and n % UNIT for n in shares)
        and placement_group.strategy in STRATEGIES
        and (asked.scalars, asked.devices) == (terms.scalars, terms.devices)
        and min((*scalars, *shares, 1)) >= 0
        and all(map(_holds_something, placement_group.bundles))
    )


def _holds_something(bundle: Bundle) -> bool:
    """Whether it has of all that it names; memory alone is of one GPU, and no share."""
    amounts = [n for _, n in (*bundle.scalars, *bundle.devices)]
    if bundle.gpu_memory <= 0:
        return bundle.gpu_memory == 0 and min(amounts, default=0) > 0
    others = [n for kind, n in (*bundle.scalars, *bundle.devices) if kind != GPU]
    return GPU in dict(bundle.devices) and min(others, default=1) > 0


def _placement_group(
    placement_group: PlacementGroupSpec | BundleRef,
) -> tuple[Any, ...]:
    """A placement group, or which bundle of one, as plain values."""
    if isinstance(placement_group, BundleRef):
        return placement_group.key, placement_group.name, placement_group.bundle, "", ()
    return (
        placement_group.key,
        placement_group.name,
        ANY,
        placement_group.strategy,
        tuple(map(tuple, placement_group.bundles)),
    )


def _placement_group_of(told: tuple[Any, ...]) -> PlacementGroupSpec | BundleRef:
    key, name, bundle, strategy, bundles = told
    if not bundles:
        return BundleRef(key, name, bundle)
    return PlacementGroupSpec(
        key, name, strategy, tuple(Bundle(*each) for each in bundles)
    )


def _acting(terms: ActorTerms) -> tuple[Any, ...]:
    """An actor's terms as what can be hashed."""
    return (
        terms.mode,
        tuple(terms.limits.items()),
        tuple(terms.groups.items()),
        terms.max_task_retries,
        terms.keeps_cpus,
        terms.packed_interface(),
        tuple(terms.windows.items()),
    )


def _actor_terms(acting: tuple[Any, ...]) -> ActorTerms:
    mode, limits, groups, retries, keeps_cpus, interface, windows = acting
    return ActorTerms(
        mode,
        dict(limits),
        dict(groups),
        retries,
        keeps_cpus,
        interface,
        dict(windows),
    )
