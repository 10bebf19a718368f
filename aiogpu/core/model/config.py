"""The scheduler's time limits and other settings."""

from __future__ import annotations

from typing import NamedTuple

STARTS_ALLOWED = 3
"""Workers in a row that may end before they take a task; then the task fails."""


class SchedulerConfig(NamedTuple):
    """Durations in seconds, and how many idle workers are kept.

    Attributes:
        cancel_grace: from the first interrupt of a running task to the kill.
        interrupt_every: between two interrupts of a task that does not stop.
        exit_grace: time for a worker's `atexit` functions.
        idle_workers: idle workers that are kept; above this number workers are retired.
        spare_workers: clean workers that are kept in addition, for each environment of
            which a task has taken a process of its own.
        spares_for: how long unused spares are kept, except those of the node's own
            program.
        refill_after: from the use of a spare to its replacement.
        long_task: no tasks are queued behind a task that has run for this time.
        unresponsive_after: a worker that has not begun its task after this time is
            killed.
        reserve_after: resources are reserved for a task that was the first of its group
            for this time and does not fit.
        retry_after: from a task's second failure to its retry. The first retry is
            immediate; each further delay is twice as long.
        max_retry_delay: the longest such delay.
        stable_after: an actor that has lived for this time restarts at once when its
            worker dies.
        restarts_in_a_row: restarts of an actor that does not live that long.
        exclusive_wait: how long other tasks wait for a task that must run alone.
        start_retry_after: from the failed start of a worker to the next attempt; each
            further failure in a row doubles the delay.
        max_start_retry_delay: the longest such delay.
        warn_after: a warning is issued for a task that has waited for this time for
            resources held without end.
    """

    cancel_grace: float = 2.0
    interrupt_every: float = 0.05
    exit_grace: float = 5.0
    idle_workers: int = 8
    spare_workers: int = 0
    spares_for: float = 60.0
    refill_after: float = 0.0
    long_task: float = 0.01
    unresponsive_after: float = 1.0
    reserve_after: float = 1.0
    retry_after: float = 0.1
    max_retry_delay: float = 10.0
    stable_after: float = 60.0
    restarts_in_a_row: int = 12
    exclusive_wait: float = 30.0
    start_retry_after: float = 0.05
    max_start_retry_delay: float = 5.0
    warn_after: float = 5.0

    def retry_delay(self, retries: int) -> float:
        """Return the delay of a task's n-th retry."""
        if retries <= 1:
            return 0.0
        return min(self.retry_after * 2.0 ** min(retries - 2, 30), self.max_retry_delay)

    def start_retry_delay(self, failures: int) -> float:
        """Return the delay after so many failed starts of workers in a row."""
        delay = self.start_retry_after * 2.0 ** min(max(failures - 1, 0), 30)
        return min(delay, self.max_start_retry_delay)
