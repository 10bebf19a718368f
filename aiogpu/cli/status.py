"""`aiogpu status`, `list` and `why`: who holds what, what waits and why.

The docstrings of the JSON objects become `docs/service-json.md`. Names and meanings
stay while `VERSION` does; new names are added, and readers ignore names that they do
not know. All numbers are in base units: bytes, seconds, whole devices.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, NamedTuple, TypedDict, cast

import click
from rich.console import Group, RenderableType
from rich.text import Text

import aiogpu
from aiogpu.cli import connect, tables
from aiogpu.cli.connect import Seconds, Whole
from aiogpu.cli.nodes import SeenNode, find_nodes
from aiogpu.cli.tables import (
    Table,
    is_terminal,
    live,
    plain,
    printable_all,
    show,
    text,
)
from aiogpu.core.model.text import SHOWN, listing, printable
from aiogpu.core.records import TaskState, WorkerState
from aiogpu.observe.status import (
    ClientStatus,
    DeviceStatus,
    EndedTask,
    Holder,
    NodeStatus,
    OtherProcess,
    TaskStatus,
    held_tasks,
    overview,
    reservation_line,
    shown_clients,
    state_of,
)
from aiogpu.observe.why import end_in_brief

VERSION: Final = 1
Data = dict[str, Any]


class StatusData(TypedDict):
    """What `aiogpu status --json` prints of one node.

    Attributes:
        version: 1, the version of this format.
        aiogpu: the version of the command that prints it.
        healthy: false if a device is set aside, or no worker can be started.
        problems: what is not well, each a sentence.
        resources: `total` and `free` of each resource.
        waiting: `tasks`: how many wait; `shapes`: how many different requests they
            make; `first`: the first 100 of these requests.
    """

    version: int
    aiogpu: str
    healthy: bool
    problems: list[str]
    resources: dict[str, Data]
    devices: list[Data]
    workers: list[Data]
    tasks: list[Data]
    waiting: Data
    reservation: Data | None
    clients: list[Data]
    actors: list[Data]
    failures: list[Data]
    draining: float | None
    placements: list[Data]
    outages: list[Data]


class NodeData(TypedDict):
    """One of several nodes, and an entry of `aiogpu list nodes --json`.

    Attributes:
        address: its socket.
        pid: its process.
        program: the name of its program.
        seconds: how long it has been there.
        problem: why it has not answered.
        status: what `aiogpu status --json` prints of it; null if it has not answered.
    """

    address: str
    pid: int | None
    program: str | None
    seconds: float
    problem: str | None
    status: StatusData | None


class NodesData(TypedDict):
    """What `aiogpu status --json` prints if there are several nodes and none was named.

    Attributes:
        version: 1, the version of this format.
        aiogpu: the version of the command that prints it.
        healthy: whether all of them are.
        problems: what is not well, each a sentence.
        nodes: the nodes.
    """

    version: int
    aiogpu: str
    healthy: bool
    problems: list[str]
    nodes: list[NodeData]


def status_data(status: NodeStatus) -> StatusData:
    """Return a status as the JSON object of `aiogpu status --json`."""
    return {
        "version": VERSION,
        "aiogpu": aiogpu.__version__,
        "healthy": not problems(status),
        "problems": problems(status),
        "resources": {
            name: {"total": total, "free": status.available.get(name, 0.0)}
            for name, total in status.total.items()
        },
        "devices": data_of(status.devices),
        "workers": data_of(status.workers),
        "tasks": data_of(status.tasks),
        "waiting": {
            "tasks": status.waiting_count,
            "shapes": status.shape_count,
            "first": data_of(status.shapes),
        },
        "reservation": data_of(status.reservation),
        "clients": data_of(status.clients),
        "actors": data_of(status.actors),
        "failures": data_of(status.failures),
        "draining": status.draining,
        "placements": data_of(status.placements),
        "outages": data_of(status.outages),
    }


class Nodes(tuple[SeenNode, ...]):
    """Several nodes, of which none was named."""

    __slots__ = ()


def nodes_data(nodes: Nodes) -> NodesData:
    """Return several nodes as the JSON object of `aiogpu status --json`."""
    return {
        "version": VERSION,
        "aiogpu": aiogpu.__version__,
        "healthy": not problems(nodes),
        "problems": problems(nodes),
        "nodes": [node_data(one) for one in nodes],
    }


def node_data(node: SeenNode) -> NodeData:
    """Return one of several nodes as JSON has it."""
    found, status = node.found, node.status
    return {
        "address": found.address,
        "pid": found.pid or None,
        "program": found.program or None,
        "seconds": found.seconds,
        "problem": node.problem or None,
        "status": None if status is None else status_data(status),
    }


def problems(seen: NodeStatus | Nodes) -> list[str]:
    """Problems: devices that are set aside, and workers that cannot be started."""
    if isinstance(seen, Nodes):
        return [
            f"{one.found.program} (pid {one.found.pid}): {problem}"
            for one in seen
            if one.status is not None
            for problem in problems(one.status)
        ]
    return [*_set_aside(seen), *map(str, seen.outages)]


def _set_aside(status: NodeStatus) -> Iterator[str]:
    for device in status.devices:
        if device.aside is not None:
            yield f"{device.kind} {device.id} is set aside: {device.aside}"


NAMES: Final = {"class_name": "class", "is_behind": "program_behind"}
"""Fields with another name in JSON; all others lose `is_` and `has_`."""

ABSENT: Final[frozenset[object]] = frozenset(
    {
        *("pid", "where"),
        *((ClientStatus, "name"), (DeviceStatus, "memory"), (OtherProcess, "name")),
    }
)
"""Fields that are null instead of 0 or empty: unknown, or absent."""


def data_of(thing: Any) -> Any:
    """A part of a `NodeStatus` as JSON has it."""
    if isinstance(thing, Mapping):
        return {name: data_of(value) for name, value in thing.items()}
    if isinstance(thing, tuple):
        return [data_of(one) for one in thing]
    if not is_dataclass(thing):
        return thing
    data: Data = {}
    for field in fields(thing):
        value = getattr(thing, field.name)
        if not value and is_nullable(type(thing), field.name):
            value = None
        data[json_name(type(thing), field.name)] = data_of(value)
    return data


def is_nullable(kind: type, name: str) -> bool:
    """Return whether 0 or "" in a field is null in JSON."""
    return name in ABSENT or (kind, name) in ABSENT


def json_name(kind: type, name: str) -> str:
    """Return the name of a field in JSON."""
    if name == "memory" and kind is Holder:
        return "memory_reserved"
    return NAMES.get(name, name.removeprefix("is_").removeprefix("has_"))


def sections(status: NodeStatus | Nodes) -> Iterator[RenderableType]:
    """Resources, then a table for each kind of thing that there is any of.

    Of several nodes, a line of each.
    """
    if isinstance(status, Nodes):
        yield tables.node_table(status)
        yield text(connect.how_to_choose([one.found for one in status]), "dim")
        return
    for line in overview(status):
        yield text(line)
    for told in _set_aside(status):
        yield text(told, "bold red")
    for title, table, count in (
        ("", tables.device_table(status.devices, status), 0),
        ("programs", tables.client_table(shown_clients(status), status), 0),
        ("running and leased", tables.task_table(held_tasks(status), status), 0),
        ("placements", tables.placement_table(status.placements, status), 0),
        ("waiting", tables.shape_table(status.shapes, status), status.shape_count),
        ("actors", tables.actor_table(status.actors, status), 0),
        ("failed", tables.failure_table(status.failures, status), 0),
    ):
        if table.rows:
            yield Text()
            if title:
                yield text(title, "bold underline")
            yield table.part(0, SHOWN + 1)
            left_out = max(count, len(table.rows)) - SHOWN
            if left_out > 0:
                yield text(f"and {left_out} more", "dim")
        if title == "waiting":
            for line in reservation_line(status):
                yield text(line, "cyan")


UNHEALTHY: Final = 3
"""Exit code of `--check` where a device is set aside."""


@click.command()
@connect.address_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--check", is_flag=True, help="Exit with 3 if a device is set aside.")
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option(
    "--interval",
    type=Seconds(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two updates of --watch.",
)
def status(
    address: str, as_json: bool, check: bool, watch: bool, interval: float
) -> int:
    """Show who holds what on the running node, what waits and why.

    The node is that of `aiogpu start`, or the one inside a program of this user. Where
    there are several and none is named, each has one line.

    Tables in a terminal, plain lines elsewhere. --json prints one object, see
    docs/service-json.md; with --watch one object on each line.

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
    found = aiogpu.run(_look(address, as_json, interval if watch else None))
    return UNHEALTHY if check and found else 0


