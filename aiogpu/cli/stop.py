"""`aiogpu cancel` and `kill`: end tasks and actors of any program of the node."""

from __future__ import annotations

from typing import Final, NamedTuple

import click

from aiogpu.cli import connect
from aiogpu.cli.terminal import echo, show_error
from aiogpu.cli.views.status import (
    ended_named,
    is_number,
    known_tasks,
    nothing_named,
)
from aiogpu.core.model.text import listing, printable
from aiogpu.observe.why import Why, end_in_brief
from aiogpu.wire.messages import (
    CANCEL,
    CANCEL_ALL,
    CANCEL_NAMED,
    KILL,
    KILL_NAMED,
)

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
    their program. If one of them has the name too, --all reports it, cancels the tasks,
    and exits with 1.

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
            if not name:
                raise click.BadParameter("it is empty.", param_hint=KINDS[what].upper())
            if is_number(name):
                echo(await stop_one(node, what, int(name)))
            elif not await _stop_named(node, what, name, all_named):
                code = 1
        except click.ClickException as error:
            show_error(error)
            code = 1
    return code


async def _stop_named(
    node: connect.Node, what: str, name: str, all_named: bool
) -> bool:
    """Stop tasks or actors by name; return whether none was refused.

    Raises:
        ClickException: no task has the name, or several have it.
    """
    how = KILL_NAMED if what == KILL else CANCEL_ALL if all_named else CANCEL_NAMED
    report = await node.stop_named(how, name)
    if not report.count:
        for ended in ended_named(await node.ended(), name):
            # A name of its own, not only of its class, means an actor.
            if not ended.is_call and (what == CANCEL or ended.name != name):
                echo(await stop_one(node, what, ended.task))
                return True
        raise nothing_named(await node.status(), name, knows_all=True)
    if not report.counts:
        or_all = ", or give --all" if what == CANCEL else ""
        raise click.ClickException(
            f"{report.count} tasks are named {printable(name)}: "
            f"{listing(map(str, report.numbers), report.count)}. Give a number{or_all}."
        )
    is_done = True
    for kind, count in report.counts.items():
        shown = [why for each, why in report.first if each == kind]
        outcomes = [_outcome(what, kind, why) for why in shown]
        if count > len(shown):
            outcomes.append(_of_more(what, kind, count - len(shown), printable(name)))
        for outcome in outcomes:
            if outcome.is_refused:
                show_error(click.ClickException(outcome.text))
                is_done = False
            else:
                echo(outcome.text)
    return is_done


class StopOutcome(NamedTuple):
    """What became of a task or actor that was to be stopped.

    Attributes:
        text: a sentence.
        is_refused: True if it cannot be stopped in this way, and goes on.
    """

    text: str
    is_refused: bool = False


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
    outcome = _outcome(what, kind, why)
    if outcome.is_refused:
        raise click.ClickException(outcome.text)
    return outcome.text


def _outcome(what: str, kind: str, why: Why) -> StopOutcome:
    """Describe the result of `RemoteEngine.stop_task`, with the state before."""
    name = printable(why.name)
    target = f"{name} ({KINDS[what]} {why.task})"
    if kind == KINDS[what]:
        return StopOutcome(f"{DONE[what]} {target}")
    match kind:
        case "stopping":
            return StopOutcome(f"{target} is already being stopped")
        case "":
            end = "" if why.ended is None else f": {end_in_brief(why.ended)}"
            return StopOutcome(f"{target} has already ended{end}")
        case "actor":
            text = f"{name} is an actor: to end it, run `aiogpu kill {why.task}`."
        case "task":
            text = f"{name} is a task: to end it, run `aiogpu cancel {why.task}`."
        case _:
            pid = f" (pid {why.pid})" if why.pid else ""
            text = (
                f"{name} is held by a program{pid}; it ends when that program releases "
                f"it."
            )
    return StopOutcome(text, is_refused=True)


def _of_more(what: str, kind: str, count: int, name: str) -> StopOutcome:
    """Describe further tasks with a name that had the same outcome."""
    if kind == KINDS[what]:
        return StopOutcome(f"{DONE[what]} {count} more {kind}s named {name}")
    match kind:
        case "stopping":
            return StopOutcome(f"{count} more are already being stopped")
        case "":
            return StopOutcome(f"{count} more have already ended")
    return StopOutcome(f"{count} more {kind}s named {name} go on.", is_refused=True)
