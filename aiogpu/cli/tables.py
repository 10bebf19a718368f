"""What a `NodeStatus` has, as tables: one for each kind of thing in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

import aiogpu
from aiogpu.cli.terminal import Cell, Column, Table
from aiogpu.core.model.ids import OWN
from aiogpu.core.model.text import span, terms
from aiogpu.core.queue.fair_share import Limits
from aiogpu.observe.status import (
    ActorStatus,
    ClientStatus,
    DeviceStatus,
    FailureStatus,
    PlacementStatus,
    Program,
    ShapeStatus,
    TaskStatus,
    WorkerStatus,
    amount,
    name_of,
    state_of,
)

STATE_STYLES: Final = {
    **dict.fromkeys(("running", "leased", "busy", "alive", "ready"), "green"),
    **dict.fromkeys(("waiting", "pending", "delayed", "expecting"), "yellow"),
    **dict.fromkeys(("stopping", "ending", "leaving", "removing"), "magenta"),
    **dict.fromkeys(("starting", "queued", "blocked"), "cyan"),
    **dict.fromkeys(("set aside",), "bold red"),
}
"""How the words for states are coloured; they say all without colour as well."""


def state(word: str) -> Cell:
    """A cell for a state."""
    return (word, STATE_STYLES.get(word, ""))


class Programs(dict[int, str]):
    """What the programs of a node are called by, with their process ids."""

    def __init__(self, status: aiogpu.types.NodeStatus) -> None:
        super().__init__(
            (one.id, f"{one.name} {one.pid}") for one in status.clients if one.name
        )
        self[OWN] = ""

    def __missing__(self, client: int) -> str:
        return str(client)


def task_table(tasks: Iterable[TaskStatus], status: aiogpu.types.NodeStatus) -> Table:
    """Tasks that have not ended."""
    programs = Programs(status)
    columns = (
        Column("TASK", is_number=True),
        Column("NAME", least=10),
        Column("STATE"),
        Column("PID", is_number=True, rank=1),
        Column("PROGRAM", least=8, rank=2),
        Column("ASKS FOR", least=12, rank=3),
        Column("WHY", least=16, rank=4),
    )
    rows = [
        (
            *(str(one.id), one.name, state(state_of(one))),
            pid(one.pid),
            programs[one.client],
            terms(one.request.items()),
            one.reason or "",
        )
        for one in tasks
    ]
    return Table(columns, rows)


def pid(number: int) -> str:
    """A process id, nothing where there is no process."""
    return str(number) if number else ""


def worker_table(workers: Iterable[WorkerStatus]) -> Table:
    """Worker processes."""
    columns = (
        Column("WORKER", is_number=True),
        Column("PID", is_number=True),
        Column("STATE"),
        Column("TASK", least=8),
    )
    rows = [
        (str(one.id), pid(one.pid), state(one.state), one.task or "") for one in workers
    ]
    return Table(columns, rows)


def actor_table(
    actors: Iterable[ActorStatus], status: aiogpu.types.NodeStatus
) -> Table:
    """Actors that have not ended."""
    programs = Programs(status)
    columns = (
        Column("ACTOR", is_number=True),
        Column("NAME", least=8),
        Column("CLASS", least=8),
        Column("STATE"),
        Column("PID", is_number=True, rank=2),
        Column("HELD BY", is_number=True, rank=1),
        Column("CALLS", is_number=True, rank=3),
        Column("PROGRAM", least=8, rank=4),
    )
    rows = [
        (
            *(str(one.id), full_name(one), one.class_name, state(one.state)),
            *(
                pid(one.pid),
                str(one.holders),
                str(one.calls or ""),
                programs[one.client],
            ),
        )
        for one in actors
    ]
    return Table(columns, rows)


def full_name(actor: ActorStatus) -> str:
    """An actor's name with its namespace, "" without a name."""
    if actor.name is None:
        return ""
    return f"{actor.namespace}/{actor.name}" if actor.namespace else actor.name


def placement_table(
    placements: Iterable[PlacementStatus], status: aiogpu.types.NodeStatus
) -> Table:
    """Placements, with what each of their bundles holds."""
    programs = Programs(status)
    columns = (
        Column("PLACEMENT", is_number=True),
        Column("NAME", least=8),
        Column("STATE"),
        Column("STRATEGY", rank=4),
        Column("PID", is_number=True, rank=2),
        Column("IN IT", is_number=True),
        Column("PROGRAM", least=8, rank=5),
        Column("BUNDLES", least=12, rank=1),
        Column("WHY", least=10, rank=3),
    )
    rows = [
        (
            *(str(one.task), one.name, state(one.state), one.strategy, pid(one.pid)),
            *(str(one.members), programs[one.client]),
            "; ".join(map(str, one.bundles)),
            one.reason or "",
        )
        for one in placements
    ]
    return Table(columns, rows)


