"""`aiogpu status`, `list` and `why`: which tasks hold or wait for what, and why.

`docs/service-json.md` is generated from the docstrings of the JSON objects. Names and
meanings stay the same within a `VERSION`; new names may be added, and readers ignore
unknown names. All numbers are in base units: bytes, seconds, whole devices.
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
from aiogpu.cli import connect
from aiogpu.cli.connect import Seconds, Whole
from aiogpu.cli.nodes import SeenNode, find_nodes
from aiogpu.cli.terminal import echo, is_terminal
from aiogpu.cli.views import tables
from aiogpu.cli.views.tables import (
    Table,
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
    unended_lines,
)
from aiogpu.observe.why import end_in_brief

VERSION: Final = 1
Data = dict[str, Any]


class StatusData(TypedDict):
    """The output of `aiogpu status --json` for one node.

    Attributes:
        version: 1, the version of this format.
        aiogpu: the version of the command.
        healthy: false if a device is set aside, no worker can be started, or a killed
            process has not ended.
        problems: a sentence for each problem.
        resources: `total` and `free` of each resource.
        waiting: `tasks`: number of waiting tasks; `shapes`: number of their different
            requests; `first`: the first 100 of these requests.
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
    unended: list[Data]
    ended_idle: list[Data]


class NodeData(TypedDict):
    """An entry for one of several nodes, also in `aiogpu list nodes --json`.

    Attributes:
        address: the node's socket.
        pid: the node's process.
        program: the name of the node's program.
        seconds: the time since the node was opened.
        problem: why the node has not answered.
        status: the output of `aiogpu status --json` for the node; null if the node has
            not answered.
    """

    address: str
    pid: int | None
    program: str | None
    seconds: float
    problem: str | None
    status: StatusData | None


