"""The `aiogpu` command: finds the subcommand and exits with the right code.

Subcommands are imported when they are used, so that `aiogpu --version` is quick. Exit
codes: 0 success, 1 failure, 2 bad input, 130 interrupt, 141 broken pipe. Each standard
stream may be closed, a broken pipe, or a file on a full disk.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, NoReturn

import click
from click.shell_completion import get_completion_class

import aiogpu
from aiogpu.cli.terminal import echo, open_streams, show_error
from aiogpu.errors import AiogpuError, DeviceError, InfeasibleError, OptionError

BROKEN_PIPE: Final = 141
"""The exit code that shells report for a program ended by SIGPIPE: 128 + 13."""
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def flushed_output() -> Iterator[None]:
    """Flush the output when the block ends.

    Raises:
        SystemExit: the pipe is broken, as after `| head`; no message is printed.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        sys.exit(BROKEN_PIPE)


def discard_output() -> None:
    """Redirect the standard output, so that the exit can flush its buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


COMMANDS: Final = {
    "cancel": ("stop", "cancel"),
    "completion": ("main", "completion"),
    "dashboard": ("views.dashboard", "dashboard"),
    "debug": ("debug", "debug"),
    "demo": ("demo", "demo"),
    "doctor": ("doctor", "doctor"),
    "gpus": ("doctor", "gpus"),
    "kill": ("stop", "kill"),
    "list": ("views.status", "list_command"),
    "logs": ("views.logs", "logs"),
    "run": ("run", "run"),
    "stack": ("views.stack", "stack"),
    "start": ("start", "start"),
    "status": ("views.status", "status"),
    "stop": ("start", "stop"),
    "timeline": ("views.logs", "timeline"),
    "top": ("views.top", "top"),
    "why": ("views.status", "why"),
}
"""The module in `aiogpu.cli` of each command, and its name in the module."""
COMPLETE: Final = "_AIOGPU_COMPLETE"
"""The environment variable by which a shell requests completions."""
BAD_INPUT: Final = (OptionError, DeviceError, InfeasibleError)
INTERRUPTED: Final = 130
"""The exit code that shells report for a program ended by SIGINT: 128 + 2."""


class LateGroup(click.Group):
    """A group whose commands are imported by name."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """See click; prints `--help`, which may hit a broken pipe."""
        with flushed_output():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """See click."""
        with flushed_output():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See click; suggest similar commands for an unknown one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            similar = get_close_matches(args[0], COMMANDS)
            if not similar:
                raise
            hint = " or ".join(map(repr, similar))
            message = f"{error.message.rstrip('.')}. Did you mean {hint}?"
            raise click.UsageError(message, ctx) from None

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        """Import a command by name; return None for an unknown name."""
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name]
        imported = import_module(f"aiogpu.cli.{module}")
        return getattr(imported, attribute)  # type: ignore[no-any-return]


@click.group(
    cls=LateGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(aiogpu.__version__, prog_name="aiogpu")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run tasks on fractional GPUs from your own event loop."""
    if ctx.invoked_subcommand is None:
        echo(ctx.get_help())


def main() -> NoReturn:
    """Run the command line and exit."""
    open_streams()
    try:
        code = cli.main(standalone_mode=False, complete_var=COMPLETE)
    except click.ClickException as error:
        show_error(error)
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        echo("Interrupted.", err=True)
        code = INTERRUPTED
    except AiogpuError as error:
        echo(f"Error: {error}", err=True)
        code = 2 if isinstance(error, BAD_INPUT) else 1
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        discard_output()
        echo(f"Error: cannot write the output: {error.strerror}.", err=True)
        code = 1
    sys.exit(code or 0)


SHELLS: Final = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a shell script that enables completion of `aiogpu` commands.

    After `aiogpu why`, `cancel` and `kill`, the names of tasks and actors of the
    running node are completed too.

    \b
    Examples:
      eval "$(aiogpu completion bash)"        in ~/.bashrc
      eval "$(aiogpu completion zsh)"         in ~/.zshrc, after compinit
      aiogpu completion fish | source         in ~/.config/fish/config.fish
    """  # noqa: D301 - click's mark for lines to be left as they are
    shell_class = get_completion_class(shell)
    assert shell_class is not None, shell
    script = shell_class(cli, {}, "aiogpu", COMPLETE)
    # Not `script.source()`, which starts bash to check its version.
    echo(script.source_template % script.source_vars())
