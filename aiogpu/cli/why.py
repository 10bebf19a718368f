"""`aiogpu why`: why a task waits, or what it does instead."""

from __future__ import annotations

from typing import Final

import click

import aiogpu
from aiogpu.cli import connect
from aiogpu.cli.tables import full_name, task_table
from aiogpu.cli.terminal import print_table, printable_all
from aiogpu.core.model.text import printable

COMPLETED: Final = 1.0
"""Seconds that a node has to tell which tasks there are, when a shell asks."""


def known_tasks(
    context: click.Context, _argument: click.Parameter, begun: str
) -> list[str]:
    """The tasks and actors of the running node that begin so; none if none runs."""
    address = context.params.get("address") or connect.default_address()

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
def why(task: str, address: str) -> None:
    """Say why TASK waits, who holds what it needs, and whose turn it is.

    TASK is a number, as `aiogpu status` shows it, or a name. Several tasks of that
    name are listed, with the reason of each; an actor is known by its name as well.

    \b
    Examples:
      aiogpu why 12
      aiogpu why train

    \b
    Exit codes:
      0  it is said
      1  no node runs, or it has no such task
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    if not task:
        raise click.BadParameter("is empty.", param_hint="TASK")
    if task.isdecimal() and task.isascii():
        say(connect.ask(address, lambda node: node.why(int(task))))
        return
    connect.ask(address, lambda node: _of_name(node, task))


def say(told: aiogpu.types.Why) -> None:
    """Print it as a person wants it."""
    click.echo(str(printable_all(told)))


async def _of_name(node: connect.Node, name: str) -> None:
    status = await node.status()
    named = {one.id for one in status.actors if name in (one.name, full_name(one))}
    found = [one for one in status.tasks if one.name == name or one.id in named]
    if not found:
        known = "the first 100 of those that wait are known by name"
        left = status.waiting_count > len(status.waiting)
        raise click.ClickException(
            f"no task and no actor named {printable(name)!r} waits or runs"
            f"{f'; {known}' if left else ''}. `aiogpu list tasks` shows what there is."
        )
    if len(found) == 1:
        say(await node.why(found[0].id))
    else:
        print_table(task_table(found, status))
