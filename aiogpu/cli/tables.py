"""What a `NodeStatus` has, as tables: one for each kind of thing in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from rich.text import Text

from aiogpu.cli.terminal import Column, Table, text
from aiogpu.core.model.ids import OWN
from aiogpu.core.model.text import span, terms
from aiogpu.core.queue.fair_share import Limits
from aiogpu.observe.status import (
    ActorStatus,
    ClientStatus,
    DeviceStatus,
    FailureStatus,
    Holder,
    NodeStatus,
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


def state(word: str) -> Text:
    """A cell for a state."""
    return text(word, STATE_STYLES.get(word, ""))


class Programs(dict[int, str]):
    """What the programs of a node are called by, with their process ids."""

    def __init__(self, status: NodeStatus) -> None:
        super().__init__(
            (one.id, f"{one.name} {one.pid}") for one in status.clients if one.name
        )
        self[OWN] = ""

    def __missing__(self, client: int) -> str:
        return str(client)


def number(count: int) -> str:
    """A process id or a count, nothing for 0."""
    return str(count or "")


def task_table(tasks: Iterable[TaskStatus], status: NodeStatus) -> Table:
    """Tasks that have not ended."""
    programs = Programs(status)
    return Table(
        tasks,
        Column("TASK", lambda task: str(task.id), is_number=True),
        Column("NAME", lambda task: task.name, least=10),
        Column("STATE", lambda task: state(state_of(task))),
        Column("PID", lambda task: number(task.pid), is_number=True, rank=1),
        Column("PROGRAM", lambda task: programs[task.client], least=8, rank=2),
        Column("ASKS FOR", lambda task: terms(task.request.items()), least=12, rank=3),
        Column("WHY", lambda task: task.reason or "", least=16, rank=4),
    )


def held_table(
    tasks: Iterable[TaskStatus],
    status: NodeStatus,
    holders: Mapping[tuple[int, str | None], Holder],
) -> Table:
    """Tasks on workers with what they hold: for how long, and how much memory of it."""
    programs = Programs(status)

    def seconds(task: TaskStatus) -> str:
        holder = holders.get((task.pid, task.name))
        return "" if holder is None or holder.seconds is None else span(holder.seconds)

    def used(task: TaskStatus) -> str:
        holder = holders.get((task.pid, task.name))
        return "" if holder is None or holder.used is None else amount(holder.used, "0")

    return Table(
        tasks,
        Column("TASK", lambda task: str(task.id), is_number=True),
        Column("NAME", lambda task: task.name, least=10),
        Column("STATE", lambda task: state(state_of(task))),
        Column("PID", lambda task: number(task.pid), is_number=True, rank=2),
        Column("PROGRAM", lambda task: programs[task.client], least=8, rank=3),
        Column("HOLDS", lambda task: terms(task.request.items()), least=12, rank=4),
        Column("FOR", seconds, is_number=True, rank=1),
        Column("MEMORY", used, is_number=True, rank=5),
        Column("WHY", lambda task: task.reason or "", least=10, rank=6),
    )


def worker_table(workers: Iterable[WorkerStatus], _status: NodeStatus) -> Table:
    """Worker processes."""
    return Table(
        workers,
        Column("WORKER", lambda worker: str(worker.id), is_number=True),
        Column("PID", lambda worker: number(worker.pid), is_number=True),
        Column("STATE", lambda worker: state(worker.state)),
        Column("TASK", lambda worker: worker.task or "", least=8),
    )


def actor_table(actors: Iterable[ActorStatus], status: NodeStatus) -> Table:
    """Actors that have not ended."""
    programs = Programs(status)
    return Table(
        actors,
        Column("ACTOR", lambda actor: str(actor.id), is_number=True),
        Column("NAME", full_name, least=8),
        Column("CLASS", lambda actor: actor.class_name, least=8),
        Column("STATE", lambda actor: state(actor.state)),
        Column("PID", lambda actor: number(actor.pid), is_number=True, rank=2),
        Column("HELD BY", lambda actor: str(actor.holders), is_number=True, rank=1),
        Column("CALLS", lambda actor: number(actor.calls), is_number=True, rank=3),
        Column("PROGRAM", lambda actor: programs[actor.client], least=8, rank=4),
    )


def full_name(actor: ActorStatus) -> str:
    """An actor's name with its namespace, "" without a name."""
    if actor.name is None:
        return ""
    return f"{actor.namespace}/{actor.name}" if actor.namespace else actor.name


