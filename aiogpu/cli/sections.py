"""A `NodeStatus` as one picture for a terminal, as wide as that is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import aiogpu
from aiogpu.cli.grid import Line, Table, cut, grid
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
from aiogpu.core.model.text import SHOWN, printable, span
from aiogpu.observe.status import held_tasks, overview


def sections(status: aiogpu.NodeStatus, width: int) -> Iterator[Line]:
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


def _kept(status: aiogpu.NodeStatus, width: int) -> Iterator[Line]:
    kept = status.reservation
    assert kept is not None
    when = "" if kept.seconds is None else f", for {span(kept.seconds)} at most"
    told = f"kept for {kept.name} (task {kept.task}): {kept}{when}"
    yield [(cut(printable(told), width), "cyan")]
