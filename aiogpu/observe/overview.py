"""The overview: who holds which share of which device, what waits and what failed.

It is plain HTML, drawn once for all tabs. Names, reasons and messages come from
programs and are text: all of them pass `text`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from aiogpu.core.model.text import escaped, span, terms
from aiogpu.core.model.units import size
from aiogpu.observe.owners import Owners
from aiogpu.observe.status import (
    ClientStatus,
    DeviceStatus,
    Holder,
    NodeStatus,
    asked_for,
    heat_and_power,
    held_tasks,
    shown_clients,
)

STYLE: Final = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
COLORS: Final = 7
"""Colours of programs in the style sheet."""
SHOWN_FAILURES: Final = 8
"""Failures on the page; the page of tasks has all."""
STALE: Final = 3.0
"""Seconds without a status before the page says so."""


def text(content: str) -> str:
    """Return a text as HTML that shows it, control characters as escapes."""
    return html.escape(escaped(content))


def link(task: int | None, label: str) -> str:
    """Return a link to the page of a task as HTML; the label alone without a number."""
    shown = text(label)
    return shown if task is None else f'<a href="/task?id={task}">{shown}</a>'


def without_links(drawn: str) -> str:
    """Return HTML of this module without its links, for another place than the page."""
    return _LINK.sub(r"\1", _MORE.sub("", drawn))


_LINK: Final = re.compile(r'<a href="/[^"]*">([^<]*)</a>')
_MORE: Final = re.compile(r'<p><a href="/[^"]*">[^<]*</a></p>')


def overview(
    status: NodeStatus | None, *, age: float, problem: str, throughput: float | None
) -> str:
    """Return the overview as HTML.

    Args:
        status: the last status; None before the first.
        age: seconds since it came.
        problem: why there is no newer one; "" while the node answers.
        throughput: tasks that ended per second; None if unknown.
    """
    if problem or age > STALE:
        what = problem or f"The node has not answered for {span(age)}."
        last = "" if status is None else f" What follows is {span(age)} old."
        banner = f'<p class="problem" role="alert">{text(what)}{last}</p>'
    else:
        banner = ""
    if status is None:
        return banner
    owners = Owners(status)
    parts = [
        banner,
        *(f'<p class="problem">{text(str(outage))}</p>' for outage in status.outages),
        _tiles(status, throughput),
        section("Devices", _devices(status.devices, owners)),
        section("Why tasks wait", _waiting(status, owners)),
        section("Failed last", _failures(status, owners)),
        section("Programs", programs(shown_clients(status), owners)),
    ]
    return "".join(parts)


def section(title: str, content: str) -> str:
    """Return a part of a page with a heading."""
    return f"<section><h2>{title}</h2>{content}</section>"


def _tiles(status: NodeStatus, throughput: float | None) -> str:
    oldest = max((shape.seconds for shape in status.shapes), default=None)
    rate = "not known" if throughput is None else f"{throughput:.3g} tasks/s"
    failed = sum(status.outcomes.get(name, 0) for name in ("failed", "died"))
    figures = (
        ("Running and leased", f"{len(held_tasks(status)):,} tasks"),
        ("Waiting", f"{status.waiting_count:,} tasks"),
        ("Oldest wait", "none waits" if oldest is None else span(oldest)),
        ("Throughput, last 10 s", rate),
        ("Failed since the start", f"{failed:,} tasks"),
        ("CPUs free", _free(status, "CPU")),
    )
    tiles = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _free(status: NodeStatus, name: str) -> str:
    return f"{status.available.get(name, 0.0):g} of {status.total.get(name, 0.0):g}"


def _devices(devices: Sequence[DeviceStatus], owners: Owners) -> str:
    if not devices:
        return "<p>This node has no devices.</p>"
    cards = "".join(_device(device, owners) for device in devices)
    return f'<div class="cards">{cards}</div>'


def _device(device: DeviceStatus, owners: Owners) -> str:
    title = text(f"{device.kind} {device.id}")
    product = text(device.name or device.type or "")
    if device.aside is not None:
        health = f'<p class="problem">Set aside: {text(device.aside)}</p>'
    elif device.is_unverified:
        health = "<p>Unverified: ended tasks may have left something on it.</p>"
    else:
        health = ""
    readings = [f"{1 - device.free:.3g} of 1 held"]
    if device.utilisation is not None:
        readings.append(f"{device.utilisation} % busy")
    if heat := heat_and_power(device):
        readings.append(heat)
    bars = "".join(_segment(holder, owners) for holder in device.holders)
    free = f"{device.free:.3g} free" if device.free > 0.01 else ""
    bar = (
        f'<div class="bar" role="img" aria-label="Shares of {title}">{bars}'
        f'<span class="free" style="flex:{device.free:.4f}">{free}</span></div>'
    )
    rows = (
        (
            key(owners.client(holder)) + text(owners.name(owners.client(holder))),
            link(owners.held_task(holder), _task_of(holder)),
            f"{holder.share:.3g}",
            _memory_of(holder),
            "unknown" if holder.seconds is None else span(holder.seconds),
        )
        for holder in device.holders
    )
    heads = ("Program", "Task", "Share", "Memory", "For")
    listed = table(heads, rows) if device.holders else ""
    others = ", ".join(
        f"{process.name or 'a process'} (pid {process.pid})"
        + ("" if process.memory is None else f" with {size(process.memory)}")
        for process in device.others or ()
    )
    foreign = f"<p>Not of this node: {text(others)}.</p>" if others else ""
    return (
        f"<article><h3>{title} <small>{product}</small></h3>{health}"
        f'<p class="readings">{" · ".join(readings)}</p>'
        f"{bar}{_memory(device)}{listed}{foreign}</article>"
    )


def _segment(holder: Holder, owners: Owners) -> str:
    client = owners.client(holder)
    told = f"{_task_of(holder)}, {owners.name(client)}: {holder.share:.3g}"
    return (
        f'<span class="c{client % COLORS}" style="flex:{holder.share:.4f}" '
        f'title="{text(told)}">{text(_task_of(holder))}</span>'
    )


def key(client: int) -> str:
    """Return the colour of a program, as a square before its name."""
    return f'<i class="key c{client % COLORS}" aria-hidden="true"></i>'


def _task_of(holder: Holder) -> str:
    if holder.unended:
        return f"{holder.task or 'killed'} (not ended)"
    if holder.is_settling:
        return "ended; the driver has not confirmed"
    return holder.task or "is ending"


def _memory_of(holder: Holder) -> str:
    used = "" if holder.used is None else f"{size(holder.used)} used"
    kept = f"{size(holder.memory)} reserved" if holder.memory else ""
    more = ", more than reserved" if holder.has_outgrown else ""
    return (", ".join(filter(None, (used, kept))) or "unknown") + more


def _memory(device: DeviceStatus) -> str:
    if not device.memory:
        return ""
    told = f"Memory of {size(device.memory)}: {size(device.memory_reserved)} reserved"
    used = 0.0
    if device.used is not None:
        told += f", {size(device.used)} used"
        used = min(device.used / device.memory, 1.0)
    return (
        f'<p class="readings">{told}</p><div class="bar thin" aria-hidden="true">'
        f'<span class="used" style="flex:{used:.4f}"></span>'
        f'<span class="free" style="flex:{1 - used:.4f}"></span></div>'
    )


def _waiting(status: NodeStatus, owners: Owners) -> str:
    if not status.shapes:
        return "<p>No task waits.</p>"
    rows = (
        (
            f"{shape.count:,}",
            link(owners.waiting_task(shape.client, shape.first), shape.first),
            text(owners.name(shape.client)),
            text(asked_for(shape)),
            span(shape.seconds),
            text(shape.reason),
        )
        for shape in sorted(status.shapes, key=lambda shape: -shape.seconds)
    )
    heads = ("Tasks", "First", "Program", "Each asks for", "Oldest waits", "Why")
    kept = status.reservation
    note = (
        "" if kept is None else f"<p>Kept for {text(kept.name)}: {text(str(kept))}.</p>"
    )
    left = status.shape_count - len(status.shapes)
    more = f"<p>And {left:,} further kinds of requests.</p>" if left else ""
    more += '<p><a href="/tasks">All waiting tasks</a></p>'
    return table(heads, rows) + note + more


def _failures(status: NodeStatus, owners: Owners) -> str:
    if not status.failures:
        return "<p>No task has failed.</p>"
    rows = (
        (
            f"{span(failure.seconds)} ago",
            link(failure.task, str(failure.task)),
            text(failure.name),
            text(owners.name(failure.client)),
            f"<strong>{text(failure.error)}</strong> {text(failure.message)}",
        )
        for failure in status.failures[:SHOWN_FAILURES]
    )
    listed = table(("When", "Task", "Name", "Program", "Error"), rows)
    return f'{listed}<p><a href="/tasks?state=failed">All failures</a></p>'


def programs(clients: Sequence[ClientStatus], owners: Owners) -> str:
    """Return the programs of a node with what they hold."""
    if not clients:
        return "<p>Only the program of this node uses it.</p>"
    rows = (
        (
            key(client.id) + text(owners.name(client.id)),
            f"{client.running:,}",
            f"{client.waiting:,}",
            text(terms(client.holds.items())),
            f"{client.weight:g}",
        )
        for client in clients
    )
    return table(("Program", "Running", "Waiting", "Holds", "Weight"), rows)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the cells are HTML."""
    return f'<div class="scroll"><table>{"".join(_lines(heads, rows))}</table></div>'


def _lines(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "<thead><tr>"
    yield from (f'<th scope="col">{head}</th>' for head in heads)
    yield "</tr></thead><tbody>"
    for row in rows:
        cells = zip(heads, row, strict=True)
        yield "<tr>"
        yield from (
            f'<td data-head="{head}"><div>{cell}</div></td>' for head, cell in cells
        )
        yield "</tr>"
    yield "</tbody>"
