"""Leases of a node without processes: granted as soon as there is enough.

Whoever has asked first goes first among them; tasks, of which one runs at a time, are
not asked. What is given back is free at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.records import (
    TaskRecord,
    TaskState,
    WorkerRecord,
    WorkerState,
    move_task,
)
from aiogpu.core.resources.placement_group import take_grouped
from aiogpu.engines.admission import check_site
from aiogpu.engines.inline.placements import InlinePlacements
from aiogpu.errors import NodeClosedError
from aiogpu.observe.status import PlacementStatus, placement_status
from aiogpu.observe.why import Why, find_shortages, tell_lacks
from aiogpu.runtime.callers.leases import LeaseReceiver
from aiogpu.wire.messages import LEASE_MARK

if TYPE_CHECKING:
    from aiogpu.client.function_spec import Site
    from aiogpu.core.resources.ledger import Lease
    from aiogpu.engines.inline.node import InlineNode
    from aiogpu.observe.status import Holdings

FIRST_HOLDER = 1 << 24
"""Ids of those who hold leases begin here; what stands for workers is below."""


@dataclass(slots=True, eq=False)
class Tenant:
    """Who has asked for a lease."""

    record: TaskRecord
    receiver: LeaseReceiver


class InlineLeases:
    """All leases of one node, and who waits for one.

    Attributes:
        placements: those of them that are placements.
    """

    def __init__(self, node: InlineNode) -> None:
        self._node = node
        self._tenants: dict[int, Tenant] = {}
        self.placements = InlinePlacements(node)

    def __repr__(self) -> str:
        return f"<InlineLeases {len(self.granted)} held>"

    @property
    def granted(self) -> dict[WorkerId, WorkerRecord]:
        """Who stands for the holders, by id."""
        records = (tenant.record.worker for tenant in self._tenants.values())
        return {holder.id: holder for holder in records if holder is not None}

    @property
    def pids(self) -> dict[int, int]:
        """The holders' processes, by id."""
        return {
            tenant.record.worker.id: tenant.receiver.pid
            for tenant in self._tenants.values()
            if tenant.record.worker is not None
        }

    @property
    def waiting(self) -> list[TaskRecord]:
        """Those that are not granted yet, in the order of their turn."""
        records = [tenant.record for tenant in self._tenants.values()]
        return [record for record in records if record.worker is None]

    def placements_seen(self) -> tuple[PlacementStatus, ...]:
        """Those of them that are placements, as people are told of them."""
        ledger = self._node.ledger
        records = [tenant.record for tenant in self._tenants.values()]
        return tuple(
            placement_status(
                *(record, ledger, self.placements.members_of(record), self.pids),
                "" if record.worker else tell_lacks(self._node, record),
            )
            for record in records
            if record.spec.is_grouped
        )

    def take(self, site: Site, receiver: LeaseReceiver) -> int:
        """Ask for a lease; see `Engine.take_lease`."""
        node = self._node
        if node.is_closing:
            raise NodeClosedError("this node is being shut down.")
        check_site(site, node.ledger)
        record = node.new_record(site)
        if (placement_group := site.spec.shape.request.placement_group) is not None:
            self.placements.names[placement_group.key] = placement_group.name
        self._tenants[record.id] = Tenant(record, receiver)
        self.look()
        return record.id

    def look(self) -> None:
        """Grant what there is enough for."""
        self.placements.look()
        for task, tenant in list(self._tenants.items()):
            record = tenant.record
            if record.worker is None and task in self._tenants:
                lease = take_grouped(self._node.ledger, record.spec.shape.request)
                if lease is not None:
                    self._grant(tenant, lease)

    def _grant(self, tenant: Tenant, lease: Lease) -> None:
        record = tenant.record
        holder = WorkerId(FIRST_HOLDER + record.id)
        record.worker = WorkerRecord(
            holder, state=WorkerState.BUSY, task=record, lease=lease
        )
        move_task(record, TaskState.RUNNING)
        if lease.parts:
            tenant.receiver.receive(b"")
            self.placements.open(lease.parts[0].key)
            self._node.wake()
            return
        # msgpack comes with it, which a node in this process does not need otherwise.
        from aiogpu.wire.codec import pack

        bind = self._node.assignment.bind(lease, {})
        mark = f"inline-{tenant.receiver.pid}.{record.id}"
        environ = {**bind.environ, LEASE_MARK: mark}
        granted = bind._replace(environ=environ, cpus=())
        tenant.receiver.receive(pack(granted))

    def give_back(self, task: int) -> bool:
        """Give a lease up, or back; False if it is none."""
        tenant = self._tenants.pop(task, None)
        if tenant is None:
            return False
        holder = tenant.record.worker
        lease = None if holder is None else holder.lease
        placement_group = tenant.record.spec.shape.request.placement_group
        if placement_group is not None:
            self.placements.remove(placement_group.key, lease)
        elif lease is not None:
            self._node.ledger.give_back(lease)
        self.look()
        self._node.wake()
        return True

    def close_down(self) -> None:
        """The node ends, and all of them with it."""
        tenants, self._tenants = self._tenants, {}
        for tenant in tenants.values():
            name = tenant.record.spec.name
            error = NodeClosedError(f"the node was shut down before {name} had ended.")
            tenant.receiver.fail(error)

    def why(self, task: TaskId, holdings: Holdings) -> Why | None:
        """Say what a lease waits for, or that it is held; None if it is none."""
        tenant = self._tenants.get(task)
        if tenant is None:
            return None
        record = tenant.record
        waits, waiting = record.worker is None, self.waiting
        return Why(
            name=record.spec.name,
            task=task,
            state=record.state.value,
            seconds=holdings.now - record.since,
            request=record.spec.shape.request.as_numbers(),
            where=str(record.spec.shape.request.where or ""),
            position=waiting.index(record) + 1 if waits else None,
            of=len(waiting) if waits else 0,
            reasons=tuple(find_shortages(self._node, record, holdings))
            if waits
            else (),
            pid=0 if waits else tenant.receiver.pid,
            is_lease=True,
        )
