"""Tables of the parts of a `NodeStatus`, one function for each kind.

rich can cut cells, but not leave out columns; `Table` leaves out columns for which the
screen has no room.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from aiogpu.cli.nodes import SeenNode
from aiogpu.cli.terminal import echo, is_terminal, unescaped
from aiogpu.core.model.ids import OWN
from aiogpu.core.model.text import escaped, printable, span, terms
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
    """A column of a table.

    Attributes:
        name: the heading.
        cell: returns the cell of an entry: text, or text with a style.
        is_number: True to align the cells to the right.
        least: fewest characters to which cells may be cut; 0 to never cut them.
        rank: columns with a higher rank are left out first; 0 to never leave it out.
    """

    name: str
    cell: Callable[[T], str | Text]
    is_number: bool = False
    least: int = 0
    rank: int = 0


class Table:
    """A table with a row for each entry.

    Attributes:
        columns: the columns.
        rows: the cells of each row.
        has_head: True to show the headings.
    """

    def __init__(self, entries: Iterable[T], *columns: Column[T]) -> None:
        self.columns: tuple[Column[Any], ...] = columns
        self.rows = [
            [text(column.cell(entry)) for column in columns] for entry in entries
        ]
        self.has_head = True

    def part(self, first: int, last: int) -> Table:
        """Return the lines from `first` to before `last`; line 0 has the headings."""
        part = Table((), *self.columns)
        part.has_head = first == 0
        part.rows = self.rows[max(first - 1, 0) : max(last - 1, 0)]
        return part

    def __rich_console__(
        self, _console: Console, options: ConsoleOptions
    ) -> Iterator[RichTable]:
        cells = [[row[at] for row in self.rows] for at in range(len(self.columns))]
        # Leave out columns without text.
        natural = {
            at: max(len(column.name), *(cell.cell_len for cell in cells[at]))
            for at, column in enumerate(self.columns)
            if any(cells[at])
        }
        least = {
            at: min(self.columns[at].least or has, has) for at, has in natural.items()
        }
        # Leave out columns without room, the least important first.
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


def text(content: str | Text, style: str = "") -> Text:
    """Return a text of one line, without control characters."""
    if isinstance(content, Text):
        return content
    return Text(printable(content), style, no_wrap=True, overflow="ellipsis")


def printable_all(value: T, done: dict[int, Any] | None = None) -> T:
    """Return a status, or a part of it, with every text made `printable`.

    Otherwise a line break in a name would break a line of the output. An object that
    occurs twice is copied once.
    """
    done = {} if done is None else done
    if isinstance(value, str):
        return cast("T", printable(value))
    if id(value) in done:
        return cast("T", done[id(value)])
    copy: Any = value
    if isinstance(value, Mapping):
        items = value.items()
        copy = {printable_all(name): printable_all(item, done) for name, item in items}
    elif isinstance(value, tuple | list):
        parts = [printable_all(item, done) for item in value]
        copy = getattr(value, "_make", type(value))(parts)
    elif is_dataclass(value) and not isinstance(value, type):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        values = {name: printable_all(item, done) for name, item in values.items()}
        copy = replace(value, **values)
    done[id(value)] = copy
    return cast("T", copy)


class SafeConsole(Console):
    """A console of rich that escapes control characters in what it shows."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """See rich; all texts pass here, and so do rich's own control sequences."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(escaped(segment.text), segment.style)


def console(**settings: Any) -> SafeConsole:
    """Return a console for the standard output, or for the `file` of the settings."""
    settings.setdefault("file", unescaped(sys.stdout))
    return SafeConsole(highlight=False, **settings)


def plain(renderable: RenderableType, width: int = WIDE) -> Iterator[str]:
    """Yield the lines that rich renders, without their styles."""
    paper = console(width=width, height=WIDE, file=io.StringIO())
    for line in paper.render_lines(renderable, pad=False):
        yield "".join(segment.text for segment in line).rstrip()


