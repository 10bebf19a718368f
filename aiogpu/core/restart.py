"""How often what is endless is begun anew: an actor whose process has died.

One that has lived for a while is sound, and its next restart is at once, like the
first. One that dies again and again is given longer and longer pauses, and is given
up when that does not help, whatever its `max_restarts`: it would only hold its
devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiogpu.core.node import Node
    from aiogpu.core.records import TaskRecord


@dataclass(slots=True)
class Restarts:
    """Those of one task.

    Attributes:
        began: when it was begun last.
        in_a_row: how often it was begun anew after it had lived for a short time.
    """

    began: float = 0.0
    in_a_row: int = 0


def note_start(node: Node, record: TaskRecord, now: float) -> None:
    """An endless task is given to a worker."""
    _restarts(node, record).began = now


def _restarts(node: Node, record: TaskRecord) -> Restarts:
    return node.restarts.setdefault(record.id, Restarts())


def note_death(node: Node, record: TaskRecord, now: float) -> bool:
    """Its worker has died; False if that has happened too often in a row."""
    restarts = _restarts(node, record)
    if now - restarts.began >= node.patience.sound_after:
        restarts.in_a_row = 0
    restarts.in_a_row += 1
    return restarts.in_a_row <= node.patience.restarts_in_a_row


def pause_of(node: Node, record: TaskRecord) -> float:
    """Seconds until it is begun anew."""
    return node.patience.retry_delay(_restarts(node, record).in_a_row)
