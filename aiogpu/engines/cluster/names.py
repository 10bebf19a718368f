"""The names of placements that outlive their programs, kept by the cluster.

Ray knows a group by its placement's key. What a name means, with the bundles, is a note
beside that which all programs of the cluster read.
"""

from __future__ import annotations

import pickle
from typing import Final, cast

from aiogpu.core.model.request import PlacementGroupSpec
from aiogpu.engines import ray
from aiogpu.runtime.callers.leases import name_taken, no_such_name

PREFIX: Final = "placement "
"""Of the names of these notes."""


def claim(gang: PlacementGroupSpec) -> None:
    """Have a placement's name mean it.

    Raises:
        PlacementNameError: it means another one that is there.
    """
    if not ray.remember(PREFIX + gang.name, pickle.dumps(gang), replaces=False):
        return
    if living(gang.name) is not None:
        raise name_taken(gang.name)
    # Who had it has gone without a word.
    ray.remember(PREFIX + gang.name, pickle.dumps(gang))


def living(name: str) -> PlacementGroupSpec | None:
    """The placement of that name, if Ray still has it."""
    told = ray.recall(PREFIX + name)
    if told is None:
        return None
    gang = cast("PlacementGroupSpec", pickle.loads(told))
    return None if ray.find_group(gang.key) is None else gang


def find(name: str) -> PlacementGroupSpec:
    """The same.

    Raises:
        PlacementNameError: there is none.
    """
    gang = living(name)
    if gang is None:
        raise no_such_name(name)
    return gang


def forget(gang: PlacementGroupSpec) -> None:
    """A placement is no more: its name is free."""
    told = ray.recall(PREFIX + gang.name)
    if (
        told is not None
        and cast("PlacementGroupSpec", pickle.loads(told)).key == gang.key
    ):
        ray.unlearn(PREFIX + gang.name)
