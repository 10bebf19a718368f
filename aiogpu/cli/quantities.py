"""How quantities are written on the command line, and how a mistake in one is told.

Click's own words for them are those of a programmer, such as "float range".
"""

from __future__ import annotations

from typing import Any

import click

from aiogpu.core.model.units import LEAST, bytes_told, parse_size, too_small
from aiogpu.core.model.units import size as told_size
from aiogpu.errors import OptionError


class Seconds(click.FloatRange):
    """A length of time."""

    name = "number of seconds"

    def get_metavar(self, *_: Any, **__: Any) -> str:
        """Return what stands for one in the help."""
        return "SECONDS"


class Number(click.FloatRange):
    """An amount that may be a fraction."""

    name = "number"


class Whole(click.IntRange):
    """How many there are of something."""

    name = "whole number"

    def get_metavar(self, *_: Any, **__: Any) -> str:
        """Return what stands for one in the help."""
        return "NUMBER"


def size(text: str) -> str | int:
    """An amount of memory: with a unit, or in bytes as Ray's command has it.

    Raises:
        BadParameter: it is none, in the words of the command line.
    """
    is_bytes = text.isdecimal()
    try:
        count = parse_size("", int(text) if is_bytes else text)
    except OptionError:
        raise click.BadParameter(
            f"{text!r} is no amount of memory; write it with a unit, such as 64GiB or "
            f"500MB, or in bytes."
        ) from None
    if count and (meant := too_small(count)):
        advice = f"write it with its unit, such as {meant}"
        if not is_bytes:
            advice = f"give {told_size(LEAST)} at least"
        raise click.BadParameter(f"{text!r} is read as {bytes_told(count)}; {advice}.")
    return count if is_bytes else text


def size_or_share(text: str) -> str | int:
    """The same of a GPU, or `share`: the part that is asked for of the GPU."""
    return text if text == "share" else size(text)
