"""Shows the parts of a `NodeStatus` as rich tables, one for each kind.

rich cuts cells, but cannot leave columns out: `Table` does, if the screen has no room.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from aiogpu.cli.nodes import SeenNode
from aiogpu.core.model.ids import OWN
from aiogpu.core.model.text import printable, span, terms
from aiogpu.core.model.units import GPU
from aiogpu.core.queue.fair_share import Limits
from aiogpu.observe.status import (
    ActorStatus,
    ClientStatus,
    DeviceStatus,
    EndedTask,
    Holder,
    NodeStatus,
    PlacementStatus,
    ShapeStatus,
    TaskStatus,
    WorkerStatus,
    amount,
    asked_for,
    client_name,
    state_of,
)
from aiogpu.observe.why import duration

T = TypeVar("T")
GAP: Final = 2
"""Blanks between two columns."""
WIDE: Final = 10_000
"""Columns of a screen on which any table fits."""


class Column(NamedTuple, Generic[T]):
    """One column of a table.

    Attributes:
        name: its heading.
        cell: returns the cell of an entry: text, or text with a style.
        is_number: whether its cells are aligned to the right.
        least: to how few characters its cells may be cut; 0 if they are never cut.
        rank: the higher it is, the sooner the column is left out; 0 for never.
    """

    name: str
    cell: Callable[[T], str | Text]
    is_number: bool = False
    least: int = 0
    rank: int = 0


class Table:
    """A row for each entry.

    Attributes:
        columns: its columns.
        rows: their cells.
        has_head: whether the headings are shown.
    """

    def __init__(self, entries: Iterable[T], *columns: Column[T]) -> None:
        self.columns: tuple[Column[Any], ...] = columns
        self.rows = [[text(one.cell(entry)) for one in columns] for entry in entries]
        self.has_head = True

    def part(self, first: int, last: int) -> Table:
        """The lines from `first` to before `last`; line 0 has the headings."""
        found = Table((), *self.columns)
        found.has_head = first == 0
        found.rows = self.rows[max(first - 1, 0) : max(last - 1, 0)]
        return found

    def __rich_console__(
        self, _console: Console, options: ConsoleOptions
    ) -> Iterator[RichTable]:
        cells = [[row[at] for row in self.rows] for at in range(len(self.columns))]
        # A column in which every cell is empty is left out.
        natural = {
            at: max(len(column.name), *(cell.cell_len for cell in cells[at]))
            for at, column in enumerate(self.columns)
            if any(cells[at])
        }
        least = {
            at: min(self.columns[at].least or has, has) for at, has in natural.items()
        }
        # So is what has no room, the least important first.
        for at in sorted(natural, key=lambda at: -self.columns[at].rank):
            needed = sum(least.values()) + GAP * (len(least) - 1)
            if needed <= options.max_width or not self.columns[at].rank:
                break
            del least[at]
        table = RichTable(
            box=None,
            padding=(0, GAP, 0, 0),
            pad_edge=False,
            header_style="bold",
            show_header=self.has_head,
        )
        for at in sorted(least):
            column = self.columns[at]
            table.add_column(
                text(column.name),
                justify="right" if column.is_number else "left",
                no_wrap=not column.least,
            )
        for row in self.rows:
            table.add_row(*(row[at] for at in sorted(least)))
        yield table


def text(told: str | Text, style: str = "") -> Text:
    """A text of one line that can do nothing to a terminal."""
    if isinstance(told, Text):
        return told
    return Text(printable(told), style, no_wrap=True, overflow="ellipsis")


def printable_all(told: T, done: dict[int, Any] | None = None) -> T:
    """A status, or a part of it, with every text made `printable`.

    Otherwise a name of two lines would make two of one line. What was one object stays
    one.
    """
    done = {} if done is None else done
    if isinstance(told, str):
        return cast("T", printable(told))
    if id(told) in done:
        return cast("T", done[id(told)])
    found: Any = told
    if isinstance(told, Mapping):
        items = told.items()
        found = {printable_all(name): printable_all(it, done) for name, it in items}
    elif isinstance(told, tuple | list):
        parts = [printable_all(one, done) for one in told]
        found = getattr(told, "_make", type(told))(parts)
    elif is_dataclass(told) and not isinstance(told, type):
        values = {it.name: getattr(told, it.name) for it in fields(told)}
        values = {name: printable_all(it, done) for name, it in values.items()}
        found = replace(told, **values)
    done[id(told)] = found
    return cast("T", found)


def plain(drawn: RenderableType, width: int = WIDE) -> Iterator[str]:
    """The lines of what rich draws, without their styles."""
    console = Console(width=width, height=WIDE, file=io.StringIO(), highlight=False)
    for line in console.render_lines(drawn, pad=False):
        yield "".join(segment.text for segment in line).rstrip()


def is_terminal() -> bool:
    """Return whether the output is a terminal."""
    return sys.stdout.isatty()


def live(*, is_whole_screen: bool = False) -> Live:
    """Return a live display that `update` redraws in place."""
    return Live(
        console=Console(highlight=False),
        auto_refresh=False,
        screen=is_whole_screen,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def show(*drawn: RenderableType) -> None:
    """Print as wide as the terminal is, or in full if there is no terminal."""
    if is_terminal():
        Console(highlight=False).print(Group(*drawn))
    else:
        click.echo("\n".join(plain(Group(*drawn))))


STATE_STYLES: Final = {
    **dict.fromkeys(("running", "leased", "busy", "alive", "ready"), "green"),
    **dict.fromkeys(("waiting", "pending", "delayed", "expecting"), "yellow"),
    **dict.fromkeys(("stopping", "ending", "leaving", "removing"), "magenta"),
    **dict.fromkeys(("starting", "queued", "blocked"), "cyan"),
    **dict.fromkeys(("set aside",), "bold red"),
    **dict.fromkeys(("failed",), "red"),
    **dict.fromkeys(("cancelled",), "magenta"),
}
"""Colours of states."""


def state(word: str) -> Text:
    """A cell for a state."""
    return text(word, STATE_STYLES.get(word, ""))


class Programs(dict[int, str]):
    """The names of the programs of a node, with their process ids."""

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


def task_table(
    tasks: Iterable[TaskStatus],
    status: NodeStatus,
    holders: Mapping[tuple[int, str | None], Holder] | None = None,
) -> Table:
    """Tasks that have not ended.

    Args:
        tasks: the tasks.
        status: the status that they are from.
        holders: what they hold of devices, by process id and name; None if that is not
            to be shown.
    """
    programs = Programs(status)
    nothing = Holder(0.0, 0, 0, None)

    def held(task: TaskStatus) -> Holder:
        return (holders or {}).get((task.pid, task.name), nothing)

    def seconds(task: TaskStatus) -> str:
        known = held(task).seconds
        return "" if known is None else span(known)

    def used(task: TaskStatus) -> str:
        known = held(task).used
        return "" if known is None else amount(known, "0")

    asked = "ASKS FOR" if holders is None else "HOLDS"
    return Table(
        tasks,
        Column("TASK", lambda task: str(task.id), is_number=True),
        Column("NAME", lambda task: task.name, least=10),
        Column("STATE", lambda task: state(state_of(task))),
        Column("PID", lambda task: number(task.pid), is_number=True, rank=2),
        Column("PROGRAM", lambda task: programs[task.client], least=8, rank=3),
        Column(asked, lambda task: terms(task.request.items()), least=12, rank=4),
        Column("FOR", seconds, is_number=True, rank=1),
        Column("MEMORY", used, is_number=True, rank=5),
        Column("WHY", lambda task: task.reason or "", least=10, rank=6),
    )


def node_table(nodes: Iterable[SeenNode], _status: object = None) -> Table:
    """Nodes of this user, and how much each has to do."""

    def running(status: NodeStatus) -> int:
        return len(status.tasks) - len(status.waiting)

    def free(status: NodeStatus) -> str:
        total = status.total.get(GPU, 0)
        return f"{status.available.get(GPU, 0):g} of {total:g}" if total else ""

    def of(tell: Callable[[NodeStatus], object]) -> Callable[[SeenNode], str]:
        return lambda one: "" if one.status is None else str(tell(one.status))

    return Table(
        nodes,
        Column("PID", lambda one: number(one.found.pid), is_number=True),
        Column("PROGRAM", lambda one: one.found.program, least=8),
        Column("SINCE", lambda one: span(one.found.seconds), is_number=True, rank=2),
        Column("RUN", of(running), is_number=True),
        Column("WAIT", of(lambda status: status.waiting_count), is_number=True),
        Column("FREE GPUS", of(free), is_number=True, rank=1),
        Column("ADDRESS", lambda one: one.found.address, least=12, rank=3),
        Column("", lambda one: text(one.problem, "red"), least=12),
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

    def id_of(one: ClientStatus) -> str:
        return str(one.id) if with_ids and one.id != OWN else ""

    return Table(
        clients,
        Column("PROGRAM", client_name, least=8),
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
    """Describe the limits of a program."""
    if limits.max_waiting is not None:
        yield f"{limits.max_waiting} tasks"
    for name, share in limits.max_share.items():
        yield f"{share * 100:g} % of {name}"


def device_state(device: DeviceStatus) -> str:
    """Describe the room on a device in one word."""
    if device.aside is not None:
        return "set aside"
    if device.free >= 1 and not device.holders:
        return "free"
    return "shared" if device.free > 0 else "full"


def device_name(device: DeviceStatus) -> str:
    """The device's id with its kind, "GPU 0"."""
    return f"{device.kind} {device.id}"