class NodesData(TypedDict):
    """The output of `aiogpu status --json` if there are several nodes and no address.

    Attributes:
        version: 1, the version of this format.
        aiogpu: the version of the command.
        healthy: true if all nodes are healthy.
        problems: a sentence for each problem.
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
        "unended": data_of(status.unended),
        "ended_idle": data_of(status.ended_idle),
    }


class Nodes(tuple[SeenNode, ...]):
    """Several nodes, if no option names one of them."""

    __slots__ = ()


def nodes_data(nodes: Nodes) -> NodesData:
    """Return several nodes as the JSON object of `aiogpu status --json`."""
    return {
        "version": VERSION,
        "aiogpu": aiogpu.__version__,
        "healthy": not problems(nodes),
        "problems": problems(nodes),
        "nodes": [node_data(node) for node in nodes],
    }


def node_data(node: SeenNode) -> NodeData:
    """Return the JSON entry for one of several nodes."""
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
    """Return a sentence for each problem.

    These are devices set aside, failures to start workers, and killed workers of which
    a process has not ended.
    """
    if isinstance(seen, Nodes):
        return [
            f"{node.found.program} (pid {node.found.pid}): {problem}"
            for node in seen
            if node.status is not None
            for problem in problems(node.status)
        ]
    return [*_set_aside(seen), *map(str, seen.outages), *unended_lines(seen)]


def _set_aside(status: NodeStatus) -> Iterator[str]:
    for device in status.devices:
        if device.aside is not None:
            yield f"{device.kind} {device.id} is set aside: {device.aside}"


NAMES: Final = {"class_name": "class", "is_behind": "program_behind"}
"""Fields with another name in JSON. Other fields lose the prefix `is_` or `has_`."""

ABSENT: Final[frozenset[object]] = frozenset(
    {
        "pid",
        "where",
        (Holder, "unended"),
        (ClientStatus, "name"),
        (DeviceStatus, "memory"),
        (OtherProcess, "name"),
    }
)
"""Fields that are null in JSON instead of 0 or empty: unknown or absent values."""


def data_of(thing: Any) -> Any:
    """Return a part of a `NodeStatus` as JSON data."""
    if isinstance(thing, Mapping):
        return {name: data_of(value) for name, value in thing.items()}
    if isinstance(thing, tuple):
        return [data_of(item) for item in thing]
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
    """Yield the resources, then each table that is not empty.

    For several nodes, yield one table with a line for each.
    """
    if isinstance(status, Nodes):
        yield tables.node_table(status)
        yield text(connect.how_to_choose([node.found for node in status]), "dim")
        return
    for line in overview(status):
        yield text(line)
    for problem in _set_aside(status):
        yield text(problem, "bold red")
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
"""Exit code of `--check` if the node is not healthy."""


@click.command()
@connect.address_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option(
    "--check",
    is_flag=True,
    help="Exit with 3 if a device is set aside, no worker can be started, or a killed "
    "process has not ended.",
)
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
    """Show which tasks hold or wait for what on the running node, and why.

    The node is the one of `aiogpu start`, or the one inside a program of this user. If
    there are several nodes and no option names one, each is shown on one line.

    A terminal shows tables; other outputs get plain lines. --json prints one object,
    see docs/service-json.md; with --watch one object per line.

    \b
    Examples:
      aiogpu status
      aiogpu status --json | jq .waiting.tasks
      aiogpu status --check > /dev/null || echo "a GPU has failed"

    \b
    Exit codes:
      0  the node has answered
      1  no node runs
      2  bad input
      3  --check: a device is set aside, no worker can be started, or a killed
         process has not ended
    """  # noqa: D301 - click's mark for lines to be left as they are
    found_problems = aiogpu.run(_look(address, as_json, interval if watch else None))
    return UNHEALTHY if check and found_problems else 0


async def _look(address: str, as_json: bool, interval: float | None) -> list[str]:
    """Show one node, or a line for each of several; return the problems."""
    try:
        async with connect.joined(address) as node:
            return await _show_status(node.status, as_json, interval)
    except connect.SeveralNodesError as several:
        look = partial(all_nodes, several.pid)
        return await _show_status(look, as_json, interval)


async def all_nodes(pid: int | None = None) -> Nodes:
    """Return all nodes of this user, or of one process, with their status."""
    return Nodes(await connect.status_of_all(find_nodes(pid).nodes))


async def _show_status(
    look: Callable[[], Awaitable[NodeStatus | Nodes]],
    as_json: bool,
    interval: float | None,
) -> list[str]:
    """Show a status once, or repeatedly until Ctrl-C; return the problems."""
    seen = await look()
    is_drawn = is_terminal() and not as_json
    if interval is None and is_drawn:
        show(*sections(seen))
    elif interval is None:
        echo(_as_text(seen, as_json, indent=1))
    if interval is None:
        return problems(seen)
    screen = live()
    with screen if is_drawn else nullcontext():
        while True:
            if is_drawn:
                screen.update(Group(*sections(seen)), refresh=True)
            else:
                echo(_as_text(seen, as_json) + "\n" * (not as_json))
            await asyncio.sleep(interval)
            seen = await look()


def _as_text(seen: NodeStatus | Nodes, as_json: bool, indent: int | None = None) -> str:
    """Return a status as JSON or plain text, for output that is not a terminal."""
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
    """A kind of entries for `aiogpu list`.

    Attributes:
        entries: returns the entries of a status, or of all nodes.
        table: makes a table of entries.
        states: all states of entries.
        names: returns the names of an entry, for `--name`.
        state: returns the state of an entry.
        total: returns the number of all entries; None if a status has all of them.
    """

    entries: Callable[[Any], Sequence[Any]]
    table: Callable[[Sequence[Any], Any], Table]
    states: Sequence[str]
    names: Callable[[Any], Sequence[str | None]]
    state: Callable[[Any], str] = lambda entry: str(entry.state)
    total: Callable[[NodeStatus], int] | None = None


ENDED: Final = ("finished", "failed", "cancelled")
"""States of ended tasks, whose records the node keeps for a while."""


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
        ("pending", "alive", "evicted", "leaving"),
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
        lambda device: (
            device.name,
            device.type,
            str(device.id),
            tables.device_name(device),
        ),
        state=tables.device_state,
    ),
    "clients": Kind(
        shown_clients,
        partial(tables.client_table, with_ids=True),
        ("there", "left"),
        lambda client: (client.name, str(client.pid)),
        state=lambda client: "left" if client.has_left else "there",
    ),
    "nodes": Kind(
        tuple,
        tables.node_table,
        ("there", "silent"),
        lambda node: (node.found.program, str(node.found.pid)),
        state=lambda node: "silent" if node.status is None else "there",
    ),
}
"""The kinds of entries of `aiogpu list`."""


@click.command("list")
@click.argument("what", metavar="KIND", type=click.Choice(list(KINDS)))
@connect.address_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option(
    "--limit",
    type=Whole(min=1),
    default=100,
    show_default=True,
    help="Show at most so many.",
)
@click.option("--state", metavar="STATE", help="Only entries in this state.")
@click.option("--name", metavar="PATTERN", help="Only names that match: 'train*'.")
def list_command(
    what: str,
    address: str,
    as_json: bool,
    limit: int,
    state: str | None,
    name: str | None,
) -> None:
    """List what the running node has, one per line.

    KIND is tasks, actors, placements, workers, gpus, clients or nodes. The list of
    tasks has the first 100 that wait; `aiogpu status` counts all of them. Ended tasks
    are listed with --state finished, failed or cancelled: the node keeps records of the
    last 10 000, fewer if their errors are long. "gpus" are devices of any kind,
    "clients" are the programs that use the node, and "nodes" are all nodes of this
    user.

    \b
    States:
      tasks       waiting, starting, queued, running, blocked, delayed, stopping,
                  expecting, evicted, leased; finished, failed, cancelled
      actors      pending, alive, evicted, leaving
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
      0  the node has answered, even if the list is empty
      1  no node runs
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    kind = KINDS[what]
    states = [*kind.states, *(ENDED if what == "tasks" else ())]
    if state is not None and state not in states:
        raise click.BadParameter(
            f"{what} have no state {state!r}. The states are: {', '.join(states)}.",
            param_hint="'--state'",
        )
    status: NodeStatus | Nodes
    if what == "nodes":
        connect.check_unnamed("`aiogpu list nodes` shows all nodes")
        status = aiogpu.run(all_nodes())
    elif state in ENDED:
        status, ended = connect.ask(address, _with_ended)
        kind = Kind(
            lambda _: ended, tables.ended_table, ENDED, lambda task: (task.name,)
        )
    else:
        status = connect.ask(address, lambda node: node.status())
    entries = [
        entry
        for entry in kind.entries(status)
        if (state is None or kind.state(entry) == state)
        and (
            name is None
            or any(fnmatchcase(known, name) for known in kind.names(entry) if known)
        )
    ]
    shown, count = entries[:limit], len(entries)
    if kind.total is not None and state is None and name is None:
        count = kind.total(cast("NodeStatus", status))
    left_out = count - len(shown)
    if as_json:
        to_data = node_data if what == "nodes" else data_of
        data = [to_data(entry) for entry in shown]
        output = {"version": VERSION, "left_out": left_out, what: data}
        echo(json.dumps(output, indent=1))
        return
    if shown:
        show(kind.table(shown, status))
    if left_out:
        echo(f"and {left_out} more", err=True)
    if not shown:
        matching = "matching " if state or name else ""
        echo(f"There are no {matching}{what}.", err=True)


