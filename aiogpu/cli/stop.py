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
from aiogpu.core.model.text import listing, printable
from aiogpu.observe.why import Why, end_in_brief
from aiogpu.wire.messages import CANCEL, KILL

WANTED: Final = {CANCEL: "task", KILL: "actor"}
"""What each command ends; the rest it leaves alone."""
DONE: Final = {CANCEL: "cancelled", KILL: "killed"}


@click.command()
@click.argument(
    "tasks", metavar="TASK...", nargs=-1, required=True, shell_complete=known_tasks
)
@click.option("--all", "all_named", is_flag=True, help="All tasks of a name.")
@connect.address_option
@click.pass_context
def cancel(
    ctx: click.Context, tasks: tuple[str, ...], all_named: bool, address: str
) -> None:
    """Cancel tasks of any program of the node, whether they wait or run.

    TASK is a number, as `aiogpu list tasks` shows it, or a name; if several tasks have
    that name, none is cancelled without --all. The caller gets a TaskCancelledError.
    Code that runs is interrupted, and its process is killed if that does not help
    within the task's cancel_grace. Leases and placements end with their program only.

    \b
    Examples:
      aiogpu cancel 12 13
      aiogpu cancel train
      aiogpu cancel --all train

    \b
    Exit codes:
      0  all of them are cancelled, or had ended already
      1  no node runs, it has no such task, or one was left alone
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
    """Kill actors of any program of the node, at once and without a restart.

    ACTOR is a number, as `aiogpu list actors` shows it, or a name. Its calls, and those
    that come later, get an ActorDiedError.

    \b
    Examples:
      aiogpu kill 7
      aiogpu kill serve

    \b
    Exit codes:
      0  all of them are killed, or had ended already
      1  no node runs, it has no such actor, or one was left alone
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    ctx.exit(connect.ask(address, lambda node: _stop(node, KILL, actors, False)))


async def _stop(
    node: connect.Node, what: str, named: tuple[str, ...], all_named: bool
) -> int:
    """Stop what was named, one after the other; returns the exit code."""
    code = 0
    for name in named:
        try:
            for number in await _numbers(node, what, name, all_named):
                click.echo(await stop_one(node, what, number))
        except click.ClickException as error:
            error.show()
            code = 1
    return code


async def _numbers(
    node: connect.Node, what: str, name: str, all_named: bool
) -> list[int]:
    """The numbers of what a user has named.

    Raises:
        ClickException: nothing has that name, or several have.
    """
    if not name:
        raise click.BadParameter("is empty.", param_hint=WANTED[what].upper())
    if is_number(name):
        return [int(name)]
    status = await node.status()
    found = [one.id for one in tasks_named(status, name)]
    if not found:
        for ended in ended_named(await node.ended(), name):
            # A name of its own is an actor's.
            if not ended.is_call and (what == CANCEL or ended.name != name):
                return [ended.task]
        raise nothing_named(status, name)
    if len(found) > 1 and not all_named:
        told = listing(map(str, found), len(found))
        every = " or all of them by --all" if what == CANCEL else ""
        raise click.ClickException(
            f"{len(found)} tasks are named {printable(name)}: {told}. Name one by its "
            f"number{every}."
        )
    return found


async def stop_one(node: connect.Node, what: str, number: int) -> str:
    """Cancel a task or kill an actor; return what was done, in words.

    Raises:
        ClickException: there is none of that number, or it is something else.
    """
    kind, why = await node.stop(what, number)
    if why is None:
        raise click.ClickException(
            f"the node knows no {WANTED[what]} {number}. `aiogpu list "
            f"{WANTED[what]}s` shows what there is."
        )
    who = f"{printable(why.name)} ({WANTED[what]} {number})"
    if kind == WANTED[what]:
        return f"{DONE[what]} {who}"
    if kind == "stopping":
        return f"{who} is being stopped already"
    if why.ended is not None:
        return f"{who} has ended already: {end_in_brief(why.ended)}"
    raise click.ClickException(_refusal(kind, why, number))


def _refusal(kind: str, why: Why, number: int) -> str:
    name = printable(why.name)
    match kind:
        case "actor":
            return f"{name} is an actor: end it by `aiogpu kill {number}`."
        case "task":
            return f"{name} is a task: end it by `aiogpu cancel {number}`."
    of = f", pid {why.pid}" if why.pid else ""
    return f"{name} is held by the program that has asked for it{of}, and ends with it."
