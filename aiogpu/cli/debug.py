"""`aiogpu debug`: a debugger in this terminal for a task that waits at a breakpoint.

The worker runs `pdb`; this command shows its output and sends it the lines that are
typed. Between two breakpoints the command asks the node whether the task still runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from threading import Thread, get_ident
from typing import Any, Final

import click

from aiogpu.cli import connect
from aiogpu.cli.terminal import echo
from aiogpu.cli.views.status import known_tasks
from aiogpu.cli.views.targets import find_on
from aiogpu.core.model.text import printable
from aiogpu.engines.stack import named, running_process
from aiogpu.errors import NodeError, NoSuchTaskError, StackError
from aiogpu.linux.sockets import check_server
from aiogpu.observe.why import Why

LOOPBACK: Final = "127.0.0.1"
LOOK: Final = 0.5
"""Seconds between two questions to the node whether the task still runs."""


class Endpoint(click.ParamType[tuple[str, int]]):
    """HOST:PORT or PORT."""

    name = "host:port"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """Return the host and the port; `BadParameter` if there is no such port."""
        if isinstance(value, tuple):
            return value
        host, _, port = value.rpartition(":")
        if not (port.isdecimal() and port.isascii() and int(port) < 1 << 16):
            self.fail(
                f"{value!r} is no port: write PORT or HOST:PORT, such as 5678; 0 "
                f"chooses a free one.",
                param,
                ctx,
            )
        return host.strip("[]") or LOOPBACK, int(port)


@click.command()
@click.argument("task", shell_complete=known_tasks)
@click.option(
    "--listen",
    type=Endpoint(),
    metavar="[HOST:]PORT",
    help="Let an editor attach here by debugpy, instead of pdb in this terminal.",
)
@click.option(
    "--any-host",
    is_flag=True,
    help="Allow a HOST other than loopback: whoever reaches the port can run code.",
)
@connect.address_option
@click.pass_context
def debug(
    ctx: click.Context,
    task: str,
    listen: tuple[str, int] | None,
    any_host: bool,
    address: str,
) -> None:
    """Attach a debugger to a TASK or actor that waits at a `breakpoint()`.

    TASK is a number or a name, as for `aiogpu stack`. The commands are those of pdb.
    At `c` the task goes on to its next breakpoint, and this command waits for it.
    Ctrl-D, `q` or the end of this terminal let the task go on without a debugger.

    \b
    Examples:
      aiogpu debug 12
      aiogpu debug train
      aiogpu debug train --listen 5678

    \b
    Exit codes:
      0  the task goes on, or has ended
      1  no node runs, there is no such task, or it waits for no debugger
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    if any_host and listen is None:
        raise click.UsageError("--any-host needs --listen.", ctx)
    if listen is not None and not any_host and not _is_loopback(listen[0]):
        raise click.BadParameter(
            f"{listen[0]} may be reached from other machines, and whoever connects can "
            f"run code as this user. Use {LOOPBACK} and a tunnel, `ssh -L "
            f"{listen[1]}:{LOOPBACK}:{listen[1]} MACHINE`, or add --any-host.",
            param_hint="--listen",
        )
    if not task:
        raise click.BadParameter("it is empty.", param_hint="TASK")
    ctx.exit(asyncio.run(_debug(address, task, listen)))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return False


async def _debug(address: str, name: str, listen: tuple[str, int] | None) -> int:
    async with connect.joined(address) as node:
        why = await find_on(node, name)
        try:
            running_process(why)
        except StackError as error:
            raise click.ClickException(str(error)) from None
        if not why.halted:
            raise click.ClickException(
                f"{named(why)} waits for no debugger: write `breakpoint()` where it is "
                f"to stop. `aiogpu stack {why.task}` shows where it is."
            )
        if not why.debugger:
            raise click.ClickException(f"{named(why)} is in a debugger already.")
        with _connected(why.debugger) as worker:
            worker.send(listen=listen)
            return await _converse(node, why, worker, CtrlC())


@contextmanager
def _connected(path: str) -> Iterator[Worker]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
        try:
            connected.connect(path)
        except OSError as error:
            raise click.ClickException(
                f"the task has gone on meanwhile: {path}: {error.strerror}."
            ) from None
        check_server(connected, path)
        yield Worker(connected)


