"""The status of a node and the state of a task as HTML, for notebooks.

Colours are those of the page, so that light and dark themes can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from aiogpu.core.model.text import SHOWN, span, terms
from aiogpu.core.model.units import display_name, format_amount
from aiogpu.observe.status import ActorStatus, DeviceStatus, NodeStatus, overview
from aiogpu.observe.why import Why, brief

_CELL: Final = 'style="text-align:left;vertical-align:top"'


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts; "" without rows. `head` may be empty."""
    lines = ["".join(f"<td {_CELL}>{escape(cell)}</td>" for cell in r) for r in rows]
    if not lines:
        return ""
    names = "".join(f"<th {_CELL}>{escape(name)}</th>" for name in head)
    top = f"<thead><tr>{names}</tr></thead>" if names else ""
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    caption = f"<b>{escape(title)}</b>" if title else ""
    return f"<div>{caption}<table>{top}<tbody>{body}</tbody></table></div>"


def facts(title: str, entries: Iterable[tuple[str, str]]) -> str:
    """Return a table of named facts; those without a text are left out."""
    return table(title, (), [entry for entry in entries if entry[1]])


def devices_of(status: NodeStatus, worker: int | None) -> str:
    """Return the devices on which a worker holds a share: "GPU 0 (0.5)"."""
    return ", ".join(
        f"{device.kind} {device.id} ({format_amount(device.kind, holder.share)})"
        for device in status.devices
        for holder in device.holders
        if worker is not None and holder.worker == worker
    )


def task_html(title: str, why: Why, devices: str) -> str:
    """Return the state of a task: where it runs and since when, or why it waits."""
    reason = brief(why) or ""
    lines = str(why).splitlines() if why.state == "waiting" or why.ended else []
    return facts(
        title,
        [
            ("state", why.outcome or why.state),
            ("submitted", "" if why.seconds is None else f"{span(why.seconds)} ago"),
            ("runs", "" if why.runs_for is None else f"for {span(why.runs_for)}"),
            ("asks for", terms(why.request.items()) if why.request else ""),
            ("holds", devices),
            ("worker", f"{why.worker} (pid {why.pid})" if why.worker else ""),
            ("because", "" if lines else reason),
            *(("because", line.strip()) for line in lines[1 : SHOWN + 1]),
        ],
    )


def actor_html(title: str, actor: ActorStatus, devices: str, why: Why) -> str:
    """Return the state of an actor: where it lives, or why it waits."""
    return facts(
        title,
        [
            ("state", actor.state),
            ("lives", "" if why.runs_for is None else f"for {span(why.runs_for)}"),
            ("name", actor.name or ""),
            ("holds", devices),
            ("worker", f"{actor.worker} (pid {actor.pid})" if actor.worker else ""),
            ("calls", f"{actor.calls} unanswered" if actor.calls else ""),
            ("handles", f"in {actor.holders} processes" if actor.holders > 1 else ""),
            ("because", brief(why) or ""),
        ],
    )


def status_html(status: NodeStatus) -> str:
    """Return the status of a node as tables: devices, tasks, shapes, actors."""
    summary = escape("\n".join(overview(status)))
    return "".join(
        (
            f"<pre>{summary}</pre>",
            table(
                "devices",
                ("device", "name", "free", "memory", "held by"),
                map(_device_cells, status.devices),
            ),
            table(
                "tasks",
                ("task", "name", "state", "asks for", "worker", "because"),
                (
                    (
                        *(str(task.id), task.name, task.state),
                        terms(task.request.items()),
                        f"pid {task.pid}" if task.pid else "",
                        task.reason or "",
                    )
                    for task in status.tasks
                ),
            ),
            table(
                "actors",
                ("actor", "name", "class", "state", "worker", "calls"),
                (
                    (
                        *(str(actor.id), actor.name or "", actor.class_name),
                        *(actor.state, f"pid {actor.pid}" if actor.pid else ""),
                        str(actor.calls or ""),
                    )
                    for actor in status.actors
                ),
            ),
            table(
                "failed",
                ("task", "name", "when", "error"),
                (
                    (
                        *(str(task.task), task.name, f"{span(task.seconds)} ago"),
                        f"{task.error}: {task.message}".rstrip(": "),
                    )
                    for task in status.failures[:SHOWN]
                ),
            ),
        )
    )


def _device_cells(device: DeviceStatus) -> Sequence[str]:
    name, memory = f"{device.kind} {device.id}", ""
    if device.memory:
        used = "" if device.used is None else f"{format_amount('memory', device.used)} "
        memory = f"{used}of {format_amount('memory', device.memory)}"
    held = ", ".join(
        f"{holder.task or 'a process that ends'} "
        f"{format_amount(device.kind, holder.share)}"
        for holder in device.holders
    )
    free = device.aside or format_amount(display_name(device.kind), device.free)
    return name, device.name or device.type or "", free, memory, held
