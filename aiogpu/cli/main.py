"""The `aiogpu` command: finds the subcommand and ends with the right exit code.

Subcommands are imported when they are asked for, so that `aiogpu --version` is
quick. 0 is success, 1 a failure, 2 bad input, 130 an interrupt, 141 a pipe that
nobody reads.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final, NoReturn

import click

import aiogpu
from aiogpu.cli.streams import NO_ROOM, let_go, open_streams, written_out
from aiogpu.errors import AiogpuError, DeviceError, InfeasibleError, OptionError

COMMANDS: Final = (
    "completion",
    "demo",
    "doctor",
    "gpus",
    "list",
    "logs",
    "run",
    "start",
    "status",
    "stop",
    "timeline",
    "top",
    "why",
)
"""Each is a command of that name in the module `aiogpu.cli.<name>`."""
ELSEWHERE: Final = {
    "list": ("listing", "list_command"),
    "timeline": ("spans", "timeline"),
}
"""Those whose module has another name: module and attribute."""
COMPLETE: Final = "_AIOGPU_COMPLETE"
"""By this variable a shell asks what could be typed next; see `completion`."""
BAD_INPUT: Final = (OptionError, DeviceError, InfeasibleError)
INTERRUPTED: Final = 130
"""What shells report of a program that SIGINT ended: 128 + 2."""


class LateGroup(click.Group):
    """A group whose commands are imported by name."""

    def make_context(self, *given: Any, **more: Any) -> click.Context:
        """See click; `--help` is printed here."""
        with written_out():
            return super().make_context(*given, **more)

    def invoke(self, ctx: click.Context) -> Any:
        """See click."""
        with written_out():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See click; who mistypes a command is told which is like it."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            like = get_close_matches(args[0], COMMANDS)
            if not like:
                raise
            meant = " or ".join(map(repr, like))
            told = f"{error.message.rstrip('.')}. Did you mean {meant}?"
            raise click.UsageError(told, ctx) from None

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """The names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        """Import the command; None if there is none of that name."""
        if name not in COMMANDS:
            return None
        module, attribute = ELSEWHERE.get(name, (name, name))
        command: click.Command = getattr(
            import_module(f"aiogpu.cli.{module}"), attribute
        )
        return command


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
        click.echo(ctx.get_help())


def main() -> NoReturn:
    """Run the command line and exit."""
    open_streams()
    try:
        code = cli.main(standalone_mode=False, complete_var=COMPLETE)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        code = INTERRUPTED
    except AiogpuError as error:
        click.echo(f"Error: {error}", err=True)
        code = 2 if isinstance(error, BAD_INPUT) else 1
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        let_go()
        click.echo(f"Error: what is printed has no room: {error.strerror}.", err=True)
        code = 1
    sys.exit(code or 0)
