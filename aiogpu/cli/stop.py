"""`aiogpu stop`: end this box's node, with what runs on it or after that."""

from __future__ import annotations

import click

from aiogpu.cli import joining
from aiogpu.cli.quantities import Seconds
from aiogpu.core.model.text import span
from aiogpu.daemon.pidfile import Record
from aiogpu.daemon.place import Place
from aiogpu.daemon.stop import stop as stop_node


@click.command()
@joining.address_option
@click.option("--force", is_flag=True, help="Kill it, with all that runs on it.")
@click.option(
    "--drain",
    type=Seconds(0),
    help="Seconds for what runs; those of `aiogpu start` if not given.",
)
def stop(address: str, force: bool, drain: float | None) -> None:
    """Stop the node that `aiogpu start` has started.

    It takes no new work, lets what runs end for a while, then ends it. Said twice, it
    ends at once. The exit code is 0 if no node runs afterwards.
    """
    if force and drain is not None:
        raise click.UsageError("--force leaves no time for --drain; give one of them.")
    place = Place.at(joining.where(address))
    ended = stop_node(place, force=force, drain=drain, on_wait=_tell_wait)
    if ended is None:
        click.echo(f"No node runs at {place.socket}.")
        return
    how = "Killed" if ended.is_forced else "Stopped"
    click.echo(
        f"{how} the node at {ended.record.socket} (pid {ended.record.pid}) in "
        f"{span(ended.seconds)}."
    )


def _tell_wait(record: Record, seconds: float) -> None:
    click.echo(
        f"Stopping the node at {record.socket} (pid {record.pid}); what runs has "
        f"{span(seconds)} to end.",
        err=True,
    )
