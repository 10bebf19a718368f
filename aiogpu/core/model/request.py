"""Requests for resources, conditions on devices, and specifications of tasks.

Requests and shapes are compared by value: tasks with equal shapes wait in one queue,
and only their order distinguishes them. A spec is built once per function and holds
only what the scheduler needs; the function and its arguments stay with the driver.
`DurationEstimate` limits how many tasks are sent ahead to a worker: few milliseconds of
work, because taking tasks back from a worker is expensive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from aiogpu.core.model.units import (
    BY_SHARE,
    GPU,
    GPU_MEMORY,
    TYPE_PREFIX,
    TYPE_SHARE,
    UNIT,
    format_amount,
    number,
    size,
)


def named_bytes(amount: int, memory: int) -> int:
    """Return the bytes reserved explicitly on each device; 0 if the share implies them.

    Args:
        amount: the share of the device, in parts.
        memory: the `Request.gpu_memory`.
    """
    return memory if memory > 0 and amount < UNIT else 0


@dataclass(frozen=True, slots=True)
class Device:
    """One device, identified as users and variables such as CUDA_VISIBLE_DEVICES do.

    Attributes:
        id: an index on the machine (int), or a UUID or MIG id (str).
        type: the accelerator type, such as "A100", if known.
        uuid: the vendor's unique id, if known.
        name: the vendor's product name, if known.
        memory: bytes of device memory, 0 if unknown.
        compute_capability: such as (8, 0), if known.
        pci: the address on the PCI bus, such as "00000000:3B:00.0", if known.
        links: UUIDs of the devices that have a fast link (NVLink) to this one.
        parent: UUID of the GPU of which this is an instance (MIG), else None.
    """

    id: int | str
    type: str | None = None
    uuid: str | None = None
    name: str | None = None
    memory: int = 0
    compute_capability: tuple[int, int] | None = None
    pci: str | None = None
    links: frozenset[str] = frozenset()
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceSelector:
    """Conditions on a device; the device must fulfil all.

    A device with an unknown property does not fulfil a condition on that property.

    Attributes:
        least_memory: least bytes of device memory; 0 for any.
        least_capability: least compute capability, such as (8, 0).
        name: pattern of the product name in lower case, with `*`, `?`, `[...]`.
    """

    least_memory: int = 0
    least_capability: tuple[int, int] = (0, 0)
    name: str = ""

    def fits(self, device: Device) -> bool:
        """Return True if a device fulfils all conditions."""
        if device.memory < self.least_memory:
            return False
        if self.least_capability > (device.compute_capability or (0, 0)):
            return False
        if not self.name:
            return True
        # Imported late: few requests name a product.
        from fnmatch import fnmatchcase

        return fnmatchcase((device.name or "").lower(), self.name)

    def __str__(self) -> str:
        terms = []
        if self.least_memory:
            terms.append(f"memory of {size(self.least_memory)} or more")
        if self.least_capability > (0, 0):
            major, minor = self.least_capability
            terms.append(f"compute capability {major}.{minor} or more")
        if self.name:
            terms.append(f"a name like {self.name!r}")
        return " and ".join(terms)


PACK: Final = "PACK"
SPREAD: Final = "SPREAD"
STRICT_PACK: Final = "STRICT_PACK"
STRICT_SPREAD: Final = "STRICT_SPREAD"
STRATEGIES: Final = (PACK, SPREAD, STRICT_PACK, STRICT_SPREAD)

ANY: Final = -1
"""The bundle index that stands for any bundle with room."""

MOST_BUNDLES: Final = 256
"""The most bundles of one placement group."""


class PlacementGroupSpec(NamedTuple):
    """The bundles that are reserved together.

    Attributes:
        key: unique among the placement groups of all processes.
        name: a name for people.
        strategy: how the bundles are laid out, one of `STRATEGIES`.
        bundles: the request of each bundle, without `spread` and `where`.
    """

    key: str
    name: str
    strategy: str
    bundles: tuple[Request, ...]

    def request(self) -> Request:
        """Return the sum of all bundles as a request."""
        scalars: Counter[str] = Counter()
        devices: Counter[str] = Counter()
        for bundle in self.bundles:
            scalars.update(dict(bundle.scalars))
            devices.update(dict(bundle.devices))
        return Request(
            tuple(sorted(scalars.items())),
            tuple(sorted(devices.items())),
            placement_group=self,
        )

    def holding(self, index: int, request: Request) -> list[int]:
        """Return which bundles (bundle `index`, or `ANY`) could hold a request."""
        candidates: Sequence[int] = (
            range(len(self.bundles)) if index == ANY else (index,)
        )
        return [i for i in candidates if self.bundles[i].could_hold(request)]

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.bundles))}]"


class BundleRef(NamedTuple):
    """A reference to a bundle from which a member takes its resources.

    Attributes:
        key: key of the placement group.
        name: name of the placement group.
        bundle: index of the bundle, or `ANY`.
    """

    key: str
    name: str
    bundle: int = ANY

    def __str__(self) -> str:
        which = "any bundle" if self.bundle == ANY else f"bundle {self.bundle}"
        return f"{which} of {self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request for resources. Built once per function, compared by value.

    Attributes:
        scalars: amounts of resources without devices (CPU, custom resources) in parts,
            sorted by name, without zeros.
        devices: amounts of resources that consist of devices (GPU).
        accelerator_type: restricts the choice to devices of that type.
        spread: a share goes to the emptiest device, not to the fullest with room.
        where: restricts the choice to devices that fulfil these conditions.
        gpu_memory: bytes of device memory on each GPU; 0 if not requested; or
            `BY_SHARE`. With a `devices` amount of 0, only memory of one GPU is
            requested.
        placement_group: for the request of a placement group, its bundles; for the
            request of a member, the bundle from which it takes; else None.
        alternatives: other requests, in order, one of which serves instead.
    """

    scalars: tuple[tuple[str, int], ...] = ()
    devices: tuple[tuple[str, int], ...] = ()
    accelerator_type: str | None = None
    spread: bool = False
    where: DeviceSelector | None = None
    gpu_memory: int = 0
    placement_group: PlacementGroupSpec | BundleRef | None = None
    alternatives: tuple[Request, ...] = ()
    _hash: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._key()))

    def _key(self) -> tuple[object, ...]:
        return (
            self.scalars,
            self.devices,
            self.accelerator_type,
            self.spread,
            self.where,
            self.gpu_memory,
            self.placement_group,
            self.alternatives,
        )

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Request) and self._key() == other._key()
        )

    @classmethod
    def of(
        cls,
        amounts: Mapping[str, int],
        devices: Mapping[str, int],
        accelerator_type: str | None = None,
        *,
        spread: bool = False,
        where: DeviceSelector | None = None,
        gpu_memory: int = 0,
    ) -> Request:
        """Build a request from amounts in parts, without zeros.

        The amount 0 of GPUs is kept if the request asks for GPU memory only.
        """
        scalars = dict(amounts)
        if accelerator_type is not None:
            scalars[TYPE_PREFIX + accelerator_type] = TYPE_SHARE
        kinds = _sorted(devices)
        if gpu_memory and not devices.get(GPU):
            kinds = tuple(sorted((*kinds, (GPU, 0))))
        return cls(_sorted(scalars), kinds, accelerator_type, spread, where, gpu_memory)

    @property
    def named_bytes(self) -> int:
        """The bytes requested explicitly on one GPU; 0 if the share implies them."""
        return named_bytes(dict(self.devices).get(GPU, 0), self.gpu_memory)

    def could_hold(self, request: Request) -> bool:
        """Return True if another request asks for no more than this bundle has."""
        scalars, devices = dict(self.scalars), dict(self.devices)
        if self.named_bytes and request.gpu_memory > self.named_bytes:
            return False
        # The type of a bundle's devices is known only when the group is granted.
        of_type = TYPE_PREFIX + (request.accelerator_type or "")
        return all(
            amount <= scalars.get(name, 0)
            for name, amount in request.scalars
            if name != of_type
        ) and all(
            name in devices and amount <= devices[name]
            for name, amount in request.devices
        )

    def as_numbers(self) -> dict[str, float]:
        """Return the request in the user's terms, `{"CPU": 1.0, "GPU": 0.25}`.

        Includes "gpu_memory" in bytes if these are requested explicitly.
        """
        numbers = {name: number(parts) for name, parts in self._amounts()}
        if self.gpu_memory > 0:
            numbers[GPU_MEMORY] = float(self.gpu_memory)
        return numbers

    def _amounts(self) -> Iterator[tuple[str, int]]:
        yield from self.scalars
        for kind, parts in self.devices:
            if parts:
                yield kind, parts

    def __str__(self) -> str:
        terms = [
            f"{name}: {format_amount(name, number(parts))}"
            for name, parts in self._amounts()
        ]
        if self.gpu_memory:
            is_share = self.gpu_memory == BY_SHARE
            terms.append(
                f"{GPU_MEMORY}: {'share' if is_share else size(self.gpu_memory)}"
            )
        text = " or ".join(("{" + ", ".join(terms) + "}", *map(str, self.alternatives)))
        if self.placement_group is None:
            return text
        return f"{text} in {self.placement_group}"


