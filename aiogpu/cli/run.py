"""`aiogpu run -- COMMAND`: a command waits its turn for GPUs that others use too.

It holds a lease of the user's node for as long as the command or anything that it has
started lives. 125 is a failure of this program's own, 124 a turn that has not come in
time; 126, 127 and all else are as from a shell.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import click

from aiogpu.api.lease import Lease, lease_site
from aiogpu.api.node import Opening
from aiogpu.cli.command import (
    ENDING,
    NOT_EXECUTABLE,
    NOT_FOUND,
    Command,
    Signals,
    end_as,
)
from aiogpu.cli.joining import address_option, check_there
from aiogpu.cli.quantities import Number, Seconds, size_or_share
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import AiogpuError, OptionError, TaskTimeoutError
from aiogpu.wire.messages import LEASE_MARK

FAILED: Final = 125
NOT_IN_TIME: Final = 124
SHOWN_AFTER: Final = 0.3
"""Seconds of waiting after which it is said why; then each second."""
KILLED_AFTER: Final = 2.0
"""Seconds that what a command has left behind gets to end, when it is to."""
NAMED: Final = 40
"""Characters of a command line by which its lease is called."""


class BadLine(click.UsageError):
    """A mistake in the line of `aiogpu run`: 2 might be the command's."""

    exit_code = FAILED


class RunCommand(click.Command):
    """A command whose mistakes are `BadLine`."""

    def make_context(self, *given: Any, **more: Any) -> click.Context:
        """See click; what is wrong is told with another exit code."""
        try:
            return super().make_context(*given, **more)
        except click.UsageError as error:
            raise BadLine(error.format_message(), error.ctx) from None


@click.command(cls=RunCommand, context_settings={"allow_interspersed_args": False})
@click.option("--num-gpus", type=Number(0), help="Share of a GPU, or whole ones. [1]")
@click.option("--num-cpus", type=Number(0), help="CPUs to keep from others. [0]")
@click.option(
    "--gpu-memory",
    type=size_or_share,
    metavar="SIZE",
    help='On each GPU, such as "6GiB".',
)
@click.option("--gpu-type", metavar="TYPE", help="Only such GPUs, as in `aiogpu gpus`.")
@click.option("--resources", metavar="JSON", help="""Others, '{"license": 1}'.""")
@click.option("--priority", type=int, default=0, help="Higher goes first. [0]")
@click.option("--name", help="For `aiogpu status`; the command unless given.")
@click.option("--timeout", type=Seconds(0, min_open=True), help="To wait at most.")
@address_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, /, command: Sequence[str], **options: Any) -> None:
    """Run COMMAND when its turn has come, with GPUs of its own.

    It gets the variables that say which, such as CUDA_VISIBLE_DEVICES, and keeps them
    from others until it has ended, with all that it has started. Signals go to it; the
    exit code is its own, or 125 if it could not be run at all.

    Example: aiogpu run --num-gpus=0.5 -- python train.py
    """
    address = options.pop("address")
    signals = Signals()
    ending = _Ending(signals)
    try:
        asked = _asked(command, **options)
        check_there(address)
        code = asyncio.run(_hold(Lease(*lease_site(asked)), command, address, ending))
    except TaskTimeoutError as error:
        code = _say(str(error), NOT_IN_TIME)
    except click.ClickException as error:
        code = _say(error.message, FAILED)
    except AiogpuError as error:
        code = _say(str(error), FAILED)
    ctx.exit(code if code is not None else end_as(ending.status))


def _asked(
    command: Sequence[str], gpu_type: str | None, resources: str | None, **rest: Any
) -> dict[str, Any]:
    """The options of the lease."""
    asked = {option: value for option, value in rest.items() if value is not None}
    if gpu_type is not None:
        asked["accelerator_type"] = gpu_type
    if resources is not None:
        try:
            asked["resources"] = json.loads(resources)
        except ValueError as error:
            raise OptionError(
                f"--resources={resources!r} is no JSON ({error}); write it such as "
                f"--resources='{{\"license\": 1}}'."
            ) from None
    if not asked.keys() & {"num_gpus", "num_cpus", "gpu_memory", "resources"}:
        asked["num_gpus"] = 1
    if not asked.get("name"):
        line = shlex.join(command)
        asked["name"] = line if len(line) <= NAMED else line[: NAMED - 3] + "..."
    return asked


def _say(text: str, code: int = 0) -> int:
    click.echo(f"aiogpu run: {text}", err=True)
    return code


