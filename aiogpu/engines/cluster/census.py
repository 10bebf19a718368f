"""What a cluster says of itself: its nodes, and what waits on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """A node that lives.

    Attributes:
        id: in hexadecimal.
        host: its machine's name.
        total: its resources by name.
        free: what of each nobody has; None where Ray was not asked.
        labels: what was said of it.
    """

    id: str
    host: str
    total: Mapping[str, float]
    free: Mapping[str, float] | None
    labels: Mapping[str, str]


class Survey(NamedTuple):
    """The cluster at one moment.

    Attributes:
        nodes: those that live.
        demands: what tasks and actors of all programs ask for that have no place yet,
            and how many ask for it.
        coming: nodes that are being started, in words.
        failed: the last ones that could not be, in words.
        grows: whether something starts nodes as they are needed.
    """

    nodes: Sequence[Node]
    demands: Sequence[tuple[Mapping[str, float], int]]
    coming: Sequence[str]
    failed: Sequence[str]
    grows: bool
