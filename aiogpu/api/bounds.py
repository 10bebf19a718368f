"""How many actors a pool has, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiogpu.api.options import LONGEST_TIME, whole
from aiogpu.errors import InfeasibleError, OptionError

if TYPE_CHECKING:
    from aiogpu.api.method import Link

USUAL_TARGET: Final = 1
USUAL_IDLENESS: Final = 60.0

_check_least: Final = whole(0, "a whole number of actors, 0 or more, or None")
_check_most: Final = whole(1, "a whole number of actors, 1 or more, or None")
_check_target: Final = whole(1, "a whole number of calls, 1 or more, or None")


class Bounds(NamedTuple):
    """How many actors there are.

    Attributes:
        size: at first.
        least: when there is nothing to do.
        most: when there is much.
        target: unanswered calls that each may have before another actor is made.
        idle_after: seconds without a call after which one goes.
    """

    size: int
    least: int
    most: int
    target: int
    idle_after: float


def check_bounds(
    size: object, min_size: object, max_size: object, target: object, idle_after: object
) -> Bounds:
    """Check what `ActorPool` was given; see there.

    Raises:
        OptionError: names the option, the value and what is allowed.
    """
    first = _check_least("size", size)
    least = _check_least("min_size", min_size)
    most = _check_most("max_size", max_size)
    if first is None and least is None:
        raise OptionError(
            "ActorPool() was not told how many actors to make; say size=4, or "
            "min_size=1 and max_size=4."
        )
    first = least if first is None else first
    assert first is not None
    least = first if least is None else least
    most = first if most is None else most
    if not least <= first <= most or not most:
        raise OptionError(
            f"of ActorPool(size={size!r}, min_size={min_size!r}, "
            f"max_size={max_size!r}) size must lie between the others, and max_size be "
            f"1 or more."
        )
    bounds = Bounds(
        first,
        least,
        most,
        _check_target("target", target) or USUAL_TARGET,
        USUAL_IDLENESS if idle_after is None else _check_idleness(idle_after),
    )
    if least == most and (target is not None or idle_after is not None):
        option = "target" if target is not None else "idle_after"
        raise OptionError(
            f"{option}= says when a pool grows or shrinks, and this one always has "
            f"{most} actors; give min_size or max_size as well."
        )
    return bounds


def _check_idleness(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= LONGEST_TIME:
        raise OptionError(
            f"idle_after={value!r} must be a number of seconds, 0 or more. The most is "
            f"{LONGEST_TIME:_}."
        )
    return float(value)


async def check_room(name: str, links: Sequence[Link]) -> None:
    """Check that actors can live at once, if all of them ask for the same.

    Args:
        name: what errors call them.
        links: to each.

    Raises:
        InfeasibleError: not even an idle node has room for so many.
    """
    from asyncio import gather

    if len(links) < 2:
        return  # what it asks for was looked at when it was made
    rooms = await gather(*(link.room() for link in links), return_exceptions=True)
    kinds = {room for room in rooms if not isinstance(room, BaseException)}
    if len(kinds) != 1:
        return  # what is wrong is told by those who wait until each is ready
    [(most, request)] = kinds
    if most is not None and most < len(rooms):
        raise InfeasibleError(
            f"a pool of {len(rooms)} {name}, each with {request}, can never be ready: "
            f"this node has room for {most} at once, even when idle. Make it smaller, "
            f"or ask for less for each."
        )