async def _look(address: str, as_json: bool, interval: float | None) -> list[str]:
    """Show one node, or a line of each of several; return the problems."""
    try:
        async with connect.joined(address) as node:
            return await _show_status(node.status, as_json, interval)
    except connect.SeveralNodesError as several:
        look = partial(all_nodes, several.pid)
        return await _show_status(look, as_json, interval)


async def all_nodes(pid: int | None = None) -> Nodes:
    """All nodes of this user, or of one process, with what they say of themselves."""
    return Nodes(await connect.look_at_all(find_nodes(pid).nodes))


async def _show_status(
    look: Callable[[], Awaitable[NodeStatus | Nodes]],
    as_json: bool,
    interval: float | None,
) -> list[str]:
    """Show it once, or until Ctrl-C."""
    seen = await look()
    is_drawn = is_terminal() and not as_json
    if interval is None and is_drawn:
        show(*sections(seen))
    elif interval is None:
        click.echo(_told(seen, as_json, indent=1))
    if interval is None:
        return problems(seen)
    screen = live()
    with screen if is_drawn else nullcontext():
        while True:
            if is_drawn:
                screen.update(Group(*sections(seen)), refresh=True)
            else:
                click.echo(_told(seen, as_json) + "\n" * (not as_json))
            await asyncio.sleep(interval)
            seen = await look()


