"""`aiogpu run -- COMMAND`: run a command under a lease of the user's node.

The lease is held until the command and every process that it started have ended. Exit
codes: 125 if this program failed, 124 if the lease was not granted in time; 126, 127
and all others as from a shell.

The command stays in this process group: the kernel sends signals of the terminal, such
as Ctrl-C and Ctrl-Z, to both processes, and job control of the shell acts on both. This
process passes on signals that only it received.
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
from aiogpu.cli.terminal import echo, rewrite_line
from aiogpu.errors import AiogpuError, OptionError, TaskTimeoutError
from aiogpu.linux.procfs import descendants
from aiogpu.linux.syscalls import adopt_orphans
from aiogpu.wire.messages import LEASE_MARK

SENT_ON: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGCONT,
)
"""Signals that are passed on to the command."""
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end this process."""
STOP_DELAY: Final = 0.05
"""Seconds between a stop of the command and the stop of this process."""
NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126


class SignalListener:
    """Delivers the signals of this process on its event loop, with their senders.

    The signals are blocked and a thread waits for them, so that none is lost before the
    loop runs. `siginfo` says which signals the kernel sent to the command as well.
    """

    def __init__(self) -> None:
        # A signal that this process ignores, as by nohup(1), stays ignored.
        handled = {s for s in SENT_ON if signal.getsignal(s) is not signal.SIG_IGN}
        self._awaited = {*handled, signal.SIGCHLD}
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._awaited)
        self.on_signal: Callable[[signal.Signals, bool], object] = lambda *_: None

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call `on_signal(signal, is_from_kernel)` on the loop for each signal."""
        run = Thread(target=self._run, args=(loop,), name="signals", daemon=True)
        run.start()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            info = signal.sigwaitinfo(self._awaited)
            event = signal.Signals(info.si_signo), info.si_code > 0
            try:
                loop.call_soon_threadsafe(lambda event: self.on_signal(*event), event)
            except RuntimeError:
                return  # the loop is closed


class Command:
    """A running command, and the processes that it starts.

    Attributes:
        status: the wait status of the command, once it has ended.
        ended: done when the command has ended.
        all_ended: done when every process that the command started has ended.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        mask: Iterable[int],
    ) -> None:
        """Start the command; call this on the loop that calls `on_signal`.

        Args:
            arguments: the name of the command and its arguments.
            environ: the environment of the command.
            mask: the signals that are blocked in the command.

        Raises:
            OSError: the command does not exist, or cannot be executed.
        """
        loop = asyncio.get_running_loop()
        self.status = 0
        self.ended: asyncio.Future[None] = loop.create_future()
        self.all_ended: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._stopping: asyncio.TimerHandle | None = None
        adopt_orphans()
        # Python ignores these two signals; the command must not inherit that.
        own = (signal.SIGPIPE, signal.SIGXFSZ)
        self.pid = os.posix_spawnp(
            arguments[0],
            list(arguments),
            dict(environ),
            setsigmask=tuple(mask),
            setsigdef=own,
        )

    def on_signal(self, number: signal.Signals, is_from_kernel: bool) -> None:
        """Reap children, or pass a signal on; see `SignalListener`."""
        if number is signal.SIGCHLD:
            self._reap()
        elif not is_from_kernel and not self.ended.done():
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

    def left_behind(self) -> list[int]:
        """Return the descendants of this process that have not ended."""
        return [stat.pid for stat in descendants(os.getpid()) if stat.state != "Z"]


def _stop_as_well() -> None:
    """Stop this process too, so that its shell sees that the command is stopped."""
    os.kill(os.getpid(), signal.SIGSTOP)


def end_like(status: int) -> int:
    """End by the same signal as a command; without a signal return its exit code."""
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    import resource

    number = os.WTERMSIG(status)
    sys.stdout.flush()
    sys.stderr.flush()
    # A core dump of the command is useful, a core dump of this process is not.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    return 128 + number


FAILED: Final = 125
NOT_IN_TIME: Final = 124
SHOWN_AFTER: Final = 0.3
"""Seconds of waiting before the reason is shown; then it is updated each second."""
KILLED_AFTER: Final = 2.0
"""Seconds between SIGTERM and SIGKILL for processes that a command left behind."""
NAMED: Final = 40
"""Most characters of the command line in the name of its lease."""


