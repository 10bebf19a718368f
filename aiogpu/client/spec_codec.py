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
from aiogpu.errors import ProtocolError

_AMOUNTS: Final = [(str, int)]
_SECONDS: Final = int | float | None
_WHERE: Final = Maybe((int, (int, int), str))
_ACTING: Final = Maybe((str, _AMOUNTS, [(str, str)], int, bool, bytes, _AMOUNTS))
_BUNDLES: Final = [(_AMOUNTS, _AMOUNTS, str | None, int)]
_PLACEMENT_GROUP: Final = Maybe((str, str, int, str, _BUNDLES))
_FIELDS: Final = (
    *(str, _AMOUNTS, _AMOUNTS, str | None, bool, _WHERE, int, [(str, str)]),
    *(int, int, int, _SECONDS, _SECONDS, bool, bool, bytes, bool, bool, _ACTING, int),
    *(bool, _PLACEMENT_GROUP),
)
_OF_REQUEST: Final = (
    *("scalars", "devices", "accelerator_type", "spread", "gpu_memory"),
)
_OF_SPEC: Final = (
    *("name", "max_calls", "max_retries", "priority", "timeout", "cancel_grace"),
    *("is_detached", "is_endless", "retries_oom", "is_lease"),
)
"""Fields that are the same in `Request`, or in `TaskSpec`, and in the terms."""


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
        group = request.placement_group
        return cls(
            **{name: getattr(spec, name) for name in _OF_SPEC},
            **{name: getattr(request, name) for name in _OF_REQUEST},
            where=None if request.where is None else astuple(request.where),
            environment=spec.shape.environment,
            is_coroutine=func.is_coroutine,
            retried=func.retried,
            acting=None if func.actor is None else _acting(func.actor),
            window=func.window,
            placement_group=None if group is None else _placement_group(group),
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
        where, group = self.where, self.placement_group
        request = Request(
            **{name: getattr(self, name) for name in _OF_REQUEST},
            where=None if where is None else DeviceSelector(*where),
            placement_group=None if group is None else _placement_group_of(group),
        )
        spec = TaskSpec(
            **{name: getattr(self, name) for name in _OF_SPEC},
            shape=Shape(request, self.environment),
            function=function.id,
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


def _placement_group(group: PlacementGroupSpec | BundleRef) -> tuple[Any, ...]:
    """A placement group, or which bundle of one, as plain values."""
    if isinstance(group, BundleRef):
        return group.key, group.name, group.bundle, "", ()
    bundles = tuple(map(tuple, group.bundles))
    return group.key, group.name, ANY, group.strategy, bundles


def _placement_group_of(told: tuple[Any, ...]) -> PlacementGroupSpec | BundleRef:
    key, name, bundle, strategy, bundles = told
    if not bundles:
        return BundleRef(key, name, bundle)
    return PlacementGroupSpec(key, name, strategy, tuple(Bundle(*b) for b in bundles))


_TABLES: Final = ("limits", "groups", "windows")


def _acting(terms: ActorTerms) -> tuple[Any, ...]:
    """An actor's terms as what can be hashed."""
    tables: dict[str, Any] = {
        name: tuple(getattr(terms, name).items()) for name in _TABLES
    }
    return tuple(terms._replace(interface=terms.packed_interface(), **tables))


def _actor_terms(acting: tuple[Any, ...]) -> ActorTerms:
    terms = ActorTerms(*acting)
    tables: dict[str, Any] = {name: dict(getattr(terms, name)) for name in _TABLES}
    return terms._replace(**tables)
