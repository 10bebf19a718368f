"""Who holds what: workers and their shares of devices, as users are told of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from aiogpu.core.model.units import CPU, number
from aiogpu.core.records import WorkerRecord, WorkerState
from aiogpu.core.resources.devices import DeviceSet, Share
from aiogpu.core.resources.ledger import Lease


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process on a device that is none of the node's workers, nor below one.

    Attributes:
        pid: its process id, as the driver writes it.
        name: of its program, "" where it cannot be seen from here.
        memory: bytes of device memory that it uses, None where the driver does not
            say.
    """

    pid: int
    name: str = ""
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """One device, when it was last looked at.

    Attributes:
        seen: when that was, by the scheduler's clock.
        used: bytes of its memory in use, by whomever; None where unknown.
        utilisation: percent of the last moments in which something ran on it; None
            where unknown.
        others: processes that are not ours; None where that cannot be told.
        workers: bytes of it that workers use, with all below them, by worker id.
        outgrown: those of them that use more than was reserved for them.
        unknown: what of this could not be learnt and why, None if nothing.
    """

    seen: float
    used: int | None = None
    utilisation: int | None = None
    others: tuple[OtherProcess, ...] | None = None
    workers: Mapping[int, int] = field(default_factory=dict)
    outgrown: frozenset[int] = frozenset()
    unknown: str | None = None


Observations = Mapping[tuple[str, int], Observed]
"""By the device's kind, and its index among those."""

NOTHING: Final[Observations] = {}


@dataclass(frozen=True, slots=True)
class Holder:
    """One worker's share of a device, or its amount of another resource.

    Attributes:
        share: in whole units: 0.25 of a device, 2.0 CPUs.
        worker: the worker's id.
        pid: its process id, 0 while it starts.
        task: name of the task that it runs, None while it ends after one.
        seconds: for how long it has run that task, None where that is not known;
            short of the truth by a second at most.
        is_endless: whether it holds its share until its owner gives it up.
        is_settling: its processes have ended; whether the device is free of them is
            still to be seen.
        memory: bytes of the device's memory that it has reserved, by name or by its
            share; 0 where unknown, and for what is no GPU.
        used: bytes of the device's memory that it uses with all below it, None where
            that is not known.
        has_outgrown: whether that is more than was reserved for it.
    """

    share: float
    worker: int
    pid: int
    task: str | None
    seconds: float | None = None
    is_endless: bool = False
    is_settling: bool = False
    memory: int = 0
    used: int | None = None
    has_outgrown: bool = False


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device: its identity, the free share, who holds the rest.

    Attributes:
        kind: the name of the resource, "GPU".
        id: as tasks see it; an index, or a UUID or MIG id.
        type: the accelerator's type, such as "A100", where it is known.
        uuid: the vendor's unique id, where it is known.
        name: the vendor's name for the product, where it is known.
        memory: bytes of device memory, 0 where unknown.
        free: the share that nobody holds, 1.0 for all of it; 0.0 while it is set aside.
        holders: who holds the rest.
        aside: why it is given to nobody for now, None where it is not set aside.
        is_unverified: whether the last share came back without a word of the driver
            that nothing is left on it, since the driver cannot tell here.
        memory_reserved: bytes of its memory that the holders have reserved together.
        used: bytes of its memory in use, by whomever; None where unknown.
        utilisation: percent of the last moments in which something ran on it; None
            where unknown.
        others: processes on it that are not ours; None where that cannot be told.
        seen: seconds since its driver was asked last, None if it never was: it is
            logical, or its vendor's driver cannot be asked.
        unknown: what of all this could not be learnt and why, None if nothing.
    """

    kind: str
    id: int | str
    type: str | None
    uuid: str | None
    name: str | None
    memory: int
    free: float
    holders: tuple[Holder, ...]
    aside: str | None = None
    is_unverified: bool = False
    memory_reserved: int = 0
    used: int | None = None
    utilisation: int | None = None
    others: tuple[OtherProcess, ...] | None = None
    seen: float | None = None
    unknown: str | None = None


def scalars_of(lease: Lease) -> Iterable[tuple[str, int]]:
    """What a lease holds of undivided resources; a gang's, what its members leave."""
    for name, amount in lease.request.scalars:
        free = (part.free.get(name, 0) for part in lease.parts)
        yield name, max(sum(free), 0) if lease.parts else amount