class RunUsageError(click.UsageError):
    """A usage error of `aiogpu run`; not 2, which may be the command's own code."""

    exit_code = FAILED


class RunCommand(click.Command):
    """A click command whose usage errors are `RunUsageError`."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """See click; usage errors get another exit code."""
        try:
            return super().make_context(*args, **extra)
        except click.UsageError as error:
            raise RunUsageError(error.format_message(), error.ctx) from None


@click.command(cls=RunCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--num-gpus",
    type=Number(0),
    help="Share of one GPU below 1, or whole GPUs; default 1 if no other resource is "
    "given.",
)
@click.option("--num-cpus", type=Number(0), help="CPUs to reserve; default 0.")
@click.option(
    "--gpu-memory",
    type=size_or_share,
    metavar="SIZE",
    help="Memory on each GPU, with or instead of --num-gpus: 6GiB, or `share` for the "
    "same fraction as --num-gpus. JAX, CuPy and TensorFlow are limited to it.",
)
@click.option(
    "--gpu-type", metavar="TYPE", help="Only GPUs of this type, as in `aiogpu gpus`."
)
@click.option(
    "--resources", metavar="JSON", help="""Other resources: '{"license": 1}'."""
)
@click.option(
    "--priority",
    type=int,
    default=0,
    help="Commands with a higher number go first; default 0.",
)
@click.option("--name", help="Name in `aiogpu status`; default the command.")
@click.option(
    "--timeout",
    type=Seconds(0, min_open=True),
    help="Longest wait for the resources; then exit with 124.",
)
@service_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, /, command: Sequence[str], **options: Any) -> None:
    """Run COMMAND with reserved GPUs, as soon as they are free.

    Variables such as CUDA_VISIBLE_DEVICES name the GPUs. COMMAND holds them until it
    and every process that it started have ended. During the wait, a line in the
    terminal shows the reason. COMMAND inherits the input, output and process group,
    and gets these signals: SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH
    and SIGCONT.

    \b
    Example:
      aiogpu run --num-gpus=0.5 -- python train.py

    \b
    Exit codes are those of COMMAND (if a signal ends COMMAND, the same signal), or:
      124  --timeout has passed
      125  no node runs, the node has too few resources, or an option is bad
      126  COMMAND cannot be executed
      127  COMMAND is not found
    """  # noqa: D301 - click's mark for lines to be left as they are
    address = options.pop("address")
    leased = _LeasedCommand(command, SignalListener())
    try:
        lease_options = _lease_options(command, **options)
        check_there(address)
        code = asyncio.run(leased.run(Lease(*lease_func(lease_options)), address))
    except TaskTimeoutError as error:
        code = _print(str(error), NOT_IN_TIME)
    except click.ClickException as error:
        code = _print(error.message, FAILED)
    except AiogpuError as error:
        code = _print(str(error), FAILED)
    ctx.exit(code if code is not None else end_like(leased.status))


def _lease_options(
    command: Sequence[str], gpu_type: str | None, resources: str | None, **rest: Any
) -> dict[str, Any]:
    """Return the options of the lease."""
    options = {option: value for option, value in rest.items() if value is not None}
    if gpu_type is not None:
        options["accelerator_type"] = gpu_type
    if resources is not None:
        try:
            options["resources"] = json.loads(resources)
        except ValueError as error:
            raise OptionError(
                f"--resources={resources!r} is not JSON ({error}); write it such as "
                f"--resources='{{\"license\": 1}}'."
            ) from None
    if not options.keys() & {"num_gpus", "num_cpus", "gpu_memory", "resources"}:
        options["num_gpus"] = 1
    if not options.get("name"):
        line = shlex.join(command)
        options["name"] = line if len(line) <= NAMED else line[: NAMED - 3] + "..."
    return options


def _print(text: str, code: int = 0) -> int:
    echo(f"aiogpu run: {text}", err=True)
    return code


class _LeasedCommand:
    """Acquires the lease, runs the command, waits for the processes that it started.

    Attributes:
        status: the wait status to end with, of the command or of an ending signal.
    """

    def __init__(self, command: Sequence[str], signals: SignalListener) -> None:
        self.status = 0
        self._arguments = command
        self._signals = signals

    async def run(self, lease: Lease, address: str) -> int | None:
        """Join the node and run; return the exit code, or None to end with `status`."""
        self._signals.listen(asyncio.get_running_loop())
        node = joining(address)
        if not await self._finishes_before_signal(node.__aenter__()):
            return None
        try:
            display = asyncio.ensure_future(_show_reason(lease))
            try:
                if not await self._finishes_before_signal(lease.__aenter__()):
                    return None
            finally:
                display.cancel()
                await asyncio.wait([display])
            try:
                return await self._run_command(lease)
            finally:
                await lease.release()
        finally:
            await node.__aexit__(None, None, None)

    async def _finishes_before_signal(self, work: Coroutine[Any, Any, object]) -> bool:
        """Await `work`; if an ending signal comes first, cancel it and return False."""
        awaited = asyncio.ensure_future(work)

        def on_signal(number: signal.Signals, _: bool) -> None:
            if number in ENDING:
                self.status = number  # the wait status of a process ended by it
                awaited.cancel()

        self._signals.on_signal = on_signal
        await asyncio.wait([awaited])
        if self.status and awaited.cancelled():
            return False
        awaited.result()
        self.status = 0
        return True

    async def _run_command(self, lease: Lease) -> int | None:
        name = self._arguments[0]
        # A process in nested leases carries the marks of both.
        environ = {**os.environ, **lease.environ}
        if outer := os.environ.get(LEASE_MARK):
            environ[LEASE_MARK] = f"{outer},{lease.environ[LEASE_MARK]}"
        try:
            command = Command(self._arguments, environ, self._signals.mask)
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            code = NOT_FOUND if is_missing else NOT_EXECUTABLE
            return _print(f"{name}: {error.strerror}", code)
        self._signals.on_signal = command.on_signal
        command.on_signal(signal.SIGCHLD, True)  # the command may have ended already
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
        left = command.left_behind()
        if command.all_ended.done() or not left:
            return
        devices = ", ".join(f"GPU {each}" for each in lease.ids) or "its lease"
        pids = ", ".join(map(str, left[:8])) + (", ..." if len(left) > 8 else "")
        _print(
            f"{name} has ended, but processes that it started still run and hold "
            f"{devices}: pid {pids}. Ctrl-C ends them."
        )
        is_ending = False

        def kill(number: signal.Signals) -> None:
            for pid in command.left_behind():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

        def on_signal(number: signal.Signals, is_from_kernel: bool) -> None:
            nonlocal is_ending
            if number not in ENDING:
                command.on_signal(number, is_from_kernel)
            elif is_ending:
                kill(signal.SIGKILL)
            else:
                is_ending = True
                kill(signal.SIGTERM)
                loop = asyncio.get_running_loop()
                loop.call_later(KILLED_AFTER, kill, signal.SIGKILL)

        self._signals.on_signal = on_signal
        await command.all_ended


async def _watch(lease: Lease, name: str) -> None:
    """Print a warning if the lease is lost."""
    error = await lease.lost()
    _print(
        f"{name} goes on, but its lease is lost and other programs may get its GPUs: "
        f"{error}"
    )


async def _show_reason(lease: Lease) -> None:
    """Show the reason for the wait on one line of the terminal, until cancelled."""
    if not sys.stderr.isatty():
        return
    is_shown = False
    try:
        await asyncio.sleep(SHOWN_AFTER)
        while True:
            why = await lease.why()
            if why.state == "waiting":
                reason = "; ".join(map(str.strip, str(why).splitlines()))
                width = max(shutil.get_terminal_size().columns - 1, 20)
                text = f"aiogpu run: {reason}"
                text = text if len(text) <= width else text[: width - 3] + "..."
                rewrite_line(text)
                is_shown = True
            await asyncio.sleep(1.0)
    except AiogpuError:
        pass  # the wait for the lease raises the same error
    finally:
        if is_shown:
            rewrite_line("")
