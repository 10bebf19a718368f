"""How those that wait learn that the node closes: a few at a time."""

from __future__ import annotations

from typing import Final

from aiogpu.core.effects import Abandon, Effect
from aiogpu.core.family import stop
from aiogpu.core.node import Node
from aiogpu.core.timers import AlarmKind

ABANDONED: Final = 500
"""Waiting tasks that are told of the node's end in one go."""
ABANDON_EVERY: Final = 1e-3
"""Seconds between two such goes, in which the loop may do other things."""


def abandon_some(node: Node, now: float, effects: list[Effect]) -> None:
    """Tell some of those that wait, and more of them a moment later."""
    for _ in range(ABANDONED):
        record = node.ready.some() or next(iter(node.delayed.values()), None)
        if record is None:
            return
        effects.append(Abandon(record.id))
        stop(node, record, now, effects)
    node.timers.set(now + ABANDON_EVERY, AlarmKind.CLOSE, 0)