async def _with_ended(
    node: connect.Node,
) -> tuple[NodeStatus, tuple[EndedTask, ...]]:
    return await node.status(), await node.ended()


COMPLETED: Final = 1.0
"""Seconds that a node has to answer when a shell completes a word."""


def known_tasks(
    context: click.Context, _argument: click.Parameter, prefix: str
) -> list[str]:
    """Return names and numbers of tasks and actors that begin with a prefix.

    Without a node the list is empty.
    """
    address = context.params.get("address") or connect.ANY

    async def names(node: connect.Node) -> list[str]:
        status = await node.status()
        actors = [actor.name for actor in status.actors if actor.name is not None]
        tasks = [word for task in status.tasks for word in (str(task.id), task.name)]
        return sorted({*actors, *tasks})

    try:
        known = connect.ask(address, names, COMPLETED)
    except (click.ClickException, aiogpu.AiogpuError, OSError):
        return []  # a shell cannot show the error
    return [name for name in known if name.startswith(prefix) and name.isprintable()]


@click.command()
@click.argument("task", metavar="TASK", shell_complete=known_tasks)
@connect.address_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def why(task: str, address: str, as_json: bool) -> None:
    """Explain why TASK waits, which tasks hold what it needs, and which go first.

    For an ended task, tell how, when and where it ended, with the traceback. TASK is a
    number, as `aiogpu status` shows it, or the name of a task or an actor. If several
    waiting or running tasks have the name, they are listed with their reasons. If none
    has the name, the last ended task with the name is shown, or the last failed call of
    an actor, such as Model.predict.

    \b
    Examples:
      aiogpu why 12
      aiogpu why train
      aiogpu why 12 --json | jq .tasks[0].ended.error

    \b
    Exit codes:
      0  the reason was printed
      1  no node runs, or there is no such task
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    if not task:
        raise click.BadParameter("it is empty.", param_hint="TASK")
    connect.ask(address, lambda node: _explain(node, task, as_json))


async def _explain(node: connect.Node, name: str, as_json: bool) -> None:
    status, answers = None, list[aiogpu.types.Why]()
    if is_number(name):
        numbers = [int(name)]
    else:
        status = await node.status()
        numbers = [task.id for task in tasks_named(status, name)]
        if not numbers:
            answers = [await _why_ended(node, status, name)]
    if as_json or answers or len(numbers) == 1:
        answers = answers or [await node.why(number) for number in numbers]
        if as_json:
            data = {"version": VERSION, "tasks": data_of(tuple(answers))}
            echo(json.dumps(data, indent=1))
        else:
            echo(in_lines(answers[0]))
            if answers[0].ended is None and answers[0].task:
                for call in (await node.failed_calls(answers[0].task))[:1]:
                    echo(_failed_call(call))
    elif status is not None:
        show(tables.task_table(tasks_named(status, name), status))


async def _why_ended(
    node: connect.Node, status: NodeStatus, name: str
) -> aiogpu.types.Why:
    """Describe the last ended task or failed call with a name.

    Raises:
        ClickException: there is none.
    """
    ended = next(ended_named(await node.ended(), name), None)
    if ended is None:
        raise nothing_named(status, name)
    if not ended.is_call:
        return await node.why(ended.task)
    calls = await node.failed_calls(ended.task)
    call = next((call for call in calls if call.name == ended.name), ended)
    return aiogpu.types.Why(call.name, call.task, "ended", call.seconds, ended=call)


def ended_named(ended: Iterable[EndedTask], name: str) -> Iterator[EndedTask]:
    """Yield ended tasks, actors and calls with a name.

    An actor "Model 'serve'" has two names, of its class and its own, and so has its
    call "Model 'serve'.predict".
    """
    end = f" {name!r}"
    for task in ended:
        is_match = task.name == name or task.name.endswith(end)
        if is_match or (task.is_call and name in _short_names(task)):
            yield task


def _short_names(call: EndedTask) -> list[str]:
    """Return the names of a call by its actor's class and by the actor's own name."""
    actor, _, method = call.name.rpartition(".")
    class_name, _, own_name = actor.partition(" ")
    return [f"{owner}.{method}" for owner in (class_name, own_name[1:-1]) if owner]


def _failed_call(call: EndedTask) -> str:
    """Describe a failed call of an actor in one line."""
    error = f"{call.error}: {call.message}" if call.message else call.error
    method = _short_names(call)[-1]
    return printable(
        f"  {call.name} {end_in_brief(call)}: {error}; `aiogpu why {method}` shows the "
        f"traceback"
    )


def in_lines(why: aiogpu.types.Why) -> str:
    """Return an explanation as text without control characters, with its traceback."""
    trace = "" if why.ended is None else why.ended.traceback
    text = str(printable_all(why if not trace else _without_trace(why)))
    lines = (f"  {printable(line)}" for line in trace.rstrip().splitlines())
    return "\n".join((text, *lines))


def _without_trace(why: aiogpu.types.Why) -> aiogpu.types.Why:
    assert why.ended is not None, why
    return replace(why, ended=replace(why.ended, traceback=""))


def is_number(word: str) -> bool:
    """Return whether an argument is the number of a task."""
    return word.isdecimal() and word.isascii()


def tasks_named(status: NodeStatus, name: str) -> list[TaskStatus]:
    """Return the waiting and running tasks and the actors with a name."""
    actors = {
        actor.id
        for actor in status.actors
        if name in (actor.name, tables.full_name(actor))
    }
    return [task for task in status.tasks if task.name == name or task.id in actors]


def nothing_named(
    status: NodeStatus, name: str, *, knows_all: bool = False
) -> click.ClickException:
    """Return the error for an unknown name.

    Args:
        status: the status of the node.
        name: the name.
        knows_all: the name was looked for among all tasks, not only those of `status`.
    """
    advice = "`aiogpu list tasks` shows the tasks."
    if not knows_all and status.waiting_count > len(status.waiting):
        advice += " Only the first 100 waiting tasks are known by name."
    owner = name.rpartition(".")[0]
    actors = [
        str(actor.id)
        for actor in status.actors
        if owner and owner in (actor.class_name, actor.name, tables.full_name(actor))
    ]
    if actors:
        others = f" (others: {listing(actors[1:], len(actors) - 1)})"
        advice = (
            f"Calls of actors are not listed one by one, unless they have failed; "
            f"`aiogpu why {actors[0]}` explains the actor"
            f"{others if actors[1:] else ''}."
        )
    return click.ClickException(
        f"no task and no actor named {printable(name)!r} waits or runs. {advice}"
    )
