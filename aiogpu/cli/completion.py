"""`aiogpu completion`: the script by which a shell completes the command line."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

SHELLS: Final = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that has a shell complete `aiogpu` commands.

    Of `aiogpu why`, the tasks and actors that the running node has are completed too.

    \b
    Examples:
      eval "$(aiogpu completion bash)"        in ~/.bashrc
      eval "$(aiogpu completion zsh)"         in ~/.zshrc, after compinit
      aiogpu completion fish | source         in ~/.config/fish/config.fish
    """  # noqa: D301 - click's mark for lines to be left as they are
    from aiogpu.cli.main import COMPLETE, cli

    known = get_completion_class(shell)
    assert known is not None, shell
    script = known(cli, {}, "aiogpu", COMPLETE)
    # Its own `source()` starts a bash first, to see how old that is.
    click.echo(script.source_template % script.source_vars())