def _sorted(amounts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, parts) for name, parts in amounts.items() if parts))


HORIZON: Final = 2e-3
"""Seconds of work that may be queued behind a task."""

DEEPEST: Final = 64
"""The most tasks that may be queued behind a task, however short they are."""

UP: Final = 0.25
"""Weight of the latest duration in the mean, if it is longer than the mean."""

DOWN: Final = 0.5
"""The same, if the latest duration is shorter."""

OUTLIER: Final = 4
"""A duration counts as at most this multiple of the mean (and `LEAST`): the kernel may
have suspended the worker."""

LEAST: Final = 1e-4
"""Seconds by which a duration may exceed that multiple."""


class DurationEstimate:
    """A running mean of the durations of a function's tasks.

    Attributes:
        mean: the mean in seconds; negative while unknown.
        depth: how many tasks may be queued behind a task; 0 while unknown.
        waits: a task of the function has waited for its children.
    """

    __slots__ = ("depth", "mean", "waits")

    def __init__(self) -> None:
        self.mean = -1.0
        self.depth = 0
        self.waits = False

    def note(self, took: float) -> None:
        """Take in the duration of one task, in seconds."""
        mean = self.mean
        if mean < 0:
            mean = took
        elif took < mean:
            mean += (took - mean) * DOWN
        else:
            mean += (min(took, mean * OUTLIER + LEAST) - mean) * UP
        self.mean = mean
        self.depth = DEEPEST if mean * DEEPEST < HORIZON else int(HORIZON / mean)

    def note_long(self) -> None:
        """Queue no tasks until the next duration is known: one takes unusually long."""
        self.mean = max(self.mean, HORIZON)
        self.depth = 0


