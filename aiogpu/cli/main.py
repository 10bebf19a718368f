"""The `aiogpu` command: finds the subcommand and ends with the right exit code.

Subcommands are imported when they are asked for, so that `aiogpu --version` is
quick. 0 is success, 1 a failure, 2 bad input, 130 an interrupt.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Final, NoReturn

import click

import aiogpu
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


@click.group(cls=LateGroup, invoke_without_command=True)
@click.version_option(aiogpu.__version__, prog_name="aiogpu")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run tasks on fractional GPUs from your own event loop."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> NoReturn:
    """Run the command line and exit."""
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
    sys.exit(code or 0)
