"""A `NodeStatus` as `aiogpu top` shows it: devices with bars, then who and what.

Pure: a picture and a view in, lines out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import aiogpu
from aiogpu.cli.bars import device_lines
from aiogpu.cli.grid import Column, Line, Table, cut, drawers, within
from aiogpu.cli.tables import (
    Programs,
    actor_table,
    client_table,
    failure_table,
    pid,
    placement_table,
    shape_table,
    shown_clients,
    state,
)
from aiogpu.cli.view import View
from aiogpu.core.model.text import printable, span, terms
from aiogpu.observe.status import (
    Holder,
    TaskStatus,
    amount,
    held_tasks,
    state_of,
    summary,
)

KEYS: Final = "q quit  p pause  s sort  j/k scroll"


def board(
    status: aiogpu.NodeStatus,
    view: View,
    width: int,
    height: int,
    note: str = "",
) -> list[Line]:
    """The screen: a line on top, as much of the picture as there is room for, keys.

    Args:
        status: the picture.
        view: what of it is shown; is told how much there is.
        width: columns of the screen.
        height: lines of the screen.
        note: what else is to be said, on top.
    """
    body = list(picture(status, view.order, width))
    room = max(1, height - 2)
    view.fit(len(body), room)
    shown = [
        within(line() if callable(line) else line, width)
        for line in body[view.offset : view.offset + room]
    ]
    shown += [[] for _ in range(room - len(shown))]
    return [_top(status, view, width, note), *shown, _keys(view, len(body), width)]


def _top(status: aiogpu.NodeStatus, view: View, width: int, note: str) -> Line:
    said = " PAUSED " if view.is_paused else ""
    said = f"{said} {note}" if note else said
    left = cut(f"aiogpu  {printable(summary(status))}", max(0, width - len(said) - 1))
    blanks = " " * max(0, width - len(left) - len(said))
    return [(left, "bold"), (blanks, ""), (cut(said, width), "bold reverse yellow")]


def _keys(view: View, count: int, width: int) -> Line:
    told = f"{KEYS}  by {view.order}"
    last = min(view.offset + view.page, count)
    place = "" if not view.bottom else f"  {view.offset + 1}-{last} of {count}"
    return [(cut(told + place, width).ljust(width), "reverse")]


def picture(
    status: aiogpu.NodeStatus, order: str, width: int
) -> Iterator[Line | Callable[[], Line]]:
    """All that there is to see, from top to bottom; some of it drawn when called."""
    yield from device_lines(status.devices, width)
    tasks = held_tasks(status)
    clients, held = shown_clients(status), status.placements
    parts = (
        (f"waiting: {status.waiting_count}", shape_table(status.shapes)),
        (f"running and leased: {len(tasks)}", held_table(status, tasks, order)),
        (f"placements: {len(held)}", placement_table(held, status)),
        (f"programs: {len(clients)}", client_table(clients)),
        (f"actors: {len(status.actors)}", actor_table(status.actors, status)),
        ("failed lately", failure_table(status.failures, status)),
    )
    for title, table in parts:
        if table.rows:
            yield []
            yield [(title, "bold underline")]
            yield from drawers(table, width)
        if status.reservation is not None and title.startswith("waiting"):
            told = f"kept for {status.reservation.name}: {status.reservation}"
            yield [(cut(printable(told), width), "cyan")]
    if not tasks and not status.waiting_count:
        yield []
        yield [("Nothing runs, and nothing waits.", "dim")]


def held_table(status: aiogpu.NodeStatus, tasks: list[TaskStatus], order: str) -> Table:
    """The tasks on workers with what they hold, in one of the `ORDERS`."""
    holders = {
        (holder.pid, holder.task): holder
        for device in status.devices
        for holder in device.holders
    }
    programs = Programs(status)
    columns = (
        Column("TASK", is_number=True),
        Column("NAME", least=10),
        Column("STATE"),
        Column("PID", is_number=True, rank=2),
        Column("PROGRAM", least=8, rank=3),
        Column("HOLDS", least=12, rank=4),
        Column("FOR", is_number=True, rank=1),
        Column("MEMORY", is_number=True, rank=5),
        Column("WHY", least=10, rank=6),
    )
    rows = [
        (
            *(str(one.id), one.name, state(state_of(one))),
            *(pid(one.pid), programs[one.client]),
            terms(one.request.items()),
            *_use(holders.get((one.pid, one.name))),
            one.reason or "",
        )
        for one in in_order(tasks, holders, order)
    ]
    return Table(columns, rows)


def _use(holder: Holder | None) -> tuple[str, str]:
    """For how long it holds its devices, and how much memory of them it uses."""
    if holder is None:
        return "", ""
    seconds = "" if holder.seconds is None else span(holder.seconds)
    return seconds, "" if holder.used is None else amount(holder.used, "0")


def in_order(
    tasks: list[TaskStatus],
    holders: Mapping[tuple[int, str | None], Holder],
    order: str,
) -> list[TaskStatus]:
    """The tasks as the view wants them; what is large, or old, comes first."""

    def size(task: TaskStatus) -> tuple[float, int]:
        holder = holders.get((task.pid, task.name))
        if holder is None:
            return 1.0, task.id
        much = holder.used if order == "memory" else holder.seconds
        return -(much or 0.0), task.id

    if order == "name":
        return sorted(tasks, key=lambda task: (task.name, task.id))
    if order in ("memory", "time"):
        return sorted(tasks, key=size)
    return sorted(tasks, key=lambda task: task.id)