Environment = tuple[tuple[str, str], ...]
"""The variables of `runtime_env`, sorted by name; the core only compares them."""

Lane = tuple[int, int]
"""Sort key of a task before its id: the priority, then the depth, both negated."""

UNLIMITED = -1
"""The `max_retries` of a task without a limit of retries."""


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """Request and environment: tasks with equal shapes are queued together."""

    request: Request
    environment: Environment = ()
    _hash: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.request, self.environment)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Shape)
            and self.request == other.request
            and self.environment == other.environment
        )


@dataclass(frozen=True, slots=True, eq=False)
class TaskSpec:
    """The specification of a function's tasks, the same for all its calls.

    Attributes:
        name: the task's name in logs, errors and `status()`.
        shape: request and environment.
        function: identity of the function, for `max_calls`.
        max_calls: calls after which the worker exits; 0 for no limit. 1 also means
            that the call gets a process that has run nothing else.
        max_retries: retries after the death of the worker or an exception that is
            retried; -1 for no limit.
        priority: tasks with a higher priority go first.
        timeout: seconds from the submission after which the task is stopped.
        cancel_grace: seconds from the first interrupt to the kill of the worker; None
            for the node's default.
        is_detached: the task outlives its parent.
        is_endless: the task holds its lease until its owner ends it (an actor or a
            lease), so no decision may rely on its end.
        retries_oom: if device memory runs out, the task gets one more attempt with a
            device of its own.
        doubles_share: before this, the task gets one with twice its share of a device;
            only with `retries_oom`.
        pace: how long the tasks take; shared and updated by all tasks of the spec.
        is_lease: a lease for processes outside the workers. `is_endless` is then True
            and `max_calls` 1, so that the lease never takes over a worker.
        run_timeout: seconds from the begin of the code after which the task is stopped.
        stop_grace: seconds for which the task may continue after the stop of its
            program or node was announced.
        alternatives: the specs of the request's alternatives.
        is_evictable: an endless task that ends when others need what it holds, as soon
            as it has nothing to do.
        lane: the lane of tasks without a parent.
        is_grouped: the task is a placement group or runs in one.
        is_timed: the task has a timeout of either kind.
    """

    name: str
    shape: Shape
    function: int = 0
    max_calls: int = 0
    max_retries: int = 3
    priority: int = 0
    timeout: float | None = None
    cancel_grace: float | None = None
    is_detached: bool = False
    is_endless: bool = False
    retries_oom: bool = False
    pace: DurationEstimate = field(
        default_factory=DurationEstimate, repr=False, kw_only=True
    )
    is_lease: bool = False
    run_timeout: float | None = None
    stop_grace: float = 0.0
    is_evictable: bool = False
    alternatives: tuple[TaskSpec, ...] = ()
    doubles_share: bool = False
    lane: Lane = field(init=False, repr=False, default=(0, 0))
    is_grouped: bool = field(init=False, repr=False, default=False)
    is_timed: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lane", (-self.priority, 0))
        is_grouped = self.shape.request.placement_group is not None
        object.__setattr__(self, "is_grouped", is_grouped)
        is_timed = self.timeout is not None or self.run_timeout is not None
        object.__setattr__(self, "is_timed", is_timed)

    def choices(self) -> tuple[TaskSpec, ...]:
        """Undo `any_of`; empty for a spec with a single request."""
        if not self.alternatives:
            return ()
        request = replace(self.shape.request, alternatives=())
        shape = Shape(request, self.shape.environment)
        return replace(self, shape=shape, alternatives=()), *self.alternatives

    @classmethod
    def any_of(cls, specs: Sequence[TaskSpec]) -> TaskSpec:
        """Return a spec for tasks that take the first of several requests that is free.

        The specs differ in request and `max_calls` only.
        """
        first, *others = specs
        requests = tuple(spec.shape.request for spec in others)
        request = replace(first.shape.request, alternatives=requests)
        shape = Shape(request, first.shape.environment)
        return replace(first, shape=shape, alternatives=tuple(others))
