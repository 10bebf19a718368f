"""Finds what in an object makes it large when pickled, and names the path to it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Final

from aiogpu.wire.advice import advise
from aiogpu.wire.culprit import DEEPEST, WIDEST
from aiogpu.wire.parts import parts
from aiogpu.wire.payload import HEAVY
from aiogpu.wire.pickler import measure

MOST: Final = 0.6
"""Share of the whole; a little above a half, since a part alone is pickled worse."""

LEAST: Final = 4096
"""Bytes below which nothing is sought: what goes by name only has heavy parts."""


def heaviest(roots: Mapping[str, object]) -> tuple[str, int]:
    """The path to the innermost part that is most of what holds it.

    Walks from the largest root inwards, as long as one part stands out. Each step
    pickles what lies within once, without keeping it; so it takes a few times as long
    as pickling did.

    Args:
        roots: objects by the name that the path begins with.

    Returns:
        A path such as `f.__closure__.table`, and the bytes that this part takes when
        pickled; `("it", 0)` without roots.
    """
    sizes = {name: weigh(value) for name, value in roots.items()}
    path = max(sizes, key=sizes.__getitem__, default="it")
    size = sizes.get(path, 0)
    trail = [roots.get(path)]
    for _ in range(DEEPEST):
        found = _heavy_part(trail, size) if size > LEAST else None
        if found is None:
            break
        step, part, size = found
        path += step
        trail.append(part)
    return path, size


def weigh(value: object) -> int:
    """Bytes that an object takes when pickled; 0 if it cannot be."""
    try:
        return measure(value)
    except Exception:  # noqa: BLE001 - a reducer of the user's may raise anything
        return 0


def as_text(size: int) -> str:
    """A size for people: `12.5 MiB`."""
    return f"{size / (1 << 20):.1f} MiB"


def advise_on_function(name: str, function: object, size: int) -> None:
    """Warn of a function or class that takes much with it, and name what.

    Args:
        name: its name.
        function: the function or class.
        size: bytes that it takes when pickled.

    Raises:
        AiogpuWarning: the filters make errors of warnings.
    """
    if size <= HEAVY:
        return
    path, part = heaviest({name: function})
    much = f", of which {as_text(part)} are {path}" if path != name else ""
    advise(
        f"{name} is {as_text(size)} when pickled{much}; every worker that runs it gets "
        f"a copy. Put what is large once, `handle = await aiogpu.put(x)`, and pass the "
        f"handle as an argument."
    )


def _heavy_part(trail: list[object], whole: int) -> tuple[str, object, int] | None:
    try:
        for step, part in islice(parts(trail[-1]), WIDEST):
            # What only its reducer knows has no name that a reader could look up.
            if step.startswith((".__reduce__", ".__getstate__", ".__class__")):
                continue
            if any(part is passed for passed in trail):
                continue
            size = weigh(part)
            if size > MOST * whole:
                return step, part, size
    except Exception:  # noqa: BLE001 - an object that will not be reduced has no parts
        return None
    return None
