"""`aiogpu status` and `aiogpu list`: who holds what, what waits and why, at one glance.

As JSON a `NodeStatus` has the schema that `docs/service-json.md` describes. Names and
meanings stay while `VERSION` does; what is new is added, and readers leave alone what
they do not know. All numbers are in base units: bytes, seconds, whole devices. None is
for what is not known, or not there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, Final, NamedTuple

import click

import aiogpu
from aiogpu.cli import connect, tables
from aiogpu.cli.connect import Seconds
from aiogpu.cli.tables import (
    actor_table,
    client_table,
    device_table,
    failure_table,
    placement_table,
    shape_table,
    shown_clients,
    task_table,
)
from aiogpu.cli.terminal import (
    Line,
    Picture,
    Table,
    cut,
    grid,
    is_terminal,
    print_table,
    printable_all,
)
from aiogpu.core.model.text import SHOWN, printable, span
from aiogpu.core.records import TaskState, WorkerState
from aiogpu.observe.status import (
    ActorStatus,
    ClientStatus,
    DeviceStatus,
    FailureStatus,
    Holder,
    OutageStatus,
    PlacementStatus,
    ReservationStatus,
    ShapeStatus,
    TaskStatus,
    WorkerStatus,
    held_tasks,
    overview,
    state_of,
)

VERSION: Final = 1
Data = dict[str, Any]


def status_data(status: aiogpu.types.NodeStatus) -> Data:
    """All of it."""
    return {
        "version": VERSION,
        "aiogpu": aiogpu.__version__,
        "healthy": not problems(status),
        "problems": problems(status),
        "resources": {
            name: {"total": total, "free": status.available.get(name, 0.0)}
            for name, total in status.total.items()
        },
        "devices": [device_data(one) for one in status.devices],
        "workers": [worker_data(one) for one in status.workers],
        "tasks": [task_data(one) for one in status.tasks],
        "waiting": {
            "tasks": status.waiting_count,
            "shapes": status.shape_count,
            "first": [shape_data(one) for one in status.shapes],
        },
        "reservation": reservation_data(status.reservation),
        "clients": [client_data(one) for one in status.clients],
        "actors": [actor_data(one) for one in status.actors],
        "failures": [failure_data(one) for one in status.failures],
        "draining": status.draining,
        "placements": [placement_data(one) for one in status.placements],
        "outages": [outage_data(one) for one in status.outages],
    }


def problems(status: aiogpu.types.NodeStatus) -> list[str]:
    """What is not well: devices that are set aside, and workers that do not start."""
    return [
        *(
            f"{device.kind} {device.id} is set aside: {device.aside}"
            for device in status.devices
            if device.aside is not None
        ),
        *map(str, status.outages),
    ]


def device_data(device: DeviceStatus) -> Data:
    """One device."""
    return {
        "kind": device.kind,
        "id": device.id,
        "uuid": device.uuid,
        "name": device.name,
        "type": device.type,
        "free": device.free,
        "aside": device.aside,
        "unverified": device.is_unverified,
        "memory": device.memory or None,
        "memory_reserved": device.memory_reserved,
        "used": device.used,
        "utilisation": device.utilisation,
        "seen": device.seen,
        "unknown": device.unknown,
        "holders": [holder_data(one) for one in device.holders],
        "others": None
        if device.others is None
        else [
            {"pid": one.pid, "name": one.name or None, "memory": one.memory}
            for one in device.others
        ],
    }


def holder_data(holder: Holder) -> Data:
    """One who holds a part of a device."""
    return {
        "share": holder.share,
        "worker": holder.worker,
        "pid": holder.pid or None,
        "task": holder.task,
        "seconds": holder.seconds,
        "endless": holder.is_endless,
        "settling": holder.is_settling,
        "memory_reserved": holder.memory,
        "used": holder.used,
        "outgrown": holder.has_outgrown,
    }


def worker_data(worker: WorkerStatus) -> Data:
    """One worker process."""
    return {
        "id": worker.id,
        "pid": worker.pid or None,
        "state": worker.state,
        "task": worker.task,
    }


def task_data(task: TaskStatus) -> Data:
    """One task, or a lease."""
    return {
        "id": task.id,
        "name": task.name,
        "state": task.state,
        "request": dict(task.request),
        "worker": task.worker,
        "pid": task.pid or None,
        "client": task.client,
        "lease": task.is_lease,
        "reason": task.reason,
    }


def shape_data(shape: ShapeStatus) -> Data:
    """Tasks that wait and ask for the same."""
    return {
        "request": dict(shape.request),
        "where": shape.where or None,
        "strategy": shape.strategy,
        "variables": list(shape.variables),
        "count": shape.count,
        "first": shape.first,
        "seconds": shape.seconds,
        "client": shape.client,
        "reason": shape.reason,
    }


def reservation_data(kept: ReservationStatus | None) -> Data | None:
    """Return what is kept for one that has waited long."""
    if kept is None:
        return None
    return {
        "task": kept.task,
        "name": kept.name,
        "devices": {kind: list(ids) for kind, ids in kept.devices.items()},
        "amounts": dict(kept.amounts),
        "seconds": kept.seconds,
    }


def client_data(client: ClientStatus) -> Data:
    """One program that shares the node."""
    limits = client.limits
    return {
        "id": client.id,
        "name": client.name or None,
        "pid": client.pid or None,
        "weight": client.weight,
        "running": client.running,
        "waiting": client.waiting,
        "holds": dict(client.holds),
        "limits": {
            "max_waiting": limits.max_waiting,
            "max_share": dict(limits.max_share),
        },
        "left": client.has_left,
    }


def actor_data(actor: ActorStatus) -> Data:
    """One actor."""
    return {
        "id": actor.id,
        "name": actor.name,
        "namespace": actor.namespace,
        "class": actor.class_name,
        "state": actor.state,
        "holders": actor.holders,
        "worker": actor.worker,
        "pid": actor.pid or None,
        "calls": actor.calls,
        "detached": actor.is_detached,
        "client": actor.client,
    }


def failure_data(failure: FailureStatus) -> Data:
    """One failure."""
    return {
        "task": failure.task,
        "name": failure.name,
        "error": failure.error,
        "message": failure.message,
        "seconds": failure.seconds,
        "client": failure.client,
    }


def placement_data(placement: PlacementStatus) -> Data:
    """One placement."""
    return {
        "task": placement.task,
        "name": placement.name,
        "id": placement.id,
        "state": placement.state,
        "strategy": placement.strategy,
        "bundles": [
            {
                "request": dict(bundle.request),
                "free": dict(bundle.free),
                "devices": {kind: list(ids) for kind, ids in bundle.devices.items()},
            }
            for bundle in placement.bundles
        ],
        "members": placement.members,
        "client": placement.client,
        "pid": placement.pid or None,
        "reason": placement.reason,
        "detached": placement.is_detached,
    }


def outage_data(outage: OutageStatus) -> Data:
    """Return why no worker can be started."""
    return {
        "reason": outage.reason,
        "failures": outage.failures,
        "seconds": outage.seconds,
        "retry_in": outage.retry_in,
        "variables": list(outage.variables),
        "joined": outage.is_joined,
    }


def sections(status: aiogpu.types.NodeStatus, width: int) -> Iterator[Line]:
    """Resources, then a table for each kind of thing that there is any of."""
    for text in overview(status):
        yield [(cut(text, width), "")]
    for device in status.devices:
        if device.aside is not None:
            told = printable(f"{device.kind} {device.id} is set aside: {device.aside}")
            yield [(cut(told, width), "bold red")]
    tasks = held_tasks(status)
    clients = shown_clients(status)
    parts: tuple[tuple[str, Table, int], ...] = (
        ("", device_table(status.devices), len(status.devices)),
        ("programs", client_table(clients[:SHOWN]), len(clients)),
        ("running and leased", task_table(tasks[:SHOWN], status), len(tasks)),
        (
            "placements",
            placement_table(status.placements[:SHOWN], status),
            len(status.placements),
        ),
        ("waiting", shape_table(status.shapes[:SHOWN]), status.shape_count),
        ("actors", actor_table(status.actors[:SHOWN], status), len(status.actors)),
        (
            "failed",
            failure_table(status.failures[:SHOWN], status),
            len(status.failures),
        ),
    )
    for title, table, count in parts:
        yield from _section(title, table, count, width)
        if title == "waiting" and status.reservation is not None:
            yield from _kept(status, width)


def _section(title: str, table: Table, count: int, width: int) -> Iterator[Line]:
    if not table.rows:
        return
    yield []
    if title:
        yield [(title, "bold underline")]
    yield from islice(grid(table, width), len(table.rows) + 1)
    if count > len(table.rows):
        yield [(f"and {count - len(table.rows)} more", "dim")]


def _kept(status: aiogpu.types.NodeStatus, width: int) -> Iterator[Line]:
    kept = status.reservation
    assert kept is not None
    when = "" if kept.seconds is None else f", for {span(kept.seconds)} at most"
    told = f"kept for {kept.name} (task {kept.task}): {kept}{when}"
    yield [(cut(printable(told), width), "cyan")]


UNHEALTHY: Final = 3
"""Exit code of `--check` where a device is set aside."""


@click.command()
@connect.address_option
@click.option("--json", "as_json", is_flag=True, help="Tell programs, not people.")
@click.option("--check", is_flag=True, help="Exit with 3 if a device is set aside.")
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option(
    "--interval",
    type=Seconds(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two pictures of --watch.",
)
def status(
    address: str, as_json: bool, check: bool, watch: bool, interval: float
) -> int:
    """Show who holds what on the running node, what waits and why.

    In a terminal as tables, elsewhere as plain lines. --json is one object, as
    docs/service-json.md describes it; with --watch one on each line.

    \b
    Examples:
      aiogpu status
      aiogpu status --json | jq .waiting.tasks
      aiogpu status --check > /dev/null || echo "a GPU is ill"

    \b
    Exit codes:
      0  the node has answered
      1  no node runs
      2  bad input
      3  --check: a device is set aside
    """  # noqa: D301 - click's mark for lines to be left as they are
    seen = aiogpu.run(_look(address, as_json, interval if watch else None))
    return UNHEALTHY if check and problems(seen) else 0


async def _look(
    address: str, as_json: bool, interval: float | None
) -> aiogpu.types.NodeStatus:
    """Show it once, or until somebody has seen enough."""
    async with connect.joined(address) as node:
        seen = await node.status()
        if interval is None:
            _show_once(seen, as_json)
            return seen
        with Picture(is_live=is_terminal() and not as_json) as picture:
            while True:
                if as_json:
                    click.echo(json.dumps(status_data(seen)))
                elif picture.is_live:
                    picture.draw(sections(seen, picture.width))
                else:
                    click.echo(plain_report(seen) + "\n")
                await asyncio.sleep(interval)
                seen = await node.status()


def _show_once(seen: aiogpu.types.NodeStatus, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(status_data(seen), indent=1))
    elif is_terminal():
        with Picture(is_live=False) as picture:
            picture.draw(sections(seen, picture.width))
    else:
        click.echo(plain_report(seen))


def plain_report(seen: aiogpu.types.NodeStatus) -> str:
    """Return what `print(status)` shows, such that it can do nothing to a terminal."""
    return str(printable_all(seen))


Status = aiogpu.types.NodeStatus


class Kind(NamedTuple):
    """Something that can be listed.

    Attributes:
        entries: picks them from a picture of the node.
        count: how many there are, listed or not.
        table: shows them.
        data: tells a program of one.
        state: its state.
        states: all that there are.
        names: the names by which it may be meant.
    """

    entries: Callable[[Status], Sequence[Any]]
    count: Callable[[Status], int]
    table: Callable[[Sequence[Any], Status], Table]
    data: Callable[[Any, Status], Data]
    state: Callable[[Any], str]
    states: Sequence[str]
    names: Callable[[Any], Sequence[str | None]]


KINDS: Final[dict[str, Kind]] = {
    "tasks": Kind(
        entries=lambda status: status.tasks,
        count=lambda status: len(held_tasks(status)) + status.waiting_count,
        table=tables.task_table,
        data=lambda one, _: task_data(one),
        state=state_of,
        states=(*(s.value for s in TaskState if s is not TaskState.ENDED), "leased"),
        names=lambda task: (task.name,),
    ),
    "actors": Kind(
        entries=lambda status: status.actors,
        count=lambda status: len(status.actors),
        table=tables.actor_table,
        data=lambda one, _: actor_data(one),
        state=lambda actor: str(actor.state),
        states=("pending", "alive", "leaving"),
        names=lambda actor: (actor.name, tables.full_name(actor), actor.class_name),
    ),
    "placements": Kind(
        entries=lambda status: status.placements,
        count=lambda status: len(status.placements),
        table=tables.placement_table,
        data=lambda one, _: placement_data(one),
        state=lambda placement: str(placement.state),
        states=("waiting", "ready", "removing"),
        names=lambda placement: (placement.name, placement.id),
    ),
    "workers": Kind(
        entries=lambda status: status.workers,
        count=lambda status: len(status.workers),
        table=lambda them, _: tables.worker_table(them),
        data=lambda one, _: worker_data(one),
        state=lambda worker: str(worker.state),
        states=[s.value for s in WorkerState if s is not WorkerState.GONE],
        names=lambda worker: (worker.task,),
    ),
    "gpus": Kind(
        entries=lambda status: status.devices,
        count=lambda status: len(status.devices),
        table=lambda them, _: tables.device_table(them),
        data=lambda one, _: device_data(one),
        state=tables.device_state,
        states=("free", "shared", "full", "set aside"),
        names=lambda one: (one.name, one.type, str(one.id), tables.device_name(one)),
    ),
    "clients": Kind(
        entries=tables.shown_clients,
        count=lambda status: len(tables.shown_clients(status)),
        table=lambda them, _: tables.client_table(them, with_ids=True),
        data=lambda one, _: client_data(one),
        state=lambda one: "left" if one.has_left else "there",
        states=("there", "left"),
        names=lambda one: (one.name, str(one.pid)),
    ),
}
"""What there is to list: "gpus" are devices of any kind, "clients" the programs."""


class Found(NamedTuple):
    """What a question has found.

    Attributes:
        entries: those that are shown.
        left_out: how many more there are that would have fitted, None if unknown:
            of the tasks that wait, a picture has the first 100.
    """

    entries: Sequence[Any]
    left_out: int


def find(
    kind: Kind, status: Status, state: str | None, name: str | None, limit: int
) -> Found:
    """Those in that state, of a name like that; no more than `limit`."""
    entries = [
        one
        for one in kind.entries(status)
        if (state is None or kind.state(one) == state)
        and (name is None or any(_is_like(each, name) for each in kind.names(one)))
    ]
    there = len(entries)
    if state is None and name is None:
        there = kind.count(status)
    shown = entries[:limit]
    return Found(shown, there - len(shown))


def _is_like(name: str | None, pattern: str) -> bool:
    return name is not None and fnmatchcase(name, pattern)


@click.command("list")
@click.argument("what", type=click.Choice(list(KINDS)))
@connect.address_option
@click.option("--json", "as_json", is_flag=True, help="Tell programs, not people.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="How many at most.",
)
@click.option("--state", metavar="STATE", help='Only those in that state: "waiting".')
@click.option("--name", metavar="PATTERN", help='Only those named so: "train*".')
def list_command(
    what: str,
    address: str,
    as_json: bool,
    limit: int,
    state: str | None,
    name: str | None,
) -> None:
    """List what the running node has: one on each line.

    Of tasks that wait, the first 100 are known one by one; `aiogpu status` tells of
    all of them. "gpus" are devices of any kind, "clients" the programs that share it.

    \b
    Examples:
      aiogpu list tasks --state waiting
      aiogpu list actors --name 'Model*' --json
      aiogpu list gpus --state free

    \b
    Exit codes:
      0  the node has answered, whether or not there are any
      1  no node runs
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    kind = KINDS[what]
    if state is not None and state not in kind.states:
        raise click.BadParameter(
            f"{what} are never {state!r}. There are: {', '.join(kind.states)}.",
            param_hint="'--state'",
        )
    status = connect.ask(address, lambda node: node.status())
    found = find(kind, status, state, name, limit)
    if as_json:
        entries = [kind.data(one, status) for one in found.entries]
        told = {"version": VERSION, "left_out": found.left_out, what: entries}
        click.echo(json.dumps(told, indent=1))
        return
    if found.entries:
        print_table(kind.table(found.entries, status))
    if found.left_out:
        click.echo(f"and {found.left_out} more", err=True)
    if not found.entries:
        told_of = " that fit" if state or name else ""
        click.echo(f"There are no {what}{told_of}.", err=True)