def _told(seen: NodeStatus | Nodes, as_json: bool, indent: int | None = None) -> str:
    """A picture as it is printed if there is no terminal."""
    if as_json:
        data = nodes_data(seen) if isinstance(seen, Nodes) else status_data(seen)
        return json.dumps(data, indent=indent)
    if isinstance(seen, Nodes):
        return "\n".join(plain(Group(*sections(seen))))
    return plain_report(seen)


def plain_report(seen: NodeStatus) -> str:
    """Return the text of `print(status)` without control characters."""
    return str(printable_all(seen))


class Kind(NamedTuple):
    """A kind of thing that can be listed.

    Attributes:
        entries: finds them in a status, or among all nodes.
        table: shows them.
        states: every state that one of them may have.
        names: the names that `--name` compares.
        state: the state of one of them.
        total: how many there are, listed or not; None if all are listed.
    """

    entries: Callable[[Any], Sequence[Any]]
    table: Callable[[Sequence[Any], Any], Table]
    states: Sequence[str]
    names: Callable[[Any], Sequence[str | None]]
    state: Callable[[Any], str] = lambda entry: str(entry.state)
    total: Callable[[NodeStatus], int] | None = None


ENDED: Final = ("finished", "failed", "cancelled")
"""States of tasks that have ended, which the node keeps for a while."""


KINDS: Final[dict[str, Kind]] = {
    "tasks": Kind(
        lambda status: status.tasks,
        tables.task_table,
        (*(s.value for s in TaskState if s is not TaskState.ENDED), "leased"),
        lambda task: (task.name,),
        state=state_of,
        total=lambda status: len(held_tasks(status)) + status.waiting_count,
    ),
    "actors": Kind(
        lambda status: status.actors,
        tables.actor_table,
        ("pending", "alive", "leaving"),
        lambda actor: (actor.name, tables.full_name(actor), actor.class_name),
    ),
    "placements": Kind(
        lambda status: status.placements,
        tables.placement_table,
        ("waiting", "ready", "removing"),
        lambda placement: (placement.name, placement.id),
    ),
    "workers": Kind(
        lambda status: status.workers,
        tables.worker_table,
        [s.value for s in WorkerState if s is not WorkerState.GONE],
        lambda worker: (worker.task,),
    ),
    "gpus": Kind(
        lambda status: status.devices,
        tables.device_table,
        ("free", "shared", "full", "set aside"),
        lambda one: (one.name, one.type, str(one.id), tables.device_name(one)),
        state=tables.device_state,
    ),
    "clients": Kind(
        shown_clients,
        partial(tables.client_table, with_ids=True),
        ("there", "left"),
        lambda one: (one.name, str(one.pid)),
        state=lambda one: "left" if one.has_left else "there",
    ),
    "nodes": Kind(
        tuple,
        tables.node_table,
        ("there", "silent"),
        lambda one: (one.found.program, str(one.found.pid)),
        state=lambda one: "silent" if one.status is None else "there",
    ),
}
"""What can be listed."""


