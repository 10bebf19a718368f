"""`aiogpu list`: tasks, actors, placements, workers and more of the running node."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

import click

import aiogpu
from aiogpu.cli import data, joining, tables
from aiogpu.cli.grid import Table
from aiogpu.cli.screen import print_table
from aiogpu.core.records import TaskState, WorkerState
from aiogpu.observe.status import held_tasks, state_of

Status = aiogpu.NodeStatus


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
    data: Callable[[Any, Status], data.Data]
    state: Callable[[Any], str]
    states: Sequence[str]
    names: Callable[[Any], Sequence[str | None]]


KINDS: Final[dict[str, Kind]] = {
    "tasks": Kind(
        entries=lambda status: status.tasks,
        count=lambda status: len(held_tasks(status)) + status.waiting_count,
        table=tables.task_table,
        data=lambda one, _: data.task_data(one),
        state=state_of,
        states=(*(s.value for s in TaskState if s is not TaskState.ENDED), "leased"),
        names=lambda task: (task.name,),
    ),
    "actors": Kind(
        entries=lambda status: status.actors,
        count=lambda status: len(status.actors),
        table=tables.actor_table,
        data=lambda one, _: data.actor_data(one),
        state=lambda actor: str(actor.state),
        states=("pending", "alive", "leaving"),
        names=lambda actor: (actor.name, tables.full_name(actor), actor.class_name),
    ),
    "placements": Kind(
        entries=lambda status: status.placements,
        count=lambda status: len(status.placements),
        table=tables.placement_table,
        data=lambda one, _: data.placement_data(one),
        state=lambda placement: str(placement.state),
        states=("waiting", "ready", "removing"),
        names=lambda placement: (placement.name, placement.id),
    ),
    "workers": Kind(
        entries=lambda status: status.workers,
        count=lambda status: len(status.workers),
        table=lambda them, _: tables.worker_table(them),
        data=lambda one, _: data.worker_data(one),
        state=lambda worker: str(worker.state),
        states=[s.value for s in WorkerState if s is not WorkerState.GONE],
        names=lambda worker: (worker.task,),
    ),
    "gpus": Kind(
        entries=lambda status: status.devices,
        count=lambda status: len(status.devices),
        table=lambda them, _: tables.device_table(them),
        data=lambda one, _: data.device_data(one),
        state=tables.device_state,
        states=("free", "shared", "full", "set aside"),
        names=lambda one: (one.name, one.type, str(one.id), tables.device_name(one)),
    ),
    "clients": Kind(
        entries=tables.shown_clients,
        count=lambda status: len(tables.shown_clients(status)),
        table=lambda them, _: tables.client_table(them, with_ids=True),
        data=lambda one, _: data.client_data(one),
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
@joining.address_option
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
    status = joining.ask(address, lambda node: node.status())
    found = find(kind, status, state, name, limit)
    if as_json:
        entries = [kind.data(one, status) for one in found.entries]
        told = {"version": data.VERSION, "left_out": found.left_out, what: entries}
        click.echo(json.dumps(told, indent=1))
        return
    if found.entries:
        print_table(kind.table(found.entries, status))
    if found.left_out:
        click.echo(f"and {found.left_out} more", err=True)
    if not found.entries:
        told_of = " that fit" if state or name else ""
        click.echo(f"There are no {what}{told_of}.", err=True)
