"""The tables of the pages beyond the overview, as HTML. All text passes `text`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import urlencode

from aiogpu.core.model.text import span, terms
from aiogpu.observe.log_reader import LINE
from aiogpu.observe.overview import key, link, programs, section, table, text
from aiogpu.observe.owners import Owners
from aiogpu.observe.status import NodeStatus, held_tasks, shown_clients, state_of
from aiogpu.observe.task_list import DEEPEST, SORTS, STATES, TaskPage, TaskQuery
from aiogpu.observe.why import duration

SHOWN_ROWS: Final = 200
"""Actors, and leases, on a page; `aiogpu list` has all."""
ORDERS: Final = {
    "": "usual order",
    "newest": "newest first",
    "name": "by name",
    "waited": "longest wait first",
    "ran": "longest run first",
}
"""The orders of tasks in words."""


def task_form(query: TaskQuery) -> str:
    """Return the form that asks for another list of tasks."""
    return form(
        "/tasks",
        choice("Tasks", "state", {name: name for name in STATES}, query.state)
        + field("Name, number or error", "text", query.text)
        + choice("Order", "sort", {name: ORDERS[name] for name in SORTS}, query.sort),
    )


def form(path: str, fields: str) -> str:
    """Return a form that leads to a page with other arguments."""
    return f'<form action="{path}">{fields}<button>Show</button></form>'


def field(label: str, name: str, value: str) -> str:
    """Return a field of a form for a text."""
    shown = html.escape(value)
    return f'<label>{label} <input type="search" name="{name}" value="{shown}"></label>'


def choice(label: str, name: str, options: Mapping[str, str], chosen: str) -> str:
    """Return a field of a form for one of several values."""
    listed = "".join(
        f'<option value="{value}"{" selected" * (value == chosen)}>{shown}</option>'
        for value, shown in options.items()
    )
    return f'<label>{label} <select name="{name}">{listed}</select></label>'


def task_table(page: TaskPage, query: TaskQuery, owners: Owners) -> str:
    """Return one page of a list of tasks, and the links to the pages beside it."""
    if not page.rows:
        return f"<p>There is no such task: {page.total:,} in the list.</p>"
    rows = (
        (
            link(row.task, str(row.task)),
            text(row.name),
            key(row.client) + text(owners.name(row.client)),
            text(row.state),
            duration(row.waited),
            "not yet" if row.ran is None else duration(row.ran),
            "" if row.ended is None else f"{span(row.ended)} ago",
            text(row.reason),
        )
        for row in page.rows
    )
    heads = ["Task", "Name", "Program", "State", "Waited", "Ran", "Ended", "Why"]
    dropped = {"waiting": {5, 6}, "running": {6}}.get(query.state, set())
    shown = [[cell for n, cell in enumerate(row) if n not in dropped] for row in rows]
    heads = [head for n, head in enumerate(heads) if n not in dropped]
    return _pager(page, query) + table(heads, shown)


def _pager(page: TaskPage, query: TaskQuery) -> str:
    last = query.start + len(page.rows)
    reachable = min(page.total, DEEPEST) if query.sort else page.total
    links = [
        _page_link(query, start, label)
        for start, label, is_there in (
            (max(query.start - query.count, 0), "Earlier", query.start > 0),
            (query.start + query.count, "Further", last < reachable),
        )
        if is_there
    ]
    note = (
        f" In this order the first {DEEPEST:,} are shown; a search finds the others."
        if reachable < page.total
        else ""
    )
    where = f"Tasks {query.start + 1:,} to {last:,} of {page.total:,}.{note}"
    return f'<p class="pager">{where} {" ".join(links)}</p>'


def _page_link(query: TaskQuery, start: int, label: str) -> str:
    arguments = {"state": query.state, "text": query.text, "sort": query.sort}
    return f'<a href="/tasks?{urlencode({**arguments, "start": start})}">{label}</a>'


def actors_page(status: NodeStatus) -> str:
    """Return the actors, the programs, the leases and the placements."""
    owners = Owners(status)
    actors = [
        (
            link(actor.id, str(actor.id)),
            text(actor.name or "no name"),
            text(actor.class_name),
            text(actor.state),
            key(actor.client) + text(owners.name(actor.client)),
            f"{actor.calls:,}",
            f"{actor.holders:,}",
            f"{actor.evictions:,}",
            f"pid {actor.pid}" if actor.pid else "none",
        )
        for actor in status.actors
    ]
    placed = {group.task for group in status.placements}
    leases = [
        (
            link(task.id, str(task.id)),
            text(task.name),
            text(state_of(task)),
            key(task.client) + text(owners.name(task.client)),
            text(terms(task.request.items())),
            f"pid {task.pid}" if task.pid else "none yet",
            text(task.reason or ""),
        )
        for task in [*held_tasks(status), *status.waiting]
        if task.is_lease and task.id not in placed
    ]
    groups = [
        (
            link(group.task, str(group.task)),
            text(group.name),
            text(group.state),
            key(group.client) + text(owners.name(group.client)),
            text(" · ".join(map(str, group.bundles[:8]))),
            f"{group.members:,}",
            text(group.reason or ""),
        )
        for group in status.placements
    ]
    of_actors = (
        "Actor",
        "Name",
        "Class",
        "State",
        "Program",
        "Open calls",
        "Handles",
        "Evictions",
        "Process",
    )
    of_leases = ("Lease", "Name", "State", "Program", "Asks for", "Process", "Why")
    of_groups = ("Placement", "Name", "State", "Program", "Bundles", "Members", "Why")
    return (
        section("Actors", _rows(of_actors, actors, "There is no actor."))
        + section("Programs", programs(shown_clients(status), owners))
        + section("Leases", _rows(of_leases, leases, "No lease is held or waits."))
        + section("Placements", _rows(of_groups, groups, "There is no placement."))
    )


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]], none: str) -> str:
    if not rows:
        return f"<p>{none}</p>"
    left = len(rows) - SHOWN_ROWS
    more = f"<p>And {left:,} more.</p>" if left > 0 else ""
    return table(heads, rows[:SHOWN_ROWS]) + more


def log_lines(lines: Iterable[str]) -> str:
    """Return lines of a log, the latest first; a task's number leads to its page."""
    shown = []
    for line in lines:
        match = LINE.match(line)
        if match is None or match[2] == "0":
            shown.append(text(line))
            continue
        before, after = line[: match.start(2)], line[match.end(2) :]
        shown.append(text(before) + link(int(match[2]), match[2]) + text(after))
    listed = "\n".join(reversed(shown))
    return f'<pre class="log">{listed}</pre>'
