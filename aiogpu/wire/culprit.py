"""Finds what in an object cannot be pickled, and names the path to it.

Walks only after pickling has failed, from the outside in: of an object that fails,
into the first part that fails too, until no part does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

from aiogpu.wire.parts import parts

DEEPEST: Final = 32
WIDEST: Final = 1000
"""Parts of one object that are tried."""


def find_culprit(roots: Mapping[str, object], dumps: Callable[[object], object]) -> str:
    """The path to the innermost part that cannot be pickled.

    Args:
        roots: objects by the name that the path begins with.
        dumps: raises on what cannot be pickled.

    Returns:
        Such as `f.__closure__.db.socket (a socket)`.
    """
    for name, value in roots.items():
        if _fails(value, dumps):
            path, culprit = _descend(name, value, dumps)
            return f"{path} (a {type(culprit).__name__})"
    return next(iter(roots), "it")


def _descend(
    path: str, value: object, dumps: Callable[[object], object]
) -> tuple[str, object]:
    trail = [value]
    for _ in range(DEEPEST):
        found = _failing_part(trail, dumps)
        if found is None:
            break
        step, part = found
        path += step
        trail.append(part)
    return path, trail[-1]


def _failing_part(
    trail: list[object], dumps: Callable[[object], object]
) -> tuple[str, object] | None:
    try:
        for step, part in islice(parts(trail[-1]), WIDEST):
            is_new = all(part is not passed for passed in trail)
            if is_new and _fails(part, dumps):
                return step, part
    except (Exception, SystemExit):  # noqa: BLE001 - it will not be reduced: the culprit
        return None
    return None


def _fails(value: object, dumps: Callable[[object], object]) -> bool:
    try:
        dumps(value)
    except (Exception, SystemExit):  # noqa: BLE001 - a reducer may raise anything
        return True
    return False
