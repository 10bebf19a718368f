"""A `NodeStatus` as text: a table for people, and a line for `repr`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from aiogpu.core.resources import GPU_MEMORY, MEMORY, written
from aiogpu.core.sizes import size
from aiogpu.core.wording import SHOWN, span, terms

if TYPE_CHECKING:
    from aiogpu.core.holding import DeviceStatus, Holder
    from aiogpu.core.snapshot import NodeStatus

_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20))
_STATES: Final = ("running", "blocked", "stopping", "starting", "queued", "waiting")


def summary(status: NodeStatus) -> str:
    """What there is and what happens, on one line."""
    resources = ", ".join(
        f"{name} {written(name, free)}/{written(name, total)}"
        for name, free, total in _worth_telling(status)
    )
    return f"{resources}; {len(status.workers)} workers; {_counts(status)}"


def _worth_telling(status: NodeStatus) -> Iterator[tuple[str, float, float]]:
    """All resources, but memory only where somebody has some."""
    for name, total in status.total.items():
        free = status.available.get(name, 0.0)
        if name not in (MEMORY, GPU_MEMORY) or free != total:
            yield name, free, total


def _counts(status: NodeStatus) -> str:
    """How many tasks there are in each state."""
    counts = Counter(task.state for task in status.tasks)
    counts["waiting"] = status.waiting_count
    told = [f"{counts[name]} {name}" for name in _STATES if counts[name]]
    return ", ".join(told) or "no tasks"


def report(status: NodeStatus) -> str:
    """Everything, in a table."""
    rows = [
        *_resources(status),
        *_devices(status),
        *_tasks(status),
        *_shapes(status),
        *_reservation(status),
    ]
    return "\n".join(rows)


def _resources(status: NodeStatus) -> Iterator[str]:
    rows = [
        (name, f"{written(name, free)} of {written(name, total)} free")
        for name, free, total in _worth_telling(status)
    ]
    states = Counter(worker.state for worker in status.workers)
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    rows.append(("workers", told or "none"))
    rows.append(("tasks", _counts(status)))
    yield from _aligned(rows)


def _devices(status: NodeStatus) -> Iterator[str]:
    for device in status.devices:
        told = f"{device.kind} {device.id}  {device.free:g} free"
        yield "  ".join([told, *_identity(device)])
        if device.aside is not None:
            yield f"  set aside: {device.aside}"
        if device.is_unverified:
            yield "  unverified: whether ended tasks left something on it is not known"
        rows = [_holder(holder) for holder in device.holders[:SHOWN]]
        yield from _aligned(rows, indent="  ")
        yield from _rest(len(device.holders) - SHOWN)


def _identity(device: DeviceStatus) -> Iterator[str]:
    if name := device.name or device.type:
        yield name
    for unit, count in _UNITS:
        if device.memory >= count:
            yield f"{device.memory / count:.3g} {unit}"
            return


def _holder(holder: Holder) -> Sequence[str]:
    held = f"{holder.share:g}" if holder.share else size(holder.memory)
    if holder.is_settling:
        return (held, "(ended)", "", "until its driver agrees")
    return (
        held,
        holder.task or "(ending)",
        _pid(holder.pid),
        "without end" if holder.is_endless else _for(holder.seconds),
    )


def _pid(pid: int) -> str:
    return f"pid {pid}" if pid else "(starting)"


def _for(seconds: float | None) -> str:
    return "" if seconds is None else span(seconds)


def _tasks(status: NodeStatus) -> Iterator[str]:
    pids = {worker.id: worker.pid for worker in status.workers}
    held = [task for task in status.tasks if task.worker is not None]
    if held:
        yield "on workers"
    rows = [
        (
            *(str(task.id), task.name, task.state),
            _pid(pids.get(task.worker or 0, 0)),
            terms(task.request.items()),
            task.reason or "",
        )
        for task in held[:SHOWN]
    ]
    yield from _aligned(rows, indent="  ")
    yield from _rest(len(held) - SHOWN)


def _shapes(status: NodeStatus) -> Iterator[str]:
    if status.shapes:
        yield "waiting"
    for shape in status.shapes[:SHOWN]:
        names = ", ".join(shape.variables)
        told = f" with {names}" if names else ""
        spread = ", spread" if shape.strategy == "spread" else ""
        where = f" of {shape.where}" if shape.where else ""
        yield (
            f"  {shape.count} x {terms(shape.request.items())}{where}{spread}{told}: "
            f"{shape.first} first, the oldest for {span(shape.seconds)}"
        )
        yield f"    {shape.reason}"
    yield from _rest(status.shape_count - len(status.shapes[:SHOWN]))


def _reservation(status: NodeStatus) -> Iterator[str]:
    kept = status.reservation
    if kept is not None:
        when = "" if kept.seconds is None else f", for {span(kept.seconds)} at most"
        yield f"kept for {kept.name} (task {kept.task}): {kept}{when}"


def _rest(count: int) -> Iterator[str]:
    if count > 0:
        yield f"  and {count} more"


def _aligned(rows: Iterable[Sequence[str]], indent: str = "") -> Iterator[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield (indent + "  ".join(cells)).rstrip()
