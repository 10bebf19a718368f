"""A typed picture of the node at one moment: who holds what, what waits and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from aiogpu.core.devices import DeviceSet
from aiogpu.core.ledger import Ledger
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.ready import precedence
from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.resources import UNIT, number


@dataclass(frozen=True, slots=True)
class Holder:
    """One worker's share of a device.

    Attributes:
        share: fraction of the device, 0.25.
        worker: the worker's id.
        pid: its process id, 0 while it starts.
        task: name of the task that it runs, None while it ends after one.
    """

    share: float
    worker: int
    pid: int
    task: str | None


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device: its identity, the free share, who holds the rest."""

    kind: str
    id: int | str
    type: str | None
    uuid: str | None
    name: str | None
    memory: int
    free: float
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """One task that has not ended.

    Attributes:
        id: the task's number.
        name: its name.
        state: "waiting", "starting", "running" or "stopping".
        request: what it asks for, `{"CPU": 1.0, "GPU": 0.25}`.
        worker: id of its worker, None while it waits.
        reason: why it waits, None unless it does.
    """

    id: int
    name: str
    state: str
    request: Mapping[str, float]
    worker: int | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker process."""

    id: int
    pid: int
    state: str
    task: str | None


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The node: totals, what is free, devices, workers and tasks.

    Tasks that run come first, then those that wait, in the order of their turn.
    """

    total: Mapping[str, float]
    available: Mapping[str, float]
    devices: tuple[DeviceStatus, ...]
    workers: tuple[WorkerStatus, ...]
    tasks: tuple[TaskStatus, ...]

    @property
    def waiting(self) -> tuple[TaskStatus, ...]:
        """The tasks that hold nothing yet."""
        return tuple(t for t in self.tasks if t.state == TaskState.WAITING.value)


class Records(Protocol):
    """The tasks that have not ended."""

    def values(self) -> Iterable[TaskRecord]:
        """All of them."""
        ...


class Sitter(Protocol):
    """What a picture is taken of: a scheduler, or what stands for one."""

    @property
    def ledger(self) -> Ledger:
        """What there is and who holds it."""
        ...

    @property
    def tasks(self) -> Records:
        """All tasks that have not ended."""
        ...

    @property
    def workers(self) -> Iterable[WorkerRecord]:
        """All workers that are not gone."""
        ...


def snapshot(scheduler: Sitter, pids: Mapping[int, int]) -> NodeStatus:
    """Picture the node; `pids` gives the process id of each live worker."""
    ledger = scheduler.ledger
    turn = sorted(
        scheduler.tasks.values(),
        key=lambda record: (record.state is TaskState.WAITING, precedence(record)),
    )
    return NodeStatus(
        total=ledger.totals(),
        available=ledger.available(),
        devices=tuple(
            status
            for devices in ledger.device_sets.values()
            for status in _devices(devices, list(scheduler.workers), pids)
        ),
        workers=tuple(_worker(record, pids) for record in scheduler.workers),
        tasks=tuple(_task(record, scheduler) for record in turn),
    )


def _devices(
    devices: DeviceSet, workers: list[WorkerRecord], pids: Mapping[int, int]
) -> list[DeviceStatus]:
    holders: list[list[Holder]] = [[] for _ in devices.devices]
    for worker in workers:
        lease = worker.lease
        if lease is None:
            continue
        task = worker.task.spec.name if worker.task else None
        for (kind, _), shares in zip(lease.request.devices, lease.shares, strict=True):
            if kind == devices.kind:
                for index, part in shares:
                    holder = Holder(
                        number(part), worker.id, pids.get(worker.id, 0), task
                    )
                    holders[index].append(holder)
    return [
        DeviceStatus(
            devices.kind,
            device.id,
            device.type,
            device.uuid,
            device.name,
            device.memory,
            number(devices.free[index]),
            tuple(holders[index]),
        )
        for index, device in enumerate(devices.devices)
    ]


def _worker(record: WorkerRecord, pids: Mapping[int, int]) -> WorkerStatus:
    task = record.task.spec.name if record.task else None
    return WorkerStatus(record.id, pids.get(record.id, 0), record.state.value, task)


def _task(record: TaskRecord, scheduler: Sitter) -> TaskStatus:
    request = record.spec.shape.request
    waits = record.state is TaskState.WAITING
    return TaskStatus(
        id=record.id,
        name=record.spec.name,
        state=record.state.value,
        request=request.as_numbers(),
        worker=record.worker.id if record.worker else None,
        reason=_why_waiting(record, scheduler) if waits else None,
    )


def _why_waiting(record: TaskRecord, scheduler: Sitter) -> str:
    """Name what is short. A share may wait although the sum of shares suffices."""
    request = record.spec.shape.request
    free = scheduler.ledger.free
    short = [
        f"{name} {number(amount):g} (free: {number(free.get(name, 0)):g})"
        for name, amount in request.scalars
        if free.get(name, 0) < amount
    ]
    for kind, amount in request.devices:
        devices = scheduler.ledger.device_sets[kind]
        if devices.choose(amount, request.accelerator_type) is None:
            shares = ", ".join(
                f"{device.id}: {part / UNIT:g}"
                for device, part in zip(devices.devices, devices.free, strict=True)
            )
            short.append(f"{kind} {number(amount):g} (free by device: {shares})")
    return "waits for " + (" and ".join(short) or "its turn")