def placement_table(groups: Iterable[PlacementStatus], status: NodeStatus) -> Table:
    """Placements, with what each of their bundles holds."""
    programs = Programs(status)
    return Table(
        groups,
        Column("PLACEMENT", lambda group: str(group.task), is_number=True),
        Column("NAME", lambda group: group.name, least=8),
        Column("STATE", lambda group: state(group.state)),
        Column("STRATEGY", lambda group: group.strategy, rank=4),
        Column("PID", lambda group: number(group.pid), is_number=True, rank=2),
        Column("IN IT", lambda group: str(group.members), is_number=True),
        Column("PROGRAM", lambda group: programs[group.client], least=8, rank=5),
        Column(
            "BUNDLES", lambda group: "; ".join(map(str, group.bundles)), False, 12, 1
        ),
        Column("WHY", lambda group: group.reason or "", least=10, rank=3),
    )


def client_table(
    clients: Iterable[ClientStatus], _status: NodeStatus, with_ids: bool = False
) -> Table:
    """The programs that share the node.

    Args:
        clients: the programs.
        with_ids: show what `aiogpu logs --client` wants; a screen has no room for it.
    """

    def name(one: ClientStatus) -> str:
        return name_of(one.id, {one.id: Program(one.name, one.pid)})

    def id_of(one: ClientStatus) -> str:
        return str(one.id) if with_ids and one.id != OWN else ""

    return Table(
        clients,
        Column("PROGRAM", name, least=8),
        Column("PID", lambda one: number(one.pid), is_number=True, rank=1),
        Column("ID", id_of, is_number=True),
        Column("RUN", lambda one: str(one.running), is_number=True),
        Column("WAIT", lambda one: str(one.waiting), is_number=True),
        Column(
            "HOLDS",
            lambda one: terms(one.holds.items()) if one.holds else "",
            False,
            10,
        ),
        Column(
            "WEIGHT",
            lambda one: f"{one.weight:g}" if one.weight != 1 else "",
            True,
            0,
            4,
        ),
        Column("MAY HAVE", lambda one: ", ".join(bounds(one.limits)), least=10, rank=5),
        Column("", lambda one: "has left" if one.has_left else "", rank=3),
    )


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


def device_table(devices: Iterable[DeviceStatus], _status: NodeStatus) -> Table:
    """Devices, and who holds them."""

    def busy(one: DeviceStatus) -> str:
        return "" if one.utilisation is None else f"{one.utilisation} %"

    def holders(one: DeviceStatus) -> str:
        return ", ".join(held_by(one)) or (one.aside or "")

    return Table(
        devices,
        Column("DEVICE", device_name, least=6),
        Column("NAME", lambda one: one.name or one.type or "", least=6, rank=3),
        Column("STATE", lambda one: state(device_state(one))),
        Column("FREE", lambda one: f"{one.free:g}", is_number=True),
        Column("MEMORY", memory, is_number=True, rank=1),
        Column("BUSY", busy, is_number=True, rank=2),
        Column("HELD BY", holders, least=10),
    )


def held_by(device: DeviceStatus, *, with_others: bool = True) -> Iterator[str]:
    """Each holder of a device with its share; then, if wanted, who else is on it."""
    for one in device.holders:
        share = f"{one.share:g}" if one.share else amount(one.memory)
        yield f"{share} {one.task or '(ending)'}"
    for other in (device.others or ()) if with_others else ():
        yield f"not ours: {other.name or 'pid'} {other.pid}"


def shape_table(shapes: Iterable[ShapeStatus], _status: NodeStatus) -> Table:
    """Return what waits, those that ask for the same on one line."""

    def request(shape: ShapeStatus) -> str:
        return terms(shape.request.items()) + (
            f" of {shape.where}" if shape.where else ""
        )

    return Table(
        shapes,
        Column("WAIT", lambda shape: text(str(shape.count), "yellow"), is_number=True),
        Column("ASK FOR", request, least=14),
        Column("FIRST", lambda shape: shape.first, least=8, rank=2),
        Column("SINCE", lambda shape: span(shape.seconds), is_number=True, rank=1),
        Column("WHY", lambda shape: shape.reason, least=16),
    )


def failure_table(failures: Iterable[FailureStatus], status: NodeStatus) -> Table:
    """Return what has failed, the latest first."""
    programs = Programs(status)

    def error(one: FailureStatus) -> Text:
        return text(one.error.rpartition(".")[2], "red")

    return Table(
        failures,
        Column("AGO", lambda one: span(one.seconds), is_number=True),
        Column("TASK", lambda one: str(one.task), is_number=True, rank=3),
        Column("NAME", lambda one: one.name, least=8),
        Column("PROGRAM", lambda one: programs[one.client], least=8, rank=2),
        Column("ERROR", error, least=12),
        Column("SAYS", lambda one: one.message, least=16, rank=1),
    )
