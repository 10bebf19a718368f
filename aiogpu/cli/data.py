"""A `NodeStatus` as JSON has it: the schema that `docs/service-json.md` describes.

Names and meanings stay while `VERSION` does; what is new is added, and readers leave
alone what they do not know. All numbers are in base units: bytes, seconds, whole
devices. None is for what is not known, or not there.
"""

from __future__ import annotations

from typing import Any, Final

import aiogpu
from aiogpu.observe.status import (
    ActorStatus,
    ClientStatus,
    DeviceStatus,
    FailureStatus,
    Holder,
    OutageStatus,
    PlacementStatus,
    ReservationStatus,
    ShapeStatus,
    TaskStatus,
    WorkerStatus,
)

VERSION: Final = 1

Data = dict[str, Any]


def status_data(status: aiogpu.NodeStatus) -> Data:
    """All of it."""
    return {
        "version": VERSION,
        "aiogpu": aiogpu.__version__,
        "healthy": not problems(status),
        "problems": problems(status),
        "resources": {
            name: {"total": total, "free": status.available.get(name, 0.0)}
            for name, total in status.total.items()
        },
        "devices": [device_data(one) for one in status.devices],
        "workers": [worker_data(one) for one in status.workers],
        "tasks": [task_data(one) for one in status.tasks],
        "waiting": {
            "tasks": status.waiting_count,
            "shapes": status.shape_count,
            "first": [shape_data(one) for one in status.shapes],
        },
        "reservation": reservation_data(status.reservation),
        "clients": [client_data(one) for one in status.clients],
        "actors": [actor_data(one) for one in status.actors],
        "failures": [failure_data(one) for one in status.failures],
        "draining": status.draining,
        "placements": [placement_data(one) for one in status.placements],
        "outages": [outage_data(one) for one in status.outages],
    }


def problems(status: aiogpu.NodeStatus) -> list[str]:
    """What is not well: devices that are set aside, and workers that do not start."""
    return [
        *(
            f"{device.kind} {device.id} is set aside: {device.aside}"
            for device in status.devices
            if device.aside is not None
        ),
        *map(str, status.outages),
    ]


def device_data(device: DeviceStatus) -> Data:
    """One device."""
    return {
        "kind": device.kind,
        "id": device.id,
        "uuid": device.uuid,
        "name": device.name,
        "type": device.type,
        "free": device.free,
        "aside": device.aside,
        "unverified": device.is_unverified,
        "memory": device.memory or None,
        "memory_reserved": device.memory_reserved,
        "used": device.used,
        "utilisation": device.utilisation,
        "seen": device.seen,
        "unknown": device.unknown,
        "holders": [holder_data(one) for one in device.holders],
        "others": None
        if device.others is None
        else [
            {"pid": one.pid, "name": one.name or None, "memory": one.memory}
            for one in device.others
        ],
    }


def holder_data(holder: Holder) -> Data:
    """One who holds a part of a device."""
    return {
        "share": holder.share,
        "worker": holder.worker,
        "pid": holder.pid or None,
        "task": holder.task,
        "seconds": holder.seconds,
        "endless": holder.is_endless,
        "settling": holder.is_settling,
        "memory_reserved": holder.memory,
        "used": holder.used,
        "outgrown": holder.has_outgrown,
    }


def worker_data(worker: WorkerStatus) -> Data:
    """One worker process."""
    return {
        "id": worker.id,
        "pid": worker.pid or None,
        "state": worker.state,
        "task": worker.task,
    }


def task_data(task: TaskStatus) -> Data:
    """One task, or a lease."""
    return {
        "id": task.id,
        "name": task.name,
        "state": task.state,
        "request": dict(task.request),
        "worker": task.worker,
        "pid": task.pid or None,
        "client": task.client,
        "lease": task.is_lease,
        "reason": task.reason,
    }


def shape_data(shape: ShapeStatus) -> Data:
    """Tasks that wait and ask for the same."""
    return {
        "request": dict(shape.request),
        "where": shape.where or None,
        "strategy": shape.strategy,
        "variables": list(shape.variables),
        "count": shape.count,
        "first": shape.first,
        "seconds": shape.seconds,
        "client": shape.client,
        "reason": shape.reason,
    }


def reservation_data(kept: ReservationStatus | None) -> Data | None:
    """Return what is kept for one that has waited long."""
    if kept is None:
        return None
    return {
        "task": kept.task,
        "name": kept.name,
        "devices": {kind: list(ids) for kind, ids in kept.devices.items()},
        "amounts": dict(kept.amounts),
        "seconds": kept.seconds,
    }


def client_data(client: ClientStatus) -> Data:
    """One program that shares the node."""
    limits = client.limits
    return {
        "id": client.id,
        "name": client.name or None,
        "pid": client.pid or None,
        "weight": client.weight,
        "running": client.running,
        "waiting": client.waiting,
        "holds": dict(client.holds),
        "limits": {
            "max_waiting": limits.max_waiting,
            "max_share": dict(limits.max_share),
        },
        "left": client.has_left,
    }


def actor_data(actor: ActorStatus) -> Data:
    """One actor."""
    return {
        "id": actor.id,
        "name": actor.name,
        "namespace": actor.namespace,
        "class": actor.class_name,
        "state": actor.state,
        "holders": actor.holders,
        "worker": actor.worker,
        "pid": actor.pid or None,
        "calls": actor.calls,
        "detached": actor.is_detached,
        "client": actor.client,
    }


def failure_data(failure: FailureStatus) -> Data:
    """One failure."""
    return {
        "task": failure.task,
        "name": failure.name,
        "error": failure.error,
        "message": failure.message,
        "seconds": failure.seconds,
        "client": failure.client,
    }


def placement_data(placement: PlacementStatus) -> Data:
    """One placement."""
    return {
        "task": placement.task,
        "name": placement.name,
        "id": placement.id,
        "state": placement.state,
        "strategy": placement.strategy,
        "bundles": [
            {
                "request": dict(bundle.request),
                "free": dict(bundle.free),
                "devices": {kind: list(ids) for kind, ids in bundle.devices.items()},
            }
            for bundle in placement.bundles
        ],
        "members": placement.members,
        "client": placement.client,
        "pid": placement.pid or None,
        "reason": placement.reason,
        "detached": placement.is_detached,
    }


def outage_data(outage: OutageStatus) -> Data:
    """Return why no worker can be started."""
    return {
        "reason": outage.reason,
        "failures": outage.failures,
        "seconds": outage.seconds,
        "retry_in": outage.retry_in,
        "variables": list(outage.variables),
        "joined": outage.is_joined,
    }
