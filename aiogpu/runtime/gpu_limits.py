"""How much device memory a lease lets its worker use: one rule, pure."""

from __future__ import annotations

from aiogpu.core.devices import DeviceSet
from aiogpu.core.ledger import Lease
from aiogpu.core.resources import BY_SHARE, GPU, UNIT


def held_of(lease: Lease, kind: str) -> dict[int, int]:
    """What a lease has of one kind: parts of each device, by index, in its order."""
    for (held, _), shares in zip(lease.request.devices, lease.shares, strict=True):
        if held == kind:
            return {share[0]: share[1] for share in shares}
    return {}


def limits_of(lease: Lease, gpus: DeviceSet | None) -> tuple[int, ...]:
    """Bytes that a worker with this lease may use of each of its GPUs, in order.

    Empty where it may use all that there is: nothing was asked for, or a share of
    GPUs whose memory nobody knows. Who has a whole GPU by its share has all of it.

    Args:
        lease: what the worker holds.
        gpus: all of the node's, None if it has none.
    """
    asked = lease.request.gpu_memory
    if not asked or gpus is None:
        return ()
    held = held_of(lease, GPU)
    if asked != BY_SHARE:
        return (asked,) * len(held)
    limits = tuple(
        gpus.devices[index].memory * part // UNIT if part < UNIT else 0
        for index, part in held.items()
    )
    return limits if any(limits) else ()
