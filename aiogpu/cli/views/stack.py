"""`aiogpu stack`: where the code of a running task or an actor is.

The command asks the task's process by a signal. The process answers with an anonymous
file, which the command reads through `/proc`: no part of the node is involved, and
nothing is done for a task that nobody asks about.
"""

from __future__ import annotations

import asyncio
import linecache
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from aiogpu.cli import connect
from aiogpu.cli.terminal import echo
from aiogpu.cli.views.status import is_number, known_tasks, nothing_named, tasks_named
from aiogpu.core.model.text import listing, printable
from aiogpu.observe.why import Why
from aiogpu.worker.interrupts import STACK_END, STACK_FILE, STACK_SIGNAL

PATIENCE: Final = 2.0
"""Seconds in which Python code answers; native code does not answer at all."""
POLL: Final = 0.01
"""Seconds between two looks for the answer."""
RUNNING: Final = ("running", "blocked", "stopping")
"""States in which the code of a task may run in its process."""
NATIVE: Final = "py-spy"
"""The program that also reads the stack of a process that runs native code."""


@click.command()
@click.argument("task", shell_complete=known_tasks)
@connect.address_option
@click.pass_context
def stack(ctx: click.Context, task: str, address: str) -> None:
    """Show where the code of a running TASK or actor is.

    TASK is a number, as `aiogpu list tasks` shows it, or the name of a task or an
    actor. The calls of each thread are listed, the innermost last, and those of each
    coroutine that awaits something. The task goes on. A main thread that runs native
    code, such as a kernel launch that waits, answers only when it is back in Python;
    if py-spy is installed, it is used then.

    \b
    Examples:
      aiogpu stack 12
      aiogpu stack train

    \b
    Exit codes:
      0  the stack was printed
      1  no node runs, there is no such task, it does not run, or it does not answer
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    if not task:
        raise click.BadParameter("it is empty.", param_hint="TASK")
    why = connect.ask(address, lambda node: _find(node, task))
    ctx.exit(asyncio.run(_show(why)))


async def _find(node: connect.Node, name: str) -> Why:
    """Return the state of the task with a number or a name."""
    if is_number(name):
        return await node.why(int(name))
    status = await node.status()
    found = tasks_named(status, name)
    if not found:
        raise nothing_named(status, name)
    running = [task for task in found if task.worker is not None] or found
    if len(running) > 1:
        numbers = listing([str(task.id) for task in running], len(running))
        raise click.ClickException(
            f"{len(running)} tasks are named {printable(name)}: {numbers}. Give a "
            f"number."
        )
    return await node.why(running[0].id)


async def _show(why: Why) -> int:
    """Print the stack of a task; return the exit code."""
    what = f"{printable(why.name)} (task {why.task})"
    if why.is_lease:
        raise click.ClickException(
            f"{what} is a lease: its processes are not workers of the node. Ask them "
            f"with a tool of their language."
        )
    if not why.pid or why.state not in RUNNING:
        raise click.ClickException(f"{what} does not run: {why}")
    text = await _ask(why.pid)
    if text is None:
        return _show_native(what, why.pid)
    echo(f"{what}, pid {why.pid}")
    for line in _with_sources(text):
        echo(line)
    return 0


async def _ask(pid: int) -> str | None:
    """Return what a process answers; None if it does not within `PATIENCE`."""
    before = _answers(pid)
    try:
        os.kill(pid, STACK_SIGNAL)
    except ProcessLookupError:
        raise click.ClickException(f"process {pid} has just ended.") from None
    except PermissionError:
        raise click.ClickException(
            f"process {pid} belongs to another user; only root and that user may look "
            f"into it."
        ) from None
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while True:
                for name in _answers(pid) - before:
                    text = _read(pid, name)
                    if text.endswith(f"{STACK_END}\n"):
                        return text
                await asyncio.sleep(POLL)
    return None


def _answers(pid: int) -> set[tuple[str, int]]:
    """Return the descriptors with answers of a process, each with its inode."""
    found = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if STACK_FILE in entry.readlink().name:
                    found.add((entry.name, entry.stat().st_ino))
    return found


def _read(pid: int, name: tuple[str, int]) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/fd/{name[0]}").read_text("utf-8", "replace")
    return ""


def _with_sources(text: str) -> Iterator[str]:
    """Yield the lines to print: the heads, and each call with its line of source."""
    lines = text.splitlines()[:-1]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        place, _, function = line.rpartition(" ")
        file, _, number = place.rpartition(":")
        if not number.isdecimal():
            is_idle = ":" not in following
            yield f"{printable(line)}:{' no code of yours runs' if is_idle else ''}"
            continue
        yield f"  {printable(file)}:{number} in {printable(function)}"
        if source := linecache.getline(file, int(number)).strip():
            yield f"    {printable(source)}"


def _show_native(what: str, pid: int) -> int:
    """Show a stack from outside, or say how; return the exit code."""
    program = shutil.which(NATIVE)
    if program is None:
        raise click.ClickException(
            f"{what} has not answered within {PATIENCE:g} s: its main thread runs "
            f"native code (pid {pid}). `pip install py-spy` lets this command show the "
            f"stack all the same."
        )
    echo(f"{what} runs native code; {NATIVE} shows:")
    return subprocess.run([program, "dump", "--pid", str(pid)], check=False).returncode
