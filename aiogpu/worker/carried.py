"""Actors to which a child's result has handles, until somebody looks at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import finalize


def hold_for(
    receiver: object, actors: Iterable[int], drop: Callable[[int], object]
) -> None:
    """Have actors live as long as the handle whose result they are in.

    Whoever unpickles that holds them himself, from then on.

    Args:
        receiver: the handle; None if nobody wants the result any more.
        actors: their ids; each counts as held by this process.
        drop: says that it holds one no more, from wherever objects are dropped.
    """
    for actor in actors:
        if receiver is None:
            drop(actor)
        else:
            finalize(receiver, drop, actor).atexit = False
