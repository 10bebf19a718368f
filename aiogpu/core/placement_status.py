"""The placements of a node, as people are told of them: what each holds, and for whom.

People know a gang as a placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aiogpu.core.gang import Gang
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.resources import GPU, GPU_MEMORY, number
from aiogpu.core.wording import SHOWN, listing, rest, terms

if TYPE_CHECKING:
    from aiogpu.core.bundles import Part
    from aiogpu.core.devices import DeviceSet
    from aiogpu.core.ledger import Ledger
    from aiogpu.core.records import TaskRecord

READY: Final = "ready"
_STATES: Final = {TaskState.RUNNING: READY, TaskState.STOPPING: "removing"}


@dataclass(frozen=True, slots=True)
class BundleStatus:
    """One bundle.

    Attributes:
        request: what it holds, `{"CPU": 2.0, "GPU": 1.0}`, or will.
        free: what no member has of that; the same while it is not granted.
        devices: ids of its devices by kind, `{"GPU": (0,)}`; empty until then.
    """

    request: Mapping[str, float]
    free: Mapping[str, float]
    devices: Mapping[str, tuple[int | str, ...]]

    def __str__(self) -> str:
        told = terms(self.request.items())
        for kind, ids in self.devices.items():
            told += f" on {kind} {listing(map(str, ids), len(ids))}"
        used = {name: n - self.free[name] for name, n in self.request.items()}
        held = {name: amount for name, amount in used.items() if amount}
        return f"{told}, used: {terms(held.items())}" if held else told


@dataclass(frozen=True, slots=True)
class PlacementStatus:
    """One placement.

    Attributes:
        task: its number, under which `why` knows it.
        name: its name.
        id: tells it from all others.
        state: "waiting", "ready", or "removing" while those in it stop.
        strategy: how its bundles are laid out.
        bundles: in their order.
        members: how many tasks and actors were given it that have not ended.
        client: the program whose it is, 0 for the node's own.
        pid: process id of that; 0 while it waits.
        reason: why it waits, None if it does not.
        is_detached: whether it outlives the program that has asked for it.
    """

    task: int
    name: str
    id: str
    state: str
    strategy: str
    bundles: tuple[BundleStatus, ...]
    members: int
    client: int = 0
    pid: int = 0
    reason: str | None = None
    is_detached: bool = False


def placement_status(
    record: TaskRecord,
    ledger: Ledger,
    members: int,
    pids: Mapping[int, int],
    reason: str,
) -> PlacementStatus:
    """Picture one.

    Args:
        record: the gang, as the queue has it.
        ledger: of the node.
        members: how many there are.
        pids: process ids, by who holds something.
        reason: why it waits, if it does.
    """
    gang, worker = record.spec.shape.request.gang, record.worker
    assert isinstance(gang, Gang), record
    parts = ledger.gangs.get(gang.key)
    state = _STATES.get(record.state, TaskState.WAITING.value)
    asked = [bundle.request().as_numbers() for bundle in gang.bundles]
    return PlacementStatus(
        *(record.id, record.spec.name, gang.key, state, gang.strategy),
        tuple(BundleStatus(one, one, {}) for one in asked)
        if parts is None
        else tuple(map(_granted, parts, asked)),
        members,
        record.client,
        pids.get(worker.id, 0) if worker else 0,
        reason if parts is None else None,
        record.spec.is_detached,
    )


def _granted(part: Part, request: Mapping[str, float]) -> BundleStatus:
    free = {name: number(max(part.free.get(name, 0), 0)) for name in request}
    devices = {}
    for kind, mask in part.masks.items():
        of_kind = part.device_sets[kind]
        free[kind] = number(sum(of_kind.free))
        if kind == GPU and GPU_MEMORY in request:
            free[GPU_MEMORY] = float(_free_memory(of_kind, mask))
        devices[kind] = tuple(
            device.id for at, device in enumerate(of_kind.devices) if mask >> at & 1
        )
    return BundleStatus(request, free, devices)


def _free_memory(devices: DeviceSet, mask: int) -> int:
    filling = devices.filling
    return sum(
        filling.free_memory(at) for at in range(len(filling.capacity)) if mask >> at & 1
    )


def placement_rows(placements: Sequence[PlacementStatus]) -> Iterator[str]:
    """All of them in words, with their bundles."""
    if placements:
        yield "placements"
    for one in placements[:SHOWN]:
        of = f"pid {one.pid}, " if one.pid else ""
        state = f"{one.state}, detached" if one.is_detached else one.state
        told = f"{one.task}  {one.name}  {one.strategy}  {state}"
        yield f"  {told}  {of}{one.members} in it"
        if one.reason:
            yield f"    {one.reason}"
        for index, bundle in enumerate(one.bundles[:SHOWN]):
            yield f"    bundle {index}: {bundle}"
        yield from (f"  {line}" for line in rest(len(one.bundles) - SHOWN))
    yield from rest(len(placements) - SHOWN)
