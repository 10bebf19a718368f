"""What is heard of devices: given back, free, stuck, sick or well, short of memory.

Each of these changes who may be given what, so all that waits is looked at after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from aiogpu.core import events
from aiogpu.core.departure import outgrow, set_aside, settle, starve
from aiogpu.core.effects import Effect
from aiogpu.core.events import Event
from aiogpu.core.ids import WorkerId
from aiogpu.core.leasing import on_returned
from aiogpu.core.lifecycle import WorkerState
from aiogpu.core.node import Node
from aiogpu.core.records import WorkerRecord
from aiogpu.core.stopping import retire_bound, unclaim
from aiogpu.core.watch import revoke


def _on_settled(node: Node, it: events.Settled, *_: object) -> None:
    settle(node, it)


def _on_set_aside(
    node: Node, it: events.SetAside, _: float, effects: list[Effect]
) -> None:
    set_aside(node, it)
    _clear_off(node, effects)


def _on_recovered(node: Node, it: events.Recovered, *_: object) -> None:
    node.ledger.device_sets[it.kind].put_back(it.index)


def _on_sick(node: Node, it: events.Sick, now: float, effects: list[Effect]) -> None:
    node.ledger.device_sets[it.kind].mark_sick(it.index, it.reason)
    _leave_unreserved(node, it.kind, it.index)
    _clear_off(node, effects)
    retire_bound(node, it.kind, it.index, now, effects)


def _on_foreign(
    node: Node, it: events.Foreign, _: float, effects: list[Effect]
) -> None:
    devices = node.ledger.device_sets[it.kind]
    devices.note_foreign(it.index, it.reason, is_avoided=it.is_avoided)
    _leave_unreserved(node, it.kind, it.index)
    _clear_off(node, effects)


def _leave_unreserved(node: Node, kind: str, index: int) -> None:
    """Keep a device for nobody; what was kept is made anew, and elsewhere, at once."""
    kept = node.reservation
    if kept is not None and kept.barred.get(kind, 0) >> index & 1:
        node.reservation = None


def _clear_off(node: Node, effects: list[Effect]) -> None:
    """Take what has not begun off devices that are given to nobody."""
    for worker in node.workers:
        if worker.lease is None or not node.ledger.drains(worker.lease):
            continue
        if worker.queue:
            revoke(worker, effects)
        elif worker.state is WorkerState.STARTING and worker.task:
            record = worker.task
            unclaim(node, record)
            node.wait_again(record)


def _on_well(node: Node, it: events.Well, now: float, effects: list[Effect]) -> None:
    # What they have opened there may be from before a reset.
    retire_bound(node, it.kind, it.index, now, effects)
    node.ledger.device_sets[it.kind].mark_well(it.index)


def _on_memory_short(
    node: Node, it: events.MemoryShort, _: float, effects: list[Effect]
) -> None:
    if worker := _busy(node, it.worker):
        starve(worker, effects)


def _on_outgrown(
    node: Node, it: events.Outgrown, _: float, effects: list[Effect]
) -> None:
    if worker := _busy(node, it.worker):
        outgrow(worker, effects)


def _busy(node: Node, worker_id: WorkerId) -> WorkerRecord | None:
    worker = node.workers.get(worker_id)
    return worker if worker and worker.state is WorkerState.BUSY else None


Handler = Callable[[Node, Any, float, list[Effect]], None]

HANDLERS: Final[dict[type[Event], Handler]] = {
    events.Settled: _on_settled,
    events.SetAside: _on_set_aside,
    events.LeaseReturned: on_returned,
    events.Recovered: _on_recovered,
    events.Sick: _on_sick,
    events.Well: _on_well,
    events.Foreign: _on_foreign,
    events.MemoryShort: _on_memory_short,
    events.Outgrown: _on_outgrown,
}
