"""`aiogpu run -- COMMAND`: run a command under a lease of the user's node.

The lease is held until the command and every process that it started have ended. Exit
codes: 125 this program failed, 124 the lease was not granted in time; 126, 127 and all
others as from a shell.

The command stays in this process group: the kernel sends the signals of the terminal,
Ctrl-C or Ctrl-Z, to both, and the shell does job control with both. Signals that are
sent to this process alone are passed on.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, Final

import click

from aiogpu.api.reservation import Lease, lease_func
from aiogpu.cli.connect import (
    Number,
    Seconds,
    check_there,
    joining,
    service_option,
    size_or_share,
)
from aiogpu.errors import AiogpuError, OptionError, TaskTimeoutError
from aiogpu.linux.procfs import descendants
from aiogpu.linux.syscalls import adopt_orphans
from aiogpu.wire.messages import LEASE_MARK

SENT_ON: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT),
)
"""Signals that are passed on to the command."""
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end this process."""
STOP_DELAY: Final = 0.05
"""Seconds to wait for a SIGSTOP of this process after the command was stopped."""
NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126


class SignalListener:
    """Delivers the signals of this process on its event loop, with their senders.

    The signals are blocked and a thread waits for them, so that none is lost before the
    loop runs. `siginfo` tells which of them the kernel also sent to the command.
    """

    def __init__(self) -> None:
        # A signal that is ignored here, as by nohup(1), stays ignored in the command.
        wanted = {s for s in SENT_ON if signal.getsignal(s) is not signal.SIG_IGN}
        self._awaited = {*wanted, signal.SIGCHLD}
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._awaited)
        self.on_signal: Callable[[signal.Signals, bool], object] = lambda *_: None

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call `on_signal` for each: the signal, and whether the kernel sent it."""
        run = Thread(target=self._run, args=(loop,), name="signals", daemon=True)
        run.start()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            info = signal.sigwaitinfo(self._awaited)
            told = signal.Signals(info.si_signo), info.si_code > 0
            try:
                loop.call_soon_threadsafe(lambda told: self.on_signal(*told), told)
            except RuntimeError:
                return  # the loop is closed


class Command:
    """A running command, and the processes that it starts.

    Attributes:
        status: its wait status, once it has ended.
        ended: done when it has ended.
        all_ended: done when every process that it started has ended.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        mask: Iterable[int],
    ) -> None:
        """Start the command, on the loop that calls `hear`.

        Args:
            arguments: its name and its arguments.
            environ: all its variables.
            mask: the signals that are blocked in it.

        Raises:
            OSError: it does not exist, or cannot be executed.
        """
        loop = asyncio.get_running_loop()
        self.status = 0
        self.ended: asyncio.Future[None] = loop.create_future()
        self.all_ended: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._stopping: asyncio.TimerHandle | None = None
        adopt_orphans()
        # Python ignores these two; the command is not to inherit that.
        own = (signal.SIGPIPE, signal.SIGXFSZ)
        self.pid = os.posix_spawnp(
            *(arguments[0], list(arguments), dict(environ)),
            setsigmask=tuple(mask),
            setsigdef=own,
        )

    def hear(self, number: signal.Signals, is_kernels: bool) -> None:
        """This process got a signal; see `SignalListener`."""
        if number is signal.SIGCHLD:
            self._reap()
        elif not is_kernels and not self.ended.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _reap(self) -> None:
        flags = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
        while True:
            try:
                pid, status = os.waitpid(-1, flags)
            except ChildProcessError:
                if not self.all_ended.done():
                    self.all_ended.set_result(None)
                return
            if not pid:
                return
            if pid == self.pid:
                self._note(status)

    def _note(self, status: int) -> None:
        if self._stopping is not None:
            self._stopping.cancel()
            self._stopping = None
        if os.WIFSTOPPED(status):
            self._stopping = self._loop.call_later(STOP_DELAY, _stop_as_well)
        elif not os.WIFCONTINUED(status):
            self.status = status
            self.ended.set_result(None)

    def left(self) -> list[int]:
        """Return the descendants of this process that have not ended."""
        return [one.pid for one in descendants(os.getpid()) if one.state != "Z"]


