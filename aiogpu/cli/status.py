"""`aiogpu status`: who holds what, what waits and why, at one glance."""

from __future__ import annotations

import asyncio
import json
from typing import Final

import click

import aiogpu
from aiogpu.cli import joining
from aiogpu.cli.data import problems, status_data
from aiogpu.cli.grid import printable_all
from aiogpu.cli.quantities import Seconds
from aiogpu.cli.screen import Picture, is_terminal
from aiogpu.cli.sections import sections

UNHEALTHY: Final = 3
"""Exit code of `--check` where a device is set aside."""


@click.command()
@joining.address_option
@click.option("--json", "as_json", is_flag=True, help="Tell programs, not people.")
@click.option("--check", is_flag=True, help="Exit with 3 if a device is set aside.")
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option(
    "--interval",
    type=Seconds(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two pictures of --watch.",
)
def status(
    address: str, as_json: bool, check: bool, watch: bool, interval: float
) -> int:
    """Show who holds what on the running node, what waits and why.

    In a terminal as tables, elsewhere as plain lines. --json is one object, as
    docs/service-json.md describes it; with --watch one on each line.

    \b
    Examples:
      aiogpu status
      aiogpu status --json | jq .waiting.tasks
      aiogpu status --check > /dev/null || echo "a GPU is ill"

    \b
    Exit codes:
      0  the node has answered
      1  no node runs
      2  bad input
      3  --check: a device is set aside
    """  # noqa: D301 - click's mark for lines to be left as they are
    seen = aiogpu.run(_look(address, as_json, interval if watch else None))
    return UNHEALTHY if check and problems(seen) else 0


async def _look(
    address: str, as_json: bool, interval: float | None
) -> aiogpu.NodeStatus:
    """Show it once, or until somebody has seen enough."""
    async with joining.joined(address) as node:
        seen = await node.status()
        if interval is None:
            _show_once(seen, as_json)
            return seen
        with Picture(is_live=is_terminal() and not as_json) as picture:
            while True:
                if as_json:
                    click.echo(json.dumps(status_data(seen)))
                elif picture.is_live:
                    picture.draw(sections(seen, picture.width))
                else:
                    click.echo(plain_report(seen) + "\n")
                await asyncio.sleep(interval)
                seen = await node.status()


def _show_once(seen: aiogpu.NodeStatus, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(status_data(seen), indent=1))
    elif is_terminal():
        with Picture(is_live=False) as picture:
            picture.draw(sections(seen, picture.width))
    else:
        click.echo(plain_report(seen))


def plain_report(seen: aiogpu.NodeStatus) -> str:
    """Return what `print(status)` shows, such that it can do nothing to a terminal."""
    return str(printable_all(seen))