def memory(device: DeviceStatus) -> str:
    """Describe the used and the total memory of a device, as far as known."""
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
    """Each holder of a device with its share; then other processes on it."""
    for one in device.holders:
        share = f"{one.share:g}" if one.share else amount(one.memory)
        yield f"{share} {one.task or '(ending)'}"
    for other in (device.others or ()) if with_others else ():
        yield f"not ours: {other.name or 'pid'} {other.pid}"


def shape_table(shapes: Iterable[ShapeStatus], _status: NodeStatus) -> Table:
    """Build a table of waiting tasks, one row for each distinct request."""
    return Table(
        shapes,
        Column("WAIT", lambda shape: text(str(shape.count), "yellow"), is_number=True),
        Column("ASK FOR", asked_for, least=14),
        Column("FIRST", lambda shape: shape.first, least=8, rank=2),
        Column("SINCE", lambda shape: span(shape.seconds), is_number=True, rank=1),
        Column("WHY", lambda shape: shape.reason, least=16),
    )


def failure_table(failures: Iterable[EndedTask], status: NodeStatus) -> Table:
    """Build a table of failed tasks, the latest first."""
    programs = Programs(status)
    return Table(
        failures,
        Column("AGO", lambda one: span(one.seconds), is_number=True),
        Column("TASK", lambda one: str(one.task), is_number=True, rank=3),
        Column("NAME", lambda one: one.name, least=8),
        Column("PROGRAM", lambda one: programs[one.client], least=8, rank=2),
        Column("ERROR", error, least=12),
        Column("SAYS", lambda one: one.message, least=16, rank=1),
    )


def ended_table(ended: Iterable[EndedTask], status: NodeStatus) -> Table:
    """Build a table of tasks that have ended, the latest first."""
    programs = Programs(status)

    def ran(one: EndedTask) -> str:
        return "" if one.ran is None else duration(one.ran)

    def devices(one: EndedTask) -> str:
        return ", ".join(f"{kind} {index}" for kind, index in one.devices)

    return Table(
        ended,
        Column("TASK", lambda one: str(one.task), is_number=True),
        Column("NAME", lambda one: one.name, least=8),
        Column("STATE", lambda one: state(one.state)),
        Column("AGO", lambda one: span(one.seconds), is_number=True),
        Column("RAN", ran, is_number=True, rank=1),
        Column("PID", lambda one: number(one.pid), is_number=True, rank=5),
        Column("PROGRAM", lambda one: programs[one.client], least=8, rank=4),
        Column("ON", devices, rank=6),
        Column("ERROR", error, least=12, rank=2),
        Column("SAYS", lambda one: one.message, least=16, rank=3),
    )


def error(one: EndedTask) -> Text:
    """A cell for the type of an error."""
    return text(one.error.rpartition(".")[2], "red")
