"""A task that ran out of device memory gets one more try, with a device of its own.

Only where its options say so, once, and beside its `max_retries`. What it asks for
grows from a share to a whole device; type and conditions stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

from aiogpu.core.bundles import roomiest
from aiogpu.core.deadlock import find_deadlocks
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.node import Node
from aiogpu.core.records import TaskRecord
from aiogpu.core.resources import GPU, UNIT, Request
from aiogpu.core.specs import Shape, TaskSpec
from aiogpu.core.where import Where


def widened(spec: TaskSpec) -> TaskSpec | None:
    """The same with a GPU of its own; None if it has that, or does not ask for it."""
    request = spec.shape.request
    amounts = dict(request.devices)
    if not spec.retries_oom or spec.is_endless or amounts.get(GPU, UNIT) >= UNIT:
        return None
    shape = Shape(_whole(request), spec.shape.environment)
    return replace(spec, shape=shape, retries_oom=False)


def _whole(request: Request) -> Request:
    devices = tuple(
        (kind, UNIT if kind == GPU else amount) for kind, amount in request.devices
    )
    where = request.where
    if request.gpu_memory > 0:
        # It is not to come to a smaller device than before.
        least = max(request.gpu_memory, where.least_memory if where else 0)
        where = replace(where or Where(), least_memory=least)
    return replace(request, devices=devices, where=where, gpu_memory=0)


def try_exclusively(node: Node, record: TaskRecord) -> bool:
    """Have a task that holds nothing any more wait for a device of its own.

    Returns:
        False if it may not, or would wait for ever: then nothing has changed.
    """
    spec = widened(record.spec)
    if spec is None:
        return False
    before = record.spec
    record.spec = spec
    if _is_beyond_limits(node, record) or _would_deadlock(node, record):
        record.spec = before
        return False
    record.is_outgrown = record.is_starved = False
    node.wait_again(record)
    return True


def _is_beyond_limits(node: Node, record: TaskRecord) -> bool:
    """Whether it would never get what it asks for now."""
    request, clients = record.spec.shape.request, node.clients
    if clients is not None and not clients.allows(record.client, request):
        return True
    return not _may_be_free(node, request)


def _may_be_free(node: Node, request: Request) -> bool:
    """Whether a device that could serve it is held by nobody without end.

    Whichever has served its share could serve it whole.
    """
    usable = node.ledger.device_sets[GPU].usable(UNIT, request)
    part = None
    if request.gang is not None:
        part = roomiest(node.ledger, request)
        usable &= part.masks[GPU] if part is not None else 0
    for worker in node.holders:
        lease, task = worker.lease, worker.task
        if lease is None or lease.home is not part:
            continue
        if task is not None and task.spec.is_endless:
            held = zip(lease.request.devices, lease.shares, strict=True)
            usable &= ~sum(
                1 << index
                for (kind, _), shares in held
                if kind == GPU
                for index, _ in shares
            )
    return usable != 0


def _would_deadlock(node: Node, record: TaskRecord) -> bool:
    """Whether those that wait for it hold what it would wait for."""
    if not node.blocked:
        return False
    state, record.state = record.state, TaskState.WAITING
    found = find_deadlocks(node)
    record.state = state
    return bool(found)
