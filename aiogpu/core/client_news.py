"""What is heard of programs: that one joins the node, or has left it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from aiogpu.core import events
from aiogpu.core.clients import Clients
from aiogpu.core.events import Event
from aiogpu.core.fairness import may_go_on, place_fairly
from aiogpu.core.limits import Limits
from aiogpu.core.node import Node
from aiogpu.core.shared_queue import SharedQueue


def _on_joined(node: Node, it: events.ClientJoined, now: float, *_: object) -> None:
    clients = node.clients or Clients(node.ledger, now)
    clients.join(it.client, it.weight, it.limits or Limits())
    if node.clients is None:
        _share(node, clients)


def _share(node: Node, clients: Clients) -> None:
    """From now on count who has what; costs as much as waits and runs."""
    for record in node.tasks.values():
        clients.of(record.client).unfinished += 1
    for worker in node.holders:
        lease, task = worker.lease, worker.task
        if lease is not None and task is not None:
            clients.begin(task, lease)
            if lease.is_lent and lease.stake is not None:
                lease.stake.lend()
    clients.place, clients.may_go_on = place_fairly, may_go_on
    node.ready = SharedQueue(clients, node.ready)
    node.clients = clients


def _on_left(node: Node, it: events.ClientLeft, *_: object) -> None:
    if node.clients is not None:
        node.clients.leave(it.client)


HANDLERS: Final[dict[type[Event], Callable[..., Any]]] = {
    events.ClientJoined: _on_joined,
    events.ClientLeft: _on_left,
}
