"""Objects of the program as HTML in a notebook.

A notebook asks for HTML without a way to wait, and a node of another process answers
later. So an object first shows what this process knows; where IPython can update an
output, the answer replaces it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from aiogpu.core.model.text import SHOWN, span, terms
from aiogpu.core.model.units import format_amount
from aiogpu.errors import AiogpuError
from aiogpu.observe.html import facts
from aiogpu.observe.status import ActorStatus, NodeStatus
from aiogpu.observe.why import Why, brief

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Coroutine

_updates: Final[set[asyncio.Task[None]]] = set()
"""The updates under way; asyncio keeps no strong reference."""


def html_now(shown: Any) -> str:
    """Return the HTML of an object, without waiting for another process."""
    return _known_now(shown._html()) or code(repr(shown))


def show(shown: Any) -> None:
    """Show the HTML of an object, and update it when the node has answered."""
    from IPython import display

    text = repr(shown)
    known = _known_now(shown._html())
    first = {"text/plain": text, "text/html": known or code(text)}
    show: Any = display.display  # untyped
    output: Any = show(first, raw=True, display_id=True)
    loop = sys.modules["asyncio"]._get_running_loop()
    if known is None and output is not None and loop is not None:
        task = loop.create_task(_update(output, text, shown._html()))
        _updates.add(task)
        task.add_done_callback(_updates.discard)


def code(text: str) -> str:
    """Return a text as HTML."""
    from html import escape

    return f"<code>{escape(text)}</code>"


def _known_now(html: Coroutine[Any, Any, str]) -> str | None:
    """Return the HTML if it can be made without a wait; else None."""
    try:
        html.send(None)
    except StopIteration as made:
        return str(made.value)
    except AiogpuError as error:
        return code(str(error))
    html.close()
    return None


async def _update(output: Any, text: str, html: Coroutine[Any, Any, str]) -> None:
    try:
        found = await html
    except AiogpuError as error:
        found = code(str(error))
    output.update({"text/plain": text, "text/html": found}, raw=True)


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


async def html_of(
    title: str,
    why: Why | None,
    status: Callable[[], Awaitable[NodeStatus]],
    is_actor: bool = False,
) -> str:
    """Return the state of a task or an actor, with the devices of its worker.

    `why` is the state of the task, None if it has ended.
    """
    if why is None:
        return facts(title, [("state", "ended")])
    if why.worker is None and not is_actor:
        return task_html(title, why, "")
    seen = await status()
    devices = devices_of(seen, why.worker)
    for actor in seen.actors:
        if is_actor and actor.id == why.task:
            return actor_html(title, actor, devices, why)
    return task_html(title, why, devices)
