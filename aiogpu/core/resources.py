"""Quantities of resources, as exact integers, and requests made of them.

One unit of anything is `UNIT` = 10 000 parts, so a thousand times 0.1 never
drifts. The scale and the truncation of finer quantities are those of Ray
(`src/ray/common/scheduling/fixed_point.h`). This file decides which quantities
are valid; it does not know what a node has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiogpu.core.sizes import size
from aiogpu.errors import OptionError

if TYPE_CHECKING:
    from aiogpu.core.gang import Gang, Within
    from aiogpu.core.where import Where

UNIT = 10_000
LARGEST = 10**14
"""The largest quantity of one resource that is accepted, in whole units."""

CPU = "CPU"
GPU = "GPU"
MEMORY = "memory"
"""Main memory, in bytes."""
GPU_MEMORY = "gpu_memory"
"""Memory of the GPUs, in bytes: a measure of theirs, beside their parts."""
TYPE_PREFIX = "accelerator_type:"
TYPE_SHARE = 10
"""What `accelerator_type=` takes of its custom resource: 0.001, in parts."""
_IN_BYTES = frozenset({MEMORY, GPU_MEMORY})
BY_SHARE = -1
"""A `Request.gpu_memory` that stands for the part that the share is of its device."""


def quantity(option: str, value: object) -> int:
    """Turn a user's number into parts of 1/10 000.

    Finer quantities are truncated by their decimal text, so 0.57 is 5700 where
    `int(0.57 * 10000)` is 5699.

    Args:
        option: the option's name, for the message.
        value: an `int` or `float`, at least 0 and finite.

    Raises:
        OptionError: the value is no such number, or it truncates to nothing.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionError(
            f"{option}={value!r} is {_article(value)}; give an int or a float, "
            f"such as {option}=1 or {option}=0.5."
        )
    if not 0 <= value <= LARGEST:
        raise OptionError(
            f"{option}={value!r} is not a quantity; give a finite number from 0 "
            f"to {LARGEST:.0e}."
        )
    # A subclass (numpy's float64, an IntEnum) may write itself in words.
    if isinstance(value, int):
        # Not by an operator that a subclass may have changed.
        return int.__mul__(value, UNIT)
    text = float.__repr__(value)
    # Once per function; a worker that imports a module of tasks may never need it.
    from decimal import ROUND_FLOOR, Decimal

    parts = int((Decimal(text) * UNIT).to_integral_value(ROUND_FLOOR))
    if parts == 0 and value != 0:
        raise OptionError(
            f"{option}={value!r} is finer than 1/{UNIT}, the smallest share; give "
            f"at least {1 / UNIT} or 0."
        )
    return parts


def device_quantity(option: str, value: object) -> int:
    """Like `quantity`, for devices: below 1 a share of one, above 1 whole ones.

    Raises:
        OptionError: also where a number above 1 is not whole.
    """
    parts = quantity(option, value)
    if parts > UNIT and parts % UNIT:
        raise OptionError(
            f"{option}={value!r} mixes whole devices and a share; give a fraction "
            f"below 1 to share one device, or a whole number of devices."
        )
    return parts


def number(parts: int) -> float:
    """The user's number for an amount in parts: 2500 is 0.25."""
    return parts / UNIT


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a task asks for. Built once per function, compared by value.

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
        gang: the bundles of which it is the sum, granted together; or the gang from a
            bundle of which it takes; None for what stands alone.
    """

    scalars: tuple[tuple[str, int], ...] = ()
    devices: tuple[tuple[str, int], ...] = ()
    accelerator_type: str | None = None
    spread: bool = False
    where: Where | None = None
    gpu_memory: int = 0
    gang: Gang | Within | None = None
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
            self.gang,
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
        where: Where | None = None,
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
        return told if self.gang is None else f"{told} in {self.gang}"


def written(name: str, value: float) -> str:
    """How much of a resource, as people read it: "0.25", "3.2GiB"."""
    return size(value) if name in _IN_BYTES else f"{value:g}"


def spoken(name: str) -> str:
    """A resource's name in a sentence."""
    return "GPU memory" if name == GPU_MEMORY else name


def _sorted(amounts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, parts) for name, parts in amounts.items() if parts))


def _article(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
