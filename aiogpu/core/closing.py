"""How a node closes: who runs is stopped, who waits is told, a few at a time."""

from __future__ import annotations

from typing import Final

from aiogpu.core.departure import settle_all
from aiogpu.core.effects import Abandon, Effect, Kill
from aiogpu.core.family import stop
from aiogpu.core.leasing import end_all
from aiogpu.core.lifecycle import TaskState, WorkerState
from aiogpu.core.node import Node
from aiogpu.core.records import TaskRecord
from aiogpu.core.stopping import doom, retire_idle
from aiogpu.core.timers import AlarmKind

ABANDONED: Final = 500
"""Waiting tasks that are told of the node's end in one go."""
ABANDON_EVERY: Final = 1e-3
"""Seconds between two such goes, in which the loop may do other things."""


def close(node: Node, at_once: bool, now: float, effects: list[Effect]) -> None:
    """Begin to close: nothing new starts, and nobody may idle any more."""
    node.is_closing = True
    node.most_idle = 0
    node.reservation = None
    settle_all(node)
    abandon_running(node, now, effects)
    if at_once:
        kill_all(node, effects)
    abandon_some(node, now, effects)
    retire_idle(node, now, effects)


def abandon_running(node: Node, now: float, effects: list[Effect]) -> None:
    """Stop all that workers have, and tell who waits for it."""
    end_all(node, now, effects)
    for worker in list(node.workers):
        for record in [worker.task, *worker.queue]:
            if record is not None and record.state is not TaskState.STOPPING:
                effects.append(Abandon(record.id))
                stop(node, record, now, effects)
        if worker.state is WorkerState.STARTING:
            # It may never come: its zygote may be importing what does not end.
            effects.append(Kill(worker.id))


def kill_all(node: Node, effects: list[Effect]) -> None:
    """End those who have been asked to stop, whatever time they were given."""
    for worker in node.workers:
        if worker.state is not WorkerState.STARTING:
            doom(worker, effects)


def abandon_some(node: Node, now: float, effects: list[Effect]) -> None:
    """Tell some of those that wait, and more of them a moment later."""
    for _ in range(ABANDONED):
        record = node.ready.some() or _aside(node)
        if record is None:
            return
        effects.append(Abandon(record.id))
        stop(node, record, now, effects)
    node.timers.set(now + ABANDON_EVERY, AlarmKind.CLOSE, 0)


def _aside(node: Node) -> TaskRecord | None:
    """Any task that is not in the queue yet, or not again; None without one."""
    for id_ in node.expecting:
        return node.tasks[id_]
    return next(iter(node.delayed.values()), None)