def shares_of(lease: Lease, devices: DeviceSet) -> Iterable[tuple[Share, int]]:
    """The same of devices of a kind, each with the bytes of its memory."""
    for part in lease.parts:
        if of_part := part.device_sets.get(devices.kind):
            for at, free in enumerate(of_part.free):
                if part.masks[devices.kind] >> at & 1:
                    memory = of_part.filling.free_memory(at)
                    if free or memory:
                        yield (at, free), memory
    if not lease.parts:
        sets = lease.home.device_sets if lease.home else {}
        own = sets.get(devices.kind, devices)
        for kind, share, memory in lease.held():
            if kind == devices.kind:
                yield share, own.memory_of(share, memory)


class Holdings:
    """The workers of a node at one moment, asked who holds what.

    Attributes:
        pids: process ids of the live workers.
        now: that moment.
    """

    def __init__(
        self,
        workers: Iterable[WorkerRecord],
        pids: Mapping[int, int],
        now: float,
        observed: Observations = NOTHING,
    ) -> None:
        self.pids = pids
        self.now = now
        self._observed = observed
        self._workers = [worker for worker in workers if worker.lease is not None]

    def of_scalar(self, name: str) -> tuple[Holder, ...]:
        """Who holds of an undivided resource; who waits for his children, no CPU.

        A gang holds what none of its members does.
        """
        return tuple(
            self._holder(worker, part)
            for worker in self._workers
            if worker.lease and not (worker.lease.is_lent and name == CPU)
            for held, part in scalars_of(worker.lease)
            if held == name and (part or not worker.lease.parts)
        )

    def of_devices(self, devices: DeviceSet, mask: int) -> tuple[DeviceStatus, ...]:
        """The devices of a mask, each with its holders."""
        holders: list[list[Holder]] = [[] for _ in devices.devices]
        for worker in self._workers:
            lease = worker.lease
            assert lease is not None, worker
            for share, memory in shares_of(lease, devices):
                holder = self._holder(worker, share[1], memory)
                holders[share[0]].append(holder)
        return tuple(
            self._with_what_was_seen(
                index,
                DeviceStatus(
                    *(devices.kind, device.id, device.type, device.uuid, device.name),
                    device.memory,
                    0.0 if index in devices.aside else number(devices.free[index]),
                    tuple(holders[index]),
                    devices.aside.get(index),
                    index in devices.unverified,
                    devices.memory_reserved(index),
                ),
            )
            for index, device in enumerate(devices.devices)
            if mask >> index & 1
        )

    def _with_what_was_seen(self, index: int, status: DeviceStatus) -> DeviceStatus:
        seen = self._observed.get((status.kind, index))
        if seen is None:
            return status
        return replace(
            status,
            holders=tuple(
                replace(
                    holder,
                    used=seen.workers.get(holder.worker),
                    has_outgrown=holder.worker in seen.outgrown,
                )
                for holder in status.holders
            ),
            used=seen.used,
            utilisation=seen.utilisation,
            others=seen.others,
            seen=max(0.0, self.now - seen.seen),
            unknown=seen.unknown,
        )

    def _holder(self, worker: WorkerRecord, part: int, memory: int = 0) -> Holder:
        share, pid, task = number(part), self.pids.get(worker.id, 0), worker.task
        if task is None:
            is_settling = worker.state is WorkerState.SETTLING
            return Holder(
                *(share, worker.id, pid, None),
                is_settling=is_settling,
                memory=memory,
            )
        return Holder(
            *(share, worker.id, pid, task.spec.name, self.seconds_of(worker)),
            task.spec.is_endless,
            memory=memory,
        )

    def seconds_of(self, worker: WorkerRecord) -> float | None:
        """For how long a worker runs its task; see `Holder`."""
        # It is watched since it was given a task, or since it was seen with another.
        is_known = worker.task is not None and worker.watched is worker.task
        return self.now - worker.watched_since if is_known else None
