"""What is done when an alarm rings."""

from __future__ import annotations

from aiogpu.core.closing import abandon_some
from aiogpu.core.dispatch import refill_spares
from aiogpu.core.effects import Effect, Expire, Kill
from aiogpu.core.family import end_deadlocks, stop
from aiogpu.core.ids import TaskId, WorkerId
from aiogpu.core.lifecycle import TaskState, WorkerState
from aiogpu.core.node import Node
from aiogpu.core.retry import go_on_waiting
from aiogpu.core.stopping import go_on_stopping, retire_spares
from aiogpu.core.timers import Alarm, AlarmKind
from aiogpu.core.watch import look


def ring(node: Node, alarm: Alarm, now: float, effects: list[Effect]) -> None:
    """An alarm rings; it may have become needless."""
    if alarm.kind is AlarmKind.CLOSE:
        abandon_some(node, now, effects)
    elif alarm.kind is AlarmKind.REFILL:
        if not node.is_closing:
            refill_spares(node, effects)
    elif alarm.kind is AlarmKind.SPARES:
        if not node.is_closing:
            retire_spares(node, now, effects)
    elif alarm.kind is AlarmKind.ROOM:
        node.grow(now)
    elif alarm.kind is AlarmKind.OUTAGE:
        from aiogpu.core.outage import retry_outages  # few nodes have any

        retry_outages(node, now)
    elif alarm.kind is AlarmKind.STALL:
        from aiogpu.core.stalls import look_for_stalls  # where tasks wait for long

        look_for_stalls(node, now, effects)
    elif alarm.kind in (AlarmKind.END, AlarmKind.LOOK):
        _ring_for_worker(node, alarm, now, effects)
    else:
        _ring_for_task(node, alarm, now, effects)


def _ring_for_worker(
    node: Node, alarm: Alarm, now: float, effects: list[Effect]
) -> None:
    worker = node.workers.get(WorkerId(alarm.subject))
    if worker is None:
        return
    if alarm.kind is AlarmKind.LOOK:
        look(node, worker, alarm.when, now, effects)
    elif worker.state is not WorkerState.SETTLING:
        effects.append(Kill(worker.id))


def _ring_for_task(node: Node, alarm: Alarm, now: float, effects: list[Effect]) -> None:
    record = node.tasks.get(TaskId(alarm.subject))
    if record is None:
        return
    if alarm.kind is AlarmKind.STOP:
        go_on_stopping(node, record, now, effects)
    elif alarm.kind is AlarmKind.ALONE:
        node.solitude.give_up(node, record)
    elif alarm.kind is AlarmKind.RETRY:
        go_on_waiting(node, record)
        end_deadlocks(node, now, effects)
    elif record.state is not TaskState.STOPPING:
        effects.append(Expire(record.id))
        stop(node, record, now, effects)