def live(*, is_whole_screen: bool = False) -> Live:
    """Return a live display that `update` redraws in place."""
    return Live(
        console=console(),
        auto_refresh=False,
        screen=is_whole_screen,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def show(*renderables: RenderableType) -> None:
    """Print in the width of the terminal, or in full if there is no terminal."""
    if is_terminal():
        console().print(Group(*renderables))
    else:
        echo("\n".join(plain(Group(*renderables))))


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
    """Return a cell for a state."""
    return text(word, STATE_STYLES.get(word, ""))


class Programs(dict[int, str]):
    """The names of the programs of a node, with their process ids."""

    def __init__(self, status: NodeStatus) -> None:
        super().__init__((int(id_), name) for id_, name in status.departed.items())
        self.update(
            (client.id, f"{client.name} {client.pid}")
            for client in status.clients
            if client.name
        )
        self[OWN] = ""

    def __missing__(self, client: int) -> str:
        return str(client)


def number(count: int) -> str:
    """Return a process id or a count as text, "" for 0."""
    return str(count or "")


def task_table(
    tasks: Iterable[TaskStatus],
    status: NodeStatus,
    holders: Mapping[tuple[int, str | None], Holder] | None = None,
) -> Table:
    """Build a table of tasks that have not ended.

    Args:
        tasks: the tasks.
        status: the status of the node.
        holders: the shares of devices, by process id and name of the task; None to
            leave them out.
    """
    programs = Programs(status)
    nothing = Holder(0.0, 0, 0, None)

    def holder_of(task: TaskStatus) -> Holder:
        return (holders or {}).get((task.pid, task.name), nothing)

    def seconds(task: TaskStatus) -> str:
        held_for = holder_of(task).seconds
        return "" if held_for is None else span(held_for)

    def used(task: TaskStatus) -> str:
        size = holder_of(task).used
        return "" if size is None else amount(size, "0")

    heading = "ASKS FOR" if holders is None else "HOLDS"
    return Table(
        tasks,
        Column("TASK", lambda task: str(task.id), is_number=True),
        Column("NAME", lambda task: task.name, least=10),
        Column("STATE", lambda task: state(state_of(task))),
        Column("PID", lambda task: number(task.pid), is_number=True, rank=2),
        Column("PROGRAM", lambda task: programs[task.client], least=8, rank=3),
        Column(heading, lambda task: terms(task.request.items()), least=12, rank=4),
        Column("FOR", seconds, is_number=True, rank=1),
        Column("MEMORY", used, is_number=True, rank=5),
        Column("WHY", lambda task: task.reason or "", least=10, rank=6),
    )


def node_table(nodes: Iterable[SeenNode], _status: object = None) -> Table:
    """Build a table of nodes of this user, with the load of each."""

    def running(status: NodeStatus) -> int:
        return len(status.tasks) - len(status.waiting)

    def free(status: NodeStatus) -> str:
        total = status.total.get(GPU, 0)
        return f"{status.available.get(GPU, 0):g} of {total:g}" if total else ""

    def of(value: Callable[[NodeStatus], object]) -> Callable[[SeenNode], str]:
        return lambda node: "" if node.status is None else str(value(node.status))

    return Table(
        nodes,
        Column("PID", lambda node: number(node.found.pid), is_number=True),
        Column("PROGRAM", lambda node: node.found.program, least=8),
        Column("SINCE", lambda node: span(node.found.seconds), is_number=True, rank=2),
        Column("RUN", of(running), is_number=True),
        Column("WAIT", of(lambda status: status.waiting_count), is_number=True),
        Column("FREE GPUS", of(free), is_number=True, rank=1),
        Column("ADDRESS", lambda node: node.found.address, least=12, rank=3),
        Column("", lambda node: text(node.problem, "red"), least=12),
    )


def worker_table(workers: Iterable[WorkerStatus], _status: NodeStatus) -> Table:
    """Build a table of worker processes."""
    return Table(
        workers,
        Column("WORKER", lambda worker: str(worker.id), is_number=True),
        Column("PID", lambda worker: number(worker.pid), is_number=True),
        Column("STATE", lambda worker: state(worker.state)),
        Column("TASK", lambda worker: worker.task or "", least=8),
    )


def actor_table(actors: Iterable[ActorStatus], status: NodeStatus) -> Table:
    """Build a table of actors that have not ended."""
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
    """Return an actor's name with its namespace, "" without a name."""
    if actor.name is None:
        return ""
    return f"{actor.namespace}/{actor.name}" if actor.namespace else actor.name


def placement_table(groups: Iterable[PlacementStatus], status: NodeStatus) -> Table:
    """Build a table of placements, with the resources of each bundle."""
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
    """Build a table of the programs that use the node.

    Args:
        clients: the programs.
        with_ids: True to show the IDs for `aiogpu logs --client`.
    """

    def id_of(client: ClientStatus) -> str:
        return str(client.id) if with_ids and client.id != OWN else ""

    def holds(client: ClientStatus) -> str:
        return terms(client.holds.items()) if client.holds else ""

    def weight(client: ClientStatus) -> str:
        return f"{client.weight:g}" if client.weight != 1 else ""

    return Table(
        clients,
        Column("PROGRAM", client_name, least=8),
        Column("PID", lambda client: number(client.pid), is_number=True, rank=1),
        Column("ID", id_of, is_number=True),
        Column("RUN", lambda client: str(client.running), is_number=True),
        Column("WAIT", lambda client: str(client.waiting), is_number=True),
        Column("HOLDS", holds, least=10),
        Column("WEIGHT", weight, is_number=True, rank=4),
        Column(
            "MAY HAVE",
            lambda client: ", ".join(bounds(client.limits)),
            least=10,
            rank=5,
        ),
        Column("", lambda client: "has left" if client.has_left else "", rank=3),
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
    """Return a device's id with its kind, "GPU 0"."""
    return f"{device.kind} {device.id}"


def memory(device: DeviceStatus) -> str:
    """Describe the used and the total memory of a device, as far as known."""
    total = amount(device.memory)
    if device.used is None:
        return total
    return f"{amount(device.used, '0')}/{total}" if total else amount(device.used, "0")


def device_table(devices: Iterable[DeviceStatus], _status: NodeStatus) -> Table:
    """Build a table of devices, with the holders of each."""

    def busy(device: DeviceStatus) -> str:
        return "" if device.utilisation is None else f"{device.utilisation} %"

    def holders(device: DeviceStatus) -> str:
        return ", ".join(held_by(device)) or (device.aside or "")

    return Table(
        devices,
        Column("DEVICE", device_name, least=6),
        Column(
            "NAME", lambda device: device.name or device.type or "", least=6, rank=3
        ),
        Column("STATE", lambda device: state(device_state(device))),
        Column("FREE", lambda device: f"{device.free:g}", is_number=True),
        Column("MEMORY", memory, is_number=True, rank=1),
        Column("BUSY", busy, is_number=True, rank=2),
        Column("HELD BY", holders, least=10),
    )


def held_by(device: DeviceStatus, *, with_others: bool = True) -> Iterator[str]:
    """Yield each holder of a device with its share, then the processes of others."""
    for holder in device.holders:
        share = f"{holder.share:g}" if holder.share else amount(holder.memory)
        yield f"{share} {holder.task or ('(killed)' if holder.unended else '(ending)')}"
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
        Column("AGO", lambda task: span(task.seconds), is_number=True),
        Column("TASK", lambda task: str(task.task), is_number=True, rank=3),
        Column("NAME", lambda task: task.name, least=8),
        Column("PROGRAM", lambda task: programs[task.client], least=8, rank=2),
        Column("ERROR", error, least=12),
        Column("SAYS", lambda task: task.message, least=16, rank=1),
    )


def ended_table(ended: Iterable[EndedTask], status: NodeStatus) -> Table:
    """Build a table of tasks that have ended, the latest first."""
    programs = Programs(status)

    def ran(task: EndedTask) -> str:
        return "" if task.ran is None else duration(task.ran)

    def devices(task: EndedTask) -> str:
        return ", ".join(f"{kind} {index}" for kind, index in task.devices)

    return Table(
        ended,
        Column("TASK", lambda task: str(task.task), is_number=True),
        Column("NAME", lambda task: task.name, least=8),
        Column("STATE", lambda task: state(task.state)),
        Column("AGO", lambda task: span(task.seconds), is_number=True),
        Column("RAN", ran, is_number=True, rank=1),
        Column("PID", lambda task: number(task.pid), is_number=True, rank=5),
        Column("PROGRAM", lambda task: programs[task.client], least=8, rank=4),
        Column("ON", devices, rank=6),
        Column("ERROR", error, least=12, rank=2),
        Column("SAYS", lambda task: task.message, least=16, rank=3),
    )


def error(task: EndedTask) -> Text:
    """Return a cell for the type of an error."""
    return text(task.error.rpartition(".")[2], "red")
