"""How patient the scheduler is: figures, and arithmetic over them."""

from __future__ import annotations

from dataclasses import dataclass

from aiogpu.core.records import TaskRecord
from aiogpu.core.specs import UNLIMITED

STARTS_ALLOWED = 3
"""Workers in a row that may end before taking a task, until it is given up."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Durations in seconds, and how many workers are kept warm.

    Attributes:
        cancel_grace: from the first interrupt of a running task to the kill.
        interrupt_every: between interrupts that were not answered.
        exit_grace: what a worker gets for its `atexit` functions.
        idle_workers: workers that may wait for work; above it, the one that
            has waited longest is retired.
        long: a task that runs longer is not one to queue behind.
        unheard: a worker that has not begun its task by then is given up.
        reserve_after: a task that has been the first of those who ask for the same
            for longer, and does not fit, has what it needs kept for it.
    """

    cancel_grace: float = 2.0
    interrupt_every: float = 0.05
    exit_grace: float = 5.0
    idle_workers: int = 8
    long: float = 0.01
    unheard: float = 1.0
    reserve_after: float = 1.0


def may_retry(record: TaskRecord) -> bool:
    """Use up one retry of the task; False if it has none left."""
    if record.retries_left == UNLIMITED:
        return True
    if record.retries_left == 0:
        return False
    record.retries_left -= 1
    return True
