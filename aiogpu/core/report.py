"""A `NodeStatus` as text: a table for people, and a line for `repr`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from aiogpu.core.client_status import client_rows
from aiogpu.core.device_report import device_rows, pid_of
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.placement_status import placement_rows
from aiogpu.core.resources import GPU_MEMORY, MEMORY, written
from aiogpu.core.wording import SHOWN, aligned, rest, span, terms

if TYPE_CHECKING:
    from aiogpu.core.failure_status import FailureStatus
    from aiogpu.core.snapshot import NodeStatus, TaskStatus

_STATES: Final = (
    "running",
    "blocked",
    "stopping",
    "starting",
    "queued",
    "sent",
    "waiting",
)


def summary(status: NodeStatus) -> str:
    """What there is and what happens, on one line."""
    resources = ", ".join(
        f"{name} {written(name, free)}/{written(name, total)}"
        for name, free, total in _worth_telling(status)
    )
    drain = "" if status.draining is None else f"{drain_told(status.draining)}; "
    outage = "no worker can be started; " if status.outages else ""
    workers = f"{len(status.workers)} workers"
    return f"{drain}{outage}{resources}; {workers}; {_counts(status)}"


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
        *overview(status),
        *device_rows(status.devices),
        *client_rows(status.clients),
        *_tasks(status),
        *_sent(status),
        *_leases(status),
        *placement_rows(status.placements),
        *_shapes(status),
        *_reservation(status),
        *_actors(status),
        *_failures(status),
    ]
    return "\n".join(rows)


def overview(status: NodeStatus) -> Iterator[str]:
    """How much is free of each resource, and how many workers and tasks there are."""
    if status.draining is not None:
        yield drain_told(status.draining)
    rows = [
        (name, f"{written(name, free)} of {written(name, total)} free")
        for name, free, total in _worth_telling(status)
    ]
    states = Counter(worker.state for worker in status.workers)
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    rows.append(("workers", told or "none"))
    rows.append(("tasks", _counts(status)))
    yield from aligned(rows)
    yield from map(str, status.outages)


def drain_told(seconds: float) -> str:
    """That a node is being stopped."""
    return f"is being stopped: no new work; what runs has {span(seconds)} to end"


def held_tasks(status: NodeStatus) -> list[TaskStatus]:
    """The tasks that have a worker, and the leases that are held."""
    waiting = {task.id for task in status.waiting}
    return [
        task
        for task in status.tasks
        if task.worker is not None or (task.is_lease and task.id not in waiting)
    ]


def state_of(task: TaskStatus) -> str:
    """Its state in a word; of a lease that is held, that it is one."""
    is_held = task.is_lease and task.state == TaskState.RUNNING.value
    return "leased" if is_held else task.state


def _tasks(status: NodeStatus) -> Iterator[str]:
    held = [task for task in status.tasks if task.worker is not None]
    if held:
        yield "on workers"
    rows = [
        (
            *(str(task.id), task.name, task.state),
            pid_of(task.pid),
            terms(task.request.items()),
            task.reason or "",
        )
        for task in held[:SHOWN]
    ]
    yield from aligned(rows, indent="  ")
    yield from rest(len(held) - SHOWN)


def _sent(status: NodeStatus) -> Iterator[str]:
    """The tasks of which a cluster does not tell where they are."""
    sent = [task for task in status.tasks if task.state == "sent"]
    if sent:
        yield "sent"
    rows = [
        (str(task.id), task.name, terms(task.request.items()), task.reason or "")
        for task in sent[:SHOWN]
    ]
    yield from aligned(rows, indent="  ")
    yield from rest(len(sent) - SHOWN)


def _leases(status: NodeStatus) -> Iterator[str]:
    placements = {one.task for one in status.placements}
    held = [
        task
        for task in status.tasks
        if task.is_lease and task.is_held and task.id not in placements
    ]
    if held:
        yield "leases"
    rows = [
        (
            *(str(task.id), task.name, f"pid {task.pid}"),
            terms(task.request.items()),
            task.reason or "",
        )
        for task in held[:SHOWN]
    ]
    yield from aligned(rows, indent="  ")
    yield from rest(len(held) - SHOWN)


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
    yield from rest(status.shape_count - len(status.shapes[:SHOWN]))


def _reservation(status: NodeStatus) -> Iterator[str]:
    kept = status.reservation
    if kept is not None:
        when = "" if kept.seconds is None else f", for {span(kept.seconds)} at most"
        yield f"kept for {kept.name} (task {kept.task}): {kept}{when}"


def _actors(status: NodeStatus) -> Iterator[str]:
    if status.actors:
        yield "actors"
    rows = [
        (
            *(str(actor.id), actor.name or "", actor.class_name, actor.state),
            pid_of(actor.pid) if actor.worker is not None else "",
            f"held by {actor.holders}",
            f"{actor.calls} calls" if actor.calls else "",
        )
        for actor in status.actors[:SHOWN]
    ]
    yield from aligned(rows, indent="  ")
    yield from rest(len(status.actors) - SHOWN)


def _failures(status: NodeStatus) -> Iterator[str]:
    if status.failures:
        yield "failed"
    rows = [
        (f"{span(one.seconds)} ago", str(one.task), one.name, told_failure(one))
        for one in status.failures[:SHOWN]
    ]
    yield from aligned(rows, indent="  ")
    yield from rest(len(status.failures) - SHOWN)


def told_failure(failure: FailureStatus) -> str:
    """What has failed it, "ValueError: no such key"."""
    said = f": {failure.message}" if failure.message else ""
    return f"{failure.error}{said}"
