"""`aiogpu stack`: where the code of a running task or an actor is."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from typing import Final

import click

from aiogpu.cli import connect
from aiogpu.cli.terminal import echo
from aiogpu.cli.views.status import known_tasks
from aiogpu.cli.views.targets import find
from aiogpu.engines.stack import named, running_process, stack_of
from aiogpu.errors import StackError
from aiogpu.observe.why import Why

NATIVE: Final = "py-spy"
"""The program that also shows the calls of native code."""


@click.command()
@click.argument("task", shell_complete=known_tasks)
@click.option(
    "--native",
    is_flag=True,
    help="Also show the calls of native code, by py-spy.",
)
@connect.address_option
@click.pass_context
def stack(ctx: click.Context, task: str, native: bool, address: str) -> None:
    """Show where the code of a running TASK or actor is.

    TASK is a number, as `aiogpu list tasks` shows it, or the name of a task or an
    actor. The calls of each thread are listed, the innermost last, and those of each
    coroutine that awaits something. The task goes on. While native code runs, such as
    a kernel launch that waits, only the Python calls of the main thread are known;
    with --native, py-spy shows all threads, and the calls of native code too.

    \b
    Examples:
      aiogpu stack 12
      aiogpu stack train
      aiogpu stack --native train

    \b
    Exit codes:
      0  the stack was printed
      1  no node runs, there is no such task, it does not run, or it does not answer
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    why = find(address, task)
    try:
        if native:
            ctx.exit(_show_native(why))
        echo(asyncio.run(stack_of(why)))
    except StackError as error:
        raise click.ClickException(str(error)) from None


def _show_native(why: Why) -> int:
    """Show the stack by py-spy; return its exit code."""
    pid, program = running_process(why), shutil.which(NATIVE)
    if program is None:
        raise click.ClickException(
            f"--native needs {NATIVE}: `pip install 'aiogpu[py-spy]'`. Without "
            f"--native the Python calls are shown, also while native code runs."
        )
    echo(f"{named(why)}, pid {pid}, by {NATIVE}:")
    command = [program, "dump", "--native", "--pid", str(pid)]
    return subprocess.run(command, check=False).returncode
