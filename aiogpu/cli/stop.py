"""`aiogpu cancel` and `kill`: end tasks and actors of any program of the node."""

from __future__ import annotations

from typing import Final

import click

from aiogpu.cli import connect
from aiogpu.cli.status import (
    ended_named,
    is_number,
    known_tasks,
    nothing_named,
    tasks_named,
)
from aiogpu.cli.terminal import echo, show_error
from aiogpu.core.model.text import listing, printable
from aiogpu.observe.why import Why, end_in_brief
from aiogpu.wire.messages import CANCEL, KILL

KINDS: Final = {CANCEL: "task", KILL: "actor"}
"""The kind of work that each command ends."""
DONE: Final = {CANCEL: "cancelled", KILL: "killed"}


@click.command()
@click.argument(
    "tasks", metavar="TASK...", nargs=-1, required=True, shell_complete=known_tasks
)
@click.option(
    "--all", "all_named", is_flag=True, help="Cancel all tasks with the name."
)
@connect.address_option
@click.pass_context
def cancel(
    ctx: click.Context, tasks: tuple[str, ...], all_named: bool, address: str
) -> None:
    """Cancel waiting or running tasks of any program that uses the node.

    TASK is a task's number, as `aiogpu list tasks` shows it, or its name; if several
    tasks have the name, --all is needed. The caller gets a TaskCancelledError. Running
    code is interrupted, and its process is killed if the code does not stop within
    the task's cancel_grace. Leases and placements cannot be cancelled; they end with
    their program.

    \b
    Examples:
      aiogpu cancel 12 13
      aiogpu cancel train
      aiogpu cancel --all train

    \b
    Exit codes:
      0  all tasks are cancelled, or had already ended
      1  no node runs, there is no such task, or a task was not cancelled
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    ctx.exit(connect.ask(address, lambda node: _stop(node, CANCEL, tasks, all_named)))


@click.command()
@click.argument(
    "actors", metavar="ACTOR...", nargs=-1, required=True, shell_complete=known_tasks
)
@connect.address_option
@click.pass_context
def kill(ctx: click.Context, actors: tuple[str, ...], address: str) -> None:
    """Kill actors of any program that uses the node, at once and without a restart.

    ACTOR is an actor's number, as `aiogpu list actors` shows it, or its name. The
    actor's present and later calls get an ActorDiedError.

    \b
    Examples:
      aiogpu kill 7
      aiogpu kill serve

    \b
    Exit codes:
      0  all actors are killed, or had already ended
      1  no node runs, there is no such actor, or an actor was not killed
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    ctx.exit(connect.ask(address, lambda node: _stop(node, KILL, actors, False)))


async def _stop(
    node: connect.Node, what: str, named: tuple[str, ...], all_named: bool
) -> int:
    """Stop the named tasks or actors one by one; return the exit code."""
    code = 0
    for name in named:
        try:
            for number in await _numbers(node, what, name, all_named):
                echo(await stop_one(node, what, number))
        except click.ClickException as error:
            show_error(error)
            code = 1
    return code


async def _numbers(
    node: connect.Node, what: str, name: str, all_named: bool
) -> list[int]:
    """Return the numbers of the tasks or actors with a name.

    Raises:
        ClickException: no task has the name, or several have it.
    """
    if not name:
        raise click.BadParameter("it is empty.", param_hint=KINDS[what].upper())
    if is_number(name):
        return [int(name)]
    status = await node.status()
    numbers = [task.id for task in tasks_named(status, name)]
    if not numbers:
        for ended in ended_named(await node.ended(), name):
            # A name of its own, not only of its class, means an actor.
            if not ended.is_call and (what == CANCEL or ended.name != name):
                return [ended.task]
        raise nothing_named(status, name)
    if len(numbers) > 1 and not all_named:
        listed = listing(map(str, numbers), len(numbers))
        or_all = ", or give --all" if what == CANCEL else ""
        raise click.ClickException(
            f"{len(numbers)} tasks are named {printable(name)}: {listed}. Give a "
            f"number{or_all}."
        )
    return numbers


async def stop_one(node: connect.Node, what: str, number: int) -> str:
    """Cancel a task or kill an actor; return a sentence about the result.

    Raises:
        ClickException: the number is unknown, or belongs to something else.
    """
    kind, why = await node.stop(what, number)
    if why is None:
        raise click.ClickException(
            f"the node has no {KINDS[what]} {number}. `aiogpu list {KINDS[what]}s` "
            f"lists the {KINDS[what]}s."
        )
    target = f"{printable(why.name)} ({KINDS[what]} {number})"
    if kind == KINDS[what]:
        return f"{DONE[what]} {target}"
    if kind == "stopping":
        return f"{target} is already being stopped"
    if why.ended is not None:
        return f"{target} has already ended: {end_in_brief(why.ended)}"
    raise click.ClickException(_refusal(kind, why, number))


def _refusal(kind: str, why: Why, number: int) -> str:
    name = printable(why.name)
    match kind:
        case "actor":
            return f"{name} is an actor: to end it, run `aiogpu kill {number}`."
        case "task":
            return f"{name} is a task: to end it, run `aiogpu cancel {number}`."
    pid = f" (pid {why.pid})" if why.pid else ""
    return f"{name} is held by a program{pid}; it ends when that program releases it."
