"""`aiogpu timeline`: what has run on a node, as a file that Perfetto opens."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Final

import click

import aiogpu
from aiogpu.cli import connect
from aiogpu.engines.base import NodeOptions
from aiogpu.observe.trace import trace_of

if TYPE_CHECKING:
    from aiogpu.observe.recorder import Span


STDOUT: Final = "-"


@click.command()
@click.argument("out", metavar="FILE", type=click.Path(dir_okay=False))
@connect.address_option
def timeline(out: str, address: str) -> None:
    """Write what has run on the node to FILE, `-` for stdout.

    It is JSON in the Trace Event Format: open it at https://ui.perfetto.dev. The last
    20 000 tasks are in it, with a row for each device and for each worker.

    \b
    Example:
      aiogpu timeline out.json

    \b
    Exit codes:
      0  it is written
      1  no node runs, or the file cannot be written
      2  bad input
    """  # noqa: D301 - click's mark for lines to be left as they are
    connect.check_there(address)
    spans = aiogpu.run(_spans_of(connect.where(address)))
    text = json.dumps(trace_of(spans), separators=(",", ":"))
    if out == STDOUT:
        click.echo(text)
        return
    try:
        _write(out, text)
    except OSError as error:
        raise click.ClickException(f"{out}: {error.strerror}") from None
    click.echo(
        f"{len(spans)} tasks are in {out}; open it at https://ui.perfetto.dev", err=True
    )


async def _spans_of(path: str) -> list[Span]:
    from aiogpu.engines.remote import RemoteEngine

    options = NodeOptions(only_looks=True, log_to_driver=False)
    engine = RemoteEngine(path, options, asyncio.get_running_loop())
    await engine.open()
    try:
        return await engine.timeline()
    finally:
        await engine.close()


def _write(path: str, text: str) -> None:
    """Write it beside its place first: nobody finds half of it.

    What is no file, such as a pipe, stays what it is, and so does a link to a file.
    """
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
        return
    half = f"{path}.{os.getpid()}"
    try:
        with open(half, "x", encoding="utf-8") as file:
            file.write(f"{text}\n")
        os.replace(half, path)
    except BaseException:
        if os.path.exists(half):
            os.unlink(half)
        raise
