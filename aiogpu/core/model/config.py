"""The scheduler's time limits and other numbers, and arithmetic over them."""

from __future__ import annotations

from typing import NamedTuple

STARTS_ALLOWED = 3
"""Workers in a row that may end before taking a task, until it is given up."""


class SchedulerConfig(NamedTuple):
    """Durations in seconds, and how many workers are kept warm.

    Attributes:
        cancel_grace: from the first interrupt of a running task to the kill.
        interrupt_every: between interrupts that were not answered.
        exit_grace: what a worker gets for its `atexit` functions.
        idle_workers: workers that may wait for work; above it, the one that
            has waited longest is retired.
        spare_workers: clean ones kept ready beside them, for each environment of which
            a task has taken a process of its own.
        spares_for: for how long those are kept that no task has used and that are not
            for the node's own program.
        refill_after: from the moment when one of them is taken until it is replaced.
        long: a task that runs longer is not one to queue behind.
        unheard: a worker that has not begun its task by then is given up.
        reserve_after: a task that has been the first of those who ask for the same
            for longer, and does not fit, has what it needs kept for it.
        retry_after: from a task's second failure to the next try; the first one is
            at once, each later one takes twice as long as the one before it.
        retry_at_last: the longest such wait.
        sound_after: what is endless and has lived so long begins anew at once when
            its worker dies.
        restarts_in_a_row: how often it begins anew that does not live so long.
        alone_within: for how long others are held up for a task that is to run alone.
        crowded_for: after a worker could not be started, until the next is tried;
            after each later failure in a row, twice as long as before.
        crowded_at_last: the longest such pause.
        warn_after: what has waited so long for what is held without end is warned.
    """

    cancel_grace: float = 2.0
    interrupt_every: float = 0.05
    exit_grace: float = 5.0
    idle_workers: int = 8
    spare_workers: int = 0
    spares_for: float = 60.0
    refill_after: float = 0.0
    long: float = 0.01
    unheard: float = 1.0
    reserve_after: float = 1.0
    retry_after: float = 0.1
    retry_at_last: float = 10.0
    sound_after: float = 60.0
    restarts_in_a_row: int = 12
    alone_within: float = 30.0
    crowded_for: float = 0.05
    crowded_at_last: float = 5.0
    warn_after: float = 5.0

    def retry_delay(self, retries: int) -> float:
        """Return how long a task waits before it is tried again for the n-th time."""
        if retries <= 1:
            return 0.0
        return min(self.retry_after * 2.0 ** min(retries - 2, 30), self.retry_at_last)

    def crowded_delay(self, failures: int) -> float:
        """Return how long no worker is tried after so many failed starts in a row."""
        pause = self.crowded_for * 2.0 ** min(max(failures - 1, 0), 30)
        return min(pause, self.crowded_at_last)
