"""Requests for resources, conditions on devices, and specifications of tasks.

All of it is compared by value: tasks that ask for the same wait in one queue. A spec is
built once per function and holds only what the scheduler decides by; the function and
its arguments stay with the driver. Tasks whose specs have equal shapes can stand in for
each other in every decision but the order. `DurationEstimate` says how many tasks may
be sent ahead to a worker: no more than it does in a moment, because what was sent ahead
cannot be given elsewhere for free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from aiogpu.core.model.units import (
    BY_SHARE,
    GPU,
    GPU_MEMORY,
    TYPE_PREFIX,
    TYPE_SHARE,
    UNIT,
    number,
    size,
    written,
)


def named_bytes(amount: int, memory: int) -> int:
    """Return the bytes reserved explicitly on each device; 0 if the share implies them.

    Args:
        amount: of the device, in parts.
        memory: its `Request.gpu_memory`.
    """
    return memory if memory > 0 and amount < UNIT else 0


@dataclass(frozen=True, slots=True)
class Device:
    """One device as users and the assigning variable know it.

    Attributes:
        id: an index of the box (int), or a UUID or MIG id (str).
        type: the accelerator's type, such as "A100", where it is known.
        uuid: the vendor's unique id, where it is known.
        name: the vendor's name for the product, where it is known.
        memory: bytes of device memory, 0 where unknown.
        compute_capability: such as (8, 0), where it is known.
        pci: the address on the PCI bus, such as "00000000:3B:00.0", where it is known.
        links: UUIDs of the devices that a fast link (NVLink) joins with this one.
        parent: UUID of the GPU of which this is a part (MIG); None for a whole one.
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
    """Conditions that a device must fulfil, all of them.

    A device of which the fact in question is not known does not fulfil it.

    Attributes:
        least_memory: bytes of device memory that it must have; 0 for any.
        least_capability: compute capability from which on, such as (8, 0).
        name: pattern of the product's name, in small letters, with `*`, `?`, `[...]`.
    """

    least_memory: int = 0
    least_capability: tuple[int, int] = (0, 0)
    name: str = ""

    def fits(self, device: Device) -> bool:
        """Return whether a device fulfils them."""
        if device.memory < self.least_memory:
            return False
        if self.least_capability > (device.compute_capability or (0, 0)):
            return False
        if not self.name:
            return True
        # Late: few requests name a type of device.
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
"""As the index of a bundle: whichever has room."""

MOST_BUNDLES: Final = 256
"""Of one placement group."""


class PlacementGroupSpec(NamedTuple):
    """The bundles that are reserved together.

    Attributes:
        key: unique among all placement groups, whichever process made them.
        name: for people.
        strategy: how the bundles are laid out, one of `STRATEGIES`.
        bundles: what each holds; neither `spread` nor `where` is asked of them.
    """

    key: str
    name: str
    strategy: str
    bundles: tuple[Request, ...]

    def request(self) -> Request:
        """Return what all bundles together ask for."""
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
        """Indices of the bundles that could hold a request: of `index`, or of `ANY`."""
        candidates: Sequence[int] = (
            range(len(self.bundles)) if index == ANY else (index,)
        )
        return [one for one in candidates if self.bundles[one].could_hold(request)]

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.bundles))}]"