class Worker:
    """The worker at the other end; see `aiogpu.worker.debug.terminal`."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._received = b""
        self.is_open = True

    def send(self, **message: object) -> None:
        """Send a message; nothing if the worker has gone."""
        with suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Return the next message; None without one within `seconds`, or at the end."""
        while b"\n" not in self._received:
            if not select.select([self.socket], [], [], seconds)[0]:
                return None
            data = b""
            with suppress(OSError):
                data = self.socket.recv(65536)
            if not data:
                self.is_open = False
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Let the task go on."""
        self.socket.close()
        self.is_open = False


class CtrlC:
    """Context manager: Ctrl-C raises `KeyboardInterrupt` in the block, and only there.

    Elsewhere it is kept for the next block. asyncio's own handler would cancel the main
    task, which does not end the wait for a line.
    """

    def __init__(self) -> None:
        self._is_open = self._is_pending = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, _number: int, _frame: object) -> None:
        if self._is_open:
            raise KeyboardInterrupt
        self._is_pending = True

    def __enter__(self) -> None:
        self._is_open = True
        if self._is_pending:
            self._is_open = self._is_pending = False
            raise KeyboardInterrupt

    def __exit__(self, *_error: object) -> None:
        self._is_open = False


class WorkerGoneError(Exception):
    """The worker has closed its end while a line was typed."""


async def _converse(node: connect.Node, why: Why, worker: Worker, ctrl_c: CtrlC) -> int:
    """Show what the worker sends, and send what is typed, until either end closes."""
    while worker.is_open:
        try:
            with ctrl_c:
                message = worker.receive(LOOK)
            if message is None:
                if worker.is_open and await _state_of(node, why.task) == "ended":
                    break
            elif "text" in message:
                sys.stdout.write(_shown(message["text"]))
                sys.stdout.flush()
            elif "prompt" in message:
                line = _read_line(_shown(message["prompt"]), worker, ctrl_c)
                if line is None:
                    break
                worker.send(line=line)
            elif "error" in message:
                raise click.ClickException(printable(message["error"]))
        except WorkerGoneError:
            echo("")  # after the prompt; the worker may have said why
        except KeyboardInterrupt:
            break
    worker.close()
    state = await _state_of(node, why.task)
    what = {"ended": "has ended", "stopping": "is being stopped"}.get(state, "goes on")
    echo(f"{named(why)} {what}.", err=True)
    return 0


def _shown(text: str) -> str:
    """Replace control characters by "?", except for ends of lines and tabs."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else "?" for each in text
    )


async def _state_of(node: connect.Node, task: int) -> str:
    try:
        why = await node.why(task)
    except (NoSuchTaskError, NodeError, click.ClickException):
        return "ended"  # or its node has
    return why.state


def _read_line(prompt: str, worker: Worker, ctrl_c: CtrlC) -> str | None:
    """Return a line of the terminal; None at its end.

    Raises:
        WorkerGoneError: the worker has closed its end, or sent something.
    """
    if sys.stdin.isatty():
        # Edits lines, and keeps their history.
        with suppress(ImportError):
            import readline  # noqa: F401
    while True:
        try:
            with _interrupted_by(worker), ctrl_c:
                return input(prompt)
        except EOFError:
            echo("", err=True)
            return None
        except KeyboardInterrupt:
            echo("")  # the line is given up, as at pdb's own prompt


@contextmanager
def _interrupted_by(worker: Worker) -> Iterator[None]:
    """Raise `WorkerGoneError` in the block if the worker closes or sends something.

    The terminal is read by a C function, which only a signal interrupts.
    """
    main = get_ident()
    done, wake = os.pipe()

    def watch() -> None:
        ready, _, _ = select.select([worker.socket.fileno(), done], [], [])
        if worker.socket.fileno() in ready:
            signal.pthread_kill(main, signal.SIGUSR1)

    def interrupt(_number: int, _frame: object) -> None:
        raise WorkerGoneError

    before = signal.signal(signal.SIGUSR1, interrupt)
    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        os.close(wake)
        watcher.join()
        os.close(done)
        signal.signal(signal.SIGUSR1, before)