class _Ending:
    """How this program is to end: asked to by a signal, or as the command has.

    Attributes:
        signals: tells of what this process is sent.
        status: the wait status to end with.
    """

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self.status = 0

    async def unless_asked(self, awaited: asyncio.Task[Any]) -> bool:
        """Wait for something; False, and it is cancelled, if a signal comes first."""

        def on_signal(number: signal.Signals, _: bool) -> None:
            if number in ENDING:
                self.status = number  # as the wait status of who ends by it
                awaited.cancel()

        self.signals.on_signal = on_signal
        await asyncio.wait([awaited])
        if self.status and awaited.cancelled():
            return False
        awaited.result()
        self.status = 0
        return True


async def _hold(
    lease: Lease, command: Sequence[str], address: str, ending: _Ending
) -> int | None:
    """Wait, run, and wait for what is left; None if it ends as `ending` says."""
    loop = asyncio.get_running_loop()
    ending.signals.listen(loop)
    options = NodeOptions(only_looks=True, log_to_driver=False)
    opening = Opening(address, options, ignore_reinit_error=False)
    if not await ending.unless_asked(loop.create_task(opening.__aenter__())):
        return None
    try:
        asking = loop.create_task(lease.__aenter__())
        telling = loop.create_task(_tell_why(lease, asking))
        try:
            if not await ending.unless_asked(asking):
                return None
        finally:
            telling.cancel()
            await asyncio.wait([telling])
        try:
            return await _run(lease, command, ending, loop)
        finally:
            await lease.release()
    finally:
        await opening.__aexit__(None, None, None)


async def _tell_why(lease: Lease, asking: asyncio.Task[Any]) -> None:
    """Say on one line of the terminal why it waits, as long as it does."""
    if not sys.stderr.isatty():
        return
    is_shown = False
    try:
        await asyncio.sleep(SHOWN_AFTER)
        while not asking.done():
            why = await lease.why()
            if why.state == "waiting" and not asking.done():
                told = "; ".join(map(str.strip, str(why).splitlines()))
                width = max(shutil.get_terminal_size().columns - 1, 20)
                text = f"aiogpu run: {told}"
                text = text if len(text) <= width else text[: width - 3] + "..."
                sys.stderr.write(f"\r{text}\x1b[K")
                sys.stderr.flush()
                is_shown = True
            await asyncio.sleep(1.0)
    except AiogpuError:
        pass  # who waits for the lease is told
    finally:
        if is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _environ(lease: Lease) -> dict[str, str]:
    """The command's variables; a lease within a lease is marked as both."""
    environ = {**os.environ, **lease.environ}
    if outer := os.environ.get(LEASE_MARK):
        environ[LEASE_MARK] = f"{outer},{lease.environ[LEASE_MARK]}"
    return environ


async def _run(
    lease: Lease,
    arguments: Sequence[str],
    ending: _Ending,
    loop: asyncio.AbstractEventLoop,
) -> int | None:
    try:
        command = Command(arguments, _environ(lease), ending.signals.mask, loop)
    except FileNotFoundError as error:
        return _say(f"{arguments[0]}: {error.strerror}", NOT_FOUND)
    except OSError as error:
        return _say(f"{arguments[0]}: {error.strerror}", NOT_EXECUTABLE)
    ending.signals.on_signal = command.hear
    command.hear(signal.SIGCHLD, True)  # it may have ended already
    watching = loop.create_task(_watch(lease, arguments[0]))
    try:
        await command.ended
        ending.status = command.status
        await _await_rest(command, lease, arguments[0], ending, loop)
    finally:
        watching.cancel()
    return None


async def _watch(lease: Lease, name: str) -> None:
    """Say it if the lease is gone."""
    error = await lease.lost()
    _say(f"{name} goes on, but its lease is gone and others may get its GPUs: {error}")


async def _await_rest(
    command: Command,
    lease: Lease,
    name: str,
    ending: _Ending,
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Wait for what a command has left behind; who wants this to end ends that."""
    left = command.left()
    if command.all_ended.done() or not left:
        return
    held = ", ".join(f"GPU {each}" for each in lease.ids) or "its lease"
    pids = ", ".join(map(str, left[:8])) + (", ..." if len(left) > 8 else "")
    _say(
        f"{name} has ended, but processes that it has started have not, and hold "
        f"{held}: pid {pids}. Ctrl-C ends them."
    )
    asked = 0

    def kill(number: signal.Signals) -> None:
        for pid in command.left():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def on_signal(number: signal.Signals, is_kernels: bool) -> None:
        nonlocal asked
        if number in ENDING:
            asked += 1
            kill(signal.SIGTERM if asked == 1 else signal.SIGKILL)
            if asked == 1:
                loop.call_later(KILLED_AFTER, kill, signal.SIGKILL)
        else:
            command.hear(number, is_kernels)

    ending.signals.on_signal = on_signal
    await command.all_ended
