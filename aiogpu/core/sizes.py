"""Amounts of memory: bytes, and how people write them."""

from __future__ import annotations

from typing import Final

from aiogpu.errors import OptionError

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
"""So is less than this: an interpreter that does nothing has ten times as much."""


def parse_size(option: str, value: object) -> int:
    """Bytes, given as a whole number or as a text such as "6GiB" or "512 MB".

    Args:
        option: the option's name, for the message.
        value: what was given for it.

    Raises:
        OptionError: it is no size.
    """
    count = _from_text(value) if isinstance(value, str) else value
    if isinstance(count, bool) or not isinstance(count, int):
        count = None
    if count is None or not 0 <= count <= LARGEST:
        raise OptionError(
            f"{option}={value!r} is no amount of memory; give bytes as an int, or a "
            f'text with a unit such as {option}="6GiB" or {option}="500MB".'
        )
    return count


def memory_size(option: str, value: object) -> int:
    """The same of what a program is to have, or has: nothing, or `LEAST` at least.

    Raises:
        OptionError: it is no size, or so small that its unit was forgotten, or is
            the wrong one.
    """
    count = parse_size(option, value)
    if count and (meant := too_small(count)):
        advice = f'write it with its unit, such as {option}="{meant}"'
        if isinstance(value, str):
            advice = f"give {size(LEAST)} at least"
        raise OptionError(
            f"{option}={value!r} is read as {bytes_told(count)}, in which nothing "
            f"runs; {advice}."
        )
    return count


def bytes_told(count: int) -> str:
    """A number of bytes in words."""
    return "1 byte" if count == 1 else f"{count} bytes"


def too_small(count: int) -> str | None:
    """What so few, without a unit, may have meant; None where they are enough."""
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
    # Not a number and infinite are no sizes either.
    if factor is None or not 0 <= amount * factor <= LARGEST:
        return None
    return int(amount * factor)


def size(count: float) -> str:
    """Bytes as `parse_size` takes them, rounded up: "512MiB", "3.2GiB"."""
    whole = int(count)
    if whole < 1 << 30:
        return f"{-(-whole >> 20)}MiB"
    return f"{-(-whole * 10 >> 30) / 10:g}GiB"
