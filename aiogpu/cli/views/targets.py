"""Finds the task or actor that an argument of a command names."""

from __future__ import annotations

import click

from aiogpu.cli import connect
from aiogpu.cli.views.status import is_number, nothing_named, tasks_named
from aiogpu.core.model.text import listing, printable
from aiogpu.observe.why import Why


def find(address: str, name: str) -> Why:
    """Return the state of the task or actor with a number or a name.

    Args:
        address: of the node, as an option gives it.
        name: the number or the name; a running task goes before one that waits, and
            this before one that has ended.

    Raises:
        BadParameter: the name is empty.
        ClickException: no node runs, or there is no such task, or several run.
    """
    if not name:
        raise click.BadParameter("it is empty.", param_hint="TASK")
    return connect.ask(address, lambda node: find_on(node, name))


async def find_on(node: connect.Node, name: str) -> Why:
    """Return the same on a node that was joined."""
    if is_number(name):
        return await node.why(int(name))
    status = await node.status()
    found = tasks_named(status, name)
    if not found:
        for ended in await node.ended():
            if ended.name == name:
                return await node.why(ended.task)
        raise nothing_named(status, name)
    running = [task for task in found if task.worker is not None] or found
    if len(running) > 1:
        numbers = listing([str(task.id) for task in running], len(running))
        raise click.ClickException(
            f"{len(running)} tasks are named {printable(name)}: {numbers}. Give a "
            f"number."
        )
    return await node.why(running[0].id)