def client_table(clients: Collection[ClientStatus], with_ids: bool = False) -> Table:
    """The programs that share the node.

    Args:
        clients: the programs.
        with_ids: show what `aiogpu logs --client` wants; a screen has no room for it.
    """
    columns = [
        Column("PROGRAM", least=8),
        Column("PID", is_number=True, rank=1),
        Column("RUN", is_number=True),
        Column("WAIT", is_number=True),
        Column("HOLDS", least=10),
        Column("WEIGHT", is_number=True, rank=4),
        Column("MAY HAVE", least=10, rank=5),
        Column("", rank=3),
    ]
    rows = [
        [
            name_of(one.id, {one.id: Program(one.name, one.pid)}),
            *(pid(one.pid), str(one.running), str(one.waiting)),
            terms(one.holds.items()) if one.holds else "",
            "" if one.weight == 1 else f"{one.weight:g}",
            ", ".join(bounds(one.limits)),
            "has left" if one.has_left else "",
        ]
        for one in clients
    ]
    if with_ids:
        columns.insert(2, Column("ID", is_number=True))
        for one, row in zip(clients, rows, strict=True):
            row.insert(2, str(one.id) if one.id != OWN else "")
    return Table(tuple(columns), [tuple(row) for row in rows])


def shown_clients(status: aiogpu.types.NodeStatus) -> list[ClientStatus]:
    """The programs worth a line: the node's own only if it has tasks."""
    return [
        one for one in status.clients if one.id != OWN or one.running or one.waiting
    ]


def bounds(limits: Limits) -> Iterator[str]:
    """Return what a program may have at most."""
    if limits.max_waiting is not None:
        yield f"{limits.max_waiting} tasks"
    for name, share in limits.max_share.items():
        yield f"{share * 100:g} % of {name}"


def device_state(device: DeviceStatus) -> str:
    """Return whether there is room on a device, in a word."""
    if device.aside is not None:
        return "set aside"
    if device.free >= 1 and not device.holders:
        return "free"
    return "shared" if device.free > 0 else "full"


def device_name(device: DeviceStatus) -> str:
    """The device's id with its kind, "GPU 0"."""
    return f"{device.kind} {device.id}"


def memory(device: DeviceStatus) -> str:
    """Return how much of a device's memory is in use, as far as it is known."""
    there = amount(device.memory)
    if device.used is None:
        return there
    return f"{amount(device.used, '0')}/{there}" if there else amount(device.used, "0")


def device_table(devices: Iterable[DeviceStatus]) -> Table:
    """Devices, and who holds them."""
    columns = (
        Column("DEVICE", least=6),
        Column("NAME", least=6, rank=3),
        Column("STATE"),
        Column("FREE", is_number=True),
        Column("MEMORY", is_number=True, rank=1),
        Column("BUSY", is_number=True, rank=2),
        Column("HELD BY", least=10),
    )
    rows = [
        (
            *(device_name(one), one.name or one.type or "", state(device_state(one))),
            f"{one.free:g}",
            memory(one),
            "" if one.utilisation is None else f"{one.utilisation} %",
            ", ".join(held_by(one)) or (one.aside or ""),
        )
        for one in devices
    ]
    return Table(columns, rows)


def held_by(device: DeviceStatus, *, with_others: bool = True) -> Iterable[str]:
    """Each holder of a device with its share; then, if wanted, who else is on it."""
    for one in device.holders:
        share = f"{one.share:g}" if one.share else amount(one.memory)
        yield f"{share} {one.task or '(ending)'}"
    for other in (device.others or ()) if with_others else ():
        yield f"not ours: {other.name or 'pid'} {other.pid}"


def shape_table(shapes: Iterable[ShapeStatus]) -> Table:
    """Return what waits, those that ask for the same on one line."""
    columns = (
        Column("WAIT", is_number=True),
        Column("ASK FOR", least=14),
        Column("FIRST", least=8, rank=2),
        Column("SINCE", is_number=True, rank=1),
        Column("WHY", least=16),
    )
    rows = [
        (
            (str(one.count), "yellow"),
            terms(one.request.items()) + (f" of {one.where}" if one.where else ""),
            one.first,
            span(one.seconds),
            one.reason,
        )
        for one in shapes
    ]
    return Table(columns, rows)


def failure_table(
    failures: Iterable[FailureStatus], status: aiogpu.types.NodeStatus
) -> Table:
    """Return what has failed, the latest first."""
    programs = Programs(status)
    columns = (
        Column("AGO", is_number=True),
        Column("TASK", is_number=True, rank=3),
        Column("NAME", least=8),
        Column("PROGRAM", least=8, rank=2),
        Column("ERROR", least=12),
        Column("SAYS", least=16, rank=1),
    )
    rows = [
        (
            *(span(one.seconds), str(one.task), one.name, programs[one.client]),
            (one.error.rpartition(".")[2], "red"),
            one.message,
        )
        for one in failures
    ]
    return Table(columns, rows)