@click.command("list")
@click.argument("what", type=click.Choice(list(KINDS)))
@connect.address_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option(
    "--limit",
    type=Whole(min=1),
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
    """List tasks, actors and so on of the running node, one on each line.

    Of the waiting tasks the first 100 are listed; `aiogpu status` counts all of them.
    Tasks that have ended are listed if that state is asked for: the node keeps the
    last 10 000, fewer if their errors are long. "gpus" are devices of any kind,
    "clients" the programs that share the node. "nodes" are all nodes of this user, with
    what each has to do.

    \b
    States:
      tasks       waiting, starting, queued, running, blocked, delayed, stopping,
                  expecting, leased; finished, failed, cancelled
      actors      pending, alive, leaving
      placements  waiting, ready, removing
      workers     starting, idle, busy, ending, settling
      gpus        free, shared, full, set aside
      clients     there, left
      nodes       there, silent

    \b
    Examples:
      aiogpu list tasks --state waiting
      aiogpu list tasks --state failed --name 'train*'
      aiogpu list actors --name 'Model*' --json
      aiogpu list gpus --state free

    \b
    Exit codes:
      0  the node has answered, even if there are none
      1  no node runs
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    kind = KINDS[what]
    states = [*kind.states, *(ENDED if what == "tasks" else ())]
    if state is not None and state not in states:
        raise click.BadParameter(
            f"{what} are never {state!r}. There are: {', '.join(states)}.",
            param_hint="'--state'",
        )
    status: NodeStatus | Nodes
    if what == "nodes":
        connect.check_unnamed(f"`aiogpu list {what}` shows all of them")
        status = aiogpu.run(all_nodes())
    elif state in ENDED:
        status, ended = connect.ask(address, _with_ended)
        kind = Kind(lambda _: ended, tables.ended_table, ENDED, lambda one: (one.name,))
    else:
        status = connect.ask(address, lambda node: node.status())
    entries = [
        one
        for one in kind.entries(status)
        if (state is None or kind.state(one) == state)
        and (
            name is None
            or any(it is not None and fnmatchcase(it, name) for it in kind.names(one))
        )
    ]
    shown, count = entries[:limit], len(entries)
    if kind.total is not None and state is None and name is None:
        count = kind.total(cast("NodeStatus", status))
    left_out = count - len(shown)
    if as_json:
        data = [node_data(one) if what == "nodes" else data_of(one) for one in shown]
        told = {"version": VERSION, "left_out": left_out, what: data}
        click.echo(json.dumps(told, indent=1))
        return
    if shown:
        show(kind.table(shown, status))
    if left_out:
        click.echo(f"and {left_out} more", err=True)
    if not shown:
        told_of = " that fit" if state or name else ""
        click.echo(f"There are no {what}{told_of}.", err=True)


async def _with_ended(
    node: connect.Node,
) -> tuple[NodeStatus, tuple[EndedTask, ...]]:
    return await node.status(), await node.ended()


COMPLETED: Final = 1.0
"""Seconds that a node has to answer when a shell completes a word."""


def known_tasks(
    context: click.Context, _argument: click.Parameter, begun: str
) -> list[str]:
    """Tasks and actors of the running node that begin so; none without a node."""
    address = context.params.get("address") or connect.ANY

    async def names(node: connect.Node) -> list[str]:
        status = await node.status()
        actors = [one.name for one in status.actors if one.name is not None]
        tasks = [told for one in status.tasks for told in (str(one.id), one.name)]
        return sorted({*actors, *tasks})

    try:
        known = connect.ask(address, names, COMPLETED)
    except (click.ClickException, aiogpu.AiogpuError, OSError):
        return []  # a shell has no place to show why
    return [name for name in known if name.startswith(begun) and name.isprintable()]


@click.command()
@click.argument("task", metavar="TASK", shell_complete=known_tasks)
@connect.address_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def why(task: str, address: str, as_json: bool) -> None:
    """Say why TASK waits, who holds what it needs, and whose turn it is.

    For a task that has ended it says how, when and where, with the traceback. TASK is a
    number, as `aiogpu status` shows it, or the name of a task or an actor. If several
    tasks that wait or run have that name, they are listed, each with its reason; if
    none has, the last task of that name that has ended is shown, or the last failed
    call of an actor, such as Model.predict.

    \b
    Examples:
      aiogpu why 12
      aiogpu why train
      aiogpu why 12 --json | jq .tasks[0].ended.error

    \b
    Exit codes:
      0  the reason was printed
      1  no node runs, or it has no such task
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    if not task:
        raise click.BadParameter("is empty.", param_hint="TASK")
    connect.ask(address, lambda node: _explain(node, task, as_json))


async def _explain(node: connect.Node, named: str, as_json: bool) -> None:
    status, told = None, list[aiogpu.types.Why]()
    if is_number(named):
        found = [int(named)]
    else:
        status = await node.status()
        found = [one.id for one in tasks_named(status, named)]
        if not found:
            told = [await _why_ended(node, status, named)]
    if as_json or told or len(found) == 1:
        told = told or [await node.why(number) for number in found]
        if as_json:
            data = {"version": VERSION, "tasks": data_of(tuple(told))}
            click.echo(json.dumps(data, indent=1))
        else:
            click.echo(in_lines(told[0]))
            if told[0].ended is None and told[0].task:
                for call in (await node.failed_calls(told[0].task))[:1]:
                    click.echo(_failed_call(call))
    elif status is not None:
        show(tables.task_table(tasks_named(status, named), status))


async def _why_ended(
    node: connect.Node, status: NodeStatus, named: str
) -> aiogpu.types.Why:
    """Tell of the last ended task or failed call of a name.

    Raises:
        ClickException: there is none.
    """
    ended = next(ended_named(await node.ended(), named), None)
    if ended is None:
        raise nothing_named(status, named)
    if not ended.is_call:
        return await node.why(ended.task)
    calls = await node.failed_calls(ended.task)
    call = next((one for one in calls if one.name == ended.name), ended)
    return aiogpu.types.Why(call.name, call.task, "ended", call.seconds, ended=call)


def ended_named(ended: Iterable[EndedTask], name: str) -> Iterator[EndedTask]:
    """What has ended and has a name.

    An actor "Model 'serve'" has that of its class as well as its own, and so has its
    call "Model 'serve'.predict".
    """
    end = f" {name!r}"
    for one in ended:
        is_its = one.name == name or one.name.endswith(end)
        if is_its or (one.is_call and name in _short_names(one)):
            yield one


def _short_names(call: EndedTask) -> list[str]:
    """Names of a call by its actor's class, and by its actor's own name if any."""
    actor, _, method = call.name.rpartition(".")
    kind, _, own = actor.partition(" ")
    return [f"{one}.{method}" for one in (kind, own[1:-1]) if one]


def _failed_call(call: EndedTask) -> str:
    """Tell of the last call of an actor that has failed, in one line."""
    error = f"{call.error}: {call.message}" if call.message else call.error
    method = _short_names(call)[-1]
    return printable(
        f"  {call.name} {end_in_brief(call)}: {error}; `aiogpu why {method}` shows the "
        f"traceback"
    )


def in_lines(told: aiogpu.types.Why) -> str:
    """Return it in words, without control characters; a traceback has its lines."""
    trace = "" if told.ended is None else told.ended.traceback
    words = str(printable_all(told if not trace else _without_trace(told)))
    lines = (f"  {printable(line)}" for line in trace.rstrip().splitlines())
    return "\n".join((words, *lines))


def _without_trace(told: aiogpu.types.Why) -> aiogpu.types.Why:
    assert told.ended is not None, told
    return replace(told, ended=replace(told.ended, traceback=""))


def is_number(named: str) -> bool:
    """Return whether what a user has named is a task's number."""
    return named.isdecimal() and named.isascii()


def tasks_named(status: NodeStatus, name: str) -> list[TaskStatus]:
    """The tasks that wait or run, and the actors, of a name."""
    named = {
        one.id for one in status.actors if name in (one.name, tables.full_name(one))
    }
    return [one for one in status.tasks if one.name == name or one.id in named]


def nothing_named(status: NodeStatus, name: str) -> click.ClickException:
    """The error where nothing has that name."""
    known = "the first 100 of those that wait are known by name"
    left = status.waiting_count > len(status.waiting)
    told = f"{f'; {known}' if left else ''}. `aiogpu list tasks` shows what there is."
    owner = name.rpartition(".")[0]
    called = [
        str(one.id)
        for one in status.actors
        if owner and owner in (one.class_name, one.name, tables.full_name(one))
    ]
    if called:
        others = f" (others: {listing(called[1:], len(called) - 1)})"
        told = (
            f". Calls of actors are not listed one by one, unless they have failed; "
            f"`aiogpu why {called[0]}` tells of the actor"
            f"{others if called[1:] else ''}."
        )
    return click.ClickException(
        f"no task and no actor named {printable(name)!r} waits or runs{told}"
    )
