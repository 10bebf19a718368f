"""Tasks that wait and ask for the same, as a `NodeStatus` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiogpu.core.ids import PROGRAM
from aiogpu.core.records import TaskRecord


@dataclass(frozen=True, slots=True)
class ShapeStatus:
    """The waiting tasks that ask for the same.

    Attributes:
        request: what each of them asks for, `{"CPU": 1.0, "GPU": 0.25}`.
        strategy: "pack" or "spread".
        variables: names of the variables of their `runtime_env`.
        count: how many they are.
        first: name of the one whose turn it is.
        seconds: for how long the oldest of them has waited.
        reason: why the first one waits.
        where: the conditions on their GPUs in words, "memory of 40GiB or more".
        client: the program whose they are, 0 for the node's own.
    """

    request: Mapping[str, float]
    strategy: str
    variables: tuple[str, ...]
    count: int
    first: str
    seconds: float
    reason: str
    where: str = ""
    client: int = 0


def shape_status(
    first: TaskRecord, count: int, seconds: float, reason: str
) -> ShapeStatus:
    """Describe the waiting tasks of one shape, of which one is the first."""
    shape = first.spec.shape
    return ShapeStatus(
        request=shape.request.as_numbers(),
        strategy="spread" if shape.request.spread else "pack",
        variables=tuple(name for name, _ in shape.environment if name != PROGRAM),
        count=count,
        first=first.spec.name,
        seconds=seconds,
        reason=reason,
        where=str(shape.request.where or ""),
        client=first.client,
    )