def _stop_as_well() -> None:
    """Stop this process too, so that its shell sees that the command was stopped."""
    os.kill(os.getpid(), signal.SIGSTOP)


def end_like(status: int) -> int:
    """End by the signal that ended a command; without one, return its exit code."""
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    import resource

    number = os.WTERMSIG(status)
    sys.stdout.flush()
    sys.stderr.flush()
    # The core of the command is useful, that of this process is not.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    return 128 + number


FAILED: Final = 125
NOT_IN_TIME: Final = 124
SHOWN_AFTER: Final = 0.3
"""Seconds of waiting after which the reason is shown; then each second."""
KILLED_AFTER: Final = 2.0
"""Seconds between SIGTERM and SIGKILL for processes that a command left behind."""
NAMED: Final = 40
"""Characters of the command line that become the name of its lease."""


class RunUsageError(click.UsageError):
    """A usage error of `aiogpu run`. Not 2, which may be the code of the command."""

    exit_code = FAILED


class RunCommand(click.Command):
    """A click command whose usage errors are `RunUsageError`."""

    def make_context(self, *given: Any, **more: Any) -> click.Context:
        """See click; usage errors get another exit code."""
        try:
            return super().make_context(*given, **more)
        except click.UsageError as error:
            raise RunUsageError(error.format_message(), error.ctx) from None


@click.command(cls=RunCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--num-gpus",
    type=Number(0),
    help="Share of a GPU, or whole ones; 1 if nothing else is asked for.",
)
@click.option("--num-cpus", type=Number(0), help="CPUs to keep from others. [0]")
@click.option(
    "--gpu-memory",
    type=size_or_share,
    metavar="SIZE",
    help="Memory of each GPU, beside or instead of --num-gpus: 6GiB, or `share` for "
    "the same share of it. JAX, CuPy and TensorFlow are limited to it.",
)
@click.option("--gpu-type", metavar="TYPE", help="Only such GPUs, as in `aiogpu gpus`.")
@click.option("--resources", metavar="JSON", help="""Others: '{"license": 1}'.""")
@click.option("--priority", type=int, default=0, help="Higher goes first. [0]")
@click.option("--name", help="For `aiogpu status`; the command unless given.")
@click.option(
    "--timeout",
    type=Seconds(0, min_open=True),
    help="How long to wait at most; then exit code 124.",
)
@service_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, /, command: Sequence[str], **options: Any) -> None:
    """Run COMMAND with its own GPUs, as soon as they are free.

    Variables such as CUDA_VISIBLE_DEVICES tell it which GPUs. It holds them until it
    and every process that it started have ended. While it waits, a line in the terminal
    says why. Input, output and process group are its own, and signals are passed on to
    it: SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH and SIGCONT.

    \b
    Example:
      aiogpu run --num-gpus=0.5 -- python train.py

    \b
    Exit codes are those of COMMAND (if a signal ends COMMAND, the same signal), or:
      124  --timeout has passed
      125  no node, more than the node has, or a bad option
      126  COMMAND cannot be executed
      127  COMMAND is not there
    """  # noqa: D301 - click's mark for lines to be left as they are
    address = options.pop("address")
    leased = _LeasedCommand(command, SignalListener())
    try:
        asked = _asked(command, **options)
        check_there(address)
        code = asyncio.run(leased.take(Lease(*lease_func(asked)), address))
    except TaskTimeoutError as error:
        code = _print(str(error), NOT_IN_TIME)
    except click.ClickException as error:
        code = _print(error.message, FAILED)
    except AiogpuError as error:
        code = _print(str(error), FAILED)
    ctx.exit(code if code is not None else end_like(leased.status))


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


def _print(text: str, code: int = 0) -> int:
    click.echo(f"aiogpu run: {text}", err=True)
    return code


