"""Leases for code that none of the node's workers runs: granted, and given back.

To the queue such a lease is a task like any other. When its turn has come, no worker
is found for it but a holder recorded: a worker in name, which stands for processes
that others start and end. Nobody here can stop these; so what nobody may hold any more
is reclaimed, and is free when it is said that they have gone.
"""

from __future__ import annotations

from aiogpu.core.effects import Abandon, Effect, Forget, Granted, Reclaim, Reserved
from aiogpu.core.events import LeaseReturned
from aiogpu.core.lease import Lease
from aiogpu.core.lifecycle import TaskState, WorkerState
from aiogpu.core.node import Node
from aiogpu.core.records import TaskRecord, move_task, move_worker


def grant(
    node: Node, record: TaskRecord, lease: Lease, now: float, effects: list[Effect]
) -> None:
    """Give a lease to whoever has asked for it."""
    holder = node.workers.stand_in()
    move_task(record, TaskState.RUNNING)
    record.worker, holder.task, holder.lease = holder, record, lease
    lease.holder = holder
    holder.watched, holder.watched_since = record, now
    node.granted[holder.id] = holder
    if record.spec.is_grouped:
        effects.append(Reserved(record.id, holder.id))
    else:
        effects.append(Granted(record.id, holder.id, lease))


def reclaim(record: TaskRecord, effects: list[Effect]) -> None:
    """Nobody may hold a lease any more; it is `LeaseReturned` when nobody does."""
    assert record.worker is not None, record
    move_task(record, TaskState.STOPPING)
    if not record.spec.is_grouped:
        effects.append(Reclaim(record.id, record.worker.id))


def on_returned(
    node: Node, event: LeaseReturned, _: float, effects: list[Effect]
) -> None:
    """Those who held a lease have gone; its devices may have to be seen free."""
    holder = node.granted.get(event.holder)
    if holder is None or holder.task is None:
        return
    record, lease = holder.task, holder.lease
    assert lease is not None, holder
    record.worker = holder.task = None
    if event.settles and not node.is_closing:
        node.ledger.keep_devices(lease)
        move_worker(holder, WorkerState.SETTLING)
    else:
        del node.granted[holder.id]
        if lease.parts:
            from aiogpu.core.bundles import give_back_gang

            give_back_gang(node.ledger, lease)
        else:
            node.ledger.give_back(lease)
    node.end(record)
    effects.append(Forget(record.id))


def end_all(node: Node, now: float, effects: list[Effect]) -> None:
    """The node closes, and its ledger with it; what its holders do goes on."""
    for holder in list(node.granted.values()):
        assert holder.task is not None, holder
        if holder.task.state is TaskState.RUNNING:
            effects.append(Abandon(holder.task.id))
        on_returned(node, LeaseReturned(holder.id), now, effects)