class BundleRef(NamedTuple):
    """A reference to a bundle from which a member takes its resources.

    Attributes:
        key, name: those of the placement group.
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
        scalars: amounts of undivided resources (CPU, custom ones) in parts, by
            name in sorted order, without zeros.
        devices: amounts of resources that come as single devices (GPU).
        accelerator_type: restricts the choice to devices of that type.
        spread: a share goes to the emptiest device, not to the fullest with room.
        where: restricts the choice to devices that fulfil this.
        gpu_memory: bytes of device memory on each GPU, 0 where nothing was said of
            it, or `BY_SHARE`. With a `devices` amount of 0 it is all that is asked
            of one GPU.
        placement_group: the bundles of which it is the sum, granted together; or the
            bundle of a group from which it takes; None for what stands alone.
    """

    scalars: tuple[tuple[str, int], ...] = ()
    devices: tuple[tuple[str, int], ...] = ()
    accelerator_type: str | None = None
    spread: bool = False
    where: DeviceSelector | None = None
    gpu_memory: int = 0
    placement_group: PlacementGroupSpec | BundleRef | None = None
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
        """Build a request from amounts in parts; zeros are dropped.

        But not that of a task which asks for GPU memory and no share of the rest.
        """
        scalars = dict(amounts)
        if accelerator_type is not None:
            scalars[TYPE_PREFIX + accelerator_type] = TYPE_SHARE
        held = _sorted(devices)
        if gpu_memory and not devices.get(GPU):
            held = tuple(sorted((*held, (GPU, 0))))
        return cls(_sorted(scalars), held, accelerator_type, spread, where, gpu_memory)

    @property
    def named_bytes(self) -> int:
        """The bytes of its one GPU that it has by name; 0 where its share says it."""
        return named_bytes(dict(self.devices).get(GPU, 0), self.gpu_memory)

    def could_hold(self, request: Request) -> bool:
        """Return whether another request asks for no more than this bundle has."""
        scalars, devices = dict(self.scalars), dict(self.devices)
        if self.named_bytes and request.gpu_memory > self.named_bytes:
            return False
        # The type of its devices is known once they are.
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
        """The request in the user's terms, `{"CPU": 1.0, "GPU": 0.25}`.

        With "gpu_memory" in bytes, where they are named.
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
            f"{name}: {written(name, number(parts))}" for name, parts in self._amounts()
        ]
        if self.gpu_memory:
            is_share = self.gpu_memory == BY_SHARE
            terms.append(
                f"{GPU_MEMORY}: {'share' if is_share else size(self.gpu_memory)}"
            )
        told = "{" + ", ".join(terms) + "}"
        return (
            told
            if self.placement_group is None
            else f"{told} in {self.placement_group}"
        )


def _sorted(amounts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, parts) for name, parts in amounts.items() if parts))


HORIZON: Final = 2e-3
"""Seconds of work that may be queued behind a task."""

DEEPEST: Final = 64
"""Tasks that may be queued behind one, however short they are."""

UP: Final = 0.25

DOWN: Final = 0.5
"""What the latest duration counts in the mean, where it is longer, or shorter."""

OUTLIER: Final = 4
"""How many times the mean a duration counts at most: a worker may be put aside."""

LEAST: Final = 1e-4
"""Seconds that count in any case."""


class DurationEstimate:
    """A running mean of what a function's tasks took.

    Attributes:
        mean: seconds, negative while nothing is known.
        depth: how many of them may be queued behind one; 0 while nothing is known.
    """

    __slots__ = ("depth", "mean")

    def __init__(self) -> None:
        self.mean = -1.0
        self.depth = 0

    def note(self, took: float) -> None:
        """Take in one task's duration in seconds."""
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
        """One takes longer than was thought: queue nothing until it is known."""
        self.mean = max(self.mean, HORIZON)
        self.depth = 0


Environment = tuple[tuple[str, str], ...]
"""The variables of `runtime_env`, sorted by name; the core only compares them."""

Lane = tuple[int, int]
"""Sorts tasks of equal standing: the priority, then the depth, both negated."""

UNLIMITED = -1
"""`max_retries` without end."""


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
        name: how logs, errors and `status()` call the task.
        shape: request and environment.
        function: identity of the function, for `max_calls`.
        max_calls: calls after which the worker ends; 0 is no limit. 1 also means
            that the call starts in a process that has run nothing else.
        max_retries: how often a task is started again after its worker died, or
            failed with an exception that is to be retried; -1 is without end.
        priority: higher goes first.
        timeout: seconds from submission after which the task is stopped.
        cancel_grace: seconds from its first interrupt to the kill of its worker;
            None for the node's own.
        is_detached: whether it outlives the task that has started it.
        is_endless: whether it holds what it has until its owner gives it up, so
            that nobody should wait for its end.
        retries_oom: whether a task that has run out of device memory is tried once
            more, with a device of its own.
        pace: how long its tasks take; shared and kept up to date by all of them.
        is_lease: whether it is a lease for others' processes and has no worker. It is
            endless as well, and its `max_calls` is 1, so that it follows nobody.
        run_timeout: seconds after which it is stopped, from where its code begins.
        stop_grace: seconds for which it may go on once it was told that its program or
            its node stops.
        lane: of tasks that no other task has started.
        is_grouped: whether it is a placement group, or runs in one.
        is_timed: whether it has a timeout of either kind.
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
    lane: Lane = field(init=False, repr=False, default=(0, 0))
    is_grouped: bool = field(init=False, repr=False, default=False)
    is_timed: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lane", (-self.priority, 0))
        is_grouped = self.shape.request.placement_group is not None
        object.__setattr__(self, "is_grouped", is_grouped)
        is_timed = self.timeout is not None or self.run_timeout is not None
        object.__setattr__(self, "is_timed", is_timed)
