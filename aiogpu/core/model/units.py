"""Quantities of resources as exact integers, and sizes of memory in bytes.

One unit of a resource is `UNIT` = 10 000 parts, so that a thousand times 0.1 is exactly
100. The scale, and the truncation of finer quantities, are Ray's
(`src/ray/common/scheduling/fixed_point.h`).
"""

from __future__ import annotations

from typing import Final

from aiogpu.errors import OptionError

UNIT = 10_000

MOST_PARTS = 10**14
"""The largest quantity of one resource that is accepted, in whole units."""

CPU = "CPU"
GPU = "GPU"

MEMORY = "memory"
"""Main memory, in bytes."""

GPU_MEMORY = "gpu_memory"
"""Memory of the GPUs, in bytes: a second measure of GPUs besides their parts."""

TYPE_PREFIX = "accelerator_type:"

TYPE_SHARE = 10
"""The amount that `accelerator_type=` takes of its custom resource: 0.001, in parts."""

_IN_BYTES = frozenset({MEMORY, GPU_MEMORY})

BY_SHARE = -1
"""The `Request.gpu_memory` that means: as large a part of the memory as the share."""

_UNITS: Final = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}

LARGEST: Final = 1 << 60
"""More memory than this is a mistake."""

LEAST: Final = 1 << 20
"""Less than this is a mistake as well: an idle interpreter needs ten times as much."""


def parse_size(option: str, value: object) -> int:
    """Parse a number of bytes: an int, or a text such as "6GiB" or "512 MB".

    Args:
        option: the option's name, for the message.
        value: the option's value.

    Raises:
        OptionError: the value is not a size.
    """
    count = _from_text(value) if isinstance(value, str) else value
    if isinstance(count, bool) or not isinstance(count, int):
        count = None
    if count is None or not 0 <= count <= LARGEST:
        raise OptionError(
            f"{option}={value!r} is not an amount of memory; give bytes as an int, or "
            f'a text with a unit such as {option}="6GiB" or {option}="500MB".'
        )
    return count


def memory_size(option: str, value: object) -> int:
    """Parse an amount of memory that is 0 or at least `LEAST`.

    Raises:
        OptionError: the value is not a size, or so small that its unit must be missing
            or wrong.
    """
    count = parse_size(option, value)
    if count and (meant := too_small(count)):
        advice = f'write it with its unit, such as {option}="{meant}"'
        if isinstance(value, str):
            advice = f"give at least {size(LEAST)}"
        raise OptionError(
            f"{option}={value!r} means {byte_count(count)}, too few for any process; "
            f"{advice}."
        )
    return count


def byte_count(count: int) -> str:
    """Format a number of bytes: "1 byte", "80 bytes"."""
    return "1 byte" if count == 1 else f"{count} bytes"


def too_small(count: int) -> str | None:
    """Guess the amount meant by a small number without a unit; None for a large one."""
    if count >= LEAST:
        return None
    return f"{count}GiB" if count < 1 << 10 else f"{min(count, 1 << 16)}MiB"


def _from_text(text: str) -> int | None:
    number = text.strip().rstrip("BbIiKkMmGgTt").rstrip()
    unit = text.strip()[len(number) :].strip().upper()
    factor = _UNITS.get(unit)
    try:
        amount = float(number)
    except ValueError:
        return None
    # This comparison also refuses NaN and infinity.
    if factor is None or not 0 <= amount * factor <= LARGEST:
        return None
    return int(amount * factor)


def size(count: float) -> str:
    """Format bytes as `parse_size` accepts them, rounded up: "512MiB", "3.2GiB"."""
    whole = int(count)
    if whole < 1 << 30:
        return f"{-(-whole >> 20)}MiB"
    return f"{-(-whole * 10 >> 30) / 10:g}GiB"


def quantity(option: str, value: object) -> int:
    """Convert a user's number to parts of 1/10 000.

    The decimal text of the number is truncated, so 0.57 becomes 5700, while
    `int(0.57 * 10000)` is 5699.

    Args:
        option: the option's name, for the message.
        value: a finite `int` or `float`, 0 or more.

    Raises:
        OptionError: the value is not such a number, or is truncated to 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionError(
            f"{option}={value!r} is {_article(value)}; give an int or a float, "
            f"such as {option}=1 or {option}=0.5."
        )
    if not 0 <= value <= MOST_PARTS:
        raise OptionError(
            f"{option}={value!r} is not a quantity; give a finite number from 0 "
            f"to {MOST_PARTS:.0e}."
        )
    # The methods of int and float, because subclasses (numpy's float64, an IntEnum) may
    # override `repr` and operators.
    if isinstance(value, int):
        return int.__mul__(value, UNIT)
    if float.is_integer(value):
        return float.__int__(value) * UNIT
    text = float.__repr__(value)
    # Imported late: most programs ask for whole CPUs and devices.
    from decimal import ROUND_FLOOR, Decimal

    parts = int((Decimal(text) * UNIT).to_integral_value(ROUND_FLOOR))
    if parts == 0 and value != 0:
        raise OptionError(
            f"{option}={value!r} is finer than 1/{UNIT}, the smallest share; give "
            f"at least {1 / UNIT} or 0."
        )
    return parts


def device_quantity(option: str, value: object) -> int:
    """Convert a number of devices to parts: a share of one device, or whole devices.

    Raises:
        OptionError: as by `quantity`, or the number is above 1 and not whole.
    """
    parts = quantity(option, value)
    if parts > UNIT and parts % UNIT:
        raise OptionError(
            f"{option}={value!r} mixes whole devices and a share; give a fraction "
            f"below 1 to share one device, or a whole number of devices."
        )
    return parts


def number(parts: int) -> float:
    """Convert an amount in parts to the user's number: 2500 is 0.25."""
    return parts / UNIT


def format_amount(name: str, value: float) -> str:
    """Format an amount of a resource: "0.25", or "3.2GiB" for memory."""
    return size(value) if name in _IN_BYTES else f"{value:g}"


def display_name(name: str) -> str:
    """Return a resource's name as written in a sentence."""
    return "GPU memory" if name == GPU_MEMORY else name


def _article(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
