"""Environments for which no worker can be started now, and when the next try is.

After a failed start, tasks of that environment wait in the queue and hold nothing;
workers of it that are alive still serve them. After a pause one worker is tried. If it
starts, all others may follow; if not, the next pause is twice as long, up to a bound,
for as long as tasks wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiogpu.core.ids import PROGRAM
from aiogpu.core.lifecycle import WorkerState
from aiogpu.core.timers import AlarmKind
from aiogpu.core.wording import span

if TYPE_CHECKING:
    from aiogpu.core.ids import WorkerId
    from aiogpu.core.node import Node
    from aiogpu.core.specs import Environment


@dataclass(slots=True, eq=False)
class Outage:
    """The failed starts of workers for one environment, since one last succeeded.

    Attributes:
        reason: of the last failure.
        since: when the first start failed.
        failures: failed tries in a row; workers that fail together count as one.
        retry_at: when the next worker is tried.
        is_paused: that moment has not come yet.
        worker: the one that is being tried.
    """

    reason: str
    since: float
    failures: int = 0
    retry_at: float = 0.0
    is_paused: bool = False
    worker: WorkerId | None = None

    @property
    def bars(self) -> bool:
        """Whether no worker may be forked for this environment now."""
        return self.is_paused or self.worker is not None


@dataclass(frozen=True, slots=True)
class OutageStatus:
    """Why no worker can be started, as `status()` and `why()` show it.

    Attributes:
        reason: why the last try failed.
        failures: how many tries in a row have failed.
        seconds: since the first of them.
        retry_in: seconds until the next try; 0 while one is being made, or where
            nothing waits for a worker.
        variables: names of the variables of the `runtime_env` that is concerned; empty
            for that of most tasks, or where all are concerned.
        is_joined: whether it concerns tasks of a program that has joined, and not those
            of the node's own program.
    """

    reason: str
    failures: int
    seconds: float
    retry_in: float
    variables: tuple[str, ...] = ()
    is_joined: bool = False

    def __str__(self) -> str:
        named = ", ".join(self.variables)
        whose = " of a program that has joined" if self.is_joined else ""
        told = whose + (f" with {named}" if named else "")
        told = f" for tasks{told}" if told else ""
        tries = "try has" if self.failures == 1 else "tries have"
        when = f"in {span(self.retry_in)}" if self.retry_in > 0 else "now"
        return (
            f"no worker can be started{told}: {self.reason} ({self.failures} {tries} "
            f"failed in {span(self.seconds)}; next try {when})"
        )


def note_outage(node: Node, environment: Environment, reason: str, now: float) -> None:
    """A worker could not be started: start no other for a while."""
    outage = node.outages.get(environment)
    if outage is None:
        outage = node.outages[environment] = Outage(reason, now)
    outage.reason = reason
    if outage.is_paused:
        return  # It was tried together with the one that has failed already.
    outage.failures += 1
    outage.is_paused = True
    outage.retry_at = now + node.patience.crowded_delay(outage.failures)
    node.timers.set(outage.retry_at, AlarmKind.OUTAGE, 0)


def retry_outages(node: Node, now: float) -> None:
    """Allow one worker for each environment whose pause is over.

    One that no task waits for is forgotten: the next task tries at once.
    """
    for environment, outage in list(node.outages.items()):
        if outage.is_paused and outage.retry_at <= now:
            outage.is_paused = False
            buckets = node.ready.by_shape.values()
            if not any(each.shape.environment == environment for each in buckets):
                del node.outages[environment]


def find_outage(
    node: Node, environment: Environment, now: float
) -> OutageStatus | None:
    """Why a task of this environment gets no worker; None if that is not the cause."""
    outage = node.outages.get(environment)
    if outage is not None:
        return _status(environment, outage, now)
    return _shortage(node, now)


def find_outages(node: Node, now: float) -> tuple[OutageStatus, ...]:
    """All of them."""
    everywhere = _shortage(node, now)
    return (
        *((everywhere,) if everywhere is not None else ()),
        *(_status(*pair, now) for pair in node.outages.items()),
    )


def _status(environment: Environment, outage: Outage, now: float) -> OutageStatus:
    return OutageStatus(
        outage.reason,
        outage.failures,
        now - outage.since,
        max(outage.retry_at - now, 0.0) if outage.is_paused else 0.0,
        tuple(name for name, _ in environment if name != PROGRAM),
        any(name == PROGRAM for name, _ in environment),
    )


def _shortage(node: Node, now: float) -> OutageStatus | None:
    """Of descriptors or processes, which concerns all environments.

    Where there are workers, tasks wait for these instead.
    """
    room = node.room
    if not room.failures or not room.reason:
        return None
    if any(worker.state is not WorkerState.STARTING for worker in node.workers):
        return None
    return OutageStatus(
        room.reason, room.failures, now - room.since, max(room.retry_at - now, 0.0)
    )