class _LeasedCommand:
    """Acquires the lease, runs the command, waits for the processes that it started.

    Attributes:
        status: the wait status to end with: that of a signal, or of the command.
    """

    def __init__(self, command: Sequence[str], signals: SignalListener) -> None:
        self.status = 0
        self._arguments = command
        self._signals = signals

    async def take(self, lease: Lease, address: str) -> int | None:
        """Do all that; return the exit code, or None to end with `status`."""
        self._signals.listen(asyncio.get_running_loop())
        node = joining(address)
        if not await self._finishes_before_signal(node.__aenter__()):
            return None
        try:
            telling = asyncio.ensure_future(_show_reason(lease))
            try:
                if not await self._finishes_before_signal(lease.__aenter__()):
                    return None
            finally:
                telling.cancel()
                await asyncio.wait([telling])
            try:
                return await self._run(lease)
            finally:
                await lease.release()
        finally:
            await node.__aexit__(None, None, None)

    async def _finishes_before_signal(self, work: Coroutine[Any, Any, object]) -> bool:
        """Await `work`; if an ending signal comes first, cancel it and return False."""
        awaited = asyncio.ensure_future(work)

        def on_signal(number: signal.Signals, _: bool) -> None:
            if number in ENDING:
                self.status = number  # the wait status of a process that it ended
                awaited.cancel()

        self._signals.on_signal = on_signal
        await asyncio.wait([awaited])
        if self.status and awaited.cancelled():
            return False
        awaited.result()
        self.status = 0
        return True

    async def _run(self, lease: Lease) -> int | None:
        name = self._arguments[0]
        # A lease within a lease is marked as both.
        environ = {**os.environ, **lease.environ}
        if outer := os.environ.get(LEASE_MARK):
            environ[LEASE_MARK] = f"{outer},{lease.environ[LEASE_MARK]}"
        try:
            command = Command(self._arguments, environ, self._signals.mask)
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            code = NOT_FOUND if is_missing else NOT_EXECUTABLE
            return _print(f"{name}: {error.strerror}", code)
        self._signals.on_signal = command.hear
        command.hear(signal.SIGCHLD, True)  # it may have ended already
        watching = asyncio.ensure_future(_watch(lease, name))
        try:
            await command.ended
            self.status = command.status
            await self._await_rest(command, lease, name)
        finally:
            watching.cancel()
        return None

    async def _await_rest(self, command: Command, lease: Lease, name: str) -> None:
        """Wait for processes that the command left; an ending signal kills them."""
        left = command.left()
        if command.all_ended.done() or not left:
            return
        held = ", ".join(f"GPU {each}" for each in lease.ids) or "its lease"
        pids = ", ".join(map(str, left[:8])) + (", ..." if len(left) > 8 else "")
        _print(
            f"{name} has ended, but processes that it has started have not, and hold "
            f"{held}: pid {pids}. Ctrl-C ends them."
        )
        is_asked = False

        def kill(number: signal.Signals) -> None:
            for pid in command.left():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

        def on_signal(number: signal.Signals, is_kernels: bool) -> None:
            nonlocal is_asked
            if number not in ENDING:
                command.hear(number, is_kernels)
            elif is_asked:
                kill(signal.SIGKILL)
            else:
                is_asked = True
                kill(signal.SIGTERM)
                loop = asyncio.get_running_loop()
                loop.call_later(KILLED_AFTER, kill, signal.SIGKILL)

        self._signals.on_signal = on_signal
        await command.all_ended


async def _watch(lease: Lease, name: str) -> None:
    """Print a warning if the lease is lost."""
    error = await lease.lost()
    _print(
        f"{name} goes on, but its lease is gone and others may get its GPUs: {error}"
    )


async def _show_reason(lease: Lease) -> None:
    """Keep one line of the terminal with the reason for the wait, until cancelled."""
    if not sys.stderr.isatty():
        return
    is_shown = False
    try:
        await asyncio.sleep(SHOWN_AFTER)
        while True:
            why = await lease.why()
            if why.state == "waiting":
                told = "; ".join(map(str.strip, str(why).splitlines()))
                width = max(shutil.get_terminal_size().columns - 1, 20)
                text = f"aiogpu run: {told}"
                text = text if len(text) <= width else text[: width - 3] + "..."
                sys.stderr.write(f"\r{text}\x1b[K")
                sys.stderr.flush()
                is_shown = True
            await asyncio.sleep(1.0)
    except AiogpuError:
        pass  # the wait for the lease raises it as well
    finally:
        if is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
