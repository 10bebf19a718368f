"""What a node tells the programs that join it, and what they may ask of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from aiogpu.client.plain_data import Maybe, dump_plain, fits, load_plain
from aiogpu.core.model.request import Device
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.engines.joining_options import POLICIES, Policies
from aiogpu.errors import ProtocolError
from aiogpu.observe.status import Program
from aiogpu.wire.messages import (
    AVAILABLE,
    RESOURCES,
    STATUS,
    TIMELINE,
    WHY,
    WHY_TASK,
    descriptor_path,
)

if TYPE_CHECKING:
    from aiogpu.core.queue.fair_share import Limits
    from aiogpu.engines.base import NodeOptions
    from aiogpu.engines.local import LocalEngine
    from aiogpu.runtime.callers.programs import Answer, Clients, ServerInfo


_TEXT: Final = str | None


_DEVICE: Final = (
    *(int | str, _TEXT, _TEXT, _TEXT, int, Maybe((int, int)), _TEXT, [str], _TEXT),
)


_POLICY: Final = (str, bool | int | float | str | None)


_CAPACITY: Final = ([(str, int)], [(str, [_DEVICE])], [_POLICY])


def premises_of(
    directory: str,
    ledger: Ledger,
    options: NodeOptions,
    object_memory: int,
    limits: Limits | None = None,
) -> ServerInfo:
    """Return what clients find on a node.

    Args:
        directory: where the node's own sockets are.
        ledger: what it has.
        options: by which it was started.
        object_memory: bytes of shared memory for values.
        limits: what each client may have at once; None for no limits.

    Raises:
        OptionError: a resource is limited that the node does not have.
    """
    from aiogpu import __version__
    from aiogpu.core.queue.fair_share import Limits
    from aiogpu.runtime.callers.programs import ServerInfo

    policies = {option: getattr(options, option) for option in POLICIES}
    policies["object_memory"] = object_memory
    limits = limits or Limits()
    limits.on(ledger)
    return ServerInfo(
        os.path.basename(directory),
        descriptor_path(directory),
        options.spill_directory or "",
        pack_capacity(ledger, policies),
        __version__,
        limits,
    )


def pack_capacity(ledger: Ledger, policies: Policies) -> bytes:
    """Return what a node has to share out and how it works; see `unpack_capacity`."""
    sets = tuple(
        (one.kind, tuple(map(_device_fields, one.devices)))
        for one in ledger.device_sets.values()
    )
    return dump_plain((tuple(ledger.capacity.items()), sets, tuple(policies.items())))


def unpack_capacity(packed: bytes) -> tuple[Ledger, Policies]:
    """A ledger of which nothing is taken, and how the node works.

    Raises:
        ProtocolError: the bytes are something else.
    """
    told: Any = load_plain(packed)
    if not fits(told, _CAPACITY):
        raise ProtocolError("what a node has is not said as it must be")
    capacity, sets, policies = told
    ledger = Ledger(
        dict(capacity),
        [DeviceSet(kind, tuple(map(_device_of, devices))) for kind, devices in sets],
    )
    return ledger, dict(policies)


def _device_fields(device: Device) -> tuple[object, ...]:
    return (
        *(device.id, device.type, device.uuid, device.name, device.memory),
        *(device.compute_capability, device.pci, tuple(sorted(device.links))),
        device.parent,
    )


def _device_of(fields: tuple[Any, ...]) -> Device:
    *first, links, parent = fields
    return Device(*(*first, frozenset(links), parent))


def programs_of(clients: Clients | None) -> dict[int, Program]:
    """Who has joined, by their numbers; None is for a node that nobody can join."""
    found = {} if clients is None else clients.programs
    return {number: Program(*who) for number, who in found.items()}


def drain_of(clients: Clients | None, now: float) -> float | None:
    """Seconds that what runs has on a node that is being stopped; None if it is not."""
    ends_at = None if clients is None else clients.ends_at
    return None if ends_at is None else max(0.0, ends_at - now)


def answers_of(engine: LocalEngine) -> Mapping[str, Answer]:
    """What can be asked of an engine's node from outside, by what it is called."""

    async def total(_number: int) -> object:
        return await engine.total()

    async def available(_number: int) -> object:
        return await engine.available()

    async def status(_number: int) -> object:
        return await engine.status()

    async def timeline(_number: int) -> object:
        return [tuple(span) for span in engine.spans()]

    return {
        RESOURCES: total,
        AVAILABLE: available,
        STATUS: status,
        WHY: engine.why,
        WHY_TASK: engine.why,
        TIMELINE: timeline,
    }
